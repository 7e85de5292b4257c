# SPDX-License-Identifier: Apache-2.0
"""All-gather inside one node around a ring: every rank stores to its successor only, and passes on
what it gets.

The ring is for large messages, because a rank then stores to one GPU at a time instead of all of
them. On 4 H200s it was the fastest at 64 MB per rank, and slower than ``exchange_direct`` below 16
MB. Only a caller or a tuning table chooses it, because it was not measured on 8 GPUs.

Data flow, seen from rank r of W with n = r + 1 and p = r - 1 (both modulo W) and a segment of
``nbytes`` bytes, cut into ``chunks`` chunks of ``chunk`` bytes; o = r - s (modulo W) is whose
segment step s moves::

    step 0         source --stores--> inbox[slot, r] on n; then a release of the chunk's signal;  source --> out[r]
    step 1..W-2    once the signal of o's chunk is there:
                   inbox[slot, o] --stores--> inbox[slot, o] on n; then a release;  inbox[slot, o] --> out[o]
    step W-1       once it is there: inbox[slot, o] --copy--> out[o]

A chunk is passed on before it is copied out, because the next rank waits for it, and the copy finds
it in L2.

Signal map: ``arrived[slot, chunk, o]`` on rank r is set to the epoch by p, for every o, when p has
stored o's chunk there, and polled by the one thread block that moves that chunk.

Ordering: that of :mod:`tdcoll.primitives.stores`, for each hop; n acquires the signal before it
reads the chunk.

Reuse of a slot: a rank that completes has all chunks of all others, so all have started the epoch,
as :mod:`tdcoll.calls.context` requires. Only p writes into r's inbox and signals: slot ``e % 2``
again in epoch e + 2, after it has completed e + 1, for which it needed r's segment. By then r had
started e + 1, and was done with e.

Order of thread blocks: chunk by chunk, step by step. Any number of resident blocks makes progress,
because step s of a chunk waits for step s - 1 of the same chunk on p, which has a smaller index
there.

In place (an inbox of one slot): the symmetric buffer is the inbox, and nothing is copied out. The
first thread block first tells p that this rank has entered the call (``entered``), and every thread
block that stores waits until n has. Here p writes all segments but r's own, each chunk once, and r
waits for each: when its call is over, nothing is on the way to its buffer, and its own reads for n
are over.

When a wait expires, its record names p (or n, for ``entered``). If that rank itself waited for the
rank before it, look further up the ring for a rank that is named and raises nothing itself.
"""

import triton.language as tl

import tdcoll.language as tdl
from tdcoll.language.jit import jit
from tdcoll.primitives import stores
from tdcoll.primitives.group import chunk_bytes, in_stream_order, row, segment, start


@jit
def all_gather_ring(
    source: tl.int64, out: tl.int64, inbox, g, out_stride: tl.int64, nbytes: tl.int64, chunk: tl.int64
):  # fmt: skip
    """``[nbytes] -> [world * nbytes]`` inside one node. Thread blocks: ``world`` for each chunk.

    Args: those of ``exchange_direct``.
    """
    in_stream_order()
    chunk_index = tl.program_id(0) // g.world
    step = tl.program_id(0) % g.world
    origin = (g.rank - step + g.world) % g.world
    after = (g.rank + 1) % g.world
    before = (g.rank + g.world - 1) % g.world
    after_delta = tl.load(inbox.deltas + after)
    after_signal_delta = tl.load(g.deltas + after)
    before_signal_delta = tl.load(g.deltas + before)
    epoch, alive = start(g)
    if alive == 0:
        return
    size = chunk_bytes(nbytes, chunk, chunk_index)
    offset = tl.cast(chunk_index, tl.int64) * chunk
    landing = segment(inbox, g, epoch, origin) + offset
    signals = row(g, epoch, chunk_index)
    held = landing
    here = tl.cast(1, tl.int32)
    if step == 0:
        held = source + offset
    else:
        index = chunk_index * g.world + origin
        here = tdl.wait_signal(signals + origin, tdl.CMP_GE, epoch, g.monitor, before, index)
    if here != 0:
        if step < g.world - 1:
            if inbox.slots == 1:
                if tl.program_id(0) == 0:
                    stores.signal_entered(g, before_signal_delta, epoch)
            if stores.may_write(g, inbox, after, epoch) != 0:
                stores.push(
                    landing, held, size, after_delta, signals + origin, after_signal_delta, epoch
                )
        if inbox.slots == 2:
            tdl.copy_block(out + tl.cast(origin, tl.int64) * out_stride + offset, held, size)
