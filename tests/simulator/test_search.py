# SPDX-License-Identifier: Apache-2.0
"""The search for schedules finds every outcome that trying all schedules finds, on small programs
without a machine."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest

from tdcoll.base.errors import TdcollError
from tdcoll.simulator.exhaustive import search as searching
from tdcoll.simulator.exhaustive.search import (
    Footprint,
    RedundantExecution,
    Schedule,
    Search,
)

Outcome = Hashable


@dataclass(frozen=True)
class Step:
    """One step of a process: ``read``, ``write`` (of what it read last, plus its own number),
    ``add`` or ``wait`` (until the variable isn't 0)."""

    what: str
    variable: str


Program = Sequence[Sequence[Step]]


class Run:
    """One execution of a program: variables, and what each process has seen."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.values = dict.fromkeys("xyz", 0)
        self.seen: list[list[int]] = [[0] for _ in program]
        self.at = [0] * len(program)

    def enabled(self) -> list[int]:
        """The processes that can take a step."""
        found = []
        for process, steps in enumerate(self.program):
            if self.at[process] < len(steps):
                step = steps[self.at[process]]
                if step.what != "wait" or self.values[step.variable]:
                    found.append(process)
        return found

    def step(self, process: int) -> Step:
        """Take a step of a process."""
        step = self.program[process][self.at[process]]
        number = 10 * process + self.at[process] + 1
        self.at[process] += 1
        if step.what == "read":
            self.seen[process].append(self.values[step.variable])
        elif step.what == "write":
            self.values[step.variable] = 100 * self.seen[process][-1] + number
        elif step.what == "add":
            self.values[step.variable] += number
        return step

    def outcome(self) -> Outcome:
        """What is left at the end, and whether all processes have ended."""
        ended = not any(at < len(steps) for at, steps in zip(self.at, self.program, strict=True))
        return ended, tuple(self.values.values()), tuple(map(tuple, self.seen))


def all_outcomes(program: Program) -> tuple[set[Outcome], int]:
    """The outcomes of all schedules, by trying each, and how many there are."""
    outcomes = set()
    schedules = 0
    pending: list[list[int]] = [[]]
    while pending:
        prefix = pending.pop()
        run = Run(program)
        for process in prefix:
            run.step(process)
        enabled = run.enabled()
        pending += [[*prefix, process] for process in enabled]
        if not enabled:
            outcomes.add(run.outcome())
            schedules += 1
    return outcomes, schedules


def footprint(step: Step) -> Footprint:
    cells: set[Any] = {step.variable}
    if step.what == "add":
        return Footprint(adds=cells)
    if step.what == "write":
        return Footprint(writes=cells)
    return Footprint(reads=cells)


def outcome_of(program: Program, schedule: Schedule) -> Outcome:
    """Run a program by a schedule."""
    run = Run(program)
    writers: dict[str, list[Any]] = {}
    while True:
        enabled = run.enabled()
        if not enabled:
            return run.outcome()
        process = enabled[schedule.choose(enabled)]
        event = schedule.log.begin(process)
        step = run.step(process)
        event.footprint = footprint(step)
        writes = writers.setdefault(step.variable, [])
        if step.what == "wait" and len(writes) == 1:
            event.needs.add(writes[0])
        if step.what in ("write", "add"):
            writes.append(event)
        schedule.log.end()
        schedule.stepped()


def searched(program: Program) -> tuple[set[Outcome], int]:
    """The outcomes that the search finds, and how many executions it takes."""
    search = Search()
    outcomes = set()
    executions = 0
    while True:
        executions += 1
        with suppress(RedundantExecution):
            outcomes.add(outcome_of(program, search))
        if not search.advance():
            return outcomes, executions


def random_program(seed: int) -> Program:
    """A program of two to four processes and at most seven steps."""
    draw = random.Random(seed)
    lengths = draw.choice([(2, 2), (3, 3), (4, 3), (2, 2, 2), (3, 2, 2), (2, 2, 1, 1)])
    kinds = ("read", "write", "add", "wait")
    return [
        [Step(draw.choice(kinds), draw.choice("xyz")) for _ in range(length)] for length in lengths
    ]


def test_the_search_finds_all_outcomes() -> None:
    fewer = 0
    for seed in range(150):
        program = random_program(seed)
        outcomes, schedules = all_outcomes(program)
        found, executions = searched(program)
        assert found == outcomes, (seed, program)
        fewer += executions < schedules
    assert fewer > 100


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("_plan", lambda search, first, second: None),
        ("_asleep", lambda search: {} if not search._nodes else dict(search._nodes[-1].asleep)),
    ],
)
def test_a_search_that_plans_or_wakes_nothing_misses_outcomes(
    name: str, broken: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(searching.Search, name, broken)
    programs = [random_program(seed) for seed in range(60)]
    assert any(searched(program)[0] != all_outcomes(program)[0] for program in programs)


def test_a_program_without_dependence_has_one_execution() -> None:
    apart = [[Step("write", "x"), Step("read", "x")], [Step("add", "y")], [Step("add", "y")]]
    assert searched(apart)[1] == 1
    assert all_outcomes(apart)[1] == 12


def test_choices_repeat_an_execution() -> None:
    program = [[Step("read", "x"), Step("write", "y")], [Step("read", "y"), Step("write", "x")]]
    search = Search()
    repeated = 0
    while True:
        with suppress(RedundantExecution):
            outcome = outcome_of(program, search)
            assert outcome_of(program, Schedule(search.choices)) == outcome
            repeated += bool(search.choices)
        if not search.advance():
            break
    assert repeated > 1


def test_a_case_that_takes_another_course_is_refused() -> None:
    search = Search()
    racing = [[Step("write", "x")], [Step("write", "x")]]
    outcome_of(racing, search)
    assert search.advance()
    with pytest.raises(TdcollError, match="took another course before step 0"):
        outcome_of(racing[:1], search)
