# SPDX-License-Identifier: Apache-2.0
"""Data of any alignment and length as 32-bit words, and those as elements, for LL and the Lamport
protocol."""

import triton.language as tl

from tdcoll.language.jit import jit
from tdcoll.primitives import fp8


@jit
def pointer(address, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Return ``address`` as a pointer to elements, for fp8 to their codes. ``ALIGNED``: it is a
    multiple of 16."""
    kind: tl.constexpr = tl.uint8 if DTYPE.is_fp8() else DTYPE
    made = tl.cast(address, tl.int64).to(tl.pointer_type(kind))
    if ALIGNED:
        made = tl.multiple_of(made, 16)
    return made


@jit
def count(nbytes, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the elements of ``nbytes`` bytes; if ``ALIGNED``, the compiler learns that these are a
    multiple of 16."""
    width: tl.constexpr = DTYPE.primitive_bitwidth // 8
    if ALIGNED:
        number = nbytes // 16 * (16 // width)
    else:
        number = nbytes // width
    return number


@jit
def load_words(source, index, nbytes):
    """Load 32-bit words ``index`` of ``nbytes`` bytes at ``source``, zeros past the end; all zeros
    unless both are multiples of 4. Without a branch, because that would wait for the data before it
    is needed."""
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
    """Store words ``index``, where ``mask`` is true, to ``nbytes`` bytes at ``out``, any alignment;
    none past the end."""
    if (out | nbytes) % 4 == 0:
        tl.store(
            out.to(tl.pointer_type(tl.int32)) + index, words, mask=mask & (index < nbytes // 4)
        )
    else:
        bytes = out.to(tl.pointer_type(tl.uint8))
        for byte in tl.static_range(4):
            place = index * 4 + byte
            tl.store(
                bytes + place,
                ((words >> (8 * byte)) & 0xFF).to(tl.uint8),
                mask=mask & (place < nbytes),
            )


@jit
def widened(values, DTYPE: tl.constexpr, ACC: tl.constexpr):
    """Return in ``ACC`` elements that are given as they are stored."""
    if DTYPE.is_fp8():
        wide = fp8.decode(values, DTYPE).to(ACC)
    else:
        wide = values.to(ACC)
    return wide


@jit
def element(words, PLACE: tl.constexpr, DTYPE: tl.constexpr, ACC: tl.constexpr):
    """Return the element ``PLACE`` of 32-bit words, each of one, two or four elements, in ``ACC``:
    ``[n] -> [n]``.

    One at a time, because the compiler changes the layout when blocks are joined or split, and
    repeats waits for words.
    """
    kind: tl.constexpr = tl.uint8 if DTYPE.is_fp8() else DTYPE
    if DTYPE.primitive_bitwidth == 32:
        value = words.to(kind, bitcast=True)
    elif DTYPE.primitive_bitwidth == 16:
        # which keeps the low 16 bits
        value = (words >> (16 * PLACE)).to(tl.int16).to(kind, bitcast=True)
    else:
        value = (words >> (8 * PLACE)).to(tl.int8).to(kind, bitcast=True)
    return widened(value, DTYPE, ACC)


@jit
def placed(values, PLACE: tl.constexpr):
    """Return rounded elements as the element ``PLACE`` of 32-bit words, whose other bits are 0."""
    if values.dtype.primitive_bitwidth == 32:
        words = values.to(tl.int32, bitcast=True)
    elif values.dtype.primitive_bitwidth == 16:
        words = (values.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF) << (16 * PLACE)
    else:
        words = (values.to(tl.int8, bitcast=True).to(tl.int32) & 0xFF) << (8 * PLACE)
    return words
