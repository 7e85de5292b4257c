# SPDX-License-Identifier: Apache-2.0
"""The matmul kernels over seeds, sizes, dtypes, layouts, epilogues, numbers of ranks and of
resident thread blocks."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from exploring import explore
from tiers import seeds, slow_tier

import tdcoll
from tdcoll.fused.matmul.launches import Cut
from tdcoll.testing import World

from .cases import DEEP, Gather, Matmuls, Reduce, Scatter

HEAP = 1 << 21
FP8 = torch.float8_e4m3fn, torch.float8_e5m2
WIDE = Cut(8, 32, 16, 1, 1, group=1)

KINDS: dict[str, Matmuls] = {
    "gather": Gather(),
    "gather, whole": Gather(whole=True, rows=(3,)),
    "gather, kept": Gather(keepers=2),
    "gather, symmetric": Gather(symmetric=True),
    "gather, copied": Gather(copied=True),
    "scatter": Scatter(),
    "reduce": Reduce(),
    "reduce in two shots": Reduce(two_shot=(True,), rows=(4,)),
}
ALL = pytest.mark.parametrize("kind", KINDS)


def varied(kind: str, **changes: Any) -> Matmuls:
    """Return the case of a kind with other attributes."""
    return dataclasses.replace(KINDS[kind], **changes)


@ALL
@seeds(1, 12)
def test_clean_over_seeds(kind: str, seeds: range) -> None:
    """Several calls, and calls of other collectives between them, which use the same slots and
    signals."""
    explore(
        varied(kind, calls="mgam" if kind != "gather, symmetric" else "mm"),
        n_pes=3,
        seeds=seeds,
        heap_bytes=HEAP,
    )


@ALL
@pytest.mark.parametrize("n_pes", [1, 4, slow_tier(2), slow_tier(5), slow_tier(8)])
def test_every_number_of_ranks(kind: str, n_pes: int) -> None:
    explore(varied(kind, calls="mm"), n_pes=n_pes, seeds=1, heap_bytes=4 * HEAP)


@ALL
@pytest.mark.parametrize("resident", [1, slow_tier(2)])
def test_few_resident_thread_blocks(kind: str, resident: int) -> None:
    """No thread block waits for one of a higher index, on any rank."""
    case = varied(kind, calls="mm", blocks=(5, 2))
    explore(case, n_pes=3, seeds=1, heap_bytes=HEAP, resident=resident)


@ALL
@pytest.mark.parametrize(
    ("late", "seeds"), [((0, 40), 1), slow_tier((60, 0, 5), 6)], ids=["one late", "in turn"]
)
def test_late_ranks_and_stragglers(kind: str, late: tuple[int, ...], seeds: int) -> None:
    case = varied(kind, calls="mmm", late=late)
    explore(case, n_pes=3, seeds=seeds, heap_bytes=HEAP, stragglers=True)


DTYPES = [
    (torch.float16, None),
    (torch.float32, None),
    slow_tier(torch.bfloat16, torch.float32),
    slow_tier(torch.float16, torch.bfloat16),
    slow_tier(torch.float32, torch.bfloat16),
]


@ALL
@pytest.mark.parametrize(("dtype", "out"), DTYPES)
def test_dtypes(kind: str, dtype: torch.dtype, out: torch.dtype | None) -> None:
    explore(varied(kind, calls="mm", dtype=dtype, out=out), n_pes=2, seeds=1, heap_bytes=HEAP)


FP8_FORMS = [  # in the first tier, types, scales
    (True, FP8[0], "row"),
    (True, FP8[1], "tensor"),
    (False, FP8[1], "row"),
    (False, FP8[0], ""),
]
FP8_CASES = [
    (kind, dtype, scales) if first else slow_tier(kind, dtype, scales)
    for kind in KINDS
    for first, dtype, scales in FP8_FORMS
    if (kind, scales) != ("gather, copied", "tensor")  # a copy engine needs a scale for each row
]


@pytest.mark.parametrize(("kind", "dtype", "scales"), FP8_CASES)
def test_fp8(kind: str, dtype: torch.dtype, scales: str) -> None:
    case = varied(kind, calls="mm", dtype=dtype, scales=scales, depth=144, cut=DEEP)
    if isinstance(case, Gather):
        case = dataclasses.replace(case, piece=240)
    explore(case, n_pes=2, seeds=1, heap_bytes=HEAP)


SIZES = [  # rows, depth, columns, cut
    (1, 8, 16, Cut(4, 16, 8, 1, 1, group=2)),
    (9, 40, 19, Cut(4, 16, 16, 1, 1, group=2)),  # nothing is a multiple of anything
    slow_tier(6, 16, 72, Cut(8, 8, 8, 1, 1, group=8)),
    slow_tier(17, 56, 33, WIDE),
    slow_tier(13, 8, 130, Cut(16, 64, 8, 1, 1, group=3)),
]


@ALL
@pytest.mark.parametrize(("rows", "depth", "columns", "cut"), SIZES)
def test_ragged_sizes(kind: str, rows: int, depth: int, columns: int, cut: Cut) -> None:
    if kind == "scatter":
        cut = dataclasses.replace(cut, columns=max(16, cut.columns))  # halves of 16 bytes
    if kind == "reduce in two shots":
        rows, columns = max(rows, 2), max(columns, cut.columns)
    case = varied(
        kind, calls="mm", rows=(rows, max(1, rows - 2)), depth=depth, columns=columns, cut=cut
    )
    if kind == "gather, symmetric":
        case = dataclasses.replace(case, rows=(rows,))
    explore(case, n_pes=2, seeds=1, heap_bytes=HEAP)


@ALL
@pytest.mark.parametrize(
    "form",
    [
        {"depth_first": True},
        {"biased": True, "residual": True},
        slow_tier({"biased": True, "columns": 19}),
        slow_tier({"depth_first": True, "residual": True, "dtype": torch.float32}),
    ],
    ids=str,
)
def test_layouts_bias_and_epilogues(kind: str, form: dict[str, Any]) -> None:
    explore(varied(kind, calls="mm", **form), n_pes=2, seeds=1, heap_bytes=HEAP)


FIRST = ("gather, kept", "scatter", "reduce in two shots")
"""Kinds of which the first tier has subgroups and large epochs."""

FURTHER = [
    *((varied(kind, calls="mm", group=(3, 0, 2)), 4, {}) for kind in FIRST),
    *((varied(kind, first=(1 << 32) - 2), 2, {}) for kind in FIRST),
    *(slow_tier(varied(kind, group=(3, 0, 2)), 4, {}) for kind in KINDS if kind not in FIRST),
    *(
        slow_tier(varied(kind, calls="mmmm", first=(1 << 32) - 2), 2, {})
        for kind in KINDS
        if kind not in (*FIRST, "gather, copied")  # which has even epochs only
    ),
    (Scatter(lags=(0, 2, 9), rows=(9,), blocks=(2, 3)), 3, {}),
    (Scatter(slices=1, stages=1), 2, {}),
    slow_tier(Scatter(blocks=(1, 20, 7, 4), calls="mmmm"), 4, {"stragglers": True}),
    (Gather(pushers=1, blocks=(1,), calls="mm"), 3, {"resident": 1}),
    (Gather(pushers=9, keepers=5, piece=16, calls="mm"), 2, {}),
    slow_tier(Gather(piece=1 << 12), 3, {}),
    slow_tier(Gather(whole=True, rows=(1, 5), keepers=1), 4, {}),
    slow_tier(
        Reduce(two_shot=(False, True, True, False), calls="mmmmmm", rows=(4, 3)),
        3,
        {"stragglers": True},
    ),
    (Reduce(blocks=(1, 9), words=64), 2, {"resident": 1}),
]


@pytest.mark.parametrize(("case", "n_pes", "world"), FURTHER)
def test_further_cases(case: Matmuls, n_pes: int, world: dict[str, Any]) -> None:
    """Subgroups, epochs that need more than 32 bits, other grids, lags and pieces."""
    explore(case, n_pes=n_pes, **{"seeds": 1, "heap_bytes": 2 * HEAP, **world})


def test_a_gather_sends_each_shard_once_to_each_peer() -> None:
    world = World(3, seed=0, weak=True, heap_bytes=HEAP)
    case = Gather(calls="m", rows=(5,), depth=24, piece=96)
    case(world)
    pieces = 3
    wanted = 2 * (5 * 24 * 2 + 8 * pieces)
    assert [counts.store_bytes for counts in world.counts] == [wanted] * 3


def test_a_scatter_sends_each_tile_once() -> None:
    """Whole tiles, also at the edges, and a signal for each."""
    world = World(3, seed=0, weak=True, heap_bytes=HEAP)
    case = Scatter(calls="m", rows=(5,), columns=40)
    case(world)
    tiles = 2 * 3
    wanted = 2 * tiles * (4 * 16 * 2 + 8)
    assert [counts.store_bytes for counts in world.counts] == [wanted] * 3


def test_a_reduction_sends_the_words_that_somebody_waits_for() -> None:
    """To all peers, or each word to its owner and each sum to all."""
    for two_shot, times in ((False, 2), (True, 4 / 3)):
        world = World(3, seed=0, weak=True, heap_bytes=HEAP)
        Reduce(calls="m", rows=(3,), columns=48, two_shot=(two_shot,))(world)
        total = sum(counts.store_bytes for counts in world.counts)
        assert total == 3 * times * 3 * 48 * 2


@ALL
def test_a_killed_peer_is_named(kind: str) -> None:
    told = {}
    case = varied(kind, group=None)

    def host(pe: int) -> None:
        ctx = tdcoll.CollectiveContext(**case.context)
        case.call(ctx, 0)
        if pe == 1:
            world.kill(pe)
        case.call(ctx, 1)
        with pytest.raises(tdcoll.CollectiveTimeout) as raised:
            ctx.check()
        told[pe] = raised.value

    world = World(3, heap_bytes=HEAP)
    world.run(host)
    assert sorted(told) == [0, 2]
    assert {error.epoch for error in told.values()} == {
        4 if case in (KINDS["gather, copied"],) else 2
    }
    assert 1 in {error.peer for error in told.values()}


@ALL
@seeds(1, 30)
def test_every_rank_gives_up_or_has_the_right_result(kind: str, seeds: range) -> None:
    case = varied(kind, calls="mmmm", patient=False)
    explore(case, n_pes=2, seeds=seeds, heap_bytes=HEAP, on_timeout="early")
    for seed in range(1000, 1030):  # until both have happened
        if case.ended["early"] and case.ended["right"] and case.ended["gave up"]:
            break
        explore(case, n_pes=2, seeds=[seed], heap_bytes=HEAP, on_timeout="early")
    assert min(case.ended[what] for what in ("early", "right", "gave up")) > 0
