# SPDX-License-Identifier: Apache-2.0
"""What the engine does with a workload."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from tdcoll.base.errors import RankMismatchError, TdcollError
from tdcoll.testing import World
from tdcoll.tools.measure import engine
from tdcoll.tools.measure.engine import TURNS, JobRanks, Measurement, Workload, launch_calls
from tdcoll.tools.measure.results import Row
from tdcoll.tools.measure.timing import LineUp, TimeSummary, graph_time_us, summarize


class Recorder:
    """A workload of three inputs that records what is done with it.

    A result is ``(input, the input's round, call)``.
    """

    def __init__(self, wrong: Callable[[int], bool] = lambda number: False, **fields: Any) -> None:
        self.log: list[Any] = []
        self.rounds = [0, 0, 0]
        self.calls = 0
        self.wrong = wrong
        self.workload = Workload(
            call=self.call,
            errors=self.errors,
            n_inputs=3,
            begin=self.begin,
            before=self.before,
            launch_calls=(2, 3),
            **fields,
        )

    def begin(self, round_: int) -> None:
        self.log.append("begin")
        self.rounds = [round_] * 3

    def before(self, numbers: Any) -> None:
        self.log.append(list(numbers))
        for number in dict.fromkeys(numbers):
            self.rounds[number] += 1

    def call(self, number: int) -> tuple[int, int, int]:
        self.log.append(number)
        self.calls += 1
        return number, self.rounds[number], self.calls

    def errors(self, number: int, result: tuple[int, int, int]) -> tuple[int, str]:
        assert result[:2] == (number, self.rounds[number]), "it checks the last launch's results"
        self.log.append("check")
        return int(self.wrong(number)), f"input {number}"


def row(launch: str = "graph", peer: bool = False) -> Row:
    return Row(ranks=1, nodes=1, algorithm="x", peer=peer, launch=launch, check="ok")


def measured(
    workload: Workload, launch: str, iterations: int = 4, warmup: int = 1, peer: bool = False
) -> Measurement:
    """Return a workload's measurement by one rank."""

    def host(_: int) -> Measurement:
        measurement = Measurement(JobRanks(), row(launch, peer), workload)
        with LineUp() as line_up:
            engine.measure([measurement], line_up, iterations, warmup)
        return measurement

    return World(1).run(host)[0]


CHECKED = ["check", "check", "check"]
TWO = [[0, 1], 0, 1]
THREE = [[0, 1, 2], 0, 1, 2]
ONE_BY_ONE = [[0], 0, "check", [1], 1, "check", [2], 2, "check"]


@pytest.mark.parametrize("launch", ["graph", "eager"])
def test_inputs_change_before_every_launch_and_all_results_of_the_last_are_checked(
    launch: str, clock: Any
) -> None:
    recorder = Recorder()
    measurement = measured(recorder.workload, launch)
    # A launch that is not timed, and one that is.
    even = ["begin", *TWO, *TWO, "check", "check"]
    odd = ["begin", *THREE, *THREE, *CHECKED]
    assert recorder.log == ["begin", *THREE, *CHECKED, *even, *odd, *even, *odd]
    assert measurement.row.calls == (2, 3)
    assert measurement.row.iterations == TURNS
    assert measurement.row.check == "ok"


def test_both_launches_are_timed_and_the_warm_up_is_longer_in_the_first_turn(clock: Any) -> None:
    recorder = Recorder()
    measurement = measured(recorder.workload, "graph", iterations=9, warmup=4)
    turns: list[list[int]] = []
    for entry in recorder.log:
        if entry == "begin":
            turns.append([])
        elif isinstance(entry, list):
            turns[-1].append(len(entry))
    # The preparation, then 4 untimed launches and 3 timed ones, then 1 and 2.
    assert turns == [[3, 3], [3, 2, 3, 2, 2, 3, 2], [3, 2, 3], [2, 3, 2], [3, 2, 3]]
    assert len(measurement.times_us) == 9


@pytest.mark.parametrize("one_at_a_time", [False, True])
def test_what_is_wrong_is_counted_and_named(one_at_a_time: bool, clock: Any) -> None:
    recorder = Recorder(one_at_a_time=one_at_a_time)
    recorder.wrong = lambda number: number == 1 and recorder.calls > 3  # not in the preparation
    row = measured(recorder.workload, "eager", iterations=5).row
    assert (row.check, row.note, row.iterations) == ("WRONG", "input 1", 5)


@pytest.mark.parametrize(
    ("iterations", "called"),
    [
        (2, [[0, 0], [0, 1]]),
        (5, [[0, 0, 1], [0, 1], [0, 2], [0, 0]]),
    ],
)
def test_each_call_that_is_made_alone_is_timed_and_checked_and_inputs_take_turns(
    iterations: int, called: list[list[int]], clock: Any
) -> None:
    recorder = Recorder(one_at_a_time=True)

    def call(number: int) -> Any:
        clock.passes(8.0)
        return recorder.call(number)

    workload = dataclasses.replace(recorder.workload, call=call)
    measurement = measured(workload, "eager", iterations)
    expected: list[Any] = ["begin", *ONE_BY_ONE]
    for turn in called:
        expected.append("begin")
        for number in turn:
            expected += [[number], number, "check"]
    assert recorder.log == expected
    assert measurement.times_us == [8.0] * iterations
    assert (measurement.row.calls, measurement.row.median_us) == ((1,), 8.0)


def test_of_graphs_of_calls_that_are_made_alone_the_last_call_is_checked(clock: Any) -> None:
    recorder = Recorder(one_at_a_time=True)
    row = measured(recorder.workload, "graph").row
    even = ["begin", *TWO, *TWO, "check"]
    odd = ["begin", *THREE, *THREE, "check"]
    assert recorder.log == ["begin", *ONE_BY_ONE, *even, *odd, *even, *odd]
    assert (row.calls, row.check) == ((2, 3), "ok")


def test_times_are_of_a_part_and_of_ranks_that_take_part(
    clock: Any, on_gpus: Callable[..., list[Any]]
) -> None:
    def host(pe: int) -> Row:
        us = [8.0, 12.0, 99.0][pe]
        workload = Workload(
            call=lambda _: clock.passes(us),
            errors=lambda *_: (0, ""),
            parts=4,
            takes_part=pe < 2,
        )
        measurement = Measurement(JobRanks(), row(), workload)
        with LineUp() as line_up:
            engine.measure([measurement], line_up, 4, 1)
        return measurement.row

    for found in on_gpus(host, 3):
        assert (found.median_us, found.skew_us) == pytest.approx((3.0, 1.0))


@pytest.mark.parametrize("one_at_a_time", [False, True])
def test_the_simulator_changes_inputs_and_checks_each_call(one_at_a_time: bool) -> None:
    recorder = Recorder(one_at_a_time=one_at_a_time)

    def host(_: int) -> Row:
        measurement = Measurement(JobRanks(), row("simulator"), recorder.workload)
        measurement.simulate()
        return measurement.row

    (found,) = World(1).run(host)
    calls = [*ONE_BY_ONE, [0], 0, "check"] if one_at_a_time else 2 * [*THREE, *CHECKED]
    assert recorder.log == ["begin", *calls]
    assert (found.check, found.note, found.calls) == ("ok", None, (1,))


def test_a_baseline_that_fails_says_why_and_tdcoll_must_not(clock: Any) -> None:
    def fail(number: int) -> None:
        raise RuntimeError("no such\ntransport")

    workload = Workload(fail, lambda number, result: (0, ""))
    row = measured(workload, "eager", peer=True).row
    assert (row.check, row.note, row.median_us) == ("not run", "no such transport", None)
    with pytest.raises(RuntimeError, match="no such"):
        measured(workload, "eager")


def test_all_ranks_agree_that_one_of_them_fails() -> None:
    def fail() -> None:
        raise RuntimeError("no such\ntransport")

    def host(pe: int) -> Any:
        return JobRanks().agree("make", fail if pe else lambda: "made", True)

    assert World(2).run(host) == [
        (None, "rank 1: no such transport"),
        (None, "no such transport"),
    ]


def test_gpus_of_two_kinds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their generators would make different numbers, and right results would be wrong."""
    monkeypatch.setattr(JobRanks, "gather", lambda self, what, own: ["GPU 0", "GPU 1"])
    with pytest.raises(RankMismatchError, match=r"expected GPUs of one kind, .* got GPU 0, GPU 1"):
        World(1).run(lambda _: JobRanks())


def test_the_simulator_has_no_times() -> None:
    with pytest.raises(TdcollError, match="needs GPUs"):
        World(1).run(lambda *_: graph_time_us(lambda: None))


def test_an_iteration_takes_as_long_as_its_slowest_rank() -> None:
    # Every rank is fast in most iterations; only the maximum over ranks shows that no iteration is.
    # The skews are 8, 7, 6 and 4.
    times = [[9.0, 1.0, 1.0, 1.0], [1.0, 8.0, 1.0, 5.0], [1.0, 1.0, 7.0, 1.0]]
    assert summarize(times) == TimeSummary(median_us=7.5, min_us=5.0, p90_us=9.0, skew_us=6.5)
    assert summarize([[float(i) for i in range(1, 101)]]).p90_us == 90.0  # a time that was measured
    assert summarize([[3.0]]).p90_us == 3.0


@pytest.mark.parametrize("times", [[], [[]], [[1.0], [1.0, 2.0]]])
def test_ranks_without_times_or_with_different_numbers_of_them(times: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="same number of times"):
        summarize(times)


def test_launches_have_an_even_and_an_odd_number_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = (1, 8 << 20, 128 << 20, 8 << 30)
    assert {launch_calls(nbytes) for nbytes in sizes} == {(2, 3)}, "nothing is timed here"
    monkeypatch.setattr("tdcoll.tools.measure.engine.LAUNCH_CALLS", (20, 21))
    assert [launch_calls(nbytes) for nbytes in sizes] == [(20, 21), (20, 21), (8, 9), (2, 3)]
