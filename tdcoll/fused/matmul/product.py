# SPDX-License-Identifier: Apache-2.0
"""One tile of a matmul, for the kernels that communicate beside it.

A product ``x [rows, depth] @ weight [depth, columns]`` is cut into tiles of ``tile.rows`` times
``tile.columns``. A tile is one loop over the depth, in steps of ``tile.depth``, from the first to
the last, in fp32. Nothing splits the depth, so a row has the same bits whatever the tile, the
thread block and the other rows are, and the bits of ``torch.mm`` where cuBLAS doesn't split the
depth either.

Operands are loaded through tensor descriptors (TMA), which the kernels make from addresses. A row
of an operand therefore has to begin at a multiple of 16 bytes: ``depth`` times the element's size,
and for a weight ``[depth, columns]`` also ``columns`` times the element's size. If a shape doesn't
fit, the host pads or refuses it. Rows and columns may end anywhere, because a descriptor reads
zeros beyond the matrix. Results are stored through pointers instead, and may have any number of
columns.

fp8 operands (e4m3fn, e5m2) come with scales, as those of ``torch._scaled_mm``: one for all of
``x``, or one for each row, and one for all of the weight, or one for each column. The tensor cores
of Hopper add fp8 products with about 14 bits, so the partial sum of each step is added to the
accumulator in fp32. A step always has 128 elements, because the bits depend on it.
"""

from typing import NamedTuple

import triton.language as tl

from tdcoll.language.jit import jit
from tdcoll.primitives import elements


class Shape(NamedTuple):
    """Sizes of a matmul on one rank.

    Attributes:
        rows: of one rank's shard of the long matrix: ``x`` before an all-gather, the result of a
            reduce-scatter.
        columns: of this rank's weight, and of the result.
        depth: of this rank's part of the inner dimension.
    """

    rows: tl.int32
    columns: tl.int32
    depth: tl.int32


class Weight(NamedTuple):
    """The weight on one rank, with its bias.

    Several weights that share ``x`` (as of Q, K and V) are passed as one, concatenated along the
    columns, because a descriptor for each would cost every thread block a microsecond, and each
    weight would end with a partial wave of its own.

    Attributes:
        base: address of ``[columns, depth]``, or of ``[depth, columns]`` if ``depth_first``.
        bias: address of ``[columns]`` in the result's type; only read if ``biased``.
    """

    base: tl.int64
    bias: tl.int64
    depth_first: tl.constexpr
    biased: tl.constexpr


class Scales(NamedTuple):
    """Scales of fp8 operands, fp32.

    Attributes:
        x: address of the scale of row 0 of ``x``; the next row's is ``x_step`` elements behind it:
            0 or 1.
        weight: address of the scale of column 0 of the weight; the next column's is ``weight_step``
            behind it: 0 or 1.
        used: whether there are scales. If not, the other fields are not read.
    """

    x: tl.int64
    x_step: tl.int32
    weight: tl.int64
    weight_step: tl.int32
    used: tl.constexpr


class Tile(NamedTuple):
    """How a matmul is cut; powers of two.

    Attributes:
        rows, columns: of a tile of the result.
        depth: of a step; for fp8 operands 128.
        group: rows of tiles that are computed side by side, because they then find each other's
            operands in the L2 cache.
    """

    rows: tl.constexpr
    columns: tl.constexpr
    depth: tl.constexpr
    group: tl.constexpr


@jit
def matrix(base, rows, columns, DTYPE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return a descriptor of the row-major matrix ``[rows, columns]`` at address ``base``, in
    blocks.

    Making one costs a thread block about a microsecond.
    """
    elements_of = tl.cast(base, tl.int64).to(tl.pointer_type(DTYPE))
    return tl.make_tensor_descriptor(elements_of, [rows, columns], [columns, 1], [ROWS, COLUMNS])


@jit
def weight_matrix(weight, shape, tile, DTYPE: tl.constexpr):
    """Return a descriptor of the weight."""
    if weight.depth_first:
        made = matrix(weight.base, shape.depth, shape.columns, DTYPE, tile.depth, tile.columns)
    else:
        made = matrix(weight.base, shape.columns, shape.depth, DTYPE, tile.columns, tile.depth)
    return made


@jit
def place(index, row_tiles, column_tiles, tile):
    """Return ``(row, column)`` of the first element of tile ``index``: down ``tile.group`` rows of
    tiles, column by column, and then the next ``tile.group`` rows."""
    in_group = tile.group * column_tiles
    first = index // in_group * tile.group
    height = tl.minimum(row_tiles - first, tile.group)
    within = index % in_group
    return (first + within % height) * tile.rows, within // height * tile.columns


@jit
def product(
    x,
    weights,
    row,
    column,
    shape,
    weight,
    tile,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return the tile at ``(row, column)`` in fp32.

    Args:
        x, weights: descriptors; blocks of ``x`` are ``[tile.rows, tile.depth]``.
        weight: the :class:`Weight`.
        PRECISION: of fp32 operands: ``"ieee"`` or ``"tf32"``.
    """
    fp8: tl.constexpr = DTYPE.is_fp8()
    tl.static_assert(
        not fp8 or tile.depth == 128, "the bits of fp8 sums depend on the step, so it is 128"
    )
    imprecise: tl.constexpr = 128 if fp8 else 0
    sums = tl.zeros((tile.rows, tile.columns), tl.float32)
    for step in tl.range(0, tl.cdiv(shape.depth, tile.depth)):
        at = step * tile.depth
        left = x.load([row, at])
        if weight.depth_first:
            right = weights.load([at, column])
        else:
            right = weights.load([column, at]).T
        sums = tl.dot(left, right, sums, input_precision=PRECISION, max_num_imprecise_acc=imprecise)
    return sums


@jit
def width_of(shape, OUT: tl.constexpr, ALIGNED: tl.constexpr):
    """Return ``shape.columns``, int64; if ``ALIGNED``, the compiler learns that a row of the result
    is a multiple of 16 bytes, and loads and stores 16 at once."""
    width = tl.cast(shape.columns, tl.int64)
    if ALIGNED:
        per_word: tl.constexpr = 128 // OUT.primitive_bitwidth
        width = width // per_word * per_word
    return width


@jit
def indices(row, column, end_row, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return ``(rows, columns, inside)`` of the block ``[ROWS, COLUMNS]`` at ``(row, column)``;
    inside are the elements before row ``end_row`` and column ``width``."""
    rows = (row + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    columns = (column + tl.arange(0, COLUMNS)).to(tl.int64)[None, :]
    return rows, columns, (rows < end_row) & (columns < width)


@jit
def descaled(sums, x_scale, x_step, scales, row, column, end_row, shape, tile):
    """Return a tile of fp8 operands times their scales.

    Args:
        x_scale, x_step: address of row 0's scale, and elements from one row's to the next one's.
    """
    rows = row + tl.arange(0, tile.rows)
    columns = column + tl.arange(0, tile.columns)
    of_columns = (
        tl.cast(scales.weight, tl.int64).to(tl.pointer_type(tl.float32))
        + columns * scales.weight_step
    )
    of_rows = tl.cast(x_scale, tl.int64).to(tl.pointer_type(tl.float32)) + rows * x_step
    scaled = sums * tl.load(of_columns, mask=columns < shape.columns, other=0.0)[None, :]
    return scaled * tl.load(of_rows, mask=rows < end_row, other=0.0)[:, None]


@jit
def with_bias(sums, weight, columns, width, OUT: tl.constexpr):
    """Return a tile, whose ``columns`` are ``[1, n]``, plus the bias if there is one."""
    if weight.biased:
        bias = tl.cast(weight.bias, tl.int64).to(tl.pointer_type(OUT)) + columns
        sums += tl.load(bias, mask=columns < width, other=0.0).to(tl.float32)
    return sums


@jit
def store(out, values, rows, columns, inside, width, OUT: tl.constexpr, ALIGNED: tl.constexpr):
    """Store rounded ``values`` to their places in the matrix ``[any, width]`` at address ``out``.

    Args:
        width: of :func:`width_of`.
        ALIGNED: ``out`` and the bytes of a row are multiples of 16.
    """
    tl.store(elements.pointer(out, OUT, ALIGNED) + rows * width + columns, values, mask=inside)
