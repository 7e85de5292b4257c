# SPDX-License-Identifier: Apache-2.0
"""All-gather and all-to-all inside one node by direct stores: no call into NVSHMEM between the data
and its signal.

Data flow, seen from rank r, whose ``source[p]`` is its segment for rank p (of an all-gather the
same for all), of ``nbytes`` bytes, cut into ``chunks`` chunks of ``chunk`` bytes::

    source[p] --stores--> inbox[slot, r] on rank p, for every other p, chunk by chunk; then a release of the signal
    inbox[slot, s] --copy--> out[s], for every other rank s, as soon as its signal is there;  source[r] --> out[r]

Signal map: ``arrived[slot, chunk, s]`` on rank r is set to the epoch by rank s, and polled by the
thread block that copies that chunk out.

Ordering: that of :mod:`tdcoll.primitives.stores`; the receiver acquires. Reuse of slots:
:mod:`tdcoll.calls.context`.

Order of thread blocks: chunk by chunk, so that those of a large message are copied out while later
ones are on their way. Any number of resident blocks makes progress, because thread block i of a
chunk sends to the i-th successor and then waits for the i-th predecessor, whose thread block i
sends to it.

In place (an inbox of one slot; all-gathers only): the caller's symmetric buffer is the inbox, and
nothing is copied. The thread block of chunk 0 first tells the rank from which it receives that this
rank has entered the call, and a thread block writes to a rank only when that rank has.

Counted (``COUNTED``, in place only): as in :mod:`tdcoll.collectives.all_gather.kernels_puts`.
"""

import triton.language as tl

import tdcoll.language as tdl
from tdcoll.language.jit import jit
from tdcoll.primitives import stores
from tdcoll.primitives.group import chunk_bytes, in_stream_order, row, segment, start


@jit
def used_bytes(segment, nbytes, COUNTED: tl.constexpr):
    """Return the bytes that the segment at address ``segment`` carries."""
    used = tl.cast(nbytes, tl.int64)
    if COUNTED:
        used = tl.minimum(tl.load(tl.cast(segment, tl.int64).to(tl.pointer_type(tl.int64))), used)
    return used


@jit
def receive_chunk(src_rank, chunk_index, own, out, out_stride, inbox, g, offset, size, epoch):
    """Copy the chunk of rank ``src_rank`` at byte ``offset`` of its segment to ``out``, when it is
    there; this rank's own from the segment at ``own``."""
    target = out + tl.cast(src_rank, tl.int64) * out_stride + offset
    if src_rank == g.rank:
        tdl.copy_block(target, own + offset, size)
    else:
        signal = row(g, epoch, chunk_index) + src_rank
        if (
            tdl.wait_signal(
                signal, tdl.CMP_GE, epoch, g.monitor, src_rank, chunk_index * g.world + src_rank
            )
            != 0
        ):
            tdl.copy_block(target, segment(inbox, g, epoch, src_rank) + offset, size)


@jit
def exchange_direct(
    source: tl.int64, out: tl.int64, inbox, g, source_stride: tl.int64, out_stride: tl.int64, nbytes: tl.int64,
    chunk: tl.int64, COUNTED: tl.constexpr,
):  # fmt: skip
    """``[nbytes] or [world, nbytes] -> [world, nbytes]`` inside one node. Thread blocks: ``world``
    for each chunk.

    Args (addresses are integers, so that all dtypes and alignments share one compilation):
        source: this rank's segments, the first for rank 0. In place: its segment of the buffer.
        out: the result, any memory of this GPU. Not used in place.
        inbox: :class:`~tdcoll.primitives.group.Inbox` of segments of at least ``nbytes`` bytes.
        g: :class:`~tdcoll.primitives.group.Group`.
        source_stride: bytes from the segment for one rank to that for the next; 0 if there is one
            for all.
        out_stride: bytes from the segment of one rank to that of the next in ``out``.
        nbytes: of a segment in this epoch.
        chunk: bytes of a chunk, a multiple of 16.
    """
    in_stream_order()
    chunk_index = tl.program_id(0) // g.world
    step = tl.program_id(0) % g.world
    to = (g.rank + step) % g.world
    src_rank = (g.rank - step + g.world) % g.world
    # Read before the epoch is: both take their time.
    to_delta = tl.load(inbox.deltas + to)
    to_signal_delta = tl.load(g.deltas + to)
    src_signal_delta = tl.load(g.deltas + src_rank)
    epoch, alive = start(g)
    if alive == 0:
        return
    offset = tl.cast(chunk_index, tl.int64) * chunk
    size = chunk_bytes(used_bytes(source, nbytes, COUNTED), chunk, chunk_index)
    given = source + tl.cast(to, tl.int64) * source_stride + offset
    taken = out + tl.cast(src_rank, tl.int64) * out_stride + offset
    if step == 0:
        if inbox.slots == 2:
            tdl.copy_block(taken, given, size)
    else:
        signals = row(g, epoch, chunk_index)
        if inbox.slots == 1:
            if chunk_index == 0:
                stores.signal_entered(g, src_signal_delta, epoch)
        if stores.may_write(g, inbox, to, epoch) != 0:
            mine = segment(inbox, g, epoch, g.rank) + offset
            stores.push(mine, given, size, to_delta, signals + g.rank, to_signal_delta, epoch)
            arrived = tdl.wait_signal(
                signals + src_rank,
                tdl.CMP_GE,
                epoch,
                g.monitor,
                src_rank,
                chunk_index * g.world + src_rank,
            )
            if inbox.slots == 2:
                if arrived != 0:
                    tdl.copy_block(taken, segment(inbox, g, epoch, src_rank) + offset, size)
