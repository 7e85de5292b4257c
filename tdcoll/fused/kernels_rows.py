# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of rows: residual, sum of squares, RMSNorm, fp8. Every kernel that normalizes takes it
from here.

A row is cut into words of 16 bytes, as it travels. Its bits are specified for all kernels::

    new     = rounded(fp32(all-reduced x) + fp32(residual))          in the row's dtype
    mean    = tree(new^2) / hidden                                   in fp32
    out     = rounded((new * (1 / sqrt(mean + eps))) * weight)       in fp32, rounded once

Divisions and the square root are correctly rounded. The squares of a word are added in the order of
its parts, those of the row by a tree that adds neighbours: words 2i and 2i + 1, then sums 2i and 2i
+ 1, and so on. The order depends neither on the compiler's choice of layout nor on the number of
threads, because each level of the tree is a separate operation. A row may be cut into pieces whose
length is a power of two and which begin at a multiple of it, because each is a subtree. Words past
the end are zeros, which change no sum.

With fp8, ``scale = max(|new * weight|) * (1 / sqrt(mean + eps)) / 448``, at least 2^-100 / 448. It
needs the maximum of the row, which is known together with the sum. Values of more than 448 after
the division saturate.

Words are a tuple of four blocks of int32, their *parts*; elements of words a tuple of blocks of
fp32, part by part.
"""

import triton.language as tl

import tdcoll.language as tdl
from tdcoll.language.jit import jit
from tdcoll.primitives import lamport
from tdcoll.primitives.elements import element, placed

NONE, GIVEN, PER_ROW = (tl.constexpr(i) for i in range(3))
"""Values of the constant ``SCALE``: there is no scale, it is an argument, it is a result."""

_LARGEST = tl.constexpr(448.0)  # of float8_e4m3fn
_LEAST = tl.constexpr(2.0**-100)


@jit
def add(reduced, residual, DTYPE: tl.constexpr):
    """Return words of the new residual: the sum of the reduced ones and the residual's."""
    new = ()
    for part in tl.static_range(4):
        word = tl.zeros_like(reduced[part])
        for place in tl.static_range(32 // DTYPE.primitive_bitwidth):
            value = element(reduced[part], place, DTYPE, tl.float32) + element(
                residual[part], place, DTYPE, tl.float32
            )
            word |= placed(value.to(DTYPE), place)
        new += (word,)  # type: ignore[assignment]
    return new


@jit
def tree(values):
    """``[n] -> []``: neighbours are added, then neighbours of these, for n a power of two up to
    4096."""
    for _ in tl.static_range(12):
        if values.shape[0] > 2:
            values = tl.sum(tl.reshape(values, [values.shape[0] // 2, 2]), 1)
    return tl.sum(values, 0)


@jit
def load_weight(weight, word, HIDDEN: tl.constexpr, DTYPE: tl.constexpr, WEIGHT: tl.constexpr):
    """Load the weights of the elements of words."""
    nbytes: tl.constexpr = HIDDEN * WEIGHT.primitive_bitwidth // 8
    per_word: tl.constexpr = WEIGHT.primitive_bitwidth // DTYPE.primitive_bitwidth
    weights = ()
    for i in tl.static_range(per_word):
        parts = lamport.load(weight, per_word * word + i, nbytes)
        for part in tl.static_range(4):
            for place in tl.static_range(32 // WEIGHT.primitive_bitwidth):
                weights += (element(parts[part], place, WEIGHT, tl.float32),)  # type: ignore[assignment]
    return weights


@jit
def measure(new, weights, DTYPE: tl.constexpr, SCALE: tl.constexpr):
    """Return ``(sum of squares, largest |new * weight|)`` of words; the latter is 0 if no scale is
    requested."""
    places: tl.constexpr = 32 // DTYPE.primitive_bitwidth
    total = tl.zeros(new[0].shape, tl.float32)
    most = total
    for place in tl.static_range(places):
        value = element(new[0], place, DTYPE, tl.float32)
        squares = value * value
        for part in tl.static_range(4):
            value = element(new[part], place, DTYPE, tl.float32)
            if part > 0:
                # fused explicitly, so that the compiler has no choice
                squares = tl.fma(value, value, squares)
            if SCALE == PER_ROW:
                most = tl.maximum(most, tl.abs(value * weights[places * part + place]))
        total = squares if place == 0 else total + squares
    return tree(total), tl.max(most, 0)


@jit
def normalize(total, eps, HIDDEN: tl.constexpr):
    """Return ``1 / sqrt(mean + eps)`` of a row's sum of squares. ``eps``: the bits of an fp32."""
    mean = tl.div_rn(total, tl.full([], HIDDEN, tl.float32))
    return tl.div_rn(
        tl.full([], 1.0, tl.float32),
        tl.sqrt_rn(mean + eps.to(tl.int32).to(tl.float32, bitcast=True)),
    )


@jit
def store_row(
    out, scale, row, word, new, weights, total, largest, eps, mask,
    HIDDEN: tl.constexpr, DTYPE: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Normalize words of a row, where ``mask`` is true, and store them to row ``row`` of ``out``.

    Args:
        scale: address of fp32: the given scale, or the scales of the rows.
        new: words of the new residual.
        total, largest: of the whole row, by :func:`measure`.
    """
    factor = normalize(total, eps, HIDDEN)
    places: tl.constexpr = 32 // DTYPE.primitive_bitwidth
    if SCALE == NONE:
        words = ()
        for part in tl.static_range(4):
            made = tl.zeros_like(new[part])
            for place in tl.static_range(places):
                value = (element(new[part], place, DTYPE, tl.float32) * factor) * weights[
                    places * part + place
                ]
                made |= placed(value.to(DTYPE), place)
            words += (made,)  # type: ignore[assignment]
        at = (
            out
            + tl.cast(row, tl.int64) * (HIDDEN * DTYPE.primitive_bitwidth // 8)
            + 16 * tl.cast(word, tl.int64)
        )
        tdl.store_words(at, words[0], words[1], words[2], words[3], mask)  # type: ignore[misc]
    else:
        scales = scale.to(tl.pointer_type(tl.float32))
        if SCALE == PER_ROW:
            divisor = tl.div_rn(
                tl.maximum(largest * factor, _LEAST), tl.full([], _LARGEST, tl.float32)
            )
            tl.store(scales + row, divisor)
        else:
            divisor = tl.load(scales)
        shrink = tl.div_rn(tl.full([], 1.0, tl.float32), divisor)
        at = (out + tl.cast(row, tl.int64) * HIDDEN).to(tl.pointer_type(tl.int32)) + places * word
        for half in tl.static_range(places):  # four elements each
            made = tl.zeros_like(word)
            for i in tl.static_range(4):
                value = element(new[(4 * half + i) // places], i % places, DTYPE, tl.float32)
                value = ((value * factor) * weights[4 * half + i]) * shrink
                made |= value.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32) << (8 * i)
            tl.store(at + half, made, mask=mask)
