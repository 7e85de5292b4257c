# SPDX-License-Identifier: Apache-2.0
"""Elements of one dtype as elements of another: a kernel beside calls whose result has a dtype of
its own.

It communicates with no rank. Values are rounded once and stored as results of reductions are
(:func:`tdcoll.primitives.reduce.rounded`): -0.0 becomes +0.0, and values that are too large for
e4m3fn become its largest.
"""

import triton.language as tl

from tdcoll.language.jit import jit
from tdcoll.primitives import elements
from tdcoll.primitives.group import in_stream_order
from tdcoll.primitives.reduce import PROD, rounded


@jit
def _cast_tile(
    source,
    out,
    count,
    FROM: tl.constexpr,
    TO: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
):
    if ALIGNED:
        count = count // 16 * 16  # so that the mask of 16 neighbours is one
    index = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = index < count
    stored = tl.load(elements.pointer(source, FROM, ALIGNED) + index, mask=mask, other=0)
    values = elements.widened(stored, FROM, tl.float32)
    # PROD, because a value may be -0.0.
    tl.store(elements.pointer(out, TO, ALIGNED) + index, rounded(values, TO, PROD), mask=mask)


@jit
def cast(
    source: tl.int64,
    out: tl.int64,
    count: tl.int64,
    FROM: tl.constexpr,
    TO: tl.constexpr,
    TILE: tl.constexpr,
):
    """``[count] -> [count]``. A thread block for each ``TILE`` elements.

    Args:
        source, out: addresses, of any alignment that ``FROM`` and ``TO`` allow.
        FROM, TO: types: fp32, fp16, bf16 or fp8.
        TILE: a power of two.
    """
    in_stream_order()
    if (source | out | count) % 16 == 0:
        _cast_tile(source, out, count, FROM, TO, True, TILE)
    else:
        _cast_tile(source, out, count, FROM, TO, False, TILE)
