# SPDX-License-Identifier: Apache-2.0
"""Phases inside the launches of a sparse all-reduce: what each relies on, and leaves alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from exploring import explore
from kernel_mutants import Change, Inserted, Mutant, dropped, installed

import tdcoll
from tdcoll.testing import World

from .calls import PART, ROWS, SENTINEL, make, moved
from .cases import BOTH, HEAP, Reduces, small_pieces


@BOTH
def test_ids_that_pytorch_sorts_keep_their_order(
    algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sort on CPUs keeps the order of equal ids in any case; on GPUs, and here, only if it is
    asked to."""
    real = torch.sort

    def sort(values: torch.Tensor, *, stable: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        found, order = real(values if stable else values.flip(0), stable=True)
        return found, order if stable else len(order) - 1 - order

    monkeypatch.setattr(torch, "sort", sort)
    explore(Reduces(2 * (algorithm,), (20,), 3, exact=False), n_pes=2, heap_bytes=HEAP, seeds=1)


class Invalid:
    """A call by ``dense`` whose lists are not valid, because an index of rank 1 is out of range."""

    def __call__(self, world: World) -> None:
        with small_pieces():
            world.run(self.host)

    def host(self, pe: int) -> None:
        with make() as ctx:
            moved(ctx).fill_(SENTINEL)
            tdcoll.barrier()
            with pytest.raises(ValueError, match="indices of rank 1 must be in"):
                tdcoll.sparse_all_reduce_rows(
                    torch.tensor([3, ROWS * pe]), PART, ROWS, ctx=ctx, algorithm="dense"
                )
            tdcoll.barrier()
            assert bool((moved(ctx) == SENTINEL).all()), "rows were moved"


class Ended:
    """A call of rows of one id, in several pieces, while whose sums the host of each rank ends the
    waits."""

    def __call__(self, world: World) -> None:
        world.run(self.host)

    def host(self, pe: int) -> None:
        ctx = make(debug=False)
        ids, rows = torch.zeros(300, dtype=torch.int64), torch.ones(300, 4)
        moved(ctx).fill_(SENTINEL)
        tdcoll.barrier()
        tdcoll.sparse_all_reduce_padded(ids, rows, ROWS, ctx=ctx, algorithm="owner")
        assert bool((ctx.stage == SENTINEL).all()), "rows were moved"


ENDS = Inserted(
    "kernels_values.sum_pieces",
    "tl.load",
    "tl.store(g.monitor, tl.cast(1, tl.int64))",
    of="memory.counters + lists.LONG",
)
"""Before a thread block sums pieces, it sets the monitor's word for waits that have ended."""

WORLD: dict[str, Any] = {"n_pes": 2, "heap_bytes": HEAP}
MUTANTS = [
    Mutant(
        "a dense phase does not wait for the directory",
        (dropped("kernels_values.prepare", "match.wait_until_built", "index"),),
        "rows were moved", Invalid(), WORLD, seeds=20, any_seed=True,
    ),
    Mutant(
        "a sum of pieces goes to the stage although the waits have ended",
        (ENDS, Change("kernels_values.sum_partial", "still_alive(g.monitor) == 0", "False")),
        "rows were moved", Ended(), WORLD, seeds=3,
    ),
]  # fmt: skip


def test_rows_of_lists_that_are_not_valid_stay_where_they_are() -> None:
    explore(Invalid(), **WORLD, seeds=5)


def test_a_stage_stays_as_it_is_when_the_waits_end_between_two_phases(tmp_path: Path) -> None:
    with installed([ENDS], tmp_path):
        explore(Ended(), **WORLD, seeds=2)


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_mutant_is_caught(mutant: Mutant, tmp_path: Path) -> None:
    mutant.is_caught(tmp_path)
