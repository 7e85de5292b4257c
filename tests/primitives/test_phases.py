# SPDX-License-Identifier: Apache-2.0
"""Calls in which a rank sends twice, and calls of several launches."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from kernel_mutants import Change, installed

import tdcoll
from tdcoll.primitives.group import EPOCH_SHIFT
from tdcoll.testing import World, explore, first_failure

from . import cases
from .cases import TwoStages

HEAP = 1 << 18
MORE = (cases.kernels().__name__,)
WRONG = r"AssertionError: rank \d+, call \d+: \d+ wrong numbers"
ONE_LAUNCH, THREE_LAUNCHES = TwoStages((5, 1, 8, 3)), TwoStages((5, 1, 8, 3), launches=True)


@pytest.mark.parametrize("case", [ONE_LAUNCH, THREE_LAUNCHES], ids=["one launch", "three launches"])
def test_two_stages(case: TwoStages) -> None:
    for n_pes, seeds in ((1, 1), (2, 2), (3, 8), (4, 2)):
        explore(case, n_pes=n_pes, seeds=seeds, heap_bytes=HEAP)
    explore(case, n_pes=3, seeds=2, heap_bytes=HEAP, resident=1)
    explore(TwoStages((4,) * 6, case.launches, pause=60), n_pes=3, seeds=2, heap_bytes=HEAP, stragglers=True)


def test_a_call_of_several_launches_is_one_epoch() -> None:
    def host(pe: int) -> None:
        with tdcoll.CollectiveContext(max_bytes_per_rank=16, phases=2) as ctx:
            for call in range(3):
                source = cases.numbers(pe, call, 8)
                THREE_LAUNCHES.launch(ctx, source, source.clone())
                assert int(ctx.control) == (call + 1) << EPOCH_SHIFT.value

    World(2, heap_bytes=HEAP).run(host)


MUTANTS = {
    "both phases have the inbox of the first": (
        Change("group.segment", "slot(epoch) * g.phases + phase", "slot(epoch) * g.phases"),
        WRONG,
        ONE_LAUNCH,
    ),
    "both phases have the signals of the first": (
        Change("group.row", "slot(epoch) * g.phases + phase", "slot(epoch) * g.phases"),
        WRONG,
        ONE_LAUNCH,
    ),
    "the second phase has the inbox of the other slot's first": (
        Change("group.segment", "slot(epoch) * g.phases + phase", "slot(epoch) + phase"),
        WRONG,
        ONE_LAUNCH,
    ),
    "the second launch begins a call": (
        Change("kernels.reduce_part", "now(g)", "start(g)"),
        r"[Dd]eadlock[\s\S]*waits for pe\d+\.signals\[",
        THREE_LAUNCHES,
    ),
    "the epoch that was begun is taken for finished": (
        Change("group.now", "word >> EPOCH_SHIFT", "(word >> EPOCH_SHIFT) + 1"),
        r"[Dd]eadlock[\s\S]*waits for pe\d+\.signals\[",
        THREE_LAUNCHES,
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(name: str, tmp_path: Path) -> None:
    change, expect, case = MUTANTS[name]
    with installed([change], tmp_path, MORE):
        failure = first_failure(case, n_pes=3, seeds=40, heap_bytes=HEAP)
    assert failure is not None, f"nothing noticed: {name}"
    assert re.search(expect, failure.report), f"{name} fails, but not as it should: {failure.report}"
    explore(case, n_pes=3, seeds=5, heap_bytes=HEAP)
