# SPDX-License-Identifier: Apache-2.0
"""All-reduce of small messages inside one node, by words that need no signal: one-shot, or two-shot.

Scope: one node whose ranks can store to each other's memory; dtypes of 2 and 4 bytes. Floating types go by words that
announce themselves (:mod:`tdcoll.primitives.lamport`), where the context has memory for them; all others by words that
carry a flag (:mod:`tdcoll.primitives.ll`), a third more of them. (Elements of 8 bytes would lie across flagged words,
and have legal values with a sentinel in them: they go by ``kernels_direct``.)

**One-shot.** Every rank sends all of its data to all others, and every rank sums everything: one crossing, ``world -
1`` times the data. ::

    source --words--> inbox[slot, r] on every other rank
    inbox[slot, 0], ..., source, ..., inbox[slot, world - 1] --sum in rank order--> out

**Two-shot.** The data is cut into a part for each rank, which sums it and sends the sum on: two crossings, ``2 *
(world - 1) / world`` times the data. A part is a whole number of words, and parts at the end may be empty. ::

    source[p] --words--> first half of inbox[slot, r] on rank p, for every other rank p
    first halves of inbox[slot, 0], ..., source[r], ..., inbox[slot, world - 1] --sum in rank order--> out[r]
    out[r] --words--> second half of inbox[slot, r] on every other rank
    second half of inbox[slot, p] --> out[p]

The second half begins where the first ends, after as many words as a part has. It cannot be the first half again: a
peer that is ahead sends its sum while this rank still reads what that peer sent first.

Signal map: there are no signals. Words of ``inbox[slot, s]`` on rank r are written by rank s, and polled by the program
of rank r that has the number of the one which sent them.

Ordering and reuse of a slot: those of the words' own modules. A rank is done with a call when it has heard from every
peer in its last stage, also where it has nothing to receive: each program sends at least its first word to everybody.

Order of programs: program i sends before it waits, and waits for programs i of other ranks only. In two stages it waits
for what program i of a peer sends in the second, which that one does when it has the words of the first stage from all
programs i. So any number of resident blocks makes progress.

In place: ``out`` may be ``source``. Each program stores to the words that it has loaded before, and to no others.

Bits: sums are in rank order, in the accumulator's type, rounded once; in two stages it is the rounded sum that travels.
So they are those of every other algorithm, on every rank. A sender of words that announce themselves sends a -0.0 as
+0.0, which changes no result: none is -0.0 (:mod:`tdcoll.primitives.reduce`).
"""

import triton.language as tl

from tdcoll.language.jit import jit
from tdcoll.primitives import lamport, ll
from tdcoll.primitives.elements import pack, unpack
from tdcoll.primitives.group import in_stream_order, start
from tdcoll.primitives.reduce import accumulate, finish, rounded

__all__ = ["all_reduce_one_shot", "all_reduce_two_shot"]


@jit
def _load(source, word, nbytes, LAMPORT: tl.constexpr):
    """Four parts of words, of which flagged ones have three."""
    if LAMPORT:
        first, second, third, fourth = lamport.load(source, word, nbytes)
    else:
        first, second, third = ll.load(source, word, nbytes)
        fourth = first
    return first, second, third, fourth


@jit
def _repair(source, word, nbytes, first, second, third, fourth, LAMPORT: tl.constexpr):
    if LAMPORT:
        first, second, third, fourth = lamport.repair(source, word, nbytes, first, second, third, fourth)
    else:
        first, second, third = ll.repair(source, word, nbytes, first, second, third)
        fourth = first
    return first, second, third, fourth


@jit
def _store(out, word, nbytes, first, second, third, fourth, mask, LAMPORT: tl.constexpr):
    if LAMPORT:
        lamport.store(out, word, nbytes, first, second, third, fourth, mask)
    else:
        ll.store(out, word, nbytes, first, second, third, mask)


@jit
def _start(g, inbox, LAMPORT: tl.constexpr):
    """``(number of this call, alive)``."""
    if LAMPORT:
        call, alive = lamport.start(g, inbox)
    else:
        call, alive = start(g)
    return call, alive


@jit
def _send_to_all(g, inbox, word, first, second, third, fourth, call, mask, LAMPORT: tl.constexpr):
    """Words of this rank to every other one, to its successor first."""
    for step in tl.static_range(1, g.world):
        delta = tl.load(g.deltas + (g.rank + step) % g.world)
        if LAMPORT:
            lamport.send(g, inbox, g.rank, delta, word, first, second, third, fourth, call, mask)
        else:
            ll.send(g, inbox, g.rank, delta, word, first, second, third, call, mask)


@jit
def _receive(g, inbox, origin, word, call, mask, LAMPORT: tl.constexpr):
    if LAMPORT:
        first, second, third, fourth, arrived = lamport.receive(g, inbox, origin, word, call, mask)
    else:
        first, second, third, arrived = ll.receive(g, inbox, origin, word, call, mask)
        fourth = first
    return first, second, third, fourth, mask & (arrived != 0)


@jit
def _sum(
    g, inbox, word, mine1, mine2, mine3, mine4, call, mask, DTYPE: tl.constexpr, ACC: tl.constexpr, OP: tl.constexpr,
    LAMPORT: tl.constexpr,
):  # fmt: skip
    """``(words of the result, mask)``: ``mine`` and what all others have sent, in rank order."""
    sum1 = tl.zeros_like(unpack(mine1, DTYPE, ACC))
    sum2 = sum1
    sum3 = sum1
    sum4 = sum1
    for r in tl.static_range(g.world):
        part1 = mine1
        part2 = mine2
        part3 = mine3
        part4 = mine4
        if r != g.rank:
            part1, part2, part3, part4, mask = _receive(g, inbox, r, word, call, mask, LAMPORT)
        sum1 = accumulate(sum1, unpack(part1, DTYPE, ACC), r == 0, OP)
        sum2 = accumulate(sum2, unpack(part2, DTYPE, ACC), r == 0, OP)
        sum3 = accumulate(sum3, unpack(part3, DTYPE, ACC), r == 0, OP)
        if LAMPORT:
            sum4 = accumulate(sum4, unpack(part4, DTYPE, ACC), r == 0, OP)
    first = pack(rounded(finish(sum1, g.world, OP), DTYPE, OP))
    second = pack(rounded(finish(sum2, g.world, OP), DTYPE, OP))
    third = pack(rounded(finish(sum3, g.world, OP), DTYPE, OP))
    fourth = first
    if LAMPORT:
        fourth = pack(rounded(finish(sum4, g.world, OP), DTYPE, OP))
    return first, second, third, fourth, mask


@jit
def all_reduce_one_shot(
    source: tl.int64, out: tl.int64, inbox, g, nbytes: tl.int64,
    DTYPE: tl.constexpr, ACC: tl.constexpr, OP: tl.constexpr, LAMPORT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``[nbytes] -> [nbytes]`` inside one node. Programs: one for each BLOCK words, and at least one.

    Args (addresses are integers, so that one compilation serves all ranks):
        source: any memory of this GPU, of any alignment that ``DTYPE`` allows.
        out: the result, likewise; may be ``source``.
        inbox: :class:`~tdcoll.primitives.lamport.Lamport`, or with flags :class:`~tdcoll.primitives.group.Window`, with
            room in each segment for all words of a rank.
        g: :class:`~tdcoll.primitives.group.Group`.
        nbytes: of a rank's data.
        DTYPE, ACC, OP: of elements and of the accumulator; of :data:`tdcoll.primitives.reduce.OPERATIONS`.
        LAMPORT: the words announce themselves and hold 16 bytes; else they carry a flag and hold 12.
        BLOCK: words of a program.
    """
    in_stream_order()
    size = tl.cast(nbytes, tl.int32)
    word = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # Read before the number of the call is: both take their time.
    first, second, third, fourth = _load(source, word, size, LAMPORT)
    call, alive = _start(g, inbox, LAMPORT)
    if alive == 0:
        return
    first, second, third, fourth = _repair(source, word, size, first, second, third, fourth, LAMPORT)
    if LAMPORT:
        mask = lamport.carry(word, size)
    else:
        mask = ll.carry(word, size)
    _send_to_all(g, inbox, word, first, second, third, fourth, call, mask, LAMPORT)
    if LAMPORT:
        lamport.clear(g, inbox, call, size, BLOCK)
    first, second, third, fourth, mask = _sum(
        g, inbox, word, first, second, third, fourth, call, mask, DTYPE, ACC, OP, LAMPORT
    )
    _store(out, word, size, first, second, third, fourth, mask, LAMPORT)


@jit
def all_reduce_two_shot(
    source: tl.int64, out: tl.int64, inbox, g, nbytes: tl.int64,
    DTYPE: tl.constexpr, ACC: tl.constexpr, OP: tl.constexpr, LAMPORT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``[nbytes] -> [nbytes]`` inside one node. Programs: one for each BLOCK words of a part, and at least one.

    Args: those of :func:`all_reduce_one_shot`; the inbox has room in each segment for the words of two parts.
    """
    in_stream_order()
    size = tl.cast(nbytes, tl.int32)
    width: tl.constexpr = 16 if LAMPORT else 12
    part = tl.maximum(tl.cdiv(tl.cdiv(size, width), g.world), 1)  # words
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = place < part
    own = g.rank * part + place
    own_end = tl.minimum(size, width * part * (g.rank + 1))
    mine1, mine2, mine3, mine4 = _load(source, own, own_end, LAMPORT)
    call, alive = _start(g, inbox, LAMPORT)
    if alive == 0:
        return
    for step in tl.static_range(1, g.world):
        to = (g.rank + step) % g.world
        delta = tl.load(g.deltas + to)
        end = tl.minimum(size, width * part * (to + 1))
        first, second, third, fourth = _load(source, to * part + place, end, LAMPORT)
        first, second, third, fourth = _repair(source, to * part + place, end, first, second, third, fourth, LAMPORT)
        if LAMPORT:
            lamport.send(g, inbox, g.rank, delta, place, first, second, third, fourth, call, mask)
        else:
            ll.send(g, inbox, g.rank, delta, place, first, second, third, call, mask)
    mine1, mine2, mine3, mine4 = _repair(source, own, own_end, mine1, mine2, mine3, mine4, LAMPORT)
    if LAMPORT:
        lamport.clear(g, inbox, call, 2 * 16 * part, BLOCK)
    first, second, third, fourth, summed = _sum(
        g, inbox, place, mine1, mine2, mine3, mine4, call, mask, DTYPE, ACC, OP, LAMPORT
    )
    _send_to_all(g, inbox, part + place, first, second, third, fourth, call, summed, LAMPORT)
    _store(out, own, size, first, second, third, fourth, summed, LAMPORT)
    for step in tl.static_range(1, g.world):
        origin = (g.rank + step) % g.world
        first, second, third, fourth, came = _receive(g, inbox, origin, part + place, call, mask, LAMPORT)
        _store(out, origin * part + place, size, first, second, third, fourth, came, LAMPORT)
