# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of sparse all-reduces against the reference: every dtype and operation, bit by bit, on
all ranks."""

from __future__ import annotations

import itertools

import pytest
import torch
from tiers import slow_tier

import tdcoll
from tdcoll.collectives.sparse_all_reduce.rows import rows_of_pair
from tdcoll.primitives.reduce import TORCH_OPERATIONS
from tdcoll.testing import World

from .cases import DTYPES, EACH, FLOATS, OPS, Options, check_all, some_part, some_values
from .reference import Rows

LAYOUTS = pytest.mark.parametrize("layout", [[3], [2, 1], [1, 1, 1]], ids=str)


@EACH
@LAYOUTS
@pytest.mark.parametrize("op", ["sum", "mean", "prod"])
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, *map(slow_tier, (torch.bfloat16, torch.float16, torch.float64))],
    ids=str,
)
def test_floats_have_the_bits_of_the_documented_order(
    dtype: torch.dtype, op: str, layout: list[int], algorithm: str
) -> None:
    """In rank order with one rounding, in every node's order with a rounding each, or node by node
    with one."""
    parts = [
        Rows(torch.arange(9), some_values((9, 3), dtype, rank, exact=False)) for rank in range(3)
    ]
    check_all(parts, 9, Options(op, algorithm, coalesced=True), layout=layout)


ODD = (float("nan"), float("inf"), float("-inf"), -0.0, 1.5)


@EACH
@pytest.mark.parametrize("layout", [[2], [1, 1]], ids=str)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    "dtype", [torch.float16, *map(slow_tier, (torch.float32, torch.float64))], ids=str
)
def test_numbers_that_are_none(
    dtype: torch.dtype, op: str, layout: list[int], algorithm: str
) -> None:
    """Every pair of NaN, infinities, -0 and 1.5; and each of them where one rank alone has the
    row."""
    pairs = [(a, b) for a in ODD for b in ODD]
    ids = torch.arange(len(pairs))
    alone = torch.arange(100, 100 + len(ODD))
    mine = Rows(torch.cat((ids, alone)), torch.tensor([*(a for a, _ in pairs), *ODD]).view(-1, 1))
    theirs = Rows(
        torch.cat((ids, alone + 50)), torch.tensor([*(b for _, b in pairs), *ODD]).view(-1, 1)
    )
    parts = [Rows(part.indices, part.values.to(dtype)) for part in (mine, theirs)]
    check_all(parts, 200, Options(op, algorithm, coalesced=True), layout=layout)


@EACH
@pytest.mark.parametrize("layout", [[3], [2, 1]], ids=str)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [torch.float16, slow_tier(torch.float32)], ids=str)
def test_no_result_is_a_negative_zero(
    dtype: torch.dtype, op: str, layout: list[int], algorithm: str
) -> None:
    """Of a row that one rank has once, or several times, of zeros of both signs, of what is rounded
    to zero."""
    ids = [[0, 1, 1, 2, 3, 3, 5], [2, 3, 4, 5], [2, 5, 6]]
    zeros = [[-0.0] * 7, [0.0, -0.0, -0.0, -0.0], [-0.0] * 3]
    zeros[2][2] = -6e-8 if op in ("mean", "prod") else -0.0  # a third of it is no number in fp16
    ids[1].append(6)
    zeros[1].append(6e-8 if op == "prod" else -0.0)
    parts = [
        Rows(torch.tensor(i), torch.tensor(z).to(dtype)) for i, z in zip(ids, zeros, strict=True)
    ]
    if dtype == torch.float32:
        parts = [Rows(part.indices, part.values.where(part.values == 0, 0)) for part in parts]
    for got in check_all(parts, 9, Options(op, algorithm), layout=layout):
        assert got.rows.values.numel() == 7
        assert not got.rows.values.any()
        assert not got.rows.values.signbit().any()


@EACH
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, *map(slow_tier, (torch.float32, torch.int32))], ids=str
)
@pytest.mark.parametrize(("times", "value"), [(2, 3), (100, 3), (128, 3), (129, 4), (300, 1)])
def test_a_row_that_is_many_times_there(
    times: int, value: int, dtype: torch.dtype, algorithm: str
) -> None:
    """Sums that fit into every dtype, while a sum of ones in bf16 stops growing at 256."""
    first = Rows(torch.tensor([7, *[4] * times, 9]), torch.full((times + 2, 2), value).to(dtype))
    second = Rows(torch.tensor([4, 4]), torch.full((2, 2), value).to(dtype))
    got = check_all([first, second], 10, Options(algorithm=algorithm))
    assert got[0].rows.values[0].tolist() == [value * (times + 2)] * 2


def test_many_rows_that_are_many_times_there() -> None:
    """Their rows are summed in pieces of 128, which hold the end of one and the beginning of the
    next."""
    ids = torch.cat([torch.full((n,), id) for id, n in enumerate((150, 3, 200, 131, 1, 128, 260))])
    shuffled = ids[torch.randperm(ids.numel(), generator=torch.Generator().manual_seed(0))]
    parts = [
        Rows(shuffled, some_values((ids.numel(), 2), torch.float32, 5)),
        some_part(1, 9, 7, (2,), torch.float32),
    ]
    for algorithm in ("owner", "gather", "dense"):
        check_all(parts, 7, Options(algorithm=algorithm))


OTHERS = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_operation(dtype: torch.dtype) -> None:
    parts = [
        Rows(torch.tensor([1, 2 + rank]), torch.full((2, 2), 2 * rank + 2).to(dtype))
        for rank in range(2)
    ]
    for op in OPS:
        if dtype in FLOATS or op != "mean":
            check_all(parts, 4, Options(op))


def test_other_dtypes_are_refused() -> None:
    for dtype in OTHERS:
        with pytest.raises(
            TypeError, match=rf"^values must have one of the dtypes .*; got {dtype}$"
        ):
            rows_of_pair(
                torch.tensor([1]), torch.ones(1, 2).to(dtype), 4, False, torch.device("cpu")
            )


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("op", ["sum", "prod", "max", "min"])
def test_integers_wrap_and_reach_their_limits(dtype: torch.dtype, op: str) -> None:
    limits = torch.iinfo(dtype)
    values = torch.tensor([[limits.max, limits.min], [limits.min, limits.max]], dtype=dtype)
    more = torch.tensor([[1, -1], [limits.min, limits.max]], dtype=dtype)
    for algorithm in ("owner", "gather", "dense"):
        check_all(
            [Rows(torch.arange(2), values), Rows(torch.arange(2), more)], 2, Options(op, algorithm)
        )


def test_operations_of_torch_are_the_named_ones() -> None:
    """One context has calls of the same shape in every operation, dtype and form."""

    def host(pe: int) -> None:
        ids = torch.tensor([0, 2 + pe])
        with tdcoll.SparseContext(max_rows_per_rank=4, max_row_bytes=16, debug=True) as ctx:
            for (op, name), dtype in itertools.product(TORCH_OPERATIONS.items(), FLOATS):
                rows, ours = (
                    (ids, torch.tensor([[2.0], [3.0 + pe]], dtype=dtype)),
                    op if pe else name,
                )
                for got in (
                    tdcoll.sparse_all_reduce_rows(*rows, 5, ours, ctx=ctx)[1],
                    tdcoll.sparse_all_reduce_rows(*rows, 5, ours, ctx=ctx, algorithm="gather")[1],
                    tdcoll.sparse_all_reduce_padded(*rows, 5, ours, ctx=ctx).values,
                ):
                    first = {"sum": 4.0, "mean": 2.0, "prod": 4.0}.get(name, 2.0)
                    others = [1.5, 2.0] if name == "mean" else [3.0, 4.0]
                    assert got.dtype == dtype
                    assert got.flatten()[:3].tolist() == [first, *others]

    World(2).run(host)
