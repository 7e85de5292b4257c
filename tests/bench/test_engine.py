# SPDX-License-Identifier: Apache-2.0
"""What the engine does with a subject: turns, launches, inputs that change before each, and what it checks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tdcoll.base.errors import TdcollError
from tdcoll.testing import World
from tdcoll.tools.bench import engine
from tdcoll.tools.bench.arithmetic import format_bytes, ratio, summarize
from tdcoll.tools.bench.engine import TURNS, Contender, Ranks, Subject, simulate
from tdcoll.tools.bench.rows import Row
from tdcoll.tools.bench.timing import LineUp, graph_time_us


class Recorded:
    """A subject of three inputs that takes down what is done with it. A result is ``(input, its round, call)``."""

    def __init__(self, wrong: Callable[[int], bool] = lambda at: False, **fields: Any) -> None:
        self.did: list[Any] = []
        self.rounds = [0, 0, 0]
        self.calls = 0
        self.wrong = wrong
        self.subject = Subject(self.call, self.errors, 3, self.begin, self.before, (2, 3), **fields)

    def begin(self, round_: int) -> None:
        self.did.append("begin")
        self.rounds = [round_] * 3

    def before(self, numbers: Any) -> None:
        self.did.append(list(numbers))
        for number in dict.fromkeys(numbers):
            self.rounds[number] += 1

    def call(self, number: int) -> tuple[int, int, int]:
        self.did.append(number)
        self.calls += 1
        return number, self.rounds[number], self.calls

    def errors(self, number: int, result: tuple[int, int, int]) -> tuple[int, str]:
        assert result[:2] == (number, self.rounds[number]), "it checks the results of the last launch"
        self.did.append("check")
        return int(self.wrong(number)), f"input {number}"


def entry_of(subject: Subject, launch: str = "graph", peer: bool = False) -> Contender:
    return Contender(Row(ranks=1, nodes=1, algorithm="x", peer=peer, launch=launch, check="ok"), subject)


def measured(subject: Subject, launch: str, iterations: int = 4, warmup: int = 1, **how: Any) -> Contender:
    """One entry, measured by one rank."""
    entry = entry_of(subject, launch, how.pop("peer", False))

    def host(_: int) -> None:
        with LineUp() as line_up:
            engine.measure(Ranks(), [entry], line_up, iterations, warmup, **how)

    World(1).run(host)
    return entry


CHECKED = ["check", "check", "check"]
TWO, THREE = [[0, 1], 0, 1], [[0, 1, 2], 0, 1, 2]
ONE_BY_ONE = [x for number in (0, 1, 2) for x in ([number], number, "check")]


@pytest.mark.parametrize("launch", ["graph", "eager"])
def test_inputs_change_before_every_launch_and_all_results_of_the_last_are_checked(launch: str, clock: Any) -> None:
    recorded = Recorded()
    entry = measured(recorded.subject, launch)
    even = ["begin", *TWO, *TWO, "check", "check"]  # a launch that is not timed, and one that is
    odd = ["begin", *THREE, *THREE, *CHECKED]
    assert recorded.did == ["begin", *THREE, *CHECKED, *even, *odd, *even, *odd]
    assert (entry.row.calls, entry.row.iterations, entry.row.check) == ((2, 3), TURNS, "ok")


def test_both_launches_are_timed_and_the_warm_up_is_longer_in_the_first_turn(clock: Any) -> None:
    recorded = Recorded()
    entry = measured(recorded.subject, "graph", iterations=9, warmup=4)
    launches = ["|" if x == "begin" else str(len(x)) for x in recorded.did if isinstance(x, list) or x == "begin"]
    assert "".join(launches) == "|33|3232232|323|232|323"
    assert len(entry.times_us) == 9


@pytest.mark.parametrize("alone", [False, True])
def test_what_is_wrong_is_counted_and_named(alone: bool, clock: Any) -> None:
    recorded = Recorded(wrong=lambda number: number == 1 and recorded.calls > 3, alone=alone)  # not in the preparation
    entry = measured(recorded.subject, "eager", iterations=5)
    assert (entry.row.check, entry.row.note, entry.row.iterations) == ("WRONG", "input 1", 5)


@pytest.mark.parametrize("iterations", [2, 5])
def test_every_call_that_is_alone_is_timed_and_checked_and_inputs_take_turns(iterations: int, clock: Any) -> None:
    recorded = Recorded(alone=True)
    call = recorded.call
    subject = recorded.subject
    object.__setattr__(subject, "call", lambda number: (clock.passes(8.0), call(number))[1])
    entry = measured(subject, "eager", iterations)
    called = [[0, 0, 1], [0, 1], [0, 2], [0, 0]] if iterations == 5 else [[0, 0], [0, 1]]
    turns = [["begin", *(x for number in turn for x in ([number], number, "check"))] for turn in called]
    assert recorded.did == ["begin", *ONE_BY_ONE, *(x for turn in turns for x in turn)]
    assert (entry.times_us, entry.row.calls, entry.row.median_us) == ([8.0] * iterations, (1,), 8.0)


def test_graphs_of_calls_that_are_alone_are_checked_by_the_last_call_of_the_last_replay(clock: Any) -> None:
    recorded = Recorded(alone=True)
    entry = measured(recorded.subject, "graph")
    even, odd = ["begin", *TWO, *TWO, "check"], ["begin", *THREE, *THREE, "check"]
    assert recorded.did == ["begin", *ONE_BY_ONE, *even, *odd, *even, *odd]
    assert (entry.row.calls, entry.row.check) == ((2, 3), "ok")


def test_times_are_of_a_part_and_of_ranks_that_take_part(clock: Any, on_gpus: Callable[..., list[Any]]) -> None:
    def host(pe: int) -> Contender:
        us = [8.0, 12.0, 99.0][pe]
        entry = entry_of(Subject(lambda _: clock.passes(us), lambda *_: (0, ""), parts=4, takes_part=pe < 2))
        with LineUp() as line_up:
            engine.measure(Ranks(), [entry], line_up, 4, 1)
        return entry

    for entry in on_gpus(host, 3):
        assert (entry.row.median_us, entry.row.skew_us) == pytest.approx((3.0, 1.0))


@pytest.mark.parametrize("alone", [False, True])
def test_the_simulator_changes_inputs_and_checks_each_call(alone: bool) -> None:
    recorded = Recorded(alone=alone)
    entry = entry_of(recorded.subject, "simulator")
    World(1).run(lambda _: simulate(Ranks(), entry))
    assert recorded.did == ["begin", *([*ONE_BY_ONE, [0], 0, "check"] if alone else 2 * [*THREE, *CHECKED])]
    assert (entry.row.check, entry.row.note, entry.row.calls) == ("ok", None, (1,))
    assert entry.row.counts is not None


def test_a_peer_that_fails_says_why_and_tdcoll_must_not(clock: Any) -> None:
    def fail(number: int) -> None:
        raise RuntimeError("no such\ntransport")

    subject = Subject(fail, lambda number, result: (0, ""))
    entry = measured(subject, "eager", peer=True)
    assert (entry.row.check, entry.row.note, entry.row.median_us) == ("not run", "no such transport", None)
    with pytest.raises(RuntimeError, match="no such"):
        measured(subject, "eager")
    found = World(2).run(lambda pe: Ranks().agree("make", lambda: fail(0) if pe else "made", True))
    assert found == [(None, "rank 1: no such transport"), (None, "no such transport")]


def test_the_simulator_has_no_times() -> None:
    with pytest.raises(TdcollError, match="needs GPUs"):
        World(1).run(lambda *_: graph_time_us(lambda: None))


def test_an_iteration_takes_as_long_as_its_slowest_rank() -> None:
    # Every rank is fast in most iterations; only the maximum over ranks shows that no iteration is. Skews 8, 7, 6, 4.
    times = [[9.0, 1.0, 1.0, 1.0], [1.0, 8.0, 1.0, 5.0], [1.0, 1.0, 7.0, 1.0]]
    assert summarize(times) == {"median_us": 7.5, "min_us": 5.0, "p90_us": 9.0, "skew_us": 6.5}
    assert summarize([[float(i) for i in range(1, 101)]])["p90_us"] == 90.0  # a time that was measured
    assert summarize([[3.0]])["p90_us"] == 3.0


@pytest.mark.parametrize("times", [[], [[]], [[1.0], [1.0, 2.0]]])
def test_ranks_without_times_or_with_different_numbers_of_them(times: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="same number of times"):
        summarize(times)


def test_a_ratio_is_the_peers_time_over_ours() -> None:
    assert [ratio(*times) for times in ((15.0, 3.0), (3.0, 6.0), (None, 3.0), (3.0, None))] == [5.0, 0.5, None, None]


def test_sizes_are_written_exactly() -> None:
    found = [format_bytes(n) for n in (0, 512, 1024, 1025, 3 << 20, 1 << 30)]
    assert found == ["0 B", "512 B", "1 KB", "1025 B", "3 MB", "1 GB"]
