# SPDX-License-Identifier: Apache-2.0
"""Time and check workloads side by side: workloads in, times and errors out.

All workloads of a size are prepared first (called with every input, checked, captured). Then they
are measured in several turns each, so that clocks and temperature are the same for all. Inputs
change on the device before every launch, and consecutive calls take different ones, because a
replay of one buffer is faster than real use. Results are checked in the timed path, as far as the
workload permits:

- Mostly each call of a launch has an input and a result of its own. Eager calls are timed in
  launches of as many calls as a graph has, and after each turn the results of every call of its
  last launch are checked. The last launches alternate between an even and an odd number of calls.
- A workload is *one at a time* if its results last only until its next call, or if the host has to
  know their size. Its eager calls may wait for the GPU, so they are timed and checked one at a
  time. Of a graph, the last call is checked.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tdcoll import runtime
from tdcoll.base.errors import CollectiveTimeout, HeapExhaustedError, RankMismatchError
from tdcoll.language import INTERPRETED
from tdcoll.tools.measure.results import Row
from tdcoll.tools.measure.timing import LineUp, TimedLaunch, capture, summarize, time_launches

TURNS = 4
"""Turns of each measurement; even, so that each of two launches is the last in half of them."""

LAUNCH_CALLS = (2, 3) if INTERPRETED else (20, 21)
"""Numbers of calls that are timed together. One is odd, because that shows protocols that mix up
their buffers. They are small in the simulator, because it times nothing."""

_RESULT_BYTES = 1 << 30
"""About as much memory as the results of one launch take, if each call has its own result."""

_ROUND_STEP = 10_007

Errors = tuple[int, str]
"""The number of wrong elements, and a description of the first."""


def launch_calls(nbytes: int) -> tuple[int, int]:
    """Return an even and an odd number of calls to time together.

    They are :data:`LAUNCH_CALLS`, or fewer if results are large.

    Args:
        nbytes: bytes of a call's result.
    """
    even = min(LAUNCH_CALLS[0], max(2, _RESULT_BYTES // nbytes // 2 * 2))
    return even, even + 1


def do_nothing(*_: Any) -> None:
    """Stand for a step that a workload doesn't need."""


class JobRanks:
    """The ranks of this job, and what they agree on. Collective.

    Raises:
        RankMismatchError: the GPUs are of several kinds.
    """

    def __init__(self) -> None:
        self.owner = runtime.current()
        self.topology = self.owner.topology()
        self.device = self.owner.device
        self._rounds = itertools.count(_ROUND_STEP, _ROUND_STEP)
        gpu = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "none"
        kinds = set(self.gather("GPU", gpu))
        if len(kinds) > 1:
            found = ", ".join(sorted(kinds))
            raise RankMismatchError(
                f"expected GPUs of one kind, whose generators make the same numbers; got {found}"
            )

    def next_round(self) -> int:
        """Return where the next rounds of inputs begin: far from all earlier rounds."""
        return next(self._rounds)

    def gather(self, what: str, value: Any) -> list[Any]:
        """Return ``value`` of every rank; also a barrier between hosts. Collective."""
        return self.owner.control.all_gather(range(self.owner.world_size), what, value)

    def agree(
        self,
        what: str,
        action: Callable[[], Any],
        is_baseline: bool,
    ) -> tuple[Any, str | None]:
        """Return ``(result, None)`` if the action works on every rank, else ``(None, reason)``.

        A baseline may raise any error. tdcoll raises ValueError if it doesn't support the call, and
        HeapExhaustedError if the heap is too small; any other error is raised again.
        """
        result = None
        problem = None
        try:
            result = action()
        except Exception as error:
            is_reason = is_baseline or isinstance(error, (ValueError, HeapExhaustedError))
            if isinstance(error, CollectiveTimeout) or not is_reason:
                raise
            problem = " ".join(f"{error}".split())[:300] or type(error).__name__
        for rank, text in enumerate(self.gather(what, problem)):
            if text is None:
                continue
            if problem is None:
                text = f"rank {rank}: {text}"
            return None, text
        return result, None


@dataclass(frozen=True)
class Workload:
    """Calls to time and to check.

    Attributes:
        call: makes the call with this input, on the current stream; returns its result.
        errors: checks the result of the call with this input.
        n_inputs: number of inputs; the calls of a launch take them in turn.
        begin: sets new inputs, and removes results, before each turn; takes a round that no turn
            before had. May be collective.
        before: prepares the inputs of the coming calls, untimed, in stream order.
        launch_calls: numbers of calls that are timed together, an even and an odd one.
        parts: times are divided by this number, because a call has so many equal parts.
        one_at_a_time: see the module.
        takes_part: whether this rank takes part. If not, its times don't count.
        close: gives back what the workload owns. Collective.
    """

    call: Callable[[int], Any]
    errors: Callable[[int, Any], Errors]
    n_inputs: int = 1
    begin: Callable[[int], object] = do_nothing
    before: Callable[[Sequence[int]], object] = do_nothing
    launch_calls: tuple[int, ...] = LAUNCH_CALLS
    parts: int = 1
    one_at_a_time: bool = False
    takes_part: bool = True
    close: Callable[[], object] = do_nothing

    def inputs_of(self, calls: int) -> list[int]:
        """Return the input of each call of a launch."""
        return [position % self.n_inputs for position in range(calls)]

    def checked_calls(self, calls: int) -> list[Errors]:
        """Make at least ``calls`` calls and return their errors.

        All inputs are used before each check, or a single one if the calls are made one at a time.
        """
        found = []
        step = 1 if self.one_at_a_time else self.n_inputs
        for first in range(0, calls, step):
            numbers = [(first + place) % self.n_inputs for place in range(step)]
            self.before(numbers)
            results = [self.call(number) for number in numbers]
            for number, result in zip(numbers, results, strict=True):
                found.append(self.errors(number, result))
        return found


@dataclass(frozen=True)
class Variant:
    """One way to do the work of a size: an algorithm of tdcoll, or a baseline.

    Attributes:
        name: the name in its rows.
        make: makes the workload; raises the reason if it can't run here. Collective.
        launches: ways to launch it: "graph", "eager".
        facts: facts of its rows, besides those of all rows of the size.
    """

    name: str
    is_baseline: bool
    make: Callable[[], Workload]
    launches: Sequence[str]
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass
class Measurement:
    """A workload that is launched in one way, and what was measured of it so far.

    Attributes:
        row: the row of the result. Its ``check`` is "not run" if the workload can't run here.
        workload: None if it couldn't be made.
        launches: what is timed: a launch for each of the workload's numbers of calls. Empty if
            calls are timed one at a time.
        results: the results of each launch's calls.
        times_us: microseconds per call of each iteration, on this rank.
    """

    ranks: JobRanks
    row: Row
    workload: Any = None
    launches: list[TimedLaunch] = field(default_factory=list)
    results: list[list[Any]] = field(default_factory=list)
    times_us: list[float] = field(default_factory=list)

    @property
    def can_run(self) -> bool:
        """True if it can run here, as far as is known."""
        return self.row.check != "not run"

    def prepare(self, warmup: int) -> None:
        """Call, check and capture, as a launch needs before it can be timed. Collective."""
        workload = self.workload

        def run() -> list[Errors]:
            found = workload.checked_calls(max(workload.n_inputs, warmup))
            if self.row.launch == "graph" or not workload.one_at_a_time:
                self.launches = [self._timed_launch(calls) for calls in workload.launch_calls]
                self.row.calls = workload.launch_calls
            return found

        workload.begin(self.ranks.next_round())
        self._check_run("prepare", run)
        self._release_memory()

    def take_turn(self, line_up: LineUp, turn: int, iterations: int, warmup: int) -> None:
        """Run one turn: new data, timed launches, checks. Collective."""
        self.workload.begin(self.ranks.next_round())
        torch.cuda.synchronize()
        self.ranks.gather("turn", None)
        if self.launches:
            found = self._time_together(line_up, turn, iterations, warmup)
        else:
            found = self._time_one_by_one(line_up, turn, iterations)
        self._note_errors(found)
        self._release_memory()

    def summarize(self) -> None:
        """Put the times of all ranks into the row. Collective."""
        workload = self.workload
        times = [us / workload.parts for us in self.times_us]
        of_ranks = self.ranks.gather("times", times if workload.takes_part else None)
        summary = summarize([of_rank for of_rank in of_ranks if of_rank is not None])
        self.row.median_us = summary.median_us
        self.row.min_us = summary.min_us
        self.row.p90_us = summary.p90_us
        self.row.skew_us = summary.skew_us
        self.row.iterations = len(times)

    def simulate(self) -> None:
        """Call and check every input twice. Collective.

        The second call finds stale data of the first one. If calls are made one at a time, only one
        input is used twice.
        """
        if not self.can_run:
            return
        workload = self.workload
        calls = workload.n_inputs + 1 if workload.one_at_a_time else 2 * workload.n_inputs
        workload.begin(self.ranks.next_round())
        self.ranks.gather("begin", None)
        self._check_run("run", lambda: workload.checked_calls(calls))

    def _check_run(self, what: str, run: Callable[[], list[Errors]]) -> None:
        """Run the checked calls, and note their errors on all ranks, or the reason if they fail."""
        found, problem = self.ranks.agree(f"{what} {self.row.algorithm}", run, self.row.peer)
        if problem is None:
            self._note_errors(found)
        else:
            self.row.check = "not run"
            self.row.note = problem

    def _note_errors(self, found: Sequence[Errors]) -> None:
        """Note, on all ranks, the first error of any rank."""
        own = next((text for count, text in found if count), None)
        for text in self.ranks.gather("check", own):
            if text is not None and self.row.check == "ok":
                self.row.check = "WRONG"
                self.row.note = text

    def _timed_launch(self, calls: int) -> TimedLaunch:
        """Return a launch of ``calls`` calls, whose results are kept in :attr:`results`."""
        call = self.workload.call
        numbers = self.workload.inputs_of(calls)
        results: list[Any] = [None] * calls
        self.results.append(results)

        def call_at(position: int) -> None:
            results[position] = call(numbers[position])

        def call_all() -> None:
            # Nothing else stands in this loop, because the time of eager calls is the host's.
            for position, number in enumerate(numbers):
                results[position] = call(number)

        if self.row.launch == "graph":
            return capture(call_at, calls)
        return TimedLaunch(call_all, calls)

    def _time_together(
        self,
        line_up: LineUp,
        turn: int,
        iterations: int,
        warmup: int,
    ) -> list[Errors]:
        """Time launches of several calls; return the errors of the last launch."""
        workload = self.workload
        launches = self.launches
        last = turn % len(launches)

        def before(calls: int) -> None:
            workload.before(workload.inputs_of(calls))

        time_launches(launches, warmup if turn == 0 else 1, line_up, before, last)
        self.times_us += time_launches(launches, iterations, line_up, before, last)
        results = self.results[last]
        numbers = workload.inputs_of(len(results))
        checked = list(zip(numbers, results, strict=True))
        if workload.one_at_a_time:  # each other result was overwritten by the next call
            checked = checked[-1:]
        return [workload.errors(number, result) for number, result in checked]

    def _time_one_by_one(self, line_up: LineUp, turn: int, iterations: int) -> list[Errors]:
        """Time calls that may wait for the GPU, one at a time; return the errors of all."""
        workload = self.workload
        found = workload.checked_calls(1)  # takes again the memory that was given back
        for iteration in range(iterations):
            number = (iteration + turn) % workload.n_inputs
            result, times_us = _time_alone(workload, number, line_up)
            found.append(workload.errors(number, result))
            del result  # before the next one needs as much
            self.times_us += times_us
        return found

    def _release_memory(self) -> None:
        """Give cached memory back to the GPU: a dense tensor needs what others would keep."""
        if self.workload.one_at_a_time:
            torch.cuda.empty_cache()


def _time_alone(workload: Workload, number: int, line_up: LineUp) -> tuple[Any, list[float]]:
    """Return the result and the time of a call that may wait for the GPU, from an idle GPU.

    The first line-up aligns the hosts. The one of the launch aligns the streams, and the first
    event comes behind it, so if a rank enters late, the others wait for it before their first
    event.
    """
    results: list[Any] = []

    def before(_: int) -> None:
        workload.before([number])
        line_up()
        torch.cuda.synchronize()

    launch = TimedLaunch(lambda: results.append(workload.call(number)), 1)
    times_us = time_launches([launch], 1, line_up, before)
    return results.pop(), times_us


def measure(
    measurements: Sequence[Measurement],
    line_up: LineUp,
    iterations: int,
    warmup: int,
    check: Callable[[], object] = do_nothing,
) -> None:
    """Measure those that can run, in turns, and put the results into their rows. Collective.

    Args:
        iterations: timed launches of each, or calls that are timed one at a time.
        warmup: untimed ones before.
        check: raises if a wait has expired.
    """
    for measurement in measurements:
        if measurement.can_run:
            measurement.prepare(warmup)
    running = [measurement for measurement in measurements if measurement.can_run]
    for turn in range(min(TURNS, iterations)):
        share = len(range(turn, iterations, TURNS))  # together, the turns have all iterations
        for measurement in running:
            measurement.take_turn(line_up, turn, share, warmup)
            check()
    for measurement in running:
        measurement.summarize()
    for measurement in measurements:
        # Graphs go first, because they use what the workloads own.
        measurement.launches = []
        measurement.results = []
    torch.cuda.synchronize()
