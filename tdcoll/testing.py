# SPDX-License-Identifier: Apache-2.0
"""Test kernels on a machine with no GPU: all PEs in one process, with schedules that are hard to
get on GPUs.

A test is a function that takes a :class:`World`, runs a host function on each of its PEs and checks
the results. :func:`explore` runs it with many seeds; each seed is another schedule, another order
of deliveries, other stragglers. If a test fails, the error names its seed, and :func:`replay` runs
exactly that again, with a timeline if requested::

    def case(world):
        def host(pe):
            ...  # tdcoll.empty(), launches, asserts
        world.run(host)

    explore(case, n_pes=4, seeds=200)
    replay(case, 17, n_pes=4, trace="seed17.json")

A run also fails, with a :class:`DataRace`, if nothing orders two accesses to the same bytes, even
if the bytes were right, unless ``races=False``. :func:`exhaust` runs every schedule that can differ
from the others, if there are few enough::

    found = exhaust(case, n_pes=2)
    assert found.exhausted, found

Set ``TRITON_INTERPRET=1`` before triton is first imported. ``docs/simulator.md`` describes the
model.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tdcoll.base import arguments
from tdcoll.simulator.exhaustive.search import RedundantExecution, Schedule, Search
from tdcoll.simulator.exhaustive.world import RecordedWorld
from tdcoll.simulator.machine import Counts
from tdcoll.simulator.race_report import DataRace
from tdcoll.simulator.scheduler import Blocked, Deadlock
from tdcoll.simulator.trace import Trace
from tdcoll.simulator.world import World

__all__ = [
    "Blocked",
    "Counts",
    "DataRace",
    "Deadlock",
    "Exhaustion",
    "ExplorationFailed",
    "Failure",
    "Trace",
    "World",
    "exhaust",
    "explore",
    "first_failure",
    "replay",
]

Case = Callable[[World], object]
"""A test: runs something in the world it is given, and raises if the outcome is wrong."""


@dataclass(frozen=True)
class Failure:
    """A schedule with which a case failed.

    Attributes:
        seed: the seed that made the schedule; None if :func:`exhaust` chose it.
        error: of the case.
        report: the error with the tasks that raised it, and the schedule's settings.
        options: keyword arguments of :func:`replay` besides the seed.
    """

    seed: int | None
    error: Exception
    report: str
    options: dict[str, Any] = field(repr=False)

    def __str__(self) -> str:
        first = [] if self.seed is None else [str(self.seed)]
        named = [f"{name}={value!r}" for name, value in self.options.items()]
        name = "failure" if self.seed is None else f"seed{self.seed}"
        return (
            f"{self.report}\nTo see it again: tdcoll.testing.replay("
            f'{", ".join(["case", *first, *named])}), with trace="{name}.json" for a timeline.'
        )


@dataclass(frozen=True)
class Exhaustion:
    """The result of :func:`exhaust`.

    Attributes:
        exhausted: every schedule that can differ was run, and none failed.
        executions: how often the case ran to its end, or failed.
        redundant: how many more executions were ended, because they could only repeat others.
        failure: the first failure; None if there is none.
    """

    exhausted: bool
    executions: int
    redundant: int
    failure: Failure | None

    def __str__(self) -> str:
        runs = f"{self.executions} execution(s), and {self.redundant} cut short"
        if self.failure is not None:
            return f"failed after {runs}: {self.failure}"
        return f"exhausted by {runs}" if self.exhausted else f"not exhausted by {runs}"


class ExplorationFailed(AssertionError):
    """:func:`explore` found a seed for which the case fails; ``failure`` says which, and why."""

    def __init__(self, failure: Failure) -> None:
        self.failure = failure
        super().__init__(str(failure))


def first_failure(
    case: Case,
    *,
    n_pes: int,
    seeds: int | Iterable[int] = 100,
    weak: bool = True,
    races: bool = True,
    **world: Any,
) -> Failure | None:
    """Return the first of ``seeds`` for which ``case`` raises, or None. For tests that a broken
    kernel *is* caught.

    Args:
        case: runs something in the world it is given.
        n_pes: number of PEs.
        seeds: how many, from 0, or which; at least one.
        weak: messages arrive late and out of order.
        races: races are failures as well, as for :class:`World`; a run takes 1.5 to 1.9 times as
            long.
        world: further arguments of :class:`World`.

    Raises:
        ValueError: there are no seeds.
    """
    chosen = range(seeds) if isinstance(seeds, int) else tuple(seeds)
    if not chosen:  # a case would pass without being run
        raise ValueError(f"seeds must be at least 1, or name at least one seed; got {seeds!r}")
    for seed in chosen:
        made = World(n_pes, seed=seed, weak=weak, races=races, **world)
        try:
            case(made)
        except Exception as error:
            options = {"n_pes": n_pes, **_not_usual(weak=weak, races=races), **world}
            return Failure(seed, error, _report(made, error), options)
    return None


def _not_usual(**switches: bool) -> dict[str, Any]:
    """Return the switches that are off, which has to be said."""
    return {name: switch for name, switch in switches.items() if not switch}


def _report(world: World, error: Exception) -> str:
    notes = "; ".join(getattr(error, "__notes__", ()))
    report = f"{world.describe()}: {type(error).__name__}: {error}"
    return f"{report} [{notes}]" if notes else report


def explore(
    case: Case,
    *,
    n_pes: int,
    seeds: int | Iterable[int] = 100,
    weak: bool = True,
    races: bool = True,
    **world: Any,
) -> None:
    """Run ``case`` for each of ``seeds``. Arguments as for :func:`first_failure`.

    Raises:
        ValueError: there are no seeds.
        ExplorationFailed: the case failed; the message has the seed, the error, and how to replay
            it.
    """
    failure = first_failure(case, n_pes=n_pes, seeds=seeds, weak=weak, races=races, **world)
    if failure is not None:
        raise ExplorationFailed(failure) from failure.error


def exhaust(
    case: Case,
    *,
    n_pes: int,
    limit: int = 1000,
    pieces: int = 1,
    weak: bool = True,
    races: bool = True,
    **world: Any,
) -> Exhaustion:
    """Run ``case`` once for each class of schedules that can differ in their results, until it
    fails.

    Two schedules are of one class if they differ only in the order of steps and deliveries that
    touch nothing in common (:mod:`tdcoll.simulator.search`). A case must do the same whenever its
    schedule is the same.

    Waits don't expire while anything can happen. ``docs/simulator.md`` says what else is left out.

    Args:
        case: runs something small in the world it is given: few PEs, calls and messages.
        n_pes: number of PEs.
        limit: after so many executions, also those that are cut short, the search gives up.
        pieces: into how many pieces the bytes of each message are cut.
        weak: messages arrive late and out of order.
        races: races are failures as well, as for :class:`World`.
        world: further arguments of :class:`World`, without ``seed``.

    Raises:
        TypeError, ValueError: an argument is not as described.
        TdcollError: the case took another course under the same schedule.
    """
    arguments.whole("limit", limit, 1)
    arguments.whole("pieces", pieces, 1)
    if "seed" in world:
        raise ValueError(
            f"seed must be left out, because all schedules are run; got {world['seed']!r}"
        )
    search = Search()
    redundant = 0
    # A destructor that runs between steps would make another schedule of the same choices.
    collects = gc.isenabled()
    gc.disable()
    try:
        for executions in range(1, limit + 1):
            made = RecordedWorld(n_pes, search, pieces=pieces, weak=weak, races=races, **world)
            try:
                case(made)
            except RedundantExecution:
                redundant += 1
            except Exception as error:
                options = {"n_pes": n_pes, "schedule": search.choices, "pieces": pieces}
                options |= {**_not_usual(weak=weak, races=races), **world}
                failure = Failure(None, error, _report(made, error), options)
                return Exhaustion(False, executions - redundant, redundant, failure)
            if not search.advance():
                return Exhaustion(True, executions - redundant, redundant, None)
            del made  # otherwise it would outlive its generation
            gc.collect(0)
    finally:
        if collects:
            gc.enable()
    return Exhaustion(False, limit - redundant, redundant, None)


def replay(
    case: Case,
    seed: int | None = None,
    *,
    n_pes: int,
    schedule: Mapping[int, int] | None = None,
    pieces: int = 1,
    weak: bool = True,
    races: bool = True,
    trace: str | Path | None = None,
    **world: Any,
) -> World:
    """Run ``case`` once more with the schedule of ``seed``, or with ``schedule``; its errors are
    raised.

    Args:
        case: as given to :func:`explore`; so are ``n_pes``, ``weak``, ``races`` and ``world``.
        seed: from the failure's report.
        schedule: from the report of a failure of :func:`exhaust`, as are ``pieces``.
        trace: write a timeline there (Chrome trace JSON, for Perfetto), even if the case fails.

    Returns:
        The world in which it ran, with its counts and memory.

    Raises:
        ValueError: both seed and schedule are given, or neither.
    """
    if (seed is None) == (schedule is None):
        raise ValueError(
            f"give either seed or schedule; got seed={seed!r} and schedule={schedule!r}"
        )
    options = {"weak": weak, "races": races, "trace": trace is not None, **world}
    if schedule is None:
        made = World(n_pes, seed=seed, **options)
    else:
        made = RecordedWorld(n_pes, Schedule(schedule), pieces=pieces, **options)
    try:
        case(made)
    finally:
        if trace is not None and made.trace is not None:
            made.trace.save(trace)
    return made
