# SPDX-License-Identifier: Apache-2.0
"""The fused kernels over seeds, sizes, dtypes, nodes and few resident blocks."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from exploring import explore
from tiers import seeds, slow_tier

import tdcoll
from tdcoll.simulator.memory import MemoryView
from tdcoll.testing import World

from .cases import (
    ALL_GATHER,
    ALL_REDUCE,
    GIVEN_SCALE,
    IN_PLACE,
    NO_ROWS,
    OUT_OF_PLACE,
    ROW_SCALES,
    Norms,
)

HEAP = 1 << 20
ONE = "one_shot"
TWO = "two_shot"
COMPOSED = "composed"
BOTH = (ONE, TWO)
ALL = (ONE, TWO, COMPOSED)


@seeds(1, 10)
@pytest.mark.parametrize(
    ("algorithms", "blocks"),
    [((ONE,), (2, 0)), ((TWO,), (0, 2)), (ALL, (2, 4, 2))],
)
def test_clean_over_seeds(
    algorithms: tuple[str, ...],
    blocks: tuple[int, ...],
    seeds: range,
) -> None:
    """Rows of three words, in one piece and in two: the interpreter takes as long for a thread
    block of few words as for one of many, so more pieces or rows would only cost time."""
    kinds = (OUT_OF_PLACE, ALL_REDUCE, IN_PLACE, ALL_GATHER, OUT_OF_PLACE)
    case = Norms(algorithms, kinds, (4, 3, 3), blocks, hidden=24)
    explore(case, n_pes=3, seeds=seeds, heap_bytes=HEAP)


@pytest.mark.parametrize("n_pes", [1, 2, 4, slow_tier(5), slow_tier(8)])
def test_every_world_size(n_pes: int) -> None:
    algorithms = BOTH if n_pes > 1 else (ONE,)
    kinds = (OUT_OF_PLACE, IN_PLACE, ROW_SCALES)
    case = Norms(algorithms, kinds, (2, n_pes + 1), (0, 8))
    explore(case, n_pes=n_pes, seeds=1, heap_bytes=2 * HEAP)


@pytest.mark.parametrize("weight", [None, torch.float32], ids=["own weights", "fp32 weights"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_dtypes_and_quantized_results(dtype: torch.dtype, weight: torch.dtype | None) -> None:
    kinds = (OUT_OF_PLACE, ROW_SCALES, GIVEN_SCALE, ROW_SCALES)
    for algorithm in ALL:
        case = Norms((algorithm,), kinds, (2,), (0, 0, 4, 4), 40, dtype, weight)
        explore(case, n_pes=2, seeds=1, heap_bytes=HEAP)


@pytest.mark.parametrize(
    "hidden", [512, 8256, slow_tier(576), slow_tier(3008), slow_tier(16384), slow_tier(8192)]
)
def test_hidden_sizes(hidden: int) -> None:
    """Odd multiples of 64 as well; rows of more words than a program has."""
    case = Norms(ALL, 3 * (OUT_OF_PLACE,), (2,), hidden=hidden, lamport_bytes=1 << 17)
    explore(case, n_pes=2, seeds=1, heap_bytes=1 << 22)


@seeds(1, 8)
def test_rows_that_only_some_ranks_own_in_turn(seeds: range) -> None:
    """Of 4 rows rank 0 owns two, of 6 all three ranks do. A word that nobody waits for may come
    after the memory of its call is cleared, and be taken for one of a later call."""
    case = Norms((TWO,), 6 * (OUT_OF_PLACE,), (4, 6), (0,), 8, torch.float32)
    explore(case, n_pes=3, seeds=seeds, heap_bytes=HEAP, stragglers=2)


LAST_CALL_OF_THE_SLOT = [  # its rows are still there, and must not be taken for this call's
    *(
        # A rank owns a row less.
        (Norms((TWO,), (ROW_SCALES, IN_PLACE, ROW_SCALES), (4, 5), (block,), 40), 3, {})
        for block in (0, 4)
    ),
    (
        Norms((ONE,), 8 * (OUT_OF_PLACE,), (1, 2), (1,), 8, torch.float32),
        2,
        {"seeds": 2, "stragglers": True},
    ),
]
LONG_ROWS = Norms(
    ALL,
    (OUT_OF_PLACE, ROW_SCALES, OUT_OF_PLACE),
    (2,),
    (0, 0, 256),
    4160,
    torch.float32,
    lamport_bytes=1 << 17,
)
USUAL = (OUT_OF_PLACE, IN_PLACE, OUT_OF_PLACE)
ON_NODES = (OUT_OF_PLACE, IN_PLACE, ROW_SCALES, NO_ROWS, OUT_OF_PLACE)
FEW_RESIDENT = [
    (Norms((name,), USUAL, (4, 5), (block,), 40), 3, {"resident": 1})
    for name in BOTH
    for block in (0, 4)
]
SEVERAL_NODES = [
    (Norms(("auto",), ON_NODES, (2, 3)), sum(nodes), {"seeds": 2, "ranks_per_node": nodes})
    for nodes in ([2, 1], [2, 2], [1, 1, 1])
]
LITTLE_MEMORY = [  # composed
    (Norms(("auto",), USUAL, (2, 1), lamport_bytes=room), 2, {}) for room in (0, 64, 400)
]
SUBGROUPS = [
    (Norms(BOTH, USUAL, (3, 4), (4,), 20, torch.float32, group=group), 4, {})
    for group in ([0, 2], [3, 0, 2])
]
MORE_THAN_32_BITS = [
    (Norms(BOTH, 4 * (OUT_OF_PLACE,), (3,), (4,), 40, first=first), 2, {})
    for first in ((1 << 31) - 1, (1 << 32) - 1)
]
FURTHER = [
    *LAST_CALL_OF_THE_SLOT,
    (LONG_ROWS, 2, {}),
    *FEW_RESIDENT,
    *SEVERAL_NODES,
    *LITTLE_MEMORY,
    *SUBGROUPS,
    *MORE_THAN_32_BITS,
]


@pytest.mark.parametrize(("case", "n_pes", "world"), FURTHER)
def test_further_cases(case: Norms, n_pes: int, world: dict[str, Any]) -> None:
    """Few resident blocks, several nodes, little memory, subgroups, calls whose number needs more
    than 32 bits."""
    explore(case, n_pes=n_pes, **{"seeds": 1, "heap_bytes": 1 << 22, **world})


def test_only_words_that_somebody_waits_for_are_sent() -> None:
    """Each row goes to its owner, and back to all others with a word of measures."""
    world = World(3, seed=0, weak=True, heap_bytes=HEAP)
    Norms((TWO,), (OUT_OF_PLACE,), (4,), hidden=4, dtype=torch.float32)(world)
    rows, owned = 4, (2, 1, 1)
    wanted = [(rows - own) * 16 + 2 * own * (16 + 16) for own in owned]
    assert [counts.store_bytes for counts in world.counts] == wanted


def test_ranks_that_cannot_store_to_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryView, "peer_base", lambda self, pe: self.base if pe == self.pe else 0)
    explore(Norms(("auto",), (OUT_OF_PLACE, IN_PLACE)), n_pes=2, seeds=1, heap_bytes=HEAP)


@pytest.mark.slow
def test_many_calls_with_stragglers() -> None:
    kinds = (
        OUT_OF_PLACE, OUT_OF_PLACE, IN_PLACE, ALL_REDUCE, ALL_GATHER, OUT_OF_PLACE, IN_PLACE,
        OUT_OF_PLACE,
    )  # fmt: skip
    case = Norms((ONE, TWO, ONE), 2 * kinds, (4, 3, 5), (2, 4, 1), hidden=24)
    explore(case, n_pes=3, seeds=3, heap_bytes=HEAP, stragglers=True)


@dataclasses.dataclass(frozen=True)
class Special(Norms):
    """Rows with infinities, NaN, zeros of both signs, large and subnormal numbers; and one of
    zeros."""

    def given(self, pe: int, call: int, rows: int) -> torch.Tensor:
        kinds = torch.finfo(self.dtype)
        numbers = [
            0.0,
            -0.0,
            1.0,
            kinds.max,
            -kinds.max,
            kinds.tiny,
            float("inf"),
            float("nan"),
            -kinds.tiny,
        ]
        made = torch.zeros(rows, self.hidden, dtype=self.dtype)
        for row in range(1, rows):
            made[row] = 1 + pe
            made[row, pe % 2 :: 3] = numbers[row % len(numbers)]
        return -made


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_special_numbers(dtype: torch.dtype) -> None:
    case = Special(ALL, (*3 * (OUT_OF_PLACE,), *3 * (ROW_SCALES,)), (10,), (0, 4, 0), 24, dtype)
    explore(case, n_pes=2, seeds=1, heap_bytes=HEAP)


@pytest.mark.parametrize(
    ("algorithm", "block"), [(ONE, 0), (ONE, 4), (TWO, 0), (TWO, 4), (COMPOSED, 0)]
)
def test_a_killed_peer_is_named(algorithm: str, block: int) -> None:
    told = {}
    case = Norms((algorithm,), rows=(3,), blocks=(block,))

    def host(pe: int) -> None:
        with tdcoll.CollectiveContext(max_bytes_per_rank=1 << 12, lamport_bytes=1 << 14) as ctx:
            case.call(ctx, 0, OUT_OF_PLACE)
            if pe == 1:
                world.kill(pe)
            case.call(ctx, 1, OUT_OF_PLACE)
            with pytest.raises(tdcoll.CollectiveTimeout) as raised:
                ctx.check()
            told[pe] = raised.value
            ctx.close()

    world = World(3, heap_bytes=HEAP)
    world.run(host)
    assert sorted(told) == [0, 2]
    assert {error.epoch for error in told.values()} == {2}
    assert 1 in {error.peer for error in told.values()}
