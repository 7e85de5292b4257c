# SPDX-License-Identifier: Apache-2.0
"""All schedules of a small case are run: planted faults are found without seeds and without the
detector of races, and right kernels are exhausted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton.language as tl
from cases import Case, around, device, gather, handed_over, put_and_told, spinning
from protocols import Steps
from test_negative_controls import CAUGHT, CLEAN, broadcast

import tdcoll.language as tdl
from tdcoll.base.errors import TdcollError
from tdcoll.testing import DataRace, Deadlock, World, exhaust, replay


def broadcasts(ack: bool) -> Case:
    return broadcast(ack, calls=3)


@pytest.mark.parametrize(
    ("make", "right", "wrong", "n_pes"),
    [
        pytest.param(broadcasts, True, False, 2, id="no acknowledgement"),
        pytest.param(around, 2, 1, 3, id="one slot"),
        pytest.param(put_and_told, "", "no fence", 2, id="no fence"),
        pytest.param(handed_over, "", "no wait", 2, id="no wait"),
        pytest.param(handed_over, "", "gpu release", 2, id="a release for one GPU"),
    ],
)
def test_planted_faults_are_found_without_seeds(
    make: Callable[[Any], Case], right: Any, wrong: Any, n_pes: int
) -> None:
    clean = exhaust(make(right), n_pes=n_pes, races=False, limit=30)
    assert clean.exhausted, clean
    found = exhaust(make(wrong), n_pes=n_pes, races=False, limit=30)
    assert found.failure is not None, found
    assert "AssertionError" in found.failure.report
    assert not found.exhausted


@pytest.mark.parametrize("steps", CLEAN, ids=str)
def test_right_kernels_are_exhausted(steps: Steps) -> None:
    found = exhaust(gather(steps, calls=2), n_pes=2, limit=30)
    assert found.exhausted, found


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("steps", CAUGHT, ids=str)
def test_data_that_no_signal_orders_is_found(steps: Steps, pieces: int) -> None:
    found = exhaust(gather(steps, calls=1), n_pes=2, races=False, pieces=pieces, limit=10)
    assert found.failure is not None, found
    assert "bytes of rank" in found.failure.report


@pytest.mark.parametrize(
    "options",
    [
        {"slots": 1, "signal_slots": 2},
        {"signal_slots": 1},
        {"compare": tdl.CMP_EQ.value, "signal_slots": 1},
    ],
    ids=["one slot", "one row of signals", "equal"],
)
def test_too_few_slots_are_found(options: dict[str, Any]) -> None:
    found = exhaust(gather(calls=3, **options), n_pes=2, races=False, limit=20)
    assert found.failure is not None, found


def test_a_spinning_program_waits() -> None:
    """Otherwise it could spin as often as it likes, and there would be no end of schedules."""
    found = exhaust(spinning(0), n_pes=2, limit=100)
    assert found.exhausted, found
    assert found.executions > 1


def test_a_race_counts_unless_it_is_set_aside() -> None:
    """In the first schedule the words are right."""
    unordered = handed_over("relaxed store")
    unordered(World(2))
    found = exhaust(unordered, n_pes=2, limit=1)
    assert found.failure is not None
    assert isinstance(found.failure.error, DataRace)
    assert exhaust(unordered, n_pes=2, limit=1, races=False, weak=False).failure is None


def test_a_failure_can_be_replayed() -> None:
    wrong = gather(slots=1, signal_slots=2, calls=3)
    failure = exhaust(wrong, n_pes=2, races=False).failure
    assert failure is not None
    assert failure.options["schedule"], "it fails in the first schedule already"
    assert f"replay(case, n_pes=2, schedule={failure.options['schedule']}" in str(failure)
    with pytest.raises(AssertionError) as raised:
        replay(wrong, **failure.options)
    assert str(raised.value) == str(failure.error)
    replay(wrong, **{**failure.options, "schedule": {}})  # the first schedule is right


def test_a_deadlock_is_a_failure() -> None:
    overtaken = gather(compare=tdl.CMP_EQ.value, signal_slots=1, calls=3)
    failure = exhaust(overtaken, n_pes=2, races=False, limit=20).failure
    assert failure is not None
    assert isinstance(failure.error, Deadlock)


def test_the_limit_ends_the_search() -> None:
    found = exhaust(spinning(0), n_pes=2, limit=3)
    assert not found.exhausted
    assert found.failure is None
    assert found.executions + found.redundant == 3
    assert str(found).startswith("not exhausted by ")


def counted(aside: bool) -> Callable[[World], object]:
    """A case in which two programs of each PE count themselves, and look at the count first."""

    def count(counter: Any) -> None:
        tdl.ld(counter, "gpu", "relaxed")
        tl.atomic_add(counter, 1, sem="relaxed", scope="gpu")

    def run(world: World) -> None:
        def host(pe: int) -> None:
            counter = torch.zeros(1, dtype=torch.int64)
            if aside:
                world.ignore_order_of(counter)
            device(count, counter, grid=(2,))
            assert counter.item() == 2

        world.run(host)

    return run


def test_the_order_of_accesses_to_a_tensor_can_be_set_aside() -> None:
    assert exhaust(counted(aside=True), n_pes=2).executions == 1
    every = exhaust(counted(aside=False), n_pes=2)
    assert every.exhausted
    assert every.executions == 16  # 4 on each PE


def test_a_case_must_repeat_itself() -> None:
    runs = []

    def other(world: World) -> None:
        runs.append(world)
        if len(runs) == 1:
            counted(aside=False)(world)

    with pytest.raises(TdcollError, match="took another course before step"):
        exhaust(other, n_pes=2)


@pytest.mark.parametrize(
    ("options", "report"),
    [
        ({"limit": 0}, "limit must be"),
        ({"pieces": 0}, "pieces must be"),
        ({"seed": 1}, "seed must be left out"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], report: str) -> None:
    with pytest.raises(ValueError, match=report):
        exhaust(gather(), n_pes=2, **options)


def test_replays_need_one_schedule() -> None:
    for given in ({}, {"seed": 1, "schedule": {}}):
        with pytest.raises(ValueError, match="give either seed or schedule"):
            replay(gather(), n_pes=2, **given)
