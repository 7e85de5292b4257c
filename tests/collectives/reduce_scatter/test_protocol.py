# SPDX-License-Identifier: Apache-2.0
"""The kernels give the bits of the reference under adverse schedules, and broken kernels are caught."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from kernel_mutants import installed
from tiers import second, seeds

from tdcoll.primitives.reduce import OPERATIONS_OF
from tdcoll.primitives.words import AT_ONCE
from tdcoll.runtime.simulator.memory import MemoryView
from tdcoll.testing import explore, first_failure

from .cases import DTYPES, FLOATS, Reductions, special
from .mutants import MODULES, MUTANTS, Mutant

HEAP = 1 << 18


def serves(algorithm: str, dtype: torch.dtype) -> bool:
    if algorithm == "lamport":
        return dtype.is_floating_point and dtype.itemsize < 8
    return algorithm != "ll" or dtype.itemsize < 8


@seeds(2, 6)
@pytest.mark.parametrize(
    ("algorithm", "nodes", "calls"),
    [
        ("direct", [4], "oiozi"),
        ("ll", [4], "oizo"),
        ("lamport", [4], "oizo"),
        ("looped", [3], "oizo"),
        ("puts", [2, 2], "oiozi"),
        ("puts", [3, 1], "oio"),
        ("puts", [1, 2, 1], "oio"),
        ("pull", [4], "oiozi"),
        ("pull", [2], "oooo"),
        ("direct ll pull puts lamport", [3], "oiozioioo"),
    ],
)
def test_clean_over_seeds(algorithm: str, nodes: list[int], calls: str, seeds: Sequence[int]) -> None:
    explore(Reductions(algorithm, calls), n_pes=sum(nodes), seeds=seeds, ranks_per_node=nodes, heap_bytes=HEAP)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("algorithm", ["direct", "ll", "lamport", "pull", "puts"])
def test_every_dtype_and_operation(algorithm: str, dtype: torch.dtype) -> None:
    """On three ranks, whose number divides nothing, with tensors that are not aligned to 16 bytes."""
    if serves(algorithm, dtype):
        ops = OPERATIONS_OF[dtype]
        nodes = [2, 1] if algorithm == "puts" else None
        case = Reductions(algorithm, "oi" * len(ops), 13, dtype, [op for op in ops for _ in "oi"], 1)
        explore(case, n_pes=3, seeds=1, ranks_per_node=nodes, heap_bytes=HEAP)


@dataclass(frozen=True)
class Special(Reductions):
    """Ranks give infinities, NaN, zeros of both signs, subnormal and large numbers, in all pairs."""

    def tensor(self, pe: int, call: int, count: int) -> torch.Tensor:
        numbers = special(self.dtype)
        index = torch.arange(count) % self.count
        chosen = index % len(numbers) if pe % 2 == 0 else index // len(numbers) % len(numbers)
        return numbers[chosen]


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("algorithm", ["direct", "ll", "lamport", "pull", "puts"])
def test_special_numbers(algorithm: str, dtype: torch.dtype) -> None:
    """No result is -0.0, and a NaN is never lost."""
    if serves(algorithm, dtype):
        case = Special(algorithm, "o" * len(OPERATIONS_OF[dtype]), 200, dtype, OPERATIONS_OF[dtype])
        explore(case, n_pes=2, seeds=1, heap_bytes=HEAP)


@pytest.mark.parametrize("n_pes", [1, 2, 3, 4, 5, *map(second, (6, 7, 8))])
def test_every_world_size(n_pes: int) -> None:
    for algorithm in ("direct", "ll", "pull", "puts"):
        nodes = [n_pes - n_pes // 3, n_pes // 3] if algorithm == "puts" and n_pes > 2 else None
        explore(Reductions(algorithm, "oi", 35), n_pes=n_pes, seeds=1, ranks_per_node=nodes, heap_bytes=HEAP)


@pytest.mark.parametrize("algorithm", ["ll", "lamport"])
def test_more_ranks_than_one_wait_takes(algorithm: str) -> None:
    explore(Reductions(algorithm, "o", 5), n_pes=AT_ONCE.value + 1, seeds=1, heap_bytes=HEAP)


@pytest.mark.parametrize("count", [0, 1, 3, 7, 8, 33, 70])
@pytest.mark.parametrize("algorithm", ["direct", "ll", "lamport", "pull", "puts"])
def test_every_size(algorithm: str, count: int) -> None:
    """Of 4 bytes, of 2 and of 1; aligned and not."""
    nodes = [1, 2] if algorithm == "puts" else None
    kinds = [(torch.float32, 0), (torch.bfloat16, 0), (torch.bfloat16, 3), (torch.float8_e4m3fn, 7), (torch.uint8, 0)]
    for dtype, offset in kinds:
        explore(
            Reductions(algorithm, "oi", count, dtype, OPERATIONS_OF[dtype][:1], offset),
            n_pes=3, seeds=1, ranks_per_node=nodes, heap_bytes=HEAP,
        )  # fmt: skip


def test_ranks_of_a_node_that_cannot_store_to_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryView, "peer_base", lambda self, pe: self.base if pe == self.pe else 0)
    explore(Reductions("puts", "oio"), n_pes=4, seeds=3, ranks_per_node=[3, 1], heap_bytes=HEAP)


@pytest.mark.parametrize("group", [[0, 2], [5, 0, 3], [4, 3, 0, 1]])
def test_subgroups(group: list[int]) -> None:
    explore(Reductions("puts", group=group), n_pes=6, seeds=2, ranks_per_node=3, heap_bytes=HEAP)
    explore(Reductions("direct ll pull", group=group), n_pes=6, seeds=1, heap_bytes=HEAP)


@pytest.mark.parametrize(
    ("algorithm", "nodes"), [("direct", None), ("ll", None), ("pull", None), ("puts", 2), ("puts", [3, 1])]
)
def test_one_resident_block_is_enough(algorithm: str, nodes: int | list[int] | None) -> None:
    explore(Reductions(algorithm, "oiz"), n_pes=4, seeds=2, ranks_per_node=nodes, heap_bytes=HEAP, resident=1)


@pytest.mark.parametrize(("algorithm", "nodes"), [("direct ll", None), ("puts", [2, 1])])
def test_many_calls_with_stragglers(algorithm: str, nodes: list[int] | None) -> None:
    case = Reductions(algorithm, "ooizoio" * 3, 12)
    explore(case, n_pes=3, seeds=2, ranks_per_node=nodes, heap_bytes=HEAP, stragglers=True)


def test_epochs_that_need_more_than_32_bits() -> None:
    for algorithm in ("direct", "ll"):
        explore(Reductions(algorithm, "oooo", first_epoch=(1 << 32) - 1), n_pes=3, seeds=2, heap_bytes=HEAP)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_caught(mutant: Mutant, tmp_path: Path) -> None:
    case = Reductions(mutant.algorithm, **dict(mutant.case))
    with installed(mutant.changes, tmp_path, MODULES):
        failure = first_failure(case, seeds=100, heap_bytes=HEAP, **mutant.job)
    assert failure is not None, f"nothing noticed: {mutant.name}"
    assert re.search(mutant.expect, failure.report), f"{mutant.name} fails, but not as it should: {failure.report}"


SAME_AS_MUTANTS = {f"{m.algorithm} {dict(m.case)} {m.job}": m for m in MUTANTS}


@pytest.mark.slow
@pytest.mark.parametrize("mutant", SAME_AS_MUTANTS.values(), ids=SAME_AS_MUTANTS)
def test_real_kernels_pass_where_mutants_are_caught(mutant: Mutant) -> None:
    case = Reductions(mutant.algorithm, **dict(mutant.case))
    explore(case, seeds=3, heap_bytes=HEAP, **mutant.job)
