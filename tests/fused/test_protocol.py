# SPDX-License-Identifier: Apache-2.0
"""The fused kernels over seeds, sizes, dtypes, nodes and few resident blocks."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from tiers import second, seeds

import tdcoll
from tdcoll.simulator.memory import MemoryView
from tdcoll.testing import World, explore

from .cases import Norms

HEAP = 1 << 20
ONE, TWO, BOTH = "one_shot", "two_shot", "one_shot two_shot"


@seeds(1, 10)
@pytest.mark.parametrize(("algorithms", "blocks"), [(ONE, (2, 0)), (TWO, (0, 2)), (f"{BOTH} composed", (2, 4, 2))])
def test_clean_over_seeds(algorithms: str, blocks: tuple[int, ...], seeds: range) -> None:
    """Rows of three words, in one piece and in two: the interpreter takes as long for a thread block of few words as
    for one of many, so more pieces or rows would only cost time."""
    case = Norms(algorithms, "oaigo", (4, 3, 3), blocks, hidden=24)
    explore(case, n_pes=3, seeds=seeds, heap_bytes=HEAP)


@pytest.mark.parametrize("n_pes", [1, 2, 4, second(5), second(8)])
def test_every_world_size(n_pes: int) -> None:
    turns = BOTH if n_pes > 1 else ONE
    explore(Norms(turns, "oi8", (2, n_pes + 1), (0, 8)), n_pes=n_pes, seeds=1, heap_bytes=2 * HEAP)


@pytest.mark.parametrize("weight", [None, torch.float32], ids=["own weights", "fp32 weights"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_dtypes_and_quantized_results(dtype: torch.dtype, weight: torch.dtype | None) -> None:
    for turns in (ONE, TWO, "composed"):
        case = Norms(turns, "o8s8", (2,), (0, 0, 4, 4), 40, dtype, weight)
        explore(case, n_pes=2, seeds=1, heap_bytes=HEAP)


@pytest.mark.parametrize("hidden", [512, 8256, second(576), second(3008), second(16384), second(8192)])
def test_hidden_sizes(hidden: int) -> None:
    """Odd multiples of 64 as well; rows of more words than a program has."""
    case = Norms(f"{BOTH} composed", "ooo", (2,), hidden=hidden, lamport_bytes=1 << 17)
    explore(case, n_pes=2, seeds=1, heap_bytes=1 << 22)


@seeds(1, 8)
def test_rows_that_only_some_ranks_own_in_turn(seeds: range) -> None:
    """Of 4 rows rank 0 owns two, of 6 all three ranks do. A word that nobody waits for may come after the memory of its
    call is cleared, and be taken for one of a later call."""
    case = Norms(TWO, "oooooo", (4, 6), (0,), 8, torch.float32)
    explore(case, n_pes=3, seeds=seeds, heap_bytes=HEAP, stragglers=2)


FURTHER = [  # rows of the call before the last in a slot are still there, and must not be taken for this call's
    *((Norms(TWO, "8i8", (4, 5), (block,), 40), 3, {}) for block in (0, 4)),  # a rank owns a row less
    (Norms(ONE, "o" * 8, (1, 2), (1,), 8, torch.float32), 2, {"seeds": 2, "stragglers": True}),
    (Norms(f"{BOTH} composed", "o8o", (2,), (0, 0, 256), 4160, torch.float32, lamport_bytes=1 << 17), 2, {}),
    *((Norms(name, "oio", (4, 5), (block,), 40), 3, {"resident": 1}) for name in (ONE, TWO) for block in (0, 4)),
    *(
        (Norms("auto", "oi8zo", (2, 3)), sum(nodes), {"seeds": 2, "ranks_per_node": nodes})
        for nodes in ([2, 1], [2, 2], [1, 1, 1])
    ),
    *((Norms("auto", "oio", (2, 1), lamport_bytes=room), 2, {}) for room in (0, 64, 400)),  # composed
    *((Norms(BOTH, "oio", (3, 4), (4,), 20, torch.float32, group=group), 4, {}) for group in ([0, 2], [3, 0, 2])),
    *((Norms(BOTH, "oooo", (3,), (4,), 40, first=first), 2, {}) for first in ((1 << 31) - 1, (1 << 32) - 1)),
]


@pytest.mark.parametrize(("case", "n_pes", "world"), FURTHER)
def test_further_cases(case: Norms, n_pes: int, world: dict[str, Any]) -> None:
    """Few resident blocks, several nodes, little memory, subgroups, calls whose number needs more than 32 bits."""
    explore(case, n_pes=n_pes, **{"seeds": 1, "heap_bytes": 1 << 22, **world})


def test_only_words_that_somebody_waits_for_are_sent() -> None:
    """Each row goes to its owner, and back to all others with a word of measures."""
    world = World(3, seed=0, weak=True, heap_bytes=HEAP)
    Norms(TWO, "o", (4,), hidden=4, dtype=torch.float32)(world)
    rows, owned = 4, (2, 1, 1)
    wanted = [(rows - own) * 16 + 2 * own * (16 + 16) for own in owned]
    assert [counts.store_bytes for counts in world.counts] == wanted


def test_ranks_that_cannot_store_to_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryView, "peer_base", lambda self, pe: self.base if pe == self.pe else 0)
    explore(Norms("auto", "oi"), n_pes=2, seeds=1, heap_bytes=HEAP)


@pytest.mark.slow
def test_many_calls_with_stragglers() -> None:
    case = Norms(f"{BOTH} {ONE}", "ooiagoio" * 2, (4, 3, 5), (2, 4, 1), hidden=24)
    explore(case, n_pes=3, seeds=3, heap_bytes=HEAP, stragglers=True)


@dataclasses.dataclass(frozen=True)
class Special(Norms):
    """Rows with infinities, NaN, zeros of both signs, large and subnormal numbers; and one of zeros."""

    def given(self, pe: int, call: int, rows: int) -> torch.Tensor:
        kinds = torch.finfo(self.dtype)
        numbers = [0.0, -0.0, 1.0, kinds.max, -kinds.max, kinds.tiny, float("inf"), float("nan"), -kinds.tiny]
        made = torch.zeros(rows, self.hidden, dtype=self.dtype)
        for row in range(1, rows):
            made[row] = 1 + pe
            made[row, pe % 2 :: 3] = numbers[row % len(numbers)]
        return -made


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_special_numbers(dtype: torch.dtype) -> None:
    case = Special(f"{BOTH} composed", "ooo888", (10,), (0, 4, 0), 24, dtype)
    explore(case, n_pes=2, seeds=1, heap_bytes=HEAP)


@pytest.mark.parametrize(("algorithm", "block"), [(ONE, 0), (ONE, 4), (TWO, 0), (TWO, 4), ("composed", 0)])
def test_a_killed_peer_is_named(algorithm: str, block: int) -> None:
    told = {}
    case = Norms(algorithm, rows=(3,), blocks=(block,))

    def host(pe: int) -> None:
        with tdcoll.CollectiveContext(max_bytes_per_rank=1 << 12, lamport_bytes=1 << 14) as ctx:
            case.call(ctx, 0, "o")
            if pe == 1:
                world.kill(pe)
            case.call(ctx, 1, "o")
            with pytest.raises(tdcoll.CollectiveTimeout) as raised:
                ctx.check()
            told[pe] = raised.value
            ctx.close()

    world = World(3, heap_bytes=HEAP)
    world.run(host)
    assert sorted(told) == [0, 2]
    assert {error.epoch for error in told.values()} == {2}
    assert 1 in {error.peer for error in told.values()}
