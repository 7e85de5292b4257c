# SPDX-License-Identifier: Apache-2.0
"""What the fused call refuses, what it remembers, and which way it goes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from collectives.suite.data import different

import tdcoll
from tdcoll.base.errors import RankMismatchError
from tdcoll.calls.plan import Facts, Plan
from tdcoll.collectives.reduce_scatter.reference import reduce_parts
from tdcoll.fused.policy import NormRows, blocks_of, choose
from tdcoll.runtime.topology import Topology
from tdcoll.testing import World

from .cases import values
from .norms import norm_reference

FP8 = torch.float8_e4m3fn


def run(host: Any, n_pes: int = 1, **more: Any) -> None:
    World(n_pes, heap_bytes=1 << 21, **more).run(host)


def facts(world: int, lamport_bytes: int = 1 << 23, n_nodes: int = 1) -> Facts:
    topology = Topology.of(0, range(world), [rank * n_nodes // world for rank in range(world)])
    return Facts(0, topology, stores=True, lamport_bytes=lamport_bytes)


@pytest.mark.parametrize(
    ("rows", "hidden", "world", "plan"),
    [
        (1, 8192, 4, Plan("one_shot", 8, 2048, 4)),
        (8, 8192, 4, Plan("one_shot", 8, 2048, 4)),
        (64, 8192, 4, Plan("two_shot", 8, 2048, 4)),
        (512, 8192, 4, Plan("two_shot", 1, 16384, 16)),
        (1, 8192, 2, Plan("one_shot", 8, 2048, 4)),
        (63, 8192, 2, Plan("one_shot", 1, 16384, 16)),
        (64, 8192, 2, Plan("two_shot", 4, 4096, 8)),
        (1, 4096, 8, Plan("one_shot", 4, 2048, 4)),
        (200, 16384, 4, Plan("two_shot", 2, 16384, 16)),
        (1, 512, 4, Plan("one_shot", 1, 1024, 2)),
        (4096, 8192, 4, Plan("composed", 1, 16384, 16)),
    ],
)
def test_plans(rows: int, hidden: int, world: int, plan: Plan) -> None:
    assert replace(choose(NormRows(rows, hidden, 2), facts(world)), blocks=0) == plan


def test_two_ranks_take_two_shot_up_to_8_MB() -> None:
    plans = [
        replace(choose(NormRows(rows, 8192, 2), facts(2, lamport_bytes=1 << 25)), blocks=0)
        for rows in (512, 513)
    ]
    assert plans == [Plan("two_shot", 1, 16384, 16), Plan("one_shot", 1, 16384, 16)]


def test_blocks() -> None:
    rows = NormRows(10, 4096, 2)
    assert blocks_of(rows, Plan("one_shot", 4, 2048, 4), 4) == 80
    assert blocks_of(rows, Plan("one_shot", 1, 8192, 16), 4) == 10
    assert blocks_of(rows, Plan("two_shot", 4, 2048, 4), 4) == 3 * 4 * 5
    assert blocks_of(rows, Plan("two_shot", 1, 8192, 16), 4) == 3 * 4
    assert blocks_of(rows, Plan("composed", 1, 8192, 16), 4) == 10


@pytest.mark.parametrize(
    ("algorithm", "more", "message"),
    [
        ("ring", {}, "algorithm must be one of auto, one_shot, two_shot, composed; got 'ring'"),
        (
            "one_shot",
            {"lamport_bytes": 64},
            r"'one_shot' needs lamport_bytes=24576 or more in the context; got 64 on",
        ),
        ("two_shot", {"n_nodes": 2}, "needs one node whose ranks can store"),
        ("two_shot", {"world": 4}, "needs at least 2 ranks and a row for each; got 3 rows on"),
    ],
)
def test_plans_that_there_are_not(algorithm: Any, more: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose(NormRows(3, 4096, 2), facts(**{"world": 2, **more}), algorithm)


X = torch.zeros(2, 64)
WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"x": [1.0]}, TypeError, "x must be a torch.Tensor"),
    (
        {"x": torch.zeros(2, 64, dtype=torch.int32)},
        TypeError,
        "x must be of float16, bfloat16 or float32; got torch.int32",
    ),
    ({"x": torch.zeros(64, 2).t()}, ValueError, "x must be contiguous"),
    (
        {"x": torch.nested.nested_tensor([torch.ones(2)])},
        ValueError,
        "x must be an ordinary tensor; got a nested one",
    ),
    (
        {"x": torch.zeros(())},
        ValueError,
        r"x must have rows of at most 16384 elements, a multiple of 4 .*; got shape \[\]",
    ),
    ({"x": torch.zeros(2, 66)}, ValueError, r"multiple of 4 of torch.float32; got shape \[2, 66\]"),
    ({"x": torch.zeros(1, 16388)}, ValueError, "at most 16384"),
    (
        {"residual": torch.zeros(3, 64)},
        ValueError,
        r"residual must be torch.float32 of shape \[2, 64\]; got .* of \[3, 64\]",
    ),
    ({"residual": None}, TypeError, "residual must be a torch.Tensor"),
    ({"residual": torch.zeros(64, 2).t()}, ValueError, "residual must be contiguous"),
    ({"weight": torch.ones(128)[::2]}, ValueError, "weight must be contiguous"),
    (
        {"weight": torch.zeros(64, dtype=torch.bfloat16)},
        ValueError,
        r"weight must be torch.float32 of shape \[64\]",
    ),
    ({"weight": torch.zeros(32)}, ValueError, "weight must be"),
    ({"eps": "small"}, TypeError, "eps must be a number, got 'small'"),
    ({"eps": -1.0}, ValueError, "eps must be at least 0 and less than 1e.30, got -1.0"),
    ({"eps": float("nan")}, ValueError, "eps must be"),
    ({"in_place": 1}, TypeError, "in_place must be a bool, got 1"),
    (
        {"residual": X, "in_place": True},
        ValueError,
        "residual must not overlap x for a call in place",
    ),
    (
        {"out_dtype": torch.float64},
        ValueError,
        "out_dtype must be None, torch.float32 or torch.float8_e4m3fn",
    ),
    (
        {"scale": torch.ones(1)},
        ValueError,
        "scale is for out_dtype=torch.float8_e4m3fn; got out_dtype=None",
    ),
    (
        {"scale": torch.ones(2), "out_dtype": FP8},
        ValueError,
        r"scale must be torch.float32 of 1 element; got .* of shape \[2\]",
    ),
    *(
        (
            {name: torch.ones(shape).requires_grad_()},
            ValueError,
            rf"{name} must not require grad, .* {name}\.detach\(\)",
        )
        for name, shape in (("x", (2, 64)), ("residual", (2, 64)), ("weight", 64))
    ),
    ({"algorithm": 3}, TypeError, "algorithm must be a str, got 3"),
    ({"ctx": 3}, TypeError, "ctx must be a tdcoll.CollectiveContext"),
]


@pytest.mark.parametrize(("change", "kind", "message"), WRONG, ids=lambda value: str(value)[:40])
def test_wrong_arguments(change: dict[str, Any], kind: type[Exception], message: str) -> None:
    def host(pe: int) -> None:
        with tdcoll.CollectiveContext(max_bytes_per_rank=1 << 12) as ctx:
            good = {"x": X, "residual": torch.zeros(2, 64), "weight": torch.ones(64), "ctx": ctx}
            for _ in range(2):  # also when a call like it was made before
                with pytest.raises(kind, match=message):
                    tdcoll.fused.all_reduce_rms_norm(**{**good, **change})
                tdcoll.fused.all_reduce_rms_norm(**good)
            ctx.check()

    run(host)


def test_ranks_that_disagree() -> None:
    def host(pe: int) -> None:
        with tdcoll.CollectiveContext(max_bytes_per_rank=1 << 12, debug=True) as ctx:
            x = torch.zeros(2, 64)
            tdcoll.fused.all_reduce_rms_norm(x, x.clone(), torch.ones(64), ctx=ctx)
            with pytest.raises(RankMismatchError, match="eps"):
                tdcoll.fused.all_reduce_rms_norm(
                    x, x.clone(), torch.ones(64), ctx=ctx, eps=1e-5 if pe else 1e-6
                )

    run(host, 2)


@pytest.mark.parametrize("in_place", [False, True])
def test_the_pool_alignment_and_the_short_way(in_place: bool) -> None:
    """Calls like the first one are made without its checks; tensors at odd addresses are copied."""

    def host(pe: int) -> None:
        every = [values(rank, (2, 3, 64), torch.bfloat16) for rank in range(2)]
        residual, weight = values(9, (2, 3, 64), torch.bfloat16), values(8, (64,), torch.bfloat16)
        wanted = norm_reference(
            reduce_parts(every, (0, 0)).view(6, 64), residual.view(6, 64), weight, 1e-6, None
        )
        for shift in (0, 0, 1, 3, 0):
            rooms = [
                torch.zeros(part.numel() + shift, dtype=part.dtype)[shift:]
                for part in (residual, every[pe])
            ]
            old, x = (room.view(2, 3, 64) for room in rooms)
            old.copy_(residual)
            x.copy_(every[pe])
            out, new = tdcoll.fused.all_reduce_rms_norm(x, old, weight, in_place=in_place)
            assert (new is old) == in_place
            assert out.shape == new.shape == (2, 3, 64)
            assert different(out.view(6, 64), wanted[0]) == 0
            assert different(new.view(6, 64), wanted[1]) == 0

    run(host, 2)
