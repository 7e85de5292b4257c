# SPDX-License-Identifier: Apache-2.0
"""Words that carry a flag: data and its signal in one aligned 128-bit store, inside a node.

A word holds 96 bits of data and 32 bits of flag, which says the epoch. It arrives whole, so a word that has the flag
of this epoch has its data: one crossing, no fence, no release, at 4/3 of the bytes. NCCL has two such protocols: LL,
whose words are of 64 bits, half of them flag, and LL128, whose words are the 128 bytes that a warp stores at once.

The words of a inbox are used for nothing else. ``inbox.base + 16 * i`` is written by one rank, by one store per
epoch, and polled here by one program. What is in a word is always a flag of this context: of this epoch, or of an
earlier one of the same slot; never of a later one, because its sender then knows that this rank is done with this one.
So flags are compared for equality. (2^32 calls later a flag comes again; a word would have to be skipped by all calls
in between to be mistaken.) A word that was never written holds zeros, so 0 is no flag: epochs 2^32 k have flag 1
instead (:func:`flag`). They are even, and so are all other epochs of their slot with their flags: none of those is 1.

Ordering: none is relied on, except that an aligned 128-bit store (``st.relaxed.sys.b128``, PTX ISA 8.4) is single, as
is the load that polls it. A call of no bytes sends one word all the same, so that every call hears from every peer.

Data may have any alignment and length. The accesses by 32 bits are made without a branch, before the epoch is known;
what is not aligned is loaded anew after it (:func:`repair`).

What words carry is a tuple of four blocks of int32, as in :mod:`tdcoll.primitives.lamport`; the last is not used.
"""

import triton.language as tl

import tdcoll.language as tdl
from tdcoll.language.jit import jit
from tdcoll.primitives.elements import load_bytes, load_words, store_any
from tdcoll.primitives.group import segment

__all__ = ["carry", "flag", "load", "receive", "repair", "send", "store"]


@jit
def load(source, word, nbytes):
    """Load what the 128-bit words ``word`` carry of ``nbytes`` at ``source``, if all is aligned: see :func:`repair`."""
    first = load_words(source, 3 * word, nbytes)
    second = load_words(source, 3 * word + 1, nbytes)
    third = load_words(source, 3 * word + 2, nbytes)
    return first, second, third, first


@jit
def repair(source, word, nbytes, parts):
    """Return what :func:`load` gave, loaded anew if that was not aligned."""
    first, second, third, _ = parts
    if (source | nbytes) % 4 != 0:
        first = load_bytes(source, 3 * word, nbytes)
        second = load_bytes(source, 3 * word + 1, nbytes)
        third = load_bytes(source, 3 * word + 2, nbytes)
    return first, second, third, first


@jit
def store(out, word, nbytes, parts, mask):
    """The inverse of :func:`load`, for any alignment, where ``mask`` is true."""
    for part in tl.static_range(3):
        store_any(out, 3 * word + part, nbytes, parts[part], mask)


@jit
def carry(word, nbytes):
    """Return which of the 128-bit words carry something; the first always does."""
    return word < tl.maximum((nbytes + 11) // 12, 1)


@jit
def flag(epoch):
    """The flag of an epoch: its low 32 bits, or 1 where they are 0."""
    return tl.maximum(epoch.to(tl.uint32), 1).to(tl.int32)


@jit
def send(g, inbox, origin, peer_delta, word, parts, epoch, mask):
    """Words of rank ``origin``'s segment to a peer."""
    theirs = segment(inbox, g, epoch, origin) + peer_delta + 16 * word
    tdl.store_flagged(theirs, parts[0], parts[1], parts[2], flag(epoch), mask)


@jit
def receive(g, inbox, origin, word, epoch, mask):
    """``(first, second, third, arrived)``: words of rank ``origin``'s segment here, once they are of this epoch."""
    landed = segment(inbox, g, epoch, origin) + 16 * tl.cast(word, tl.int64)
    return tdl.wait_flagged(landed, flag(epoch), mask, g.monitor, origin)
