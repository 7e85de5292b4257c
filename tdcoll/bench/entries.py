# SPDX-License-Identifier: Apache-2.0
"""Measuring calls that have several inputs, taken in turn, and checking each: what the benchmarks of sparse rows share.

Everything is prepared first (called with every input, checked, captured), then measured in several turns each, so that
clocks and temperature are the same for all. Eager calls may wait for the GPU; they are timed one at a time, and the
result of each is checked. Of CUDA graphs the last call of the last replay is: results of earlier ones may be gone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from tdcoll.bench.arithmetic import Summary, summarize
from tdcoll.bench.job import Job
from tdcoll.bench.sparse_data import INPUTS
from tdcoll.bench.timing import Launch, LineUp, Straggler, capture, time_call, time_launches

__all__ = ["TURNS", "Entry", "Plan", "Subject", "measure_entries", "simulate_entry"]

TURNS = 2
"""Turns that each entry takes per size; even, so that both graphs are the last of as many turns."""

Found = tuple[int, str]
"""How much is wrong, and where it begins."""


@dataclass(frozen=True)
class Subject:
    """Something to measure.

    Attributes:
        call: makes the call with the input of this number, on the current stream; its result.
        errors: how much of that result is wrong, and where it begins.
        before: what the input needs before each call, untimed.
        data: what it works on, if that is not what was asked for.
        most_iterations: where a call takes long.
        notes: what has to be known of it; may grow while it runs.
    """

    call: Callable[[int], Any]
    errors: Callable[[int, Any], Found]
    before: Callable[[int], object] = lambda number: None
    data: Any = None
    most_iterations: int | None = None
    notes: list[str] = field(default_factory=list)


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
    launches: list[Launch] = field(default_factory=list)
    results: list[list[Any]] = field(default_factory=list)
    times_us: list[float] = field(default_factory=list)
    walls_us: list[float] = field(default_factory=list)
    errors: int = 0
    where: str | None = None

    def common(self, job: Job, straggler: bool) -> dict[str, Any]:
        """What every benchmark's row has of it."""
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
            "calls": tuple(launch.calls for launch in self.launches) or (1,),
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
        iterations, warmup: timed and untimed calls, or replays.
        calls: calls per graph, one graph for each number.
        straggler: delays a rank in each iteration.
    """

    iterations: int
    warmup: int
    calls: Sequence[int]
    straggler: Straggler | None = None


def _calls(subject: Subject, calls: int) -> list[Found]:
    """So many calls, the inputs in turn, and what was wrong with each."""
    found = []
    for position in range(calls):
        number = position % INPUTS
        subject.before(number)
        found.append(subject.errors(number, subject.call(number)))
    return found


# ---------------------------------------------------------------------- on GPUs


def _prepare(job: Job, entry: Entry, subject: Subject, plan: Plan) -> None:
    def run() -> list[Found]:
        found = _calls(subject, max(INPUTS, plan.warmup))
        if entry.launch == "graph":
            for calls in plan.calls:
                results: list[Any] = [None] * calls

                def call(position: int, results: list[Any] = results) -> None:
                    results[position] = subject.call(position % INPUTS)

                entry.launches.append(capture(call, calls))
                entry.results.append(results)
        return found

    found, entry.problem = job.agree(f"prepare {entry.name}", run, entry.peer)
    if entry.problem is None:
        entry.checked(job, found)
    torch.cuda.empty_cache()  # a dense tensor needs what others would keep


def _turn(job: Job, entry: Entry, subject: Subject, plan: Plan, line_up: LineUp, turn: int) -> None:
    most = min(plan.iterations, subject.most_iterations or plan.iterations)
    iterations = most // TURNS + (turn < most % TURNS)
    torch.cuda.synchronize()
    job.gather("turn", None)
    if entry.launch == "graph":
        last = turn % len(entry.launches)

        def before() -> None:
            for number in range(INPUTS):
                subject.before(number)

        time_launches(entry.launches, plan.warmup, line_up, before)
        entry.times_us += time_launches(entry.launches, iterations, line_up, before, plan.straggler, last)
        number = (entry.launches[last].calls - 1) % INPUTS
        found = [subject.errors(number, entry.results[last][-1])]
    else:
        found = _calls(subject, 1)  # takes again the memory that was given back
        for iteration in range(iterations):
            number = (iteration + turn) % INPUTS
            subject.before(number)
            result, time_us, wall_us = time_call(partial(subject.call, number), line_up, plan.straggler)
            found.append(subject.errors(number, result))
            del result  # before the next one needs as much
            entry.times_us.append(time_us)
            entry.walls_us.append(wall_us)
        line_up.check()
    entry.checked(job, found)
    torch.cuda.empty_cache()


def measure_entries(
    job: Job, entries: Sequence[Entry], plan: Plan, line_up: LineUp, look: Callable[[], object] = lambda: None
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
        if entry.times_us:
            entry.summary = summarize(job.gather("times", entry.times_us))
        if entry.walls_us:
            entry.wall_us = summarize(job.gather("walls", entry.walls_us)).median_us
        # Graphs go before what they use.
        entry.launches = [dataclasses.replace(launch, run=lambda: None) for launch in entry.launches]
        entry.results = []
    torch.cuda.synchronize()


# ---------------------------------------------------------------------- on the simulator


def simulate_entry(job: Job, entry: Entry) -> None:
    """A call with every input, and one more whose input has changed: checked, and counted."""
    subject, calls = entry.subject, INPUTS + 1
    if subject is None or entry.problem is not None:
        return
    found: list[Found] | None = None

    def run() -> None:
        nonlocal found
        found, entry.problem = job.agree(f"run {entry.name}", lambda: _calls(subject, calls), entry.peer)

    counts = job.count(run, calls)
    if found is not None:
        entry.checked(job, found)
        entry.counts = None if entry.peer else counts
