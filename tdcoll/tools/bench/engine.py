# SPDX-License-Identifier: Apache-2.0
"""How everything is measured: subjects in, times and errors out.

All subjects of a size are prepared first (called with every input, checked, captured). Then they are measured in
several turns each, so that clocks and temperature are the same for all. Inputs change on the device before every
launch, and consecutive calls take different ones, because a replay of one buffer is faster than real use. Results are
checked in the timed path, as far as the subject permits:

- Mostly each call of a launch has an input and a result of its own. Eager calls are timed in launches of as many calls
  as a graph has, and after each turn the results of every call of its last launch are checked. The last launches
  alternate between an even and an odd number of calls.
- A subject is ``alone`` if its results last only until its next call, or if the host has to know their size. Its eager
  calls may wait for the GPU, so they are timed and checked one at a time. Of a graph, the last call is checked.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from tdcoll import runtime
from tdcoll.base.errors import CollectiveTimeout, HeapExhaustedError, RankMismatchError
from tdcoll.language import INTERPRETED
from tdcoll.tools.bench.arithmetic import summarize
from tdcoll.tools.bench.rows import Row
from tdcoll.tools.bench.timing import LineUp, TimedLaunch, capture, time_launches

TURNS = 4
"""Turns that each entry takes per size; even, because both launches must be the last of as many turns."""

CALLS = (2, 3) if INTERPRETED else (20, 21)
"""Calls timed together: an odd number shows protocols that mix up their buffers. Fewer if nothing is timed."""

_RESULT_BYTES = 1 << 30
"""About as much memory as the results of one launch take, if each call has its own result."""

Found = tuple[int, str]
"""The number of wrong elements, and where they begin."""


def calls_of(nbytes: int) -> tuple[int, int]:
    """Return the calls timed together whose results have so many bytes each: fewer than usual if they are large."""
    even = min(CALLS[0], max(2, _RESULT_BYTES // nbytes // 2 * 2))
    return even, even + 1


def nothing(*_: Any) -> None:
    """For subjects that need nothing done."""


class Ranks:
    """The ranks of a benchmark, and what they agree on."""

    def __init__(self) -> None:
        self.owner = runtime.current()
        self.topology = self.owner.topology()
        self.device = self.owner.device
        self.rounds = itertools.count(10_007, 10_007)
        """Where the rounds of inputs begin: far from all before, those of other subjects included."""
        own = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "none"
        if len(gpus := set(self.gather("GPU", own))) > 1:
            raise RankMismatchError(
                f"expected GPUs of one kind, whose generators make the same numbers; got {', '.join(sorted(gpus))}"
            )

    def gather(self, what: str, value: Any) -> list[Any]:
        """``value`` of every rank; also a barrier between hosts."""
        return self.owner.control.all_gather(range(self.owner.world_size), what, value)

    def agree(self, what: str, action: Callable[[], Any], peer: bool) -> tuple[Any, str | None]:
        """Return ``(result, None)`` if the action works on every rank, otherwise ``(None, why not)``, on every rank.

        A baseline may raise any error. tdcoll raises ValueError if it doesn't support the call, and HeapExhaustedError
        if the heap is too small; any other error is raised again.
        """
        result, problem = None, None
        try:
            result = action()
        except Exception as error:
            if isinstance(error, CollectiveTimeout) or not (
                peer or isinstance(error, (ValueError, HeapExhaustedError))
            ):
                raise
            problem = " ".join(f"{error}".split())[:300] or type(error).__name__
        for rank, other in enumerate(self.gather(what, problem)):
            if other is not None:
                return None, other if rank == self.topology.rank or problem else f"rank {rank}: {other}"
        return result, None


@dataclass(frozen=True)
class Subject:
    """Something to measure.

    Attributes:
        call: makes the call with this input, on the current stream; its result.
        errors: how much of that result is wrong, and where it begins.
        inputs: how many there are; the calls of a launch take them in turn.
        begin: new inputs and no results, before each turn; takes a number that no turn before had. May be collective.
        before: prepares the inputs of the coming calls, untimed, in stream order.
        calls: calls timed together, an even and an odd number.
        parts: of a call; times are of one part.
        alone: see the module.
        takes_part: whether this rank does; times of others do not count.
        close: gives back what it owns; collective.
    """

    call: Callable[[int], Any]
    errors: Callable[[int, Any], Found]
    inputs: int = 1
    begin: Callable[[int], object] = nothing
    before: Callable[[Sequence[int]], object] = nothing
    calls: tuple[int, ...] = CALLS
    parts: int = 1
    alone: bool = False
    takes_part: bool = True
    close: Callable[[], object] = nothing

    def numbers(self, calls: int) -> list[int]:
        """Return the inputs of so many calls."""
        return [position % self.inputs for position in range(calls)]


@dataclass(frozen=True)
class Wanted:
    """Something to measure, of one size.

    Attributes:
        name, peer: of its rows.
        make: makes the subject; raises the reason if it cannot run. Collective.
        facts: of its rows, besides those of all rows of the size.
    """

    name: str
    peer: bool
    make: Callable[[], Subject]
    launches: Sequence[str]
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass
class Contender:
    """A row to measure: a subject in one way of launching it, or the reason for which there is none."""

    row: Row
    subject: Any = None
    launches: list[TimedLaunch] = field(default_factory=list)
    results: list[list[Any]] = field(default_factory=list)
    times_us: list[float] = field(default_factory=list)

    @property
    def runs(self) -> bool:
        """True if it can run here, as far as is known."""
        return self.row.check != "not run"

    def tried(self, job: Ranks, what: str, action: Callable[[], Any]) -> Any:
        """Return the result of an action; None if it isn't supported here."""
        result, problem = job.agree(f"{what} {self.row.algorithm}", action, self.row.peer)
        if problem is not None:
            self.row.check, self.row.note = "not run", problem
        return result

    def checked(self, job: Ranks, found: Sequence[Found]) -> None:
        """Take note, on all ranks, of what was wrong on any."""
        own = next((where for errors, where in found if errors), None)
        for where in job.gather("check", own):
            if where is not None and self.row.check == "ok":
                self.row.check, self.row.note = "WRONG", where


def _calls(subject: Subject, calls: int) -> list[Found]:
    """Make at least so many calls, as many as there are inputs before each check unless alone; return their errors."""
    found, step = [], 1 if subject.alone else subject.inputs
    for first in range(0, calls, step):
        numbers = [(first + place) % subject.inputs for place in range(step)]
        subject.before(numbers)
        results = [subject.call(number) for number in numbers]
        found += [subject.errors(number, result) for number, result in zip(numbers, results, strict=True)]
    return found


def _prepare(job: Ranks, entry: Contender, warmup: int) -> None:
    """Call it, and capture it if requested, because a launch needs both before it can be timed."""
    subject = entry.subject

    def launch(calls: int) -> TimedLaunch:
        results: list[Any] = [None] * calls
        numbers, call = subject.numbers(calls), subject.call

        def one(position: int) -> None:
            results[position] = call(numbers[position])

        def run() -> None:  # with nothing in the way: the time of eager calls is the host's
            for position, number in enumerate(numbers):
                results[position] = call(number)

        entry.results.append(results)
        return capture(one, calls) if entry.row.launch == "graph" else TimedLaunch(run, calls)

    def run() -> list[Found]:
        found = _calls(subject, max(subject.inputs, warmup))
        if entry.row.launch == "graph" or not subject.alone:
            entry.launches = [launch(calls) for calls in subject.calls]
            entry.row.calls = subject.calls
        return found

    subject.begin(next(job.rounds))
    found = entry.tried(job, "prepare", run)
    if entry.runs:
        entry.checked(job, found)
    if subject.alone:
        torch.cuda.empty_cache()  # a dense tensor needs what others would keep


def _time_alone(subject: Subject, number: int, line_up: LineUp) -> tuple[Any, list[float]]:
    """Return the result and the time of a call that may wait for the GPU, from an idle GPU.

    The first line-up aligns the hosts. The one of the launch aligns the streams, and the first event comes behind it,
    so if a rank enters late, the others wait for it before their first event.
    """
    results: list[Any] = []

    def before(_: int) -> None:
        subject.before([number])
        line_up()
        torch.cuda.synchronize()

    launch = TimedLaunch(lambda: results.append(subject.call(number)), 1)
    times_us = time_launches([launch], 1, line_up, before)
    return results.pop(), times_us


def _turn(job: Ranks, entry: Contender, line_up: LineUp, turn: int, iterations: int, warmup: int) -> None:
    """Run one turn of one entry: new data, launches, check."""
    subject, launches = entry.subject, entry.launches
    subject.begin(next(job.rounds))
    torch.cuda.synchronize()
    job.gather("turn", None)
    if launches:
        last = turn % len(launches)

        def before(calls: int) -> None:
            subject.before(subject.numbers(calls))

        time_launches(launches, warmup if turn == 0 else 1, line_up, before, last)
        entry.times_us += time_launches(launches, iterations, line_up, before, last)
        results = list(zip(subject.numbers(len(entry.results[last])), entry.results[last], strict=True))
        found = [subject.errors(number, result) for number, result in results[-1 if subject.alone else 0 :]]
    else:
        found = _calls(subject, 1)  # takes again the memory that was given back
        for iteration in range(iterations):
            number = (iteration + turn) % subject.inputs
            result, times_us = _time_alone(subject, number, line_up)
            found.append(subject.errors(number, result))
            del result  # before the next one needs as much
            entry.times_us += times_us
    entry.checked(job, found)
    if subject.alone:
        torch.cuda.empty_cache()


def measure(
    job: Ranks,
    entries: Sequence[Contender],
    line_up: LineUp,
    iterations: int,
    warmup: int,
    look: Callable[[], object] = nothing,
) -> None:
    """Measure the entries that can run, and put the results into each. Collective."""
    for entry in entries:
        if entry.runs:
            _prepare(job, entry, warmup)
    right = [entry for entry in entries if entry.runs]
    for turn in range(min(TURNS, iterations)):
        for entry in right:
            share = iterations // TURNS + (turn < iterations % TURNS)
            _turn(job, entry, line_up, turn, share, warmup)
            look()
    for entry in right:
        times = [us / entry.subject.parts for us in entry.times_us]
        of_ranks = job.gather("times", times if entry.subject.takes_part else None)
        vars(entry.row).update(summarize([of_rank for of_rank in of_ranks if of_rank is not None]))
        entry.row.iterations = len(times)
    for entry in entries:
        entry.launches, entry.results = [], []  # graphs go before what they use
    torch.cuda.synchronize()


def simulate(job: Ranks, entry: Contender) -> None:
    """Call and check every input twice, or one input twice if its calls are alone.

    The second call finds stale data of the first one.
    """
    if not entry.runs:
        return
    subject = entry.subject
    calls = subject.inputs + 1 if subject.alone else 2 * subject.inputs
    subject.begin(next(job.rounds))
    job.gather("begin", None)
    found = entry.tried(job, "run", partial(_calls, subject, calls))
    if entry.runs:
        entry.checked(job, found)
