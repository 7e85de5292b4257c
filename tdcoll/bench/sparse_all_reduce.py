# SPDX-License-Identifier: Apache-2.0
"""The sparse all-reduce benchmark: ``bash launch.sh [--nproc N] -m tdcoll.bench sparse_all_reduce --help``.

Everybody starts from the same sparse tensors and ends with the sum over the ranks, of which every number is checked,
after every timed call. Each call has other row numbers and other values than the one before it; see
:mod:`tdcoll.bench.entries` for how it is measured.

Calls that give a sparse tensor have to know its size on the host, so they are timed one at a time and from an idle GPU
(:func:`~tdcoll.bench.timing.time_call`); tdcoll's padded form, which needs no host, in CUDA graph replays.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import tdcoll
from tdcoll.bench import job as jobs
from tdcoll.bench.arithmetic import calls_per_launch, floor_us
from tdcoll.bench.entries import TURNS, Entry, Plan, Subject, measure_entries, simulate_entry
from tdcoll.bench.job import names
from tdcoll.bench.projection import Cluster, Counts, Projected, lines, project_sparse
from tdcoll.bench.rows import SparseRow, with_ratios
from tdcoll.bench.sparse_data import INPUTS, Rows, SparseData, Vocabulary, fraction
from tdcoll.bench.sparse_peers import PEERS
from tdcoll.bench.table import sparse_columns
from tdcoll.bench.timing import LineUp, Straggler
from tdcoll.collectives.sparse_all_reduce.context import symmetric_bytes
from tdcoll.collectives.sparse_all_reduce.policy import ALGORITHMS
from tdcoll.errors import RankMismatchError
from tdcoll.language import INTERPRETED

__all__ = ["DTYPES", "Options", "heap_bytes", "main", "measure", "parse", "simulate"]

DTYPES = {name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "float64")}

_COPIES = {"both": [True, False], "yes": [True], "no": [False]}


# ---------------------------------------------------------------------- the command line


@dataclass(frozen=True)
class Options:
    """The command line."""

    rows: list[int]
    dims: list[int]
    num_rows: int
    distributions: list[str]
    duplicates: list[str]
    dtype: torch.dtype
    algorithms: list[str]
    peers: list[str]
    launches: list[str]
    copies: list[bool]
    straggler: bool
    iterations: int
    warmup: int
    floor_gbps: float
    json: Path | None
    project: Cluster | None = None

    @property
    def forms(self) -> list[tuple[str, bool | None]]:
        """What tdcoll is asked for: ``(form, copy)``."""
        coo: list[tuple[str, bool | None]] = [("coo", copy) for copy in self.copies] if "eager" in self.launches else []
        return coo + [("padded", None)] * ("graph" in self.launches)


def _rate(text: str) -> float:
    try:
        if (rate := float(text)) > 0:
            return rate
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"expected a positive number of GB/s, got {text!r}")


def parse(arguments: Sequence[str]) -> Options:
    """Options from the command line; a wrong one ends the process with status 2."""
    small = INTERPRETED
    parser = jobs.Parser(
        prog="bash launch.sh [--nproc N] -m tdcoll.bench sparse_all_reduce",
        description="Time of row-sparse all-reduces from sparse tensor to sparse tensor, checked. On the simulator: "
        "checks and counts, of small sizes.",
    )
    distributions = "uniform,zipf1.05,zipf1.2"
    jobs.add_rows(parser, "40" if small else "1000,10000,50000", 500 if small else 5_000_000, distributions)
    parser.add_argument(
        "--dims",
        type=jobs.positive,
        default="8" if small else "64,512,2048",
        metavar="N,N",
        help="numbers in a row (default %(default)s)",
    )
    parser.add_argument(
        "--duplicates",
        type=jobs.each(fraction),
        default="0",
        metavar="A,B",
        help="inputs that are not coalesced: which part of a rank's rows repeats others of that rank, or 'drawn', each "
        "drawn by itself, as nn.Embedding(sparse=True) has them; --rows counts all (default %(default)s: none)",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="default %(default)s")
    parser.add_argument(
        "--algorithms",
        type=names(ALGORITHMS),
        default="owner,gather,auto",
        metavar="A,B",
        help=f"some of {', '.join(ALGORITHMS)} (default %(default)s)",
    )
    parser.add_argument(
        "--peers",
        type=names(tuple(PEERS)),
        default="published,allgather,gloo,dense",
        metavar="A,B",
        help=f"some of {', '.join(PEERS)}, or '' (default %(default)s)",
    )
    parser.add_argument("--copy", choices=_COPIES, default="both", help="results in their own memory? (default both)")
    jobs.add_launches(parser, "both")
    parser.add_argument(
        "--straggler", action="store_true", help="delay a random rank in each iteration; times hold the waiting"
    )
    jobs.add_iterations(parser, "--iterations", TURNS, 20, warmup=2)
    parser.add_argument(
        "--floor-GBps",
        dest="floor_gbps",
        type=_rate,
        default=390.0,
        metavar="X",
        help="rate that a GPU could send at, for the floor (default %(default)s)",
    )
    jobs.add_project(parser)
    jobs.add_json(parser)
    given = parser.parse_args(arguments)
    jobs.check_project(parser, given.project)
    jobs.require_directory(parser, given.json)
    if given.duplicates != ["drawn"]:
        jobs.check_rows(parser, given)
    dtype = DTYPES[given.dtype]
    if dtype.itemsize == 2 and given.duplicates != ["0"]:
        parser.error("--duplicates: sums of many rows have no exact value in 16 bits; take float32 or float64")
    copies = _COPIES[given.copy]
    del given.copy
    return Options(**vars(given) | {"dtype": dtype, "copies": copies})


def heap_bytes(options: Options, world: int) -> int:
    """Symmetric heap that the largest size needs, and what lines the ranks up."""
    sizes = [(rows, dim * options.dtype.itemsize) for rows in options.rows for dim in options.dims]
    return max(symmetric_bytes(world, *size) for size in sizes) + (world << 18) + (1 << 20)


# ---------------------------------------------------------------------- what is measured


class _Job(jobs.Job):
    """The ranks, what they agree on, and what is asked for."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.options = options

    def rows(self) -> Iterator[Rows]:
        """The row numbers of every size, made alike on all ranks."""
        options = self.options
        for distribution in options.distributions:
            vocabulary = Vocabulary(distribution, options.num_rows, self.device)
            for duplicates in options.duplicates:
                for count in options.rows:
                    made = Rows(vocabulary, count, duplicates, self.topology.world_size, options.dtype)
                    if len(set(self.gather("rows", made.checksum))) > 1:
                        raise RankMismatchError("the ranks made different row numbers: are their GPUs of one kind?")
                    yield made

    @contextlib.contextmanager
    def entries(self, data: SparseData) -> Iterator[tuple[list[Entry], Callable[[], object]]]:
        """Everything that is asked for, made where it can be; and what looks whether a wait has expired."""
        options, simulated = self.options, self.owner.simulated
        context, problem = self.agree(
            "make the context",
            lambda: tdcoll.SparseContext(
                max_rows_per_rank=data.rows.rows, max_row_bytes=data.dim * data.rows.dtype.itemsize
            ),
            False,
        )
        entries = []
        for name in options.algorithms:
            for form, copy in options.forms:
                launch = "simulator" if simulated else "graph" if form == "padded" else "eager"
                subject = None if context is None else _ours(name, form, bool(copy), data, context)
                entries.append(Entry(name, False, launch, subject, problem, {"form": form, "copy": copy}))
        for name in options.peers:
            subject, why = self.agree(f"make {name}", partial(PEERS[name], data), True)
            entries.append(Entry(name, True, "simulator" if simulated else "eager", subject, why))
        with contextlib.nullcontext() if context is None else context:
            yield entries, (lambda: None) if context is None else context.check

    def row(self, entry: Entry, data: SparseData) -> SparseRow:
        """The entry's row."""
        if entry.subject is not None and entry.subject.data is not None:
            data = entry.subject.data
        rows = data.rows
        nbytes = rows.moved_rows * data.dim * rows.dtype.itemsize / self.topology.world_size
        row = SparseRow(
            **entry.common(self, self.options.straggler),
            rows=rows.rows,
            dim=data.dim,
            num_rows=rows.vocabulary.num_rows,
            dtype=str(rows.dtype).removeprefix("torch."),
            distribution=rows.vocabulary.distribution,
            duplicates=rows.duplicates,
            union_rows=rows.union_rows,
            moved_rows=rows.moved_rows,
            bytes_per_rank=nbytes,
            floor_us=floor_us(nbytes, self.options.floor_gbps),
        )
        return row if entry.summary is None else row.timed(entry.summary, entry.wall_us)


def _ours(name: str, form: str, copy: bool, data: SparseData, context: tdcoll.SparseContext) -> Subject:
    """tdcoll's all-reduce: from sparse tensor to sparse tensor, or padded."""

    def reduce(number: int) -> torch.Tensor:
        return tdcoll.sparse_all_reduce(data.tensors[number], context, algorithm=name, copy=copy)

    def reduce_padded(number: int) -> Any:
        indices, values, num_rows = data.indices(number), data.values(number), data.rows.vocabulary.num_rows
        coalesced = data.rows.coalesced
        return tdcoll.sparse_all_reduce_padded(indices, values, num_rows, context, coalesced=coalesced, algorithm=name)

    def errors_padded(number: int, result: Any) -> tuple[int, str]:
        count = int(result.count)
        return data.errors(number, result.indices[:count], result.values[:count])

    def errors(number: int, result: torch.Tensor) -> tuple[int, str]:
        if name == "auto" and (said := f"took {context.last_algorithm}") not in notes:
            notes.append(said)
        return data.errors_of(number, result)

    notes: list[str] = []
    if form == "padded":
        return Subject(reduce_padded, errors_padded, data.advance)
    return Subject(reduce, errors, data.advance, notes=notes)


def measure(options: Options, show: Callable[[SparseRow], None]) -> list[SparseRow]:
    """Rows of all sizes, from GPUs; those of a size go to ``show`` as soon as they are known. Collective."""
    job = _Job(options)
    rank, world = job.topology.rank, job.topology.world_size
    straggler = Straggler(rank, world) if options.straggler else None
    rows: list[SparseRow] = []
    with LineUp() as line_up:
        for made in job.rows():
            for dim in options.dims:
                data = SparseData(made, dim, rank)
                calls = calls_per_launch(made.rows * dim * options.dtype.itemsize, world)
                with job.entries(data) as (entries, look):
                    plan = Plan(options.iterations, options.warmup, calls, straggler)
                    measure_entries(job, entries, plan, line_up, look)
                found = with_ratios([job.row(entry, data) for entry in entries])
                rows += found
                for row in found:
                    show(row)
    return rows


def simulate(options: Options, show: Callable[[SparseRow], None]) -> list[SparseRow]:
    """Rows of all sizes, from the simulator: checks and counts, no times. Collective."""
    job = _Job(options)
    rows = []
    for made in job.rows():
        for dim in options.dims:
            data = SparseData(made, dim, job.topology.rank)
            with job.entries(data) as (entries, look):
                for entry in entries:
                    simulate_entry(job, entry)
                    look()
                    rows.append(job.row(entry, data))
                    show(rows[-1])
    return rows


def _projection(options: Options, on: Cluster, rows: Sequence[SparseRow]) -> list[str]:
    """What the counted rows would take on a cluster, whose ranks have row numbers of the same kind."""
    projected: list[Projected] = []
    for distribution, duplicates, count, dim in dict.fromkeys(row.size for row in rows):
        vocabulary = Vocabulary(distribution, options.num_rows, torch.device("cpu"))
        inputs = [
            [vocabulary.rows(count, duplicates, rank, number) for rank in range(on.ranks)] for number in range(INPUTS)
        ]
        mine = [row for row in rows if row.size == (distribution, duplicates, count, dim) and not row.peer]
        same = [row for row in mine if (row.ranks, row.nodes) == (on.ranks, on.nodes) and row.form == "coo"]
        counted = {row.algorithm: Counts.counted(row.counts) for row in same if row.counts}
        algorithms = list(dict.fromkeys(row.algorithm for row in mine))
        repeated = f", repeated {duplicates}" if duplicates != "0" else ""
        size = f"{distribution}{repeated}, {count:,} × {dim}"
        row_bytes = dim * options.dtype.itemsize
        projected += project_sparse(size, algorithms, inputs, row_bytes, count, counted, on)
    return lines(projected, on)


# ---------------------------------------------------------------------- the command


def main(arguments: Sequence[str]) -> int:
    """The command; its exit status: 1 if a result was wrong."""
    options = parse(arguments)

    def rows(simulated: bool, show: Callable[[SparseRow], None]) -> list[SparseRow]:
        return (simulate if simulated else measure)(options, show)

    return jobs.run(
        "sparse_all_reduce",
        arguments,
        options.json,
        title=f"{options.num_rows} rows, {str(options.dtype).removeprefix('torch.')}",
        heap_bytes=partial(heap_bytes, options),
        columns=partial(sparse_columns, options.peers),
        measure=rows,
        project=None if options.project is None else partial(_projection, options, options.project),
    )
