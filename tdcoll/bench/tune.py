# SPDX-License-Identifier: Apache-2.0
"""Measure a tuning table of the dense collectives: ``bash launch.sh [--nproc N] -m tdcoll tune --help``.

For each size everything that could be the fastest is measured as the collective's benchmark does it, interleaved and
checked: algorithms, each with several numbers of chunks and of warps, and torch.distributed's NCCL.
:mod:`tdcoll.bench.choosing` says what is taken.

After every size the table is written, with what is known by then, and beside it the rows that it follows from
(``FILE.part``). A run that was cut off goes on from there, unless machine, versions or settings are not the same.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

import tdcoll
from tdcoll import limits, runtime
from tdcoll.bench import case, options
from tdcoll.bench import rows as files
from tdcoll.bench.all_gather import AllGather
from tdcoll.bench.all_reduce import AllReduce
from tdcoll.bench.arithmetic import format_bytes
from tdcoll.bench.choosing import CHANNEL_COUNTS, WARP_COUNTS, Candidate, Choice
from tdcoll.bench.dense import IN_PLACE, Dense, add_sizes, read_sizes
from tdcoll.bench.provenance import command_line, provenance
from tdcoll.bench.reduce_scatter import ReduceScatter
from tdcoll.bench.rows import Row, distinct
from tdcoll.bench.table import duration
from tdcoll.bench.timing import LineUp
from tdcoll.context import CollectiveContext
from tdcoll.language import INTERPRETED
from tdcoll.limits import CHANNELS
from tdcoll.runtime.topology import Topology
from tdcoll.tuning import HANDED_OVER, WARPS, Table
from tdcoll.tuning.agreement import architectures

__all__ = ["OPERATIONS", "Operation", "Tune", "listing", "main", "part_of"]

OPERATIONS: dict[str, type[Dense]] = {kind.benchmark: kind for kind in (AllGather, AllReduce, ReduceScatter)}
"""What can be tuned, by name."""

_SETTINGS = ("algorithms", "channels", "warps", "peers", "in_place", "iterations", "warmup")
"""Options that must be the same for all rows of one table."""

_LAUNCHES = ("graph",)
"""Kernels are timed in CUDA graphs. Eager calls take the same plans, and times of small ones are the host's."""


def part_of(output: Path) -> Path:
    """Where the rows of an unfinished table are."""
    return output.with_name(output.name + ".part")


def _say(text: str) -> None:
    print(f"tune: {text}", flush=True)


class Operation:
    """One collective that is tuned: its case, and how to choose.

    Args:
        kind: its benchmark.
        options: of the command line.
        topology: of the ranks.
    """

    def __init__(self, kind: type[Dense], options: argparse.Namespace, topology: Topology) -> None:
        self.kind, self.options, self.topology = kind, options, topology
        self.name = kind.benchmark
        host = kind.host
        itemsize, hand_over = kind.tuned_dtype.itemsize, host.hand_over is not None
        self.choice = Choice(host.policy, topology, itemsize, hand_over, options.margin)
        self.sizes: list[int] = distinct(-(-size // itemsize) * itemsize for size in options.sizes)

    @staticmethod
    def asked(kind: type[Dense], options: argparse.Namespace) -> argparse.Namespace:
        """Return what the benchmark of ``kind`` is asked for."""
        algorithms = [IN_PLACE] if options.in_place and kind.in_heap else []
        more = {
            "launches": _LAUNCHES,
            "algorithms": algorithms,
            "dtype": kind.tuned_dtype,
            "straggler": False,
            "op": "sum",
            "buffers": None,
        }
        return argparse.Namespace(**{**vars(options), **more})

    def candidates(self, nbytes: int, ll_bytes: int | None = None, lamport_bytes: int = 0) -> list[Candidate]:
        """All that is measured of one size; ``ll_bytes``: what the context can send by LL, -1: nothing."""
        options, topology = self.options, self.topology
        if ll_bytes is None:
            ll_bytes = min(nbytes, limits.flagged_bytes(topology.world_size, topology.n_nodes))
            lamport_bytes = limits.lamport_bytes(topology.world_size, topology.n_nodes)
        kinds = (False, True) if options.in_place and self.kind.in_heap else (False,)
        how = options.algorithms, options.channels, options.warps
        made = [one for kind in kinds for one in self.choice.candidates(nbytes, ll_bytes, kind, *how, lamport_bytes)]
        return [*made, *map(Candidate, options.peers)]

    def left(self, rows: Sequence[Row]) -> list[int]:
        """The sizes that are not among the rows."""
        done = {row.bytes_per_rank for row in rows if row.operation == self.name}
        return [size for size in self.sizes if size not in done]

    @contextlib.contextmanager
    def wanted(self, bench: Dense, nbytes: int) -> Iterator[tuple[list[case.Wanted], Callable[[], object]]]:
        """Every candidate; calls out of place share their buffers, and so do those in place."""
        plain = bench.sharing(nbytes)
        inside = bench.inside(nbytes, plain) if self.options.in_place and self.kind.in_heap else None

        def make(candidate: Candidate, context: CollectiveContext) -> Any:
            if candidate.algorithm == HANDED_OVER:
                return bench.peer(HANDED_OVER, plain)
            wish = self.choice.wish(candidate, nbytes, context.ll_bytes, context.lamport_bytes)
            buffers = inside if inside is not None and candidate.in_place else plain(None)
            return bench.subject(wish, context, buffers, candidate.in_place)

        with CollectiveContext(max_bytes_per_rank=bench.context_bytes(nbytes)) as context:
            yield (
                [
                    case.Wanted(one.name, one.algorithm == HANDED_OVER, partial(make, one, context), _LAUNCHES)
                    for one in self.candidates(nbytes, context.ll_bytes, context.lamport_bytes)
                ],
                context.check,
            )

    def listing(self, ll: bool) -> list[str]:
        """Return what would be measured of each size. ``ll``: ranks of a node could store to each other's memory."""
        lines = []
        for nbytes in self.sizes:
            said = ", ".join(one.name for one in self.candidates(nbytes, None if ll else -1))
            lines.append(f"{self.name}, {format_bytes(nbytes)} per rank: {said}")
        return lines


def _operations(options: argparse.Namespace, topology: Topology) -> list[Operation]:
    return [Operation(OPERATIONS[name], options, topology) for name in options.operation]


def _total(options: argparse.Namespace, operations: Sequence[Operation], ll: bool = True) -> int:
    """Return how many candidates there are to measure."""
    found = (len(each.candidates(nbytes, None if ll else -1)) for each in operations for nbytes in each.sizes)
    return sum(found)


def listing(options: argparse.Namespace, topology: Topology, ll: bool) -> str:
    """Return what would be measured, as text; ``ll`` as for :meth:`Operation.listing`, where nodes are of one size."""
    operations = _operations(options, topology)
    total = f"{_total(options, operations, ll)} measurements of {options.iterations} iterations"
    head = f"tune, {topology.describe()}: {total}"
    return "\n".join([head, *(line for each in operations for line in each.listing(ll))])


class _Progress:
    """Keeps and reports what has been measured. On rank 0 alone.

    Args:
        head: what a file of rows begins with.
        circumstances: machine, versions and settings, by name; rows of others do not count.
    """

    def __init__(
        self, bench: Tune, operations: Sequence[Operation], head: dict[str, Any], circumstances: dict[str, Any]
    ) -> None:
        self._bench, self._operations, self._output = bench, operations, bench.options.output
        self._head = {**head, "circumstances": json.loads(json.dumps(circumstances))}

    def begin(self) -> None:
        """Say how much there is to measure."""
        options = self._bench.options
        total, sizes = _total(options, self._operations), sum(len(each.sizes) for each in self._operations)
        many = f"{sizes} sizes, {total} measurements of {options.iterations} iterations"
        _say(f"{self._bench.topology.describe()}: {many}")

    def resume(self) -> list[Row]:
        """Rows of a run that was cut off; none if there was no such run."""
        part = part_of(self._output)
        if not part.exists():
            return []
        head, rows = files.load(part)
        before, now = head.get("circumstances", {}), self._head["circumstances"]
        differ = [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]
        if differ:
            said = "; ".join(f"{name}: {before.get(name)} then, {now.get(name)} now" for name in differ)
            _say(f"{part} is of other circumstances ({said}): all sizes are measured again")
            return []
        done = distinct((row.operation, row.bytes_per_rank) for row in rows)
        sizes = ", ".join(f"{operation} {format_bytes(nbytes)}" for operation, nbytes in done)
        _say(f"goes on after {sizes} per rank, which are in {part}")
        return rows

    def save(self, rows: Sequence[Row], source: str) -> None:
        """Write the table that follows from ``rows``; and them, unless all sizes are there."""
        part, output = part_of(self._output), self._output
        unfinished = any(each.left(rows) for each in self._operations)
        if unfinished:
            files.save(part, self._head, rows)
        table = Table.load(output) if output.exists() else Table(())
        architecture = architectures(self._bench.device)[0]
        for each in self._operations:
            own = [row for row in rows if row.operation == each.name]
            made = each.choice.sections(own, architecture, source, table if each.left(rows) else None)
            table = table.with_sections(made)
        files.write_whole(output, table.text())
        if not unfinished:
            part.unlink(missing_ok=True)

    def say(self, operation: Operation, nbytes: int, rows: Sequence[Row], seconds: float) -> None:
        """One line for a size that took so long, with the time that is left if every measurement takes as long."""
        own = [row for row in rows if row.operation == operation.name]
        left = [(each, size) for each in self._operations for size in each.left(rows)]
        one = seconds / len(operation.candidates(nbytes))
        rest = duration(one * sum(len(each.candidates(size)) for each, size in left))
        total = sum(len(each.sizes) for each in self._operations)
        counted = f"{total - len(left)} of {total} sizes, {duration(seconds)}" + (
            f", about {rest} left" if left else ""
        )
        _say(f"{operation.name}, {format_bytes(nbytes)} per rank: {operation.choice.verdict(nbytes, own)} [{counted}]")


class Tune(case.Benchmark):
    """The command."""

    benchmark = "tune"

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> argparse.Namespace:
        parser = options.Parser(
            prog="bash launch.sh [--nproc N] -m tdcoll tune",
            example="-b 1K -e 64M -o mine.json",
            description="Measures which algorithm of a collective is the fastest on this machine, and writes a table "
            "for TDCOLL_TUNING. Sizes: bytes of a segment (per rank), such as 64M.",
        )
        parser.some("--operation", tuple(OPERATIONS))
        add_sizes(parser, "256", "64M")
        some = distinct(name for kind in OPERATIONS.values() for name in kind.host.policy.names)
        parser.some("--algorithms", some)
        parser.option("--channels", options.positive, ",".join(map(str, CHANNEL_COUNTS)), "N,N", "chunks of a segment")
        parser.option("--warps", options.positive, ",".join(map(str, WARP_COUNTS)), "N,N", "warps of a program")
        parser.some("--peers", (HANDED_OVER,))
        what = "measure calls in place as well, where tables have sections for them"
        parser.add_argument("--in-place", action="store_true", help=what)
        what = "what is slower than the fastest by no more may be kept"
        parser.option("--margin", options.percent, "3", "PERCENT", what)
        options.add_common(parser, 40)
        parser.add_argument(
            *("-o", "--output"),
            type=Path,
            metavar="FILE",
            help="the table, written after every size; if there is one already, sections of other machines, operations "
            "and kinds of call in it are kept. What was measured when a run was cut off is in FILE.part, and is not "
            "measured again",
        )
        parser.add_argument("--dry-run", action="store_true", help="list what would be measured, and measure nothing")
        given = parser.parse_args(arguments)
        given.sizes = read_sizes(parser, given, 1)
        if wrong := [n for n in given.channels if n > CHANNELS]:
            parser.error(f"--channels: expected at most {CHANNELS}, got {wrong[0]}")
        if wrong := [n for n in given.warps if n not in WARPS]:
            parser.error(f"--warps: expected some of {', '.join(map(str, WARPS))}; got {wrong[0]}")
        if not given.dry_run and given.output is None:
            parser.error("-o FILE is needed: where the table goes (or --dry-run)")
        options.check_common(parser, given)
        if given.output is not None:
            if not given.output.absolute().parent.is_dir():
                parser.error(f"-o: there is no directory {given.output.parent}")
            try:
                if given.output.exists():
                    Table.load(given.output)
                if (part := part_of(given.output)).exists():
                    files.load(part)
            except (OSError, ValueError) as error:
                parser.error(f"-o: {error}")
        given.arguments = list(arguments)
        return given

    @classmethod
    def heap_bytes(cls, options: argparse.Namespace, world: int) -> int:
        kinds = [OPERATIONS[name] for name in options.operation]
        return max(kind.heap_bytes(Operation.asked(kind, options), world) for kind in kinds)

    def measure(self, show: case.Show) -> list[Any]:
        """Measure what an earlier run has not, and write the table after every size. Collective."""
        options, owner = self.options, self.owner
        if self.topology.ranks_per_node is None:
            raise ValueError(f"tables are for nodes of one size; this job has {self.topology.describe()}")
        operations = _operations(options, self.topology)
        source, facts = _source(options.arguments, owner), provenance()
        settings = {name: getattr(options, name) for name in _SETTINGS}
        head = {"benchmark": "tune", "command": source, "started": source.partition(",")[0], "provenance": facts}
        more = {"ranks": self.topology.describe(), "architectures": architectures(self.device)}
        progress = None
        if owner.rank == 0 and options.output is not None:
            progress = _Progress(self, operations, head, {**facts, **settings, **more})
            progress.begin()
        measured = [asdict(row) for row in progress.resume()] if progress else []
        rows: list[Any] = [Row(**fields) for fields in self.gather("tune: what is measured already", measured)[0]]
        for row in rows:
            show(row)
        with LineUp() as line_up:
            for operation in operations:
                if not (left := operation.left(rows)):
                    continue
                bench = operation.kind(Operation.asked(operation.kind, options))
                for nbytes in left:
                    began = time.monotonic()
                    wanted = partial(operation.wanted, bench)
                    for row in bench.measure_size(nbytes, line_up, wanted=wanted):
                        rows.append(row)
                        show(row)
                    if progress:
                        progress.save(rows, source)
                        progress.say(operation, nbytes, rows, time.monotonic() - began)
                bench.close()
        if progress:
            progress.save(rows, source)
        return rows


def _source(arguments: Sequence[str], owner: runtime.Runtime) -> str:
    date = datetime.now(timezone.utc).date().isoformat()
    command = command_line("tune", arguments, owner.world_size, owner.simulated)
    versions = f"tdcoll {tdcoll.__version__}, PyTorch {torch.__version__}, Triton {triton.__version__}"
    return f"{date}, {versions}: {command}"


def main(arguments: Sequence[str]) -> int:
    """The command; its exit status: 1 if a result was wrong, 2 where nothing can be measured."""
    given = Tune.parse(arguments)
    if given.dry_run:
        tdcoll.initialize()
        owner = runtime.current()
        topology = owner.topology()
        if owner.rank == 0:
            print(listing(given, topology, topology.ranks_per_node is not None), flush=True)
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
