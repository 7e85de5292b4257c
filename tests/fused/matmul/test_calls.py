# SPDX-License-Identifier: Apache-2.0
"""Matmuls that communicate, by their public functions: bits over algorithms, dtypes, layouts,
epilogues, sizes, ranks, seeds and late ranks."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from exploring import explore
from tiers import seeds, slow_tier

import tdcoll
from tdcoll.fused.matmul.policy import (
    ALGORITHMS,
    COMPOSED,
    GATHER,
    REDUCE,
    SCATTER,
    Cut,
    MatmulPlan,
)
from tdcoll.testing import World

from .calls import Calls, calls_by

HEAP = 1 << 22
FP8 = torch.float8_e4m3fn, torch.float8_e5m2

WAYS = [(name, algorithm) for name, algorithms in ALGORITHMS.items() for algorithm in algorithms]
EACH = pytest.mark.parametrize(("name", "algorithm"), WAYS)


@EACH
@seeds(1, 10)
def test_clean_over_seeds(name: str, algorithm: str, seeds: range) -> None:
    explore(calls_by(name, algorithm, count=3), n_pes=3, seeds=seeds, heap_bytes=HEAP)


@EACH
@pytest.mark.parametrize("n_pes", [1, 4, slow_tier(2), slow_tier(8)])
def test_every_number_of_ranks(name: str, algorithm: str, n_pes: int) -> None:
    if algorithm == "two_shot" and n_pes == 1:
        n_pes = 2
    explore(calls_by(name, algorithm), n_pes=n_pes, seeds=1, heap_bytes=4 * HEAP)


@EACH
@pytest.mark.parametrize(
    "changes",
    [
        {"biased": True, "residual": True},
        {"biased": True, "depth_first": True, "dtype": torch.float16},
        {"dtype": torch.float32, "given": True},
        slow_tier({"residual": True, "out_dtype": torch.float32, "given": True}),
        slow_tier({"batch_invariant": True, "out_dtype": torch.float16}),
        slow_tier({"biased": True, "columns": 73, "rows": (7,)}),
    ],
    ids=str,
)
def test_forms(name: str, algorithm: str, changes: dict[str, Any]) -> None:
    explore(calls_by(name, algorithm, **changes), n_pes=2, seeds=1, heap_bytes=HEAP)


@EACH
@pytest.mark.parametrize(
    ("dtype", "scales"), [(FP8[0], "row"), slow_tier(FP8[1], "tensor"), slow_tier(FP8[1], "row")]
)
def test_fp8(name: str, algorithm: str, dtype: torch.dtype, scales: str) -> None:
    context = (("max_bytes_per_rank", 1 << 20), ("lamport_bytes", 1 << 18))
    made = calls_by(
        name, algorithm, dtype=dtype, scales=scales, depth=144, context=context, biased=True
    )
    explore(made, n_pes=2, seeds=1, heap_bytes=1 << 24)


@seeds(1, 12)
def test_copied_calls_between_others(seeds: range) -> None:
    """They have even epochs, and the first slot, which other calls use as well."""
    algorithms = ("copied", "fused", "copied", "copied", "composed", "fused")
    made = Calls(GATHER, algorithms, count=6, rows=(66,), depth=16, columns=16, late=(0, 0, 30))
    explore(made, n_pes=3, seeds=seeds, heap_bytes=HEAP, stragglers=True)


@pytest.mark.parametrize("algorithm", ALGORITHMS[GATHER])
@pytest.mark.parametrize("rows", [(5,), slow_tier((66,))])
def test_the_gathered_matrix(algorithm: str, rows: tuple[int, ...]) -> None:
    context = (("max_bytes_per_rank", 1 << 18),)
    made = calls_by(GATHER, algorithm, rows=rows, gathered=True, context=context)
    explore(made, n_pes=3, seeds=1, heap_bytes=1 << 24)


SMALL = Cut(4, 16, 16, 1, 1, group=2)
PLANS = [
    (GATHER, MatmulPlan("fused", SMALL, 3, pushers=2, keepers=1, piece=160)),
    (GATHER, MatmulPlan("copied", SMALL, 3, keepers=1, piece=160)),
    (SCATTER, MatmulPlan("fused", SMALL, 3, lag=2)),
    (REDUCE, MatmulPlan("one_shot", SMALL, 3)),
    (REDUCE, MatmulPlan("two_shot", SMALL, 2)),
    (REDUCE, MatmulPlan(COMPOSED, SMALL, 2)),
]


@pytest.mark.parametrize(("name", "plan"), PLANS)
def test_many_tiles_and_late_ranks(name: str, plan: MatmulPlan) -> None:
    made = Calls(
        name,
        (plan,),
        count=3,
        rows=(9, 4),
        late=(0, 30),
        gathered=bool(plan.keepers),
        batch_invariant=True,
    )
    explore(made, n_pes=3, seeds=1, heap_bytes=HEAP, stragglers=True)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_contexts_of_tdcolls_own(name: str) -> None:
    """They are made for the first call, grow, and calls of other sizes and algorithms share
    them."""
    first, *_ = ALGORITHMS[name]
    made = Calls(name, (first, COMPOSED, "auto"), count=4, rows=(5, 3, 140), own=True)
    explore(made, n_pes=2, seeds=1, heap_bytes=1 << 26)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_emulated_nodes(name: str) -> None:
    explore(
        dataclasses.replace(Calls(name), residual=True),
        n_pes=2,
        seeds=1,
        heap_bytes=HEAP,
        ranks_per_node=1,
    )


# ---------------------------------------------------------------------- several weights


def test_several_weights_share_x() -> None:
    def host(pe: int) -> None:
        x = torch.arange(64.0).view(2, 32) + pe
        whole = torch.arange(48.0 * 32).view(48, 32)
        every = tdcoll.all_gather(x)
        neighbours = whole.split([16, 8, 24])
        for weights in (neighbours, [weight.clone() for weight in neighbours]):
            parts, gathered = tdcoll.fused.all_gather_matmul(x, weights, gathered=True)
            assert torch.equal(gathered, every)
            assert [part.shape[1] for part in parts] == [16, 8, 24]
            for part, weight in zip(parts, weights, strict=True):
                assert torch.equal(part, every @ weight.t())
        turned = [weight.t().contiguous() for weight in neighbours]
        parts = tdcoll.fused.all_gather_matmul(x, turned, depth_first=True)
        assert torch.equal(torch.cat(parts, 1), every @ whole.t())

    World(2, heap_bytes=1 << 24).run(host)


def test_neighbours_in_memory_are_not_copied() -> None:
    from tdcoll.fused.matmul.op import _joined

    whole = torch.zeros(8, 4)
    joined, widths = _joined(whole[2:].split([2, 4]), False)
    assert joined.data_ptr() == whole[2:].data_ptr()
    assert joined.shape == (6, 4)
    assert widths == [2, 4]
    other, _ = _joined([whole[:2], whole[4:]], False)
    assert other.data_ptr() != whole.data_ptr()
