# SPDX-License-Identifier: Apache-2.0
"""Reduce-scatter inside one node by direct stores. NVSHMEM's device code is not needed.

Scope: one node whose ranks can store to each other's memory; any dtype that can be reduced. One
step: every part crosses NVLink once, which is the lower bound. Small messages are faster with
``kernels_words``.

Data flow, seen from rank r, whose ``source`` has a part of ``nbytes`` bytes for each rank, cut into
chunks::

    source[p] --stores--> inbox[slot, r] on rank p, for every other rank p; then a release of the chunk's signal
    inbox[slot, 0], ..., source[r], ..., inbox[slot, world - 1] --sum in rank order--> out

Signal map: ``arrived[slot, chunk, s]`` on rank r is set to the epoch by rank s, and polled by the
thread blocks that reduce that chunk. They wait for all ranks at once, because the sum takes them in
order.

Ordering: that of :mod:`tdcoll.primitives.stores`; the reducer acquires the signals. Reuse of a slot
follows from :mod:`tdcoll.calls.context`: when a rank has the signals of epoch e from all, all have
read the inbox of e - 1.

Order of thread blocks: chunk by chunk, and in a chunk the senders first. A sender doesn't wait. Any
number of resident blocks makes progress, because a reducer waits for the senders of its chunk on
other ranks, which come before the reducers of that chunk there. The chunks of a large message are
reduced while later ones are on their way.

In place: ``out`` may be ``source[r]``, of which each element is read by the thread block that then
writes it.
"""

import triton.language as tl

import tdcoll.language as tdl
from tdcoll.language.jit import jit
from tdcoll.primitives import stores
from tdcoll.primitives.group import chunk_bytes, in_stream_order, row, segment, start
from tdcoll.primitives.sums import reduce_chunk


@jit
def reduce_scatter_direct(
    source: tl.int64, out: tl.int64, source_stride: tl.int64, inbox, g, nbytes: tl.int64, chunk: tl.int64,
    reducers: tl.int32, placement, extra, DTYPE: tl.constexpr, ACC: tl.constexpr, OP: tl.constexpr,
    EPILOGUE: tl.constexpr, TILE: tl.constexpr, WORLD_POW2: tl.constexpr,
):  # fmt: skip
    """``[world, nbytes] -> [nbytes]`` inside one node. Thread blocks: ``world - 1 + reducers`` for
    each chunk.

    Args (addresses are integers, so that all ranks share one compilation):
        source: the parts, the first for rank 0; any alignment that ``DTYPE`` allows.
        source_stride: bytes from the part for one rank to that for the next.
        out: the result, ``nbytes`` bytes, any memory of this GPU; or this rank's part of
            ``source``.
        inbox: :class:`~tdcoll.primitives.group.Inbox` of two slots, segments of at least ``nbytes``
            bytes.
        g: :class:`~tdcoll.primitives.group.Group`.
        nbytes: of a part in this epoch.
        chunk: bytes of a chunk, a multiple of 16.
        reducers: thread blocks that reduce a chunk, tile by tile in turn.
        placement, extra, EPILOGUE: see :mod:`tdcoll.primitives.epilogue`; None without an epilogue.
        DTYPE, ACC, OP: of elements and of the accumulator; of
            :data:`tdcoll.primitives.reduce.OPERATIONS`.
        TILE: elements of a tile.
        WORLD_POW2: a power of two of at least ``world``.
    """
    in_stream_order()
    senders = g.world - 1
    chunk_index = tl.program_id(0) // (senders + reducers)
    given = tl.program_id(0) % (senders + reducers)
    to = (g.rank + 1 + given) % g.world
    # Read before the epoch is: both take their time.
    to_delta = tl.load(inbox.deltas + to)
    to_signal_delta = tl.load(g.deltas + to)
    epoch, alive = start(g)
    if alive == 0:
        return
    offset = tl.cast(chunk_index, tl.int64) * chunk
    size = chunk_bytes(nbytes, chunk, chunk_index)
    signals = row(g, epoch, chunk_index)
    if given < senders:
        mine = segment(inbox, g, epoch, g.rank) + offset
        part = source + tl.cast(to, tl.int64) * source_stride + offset
        stores.push(mine, part, size, to_delta, signals + g.rank, to_signal_delta, epoch)
    elif tdl.wait_signals(signals, g.world, g.rank, tdl.CMP_GE, epoch, g.monitor, WORLD_POW2) != 0:
        own = source + tl.cast(g.rank, tl.int64) * source_stride
        worker = given - senders
        aligned = (source | source_stride | out | nbytes) % 16 == 0
        reduce_chunk(
            worker,
            reducers,
            own,
            out,
            offset,
            size,
            inbox,
            g,
            None,
            epoch,
            aligned,
            (EPILOGUE, placement, extra),
            DTYPE,
            ACC,
            OP,
            TILE,
        )
