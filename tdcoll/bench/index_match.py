# SPDX-License-Identifier: Apache-2.0
"""The index-matching benchmark: ``bash launch.sh --nproc 1 -m tdcoll bench index_match --help``.

Three tasks, each on one GPU and without communication (several ranks all do the same):

- ``union``: of sorted lists, their union, and where each id of each list is in it. tdcoll's ``match_lists`` against
  ``torch.unique`` with inverse.
- ``build``: of lists that are packed already, their union, and a directory that says where ids are. This is what the
  sparse all-reduce launches; its other kernels ask the directory.
- ``match``: where one list's ids are in the union, which is there. tdcoll's ``match_indices`` against
  ``torch.searchsorted`` and against a kernel that compares every id with every other.

CUDA graph replays where that is possible, and calls one at a time from an idle GPU.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from tdcoll.bench import case, options
from tdcoll.bench.case import Wanted
from tdcoll.bench.engine import Entry, Found, Subject, nothing
from tdcoll.bench.kernels import match_by_equality
from tdcoll.bench.options import at_least
from tdcoll.bench.rows import MatchRow
from tdcoll.bench.sparse_data import INPUTS, Rows, Vocabulary, add_rows, check_rows
from tdcoll.bench.table import match_columns
from tdcoll.collectives.index_match import Directory, IndexMatch, match_indices, match_lists
from tdcoll.collectives.index_match.kernels import HEADER, UNION
from tdcoll.language import INTERPRETED

__all__ = ["Matching", "main"]

_METHODS = ("bitmap", "search", "auto")
_PEERS = ("unique", "searchsorted", "equality")

_MOST_COMPARISONS = 1 << (22 if INTERPRETED else 35)
"""In one call of the kernel that compares every id with every other: of a larger list, only some ids are looked up."""

_OWN, _OTHERS = 32, 64


class Matching(case.Case):
    """The case; a size is the lists of every input."""

    benchmark = "index_match"
    columns = staticmethod(match_columns)

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> argparse.Namespace:
        small = INTERPRETED
        parser = options.Parser(
            prog="bash launch.sh --nproc 1 -m tdcoll bench index_match",
            description="Time of matching sorted lists of row numbers on one GPU, checked. On the simulator: the "
            "check.",
        )
        parser.option("--lists", at_least(1), 8, "N", "how many")
        add_rows(parser, "40" if small else "1000,10000,50000", 500 if small else 5_000_000, "uniform,zipf1.2")
        parser.some("--methods", _METHODS)
        parser.some("--peers", _PEERS)
        options.add_launches(parser, "both", straggler=False)
        options.add_common(parser, 50)
        given = parser.parse_args(arguments)
        check_rows(parser, given)
        options.check_common(parser, given)
        return given

    @classmethod
    def title(cls, options: argparse.Namespace) -> str:
        return f"{options.lists} lists of ids below {options.num_rows}"

    def sizes(self) -> Iterator[Rows]:
        options = self.options
        for name in options.distributions:
            vocabulary = Vocabulary(name, options.num_rows, self.device)
            yield from (Rows(vocabulary, count, "0", options.lists, torch.float64) for count in options.rows)

    @contextlib.contextmanager
    def wanted(self, rows: Rows) -> Iterator[tuple[Sequence[Wanted], Callable[[], object]]]:
        yield _wanted(self.options, _Answers(rows)), nothing

    def row(self, rows: Rows, entry: Entry, /, **common: Any) -> MatchRow:
        looked_up = entry.subject.data if entry.subject is not None else None
        return MatchRow(
            **common,
            lists=rows.world,
            rows=looked_up or rows.rows,
            num_rows=rows.vocabulary.num_rows,
            distribution=rows.vocabulary.distribution,
            union_rows=rows.union_rows,
        )


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
        """Return how many numbers differ."""
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


def _wanted(options: argparse.Namespace, answers: _Answers) -> list[Wanted]:
    """Everything that is asked for."""
    num_rows, lists, unions = options.num_rows, answers.lists, answers.unions
    world, count = lists[0].shape
    device = lists[0].device
    local = [ids[-1] for ids in lists]

    def subject(call: Callable[[int], Any], errors: Callable[[int, Any], Found], **named: Any) -> Subject:
        return Subject(call, errors, inputs=INPUTS, alone=True, **named)

    def whole(method: str) -> Subject:
        return subject(lambda number: match_lists(lists[number], num_rows, method), answers.all_errors)

    def build(method: str) -> Subject:
        directory = Directory(world, count, num_rows, min(world * count, num_rows), device, method)
        header = torch.tensor([8 * (HEADER.value + count), count, 0, 0], dtype=torch.int64, device=device)
        packed = [torch.cat([header.expand(world, -1), ids], dim=1) for ids in lists]

        def call(number: int) -> Directory:
            directory.build(packed[number], 0)
            return directory

        def errors(number: int, result: Directory) -> tuple[int, str]:
            return answers.union_errors(number, result.union, int(result.status[UNION.value]))

        return subject(call, errors)

    def unique() -> Subject:
        def errors(number: int, result: Any) -> tuple[int, str]:
            union, places = result
            wrong = answers.union_errors(number, union, union.numel())
            return wrong if wrong[0] else answers.wrong("places", number, places, answers.places[number].flatten())

        return subject(lambda number: torch.unique(lists[number].flatten(), return_inverse=True), errors)

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
        return subject(call, place_errors, data=some, most_iterations=10, notes=notes)

    def search(find: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Subject:
        return subject(lambda number: find(local[number], unions[number]), place_errors)

    def union(name: str, peer: bool, make: Callable[[], Subject]) -> Wanted:
        eager = [launch for launch in launches if launch != "graph"]  # it waits for the GPU
        return Wanted(name, peer, make, eager, {"task": "union"})

    launches = options.launches
    peers = {
        "unique": union("unique", True, unique),
        "searchsorted": Wanted(
            "searchsorted",
            True,
            partial(search, lambda ids, union: torch.searchsorted(union, ids)),
            launches,
            {"task": "match"},
        ),
        "equality": Wanted("equality", True, by_equality, launches, {"task": "match"}),
    }
    return [
        *(union(method, False, partial(whole, method)) for method in options.methods),
        *(Wanted(method, False, partial(build, method), launches, {"task": "build"}) for method in options.methods),
        Wanted("match_indices", False, partial(search, match_indices), launches, {"task": "match"}),
        *(peers[name] for name in options.peers),
    ]


def main(arguments: Sequence[str]) -> int:
    """The command; its exit status: 1 if a result was wrong."""
    return case.run(Matching, arguments)
