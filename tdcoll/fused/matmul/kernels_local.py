# SPDX-License-Identifier: Apache-2.0
"""A matmul without communication, and what follows a reduction: for the parts in a row.

:func:`matmul` has the bits of the kernels that communicate (:mod:`tdcoll.fused.matmul.product`). It
stands where cuBLAS can't: for fp8, for a bias or an epilogue that is applied to sums before they
are rounded, and for calls that exclude a split of the depth.

:func:`finish` gets sums of rounded parts in fp32, adds the bias, and calls the epilogue, so that
the result is rounded once, as by the kernels that communicate.
"""

import triton.language as tl

from tdcoll.fused.matmul.product import (
    descaled,
    indices,
    matrix,
    place,
    product,
    store,
    weight_matrix,
    width_of,
    with_bias,
)
from tdcoll.language.jit import jit
from tdcoll.primitives.group import in_stream_order
from tdcoll.primitives.reduce import PROD, rounded


@jit
def matmul(
    source: tl.int64,
    out: tl.int64,
    weight,
    scales,
    shape,
    extra,
    tile,
    DTYPE: tl.constexpr,
    OUT: tl.constexpr,
    PRECISION: tl.constexpr,
    EPILOGUE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """``[rows, depth], [depth, columns] -> [rows, columns]``. Any number of thread blocks.

    Args:
        source: address of ``x``; a multiple of 16, rows of a multiple of 16 bytes.
        out: address of the result.
        weight, scales, shape, tile: tuples of :mod:`tdcoll.fused.matmul.product`; ``shape.rows``
            are all rows.
        extra: of the epilogue; a tuple or None.
        DTYPE, OUT: types of the operands and of the result.
        PRECISION: of fp32 operands, ``"ieee"`` or ``"tf32"``.
        EPILOGUE: function of :mod:`tdcoll.primitives.epilogue`.
        ALIGNED: ``out`` and the bytes of its rows are multiples of 16.
    """
    in_stream_order()
    width = width_of(shape, OUT, ALIGNED)
    x = matrix(source, shape.rows, shape.depth, DTYPE, tile.rows, tile.depth)
    weights = weight_matrix(weight, shape, tile, DTYPE)
    row_tiles = tl.cdiv(shape.rows, tile.rows)
    column_tiles = tl.cdiv(shape.columns, tile.columns)
    for number in tl.range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0)):
        row, column = place(number, row_tiles, column_tiles, tile)
        sums = product(x, weights, row, column, shape, weight, tile, DTYPE, PRECISION)
        if scales.used:
            sums = descaled(
                sums, scales.x, scales.x_step, scales, row, column, shape.rows, shape, tile
            )
        rows, columns, inside = indices(row, column, shape.rows, width, tile.rows, tile.columns)
        made = EPILOGUE(with_bias(sums, weight, columns, width, OUT), rows, columns, inside, extra)
        store(out, made.to(OUT), rows, columns, inside, width, OUT, ALIGNED)


@jit
def finish(
    source: tl.int64,
    out: tl.int64,
    weight,
    shape,
    extra,
    OUT: tl.constexpr,
    EPILOGUE: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """``fp32 [rows, columns] -> [rows, columns]``. One thread block for each block of results.

    Args:
        source: address of the sums.
        out: address of the result.
        weight, shape: tuples of :mod:`tdcoll.fused.matmul.product`, of which the bias, the rows and
            the columns are used.
        extra: of the epilogue; a tuple or None.
        OUT: type of the result.
        EPILOGUE: function of :mod:`tdcoll.primitives.epilogue`.
        ALIGNED: ``out`` and the bytes of its rows are multiples of 16.
        ROWS, COLUMNS: of a block, powers of two.
    """
    in_stream_order()
    width = width_of(shape, OUT, ALIGNED)
    column_blocks = tl.cdiv(shape.columns, COLUMNS)
    row = tl.program_id(0) // column_blocks * ROWS
    column = tl.program_id(0) % column_blocks * COLUMNS
    rows, columns, inside = indices(row, column, shape.rows, width, ROWS, COLUMNS)
    numbers = tl.cast(source, tl.int64).to(tl.pointer_type(tl.float32))
    sums = tl.load(numbers + rows * width + columns, mask=inside, other=0.0)
    made = EPILOGUE(with_bias(sums, weight, columns, width, OUT), rows, columns, inside, extra)
    # PROD, because what an epilogue returns may be -0.0, as a product may be.
    store(out, rounded(made, OUT, PROD), rows, columns, inside, width, OUT, ALIGNED)
