# SPDX-License-Identifier: Apache-2.0
"""Measure a tuning table of the dense collectives: ``bash launch.sh [--nproc N] -m tdcoll tune --help``.

For each size all candidates are measured as the collective's benchmark does it, interleaved and checked: algorithms,
each with several numbers of chunks and of warps. :mod:`tdcoll.tools.bench.choosing` describes how the table is made.

After every size the table so far is written, and beside it the rows that it follows from (``FILE.part``). If a run was
cut off, the next one continues from there, unless machine, versions or settings differ.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

import tdcoll
from tdcoll import runtime
from tdcoll.base.limits import MAX_CHUNKS
from tdcoll.calls.tuning import WARPS, Table
from tdcoll.calls.tuning.given import architectures
from tdcoll.language import INTERPRETED
from tdcoll.runtime.topology import Topology
from tdcoll.tools.bench import case, options
from tdcoll.tools.bench import rows as files
from tdcoll.tools.bench.arithmetic import distinct, format_bytes
from tdcoll.tools.bench.choosing import CHUNK_COUNTS, WARP_COUNTS, Candidate, Choice
from tdcoll.tools.bench.dense import DenseCase, case_of
from tdcoll.tools.bench.engine import Wanted
from tdcoll.tools.bench.provenance import command_line, provenance
from tdcoll.tools.bench.rows import IN_PLACE, Row
from tdcoll.tools.bench.specs import SPECS

__all__ = ["Tune", "listing", "main", "part_of"]

_KEPT_OPTIONS = ("algorithms", "chunks", "warps", "in_place", "iterations", "warmup")
"""Options that must be the same for all rows of one table."""


def part_of(output: Path) -> Path:
    """Return where the rows of an unfinished table are."""
    return output.with_name(output.name + ".part")


def _say(text: str) -> None:
    print(f"tune: {text}", flush=True)


class TunedCollective:
    """One collective that is tuned.

    Args:
        name: of the collective.
        options: of the command line.
        topology: of the ranks.

    Attributes:
        case: its benchmark.
        options: that benchmark's.
        sizes: bytes of a segment, of which there is something to measure.
    """

    def __init__(self, name: str, options: argparse.Namespace, topology: Topology) -> None:
        self.name, self._tuning, self.case = name, options, case_of(name)
        spec = self.case.spec
        self.choice = Choice(spec, topology, options.margin / 100)
        dtype: torch.dtype = getattr(torch, spec.tuned_dtype)
        self._kinds = (False, True) if options.in_place and spec.in_place else (False,)
        sizes: list[int] = distinct(-(-size // dtype.itemsize) * dtype.itemsize for size in options.sizes)
        self.sizes = [nbytes for nbytes in sizes if self.candidates(nbytes)]
        asked = {"algorithms": [IN_PLACE] if True in self._kinds else [], "dtype": dtype}
        self.options = argparse.Namespace(**{**vars(options), **asked, "peers": [], "op": "sum", "buffers": None})

    def candidates(self, nbytes: int) -> list[Candidate]:
        """Return all that is measured of one size."""
        how = self._tuning.algorithms, self._tuning.chunks, self._tuning.warps
        return [one for kind in self._kinds for one in self.choice.candidates(nbytes, kind, *how)]

    def left(self, rows: Sequence[Row]) -> list[int]:
        """Return the sizes that are not among the rows."""
        done = {row.facts["bytes_per_rank"] for row in rows if row.facts["operation"] == self.name}
        return [size for size in self.sizes if size not in done]


def _operations(options: argparse.Namespace, topology: Topology) -> list[TunedCollective]:
    if topology.ranks_per_node is None:
        raise ValueError(f"tables are for nodes of one size; this job has {topology.describe()}")
    operations = [TunedCollective(name, options, topology) for name in options.operation]
    operations = [operation for operation in operations if operation.sizes]
    if not operations:
        options.refuse(
            f"--algorithms: expected one that {' or '.join(options.operation)} has for these sizes on "
            f"{topology.describe()}, got {','.join(options.algorithms)}"
        )
    return operations


def listing(options: argparse.Namespace, topology: Topology) -> str:
    """Return a listing of the measurements to make, as text."""
    operations = _operations(options, topology)
    found = [(each.name, nbytes, each.candidates(nbytes)) for each in operations for nbytes in each.sizes]
    total = sum(len(candidates) for _, _, candidates in found)
    lines = [f"tune, {topology.describe()}: {total} measurements of {options.iterations} iterations"]
    for name, nbytes, candidates in found:
        lines.append(f"{name}, {format_bytes(nbytes)} per rank: {', '.join(one.name for one in candidates)}")
    return "\n".join(lines)


Size = tuple[TunedCollective, DenseCase, int]
"""An operation to tune, its benchmark on the ranks of this job, and bytes of a segment."""


class Tune(case.Case):
    """The command."""

    benchmark = "tune"
    lines = False

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> argparse.Namespace:
        parser = options.Parser(
            "tune",
            "Measures which algorithm of a collective is the fastest on this machine, and writes a table for "
            "TDCOLL_TUNING. Sizes: bytes of a segment (per rank), such as 64M.",
            "-b 1K -e 64M -o mine.json",
        )
        parser.some("--operation", tuple(SPECS))
        options.add_sizes(parser, "256", "64M")
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
        percent = options.number(float, lambda value: 0 <= value < 100, "a number of percent from 0 to below 100")
        what = "a candidate that is slower than the fastest by no more may be kept"
        parser.option("--margin", percent, 3.0, "PERCENT", what)
        options.add_common(parser, 40)
        parser.add_argument(
            *("-o", "--output"),
            type=options.new_file,
            metavar="FILE",
            help="the table, written after every size; if there is one already, sections of other machines, operations "
            "and kinds of call in it are kept. If a run is interrupted, the next one continues "
            "from FILE.part",
        )
        parser.add_argument("--dry-run", action="store_true", help="list what would be measured, and measure nothing")
        given = parser.parse_args(arguments)
        given.sizes = options.read_sizes(parser, given, 1)
        if not given.dry_run and given.output is None:
            parser.error("-o FILE is needed: where the table goes (or --dry-run)")
        if given.output is not None:
            try:
                for file, load in ((given.output, Table.load), (part_of(given.output), files.load)):
                    if file.exists():
                        load(file)
            except (OSError, ValueError) as error:
                parser.error(f"-o: {error}")
        given.arguments, given.refuse = list(arguments), parser.error
        return given

    @classmethod
    def heap_bytes(cls, options: argparse.Namespace, world: int) -> int:
        topology = Topology.of(0, range(world), [0] * world)  # what is measured is known after joining
        operations = [TunedCollective(name, options, topology) for name in options.operation]
        return max(each.case.heap_bytes(each.options, world) for each in operations)

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        self._operations = _operations(options, self.topology)
        date = datetime.now(timezone.utc).date().isoformat()
        command = command_line("tune", options.arguments, self.owner.world_size, self.owner.simulated)
        versions = f"tdcoll {tdcoll.__version__}, PyTorch {torch.__version__}, Triton {triton.__version__}"
        self._source = f"{date}, {versions}: {command}"
        facts = provenance()
        self._head = {"benchmark": "tune", "command": self._source, "started": date, "provenance": facts}
        kept = {name: getattr(options, name) for name in _KEPT_OPTIONS}
        more = {"ranks": self.topology.describe(), "architectures": architectures(self.device)}
        self._circumstances = json.loads(json.dumps({**facts, **kept, **more}))
        """Machine, versions and settings; rows don't count if theirs differ."""
        self._rows: list[Row] = []

    def sizes(self) -> Iterator[Size]:
        for operation in self._operations:
            bench = operation.case(operation.options)
            yield from ((operation, bench, nbytes) for nbytes in operation.left(self._rows))

    @contextlib.contextmanager
    def wanted(self, size: Size) -> Iterator[tuple[list[Wanted], Callable[[], object]]]:
        """Yield every candidate; calls out of place share their buffers, and so do those in place.

        They are timed in CUDA graphs, because eager calls take the same plans, and small ones are bound by launch
        overhead.
        """
        operation, bench, nbytes = size
        with bench.context(nbytes) as (context, stock):

            def make(candidate: Candidate) -> Any:
                requested = operation.choice.requested(candidate, nbytes)
                return bench.subject(requested, context, stock, candidate.in_place)

            made = [
                Wanted(one.name, False, partial(make, one), ["graph"], {"candidate": asdict(one)})
                for one in operation.candidates(nbytes)
            ]
            yield made, context.check

    def facts(self, size: Size) -> dict[str, Any]:
        _, bench, nbytes = size
        return bench.facts(nbytes)

    def measure(self, show: case.Show) -> list[Row]:
        """Measure the sizes that an earlier run has not, and write the table after every size. Collective."""
        first = self.owner.rank == 0
        measured = [asdict(row) for row in self._resumed()] if first else []
        self._rows = [Row(**fields) for fields in self.gather("tune: what is measured already", measured)[0]]
        show(self._rows)
        rows = [*self._rows, *super().measure(show)]
        if first:
            self._save(rows)
        return rows

    def _resumed(self) -> list[Row]:
        """Return the rows of a run that was cut off; none if there was no such run."""
        part = part_of(self.options.output)
        if not part.exists():
            return []
        head, rows = files.load(part)
        before, now = head.get("circumstances", {}), self._circumstances
        differ = [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]
        if differ:
            said = "; ".join(f"{name}: {before.get(name)} then, {now.get(name)} now" for name in differ)
            _say(f"{part} is of other circumstances ({said}): all sizes are measured again")
            return []
        done = distinct((row.facts["operation"], row.facts["bytes_per_rank"]) for row in rows)
        sizes = ", ".join(f"{operation} {format_bytes(nbytes)}" for operation, nbytes in done)
        _say(f"goes on after {sizes} per rank, which are in {part}")
        return rows

    def _save(self, rows: Sequence[Row]) -> None:
        """Write the table that follows from ``rows``; also write the rows, unless all sizes are there."""
        output = self.options.output
        unfinished = any(each.left(rows) for each in self._operations)
        if unfinished:
            files.save(part_of(output), {**self._head, "circumstances": self._circumstances}, rows)
        table = Table.load(output) if output.exists() else Table(())
        architecture = architectures(self.device)[0]
        for each in self._operations:
            own = [row for row in rows if row.facts["operation"] == each.name]
            before = table if each.left(rows) else None
            table = table.with_sections(each.choice.sections(own, architecture, self._source, before))
        files.write_whole(output, table.text())
        if not unfinished:
            part_of(output).unlink(missing_ok=True)

    def done(self, size: Size, rows: Sequence[Row], seconds: float) -> None:
        """Save, and print the choice, and the time that is left if every measurement takes as long."""
        if self.owner.rank != 0:
            return
        (operation, _, nbytes), rows = size, [*self._rows, *rows]
        self._save(rows)
        own = [row for row in rows if row.facts["operation"] == operation.name]
        left = [(each, size) for each in self._operations for size in each.left(rows)]
        one = seconds / len(operation.candidates(nbytes))
        rest = round(one * sum(len(each.candidates(size)) for each, size in left))
        total = sum(len(each.sizes) for each in self._operations)
        counted = f"{total - len(left)} of {total} sizes, {timedelta(seconds=round(seconds))}"
        counted += f", about {timedelta(seconds=rest)} left" if left else ""
        _say(f"{operation.name}, {format_bytes(nbytes)} per rank: {operation.choice.verdict(nbytes, own)} [{counted}]")


def main(arguments: Sequence[str]) -> int:
    """Run the command; return 1 if a result was wrong, 2 if nothing can be measured."""
    given = Tune.parse(arguments)
    if given.dry_run:
        tdcoll.initialize()
        owner = runtime.current()
        if owner.rank == 0:
            print(listing(given, owner.topology()), flush=True)
        tdcoll.finalize()
        return 0
    if INTERPRETED:
        if os.environ.get("RANK", "0") == "0":
            print(
                "tune: the simulator has no times, so there is nothing to tune by. Run it on the GPUs that the table "
                "is for; --dry-run lists what it would measure.",
                file=sys.stderr,
            )
        return 2
    status = case.run(Tune, arguments, given)
    if os.environ.get("RANK", "0") == "0":
        _say(f"wrote {given.output}; use it with TDCOLL_TUNING={given.output}")
    return status
