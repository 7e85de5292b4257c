# SPDX-License-Identifier: Apache-2.0
"""What matmuls that communicate refuse, how they explain themselves, which way they go, and what
they remember."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiers import slow_tier

import tdcoll
from tdcoll import runtime
from tdcoll.base.errors import RankMismatchError
from tdcoll.calls import run as calls
from tdcoll.fused.matmul.operation import OPERATIONS
from tdcoll.fused.matmul.policy import (
    ALGORITHMS,
    GATHER,
    NAMES,
    SCATTER,
)
from tdcoll.fused.matmul.prepared import PreparedMatmul
from tdcoll.testing import World

from .cases import Residual, add_residual

EACH = pytest.mark.parametrize("name", NAMES)


def run(host: Any, n_pes: int = 1, **more: Any) -> None:
    World(n_pes, heap_bytes=1 << 23, **more).run(host)


# ---------------------------------------------------------------------- wrong arguments

X = torch.zeros(2, 32)
BF16 = torch.zeros(2, 32, dtype=torch.bfloat16)
E4M3 = torch.float8_e4m3fn
WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"x": [1.0]}, TypeError, "x must be a torch.Tensor"),
    (
        {"x": torch.zeros(2, 32, dtype=torch.int32)},
        TypeError,
        "x must be of torch.bfloat16, .*; got torch.int32",
    ),
    ({"x": torch.zeros(32, 2).t()}, ValueError, "x must be contiguous"),
    ({"x": torch.zeros(32)}, ValueError, r"x must be \[rows, ..., depth\]"),
    (
        {"x": torch.zeros(2, 30)},
        ValueError,
        r"multiple of 4 of torch.float32; got shape \[2, 30\]. Pad",
    ),
    ({"weight": None}, TypeError, "weight must be a torch.Tensor"),
    (
        {"weight": BF16},
        ValueError,
        r"weight must be torch.float32 of shape \[columns, 32\]; got torch.bfloat16",
    ),
    (
        {"weight": torch.zeros(32, 8)},
        ValueError,
        r"of shape \[columns, 32\]; got torch.float32 of shape \[32, 8\]",
    ),
    ({"depth_first": True}, ValueError, r"of shape \[32, columns\]; got"),
    (
        {"depth_first": True, "weight": torch.zeros(32, 6)},
        ValueError,
        "a multiple of 4 columns with depth_first",
    ),
    ({"depth_first": 1}, TypeError, "depth_first must be a bool, got 1"),
    ({"batch_invariant": None}, TypeError, "batch_invariant must be a bool"),
    (
        {"bias": torch.zeros(9)},
        ValueError,
        r"bias must be torch.float32 of shape \[8\]; got torch.float32 of \[9\]",
    ),
    ({"bias": torch.zeros(8).bfloat16()}, ValueError, "bias must be torch.float32"),
    ({"out": torch.zeros(3, 8)}, ValueError, r"out must be torch.float32 of shape \[2, 8\]"),
    ({"x": X, "weight": X, "out": X[:, :2]}, ValueError, "out must be contiguous"),
    (
        {"x": torch.zeros(2, 4), "weight": torch.zeros(4, 4), "out": "x"},
        ValueError,
        "out must not overlap x",
    ),
    (
        {"x_scale": torch.ones(1)},
        ValueError,
        "x_scale is for operands of fp8, which need it; got x of torch.float32",
    ),
    (
        {"x": X.to(E4M3), "weight": torch.zeros(8, 32).to(E4M3)},
        ValueError,
        "x_scale is for operands of fp8",
    ),
    (
        {
            "x": X.to(E4M3),
            "weight": torch.zeros(8, 32).to(E4M3),
            "x_scale": torch.ones(3),
            "weight_scale": torch.ones(1),
        },
        ValueError,
        "x_scale must be torch.float32 of 1 or 2 elements",
    ),
    ({"out_dtype": torch.float64}, ValueError, "out_dtype must be None, torch.bfloat16"),
    ({"epilogue": abs}, TypeError, "epilogue must be a function of triton.jit or None"),
    ({"extra": Residual(X, 8)}, TypeError, "extra must be a NamedTuple for an epilogue"),
    (
        {"epilogue": add_residual, "extra": (X, 8)},
        TypeError,
        "extra must be a NamedTuple for an epilogue",
    ),
    (
        {"x": X.clone().requires_grad_()},
        ValueError,
        r"x must not require grad, .* torch.ops.tdcoll",
    ),
    (
        {"weight": [torch.nn.Parameter(torch.ones(4, 32)), torch.ones(4, 32)]},
        (TypeError, ValueError),
        "weight must ",
    ),
    ({"bias": torch.ones(8).requires_grad_()}, ValueError, "bias must not require grad"),
    ({"algorithm": 3}, TypeError, "algorithm must be a str, got 3"),
    ({"algorithm": "ring"}, ValueError, "algorithm must be one of auto, "),
    ({"ctx": 3}, TypeError, "ctx must be a tdcoll.CollectiveContext"),
    ({"group": [0]}, ValueError, "group must be None with ctx"),
]


@EACH
@pytest.mark.parametrize(("change", "kind", "message"), WRONG, ids=lambda value: str(value)[:40])
def test_wrong_arguments(
    name: str, change: dict[str, Any], kind: type[Exception], message: str
) -> None:
    call = getattr(tdcoll.fused, name)

    def host(pe: int) -> None:
        with tdcoll.CollectiveContext(max_bytes_per_rank=1 << 12) as ctx:
            good = {"x": X, "weight": torch.ones(8, 32), "ctx": ctx}
            wrong = {**good, **change}
            if wrong.get("out") == "x":
                wrong["out"] = wrong["x"]
            for _ in range(2):  # also when a call like it was made before
                with pytest.raises(kind, match=message):
                    call(**wrong)
                call(**good)
            ctx.check()

    run(host)


def test_rows_that_cannot_be_scattered() -> None:
    def host(pe: int) -> None:
        with pytest.raises(
            ValueError, match=r"divisible by the 3 rank\(s\); got shape \[4, 32\]. Pad it by 2"
        ):
            tdcoll.fused.matmul_reduce_scatter(torch.zeros(4, 32), torch.zeros(8, 32))

    run(host, 3)


@EACH
def test_ranks_that_disagree(name: str) -> None:
    call = getattr(tdcoll.fused, name)

    def host(pe: int) -> None:
        with tdcoll.CollectiveContext(max_bytes_per_rank=1 << 14, debug=True) as ctx:
            weight = torch.ones(8, 32)
            call(X, weight, ctx=ctx)
            with pytest.raises(RankMismatchError, match="pad the shorter shards"):
                call(torch.zeros(4 if pe else 2, 32), weight, ctx=ctx)
            more = {"epilogue": add_residual, "extra": Residual(torch.zeros(4, 8), 8)}
            with pytest.raises(RankMismatchError, match="epilogue"):
                call(X, weight, ctx=ctx, **(more if pe else {}))
            with pytest.raises(ValueError if pe else RankMismatchError, match="bias must be"):
                call(X, weight, bias=torch.zeros(9 if pe else 8), ctx=ctx)
            # `out` is this rank's own matter, and so is what an epilogue reads.
            first = X.shape[0] * (2 if name == GATHER else 1) // (2 if name == SCATTER else 1)
            call(X, weight, ctx=ctx, out=torch.zeros(first, 8) if pe else None)

    run(host, 2)


def test_no_rows() -> None:
    def host(pe: int) -> None:
        nothing = torch.zeros(0, 3, 32)
        for name in NAMES:
            assert getattr(tdcoll.fused, name)(nothing, torch.zeros(8, 32)).shape == (0, 3, 8)

    run(host, 2)


# ---------------------------------------------------------------------- explanations and the fast path


@pytest.fixture
def lines() -> Iterator[list[str]]:
    logged: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            logged.append(record.getMessage())

    logger = logging.getLogger("tdcoll")
    handler = Handler(logging.DEBUG)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield logged
    logger.removeHandler(handler)
    logger.setLevel(level)


@EACH
@pytest.mark.parametrize(
    ("options", "world", "ranks_per_node"),
    [
        (None, 2, None),
        (None, 3, 2),
        ({"max_blocks": 24}, 2, None),
        ({"max_bytes_per_rank": 2560, "lamport_bytes": 64}, 2, None),
        slow_tier(None, 1, None),
        slow_tier({"max_bytes_per_rank": 256, "lamport_bytes": 64}, 3, 2),
    ],
)
def test_an_explanation_is_what_the_call_logs(
    lines: list[str], name: str, options: Any, world: int, ranks_per_node: int | None
) -> None:
    def host(pe: int) -> None:
        where = {} if options is None else {"ctx": tdcoll.CollectiveContext(**options)}
        weight = torch.ones(24, 16)
        for algorithm in ("auto", *ALGORITHMS[name]):
            for rows in (6, 270):
                x = torch.ones(rows, 16)
                said = tdcoll.explain(name, x, weight=weight, algorithm=algorithm, **where)
                if pe == 0:
                    lines.clear()
                if said.algorithm is None:
                    with pytest.raises(ValueError) as refused:
                        getattr(tdcoll.fused, name)(x, weight, algorithm=algorithm, **where)
                    assert str(refused.value) == said.why
                    continue
                getattr(tdcoll.fused, name)(x, weight, algorithm=algorithm, **where)
                assert pe or said.line in lines
                ctx = (
                    where.get("ctx")
                    or runtime.current().contexts[name, tuple(range(world))].context
                )
                assert (
                    tdcoll.explain(
                        name, (rows, 16), weight=(24, 16), algorithm=algorithm, ctx=ctx
                    ).line
                    == said.line
                )

    run(host, world, ranks_per_node=ranks_per_node)


def test_an_explanation_needs_a_weight() -> None:
    def host(pe: int) -> None:
        with pytest.raises(
            TypeError, match="weight must be a tensor or a shape to explain all_gather_matmul"
        ):
            tdcoll.explain(GATHER, X)

    run(host)


@EACH
def test_repeated_calls_take_the_fast_path(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the addresses of the tensors and the numbers in them are."""
    call = getattr(tdcoll.fused, name)
    slow: list[int] = []
    make_call = calls.make_call

    def counted(*arguments: Any, **more: Any) -> Any:
        slow.append(1)
        return make_call(*arguments, **more)

    monkeypatch.setattr(calls, "make_call", counted)

    def host(pe: int) -> None:
        with tdcoll.CollectiveContext(debug=False) as ctx:
            for turn in range(4):
                x = torch.full((2, 32), 1.0 + turn)
                bias = torch.full((8,), 0.5 * turn)
                y = call(x, torch.ones(8, 32), bias=bias, ctx=ctx)
                assert y[0, 0] == 32 * (1 + turn) + 0.5 * turn
            torch.backends.cuda.matmul.allow_tf32 = True
            call(x, torch.ones(8, 32), bias=bias, ctx=ctx)
            torch.backends.cuda.matmul.allow_tf32 = False
            call(x, torch.ones(8, 32), bias=bias, ctx=ctx)

    run(host)
    assert len(slow) == 2  # the first call, and that in TF32


@EACH
def test_tensors_at_odd_addresses(name: str) -> None:
    """Operands are copied to aligned memory; a result and what an epilogue reads have kernels of
    their own."""

    def host(pe: int) -> None:
        with tdcoll.CollectiveContext(debug=False) as ctx:
            for shift in (0, 1, 0, 3):
                rooms = [torch.zeros(count + shift)[shift:] for count in (64, 8 * 32, 16, 16)]
                x, weight, out, residual = (
                    room.view(size)
                    for room, size in zip(rooms, ((2, 32), (8, 32), (2, 8), (2, 8)), strict=True)
                )
                x.fill_(1)
                weight.fill_(2)
                residual.fill_(5)
                more = {"epilogue": add_residual, "extra": Residual(residual, 8)}
                y = getattr(tdcoll.fused, name)(x, weight, out=out, ctx=ctx, **more)
                assert y is out
                assert (y == 2 * 64 + 5).all()
                prepared = [made for made in ctx.cache.values() if isinstance(made, PreparedMatmul)]
                _, (frame,) = prepared[-1].bind(x, weight, out, residual)
                assert all(frame[operand].data_ptr() % 16 == 0 for operand in ("x", "weight"))
            assert len(prepared) == 2

    run(host)


def test_a_result_that_overlaps_later() -> None:
    """The fast path looks, too."""

    def host(pe: int) -> None:
        with tdcoll.CollectiveContext(debug=False) as ctx:
            x = torch.ones(4, 8)
            for _ in range(2):
                tdcoll.fused.matmul_all_reduce(x, torch.ones(8, 8), out=torch.ones(4, 8), ctx=ctx)
                with pytest.raises(ValueError, match="out must not overlap x"):
                    tdcoll.fused.matmul_all_reduce(x, torch.ones(8, 8), out=x, ctx=ctx)

    run(host)


def test_the_operations_have_the_names_of_the_functions() -> None:
    assert set(OPERATIONS) == set(NAMES)
    assert all(hasattr(tdcoll.fused, name) for name in NAMES)


def test_parts_of_one_parameter_get_no_silent_result_without_a_gradient() -> None:
    def host(pe: int) -> None:
        parts = torch.nn.Parameter(torch.ones(16, 32)).split(8)
        with pytest.raises(ValueError, match="weight must not require grad"):
            tdcoll.fused.all_gather_matmul(X, parts)
        with torch.no_grad():
            made = tdcoll.fused.all_gather_matmul(X, parts)
        assert [tuple(one.shape) for one in made] == [(2, 8), (2, 8)]

    run(host)


def test_several_weights_have_one_dtype_and_depth() -> None:
    def host(pe: int) -> None:
        for other in (torch.ones(8, 32, dtype=torch.float16), torch.ones(8, 16)):
            with pytest.raises(ValueError, match=r"weight\[1\] must have the dtype and depth"):
                tdcoll.fused.all_gather_matmul(X, [torch.ones(8, 32), other])

    run(host)


def test_what_was_gathered_of_no_rows() -> None:
    def host(pe: int) -> None:
        made, gathered = tdcoll.fused.all_gather_matmul(
            torch.empty(0, 32), torch.ones(8, 32), gathered=True
        )
        assert (tuple(made.shape), tuple(gathered.shape)) == ((0, 8), (0, 32))

    run(host)


def test_the_kernels_of_a_call_do_not_depend_on_who_passes_out() -> None:
    """So ranks wait for each other's loads together; other calls load other kernels."""

    def host(pe: int) -> None:
        with tdcoll.CollectiveContext(max_bytes_per_rank=1 << 12) as ctx:
            weight = torch.ones(8, 32)

            def variant(**more: Any) -> Any:
                before = set(ctx.cache)
                tdcoll.fused.matmul_all_reduce(X, weight, ctx=ctx, **more)
                (made,) = [
                    value
                    for key, value in ctx.cache.items()
                    if key not in before and isinstance(value, PreparedMatmul)
                ]
                return made.variant

            usual = variant()
            assert variant(out=torch.empty(2, 8)) == usual
            assert variant(batch_invariant=True) != usual
            residual = Residual(torch.ones(2, 8), 8)
            assert variant(epilogue=add_residual, extra=residual) != usual

    run(host)


def test_an_error_on_one_rank_is_one_on_all_in_debug_mode_once_there_is_a_context(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TDCOLL_DEBUG", "1")

    def host(pe: int) -> None:
        weight = torch.ones(8, 32)
        tdcoll.fused.matmul_all_reduce(X, weight)
        wrong = X.double() if pe == 0 else X
        kind = TypeError if pe == 0 else RankMismatchError
        with pytest.raises(kind, match="x must be of"):
            tdcoll.fused.matmul_all_reduce(wrong, weight)

    run(host, 2)
