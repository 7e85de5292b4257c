# SPDX-License-Identifier: Apache-2.0
"""Which layers catch each mutant of the kernels without a seed.

``python tests/collectives/mutant_layers.py [-n PROCESSES] [NAME...]`` tries the mutants whose names
contain one of these texts, or all; it writes ``docs/results/correctness/mutants.json`` and the
tables of ``docs/correctness.md``. It needs no GPU. A mutant takes about ten seconds of one core.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported
os.environ.setdefault("TDCOLL_DEBUG", "0")  # exchanges between calls would keep the ranks together
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kernel_mutants import Mutant, installed

from collectives.suite.calls import Calls
from collectives.test_mutants import ALL
from tdcoll.testing import DataRace, World, exhaust

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results" / "correctness" / "mutants.json"
PAGE = ROOT / "docs" / "correctness.md"
BEGIN, END = "<!-- mutants -->", "<!-- end of mutants -->"

DEADLINE_S = 45
"""Most time of one layer with one mutant."""
MAX_STEPS = 300_000
"""Most steps of one execution: some mutants don't end."""
SMALL_LIMIT = 30
FULL_LIMIT = 6
"""Most executions of a search with two ranks, and with the ranks of the mutant's own test."""

LAYERS = ("fair schedule", "races", "all schedules")
"""The test in the fair schedule, without and with the detector of races; and the search of all
schedules, without the detector."""

MISSED = ""
RACE = "race"
EXPECTED = "as expected"
OTHERWISE = "otherwise"


@dataclass(frozen=True)
class Result:
    """What the layers say of a mutant.

    Attributes:
        layers: for each of :data:`LAYERS` ``"race"``, ``"as expected"`` (the error that the
            mutant's test wants), ``"otherwise"`` (another error), or nothing.
        bounds: of the search that failed: ranks, executions.
    """

    mutant: str
    layers: Mapping[str, str]
    bounds: str
    seconds: float

    @property
    def is_caught(self) -> bool:
        """Whether a layer catches it."""
        return any(self.layers.values())


class _Late(Exception):
    """A layer has taken too long."""


@contextmanager
def deadline(seconds: int) -> Iterator[None]:
    """Raise in a block that takes longer."""

    def expire(number: int, frame: Any) -> None:
        raise _Late

    before = signal.signal(signal.SIGALRM, expire)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def seedless(mutant: Mutant) -> dict[str, Any]:
    """A mutant's World without what needs a seed."""
    world = {name: value for name, value in mutant.world.items() if name != "stragglers"}
    if world.get("on_timeout") == "early":
        world["on_timeout"] = "raise"
    return {**world, "max_steps": MAX_STEPS}


def of_two_ranks(world: Mapping[str, Any]) -> dict[str, Any] | None:
    """The World with two ranks in its node; None if it has several nodes, or no more ranks."""
    nodes = world.get("ranks_per_node")
    if world["n_pes"] <= 2 or (nodes is not None and len(nodes) > 1):
        return None
    smaller = {**world, "n_pes": 2}
    if nodes is not None:
        smaller["ranks_per_node"] = (2,)
    return smaller


def _verdict(mutant: Mutant, report: str, error: Exception) -> str:
    if isinstance(error, DataRace):
        return RACE
    return EXPECTED if re.search(mutant.expect, report) else OTHERWISE


def in_the_fair_schedule(mutant: Mutant, *, races: bool) -> str:
    """What the mutant's test says in the fair schedule."""
    world = seedless(mutant)
    try:
        with deadline(DEADLINE_S):
            mutant.case(World(weak=True, races=races, **world))
    except _Late:
        return MISSED
    except Exception as error:
        return _verdict(mutant, f"{type(error).__name__}: {error}", error)
    return MISSED


def searches(mutant: Mutant) -> Iterator[tuple[Callable[[Any], object], dict[str, Any], int]]:
    """Case, World and limit of the searches, the cheapest first."""
    world = seedless(mutant)
    small = of_two_ranks(world)
    aside = None
    if isinstance(mutant.case, Calls):
        aside = replace(mutant.case, sets_epochs_aside=True)
    for where, limit in ((small, SMALL_LIMIT), (world, FULL_LIMIT)):
        if where is not None:
            if aside is not None:
                yield aside, where, limit
            yield mutant.case, where, limit


def in_all_schedules(mutant: Mutant) -> tuple[str, str]:
    """What a search without the detector of races says, and its bounds."""
    try:
        with deadline(DEADLINE_S):
            for case, world, limit in searches(mutant):
                found = exhaust(case, limit=limit, races=False, **world)
                if found.failure is not None:
                    said = _verdict(mutant, found.failure.report, found.failure.error)
                    return said, f"{world['n_pes']} ranks, {found.executions} executions"
    except _Late:
        pass
    except Exception as error:
        return MISSED, f"no search: {type(error).__name__}: {error}"[:200]
    return MISSED, ""


def result(place: int) -> Result:
    """Try the mutant at a place of the list of all."""
    mutant = ALL[place]
    began = time.monotonic()
    with TemporaryDirectory() as folder, installed(mutant.changes, Path(folder)):
        fair = in_the_fair_schedule(mutant, races=False)
        races = in_the_fair_schedule(mutant, races=True)
        every, bounds = in_all_schedules(mutant)
    layers = dict(zip(LAYERS, (fair, races, every), strict=True))
    return Result(str(mutant), layers, bounds, round(time.monotonic() - began, 1))


def kernel_of(mutant: str) -> str:
    """What a mutant's name begins with: collective and algorithm."""
    words = mutant.partition(":")[0].split()
    return " ".join(words[:2])


def tables(results: Sequence[Result]) -> str:
    """The page's tables: how many mutants of each kernel a layer catches, and what none catches."""
    lines = [
        f"| mutants of | number | {' | '.join(LAYERS)} | any |",
        f"|{'---|' * (len(LAYERS) + 3)}",
    ]
    kernels = dict.fromkeys(kernel_of(str(mutant)) for mutant in ALL)
    for kernel in kernels:
        found = [each for each in results if kernel_of(each.mutant) == kernel]
        if found:
            lines.append(_row(kernel, found))
    lines.append(_row("all", results))
    unseen = [f"- {each.mutant}" for each in results if not each.is_caught]
    if unseen:
        lines += ["", "No layer of these catches, without a seed:", "", *unseen]
    return "\n".join(lines)


def _row(name: str, results: Sequence[Result]) -> str:
    counts = [sum(bool(each.layers[layer]) for each in results) for layer in LAYERS]
    caught = sum(each.is_caught for each in results)
    return f"| {' | '.join([name, *map(str, (len(results), *counts, caught))])} |"


def read() -> list[Result]:
    """The results of the last run."""
    held = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else []
    return [Result(**each) for each in held]


def write(results: Sequence[Result]) -> None:
    """Write the results and the tables, in the order of the mutants."""
    places = {str(mutant): place for place, mutant in enumerate(ALL)}
    kept = sorted(
        (each for each in results if each.mutant in places), key=lambda r: places[r.mutant]
    )
    lines = ",\n".join(json.dumps(asdict(each)) for each in kept)
    RESULTS.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(f"{before}{BEGIN}\n{tables(kept)}\n{END}{after}", encoding="utf-8")


def main(arguments: Sequence[str]) -> int:
    """Try mutants, and write what was found."""
    parser = argparse.ArgumentParser(description="Which layers catch each mutant without a seed.")
    parser.add_argument("-n", type=int, default=1, help="processes")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args(arguments)
    places = [
        place
        for place, mutant in enumerate(ALL)
        if not options.names or any(name in str(mutant) for name in options.names)
    ]
    results = {each.mutant: each for each in read()}
    with ProcessPoolExecutor(options.n, get_context("spawn")) as pool:
        for found in pool.map(result, places):
            results[found.mutant] = found
            said = ", ".join(
                f"{layer}: {what or 'nothing'}" for layer, what in found.layers.items()
            )
            print(f"{found.mutant} | {said} | {found.bounds} | {found.seconds} s", flush=True)
    write(list(results.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
