# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of dense reductions, with results that only correct rounding, NaN and zeros show."""

from __future__ import annotations

import pytest
import torch
import triton.language as tl

import tdcoll
from tdcoll.primitives import reduce
from tdcoll.primitives.reduce import ACCUMULATORS, OPERATIONS, accumulator, check_operation

MAX_NAN_ZERO = [[1.0, float("nan"), -0.0, -5.0], [2.0, 1.0, -0.0, -7.0], [-3.0, 1.0, -0.0, -6.0]]


@tdcoll.jit
def dense(parts, out, n, world, OP: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr):
    """``parts [world, n] -> out [n]``: reduced over the ranks in their order."""
    at = tl.arange(0, BLOCK)
    sum = tl.zeros([BLOCK], ACC)
    for rank in tl.range(0, world):
        part = tl.load(parts + rank * n + at, mask=at < n, other=0).to(ACC)
        sum = reduce.accumulate(sum, part, rank == 0, OP)
    result = reduce.rounded(reduce.finish(sum, world, OP), out.dtype.element_ty, OP)
    tl.store(out + at, result, mask=at < n)


def reduced(parts: torch.Tensor, op: str) -> torch.Tensor:
    world, n = parts.shape
    out = torch.empty(n, dtype=parts.dtype)
    dense[(1,)](parts, out, n, world, OPERATIONS[op], accumulator(parts.dtype), 8)
    return out


def bits(values: torch.Tensor) -> list[int]:
    of = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return values.view(of[values.dtype.itemsize]).tolist()


FLOATS = (torch.float16, torch.float32, torch.float64)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("op", ["sum", "mean", "prod"])
def test_sums_are_rounded_once(op: str, dtype: torch.dtype) -> None:
    parts = torch.randn(3, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    wide = parts.to(ACCUMULATORS[dtype])
    wanted = wide[0] * wide[1] * wide[2] if op == "prod" else wide[0] + wide[1] + wide[2]
    wanted = wanted / torch.tensor(3, dtype=wide.dtype) if op == "mean" else wanted
    assert bits(reduced(parts, op)) == bits(wanted.to(dtype))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("op", ["max", "min"])
def test_nan_propagates_through_max_and_min(op: str, dtype: torch.dtype) -> None:
    parts = torch.tensor(MAX_NAN_ZERO, dtype=dtype)
    got = reduced(parts, op)
    assert got[1].isnan()
    wanted = {"max": [2.0, 0.0, -5.0], "min": [-3.0, 0.0, -7.0]}[op]
    assert got[[0, 2, 3]].tolist() == wanted


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("op", OPERATIONS)
def test_no_result_is_minus_zero(op: str, dtype: torch.dtype) -> None:
    least = -torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps  # halves, and its squares, are rounded to zero
    zeros = torch.zeros(2, dtype=dtype)
    parts = torch.stack([torch.stack([-zeros, -zeros]).view(4), torch.stack([-zeros, zeros]).view(4)])
    assert bits(reduced(parts, op)) == [0] * 4
    if op in ("mean", "prod"):
        parts = torch.full((2, 1), float(least), dtype=dtype)
        parts[1] = 0 if op == "mean" else -parts[1]
        assert bits(reduced(parts, op)) == [0]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_integers_are_their_own_accumulators(dtype: torch.dtype) -> None:
    most = torch.iinfo(dtype).max
    parts = torch.tensor([[most, -7, 3], [1, -9, 5]], dtype=dtype)
    assert reduced(parts, "sum").tolist() == [torch.iinfo(dtype).min, -16, 8]
    assert reduced(parts, "max").tolist() == [most, -7, 5]
    assert reduced(parts, "min").tolist() == [1, -9, 3]
    assert reduced(parts, "prod").tolist() == [most, 63, 15]


def test_operations_that_there_are_not() -> None:
    for op in OPERATIONS:
        assert check_operation(op, torch.bfloat16) == op
    assert [check_operation(op, torch.bfloat16) for op in ("avg", "product")] == ["mean", "prod"]  # torch's names
    with pytest.raises(ValueError, match="op must be one of sum, mean, max, min, prod; got 'median'"):
        check_operation("median", torch.float32)
    with pytest.raises(ValueError, match=r"op must be one of sum, max, min, prod for torch.int64; got 'mean'"):
        check_operation("mean", torch.int64)
