# SPDX-License-Identifier: Apache-2.0
"""Reductions whose result has another dtype than their tensor: bits, memory, errors, and what ranks
compare."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from tiers import slow_tier

import tdcoll
from tdcoll.base.errors import RankMismatchError
from tdcoll.calls.result_dtype import CastCall
from tdcoll.testing import World

NAMES = ("all_reduce", "reduce_scatter")
EACH = pytest.mark.parametrize("name", NAMES)
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ROWS, COLUMNS = 6, 5
"""Of a tensor; neither elements nor bytes of a part are a multiple of anything."""


class Residual(NamedTuple):
    """What :func:`halve_and_add` adds."""

    base: Any
    stride: tl.int64


@triton.jit
def halve_and_add(sums, rows, columns, inside, extra):
    at = extra.base + rows * extra.stride + columns
    return 0.5 * sums + tl.load(at, mask=inside, other=0.0).to(sums.dtype)


@triton.jit
def negate(sums, rows, columns, inside, extra):
    return sums * -1.0


def run(host: Callable[[int], None], n_ranks: int = 3, **more: Any) -> None:
    World(n_ranks, heap_bytes=1 << 20, **more).run(host)


def part(pe: int, dtype: torch.dtype) -> torch.Tensor:
    """What a rank brings: thirds, so that sums show where they are rounded."""
    numbers = torch.Generator().manual_seed(pe)
    return (torch.randint(-90, 90, (ROWS, COLUMNS), generator=numbers) / 3).to(dtype)


def sum_of(n_ranks: int, dtype: torch.dtype) -> torch.Tensor:
    """The sum in rank order, in fp32."""
    total = torch.zeros(ROWS, COLUMNS)
    for pe in range(n_ranks):
        total = total + part(pe, dtype).float()
    return total


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


PAIRS = [
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, E4M3),
    (torch.float32, torch.float16),
    slow_tier(torch.float16, E5M2),
    slow_tier(E4M3, torch.bfloat16),
    slow_tier(E5M2, torch.float32),
    slow_tier(torch.bfloat16, torch.bfloat16),
]


@EACH
@pytest.mark.parametrize(("dtype", "out_dtype"), PAIRS)
@pytest.mark.parametrize("given", [False, True], ids=["", "out"])
def test_sums_are_rounded_once(
    name: str, dtype: torch.dtype, out_dtype: torch.dtype, given: bool
) -> None:
    """Behind the epilogue; with and without one, at the first call and later ones."""
    residual = torch.arange(1.0 * ROWS * COLUMNS).view(ROWS, COLUMNS) / 7
    sums = sum_of(3, dtype)
    wanted = {False: sums, True: 0.5 * sums + residual}

    def host(pe: int) -> None:
        call = getattr(tdcoll, name)
        rows = slice(None)
        if name == "reduce_scatter":
            rows = slice(2 * pe, 2 * pe + 2)
        with tdcoll.CollectiveContext(max_bytes_per_rank=64) as ctx:
            for with_epilogue in (True, False, True):
                more: dict[str, Any] = {}
                if with_epilogue:
                    more["epilogue"] = halve_and_add
                    more["extra"] = Residual(residual[rows].contiguous(), COLUMNS)
                expected = wanted[with_epilogue][rows].to(out_dtype)
                out = torch.empty_like(expected) if given else None
                made = call(part(pe, dtype), out=out, out_dtype=out_dtype, ctx=ctx, **more)
                assert made.dtype is out_dtype
                assert not given or made is out
                assert torch.equal(bits(made), bits(expected))
            ctx.check()

    run(host)


@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot", "direct", "loop", "ce", "1d"])
def test_every_algorithm(algorithm: str) -> None:
    wanted = (sum_of(3, torch.bfloat16) / 3).to(E5M2)

    def host(pe: int) -> None:
        with tdcoll.CollectiveContext(max_bytes_per_rank=256) as ctx:
            x = part(pe, torch.bfloat16)
            made = tdcoll.all_reduce(x, "mean", out_dtype=E5M2, ctx=ctx, algorithm=algorithm)
            assert torch.equal(bits(made), bits(wanted))
            ctx.check()

    run(host)


def test_special_values_are_those_of_reductions() -> None:
    """No result is -0.0, and what is too large for e4m3fn is its largest."""

    def host(pe: int) -> None:
        x = torch.tensor([0.0, 1e-30, 300.0, float("nan"), -300.0])
        made = tdcoll.all_reduce(x, epilogue=negate, out_dtype=E4M3)
        zero, tiny, least, nan, most = bits(made).tolist()
        assert (zero, tiny, least, nan & 0x7F, most) == (0, 0, 0xFE, 0x7F, 0x7E)
        half = tdcoll.all_reduce(x, epilogue=negate, out_dtype=torch.float16)
        assert not half[:2].signbit().any()

    run(host, 2)


def test_shapes_of_results_and_addresses() -> None:
    """Scalars, nothing, a row for each rank, and tensors that begin anywhere."""

    def host(pe: int) -> None:
        assert tdcoll.all_reduce(torch.ones(()), out_dtype=torch.float16).item() == 3
        assert tdcoll.all_reduce(torch.ones(0, 4), out_dtype=torch.float16).shape == (0, 4)
        out = torch.empty(5, dtype=torch.float16)
        tdcoll.reduce_scatter(torch.ones(3, 5), out=out, out_dtype=torch.float16)
        assert (out == 3).all()
        room = torch.ones(64, dtype=torch.bfloat16)
        for begin in (1, 0, 3):
            made = torch.empty(64)[begin : begin + 48]
            tdcoll.all_reduce(room[begin : begin + 48], out=made, out_dtype=torch.float32)
            assert (made == 3).all()

    run(host)


def test_calls_are_remembered_by_the_result_dtype() -> None:
    def host(pe: int) -> None:
        with tdcoll.CollectiveContext(debug=False) as ctx:
            x = torch.ones(4, dtype=torch.bfloat16)
            for out_dtype in (torch.float32, E4M3, None, torch.float32, E4M3, torch.bfloat16):
                made = tdcoll.all_reduce(x, epilogue=negate, out_dtype=out_dtype, ctx=ctx)
                assert made.dtype is (out_dtype or torch.bfloat16)
                assert (made.float() == -3).all()
            found = [call for call in ctx.cache.values() if isinstance(call, CastCall)]
            assert len(found) == 2

    run(host)


X = torch.ones(6, 4, dtype=torch.bfloat16)
WRONG: list[Any] = [
    ({"out_dtype": torch.int32}, ValueError, r"out_dtype must be None, torch\.float32, .*int32$"),
    ({"out_dtype": "fp8"}, ValueError, r"out_dtype must be None, .*got 'fp8'"),
    ({"out_dtype": torch.float64}, ValueError, r"out_dtype must be None, .*got torch\.float64"),
    (
        {"tensor": X.to(torch.int32)},
        ValueError,
        r"out_dtype must be None or the dtype of tensor unless .*got torch\.float32 with tensor of "
        r"torch\.int32",
    ),
    ({"tensor": X.to(torch.int16)}, TypeError, "tensor must be of float16"),
    ({"out": X.clone()}, ValueError, r"out must be torch\.float32 of shape .*got torch\.bfloat16"),
    ({"op": "xor"}, ValueError, "op must be one of sum"),
    ({"extra": 3}, TypeError, "extra must be a NamedTuple for an epilogue"),
    (
        {"tensor": X.clone().requires_grad_()},
        ValueError,
        "tensor must not require grad, since a call with out_dtype has no derivative",
    ),
    ({"out": "tensor"}, ValueError, "out must not overlap tensor with out_dtype"),
]


@EACH
@pytest.mark.parametrize(("change", "kind", "message"), WRONG, ids=lambda value: str(value)[:40])
def test_wrong_arguments(
    name: str, change: dict[str, Any], kind: type[Exception], message: str
) -> None:
    """At the first call, and when a call like it was made before."""

    def host(pe: int) -> None:
        call = getattr(tdcoll, name)
        room = torch.ones(48, dtype=torch.bfloat16)
        good: dict[str, Any] = {"tensor": X, "out_dtype": torch.float32}
        wrong = {**good, **change}
        if wrong.get("out") == "tensor":
            wrong["tensor"] = room[:24].view(6, 4)
            count = 24 if name == "all_reduce" else 8
            wrong["out"] = room.view(torch.float32)[:count].view(-1, 4)
        with tdcoll.CollectiveContext() as ctx:
            for _ in range(2):
                with pytest.raises(kind, match=message):
                    call(**wrong, ctx=ctx)
                assert (call(**good, ctx=ctx) == 3).all()
            ctx.check()

    run(host)


def test_symmetric_results_and_overlaps_that_come_later() -> None:
    def host(pe: int) -> None:
        symmetric = tdcoll.empty((4,), torch.float32)
        room = torch.ones(16, dtype=torch.bfloat16)
        x = room[:4]
        with tdcoll.CollectiveContext(debug=False) as ctx:
            more: dict[str, Any] = {"out_dtype": torch.float32, "ctx": ctx}
            with pytest.raises(ValueError, match="symmetric must be False if out_dtype isn't"):
                tdcoll.all_reduce(x, out=symmetric, symmetric=True, **more)
            for _ in range(2):
                assert (tdcoll.all_reduce(x, out=symmetric, **more) == 3).all()
                with pytest.raises(ValueError, match="out must not overlap tensor"):
                    tdcoll.all_reduce(x, out=room.view(torch.float32)[:4], **more)
                residual = torch.ones(4)
                named = {"epilogue": halve_and_add, "extra": Residual(residual, 4)}
                with pytest.raises(ValueError, match=r"out must not overlap extra\.base"):
                    tdcoll.all_reduce(x, out=residual, **named, **more)
            ctx.check()

    run(host)


@EACH
def test_ranks_that_disagree(name: str) -> None:
    def host(pe: int) -> None:
        call = getattr(tdcoll, name)
        with tdcoll.CollectiveContext(debug=True) as ctx:
            for others in (torch.float16, None):
                of_rank = others if pe else torch.float32
                with pytest.raises(RankMismatchError, match=r"out_dtype torch\.float32"):
                    call(X, epilogue=negate, out_dtype=of_rank, ctx=ctx)
            assert (call(X, epilogue=negate, out_dtype=E5M2, ctx=ctx).float() == -3).all()

    run(host)
