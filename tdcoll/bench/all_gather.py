# SPDX-License-Identifier: Apache-2.0
"""The all-gather benchmark: ``bash launch.sh [--nproc N] -m tdcoll.bench all_gather --help``.

For each size everything that is measured is prepared first (called, captured), then measured in several turns
each, so that clocks and temperature are the same for all. After each turn the results of every call of its
last launch are checked: it is the timed launches that are checked, and they alternate between an even and an
odd number of calls.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

import tdcoll
from tdcoll.bench import job as jobs
from tdcoll.bench.arithmetic import calls_per_launch, message_sizes, summarize
from tdcoll.bench.data import Buffers
from tdcoll.bench.job import names
from tdcoll.bench.peers import FCOLLECT, PEERS, let_nvshmem_have_nccl
from tdcoll.bench.projection import Cluster, Counts, Projected, lines, plan_of, project_all_gather
from tdcoll.bench.rows import Row, with_ratios
from tdcoll.bench.subjects import BACKEND, IN_PLACE, NAMES, Subject, all_gather_subject, backend_subject
from tdcoll.bench.table import all_gather_columns
from tdcoll.bench.timing import Launch, LineUp, Straggler, capture, time_launches
from tdcoll.context import CollectiveContext
from tdcoll.language import INTERPRETED

__all__ = [
    *("DTYPES", "TURNS", "Job", "Measurement", "Options", "heap_bytes", "in_place_storage", "main", "measure"),
    *("measure_size", "parse", "simulate"),
]

DTYPES = {
    name: getattr(torch, name)
    for name in ("uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")
}

TURNS = 4
"""Turns that each subject takes per size; even, so that both launches are the last of as many turns."""

_SIMULATED_CALLS = 3


@dataclass(frozen=True)
class Options:
    """The command line."""

    sizes: list[int]
    dtype: torch.dtype
    algorithms: list[str] | None
    peers: list[str]
    launches: list[str]
    straggler: bool
    iterations: int
    warmup: int
    json: Path | None
    project: Cluster | None = None


def parse(arguments: Sequence[str]) -> Options:
    """Options from the command line; a wrong one ends the process with status 2."""
    parser = jobs.Parser(
        prog="bash launch.sh [--nproc N] -m tdcoll.bench all_gather",
        description="Latency and bus bandwidth of all-gathers, checked. Sizes: bytes per rank, such as 64M.",
    )
    parser.add_argument("-b", "--begin", default="1K", help="first size (default %(default)s)")
    parser.add_argument("-e", "--end", default="1M", help="last size (default %(default)s)")
    parser.add_argument("-f", "--factor", default="4", help="from one size to the next (default %(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="default %(default)s")
    parser.add_argument(
        "--algorithms",
        type=names(NAMES),
        metavar="A,B",
        help=f"some of {', '.join(NAMES)} (default: auto, 1d, in-place, and on several nodes 2d)",
    )
    parser.add_argument(
        "--peers",
        type=names(tuple(PEERS)),
        default=["nccl"],
        metavar="A,B",
        help=f"some of {', '.join(PEERS)}, or '' (default: nccl)",
    )
    jobs.add_launches(parser, "graph")
    parser.add_argument(
        "--straggler",
        action="store_true",
        help="delay a random rank in each iteration; times hold the waiting",
    )
    jobs.add_iterations(parser, "--iters", TURNS, 100)
    jobs.add_project(parser)
    jobs.add_json(parser)
    given = parser.parse_args(arguments)
    jobs.check_project(parser, given.project)
    dtype = DTYPES[given.dtype]
    try:
        sizes = message_sizes(given.begin, given.end, given.factor, dtype.itemsize)
    except ValueError as error:
        parser.error(str(error))
    jobs.require_directory(parser, given.json)
    return Options(
        sizes=sizes,
        dtype=dtype,
        algorithms=given.algorithms,
        peers=given.peers,
        launches=given.launches,
        straggler=given.straggler,
        iterations=given.iters,
        warmup=given.warmup,
        json=given.json,
        project=given.project,
    )


def _sets(nbytes: int, world: int) -> int:
    return _SIMULATED_CALLS if INTERPRETED else calls_per_launch(nbytes, world)[1]


def heap_bytes(sizes: Sequence[int], world: int, algorithms: Sequence[str] | None, peers: Sequence[str] = ()) -> int:
    """Symmetric heap that the sizes need: a context's slots and what it has besides, and buffers for calls in place and
    of NVSHMEM.

    Of the heap the backend takes a quarter at most.
    """
    in_place = algorithms is None or IN_PLACE in algorithms
    staged = max(2 * world * (size + 16) for size in sizes)
    buffers = max(Buffers.storage_bytes(size, world, _sets(size, world)) for size in sizes)
    inputs = max(Buffers.storage_bytes(size, 1, _sets(size, world)) for size in sizes)
    theirs = buffers + inputs if FCOLLECT in peers and not INTERPRETED else 0
    served = 4 * (staged + (4 << 20)) if algorithms is not None and BACKEND in algorithms else 0
    return staged + (buffers if in_place else 0) + theirs + served + (8 << 20)


# ---------------------------------------------------------------------- what is measured


@dataclass
class Measurement:
    """A subject in one way of launching it, or why there is none."""

    name: str
    peer: bool
    launch: str
    subject: Subject | None = None
    problem: str | None = None
    launches: list[Launch] = field(default_factory=list)
    results: list[list[torch.Tensor]] = field(default_factory=list)
    times_us: list[float] = field(default_factory=list)
    errors: int = 0
    where: str | None = None


class Job(jobs.Job):
    """The ranks, what they agree on, and what is asked for."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.options = options
        default = ["auto", "1d", *(["2d"] if self.topology.n_nodes > 1 else []), IN_PLACE]
        self.algorithms = default if options.algorithms is None else options.algorithms
        self.round = 0

    def row(self, entry: Measurement, nbytes: int) -> Row:
        """The entry's row, without what was measured."""
        return Row(
            bytes_per_rank=nbytes,
            ranks=self.topology.world_size,
            nodes=self.topology.n_nodes,
            algorithm=entry.name,
            peer=entry.peer,
            launch=entry.launch,
            check="not run" if entry.problem else "WRONG" if entry.errors else "ok",
            note=entry.problem or entry.where,
            straggler=self.options.straggler and not self.owner.simulated,
        )

    def check(self, entry: Measurement, calls: int) -> None:
        """Check the last launch's results on all ranks."""
        assert entry.subject is not None
        for errors, where in self.gather("check", entry.subject.buffers.errors(calls)):
            entry.errors += errors
            entry.where = entry.where or where or None

    def begin_turn(self, entry: Measurement) -> None:
        """New inputs and no results, on every rank."""
        assert entry.subject is not None
        # Far from all rounds before, those of other subjects included.
        self.round += 10_000
        entry.subject.buffers.fill(self.round)

    def buffers(
        self,
        nbytes: int,
        storage: torch.Tensor | None = None,
        allocate: Callable[[int], torch.Tensor] | None = None,
        separate: bool = False,
    ) -> Buffers:
        """Of one launch; see :class:`~tdcoll.bench.data.Buffers`."""
        world, rank = self.topology.world_size, self.topology.rank
        sets = _sets(nbytes, world)
        return Buffers(nbytes, world, rank, sets, self.options.dtype, self.device, storage, allocate, separate)

    def subjects(self, nbytes: int, context: CollectiveContext, storage: torch.Tensor | None) -> list[Measurement]:
        """Everything that is asked for, made where it can be."""
        shared: list[Buffers] = []

        def plain(allocate: Callable[[int], torch.Tensor] | None = None, separate: bool = False) -> Buffers:
            if allocate is not None:
                return self.buffers(nbytes, allocate=allocate, separate=separate)
            if not shared:
                shared.append(self.buffers(nbytes))
            return shared[0]

        def ours(name: str) -> Subject:
            if name == BACKEND:
                return backend_subject(plain())
            # The simulator decides by what calls cost there; what it counts is for GPUs.
            plan = plan_of(name, nbytes, self.topology) if self.owner.simulated else None
            if name != IN_PLACE:
                return all_gather_subject(name, context, plain(), plan)
            assert storage is not None
            return all_gather_subject(name, context, self.buffers(nbytes, storage), plan)

        entries = []
        for name in self.algorithms:
            subject, problem = self.agree(f"make {name}", partial(ours, name), False)
            entries.append(Measurement(name, False, "", subject, problem))
        for name in self.options.peers:
            subject, problem = self.agree(f"make {name}", partial(PEERS[name], plain, self.device), True)
            entries.append(Measurement(name, True, "", subject, problem))
        return entries


# ---------------------------------------------------------------------- on GPUs


def _eager(call: Callable[[int], object], calls: int) -> Launch:
    def run() -> None:
        for position in range(calls):
            call(position)

    return Launch(run, calls)


def _prepare(job: Job, entry: Measurement, nbytes: int) -> None:
    """Call it, and capture it if that is asked: what a launch needs before it can be timed."""
    subject = entry.subject
    assert subject is not None
    numbers = calls_per_launch(nbytes, job.topology.world_size)

    def run() -> list[Launch]:
        job.begin_turn(entry)
        for position in range(numbers[1]):
            subject.call(position)
        torch.cuda.synchronize()
        if entry.launch == "eager":
            return [_eager(subject.call, calls) for calls in numbers]
        launches = []
        for calls in numbers:
            launches.append(capture(subject.call, calls))
            entry.results.append(list(subject.buffers.results))  # which a peer may have made itself
        return launches

    made, entry.problem = job.agree(f"prepare {entry.name}", run, entry.peer)
    entry.launches = made or []


def _turn(job: Job, entry: Measurement, line_up: LineUp, straggler: Straggler | None, turn: int) -> None:
    """One turn of one entry: new data, launches, check."""
    options = job.options
    subject = entry.subject
    assert subject is not None
    iterations = options.iterations // TURNS + (turn < options.iterations % TURNS)
    job.begin_turn(entry)
    torch.cuda.synchronize()
    job.gather("turn", None)
    last = turn % len(entry.launches)
    advance = subject.buffers.advance
    if turn == 0:
        time_launches(entry.launches, options.warmup, line_up, advance)
    entry.times_us += time_launches(entry.launches, iterations, line_up, advance, straggler, last)
    if entry.results:
        subject.buffers.results[:] = entry.results[last]
    job.check(entry, entry.launches[last].calls)


def measure_size(
    job: Job, nbytes: int, storage: torch.Tensor | None, line_up: LineUp, straggler: Straggler | None
) -> list[Row]:
    """Rows of one size, of all that the job's ``subjects`` makes. Collective."""
    options = job.options
    with CollectiveContext(max_bytes_per_rank=nbytes) as context:
        made = job.subjects(nbytes, context, storage)
        entries = [
            dataclasses.replace(e, launch=launch, launches=[], times_us=[], results=[])
            for launch in options.launches
            for e in made
        ]
        for entry in entries:
            if entry.subject is not None:
                _prepare(job, entry, nbytes)
        running = [entry for entry in entries if entry.launches]
        for turn in range(TURNS):
            for entry in running:
                _turn(job, entry, line_up, straggler, turn)
                context.check()
        rows = []
        for entry in entries:
            row = job.row(entry, nbytes)
            if entry.launches:
                calls = tuple(launch.calls for launch in entry.launches)
                row = dataclasses.replace(row, calls=calls, iterations=options.iterations)
                row = row.timed(summarize(job.gather("times", entry.times_us)))
            rows.append(row)
            entry.launches, entry.results = [], []  # graphs go before what they use
        torch.cuda.synchronize()
        for entry in made:
            if entry.subject is not None:
                entry.subject.close()
    return with_ratios(rows)


def measure(options: Options, show: Callable[[Row], None]) -> list[Row]:
    """Rows of all sizes, from GPUs; each goes to ``show`` as soon as it is known. Collective."""
    job = Job(options)
    world = job.topology.world_size
    storage = in_place_storage(job)
    straggler = Straggler(job.topology.rank, world) if options.straggler else None
    rows = []
    with LineUp() as line_up:
        for nbytes in options.sizes:
            for row in measure_size(job, nbytes, storage, line_up, straggler):
                rows.append(row)
                show(row)
    if storage is not None:
        tdcoll.free(storage)
    return rows


def in_place_storage(job: Job) -> torch.Tensor | None:
    """Symmetric memory for calls in place, if there are any. Collective."""
    if IN_PLACE not in job.algorithms:
        return None
    world = job.topology.world_size
    need = max(Buffers.storage_bytes(size, world, _sets(size, world)) for size in job.options.sizes)
    return tdcoll.empty((need,), torch.uint8)


# ---------------------------------------------------------------------- on the simulator


def _simulate_entry(job: Job, entry: Measurement, nbytes: int) -> Row:
    """Two rounds of calls: the first checks, the second finds data of the first that was left behind."""
    subject = entry.subject
    entry.launch = "simulator"
    if entry.peer or subject is None:
        return job.row(entry, nbytes)
    counted: dict[str, list[float]] = {}
    for round_ in range(2):
        if round_ == 0:
            job.begin_turn(entry)
        else:
            subject.buffers.advance()
        job.gather("turn", None)

        def run() -> None:
            for position in range(_SIMULATED_CALLS):
                subject.call(position)

        def agreed() -> None:
            _, entry.problem = job.agree(f"run {entry.name}", run, False)

        counted = job.count(agreed, _SIMULATED_CALLS)
        if entry.problem:
            return job.row(entry, nbytes)
        job.check(entry, _SIMULATED_CALLS)
    row = job.row(entry, nbytes)
    return dataclasses.replace(row, counts=counted, calls=(_SIMULATED_CALLS,), iterations=2)


def simulate(options: Options, show: Callable[[Row], None]) -> list[Row]:
    """Rows of all sizes, from the simulator: checks and counts, no times. Collective."""
    job = Job(options)
    storage = in_place_storage(job)
    rows = []
    for nbytes in options.sizes:
        with CollectiveContext(max_bytes_per_rank=nbytes) as context:
            for entry in job.subjects(nbytes, context, storage):
                row = _simulate_entry(job, entry, nbytes)
                context.check()
                rows.append(row)
                show(row)
    if storage is not None:
        tdcoll.free(storage)
    return rows


def _projection(on: Cluster, rows: Sequence[Row]) -> list[str]:
    """What the counted rows would take on a cluster."""
    projected: list[Projected] = []
    for nbytes in dict.fromkeys(row.bytes_per_rank for row in rows):
        mine = [row for row in rows if row.bytes_per_rank == nbytes and not row.peer]
        same = [row for row in mine if (row.ranks, row.nodes) == (on.ranks, on.nodes) and row.counts]
        counted = {row.algorithm: Counts.counted(row.counts) for row in same if row.counts}
        projected += project_all_gather(nbytes, [row.algorithm for row in mine], counted, on)
    return lines(projected, on)


# ---------------------------------------------------------------------- the command


def main(arguments: Sequence[str]) -> int:
    """The command; its exit status: 1 if a result was wrong."""
    options = parse(arguments)
    if FCOLLECT in options.peers and not INTERPRETED:
        let_nvshmem_have_nccl()

    def rows(simulated: bool, show: Callable[[Row], None]) -> list[Row]:
        return (simulate if simulated else measure)(options, show)

    return jobs.run(
        "all_gather",
        arguments,
        options.json,
        title=str(options.dtype).removeprefix("torch."),
        heap_bytes=lambda world: heap_bytes(options.sizes, world, options.algorithms, options.peers),
        columns=lambda simulated: all_gather_columns(options.peers, simulated),
        measure=rows,
        project=None if options.project is None else partial(_projection, options.project),
    )
