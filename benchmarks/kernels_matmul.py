# SPDX-License-Identifier: Apache-2.0
"""Kernels of ``matmul_kernels.py``: a matmul that communicates nothing, and an epilogue.

Triton looks up the names of annotations, so those of arguments are left out.
"""

from typing import Any, NamedTuple

import triton.language as tl

from tdcoll.fused.matmul.product import matrix, place, product
from tdcoll.language.jit import jit


class Residual(NamedTuple):
    """What :func:`add_residual` adds: ``[rows, columns]``, and the elements of a row."""

    base: Any
    stride: tl.int64


@jit
def add_residual(sums, rows, columns, inside, extra):
    """An epilogue: twice the sum plus a residual."""
    residual = tl.load(extra.base + rows * extra.stride + columns, mask=inside, other=0.0)
    return 2.0 * sums + residual.to(tl.float32)


@jit
def alone(x, weights, out, shape, weight, tile, HOST: tl.constexpr):
    """A persistent matmul; ``x`` and ``weights`` are descriptors, or addresses of ``[rows, depth]``
    and ``[columns, depth]``."""
    if HOST:
        left = x
        right = weights
    else:
        left = matrix(x, shape.rows, shape.depth, tl.bfloat16, tile.rows, tile.depth)
        right = matrix(weights, shape.columns, shape.depth, tl.bfloat16, tile.columns, tile.depth)
    row_tiles = tl.cdiv(shape.rows, tile.rows)
    column_tiles = tl.cdiv(shape.columns, tile.columns)
    width = tl.cast(shape.columns, tl.int64) // 8 * 8
    for number in tl.range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0)):
        row, column = place(number, row_tiles, column_tiles, tile)
        sums = product(left, right, row, column, shape, weight, tile, tl.bfloat16, "ieee")
        rows = (row + tl.arange(0, tile.rows)).to(tl.int64)[:, None]
        columns = (column + tl.arange(0, tile.columns)).to(tl.int64)[None, :]
        tl.store(
            out + rows * width + columns,
            sums.to(tl.bfloat16),
            mask=(rows < shape.rows) & (columns < width),
        )
