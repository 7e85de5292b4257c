# SPDX-License-Identifier: Apache-2.0
"""The Lamport protocol: data without flag or signal, inside a node, for floating-point types.

The inbox holds a sentinel until data comes. A receiver polls the data itself until the sentinel is
gone: one hop, no fence, no release, and not a byte besides the data. The sentinel is the 32-bit
word 0x80000000: -0.0 in fp32; in fp16, bf16 and fp8 a -0.0 above zeros. A sender turns that word
into 0, so only the sign of a zero differs. The protocol isn't for integers or fp64, because they
have other values with such a word.

Words are stored and loaded by 128 bits, for speed. They need not arrive whole, because the receiver
checks each of their four parts, and parts of 32 bits do arrive whole.

Slots and calls. A call that begins with :func:`start` counts as a *Lamport call*, on the device and
apart from the epoch, because calls of other kinds advance that as well. Call k uses slot k mod 3,
and every program of it takes part in :func:`clear`, which overwrites the data of call k - 1 in its
slot with sentinels. ::

    call k        peers write slot k        this rank polls slot k, and clears slot k - 1
    call k + 1    peers write slot k + 1    ... clears slot k
    call k + 2    peers write slot k - 1

A peer starts k + 2 when it is done with k + 1, for which it has heard from this rank. This rank
sends in k + 1 when its call k is over, and with it the clearing of slot k - 1. With two slots a
peer would write, in k + 1, the slot that this rank still clears in k. The data of k - 1 may be
cleared in k because the launch of k - 1, which has read it, is over.

Written words. A call clears only the words that were *written*. It notes on the device how many
words of each segment its peers write, because calls differ in size, and with CUDA graphs only the
device knows which call came before.

Ordering: that of the kernels of one stream. A call of no bytes still sends one word
(:func:`carry`), because every call must hear from every peer.

Data may have any alignment and length. If all of it is aligned to 128 bits, it is loaded without a
branch, before the call is known; other data is loaded again after it (:func:`repair`). The contents
of words are a tuple of four blocks of int32, their *parts*.
"""

from typing import Any, NamedTuple

import triton.language as tl

import tdcoll.language as tdl
from tdcoll.language.jit import jit
from tdcoll.primitives.elements import load_words
from tdcoll.primitives.group import begin_epoch, this_program

SENTINEL = tl.constexpr(-(1 << 31))
"""0x80000000 as an int32."""


class Lamport(NamedTuple):
    """Memory of the Lamport protocol, as kernels see it: ``ctx.device_lamport``.

    Attributes:
        base: address here of the inbox ``[3, world, stride]``, symmetric.
        stride: bytes from the segment of one rank to that of the next.
        control: int64 ``[1]``: the number of Lamport calls, as a group's ``control`` has that of
            epochs.
        written: int64 ``[3]``: words of each segment that the last call in that slot has written.
    """

    base: tl.int64
    stride: tl.int64
    control: Any
    written: Any


@jit
def start(g, lamport):
    """Return ``(call, alive)``: the Lamport call, counted from 1. Every program of the launch calls
    it exactly once.

    As :func:`tdcoll.primitives.group.start` for epochs. If a call uses only this protocol, it needs
    no epoch.
    """
    return begin_epoch(lamport.control, g.monitor)


@jit
def slot(call):
    """Return which of the three slots a call uses."""
    return call % 3


@jit
def segment(g, lamport, call, origin):
    """Return the address, on this rank, of rank ``origin``'s segment in this call."""
    return lamport.base + (slot(call) * g.world + origin) * lamport.stride


@jit
def load(source, word, nbytes):
    """Load the contents of the 128-bit words ``word`` of ``nbytes`` at ``source``, if all is
    aligned: see :func:`repair`."""
    mask = (word < nbytes // 16) & ((source | nbytes) % 16 == 0)
    return tdl.load_words(source + 16 * tl.cast(word, tl.int64), mask)


@jit
def repair(source, word, nbytes, parts):
    """Return the result of :func:`load`, loaded again if it was not aligned.

    It loads bytes in a loop at run time, because a kernel repairs once for each rank, which is slow
    to compile.
    """
    first, second, third, fourth = parts
    if (source | nbytes) % 16 != 0:
        if (source | nbytes) % 4 == 0:
            first = load_words(source, 4 * word, nbytes)
            second = load_words(source, 4 * word + 1, nbytes)
            third = load_words(source, 4 * word + 2, nbytes)
            fourth = load_words(source, 4 * word + 3, nbytes)
        else:
            bytes = source.to(tl.pointer_type(tl.uint8))
            first = tl.zeros_like(word)
            second = first
            third = first
            fourth = first
            for byte in tl.range(0, 4):
                place = 16 * word + byte
                first |= tl.load(bytes + place, mask=place < nbytes, other=0).to(tl.int32) << (
                    8 * byte
                )
                second |= tl.load(bytes + place + 4, mask=place + 4 < nbytes, other=0).to(
                    tl.int32
                ) << (8 * byte)
                third |= tl.load(bytes + place + 8, mask=place + 8 < nbytes, other=0).to(
                    tl.int32
                ) << (8 * byte)
                fourth |= tl.load(bytes + place + 12, mask=place + 12 < nbytes, other=0).to(
                    tl.int32
                ) << (8 * byte)
    return first, second, third, fourth


@jit
def store(out, word, nbytes, parts, mask):
    """The inverse of :func:`load`, for any alignment, where ``mask`` is true.

    All blocks have the one dimension of ``word``, because if a mask had two, made from
    :func:`receive`'s ``arrived``, the compiler would repeat its waits in the layout of that mask.
    """
    first, second, third, fourth = parts
    if (out | nbytes) % 16 == 0:
        at = out + 16 * tl.cast(word, tl.int64)
        tdl.store_words(at, first, second, third, fourth, mask & (word < nbytes // 16))
    elif (out | nbytes) % 4 == 0:
        place = out.to(tl.pointer_type(tl.int32)) + 4 * word
        left = nbytes // 4 - 4 * word
        for part in tl.static_range(4):
            tl.store(place + part, parts[part], mask=mask & (part < left))
    else:
        # A loop at run time, because a kernel stores once for each rank, and unrolled bytes would
        # double the compiled code.
        bytes = out.to(tl.pointer_type(tl.uint8))
        for byte in tl.range(0, 4):
            place = 16 * word + byte
            tl.store(
                bytes + place, (first >> (8 * byte)).to(tl.uint8), mask=mask & (place < nbytes)
            )
            tl.store(
                bytes + place + 4,
                (second >> (8 * byte)).to(tl.uint8),
                mask=mask & (place + 4 < nbytes),
            )
            tl.store(
                bytes + place + 8,
                (third >> (8 * byte)).to(tl.uint8),
                mask=mask & (place + 8 < nbytes),
            )
            tl.store(
                bytes + place + 12,
                (fourth >> (8 * byte)).to(tl.uint8),
                mask=mask & (place + 12 < nbytes),
            )


@jit
def carry(word, nbytes):
    """Return which of the 128-bit words carry some of ``nbytes``; the first always does."""
    return word < tl.maximum((nbytes + 15) // 16, 1)


@jit
def _present(part):
    """Return a part of a word with the sentinel replaced by 0."""
    return tl.where(part == SENTINEL, 0, part)


@jit
def send(g, lamport, origin, peer_delta, word, parts, call, mask):
    """Send words of rank ``origin``'s segment to a peer."""
    first, second, third, fourth = parts
    theirs = segment(g, lamport, call, origin) + peer_delta + 16 * tl.cast(word, tl.int64)
    tdl.store_words(
        theirs, _present(first), _present(second), _present(third), _present(fourth), mask
    )


@jit
def receive(g, lamport, origin, word, call, mask):
    """Return ``(first, second, third, fourth, arrived)``: words of rank ``origin``'s segment here,
    when they have come."""
    landed = segment(g, lamport, call, origin) + 16 * tl.cast(word, tl.int64)
    return tdl.wait_words(landed, SENTINEL, mask, g.monitor, origin, call)


@jit
def clear(g, lamport, call, nbytes, BLOCK: tl.constexpr):
    """Clear the words of the call before, and note what this one writes. Every program calls it
    once.

    Call it between sending and receiving, where it costs no time. The programs share the work,
    whatever the two grids.

    Args:
        nbytes: the most that peers write to each segment in this call.
        BLOCK: words that a program clears at once.
    """
    program, programs = this_program()
    place = tl.arange(0, BLOCK)
    nothing = tl.full([BLOCK], SENTINEL, tl.int32)
    left = tl.load(lamport.written + slot(call - 1))
    for origin in range(g.world):
        begin = tl.cast(program, tl.int64) * BLOCK
        while begin < left:
            word = begin + place
            stale = segment(g, lamport, call - 1, origin) + 16 * word
            tdl.store_words(
                stale, nothing, nothing, nothing, nothing, (word < left) & (origin != g.rank)
            )
            begin += tl.cast(programs, tl.int64) * BLOCK
    if program == 0:
        words = tl.maximum((tl.cast(nbytes, tl.int64) + 15) // 16, 1)
        tl.store(lamport.written + slot(call), words)
