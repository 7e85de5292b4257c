# SPDX-License-Identifier: Apache-2.0
"""Words of the Lamport protocol or LL, for kernels that reduce their contents.

If ``LAMPORT`` is true, they use the Lamport protocol (:mod:`tdcoll.primitives.lamport`) and hold 16
bytes, otherwise LL (:mod:`tdcoll.primitives.ll`), with 12. Their memory is called the *inbox*: a
:class:`~tdcoll.primitives.lamport.Lamport` or a :class:`~tdcoll.primitives.group.Inbox`.

Slow loads begin before they are needed. If a kernel sends each rank a share of its data, it loads
the shares for all (:func:`load_shares`), and the addresses of the peers (:func:`deltas_of`), before
the number of the call is known; and it loads all of a block before it sends any
(:func:`send_shares`), because a load behind a store would wait its turn.

With the Lamport protocol, one wait polls the words of several ranks, so that their loads are on
their way at the same time. They are added in rank order, whichever come first.

Blocks have one dimension throughout, and so do the elements of words
(:func:`tdcoll.primitives.elements.element`), because if a wait's result is needed in another
layout, the compiler makes two waits.
"""

import triton.language as tl

import tdcoll.language as tdl
from tdcoll.language.jit import jit
from tdcoll.primitives import lamport, ll
from tdcoll.primitives.elements import element, placed
from tdcoll.primitives.epilogue import result_of
from tdcoll.primitives.group import start as group_start
from tdcoll.primitives.reduce import accumulate

RANKS_OF_ONE_WAIT = tl.constexpr(8)
"""Ranks whose words one wait polls; for more of them it would take too many registers."""


@jit
def load(source, word, nbytes, LAMPORT: tl.constexpr):
    """Return the contents of the words ``word`` of ``nbytes`` at ``source``, if all is aligned: see
    :func:`repair`."""
    return lamport.load(source, word, nbytes) if LAMPORT else ll.load(source, word, nbytes)


@jit
def repair(source, word, nbytes, parts, LAMPORT: tl.constexpr):
    """Return the result of :func:`load`, loaded again if it was not aligned."""
    return (
        lamport.repair(source, word, nbytes, parts)
        if LAMPORT
        else ll.repair(source, word, nbytes, parts)
    )


@jit
def store(out, word, nbytes, parts, mask, LAMPORT: tl.constexpr):
    """The inverse of :func:`load`, for any alignment, where ``mask`` is true."""
    if LAMPORT:
        lamport.store(out, word, nbytes, parts, mask)
    else:
        ll.store(out, word, nbytes, parts, mask)


@jit
def carry(word, nbytes, LAMPORT: tl.constexpr):
    """Return which of the words carry some of ``nbytes``; the first always does."""
    return lamport.carry(word, nbytes) if LAMPORT else ll.carry(word, nbytes)


@jit
def start(g, inbox, LAMPORT: tl.constexpr):
    """Return ``(number of this call, alive)``. Every program of the launch calls it exactly
    once."""
    return lamport.start(g, inbox) if LAMPORT else group_start(g)


@jit
def send(g, inbox, peer_delta, word, parts, call, mask, LAMPORT: tl.constexpr):
    """Send words of this rank to a peer."""
    if LAMPORT:
        lamport.send(g, inbox, g.rank, peer_delta, word, parts, call, mask)
    else:
        ll.send(g, inbox, g.rank, peer_delta, word, parts, call, mask)


@jit
def deltas_of(g):
    """Return the deltas of all other ranks, the successor's first."""
    deltas = ()
    for step in tl.static_range(1, g.world):
        deltas += (tl.load(g.deltas + (g.rank + step) % g.world),)
    return deltas


@jit
def send_to_all(g, inbox, deltas, word, parts, call, mask, LAMPORT: tl.constexpr):
    """Send the same words to every other rank."""
    for i in tl.static_range(g.world - 1):
        send(g, inbox, deltas[i], word, parts, call, mask, LAMPORT)


@jit
def _share(source, stride, total, most, g, step):
    """Return ``(address, bytes)`` of the share for the ``step``-th successor: shares begin
    ``stride`` bytes apart, have at most ``most`` bytes, and end with the ``total`` bytes."""
    begin = tl.cast((g.rank + step) % g.world, tl.int64) * stride
    return source + begin, tl.minimum(tl.maximum(total - begin, 0), most).to(tl.int32)


@jit
def load_shares(source, stride, total, most, word, g, LAMPORT: tl.constexpr):
    """Load words ``word`` of the share for every other rank, the successor's first, and then of
    this rank's own."""
    shares = ()
    for step in tl.static_range(1, g.world + 1):
        at, size = _share(source, stride, total, most, g, step)
        shares += (load(at, word, size, LAMPORT),)  # type: ignore[assignment]
    return shares


@jit
def send_shares(
    source, stride, total, most, word, shares, g, inbox, deltas, call, mask, LAMPORT: tl.constexpr
):  # fmt: skip
    """Send each rank its share from :func:`load_shares`; return this rank's own."""
    for step in tl.static_range(1, g.world + 1):
        at, size = _share(source, stride, total, most, g, step)
        given = repair(at, word, size, shares[step - 1], LAMPORT)
        if step < g.world:
            send(g, inbox, deltas[step - 1], word, given, call, mask, LAMPORT)
    return given


@jit
def receive(g, inbox, word, mine, call, mask, LAMPORT: tl.constexpr):
    """Return ``(words, arrived)``: those of every rank, and which of them came in time from all.

    ``words`` is a tuple of the ranks' words, in rank order; this rank's are ``mine``.
    """
    found = ()
    arrived = mask
    if LAMPORT and g.world > 1 and g.world <= RANKS_OF_ONE_WAIT:
        landed = lamport.segment(g, inbox, call, 0) + 16 * tl.cast(word, tl.int64)
        came = tdl.wait_words_of_all(
            landed, inbox.stride, g.world, g.rank, lamport.SENTINEL, mask, g.monitor, call
        )
        arrived = mask & (came[4 * g.world] != 0)
        for r in tl.static_range(g.world):
            theirs = ()
            for part in tl.static_range(4):
                theirs += (tl.where(r == g.rank, mine[part], came[4 * r + part]),)  # type: ignore[assignment]
            found += (theirs,)  # type: ignore[assignment]
    else:
        for r in tl.static_range(g.world):
            first, second, third, fourth = mine
            if r != g.rank:
                if LAMPORT:
                    first, second, third, fourth, here = lamport.receive(
                        g, inbox, r, word, call, mask
                    )
                else:
                    first, second, third, here = ll.receive(g, inbox, r, word, call, mask)
                    fourth = first
                arrived = arrived & (here != 0)
            found += ((first, second, third, fourth),)  # type: ignore[assignment]
    return found, arrived


@jit
def _reduced(
    words, PART: tl.constexpr, world, place, epilogue,
    DTYPE: tl.constexpr, ACC: tl.constexpr, OP: tl.constexpr, LAMPORT: tl.constexpr,
):  # fmt: skip
    """Return the part ``PART`` of the result, from the same part of all ranks' words."""
    in_part: tl.constexpr = 32 // DTYPE.primitive_bitwidth
    in_word: tl.constexpr = (4 if LAMPORT else 3) * in_part
    result = tl.zeros_like(words[0][PART])
    for element_in_part in tl.static_range(in_part):
        sum = tl.zeros(result.shape, ACC)
        for r in tl.static_range(world):
            part = element(words[r][PART], element_in_part, DTYPE, ACC)
            sum = accumulate(sum, part, r == 0, OP)
        out, word, nbytes, arrived = place
        index = word.to(tl.int64) * in_word + (PART * in_part + element_in_part)
        inside = arrived & (index < nbytes // (4 // in_part))
        value = result_of(sum, world, out, index, inside, epilogue, DTYPE, OP)
        result |= placed(value, element_in_part)
    return result


@jit
def reduce(
    words, world, place, epilogue,
    DTYPE: tl.constexpr, ACC: tl.constexpr, OP: tl.constexpr, LAMPORT: tl.constexpr,
):  # fmt: skip
    """Return the words of the result: those of all ranks, from :func:`receive`, added in rank
    order.

    Args:
        place: ``(out, word, nbytes, arrived)``: the result has ``nbytes`` bytes at ``out``, and its
            words ``word`` are made here, where all parts have ``arrived``.
        epilogue: see :mod:`tdcoll.primitives.epilogue`.
    """
    first = _reduced(words, 0, world, place, epilogue, DTYPE, ACC, OP, LAMPORT)
    second = _reduced(words, 1, world, place, epilogue, DTYPE, ACC, OP, LAMPORT)
    third = _reduced(words, 2, world, place, epilogue, DTYPE, ACC, OP, LAMPORT)
    fourth = first
    if LAMPORT:
        fourth = _reduced(words, 3, world, place, epilogue, DTYPE, ACC, OP, LAMPORT)
    return first, second, third, fourth
