# SPDX-License-Identifier: Apache-2.0
"""Data of any alignment and length as 32-bit words, and those as elements: what messages of words are made of."""

import triton.language as tl

from tdcoll.language.jit import jit

__all__ = ["count", "load_bytes", "load_words", "pack", "pointer", "store_any", "unpack"]


@jit
def pointer(address, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """``address`` as a pointer to elements. ``ALIGNED``: it is a multiple of 16."""
    made = tl.cast(address, tl.int64).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        made = tl.multiple_of(made, 16)
    return made


@jit
def count(nbytes, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Elements of ``nbytes`` bytes; ``ALIGNED``: a multiple of 16 bytes, which the compiler is shown."""
    width: tl.constexpr = DTYPE.primitive_bitwidth // 8
    if ALIGNED:
        number = nbytes // 16 * (16 // width)
    else:
        number = nbytes // width
    return number


@jit
def load_words(source, index, nbytes):
    """32-bit words ``index`` of ``nbytes`` bytes at ``source``, zeros past the end; all zeros unless both are multiples
    of 4. Without a branch, so that nobody waits for it before the data is needed."""
    mask = (index < nbytes // 4) & ((source | nbytes) % 4 == 0)
    return tl.load(source.to(tl.pointer_type(tl.int32)) + index, mask=mask, other=0)


@jit
def load_bytes(source, index, nbytes):
    """:func:`load_words` for any alignment and number of bytes."""
    words = tl.zeros_like(index)
    bytes = source.to(tl.pointer_type(tl.uint8))
    for byte in tl.static_range(4):
        place = index * 4 + byte
        words |= tl.load(bytes + place, mask=place < nbytes, other=0).to(tl.int32) << (8 * byte)
    return words


@jit
def store_any(out, index, nbytes, words, mask):
    """Words ``index``, where ``mask`` is true, to ``nbytes`` bytes at ``out``, any alignment; none past the end."""
    if (out | nbytes) % 4 == 0:
        tl.store(out.to(tl.pointer_type(tl.int32)) + index, words, mask=mask & (index < nbytes // 4))
    else:
        bytes = out.to(tl.pointer_type(tl.uint8))
        for byte in tl.static_range(4):
            place = index * 4 + byte
            tl.store(bytes + place, ((words >> (8 * byte)) & 0xFF).to(tl.uint8), mask=mask & (place < nbytes))


@jit
def unpack(words, DTYPE: tl.constexpr, ACC: tl.constexpr):
    """Elements of 32-bit words in ``ACC``: ``[n] -> [n]``, or ``[n] -> [n, 2]`` of 2-byte elements."""
    if DTYPE.primitive_bitwidth == 32:
        values = words.to(DTYPE, bitcast=True)
    else:
        halves = tl.join(words, words >> 16).to(tl.int16)  # keeps the low 16 bits of each
        values = halves.to(DTYPE, bitcast=True)
    return values.to(ACC)


@jit
def pack(values):
    """The inverse of :func:`unpack`, of elements that are rounded already."""
    if values.dtype.primitive_bitwidth == 32:
        words = values.to(tl.int32, bitcast=True)
    else:
        low, high = tl.split(values.to(tl.int16, bitcast=True).to(tl.int32))
        words = (low & 0xFFFF) | (high << 16)
    return words
