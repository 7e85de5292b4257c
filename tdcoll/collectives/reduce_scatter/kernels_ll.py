# SPDX-License-Identifier: Apache-2.0
"""Reduce-scatter of small messages inside one node: every word carries its own flag (LL).

Scope: one node whose ranks can store to each other's memory; dtypes of 2 and 4 bytes. (A word holds 96 bits: elements
of 8 bytes would lie across words. They go by ``kernels_direct``.) Data and flag cross NVLink together, once, where a
signal needs three crossings: see :mod:`tdcoll.primitives.ll`.

Data flow, seen from rank r::

    source[p] --{data, data, data, flag} words--> words[slot, r] on rank p, for every other rank p
    words[slot, 0], ..., source[r], ..., words[slot, world - 1] --sum in rank order--> out

Signal map: there are no signals. ``words[slot, s, i]`` on rank r is written by rank s, and polled by the program that
reduces word i. That program waits for rank after rank: so the sum is in rank order, whatever arrives first.

Ordering and flags: those of :mod:`tdcoll.primitives.ll`. Reuse of a slot is what :mod:`tdcoll.context` says: a rank
that has all words of epoch e knows that everybody has started e.

Order of programs: block by block, and in a block the senders first. A sender waits for nobody. The reducer of a block
waits for the senders of that block on other ranks, which come before the reducer there; so any number of resident
blocks makes progress.

In place: ``out`` may be ``source[r]``. Nobody else reads that part, and each word of it is loaded before it is stored.
"""

import triton.language as tl

from tdcoll.language.jit import jit
from tdcoll.primitives import ll
from tdcoll.primitives.elements import pack, unpack
from tdcoll.primitives.group import in_stream_order, start
from tdcoll.primitives.reduce import accumulate, finish, rounded

__all__ = ["reduce_scatter_ll"]


@jit
def _result(sum, world, DTYPE: tl.constexpr, OP: tl.constexpr):
    """The words of the result, of the sum of all parts."""
    return pack(rounded(finish(sum, world, OP), DTYPE, OP))


@jit
def reduce_scatter_ll(
    source: tl.int64, out: tl.int64, source_stride: tl.int64, words, g, nbytes: tl.int64,
    DTYPE: tl.constexpr, ACC: tl.constexpr, OP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``[world, nbytes] -> [nbytes]`` inside one node.

    Programs: ``world`` for each ``12 * BLOCK`` bytes, and as many for none.

    Args: those of ``reduce_scatter_direct``, except
        words: :class:`~tdcoll.primitives.group.Window` of at least ``ceil(nbytes / 12)`` words per segment, and 1.
        BLOCK: words of a program.
    """
    in_stream_order()
    size = tl.cast(nbytes, tl.int32)
    index = tl.program_id(0) // g.world * BLOCK + tl.arange(0, BLOCK)
    to = (g.rank + 1 + tl.program_id(0) % g.world) % g.world  # the last one reduces its own part
    part = source + tl.cast(to, tl.int64) * source_stride
    # Read before the epoch is: both take their time.
    delta = tl.load(words.deltas + to)
    mine1, mine2, mine3 = ll.load(part, index, size)
    epoch, alive = start(g)
    if alive == 0:
        return
    mine1, mine2, mine3 = ll.repair(part, index, size, mine1, mine2, mine3)
    mask = ll.carry(index, size)
    if to != g.rank:
        ll.send(g, words, g.rank, delta, index, mine1, mine2, mine3, epoch, mask)
    else:
        sum1 = tl.zeros_like(unpack(mine1, DTYPE, ACC))
        sum2 = sum1
        sum3 = sum1
        for r in tl.static_range(g.world):
            first = mine1
            second = mine2
            third = mine3
            if r != g.rank:
                first, second, third, arrived = ll.receive(g, words, r, index, epoch, mask)
                mask = mask & (arrived != 0)
            sum1 = accumulate(sum1, unpack(first, DTYPE, ACC), r == 0, OP)
            sum2 = accumulate(sum2, unpack(second, DTYPE, ACC), r == 0, OP)
            sum3 = accumulate(sum3, unpack(third, DTYPE, ACC), r == 0, OP)
        first = _result(sum1, g.world, DTYPE, OP)
        second = _result(sum2, g.world, DTYPE, OP)
        third = _result(sum3, g.world, DTYPE, OP)
        ll.store(out, index, size, first, second, third, mask)
