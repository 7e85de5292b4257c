# SPDX-License-Identifier: Apache-2.0
"""All-reduce gives the bits of the reference under adverse schedules."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tiers import second

import tdcoll
from tdcoll.primitives.reduce import OPERATIONS_OF
from tdcoll.primitives.words import AT_ONCE
from tdcoll.runtime.simulator.memory import MemoryView
from tdcoll.testing import World, explore

from ..reduce_scatter.cases import DTYPES, FLOATS, special
from .cases import Reductions

HEAP = 1 << 18
SEEDS = os.environ.get("EXPLORE_SEEDS")
"""So many seeds for every grid instead: 200 before a kernel's change lands."""

ALGORITHMS = ["one_shot", "two_shot", "direct", "1d"]
FLAGGED = {"lamport_bytes": 0}
GRIDS = [  # algorithm, ranks per node, calls, seeds that every run tries, further arguments
    ("one_shot", [4], "oizo", 2, {}),
    ("one_shot", [3], "oizo", 2, FLAGGED),
    ("two_shot", [4], "oizo", 2, {}),
    ("two_shot", [3], "oizo", 2, FLAGGED),
    ("one_shot two_shot", [3], "oizoo", 2, {"counts": (250, 150), "max_programs": 8}),
    ("one_shot two_shot", [3], "oizoo", 1, {"counts": (250, 150), "max_programs": 8, **FLAGGED}),
    ("direct", [4], "oizo", 4, {}),
    ("direct", [4], "yYzyYyy", 4, {}),
    ("direct", [2], "YYYyyy", 3, {"counts": (46, 3), "dtype": torch.bfloat16}),
    ("1d", [4], "oio", 1, {}),
    ("1d", [2, 2], "oizo", 4, {}),
    ("1d", [3, 1], "oio", 3, {}),
    ("1d", [1, 2, 1], "oio", 3, {}),
    ("2d", [2, 2], "oizo", 4, {}),
    ("2d", [2, 2], "oizo", 2, {"dtype": torch.bfloat16}),
    ("2d", [2, 2, 2], "oio", 2, {"counts": (37, 5)}),
    ("2d 1d", [3, 3], "ogiosizoi", 1, {}),
    ("one_shot two_shot direct 1d", [3], "ogiosizoi", 2, {}),
    ("direct one_shot direct two_shot 1d", [3], "yogYsYyzygo", 2, {}),
]


def serves(algorithm: str, dtype: torch.dtype) -> bool:
    return algorithm in ("direct", "1d") or dtype.itemsize < 8


def nodes_for(algorithm: str, *nodes: int) -> list[int] | None:
    """Only puts go between nodes."""
    return list(nodes) if algorithm == "1d" else None


@pytest.mark.parametrize(("algorithm", "nodes", "calls", "seeds", "more"), GRIDS)
def test_clean_over_seeds(algorithm: str, nodes: list[int], calls: str, seeds: int, more: dict[str, Any]) -> None:
    case, seeds = Reductions(algorithm, calls, **more), int(SEEDS or seeds)
    explore(case, n_pes=sum(nodes), seeds=seeds, ranks_per_node=nodes, heap_bytes=HEAP)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_dtype_and_operation(algorithm: str, dtype: torch.dtype) -> None:
    """On three ranks, whose number divides nothing, with tensors that are not aligned to 16 bytes."""
    if not serves(algorithm, dtype):
        with pytest.raises(AssertionError, match=f"algorithm='{algorithm}' needs elements of at most 4 bytes"):
            explore(Reductions(algorithm, dtype=dtype), n_pes=2, seeds=1, heap_bytes=HEAP)
        return
    ops = OPERATIONS_OF[dtype]
    case = Reductions(algorithm, "oi" * len(ops), (13,), dtype, [op for op in ops for _ in "oi"], 1)
    explore(case, n_pes=3, seeds=1, ranks_per_node=nodes_for(algorithm, 2, 1), heap_bytes=HEAP)
    if algorithm == "1d":
        case = dataclasses.replace(case, algorithm="2d", calls="o" * len(ops), ops=ops)
        explore(case, n_pes=4, seeds=1, ranks_per_node=2, heap_bytes=HEAP)


@dataclass(frozen=True)
class Special(Reductions):
    """Ranks give infinities, NaN, zeros of both signs, subnormal and large numbers, in all pairs."""

    def tensor(self, pe: int, call: int, count: int) -> torch.Tensor:
        numbers = special(self.dtype)
        index = torch.arange(count)
        chosen = index % len(numbers) if pe % 2 == 0 else index // len(numbers) % len(numbers)
        return numbers[chosen]


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_special_numbers(algorithm: str, dtype: torch.dtype) -> None:
    """No result is -0.0, and a NaN is never lost."""
    if serves(algorithm, dtype):
        for more in ({}, FLAGGED) if algorithm.endswith("shot") else ({},):
            ops = OPERATIONS_OF[dtype]
            case = Special(algorithm, "o" * len(ops), (200,), dtype, ops, named=True, **more)
            explore(case, n_pes=2, seeds=1, heap_bytes=HEAP)


@pytest.mark.parametrize("n_pes", [1, 2, 5, 8, *(second(n) for n in (3, 4, 6, 7))])
def test_every_world_size(n_pes: int) -> None:
    """Eight ranks have parts that are empty."""
    for algorithm in ALGORITHMS:
        nodes = nodes_for(algorithm, n_pes - n_pes // 3, n_pes // 3) if n_pes > 2 else None
        explore(Reductions(algorithm, "oi", (26,)), n_pes=n_pes, seeds=1, ranks_per_node=nodes, heap_bytes=HEAP)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_size(algorithm: str) -> None:
    """Of 4 bytes, of 2 and of 1; aligned and not; where 5 words or pieces of 16 bytes are, a rank of three has none."""
    counts = (0, 1, 3, 7, 8, 33, 64)
    for dtype, offset, calls in (
        (torch.float32, 1, "oioioio"),
        (torch.bfloat16, 0, "ioioioi"),
        (torch.bfloat16, 3, "o"),
        (torch.float8_e5m2, 0, "o"),
        (torch.float8_e4m3fn, 7, "oioioio"),
        (torch.int8, 1, "o"),
    ):
        explore(
            Reductions(
                algorithm, calls, counts if len(calls) > 1 else counts[-2:], dtype, OPERATIONS_OF[dtype][:1], offset
            ),
            n_pes=3, seeds=1, ranks_per_node=nodes_for(algorithm, 1, 2), heap_bytes=HEAP,
        )  # fmt: skip


@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot"])
def test_flagged_words_of_every_size(algorithm: str) -> None:
    for dtype, offset, counts in ((torch.int32, 0, (0, 7, 40)), (torch.float16, 1, (1, 64, 33))):
        case = Reductions(algorithm, "oio", counts, dtype, offset=offset, **FLAGGED)
        explore(case, n_pes=3, seeds=1, heap_bytes=HEAP)


@pytest.mark.parametrize(("algorithm", "nodes"), [("direct", None), ("1d", [2, 1])])
def test_chunks_of_several_tiles(algorithm: str, nodes: list[int] | None) -> None:
    """Cut by the policy, which makes one chunk of it, of 16 * 32 * 8 bytes and some."""
    case = Reductions(algorithm, "oi", (3 * 1100,), named=True)
    explore(case, n_pes=3, seeds=1, ranks_per_node=nodes, heap_bytes=1 << 20)


@pytest.mark.parametrize("nodes", [[3, 1], [4]])
def test_ranks_of_a_node_that_cannot_store_to_each_other(monkeypatch: pytest.MonkeyPatch, nodes: list[int]) -> None:
    monkeypatch.setattr(MemoryView, "peer_base", lambda self, pe: self.base if pe == self.pe else 0)
    explore(Reductions("1d", "oio"), n_pes=4, seeds=2, ranks_per_node=nodes, heap_bytes=HEAP)
    explore(Reductions("auto", "oi", named=True), n_pes=4, seeds=1, ranks_per_node=nodes, heap_bytes=HEAP)


@pytest.mark.parametrize("group", [[0, 2], [5, 0, 3], [4, 3, 0, 1]])
def test_subgroups(group: list[int]) -> None:
    explore(Reductions("1d", group=group), n_pes=6, seeds=2, ranks_per_node=3, heap_bytes=HEAP)
    explore(Reductions("one_shot two_shot direct", group=group), n_pes=6, seeds=1, heap_bytes=HEAP)


@pytest.mark.parametrize(
    ("algorithm", "nodes", "more"),
    [
        ("one_shot", None, {}),
        ("two_shot", None, {}),
        ("one_shot two_shot", None, FLAGGED),
        ("one_shot two_shot", None, {"counts": (250, 330), "max_programs": 10}),
        ("direct", None, {}),
        ("1d", None, {}),
        ("1d", [2, 2], {}),
        ("1d", [3, 1], {}),
        ("2d", [2, 2], {}),
    ],
)
def test_one_resident_block_is_enough(algorithm: str, nodes: list[int] | None, more: dict[str, Any]) -> None:
    case = Reductions(algorithm, "oizyY", **more)
    explore(case, n_pes=4, seeds=1, ranks_per_node=nodes, heap_bytes=HEAP, resident=1)


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "nodes"), [("one_shot two_shot direct", None), ("1d", [2, 1])])
def test_many_calls_with_stragglers(algorithm: str, nodes: list[int] | None) -> None:
    case = Reductions(algorithm, "ooizoio" * 2, (12,))
    explore(case, n_pes=3, seeds=2, ranks_per_node=nodes, heap_bytes=HEAP, stragglers=True)


@pytest.mark.parametrize("more", [{}, FLAGGED], ids=["lamport", "flags"])
def test_parts_that_are_empty_in_some_calls(more: dict[str, Any]) -> None:
    """By turns three ranks of four have none, all have one, and nobody has one in two calls that follow each other."""
    case = Reductions("two_shot", "o" * 8, (1, 17, 0, 60, 0, 0, 5), **more)
    explore(case, n_pes=4, seeds=2, heap_bytes=HEAP, stragglers=0)


@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot"])
def test_more_ranks_than_one_wait_takes(algorithm: str) -> None:
    explore(Reductions(algorithm, "o", (13,)), n_pes=AT_ONCE.value + 1, seeds=1, heap_bytes=HEAP)


SIZES_IN_TURN = (40, 1, 23, 8, 40, 3)
"""In an order in which each pair of neighbours, larger and smaller, is of either algorithm."""


@pytest.mark.parametrize("algorithm", ["one_shot two_shot", "two_shot one_shot two_shot", "two_shot direct one_shot"])
def test_words_are_cleared_whatever_came_before(algorithm: str) -> None:
    case = Reductions(algorithm, "oogoiozosizoo", SIZES_IN_TURN, torch.bfloat16)
    explore(case, n_pes=3, seeds=1, heap_bytes=HEAP)


@pytest.mark.parametrize(
    ("algorithm", "more"),
    [("one_shot", {}), ("two_shot", {}), ("one_shot", FLAGGED), ("two_shot", FLAGGED), ("direct", {}), ("1d", {})],
)
def test_calls_whose_number_needs_more_than_32_bits(algorithm: str, more: dict[str, Any]) -> None:
    explore(Reductions(algorithm, "oooo", (20,), first=(1 << 32) - 1, **more), n_pes=3, seeds=2, heap_bytes=HEAP)


@pytest.mark.parametrize(("algorithm", "nodes"), [("direct", None), ("1d", None), ("1d", [2, 1])])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=str)
def test_larger_calls_are_several_epochs(algorithm: str, nodes: list[int] | None, dtype: torch.dtype) -> None:
    """The context takes 16 bytes of each part at a time; straight 48."""
    case = Reductions(algorithm, "ogizyYo", (20, 21, 6), dtype, named=True, most=48, lamport_bytes=0)
    explore(case, n_pes=3, seeds=2, ranks_per_node=nodes, heap_bytes=HEAP)


@pytest.mark.parametrize("more", [{}, second({"resident": 1}), second({"stragglers": True})])
def test_larger_calls_by_words_are_several_epochs(more: dict[str, Any]) -> None:
    """The context takes 48 bytes at a time by words that announce themselves, and fewer than a call has by flags."""
    counts, more = (60, 21, 6, 97), {"n_pes": 3, "seeds": 1, "heap_bytes": HEAP, **more}
    for case in (
        Reductions("two_shot", "oizyoi", counts, named=True, most=48, lamport_bytes=32),
        Reductions(
            "two_shot direct", "ogisoi", counts, torch.bfloat16, offset=1, named=True, most=48, lamport_bytes=32
        ),
    ):
        explore(case, **more)


@pytest.mark.parametrize(("algorithm", "nodes"), [*((name, None) for name in ALGORITHMS), ("1d", [2, 1])])
def test_a_killed_peer_is_named(algorithm: str, nodes: list[int] | None) -> None:
    told = {}

    def host(pe: int) -> None:
        with tdcoll.CollectiveContext(max_bytes_per_rank=256) as ctx:
            tdcoll.all_reduce(torch.ones(40), ctx, algorithm=algorithm)
            if pe == 1:
                world.kill(pe)
            tdcoll.all_reduce(torch.ones(40), ctx, algorithm=algorithm)
            with pytest.raises(tdcoll.CollectiveTimeout) as raised:
                ctx.check()
            told[pe] = raised.value
            ctx.close()

    world = World(3, ranks_per_node=nodes, heap_bytes=HEAP)
    world.run(host)
    assert sorted(told) == [0, 2]
    assert {(error.rank, error.peer, error.epoch) for error in told.values()} == {(0, 1, 2), (2, 1, 2)}
