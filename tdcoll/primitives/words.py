# SPDX-License-Identifier: Apache-2.0
"""Words that need no signal, of either kind, for kernels that reduce what comes in them.

``LAMPORT`` says which: words that announce themselves (:mod:`tdcoll.primitives.lamport`), which hold 16 bytes, or words
that carry a flag (:mod:`tdcoll.primitives.ll`), which hold 12. Their memory is called the *inbox*: a
:class:`~tdcoll.primitives.lamport.Lamport` or a :class:`~tdcoll.primitives.group.Inbox`.

What takes time on the way is begun before it is needed. A kernel that sends each rank a share of its data loads the
shares for all (:func:`load_shares`), and the addresses of the peers (:func:`deltas_of`), before the number of the call
is known; and it loads all of a block before it sends any (:func:`send_shares`), since a load behind a store would wait
its turn.

The words of several ranks are waited for at once, where they announce themselves: the loads of all are on their way at
the same time, and not one after the other. Whatever comes first, they are added in rank order.

Blocks have one dimension throughout, and so do the elements of words (:func:`tdcoll.primitives.elements.element`): of
what a wait returns in one layout and somebody needs in another, the compiler makes two waits.
"""

import triton.language as tl

import tdcoll.language as tdl
from tdcoll.language.jit import jit
from tdcoll.primitives import lamport, ll
from tdcoll.primitives.elements import element, placed
from tdcoll.primitives.group import start as group_start
from tdcoll.primitives.reduce import accumulate, finish, rounded

__all__ = ["AT_ONCE", "carry", "deltas_of", "load", "load_shares", "receive", "reduce", "repair", "send"]
__all__ += ["send_shares", "send_to_all", "start", "store"]

AT_ONCE = tl.constexpr(8)
"""Ranks whose words one wait takes at once; a wait for more of them would take too many registers."""


@jit
def load(source, word, nbytes, LAMPORT: tl.constexpr):
    """Return what the words ``word`` carry of ``nbytes`` at ``source``, where all is aligned: see :func:`repair`."""
    return lamport.load(source, word, nbytes) if LAMPORT else ll.load(source, word, nbytes)


@jit
def repair(source, word, nbytes, parts, LAMPORT: tl.constexpr):
    """Return what :func:`load` gave, loaded anew if that was not aligned."""
    return lamport.repair(source, word, nbytes, parts) if LAMPORT else ll.repair(source, word, nbytes, parts)


@jit
def store(out, word, nbytes, parts, mask, LAMPORT: tl.constexpr):
    """The inverse of :func:`load`, for any alignment, where ``mask`` is true."""
    if LAMPORT:
        lamport.store(out, word, nbytes, parts, mask)
    else:
        ll.store(out, word, nbytes, parts, mask)


@jit
def carry(word, nbytes, LAMPORT: tl.constexpr):
    """Return which of the words carry something of ``nbytes``; the first always does."""
    return lamport.carry(word, nbytes) if LAMPORT else ll.carry(word, nbytes)


@jit
def start(g, inbox, LAMPORT: tl.constexpr):
    """``(number of this call, alive)``. Every program of the launch calls it exactly once."""
    return lamport.start(g, inbox) if LAMPORT else group_start(g)


@jit
def send(g, inbox, peer_delta, word, parts, call, mask, LAMPORT: tl.constexpr):
    """Words of this rank to a peer."""
    if LAMPORT:
        lamport.send(g, inbox, g.rank, peer_delta, word, parts, call, mask)
    else:
        ll.send(g, inbox, g.rank, peer_delta, word, parts, call, mask)


@jit
def deltas_of(g):
    """Of all other ranks, the successor's first."""
    deltas = ()
    for step in tl.static_range(1, g.world):
        deltas += (tl.load(g.deltas + (g.rank + step) % g.world),)
    return deltas


@jit
def send_to_all(g, inbox, deltas, word, parts, call, mask, LAMPORT: tl.constexpr):
    """The same words to every other rank."""
    for i in tl.static_range(g.world - 1):
        send(g, inbox, deltas[i], word, parts, call, mask, LAMPORT)


@jit
def _share(source, stride, total, most, g, step):
    """``(address, bytes)`` of the share for the ``step``-th successor: shares begin ``stride`` bytes apart, have at
    most ``most`` bytes, and end with the ``total`` bytes that there are."""
    begin = tl.cast((g.rank + step) % g.world, tl.int64) * stride
    return source + begin, tl.minimum(tl.maximum(total - begin, 0), most).to(tl.int32)


@jit
def load_shares(source, stride, total, most, word, g, LAMPORT: tl.constexpr):
    """Words ``word`` of the share for every other rank, the successor's first, and then of this rank's own."""
    shares = ()
    for step in tl.static_range(1, g.world + 1):
        at, size = _share(source, stride, total, most, g, step)
        shares += (load(at, word, size, LAMPORT),)  # type: ignore[assignment]
    return shares


@jit
def send_shares(
    source, stride, total, most, word, shares, g, inbox, deltas, call, mask, LAMPORT: tl.constexpr
):  # fmt: skip
    """Store what :func:`load_shares` gave to those whom it is for; return this rank's own."""
    for step in tl.static_range(1, g.world + 1):
        at, size = _share(source, stride, total, most, g, step)
        given = repair(at, word, size, shares[step - 1], LAMPORT)
        if step < g.world:
            send(g, inbox, deltas[step - 1], word, given, call, mask, LAMPORT)
    return given


@jit
def receive(g, inbox, word, mine, call, mask, LAMPORT: tl.constexpr):
    """``(words, arrived)``: those of every rank, and which of them came in time from all.

    ``words`` is a tuple of the ranks' words, in rank order; this rank's are ``mine``.
    """
    found = ()
    arrived = mask
    if LAMPORT and g.world > 1 and g.world <= AT_ONCE:
        landed = lamport.segment(g, inbox, call, 0) + 16 * tl.cast(word, tl.int64)
        came = tdl.wait_words_of_all(landed, inbox.stride, g.world, g.rank, lamport.SENTINEL, mask, g.monitor, call)
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
                    first, second, third, fourth, here = lamport.receive(g, inbox, r, word, call, mask)
                else:
                    first, second, third, here = ll.receive(g, inbox, r, word, call, mask)
                    fourth = first
                arrived = arrived & (here != 0)
            found += ((first, second, third, fourth),)  # type: ignore[assignment]
    return found, arrived


@jit
def _reduced(words, PART: tl.constexpr, world, DTYPE: tl.constexpr, ACC: tl.constexpr, OP: tl.constexpr):
    """The part ``PART`` of the result, of the same part of all ranks' words."""
    result = tl.zeros_like(words[0][PART])
    for place in tl.static_range(32 // DTYPE.primitive_bitwidth):
        sum = tl.zeros(result.shape, ACC)
        for r in tl.static_range(world):
            sum = accumulate(sum, element(words[r][PART], place, DTYPE, ACC), r == 0, OP)
        result |= placed(rounded(finish(sum, world, OP), DTYPE, OP), place)
    return result


@jit
def reduce(words, world, DTYPE: tl.constexpr, ACC: tl.constexpr, OP: tl.constexpr, LAMPORT: tl.constexpr):
    """The words of the result: those of all ranks, as :func:`receive` gives them, added in rank order."""
    first = _reduced(words, 0, world, DTYPE, ACC, OP)
    second = _reduced(words, 1, world, DTYPE, ACC, OP)
    third = _reduced(words, 2, world, DTYPE, ACC, OP)
    fourth = first
    if LAMPORT:
        fourth = _reduced(words, 3, world, DTYPE, ACC, OP)
    return first, second, third, fourth
