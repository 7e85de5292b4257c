# SPDX-License-Identifier: Apache-2.0
"""Measure a tuning table of the dense collectives: ``bash launch.sh [--nproc N] -m tdcoll tune --help``.

For each size all candidates are measured as the collective's benchmark does it, interleaved and checked: algorithms,
each with several numbers of chunks and of warps. :mod:`tdcoll.tools.bench.choosing` describes how the table is made.
After every size the table so far is written. The simulator, which has no times, checks the candidates.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from functools import partial
from typing import Any

import torch
import triton

import tdcoll
from tdcoll.base.limits import MAX_CHUNKS
from tdcoll.calls.tuning import WARPS, Table
from tdcoll.calls.tuning.given import architectures
from tdcoll.language import INTERPRETED
from tdcoll.tools.bench import case, options
from tdcoll.tools.bench import rows as files
from tdcoll.tools.bench.arithmetic import distinct
from tdcoll.tools.bench.choosing import CHUNK_COUNTS, WARP_COUNTS, Candidate, Choice
from tdcoll.tools.bench.dense import DenseCase, case_of
from tdcoll.tools.bench.engine import Wanted
from tdcoll.tools.bench.provenance import command_line
from tdcoll.tools.bench.rows import IN_PLACE, Row
from tdcoll.tools.bench.specs import SPECS


def _dense_options(options: argparse.Namespace, name: str) -> argparse.Namespace:
    """Return the options of the collective's benchmark."""
    in_place = [IN_PLACE] if options.in_place and SPECS[name].in_place else []
    its = {"dtype": getattr(torch, SPECS[name].tuned_dtype), "algorithms": in_place, "peers": []}
    return argparse.Namespace(**{**vars(options), **its, "op": "sum"})


Size = tuple[Choice, DenseCase, int]
"""An operation to tune, its benchmark on the ranks of this job, and bytes of a segment."""


class Tune(case.Case):
    """The command."""

    benchmark = "tune"

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> argparse.Namespace:
        parser = options.Parser(
            "tune",
            "Measures which algorithm of a collective is the fastest on this machine, and writes a table for "
            "TDCOLL_TUNING. Sizes: bytes of a segment (per rank), such as 64M.",
            "-b 1K -e 64M -o mine.json",
        )
        parser.some("--operation", tuple(SPECS))
        options.add_sizes(parser, "256", "1K" if INTERPRETED else "64M")
        parser.some("--algorithms", distinct(name for spec in SPECS.values() for name in spec.names))
        chunks = options.number(int, lambda value: 1 <= value <= MAX_CHUNKS, f"a whole number from 1 to {MAX_CHUNKS}")
        warps = options.number(int, lambda value: value in WARPS, f"one of {', '.join(map(str, WARPS))}")
        for name, kind, counts, what in (
            ("--chunks", chunks, CHUNK_COUNTS, "chunks of a segment"),
            ("--warps", warps, WARP_COUNTS, "warps of a thread block"),
        ):
            parser.option(name, options.each(kind), ",".join(map(str, counts)), "N,N", what)
        what = "measure calls in place as well, where tables have sections for them"
        parser.add_argument("--in-place", action="store_true", help=what)
        options.add_common(parser, 40)
        what = (
            "the table, written after every size; if there is one already, sections of other machines, operations and "
            "kinds of call in it are kept"
        )
        parser.add_argument("-o", "--output", type=options.new_file, metavar="FILE", required=True, help=what)
        given = parser.parse_args(arguments)
        given.sizes = options.read_sizes(parser, given, 2)
        try:
            if given.output.exists():
                Table.load(given.output)
        except ValueError as error:
            parser.error(f"-o: {error}")
        given.arguments = list(arguments)
        return given

    @classmethod
    def heap_bytes(cls, options: argparse.Namespace, world: int) -> int:
        return max(case_of(name).heap_bytes(_dense_options(options, name), world) for name in options.operation)

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        if self.topology.ranks_per_node is None:
            raise ValueError(f"tables are for nodes of one size; this job has {self.topology.describe()}")
        how = self.topology, options.in_place, options.algorithms, options.chunks, options.warps
        self._choices = [Choice(SPECS[name], *how) for name in options.operation]
        versions = f"tdcoll {tdcoll.__version__}, PyTorch {torch.__version__}, Triton {triton.__version__}"
        command = command_line("tune", options.arguments, self.owner.world_size, self.owner.simulated)
        self._source = f"{datetime.now(timezone.utc).date().isoformat()}, {versions}: {command}"

    def sizes(self) -> Iterator[Size]:
        for choice in self._choices:
            bench = case_of(choice.spec.name)(_dense_options(self.options, choice.spec.name))
            yield from ((choice, bench, nbytes) for nbytes in self.options.sizes if choice.candidates(nbytes))

    @contextlib.contextmanager
    def wanted(self, size: Size) -> Iterator[tuple[list[Wanted], Callable[[], object]]]:
        """Yield every candidate; calls out of place share their buffers, and so do those in place.

        They are timed in CUDA graphs. Eager calls take the same plans, and small ones are bound by launch overhead.
        """
        choice, bench, nbytes = size
        with bench.context(nbytes) as (context, stock):

            def make(one: Candidate) -> Any:
                return bench.subject(choice.requested(one, nbytes), one.in_place, False, context, stock)

            made = [
                Wanted(one.name, False, partial(make, one), ["graph"], {"candidate": asdict(one)})
                for one in choice.candidates(nbytes)
            ]
            yield made, context.check

    def facts(self, size: Size) -> dict[str, Any]:
        _, bench, nbytes = size
        return bench.facts(nbytes)

    def measure(self, show: case.Show) -> list[Row]:
        """Write the table after every size. Collective."""
        rows: list[Row] = []

        def show_and_save(found: Sequence[Row]) -> None:
            show(found)
            rows.extend(found)
            if self.owner.rank == 0 and not self.owner.simulated:
                self._save(rows)

        return super().measure(show_and_save)

    def _save(self, rows: Sequence[Row]) -> None:
        """Put the sections that follow from ``rows`` into the table."""
        output, architecture = self.options.output, architectures(self.device)[0]
        table = Table.load(output) if output.exists() else Table(())
        for choice in self._choices:
            own = [row for row in rows if row.facts["operation"] == choice.spec.name]
            table = table.with_sections(choice.sections(own, architecture, self._source))
        files.write_whole(output, table.text())


def main(arguments: Sequence[str]) -> int:
    """Run the command; return 1 if a result was wrong."""
    return case.run(Tune, arguments)
