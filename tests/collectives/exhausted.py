# SPDX-License-Identifier: Apache-2.0
"""All schedules of small calls of every dense kernel, without seeds.

``python tests/collectives/exhausted.py [-n PROCESSES] [NAME...]`` runs the calls of the cases whose
names contain one of these texts, or all; it writes ``docs/results/correctness/exhausted.json`` and
the table of ``docs/correctness.md``. It needs no GPU. On a busy machine of two cores all take about
seven minutes with ``-n 2``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported
os.environ.setdefault("TDCOLL_DEBUG", "0")  # exchanges between calls would keep the ranks together
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from collectives.suite.algorithm_cases import AlgorithmCase, Nodes, all_dense, cases_of, job
from collectives.suite.calls import Calls
from collectives.suite.kinds import in_turn
from tdcoll.testing import Exhaustion, exhaust

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results" / "correctness" / "exhausted.json"
PAGE = ROOT / "docs" / "correctness.md"
BEGIN, END = "<!-- exhausted -->", "<!-- end of exhausted -->"

LIMIT = 100
"""Most executions of a search."""
ELEMENTS = 10
"""Elements of a segment in the first of three calls; the second has none, the third a third."""


@dataclass(frozen=True)
class Bounds:
    """How small the calls are.

    Attributes:
        ranks: 2, or the fewest that the algorithm has; or 3.
        calls: of all kinds in turn; if there are three, their sizes differ.
        chunks: into which a segment is cut at most.
        pieces: in which the bytes of a message arrive.
        sets_epochs_aside: see :class:`~.suite.calls.Calls`.
    """

    ranks: int
    calls: int
    chunks: int
    pieces: int
    sets_epochs_aside: bool

    def nodes(self, case: AlgorithmCase) -> Nodes:
        """Ranks of each node."""
        if case.algorithm == "2d":  # nodes of one size, of several ranks
            return (2, 2) if self.ranks == 2 else (3, 3)
        if len(case.nodes) > 1:
            return (1, 1) if self.ranks == 2 else (2, 1)
        return (self.ranks,)

    def calls_of(self, case: AlgorithmCase) -> Calls:
        """The calls of an algorithm."""
        small = replace(case, nodes=self.nodes(case))
        counts = small.counts if case.looped else (ELEMENTS, 0, ELEMENTS // 3)
        kinds = in_turn(small.kinds(), self.calls)
        cut = {} if case.looped else {"pieces": self.chunks}
        aside = self.sets_epochs_aside
        return small.calls(kinds, **{"counts": counts, "sets_epochs_aside": aside, **cut})

    def are_small(self, case: AlgorithmCase) -> bool:
        """Whether the algorithm supports these bounds, and executions are few and short enough: not
        those in which six thread blocks take their epochs, nor those of six ranks."""
        if case.looped:  # on two ranks only, because three would need more than six thread blocks
            return self == THREE_CALLS
        return sum(self.nodes(case)) < 6


ONE_CALL = Bounds(2, 1, 1, 1, False)
THREE_CALLS = Bounds(2, 3, 2, 2, True)
THREE_RANKS = Bounds(3, 3, 2, 2, True)
ALL_BOUNDS = (THREE_CALLS, THREE_RANKS, ONE_CALL)
CASES = [case for dense in all_dense() for case in cases_of(dense)]


@dataclass(frozen=True)
class Result:
    """What a search has found.

    Attributes:
        case: the algorithm, without its nodes.
        exhausted, executions, redundant: see :class:`tdcoll.testing.Exhaustion`.
        failure: its report; empty if there is none.
    """

    case: str
    bounds: Bounds
    exhausted: bool
    executions: int
    redundant: int
    seconds: float
    failure: str


def name_of(case: AlgorithmCase) -> str:
    """The name of a case, without its nodes."""
    return str(case).rpartition(" ")[0]


def searched(case: AlgorithmCase, bounds: Bounds, limit: int = LIMIT) -> Exhaustion:
    """Run all schedules of an algorithm's calls."""
    where = job(bounds.nodes(case))
    return exhaust(bounds.calls_of(case), limit=limit, pieces=bounds.pieces, **where)


def result(place: int, bounds: Bounds) -> Result:
    """Search the case at a place of :data:`CASES`."""
    case = CASES[place]
    began = time.monotonic()
    found = searched(case, bounds)
    seconds = round(time.monotonic() - began, 1)
    failure = "" if found.failure is None else str(found.failure)
    return Result(
        name_of(case), bounds, found.exhausted, found.executions, found.redundant, seconds, failure
    )


def table(results: Sequence[Result]) -> str:
    """The page's table: for each case the executions that exhausted it."""
    lines = [
        "| calls of | three calls | three calls of three ranks | one call, with its epochs |",
        "|---|---|---|---|",
    ]
    for case in CASES:
        cells = [_cell(results, name_of(case), bounds) for bounds in ALL_BOUNDS]
        lines.append(f"| {' | '.join([name_of(case), *cells])} |")
    return "\n".join(lines)


def _cell(results: Sequence[Result], case: str, bounds: Bounds) -> str:
    found = [each for each in results if each.case == case and each.bounds == bounds]
    if not found:
        return "–"
    if found[0].failure:
        return "failed"
    return f"{found[0].executions:,}" if found[0].exhausted else f"more than {LIMIT:,}"


def read() -> list[Result]:
    """The results of the last run."""
    held = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else []
    return [Result(**{**each, "bounds": Bounds(**each["bounds"])}) for each in held]


def write(results: Sequence[Result]) -> None:
    """Write the results and the table."""
    kept = sorted(results, key=lambda each: (each.case, ALL_BOUNDS.index(each.bounds)))
    lines = ",\n".join(json.dumps(asdict(each)) for each in kept)
    RESULTS.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(f"{before}{BEGIN}\n{table(kept)}\n{END}{after}", encoding="utf-8")


def main(arguments: Sequence[str]) -> int:
    """Search, and write what was found; 1 if a case failed."""
    parser = argparse.ArgumentParser(description="Run all schedules of small calls.")
    parser.add_argument("-n", type=int, default=1, help="processes")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args(arguments)
    wanted = [
        place
        for place, case in enumerate(CASES)
        if not options.names or any(name in name_of(case) for name in options.names)
    ]
    jobs = [
        (place, bounds)
        for bounds in ALL_BOUNDS
        for place in wanted
        if bounds.are_small(CASES[place])
    ]
    results = {(each.case, each.bounds): each for each in read()}
    with ProcessPoolExecutor(options.n, get_context("spawn")) as pool:
        for found in pool.map(result, *zip(*jobs, strict=True)):
            results[found.case, found.bounds] = found
            said = found.failure or ("exhausted" if found.exhausted else "not exhausted")
            print(f"{found.case}, {found.bounds}: {said}, {found.executions} executions, "
                  f"{found.seconds} s", flush=True)  # fmt: skip
    write(list(results.values()))
    return any(each.failure for each in results.values())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
