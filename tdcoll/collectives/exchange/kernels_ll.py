# SPDX-License-Identifier: Apache-2.0
"""All-gather and all-to-all of small messages inside one node: every word carries its own flag
(LL).

Data flow, seen from rank r, whose ``source[p]`` is its segment for rank p (of an all-gather the
same for all)::

    source[p] --{data, data, data, flag} words--> words[slot, r] on rank p, for every other rank p
    words[slot, s] --data--> out[s], for every other rank s;  source[r] --> out[r]

With LL, data and flag take one hop together: see :mod:`tdcoll.primitives.ll`, for the flags and the
ordering too. Reuse of a slot follows from :mod:`tdcoll.calls.context`: when a rank has all words of
epoch e, all ranks have started e. It is the same in place, because only this rank writes to the
caller's buffer.

Order of thread blocks: those of step i (``program_id // blocks``) send to the i-th successor, and
each then waits for the thread block of the same index on the i-th predecessor. Any number of
resident blocks therefore makes progress.
"""

import triton.language as tl

from tdcoll.language.jit import jit
from tdcoll.primitives import ll
from tdcoll.primitives.group import in_stream_order, start


@jit
def exchange_ll(
    source: tl.int64, out: tl.int64, words, g, source_stride: tl.int64, out_stride: tl.int64, nbytes: tl.int64,
    blocks: tl.int32, BLOCK: tl.constexpr,
):  # fmt: skip
    """``[nbytes] or [world, nbytes] -> [world, nbytes]`` inside one node. Thread blocks: ``world *
    blocks``.

    Args:
        source, out, source_stride, out_stride, g: as for ``exchange_direct``; an all-gather may be
            in place.
        words: :class:`~tdcoll.primitives.group.Inbox` of at least ``ceil(nbytes / 12)`` words per
            segment, and 1.
        blocks: thread blocks per peer, of ``BLOCK`` words each.
    """
    in_stream_order()
    block = tl.program_id(0) % blocks
    step = tl.program_id(0) // blocks
    to = (g.rank + step) % g.world
    src_rank = (g.rank - step + g.world) % g.world
    delta = tl.load(words.deltas + to)
    size = tl.cast(nbytes, tl.int32)
    index = block * BLOCK + tl.arange(0, BLOCK)
    given = source + tl.cast(to, tl.int64) * source_stride
    taken = out + tl.cast(src_rank, tl.int64) * out_stride
    parts = ll.load(given, index, size)
    epoch, alive = start(g)
    if alive == 0:
        return
    parts = ll.repair(given, index, size, parts)
    mask = ll.carry(index, size)
    if step == 0:
        if taken != given:  # not in place
            ll.store(taken, index, size, parts, mask)
    else:
        ll.send(g, words, g.rank, delta, index, parts, epoch, mask)
        first, second, third, arrived = ll.receive(g, words, src_rank, index, epoch, mask)
        ll.store(taken, index, size, (first, second, third), arrived != 0)
