# SPDX-License-Identifier: Apache-2.0
"""Reduce-scatter of a symmetric tensor inside one node: every rank reads its part where it lies on the others.

Scope: one node whose ranks can address each other's memory; ``source`` is symmetric, at the same offset on all ranks;
any dtype that can be reduced; messages that are bound by bandwidth. A part crosses NVLink once, as by
``kernels_direct``. A call of any size is one epoch, because no part is stored to an inbox or loaded from it. It takes
more hops, because the ranks tell each other when ``source`` may be read, and when it has been read.

Data flow, seen from rank r, whose ``source`` has a part of ``nbytes`` bytes for each rank, cut into chunks::

    entered --> every other rank: source is there
    source[r] on rank 0, ..., on rank world - 1 --loads, sum in rank order--> out; then the chunk's signal to every rank

Signal map: ``entered[s]`` on rank r is set to the epoch by rank s, and polled by every thread block that sums.
``arrived[slot, chunk, s]`` on rank r is set by rank s when it has read that chunk of its part here, and polled by the
last thread block, which thereby hears from every rank. ``gave_up[s]`` on rank r is set by the last thread block of rank
s if it has not heard from every peer in time, and looked at by every thread block that has summed.

Ordering: the kernel that filled ``source`` is earlier on the stream, and therefore before the release of ``entered``,
which the summing thread blocks acquire. A release comes after the loads of its block, because its barrier has waited
for them. The loads therefore come before the later work of the rank that acquires the signal, for example when it fills
``source`` anew.

A rank that gives up may still overwrite ``source``, and a late peer would then sum the new numbers. It therefore tells
its peers before its launch ends, and they check after their loads, see :mod:`tdcoll.primitives.stores`. The last thread
block tells, because it knows whether all peers have finished reading. It also tells if it starts after another thread
block has timed out, because the first thread block may have announced that ``source`` is there. If all thread blocks
start after that, no peer was invited to read. The check comes after the release, so it overlaps with the signal's
latency: a barrier, and ``world - 1`` loads at once from this GPU's memory.

Order of thread blocks: the first says that the rank has entered before it waits. Thread blocks that sum wait for that
alone. Any number of resident blocks makes progress, because the last one waits for thread blocks that sum on other
ranks, which come before it there.

In place: ``out`` may be ``source[r]``. No other rank reads that part, and every element of it is read by the thread
block that then writes it.
"""

import triton.language as tl

import tdcoll.language as tdl
from tdcoll.language.jit import jit
from tdcoll.primitives import stores
from tdcoll.primitives.group import chunk_bytes, in_stream_order, row, start
from tdcoll.primitives.sums import reduce_chunk


@jit
def reduce_scatter_pull(
    source: tl.int64, out: tl.int64, source_stride: tl.int64, inbox, g, nbytes: tl.int64, chunk: tl.int64,
    chunks: tl.int32, DTYPE: tl.constexpr, ACC: tl.constexpr, OP: tl.constexpr, COUNT: tl.constexpr,
    WAITED: tl.constexpr,
):  # fmt: skip
    """``[world, nbytes] -> [nbytes]`` inside one node. Thread blocks: ``chunks + 1``.

    Args: those of ``reduce_scatter_direct``, except
        source: symmetric, at the same offset on all ranks.
        inbox: :class:`~tdcoll.primitives.group.Inbox` of one slot, for its deltas.
        chunks: number of chunks.
    """
    in_stream_order()
    chunk_index = tl.program_id(0)
    epoch, alive = start(g)
    if chunk_index == chunks:
        heard = alive
        if alive != 0:
            for i in tl.range(0, chunks):
                heard &= tdl.wait_signals(row(g, epoch, i), g.world, g.rank, tdl.CMP_GE, epoch, g.monitor, WAITED)
        if heard == 0:
            stores.tell_gave_up(g, epoch)
        return
    if alive == 0:
        return
    if chunk_index == 0:
        stores.release_to_all(g, g.entered + g.rank, epoch)
    if tdl.wait_signals(g.entered, g.world, g.rank, tdl.CMP_GE, epoch, g.monitor, WAITED) != 0:
        own = source + tl.cast(g.rank, tl.int64) * source_stride
        offset = tl.cast(chunk_index, tl.int64) * chunk
        size = chunk_bytes(nbytes, chunk, chunk_index)
        aligned = (source | source_stride | out | nbytes) % 16 == 0
        reduce_chunk(0, 1, own, out, offset, size, inbox, g, None, epoch, aligned, DTYPE, ACC, OP, COUNT)
        stores.release_to_all(g, row(g, epoch, chunk_index) + g.rank, epoch)
        stores.none_gave_up(g, WAITED)
