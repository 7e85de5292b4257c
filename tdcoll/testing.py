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

With ``races=True`` a run also fails, with a :class:`DataRace`, if nothing orders two accesses to the
same bytes, even if the bytes were right.

Set ``TRITON_INTERPRET=1`` before triton is first imported. ``docs/simulator.md`` describes the
model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
    "ExplorationFailed",
    "Failure",
    "Trace",
    "World",
    "explore",
    "first_failure",
    "replay",
]

Case = Callable[[World], object]
"""A test: runs something in the world it is given, and raises if the outcome is wrong."""


@dataclass(frozen=True)
class Failure:
    """A seed for which a case failed.

    Attributes:
        seed: the seed.
        error: of the case.
        report: the error with the tasks that raised it, and the schedule's settings.
        options: keyword arguments of :func:`replay` besides the seed.
    """

    seed: int
    error: Exception
    report: str
    options: dict[str, Any] = field(repr=False)

    def __str__(self) -> str:
        options = "".join(f", {name}={value!r}" for name, value in self.options.items())
        return (
            f"{self.report}\nTo see it again: tdcoll.testing.replay(case, {self.seed}{options}), "
            f'with trace="seed{self.seed}.json" for a timeline.'
        )


class ExplorationFailed(AssertionError):
    """:func:`explore` found a seed for which the case fails; ``failure`` says which, and why."""

    def __init__(self, failure: Failure) -> None:
        self.failure = failure
        super().__init__(str(failure))


def first_failure(
    case: Case, *, n_pes: int, seeds: int | Iterable[int] = 100, weak: bool = True, **world: Any
) -> Failure | None:
    """Return the first of ``seeds`` for which ``case`` raises, or None. For tests that a broken
    kernel *is* caught.

    Args:
        case: runs something in the world it is given.
        n_pes: number of PEs.
        seeds: how many, from 0, or which; at least one.
        weak: messages arrive late and out of order.
        world: further arguments of :class:`World`.

    Raises:
        ValueError: there are no seeds.
    """
    chosen = range(seeds) if isinstance(seeds, int) else tuple(seeds)
    if not chosen:  # a case would pass without being run
        raise ValueError(f"seeds must be at least 1, or name at least one seed; got {seeds!r}")
    for seed in chosen:
        made = World(n_pes, seed=seed, weak=weak, **world)
        try:
            case(made)
        except Exception as error:
            notes = "; ".join(getattr(error, "__notes__", ()))
            report = f"{made.describe()}: {type(error).__name__}: {error}" + (
                f" [{notes}]" if notes else ""
            )
            options = {"n_pes": n_pes, **({} if weak else {"weak": weak}), **world}
            return Failure(seed, error, report, options)
    return None


def explore(
    case: Case, *, n_pes: int, seeds: int | Iterable[int] = 100, weak: bool = True, **world: Any
) -> None:
    """Run ``case`` for each of ``seeds``. Arguments as for :func:`first_failure`.

    Raises:
        ValueError: there are no seeds.
        ExplorationFailed: the case failed; the message has the seed, the error, and how to replay
            it.
    """
    failure = first_failure(case, n_pes=n_pes, seeds=seeds, weak=weak, **world)
    if failure is not None:
        raise ExplorationFailed(failure) from failure.error


def replay(
    case: Case,
    seed: int,
    *,
    n_pes: int,
    weak: bool = True,
    trace: str | Path | None = None,
    **world: Any,
) -> World:
    """Run ``case`` once more with the schedule of ``seed``; its errors are raised.

    Args:
        case: as given to :func:`explore`; so are ``n_pes``, ``weak`` and ``world``.
        seed: from the failure's report.
        trace: write a timeline there (Chrome trace JSON, for Perfetto), even if the case fails.

    Returns:
        The world in which it ran, with its counts and memory.
    """
    made = World(n_pes, seed=seed, weak=weak, trace=trace is not None, **world)
    try:
        case(made)
    finally:
        if trace is not None and made.trace is not None:
            made.trace.save(trace)
    return made
