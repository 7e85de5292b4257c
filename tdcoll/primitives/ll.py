# SPDX-License-Identifier: Apache-2.0
"""LL: words that carry a flag, with data and its signal in one aligned 128-bit store, inside a
node.

A word holds 96 bits of data and 32 bits of flag, which is the epoch. If a word has the flag of this
epoch, it has its data, because it arrives whole: one hop, no fence, no release, at 4/3 of the
bytes. (NCCL's LL has words of 64 bits.)

The words of an inbox are used for nothing else. ``inbox.base + 16 * i`` is written by one rank, by
one store per epoch, and polled here by one program. A word always has a flag of this context: of
this epoch, or of an earlier one of the same slot; never of a later one, because its sender then
knows that this rank is done with this one. Flags are therefore compared for equality. (2^32 calls
later a flag comes again; it could be mistaken only if all calls in between skipped the word.)
Because a word that was never written holds zeros, 0 is no flag, and epochs 2^32 k have flag 1
instead (:func:`flag`). They are even, and so are all other epochs of their slot with their flags:
none of those is 1.

Ordering: none is relied on, except that an aligned 128-bit store (``st.relaxed.sys.b128``, PTX ISA
8.4) is single, as is the load that polls it. A call of no bytes still sends one word, because every
call must hear from every peer.

Data may have any alignment and length. The accesses by 32 bits are made without a branch, before
the epoch is known; if data is not aligned, it is loaded again after it (:func:`repair`). The
contents of words are a tuple as in :mod:`tdcoll.primitives.lamport`, whose last block is not used.
"""

import triton.language as tl

import tdcoll.language as tdl
from tdcoll.language.jit import jit
from tdcoll.primitives.elements import load_bytes, load_words, store_any
from tdcoll.primitives.group import segment


@jit
def load(source, word, nbytes):
    """Load the contents of the 128-bit words ``word`` of ``nbytes`` at ``source``, if all is
    aligned: see :func:`repair`."""
    first = load_words(source, 3 * word, nbytes)
    second = load_words(source, 3 * word + 1, nbytes)
    third = load_words(source, 3 * word + 2, nbytes)
    return first, second, third, first


@jit
def repair(source, word, nbytes, parts):
    """Return the result of :func:`load`, loaded again if it was not aligned."""
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
    """Return the flag of an epoch: its low 32 bits, or 1 if they are 0."""
    return tl.maximum(epoch.to(tl.uint32), 1).to(tl.int32)


@jit
def send(g, inbox, origin, peer_delta, word, parts, epoch, mask):
    """Send words of rank ``origin``'s segment to a peer."""
    theirs = segment(inbox, g, epoch, origin) + peer_delta + 16 * word
    tdl.store_flagged(theirs, parts[0], parts[1], parts[2], flag(epoch), mask)


@jit
def receive(g, inbox, origin, word, epoch, mask):
    """Return ``(first, second, third, arrived)``: words of rank ``origin``'s segment here, when
    they are of this epoch."""
    landed = segment(inbox, g, epoch, origin) + 16 * tl.cast(word, tl.int64)
    return tdl.wait_flagged(landed, flag(epoch), mask, g.monitor, origin)
