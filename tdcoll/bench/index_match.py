# SPDX-License-Identifier: Apache-2.0
"""The index-matching benchmark: ``bash launch.sh --nproc 1 -m tdcoll.bench index_match --help``.

Three tasks, each on one GPU and without communication (several ranks all do the same):

- ``union``: of sorted lists, their union, and where each id of each list is in it. tdcoll's ``match_lists`` against
  ``torch.unique`` with inverse.
- ``build``: of lists that are packed already, their union, and a directory that says where ids are. This is what the
  sparse all-reduce launches; its other kernels ask the directory.
- ``match``: where one list's ids are in the union, which is there. tdcoll's ``match_indices`` against
  ``torch.searchsorted`` and against a kernel that compares every id with every other.

CUDA graph replays where that is possible, and calls one at a time from an idle GPU; see :mod:`tdcoll.bench.entries`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tdcoll.bench import job as jobs
from tdcoll.bench.entries import TURNS, Entry, Plan, Subject, measure_entries, simulate_entry
from tdcoll.bench.job import at_least, names
from tdcoll.bench.kernels import match_by_equality
from tdcoll.bench.rows import MatchRow, with_ratios
from tdcoll.bench.sparse_data import Rows, Vocabulary
from tdcoll.bench.table import match_columns
from tdcoll.bench.timing import LineUp
from tdcoll.collectives.index_match import Directory, IndexMatch, match_indices, match_lists
from tdcoll.collectives.index_match.kernels import HEADER, UNION
from tdcoll.language import INTERPRETED

__all__ = ["Options", "main", "measure", "parse", "simulate"]

_METHODS = ("bitmap", "search", "auto")
_PEERS = ("unique", "searchsorted", "equality")

_MOST_COMPARISONS = 1 << (22 if INTERPRETED else 35)
"""In one call of the kernel that compares every id with every other: of a larger list, only some ids are looked up."""

_OWN, _OTHERS = 32, 64

_CALLS = (20, 21)


@dataclass(frozen=True)
class Options:
    """The command line."""

    lists: int
    rows: list[int]
    num_rows: int
    distributions: list[str]
    methods: list[str]
    peers: list[str]
    launches: list[str]
    iterations: int
    warmup: int
    json: Path | None


def parse(arguments: Sequence[str]) -> Options:
    """Options from the command line; a wrong one ends the process with status 2."""
    small = INTERPRETED
    parser = jobs.Parser(
        prog="bash launch.sh --nproc 1 -m tdcoll.bench index_match",
        description="Time of matching sorted lists of row numbers on one GPU, checked. On the simulator: the check.",
    )
    parser.add_argument("--lists", type=at_least(1), default=8, metavar="N", help="how many (default %(default)s)")
    jobs.add_rows(parser, "40" if small else "1000,10000,50000", 500 if small else 5_000_000, "uniform,zipf1.2")
    parser.add_argument(
        "--methods", type=names(_METHODS), default=",".join(_METHODS), metavar="A,B", help="default %(default)s"
    )
    parser.add_argument(
        "--peers",
        type=names(_PEERS),
        default=",".join(_PEERS),
        metavar="A,B",
        help=f"some of {', '.join(_PEERS)}, or '' (default %(default)s)",
    )
    jobs.add_launches(parser, "both")
    jobs.add_iterations(parser, "--iterations", TURNS, 50)
    jobs.add_json(parser)
    given = parser.parse_args(arguments)
    jobs.check_rows(parser, given)
    jobs.require_directory(parser, given.json)
    return Options(**vars(given))


# ---------------------------------------------------------------------- what is measured


class _Answers:
    """The lists of every input, and what matching them must give, by torch on the same device."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        device = rows.vocabulary.device
        self.lists = [torch.stack(lists) for lists in rows.indices]
        self.unions = [union.rows for union in rows.unions]
        pairs = [(lists.cpu(), union.cpu()) for lists, union in zip(self.lists, self.unions, strict=True)]
        self.places = [torch.searchsorted(union, lists).to(device) for lists, union in pairs]
        self.contributors = []
        for union, places in zip(self.unions, self.places, strict=True):
            held = torch.full((union.numel(), rows.world), -1, dtype=torch.int32, device=device)
            own = torch.arange(rows.rows, dtype=torch.int32, device=device)
            for q in range(rows.world):
                held[places[q], q] = own
            self.contributors.append(held)

    def wrong(self, what: str, number: int, found: torch.Tensor, expected: torch.Tensor) -> tuple[int, str]:
        """How many numbers differ."""
        if found.shape != expected.shape:
            return 1, f"{what} of input {number}: expected {list(expected.shape)}, got {list(found.shape)}"
        count = int((found != expected).sum())
        return count, f"{what} of input {number}: {count} wrong number(s)" if count else ""

    def union_errors(self, number: int, union: torch.Tensor, size: int) -> tuple[int, str]:
        """Errors in the union."""
        return self.wrong("union", number, union[:size], self.unions[number])

    def all_errors(self, number: int, result: IndexMatch) -> tuple[int, str]:
        """Errors in everything that ``match_lists`` says."""
        size = int(result.size)
        found = [
            self.union_errors(number, result.union, size),
            self.wrong("places", number, result.positions, self.places[number]),
            self.wrong("contributors", number, result.contributors[:size], self.contributors[number]),
        ]
        return sum(errors for errors, _ in found), next((where for errors, where in found if errors), "")


@dataclass(frozen=True)
class _Candidate:
    """What may be measured: how it is made, and whether it can be captured, that is, never waits for the GPU."""

    task: str
    name: str
    peer: bool
    captured: bool
    make: Callable[[], Subject]


def _candidates(options: Options, answers: _Answers) -> Iterator[_Candidate]:
    num_rows, lists, unions = options.num_rows, answers.lists, answers.unions
    world, count = lists[0].shape
    device = lists[0].device
    local = [ids[-1] for ids in lists]

    def whole(method: str) -> Subject:
        return Subject(lambda number: match_lists(lists[number], num_rows, method), answers.all_errors)

    def build(method: str) -> Subject:
        directory = Directory(world, count, num_rows, min(world * count, num_rows), device, method)
        header = torch.tensor([8 * (HEADER.value + count), count, 0, 0], dtype=torch.int64, device=device)
        packed = [torch.cat([header.expand(world, -1), ids], dim=1) for ids in lists]

        def call(number: int) -> Directory:
            directory.build(packed[number], 0)
            return directory

        def errors(number: int, result: Directory) -> tuple[int, str]:
            return answers.union_errors(number, result.union, int(result.status[UNION.value]))

        return Subject(call, errors)

    def unique() -> Subject:
        def errors(number: int, result: Any) -> tuple[int, str]:
            union, places = result
            wrong = answers.union_errors(number, union, union.numel())
            return wrong if wrong[0] else answers.wrong("places", number, places, answers.places[number].flatten())

        return Subject(lambda number: torch.unique(lists[number].flatten(), return_inverse=True), errors)

    def place_errors(number: int, result: torch.Tensor) -> tuple[int, str]:
        return answers.wrong("places", number, result, answers.places[number][-1][: result.numel()])

    def by_equality() -> Subject:
        some = max(1, min(count, _MOST_COMPARISONS // max(union.numel() for union in unions)))
        programs = -(-some // _OWN)

        def call(number: int) -> torch.Tensor:
            out = torch.empty(some, dtype=torch.int64, device=device)
            union = unions[number]
            match_by_equality[(programs,)](local[number], some, union, union.numel(), out, _OWN, _OTHERS)
            return out

        notes = [f"{some} of {count} ids"] if some < count else []
        return Subject(call, place_errors, data=some, most_iterations=10, notes=notes)

    def search(find: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Subject:
        return Subject(lambda number: find(local[number], unions[number]), place_errors)

    for method in options.methods:
        yield _Candidate("union", method, False, False, partial(whole, method))
    for method in options.methods:
        yield _Candidate("build", method, False, True, partial(build, method))
    yield _Candidate("match", "match_indices", False, True, partial(search, match_indices))
    peers = {
        "unique": _Candidate("union", "unique", True, False, unique),
        "searchsorted": _Candidate(
            "match", "searchsorted", True, True, partial(search, lambda ids, union: torch.searchsorted(union, ids))
        ),
        "equality": _Candidate("match", "equality", True, True, by_equality),
    }
    yield from (peers[name] for name in options.peers)


def _entries(job: jobs.Job, options: Options, answers: _Answers) -> list[Entry]:
    """Everything that is asked for."""
    entries = []
    for candidate in _candidates(options, answers):
        subject, problem = job.agree(f"make {candidate.name}", candidate.make, candidate.peer)
        for launch in ["simulator"] if job.owner.simulated else options.launches:
            if candidate.captured or launch != "graph":
                fields = {"task": candidate.task}
                entries.append(Entry(candidate.name, candidate.peer, launch, subject, problem, fields))
    return entries


def _row(job: jobs.Job, entry: Entry, rows: Rows) -> MatchRow:
    looked_up = entry.subject.data if entry.subject is not None else None
    row = MatchRow(
        **entry.common(job, False),
        lists=rows.world,
        rows=looked_up or rows.rows,
        num_rows=rows.vocabulary.num_rows,
        distribution=rows.vocabulary.distribution,
        union_rows=rows.union_rows,
    )
    return row if entry.summary is None else row.timed(entry.summary)


def _all_rows(job: jobs.Job, options: Options) -> list[Rows]:
    return [
        Rows(vocabulary, count, "0", options.lists, torch.float64)
        for vocabulary in (Vocabulary(name, options.num_rows, job.device) for name in options.distributions)
        for count in options.rows
    ]


def measure(options: Options, show: Callable[[MatchRow], None]) -> list[MatchRow]:
    """Rows of all sizes, from GPUs; those of a size go to ``show`` as soon as they are known. Collective."""
    job = jobs.Job()
    rows: list[MatchRow] = []
    with LineUp() as line_up:
        for made in _all_rows(job, options):
            entries = _entries(job, options, _Answers(made))
            measure_entries(job, entries, Plan(options.iterations, options.warmup, _CALLS), line_up)
            found = with_ratios([_row(job, entry, made) for entry in entries])
            rows += found
            for row in found:
                show(row)
    return rows


def simulate(options: Options, show: Callable[[MatchRow], None]) -> list[MatchRow]:
    """Rows of all sizes, from the simulator: checks, no times. Collective."""
    job = jobs.Job()
    rows = []
    for made in _all_rows(job, options):
        for entry in _entries(job, options, _Answers(made)):
            simulate_entry(job, entry)
            rows.append(_row(job, entry, made))
            show(rows[-1])
    return rows


def main(arguments: Sequence[str]) -> int:
    """The command; its exit status: 1 if a result was wrong."""
    options = parse(arguments)

    def rows(simulated: bool, show: Callable[[MatchRow], None]) -> list[MatchRow]:
        return (simulate if simulated else measure)(options, show)

    return jobs.run(
        "index_match",
        arguments,
        options.json,
        title=f"{options.lists} lists of ids below {options.num_rows}",
        heap_bytes=lambda world: 1 << 20,
        columns=partial(match_columns, options.peers),
        measure=rows,
    )
