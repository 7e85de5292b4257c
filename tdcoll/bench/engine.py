# SPDX-License-Identifier: Apache-2.0
"""How everything is measured: subjects in, times and errors out.

Everything of a size is prepared first (called with every input, checked, captured). Then it is measured in several
turns each, so that clocks and temperature are the same for all. Inputs change on the device before every launch, and
consecutive calls take different ones: a replay of one buffer reads lower than real use. Results are checked in the
timed path. What can be checked depends on the subject:

- Mostly each call of a launch has an input and a result of its own. Eager calls are timed in launches of as many calls
  as a graph has, and after each turn the results of every call of its last launch are checked. The last launches
  alternate between an even and an odd number of calls.
- A subject that is ``alone`` makes results that last until its next call, or that have to know their size on the host.
  Its eager calls may wait for the GPU: they are timed one at a time, and the result of each is checked. Of a graph the
  last call of the last replay is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from tdcoll.bench.arithmetic import Summary, summarize
from tdcoll.bench.job import Job
from tdcoll.bench.timing import Launch, LineUp, Straggler, capture, time_call, time_launches
from tdcoll.language import INTERPRETED

__all__ = ["CALLS", "TURNS", "Entry", "Found", "Plan", "Subject", "measure_entries", "nothing", "simulate_entry"]

TURNS = 4
"""Turns that each entry takes per size; even, so that both launches are the last of as many turns."""

CALLS = (2, 3) if INTERPRETED else (20, 21)
"""Calls timed together: an odd number shows protocols that mix up their buffers. Fewer where nothing is timed."""

Found = tuple[int, str]
"""How much is wrong, and where it begins."""


def nothing(*_: Any) -> None:
    """For subjects that need nothing done."""


@dataclass(frozen=True)
class Subject:
    """Something to measure.

    Attributes:
        call: makes the call with this input, on the current stream; its result.
        errors: how much of that result is wrong, and where it begins.
        inputs: how many there are; the calls of a launch take them in turn.
        begin: new inputs and no results, before each turn; takes a number that no turn before had. May be collective.
        before: what the inputs of the coming calls need, untimed, in stream order.
        calls: calls timed together, an even and an odd number.
        parts: what a call counts as; times are of a part.
        alone: see the module.
        takes_part: whether this rank does; times of others do not count.
        most_iterations: where a call takes long.
        data: what it works on, if that is not what was asked for.
        notes: what has to be known of it; may grow while it runs.
        captured: after its graphs were captured and before the first replay; collective.
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
    most_iterations: int | None = None
    data: Any = None
    notes: list[str] = field(default_factory=list)
    captured: Callable[[], object] = nothing
    close: Callable[[], object] = nothing

    def numbers(self, calls: int) -> list[int]:
        """The inputs of so many calls."""
        return [position % self.inputs for position in range(calls)]


@dataclass
class Entry:
    """A subject in one way of launching it, or why there is none.

    Attributes:
        fields: what its row has besides.
        summary, wall_us: once it is measured.
    """

    name: str
    peer: bool
    launch: str
    subject: Subject | None = None
    problem: str | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    summary: Summary | None = None
    wall_us: float | None = None
    counts: dict[str, list[float]] | None = None
    calls: tuple[int, ...] = (1,)
    launches: list[Launch] = field(default_factory=list)
    results: list[list[Any]] = field(default_factory=list)
    times_us: list[float] = field(default_factory=list)
    walls_us: list[float] = field(default_factory=list)
    errors: int = 0
    where: str | None = None

    def common(self, job: Job, straggler: bool) -> dict[str, Any]:
        """Return what every benchmark's row has of it."""
        return {
            "ranks": job.topology.world_size,
            "nodes": job.topology.n_nodes,
            "algorithm": self.name,
            "peer": self.peer,
            "launch": self.launch,
            "check": "not run" if self.problem else "WRONG" if self.errors else "ok",
            "note": self.problem or self.where or "; ".join(self.subject.notes if self.subject else ()) or None,
            "straggler": straggler and not job.owner.simulated,
            "counts": self.counts,
            "calls": self.calls,
            "iterations": len(self.times_us),
            **self.fields,
        }

    def checked(self, job: Job, found: Sequence[Found]) -> None:
        """Take note, on all ranks, of what was wrong on any."""
        own = sum(errors for errors, _ in found), next((where for errors, where in found if errors), None)
        for errors, where in job.gather("check", own):
            self.errors += errors
            self.where = self.where or where


@dataclass(frozen=True)
class Plan:
    """How to measure.

    Attributes:
        iterations, warmup: timed and untimed launches.
        straggler: delays a rank in each iteration.
    """

    iterations: int
    warmup: int
    straggler: Straggler | None = None


def _calls(subject: Subject, calls: int) -> list[Found]:
    """So many calls, and what was wrong with each."""
    found = []
    for number in subject.numbers(calls):
        subject.before([number])
        found.append(subject.errors(number, subject.call(number)))
    return found


# ---------------------------------------------------------------------- on GPUs


def _prepare(job: Job, entry: Entry, subject: Subject, plan: Plan) -> None:
    """Call it, and capture it if that is asked: what a launch needs before it can be timed."""

    def launch(calls: int) -> Launch:
        results: list[Any] = [None] * calls
        numbers, call = subject.numbers(calls), subject.call

        def one(position: int) -> None:
            results[position] = call(numbers[position])

        def run() -> None:  # with nothing in the way: the time of eager calls is the host's
            for position, number in enumerate(numbers):
                results[position] = call(number)

        entry.results.append(results)
        return capture(one, calls) if entry.launch == "graph" else Launch(run, calls)

    def run() -> list[Found]:
        found = _calls(subject, max(subject.inputs, plan.warmup))
        if entry.launch == "graph" or not subject.alone:
            entry.launches = [launch(calls) for calls in subject.calls]
            entry.calls = subject.calls
        return found

    subject.begin(next(job.rounds))
    found, entry.problem = job.agree(f"prepare {entry.name}", run, entry.peer)
    if entry.problem is None:
        entry.checked(job, found)
        if entry.launch == "graph" and subject.captured is not nothing:
            _, entry.problem = job.agree(f"captured {entry.name}", subject.captured, entry.peer)
    if subject.alone:
        torch.cuda.empty_cache()  # a dense tensor needs what others would keep


def _turn(job: Job, entry: Entry, subject: Subject, plan: Plan, line_up: LineUp, turn: int) -> None:
    """One turn of one entry: new data, launches, check."""
    most = min(plan.iterations, subject.most_iterations or plan.iterations)
    iterations = most // TURNS + (turn < most % TURNS)
    if not iterations:
        return
    subject.begin(next(job.rounds))
    torch.cuda.synchronize()
    job.gather("turn", None)
    if entry.launches:
        last = turn % len(entry.launches)

        def before(calls: int) -> None:
            subject.before(subject.numbers(calls))

        time_launches(entry.launches, plan.warmup if turn == 0 else 1, line_up, before, last=last)
        entry.times_us += time_launches(entry.launches, iterations, line_up, before, plan.straggler, last)
        results = list(zip(subject.numbers(len(entry.results[last])), entry.results[last], strict=True))
        found = [subject.errors(number, result) for number, result in results[-1 if subject.alone else 0 :]]
    else:
        found = _calls(subject, 1)  # takes again the memory that was given back
        for iteration in range(iterations):
            number = (iteration + turn) % subject.inputs
            subject.before([number])
            result, time_us, wall_us = time_call(partial(subject.call, number), line_up, plan.straggler)
            found.append(subject.errors(number, result))
            del result  # before the next one needs as much
            entry.times_us.append(time_us)
            entry.walls_us.append(wall_us)
        line_up.check()
    entry.checked(job, found)
    if subject.alone:
        torch.cuda.empty_cache()


def measure_entries(
    job: Job, entries: Sequence[Entry], plan: Plan, line_up: LineUp, look: Callable[[], object] = nothing
) -> None:
    """Measure those that can be, and put into each what came out. Collective; ``look`` comes after every turn."""
    for entry in entries:
        if entry.subject is not None and entry.problem is None:
            _prepare(job, entry, entry.subject, plan)
    for turn in range(TURNS):
        for entry in entries:
            if entry.subject is not None and entry.problem is None:
                _turn(job, entry, entry.subject, plan, line_up, turn)
                look()
    for entry in entries:
        if entry.subject is not None and entry.times_us:
            times = [us / entry.subject.parts for us in entry.times_us]
            of_ranks = job.gather("times", times if entry.subject.takes_part else None)
            entry.summary = summarize([of_rank for of_rank in of_ranks if of_rank is not None])
        if entry.walls_us:
            entry.wall_us = summarize(job.gather("walls", entry.walls_us)).median_us
        entry.launches, entry.results = [], []  # graphs go before what they use
    torch.cuda.synchronize()


# ---------------------------------------------------------------------- on the simulator


def simulate_entry(job: Job, entry: Entry) -> None:
    """Every input twice, or one of them twice if its calls are alone: checked, and counted.

    The second time data of the first that was left behind is found.
    """
    subject = entry.subject
    if subject is None or entry.problem is not None:
        return
    batches = [subject.numbers(subject.inputs)] * 2
    if subject.alone:
        batches = [[number] for number in subject.numbers(subject.inputs + 1)]
    found: list[Found] = []

    def run(numbers: Sequence[int]) -> list[Any]:
        return [subject.call(number) for number in numbers]

    def agreed() -> None:
        subject.begin(next(job.rounds))
        for numbers in batches:
            subject.before(numbers)
            job.gather("turn", None)
            results, entry.problem = job.agree(f"run {entry.name}", partial(run, numbers), entry.peer)
            if entry.problem is not None:
                return
            found.extend(subject.errors(number, result) for number, result in zip(numbers, results, strict=True))

    counts = job.count(agreed, sum(map(len, batches)))
    if entry.problem is None:
        entry.checked(job, found)
        entry.counts = None if entry.peer else counts
        entry.calls = (len(batches[0]),)
