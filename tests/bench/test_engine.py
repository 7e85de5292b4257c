# SPDX-License-Identifier: Apache-2.0
"""What the engine does with a subject: turns, launches, inputs that change before each, and what it checks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tdcoll import runtime
from tdcoll.bench import engine
from tdcoll.bench.engine import TURNS, Entry, Plan, Subject, measure_entries, simulate_entry
from tdcoll.bench.job import Job
from tdcoll.bench.timing import Launch, LineUp
from tdcoll.testing import World


class Recorded:
    """A subject of three inputs that takes down what is done with it. A result is ``(input, its round)``."""

    def __init__(self, wrong: Callable[[int], bool] = lambda at: False, **fields: Any) -> None:
        self.did: list[Any] = []
        self.rounds = [0, 0, 0]
        self.wrong = wrong
        self.subject = Subject(self.call, self.errors, 3, self.begin, self.before, (2, 3), **fields)

    def begin(self, round_: int) -> None:
        self.did.append("begin")
        self.rounds = [round_] * 3

    def before(self, numbers: Any) -> None:
        self.did.append(list(numbers))
        for number in numbers:
            self.rounds[number] += 1

    def call(self, number: int) -> tuple[int, int]:
        self.did.append(number)
        return number, self.rounds[number]

    def errors(self, number: int, result: tuple[int, int]) -> tuple[int, str]:
        assert result == (number, self.rounds[number]), "it checks the results of the last launch"
        self.did.append("check")
        return int(self.wrong(number)), f"input {number}"


def measured(recorded: Recorded, launch: str, **plan: int) -> Entry:
    entry = Entry("x", False, launch, recorded.subject)

    def host(_: int) -> None:
        with LineUp() as line_up:
            measure_entries(Job(), [entry], Plan(**{"iterations": 4, "warmup": 1, **plan}), line_up)

    World(1).run(host)
    return entry


TWO, THREE = [[0, 1], 0, 1], [[0, 1, 2], 0, 1, 2]
ONE_BY_ONE = [x for number in (0, 1, 2) for x in ([number], number, "check")]


@pytest.mark.parametrize("launch", ["graph", "eager"])
def test_inputs_change_before_every_launch_and_all_results_of_the_last_are_checked(launch: str, clock: Any) -> None:
    recorded = Recorded()
    entry = measured(recorded, launch)
    even = ["begin", *TWO, *TWO, "check", "check"]  # a launch that is not timed, and one that is
    odd = ["begin", *THREE, *THREE, "check", "check", "check"]
    assert recorded.did == ["begin", *ONE_BY_ONE, *even, *odd, *even, *odd]
    assert (entry.calls, len(entry.times_us), entry.errors) == ((2, 3), TURNS, 0)


def test_both_launches_are_timed_and_the_warm_up_is_longer_in_the_first_turn(clock: Any) -> None:
    recorded = Recorded()
    entry = measured(recorded, "graph", iterations=9, warmup=3)
    turns: list[list[Any]] = []
    for did in recorded.did:
        turns += [[]] if did == "begin" else []
        turns[-1].append(did)
    launches = [[x for x in turn if isinstance(x, list)] for turn in turns[1:]]
    assert [len(turn) for turn in launches] == [3 + 3, 1 + 2, 1 + 2, 1 + 2]
    assert [len(turn[-1]) for turn in launches] == [2, 3, 2, 3]
    assert len(entry.times_us) == 9


def test_a_subject_that_takes_long_has_fewer_iterations(clock: Any) -> None:
    entry = measured(Recorded(most_iterations=2), "graph")
    assert len(entry.times_us) == 2


def test_what_is_wrong_is_counted_and_named(clock: Any) -> None:
    entry = measured(Recorded(wrong=lambda number: number == 1), "graph")
    assert (entry.errors, entry.where) == (1 + TURNS, "input 1")


def test_times_are_of_a_part_and_of_ranks_that_take_part(clock: Any, on_gpus: Callable[..., list[Any]]) -> None:
    def host(pe: int) -> Entry:
        rank = runtime.current().rank
        subject = Subject(
            lambda _: clock.passes([8.0, 12.0, 99.0][rank]), lambda *_: (0, ""), parts=4, takes_part=rank < 2
        )
        entry = Entry("x", False, "graph", subject)
        with LineUp() as line_up:
            measure_entries(Job(), [entry], Plan(4, 1), line_up)
        return entry

    for entry in on_gpus(host, 3):
        assert (entry.summary.median_us, entry.summary.skew_us) == pytest.approx((3.0, 1.0))


@pytest.mark.parametrize("alone", [False, True])
def test_the_simulator_changes_inputs_and_checks_each_call(alone: bool) -> None:
    recorded = Recorded(alone=alone)
    entry = Entry("x", False, "simulator", recorded.subject)
    World(1).run(lambda _: simulate_entry(Job(), entry))
    if alone:
        assert recorded.did == ["begin", *ONE_BY_ONE, [0], 0, "check"]
    else:
        assert recorded.did == ["begin", *(2 * [*THREE, "check", "check", "check"])]
    assert (entry.problem, entry.errors, entry.calls) == (None, 0, ((1,) if alone else (3,)))
    assert entry.counts is not None


@pytest.mark.parametrize("launch", ["graph", "eager"])
def test_what_was_captured_is_made_known_before_the_first_replay(
    launch: str, clock: Any, on_gpus: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    did: list[str] = []

    def capture(call: Callable[[int], object], calls: int) -> Launch:
        did.append("capture")
        return Launch(lambda: did.append("replay") or [call(i) for i in range(calls)], calls)

    monkeypatch.setattr(engine, "capture", capture)
    recorded = Recorded(captured=lambda: did.append("captured"))
    assert measured(recorded, launch).problem is None
    assert did[:4] == (["capture", "capture", "captured", "replay"] if launch == "graph" else [])

    def fail() -> None:
        raise RuntimeError("no memory")

    entry = Entry("x", True, launch, Recorded(captured=fail).subject)

    def host(_: int) -> None:
        with LineUp() as line_up:
            measure_entries(Job(), [entry], Plan(4, 1), line_up)

    World(1).run(host)
    assert entry.problem == ("no memory" if launch == "graph" else None)
    assert bool(entry.times_us) == (launch == "eager")
