# SPDX-License-Identifier: Apache-2.0
"""Measure a tuning table of the all-gather: ``bash launch.sh [--nproc N] -m tdcoll.bench tune --help``.

For each size everything that could be the fastest is measured as :mod:`tdcoll.bench.all_gather` does it, interleaved
and checked: algorithms, each with several numbers of chunks and of warps, and torch.distributed's NCCL. Of what was
right the fastest is taken, with hysteresis: as long as they are not slower by more than a margin, what the size before
has is kept, or else what the rules of :mod:`tdcoll.collectives.all_gather.policy` take. So noise makes no entries, and
NCCL gets a size only if it is faster by more than the margin.

After every size the table is written, with what is known by then, and beside it the rows that it follows from
(``FILE.part``). A run that was cut off goes on from there, unless machine, versions or settings are not the same.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

import tdcoll
from tdcoll import runtime
from tdcoll.bench import all_gather as benchmark
from tdcoll.bench import job as jobs
from tdcoll.bench import rows as files
from tdcoll.bench.arithmetic import format_bytes, message_sizes
from tdcoll.bench.data import Buffers
from tdcoll.bench.job import names
from tdcoll.bench.peers import PEERS
from tdcoll.bench.provenance import command_line, provenance
from tdcoll.bench.rows import Row
from tdcoll.bench.subjects import IN_PLACE, Subject
from tdcoll.bench.table import duration, number
from tdcoll.bench.timing import LineUp
from tdcoll.collectives._host.plan import LL_WORD_BYTES, Facts, Plan
from tdcoll.collectives.all_gather import all_gather, all_gather_in_place
from tdcoll.collectives.all_gather.policy import POLICY
from tdcoll.context import CollectiveContext
from tdcoll.language import INTERPRETED
from tdcoll.limits import CHANNELS, flagged_bytes
from tdcoll.runtime.topology import Topology
from tdcoll.tuning import HANDED_OVER, Entry, Section, Table
from tdcoll.tuning.agreement import architectures

__all__ = ["Candidate", "Options", "candidates", "main", "parse", "part_of", "pick", "sections", "verdict"]

_LL_CHUNKS = tuple(LL_WORD_BYTES * words for words in (64, 128, 256, 512, 1024))
"""Bytes that one program of LL moves."""

CHANNEL_COUNTS = (1, 4, 16, 64, 256)
"""Chunks of a segment that are tried, by default."""

_LEAST_CHUNK = 1 << 10
"""Bytes; smaller chunks are not tried."""


@dataclass(frozen=True)
class Candidate:
    """A way to make a call; None is left to the rules.

    Attributes:
        algorithm: as in :class:`~tdcoll.Plan`.
        in_place: whether the call is.
        channels, chunk, num_warps: as in :class:`~tdcoll.tuning.Entry`.
    """

    algorithm: str
    in_place: bool = False
    channels: int | None = None
    chunk: int | None = None
    num_warps: int | None = None

    @property
    def name(self) -> str:
        """``"1d 8 chunks 4 warps"``, ``"in-place 1d"``, ``"nccl"``."""
        words = [f"{IN_PLACE} {self.algorithm}" if self.in_place else self.algorithm]
        if self.channels is not None:
            words.append(f"{self.channels} chunks")
        if self.chunk is not None:
            words.append(f"{format_bytes(self.chunk)} chunks")
        if self.num_warps is not None:
            words.append(f"{self.num_warps} warps")
        return " ".join(words)

    def entry(self, up_to: int | None) -> Entry:
        """A table's entry that says so."""
        return Entry(up_to, self.algorithm, self.channels, self.chunk, self.num_warps)

    def plan(self, nbytes: int, topology: Topology, ll_bytes: int) -> Plan:
        """What it makes of a call. Raises ValueError where it cannot be had."""
        kind = ("", POLICY.operation, topology.ranks_per_node or 0, topology.n_nodes, "eager", self.in_place)
        stores = ll_bytes >= 0  # both need ranks that can store to each other's memory
        facts = Facts(nbytes, topology, ll_bytes=ll_bytes, stores=stores, in_place=self.in_place)
        return POLICY.choose(facts, self.algorithm, [Section(*kind, (self.entry(None),))])


# ---------------------------------------------------------------------- what is measured: pure


def candidates(
    nbytes: int,
    topology: Topology,
    *,
    in_place: bool = False,
    ll_bytes: int,
    algorithms: Sequence[str] = POLICY.names,
    channels: Sequence[int] = CHANNEL_COUNTS,
    warps: Sequence[int] = (2, 4, 8, 16),
) -> list[Candidate]:
    """What could be the fastest: different plans that can be had, of each algorithm that of the rules first."""
    found: dict[Plan, Candidate] = {}
    for algorithm in algorithms:
        if algorithm == "2d" and topology.n_nodes == 1:
            continue  # 1D with other names
        if algorithm == "ring" and topology.world_size < 3:
            continue  # direct stores with other names
        tried = [Candidate(algorithm, in_place)]
        if algorithm == "ll":
            room = 2 * max(_LL_CHUNKS[0], nbytes)
            tried += [
                Candidate(algorithm, in_place, chunk=chunk, num_warps=n)
                for chunk in _LL_CHUNKS
                for n in warps
                if 32 * LL_WORD_BYTES * n <= chunk < room
            ]
        else:
            tried += [
                Candidate(algorithm, in_place, channels=count, num_warps=n)
                for count in channels
                for n in warps
                if count == 1 or nbytes >= count * _LEAST_CHUNK
            ]
        for candidate in tried:
            try:
                found.setdefault(candidate.plan(nbytes, topology, ll_bytes), candidate)
            except ValueError:  # not here, or not of this size
                break
    return list(found.values())


def pick(
    times_us: Sequence[tuple[int, Mapping[Candidate, float]]], usual: Callable[[int], str], margin: float
) -> list[tuple[int, Candidate]]:
    """For each size what is to be taken: ``(bytes per rank, candidate)``.

    In this order, of those that are slower than the fastest by at most ``margin`` (0.03: 3%): the same as for the size
    before; the rules' own; the fastest of tdcoll's; and the fastest.

    Args:
        times_us: sizes, ascending, with the time of each candidate; sizes without times are left out.
        usual: the algorithm that the rules take.
    """
    picks: list[tuple[int, Candidate]] = []
    for nbytes, times in times_us:
        if not times:
            continue
        fastest = min(times.values())
        good = sorted((c for c in times if times[c] <= fastest * (1 + margin)), key=lambda c: times[c])
        before = [picks[-1][1]] if picks else []
        rules = [c for c in good if c == Candidate(usual(nbytes), c.in_place)]
        ours = [c for c in good if c.algorithm != HANDED_OVER]
        picks.append((nbytes, next(c for c in (*before, *rules, *ours, *good) if c in good)))
    return picks


def _usual(topology: Topology, in_place: bool, nbytes: int) -> str:
    """The algorithm that the rules take."""
    ll_bytes = flagged_bytes(topology.world_size, topology.n_nodes)
    facts = Facts(nbytes, topology, ll_bytes=ll_bytes, stores=True, in_place=in_place)
    return POLICY.choose(facts).algorithm


Times = dict[int, dict[Candidate, float]]
"""Microseconds of each candidate at each size."""


def times_of(rows: Sequence[Row], known: Mapping[str, Candidate]) -> dict[tuple[str, bool], Times]:
    """The times of the rows that were right, by kind of call: launch, and whether it is in place.

    Args:
        known: the candidate of each row's ``algorithm``.
    """
    found: dict[tuple[str, bool], Times] = {}
    for launch in ("graph", "eager"):
        for in_place in (False, True):
            times: Times = {}
            for row in rows:
                candidate = known[row.algorithm]
                # NCCL does the same in place and out of place, and was measured once.
                fits = candidate.in_place == in_place or candidate.algorithm == HANDED_OVER
                if row.launch == launch and fits and row.check == "ok" and row.median_us:
                    candidate = dataclasses.replace(candidate, in_place=in_place)
                    times.setdefault(row.bytes_per_rank, {})[candidate] = row.median_us
            compared = {n: found for n, found in times.items() if any(c.algorithm != HANDED_OVER for c in found)}
            if compared:
                found[launch, in_place] = dict(sorted(compared.items()))
    return found


def sections(
    rows: Sequence[Row],
    known: Mapping[str, Candidate],
    topology: Topology,
    architecture: str,
    margin: float,
    source: str,
    before: Table | None = None,
) -> list[Section]:
    """A table's sections from the rows that were right.

    An entry holds up to the largest size that it was picked for. Above the largest of all the rules hold, unless NCCL
    was picked there: then it is for all that is larger.

    Args:
        known: the candidate of each row's ``algorithm``.
        before: of measurements that are still to be finished: a table whose entries hold for larger sizes until then.
    """
    made = []
    for (launch, in_place), times in times_of(rows, known).items():
        picks = pick(list(times.items()), partial(_usual, topology, in_place), margin)
        entries: list[Entry] = []
        for place, (nbytes, candidate) in enumerate(picks):
            if place + 1 < len(picks) and picks[place + 1][1] == candidate:
                continue
            last = place + 1 == len(picks) and candidate.algorithm == HANDED_OVER and before is None
            entries.append(candidate.entry(None if last else nbytes))
        per_node = topology.ranks_per_node
        assert per_node is not None
        kind = (architecture, POLICY.operation, per_node, topology.n_nodes, launch, in_place)
        section = Section(*kind, tuple(entries), source)
        for old in before.sections if before is not None else ():
            if old.kind == section.kind:
                largest = picks[-1][0]
                kept = tuple(entry for entry in old.entries if entry.up_to is None or entry.up_to > largest)
                section = dataclasses.replace(section, entries=(*section.entries, *kept))
        made.append(section)
    return made


def verdict(nbytes: int, rows: Sequence[Row], known: Mapping[str, Candidate], topology: Topology, margin: float) -> str:
    """Return one line: what is taken at a size, and how much longer the best of every other algorithm takes.

    Args:
        rows: of this size, and of those before it, on which the choice depends.
    """
    said = []
    for (launch, in_place), times in times_of(rows, known).items():
        if nbytes not in times:
            continue
        upto = [(n, found) for n, found in times.items() if n <= nbytes]
        taken = pick(upto, partial(_usual, topology, in_place), margin)[-1][1]
        mine = times[nbytes][taken]
        best: dict[str, float] = {}
        for candidate, us in sorted(times[nbytes].items(), key=lambda item: item[1]):
            if candidate.algorithm != taken.algorithm:
                best.setdefault(candidate.algorithm, us)
        others = ", ".join(f"{name} {100 * (us / mine - 1):+.0f}%" for name, us in best.items())
        said.append(f"{launch}: {taken.name} {number(mine, 2)} µs" + (f" ({others})" if others else ""))
    here = [row for row in rows if row.bytes_per_rank == nbytes]
    if wrong := [row.algorithm for row in here if row.check == "WRONG"]:
        said.append(f"WRONG: {', '.join(dict.fromkeys(wrong))}")
    return "; ".join(said) or "nothing was right"


# ---------------------------------------------------------------------- the command line


@dataclass(frozen=True)
class Options:
    """The command line."""

    sizes: list[int]
    algorithms: list[str]
    channels: list[int]
    warps: list[int]
    peers: list[str]
    launches: list[str]
    in_place: bool
    margin: float
    iterations: int
    warmup: int
    output: Path | None
    dry_run: bool
    json: Path | None


def _percent(text: str) -> float:
    try:
        if 0 <= (value := float(text)) < 100:
            return value / 100
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"expected a number of percent from 0 to below 100, got {text!r}")


def parse(arguments: Sequence[str]) -> Options:
    """Options from the command line; a wrong one ends the process with status 2."""
    parser = jobs.Parser(
        prog="bash launch.sh [--nproc N] -m tdcoll.bench tune",
        description="Measures which all-gather is the fastest on this machine, and writes a table for TDCOLL_TUNING. "
        "Sizes: bytes per rank, such as 64M.",
    )
    parser.add_argument("-b", "--begin", default="256", help="first size (default %(default)s)")
    parser.add_argument("-e", "--end", default="64M", help="last size (default %(default)s)")
    parser.add_argument("-f", "--factor", default="4", help="from one size to the next (default %(default)s)")
    some = POLICY.names
    parser.add_argument(
        *("--algorithms", "-a"), type=names(some), default=list(some), metavar="A,B", help=f"some of {', '.join(some)}"
    )
    parser.add_argument(
        "--channels", type=jobs.positive, default=",".join(map(str, CHANNEL_COUNTS)), metavar="N,N", help="chunks"
    )
    parser.add_argument("--warps", type=jobs.positive, default="2,4,8,16", metavar="N,N", help="warps of a program")
    parser.add_argument(
        "--peers", type=names((HANDED_OVER,)), default=[HANDED_OVER], metavar="A", help="nccl (default), or ''"
    )
    jobs.add_launches(parser, "both")
    parser.add_argument("--in-place", action="store_true", help="measure calls in place as well")
    parser.add_argument(
        "--margin",
        type=_percent,
        default="3",
        metavar="PERCENT",
        help="what is slower than the fastest by no more may be kept (default %(default)s)",
    )
    jobs.add_iterations(parser, "--iters", benchmark.TURNS, 40)
    parser.add_argument(
        *("-o", "--output"),
        type=Path,
        metavar="FILE",
        help="the table, written after every size; if there is one already, sections of other machines and launches in "
        "it are kept. What was measured when a run was cut off is in FILE.part, and is not measured again",
    )
    parser.add_argument("--dry-run", action="store_true", help="list what would be measured, and measure nothing")
    jobs.add_json(parser)
    given = parser.parse_args(arguments)
    try:
        sizes = message_sizes(given.begin, given.end, given.factor, 1)
    except ValueError as error:
        parser.error(str(error))
    if wrong := [n for n in given.channels if n > CHANNELS]:
        parser.error(f"--channels: expected at most {CHANNELS}, got {wrong[0]}")
    if wrong := [n for n in given.warps if n not in (1, 2, 4, 8, 16, 32)]:
        parser.error(f"--warps: expected some of 1, 2, 4, 8, 16, 32; got {wrong[0]}")
    if not given.dry_run and given.output is None:
        parser.error("-o FILE is needed: where the table goes (or --dry-run)")
    jobs.require_directory(parser, given.json)
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
    return Options(
        sizes=sizes,
        algorithms=given.algorithms,
        channels=given.channels,
        warps=given.warps,
        peers=given.peers,
        launches=given.launches,
        in_place=given.in_place,
        margin=given.margin,
        iterations=given.iters,
        warmup=given.warmup,
        output=given.output,
        dry_run=given.dry_run,
        json=given.json,
    )


# ---------------------------------------------------------------------- measuring


def _candidates(options: Options, nbytes: int, topology: Topology, ll_bytes: int) -> list[Candidate]:
    """All that is measured of one size."""
    found = []
    for in_place in (False, True) if options.in_place else (False,):
        found += candidates(
            nbytes,
            topology,
            in_place=in_place,
            ll_bytes=ll_bytes,
            algorithms=options.algorithms,
            channels=options.channels,
            warps=options.warps,
        )
    return found + [Candidate(name) for name in options.peers]


class _Job(benchmark.Job):
    """The all-gather benchmark, with candidates as its subjects."""

    def __init__(self, options: Options) -> None:
        super().__init__(
            benchmark.Options(
                sizes=options.sizes,
                dtype=torch.uint8,
                algorithms=[IN_PLACE] if options.in_place else [],
                peers=options.peers,
                launches=options.launches,
                straggler=False,
                iterations=options.iterations,
                warmup=options.warmup,
                json=None,
            )
        )
        self.tuned = options
        self.known: dict[str, Candidate] = {}

    def subjects(
        self, nbytes: int, context: CollectiveContext, storage: torch.Tensor | None
    ) -> list[benchmark.Measurement]:
        """Every candidate; calls out of place share their buffers."""
        make = partial(self.buffers, nbytes)
        shared = make(None)
        in_place = None if storage is None else make(storage)
        entries = []
        for candidate in _candidates(self.tuned, nbytes, self.topology, context.ll_bytes):
            self.known[candidate.name] = candidate
            if candidate.algorithm == HANDED_OVER:
                subject, problem = self.agree(
                    "make nccl", lambda: PEERS[HANDED_OVER](lambda allocate, separate=False: shared, self.device), True
                )
                entries.append(benchmark.Measurement(candidate.name, True, "", subject, problem))
                continue
            plan = candidate.plan(nbytes, self.topology, context.ll_bytes)
            buffers = in_place if candidate.in_place else shared
            assert buffers is not None
            subject = Subject(candidate.name, False, buffers, _call(plan, context, buffers, candidate.in_place))
            entries.append(benchmark.Measurement(candidate.name, False, "", subject))
        return entries


def _call(plan: Plan, context: CollectiveContext, buffers: Buffers, in_place: bool) -> Callable[[int], object]:
    def call(i: int) -> None:
        all_gather(buffers.inputs[i], context, buffers.results[i], algorithm=plan)

    def call_in_place(i: int) -> None:
        all_gather_in_place(buffers.results[i], context, algorithm=plan)

    return call_in_place if in_place else call


def _source(arguments: Sequence[str], owner: runtime.Runtime) -> str:
    date = datetime.now(timezone.utc).date().isoformat()
    command = command_line("tune", arguments, owner.world_size, owner.simulated)
    versions = f"tdcoll {tdcoll.__version__}, PyTorch {torch.__version__}, Triton {triton.__version__}"
    return f"{date}, {versions}: {command}"


def part_of(output: Path) -> Path:
    """Where the rows of an unfinished table are."""
    return output.with_name(output.name + ".part")


_SETTINGS = ("algorithms", "channels", "warps", "peers", "launches", "in_place", "iterations", "warmup")
"""Options that must be the same for all rows of one table."""


class _Progress:
    """Keeps and reports what has been measured. Rank 0 does so; on the others it is empty and writes nothing.

    Args:
        head: what a file of rows begins with.
        circumstances: machine, versions and settings, by name; rows of others do not count.
    """

    def __init__(self, options: Options, job: _Job, head: dict[str, Any], circumstances: dict[str, Any]) -> None:
        self._options, self._job, self._head = options, job, head
        self._circumstances = json.loads(json.dumps(circumstances))

    def begin(self) -> None:
        """Say how much there is to measure."""
        options = self._options
        total = sum(map(self._measurements, options.sizes)) * len(options.launches)
        many = f"{len(options.sizes)} sizes, {total} measurements of {options.iterations} iterations"
        _say(f"{self._job.topology.describe()}: {many}")

    def resume(self) -> tuple[dict[str, Candidate], list[Row]]:
        """Candidates and rows of a run that was cut off; none if there was no such run."""
        part = part_of(self._output)
        if not part.exists():
            return {}, []
        head, rows = files.load(part)
        before = head.get("circumstances", {})
        names = sorted({*before, *self._circumstances})
        differ = [name for name in names if before.get(name) != self._circumstances.get(name)]
        if differ:
            said = "; ".join(f"{name}: {before.get(name)} then, {self._circumstances.get(name)} now" for name in differ)
            _say(f"{part} is of other circumstances ({said}): all sizes are measured again")
            return {}, []
        known = {name: Candidate(**fields) for name, fields in head["candidates"].items()}
        sizes = sorted({row.bytes_per_rank for row in rows})
        _say(f"goes on after {', '.join(map(format_bytes, sizes))} per rank, which are in {part}")
        return known, rows

    @property
    def _output(self) -> Path:
        assert self._options.output is not None
        return self._options.output

    def save(self, rows: Sequence[Row], source: str, finished: bool) -> None:
        """Write the table that follows from ``rows``; and them, unless all sizes are there."""
        job, part = self._job, part_of(self._output)
        if not finished:
            known = {name: dataclasses.asdict(candidate) for name, candidate in job.known.items()}
            files.save(part, {**self._head, "circumstances": self._circumstances, "candidates": known}, rows)
        before = Table.load(self._output) if self._output.exists() else Table(())
        architecture = architectures(job.device)[0]
        made = sections(
            rows, job.known, job.topology, architecture, self._options.margin, source, None if finished else before
        )
        files.write_whole(self._output, before.with_sections(made).text())
        if finished:
            part.unlink(missing_ok=True)

    def say(self, nbytes: int, rows: Sequence[Row], seconds: float) -> None:
        """One line for a size that took so long, with the time that is left if every measurement takes as long."""
        options, job = self._options, self._job
        said = verdict(nbytes, rows, job.known, job.topology, options.margin)
        done = {row.bytes_per_rank for row in rows}
        left = [size for size in options.sizes if size not in done]
        each = seconds / self._measurements(nbytes)
        remaining = f", about {duration(each * sum(map(self._measurements, left)))} left" if left else ""
        number_of = f"{len(options.sizes) - len(left)} of {len(options.sizes)} sizes"
        _say(f"{format_bytes(nbytes)} per rank: {said} [{number_of}, {duration(seconds)}{remaining}]")

    def _measurements(self, nbytes: int) -> int:
        topology = self._job.topology
        return len(
            _candidates(
                self._options, nbytes, topology, min(nbytes, flagged_bytes(topology.world_size, topology.n_nodes))
            )
        )


def _say(text: str) -> None:
    print(f"tune: {text}", flush=True)


def measure(options: Options, arguments: Sequence[str], show: Callable[[Row], None]) -> list[Row]:
    """Measure what an earlier run has not, and write the table after every size. Collective."""
    job = _Job(options)
    if job.topology.ranks_per_node is None:
        raise ValueError(f"tables are for nodes of one size; this job has {job.topology.describe()}")
    source, facts = _source(arguments, job.owner), provenance()
    settings = {name: getattr(options, name) for name in _SETTINGS}
    head = {"benchmark": "tune", "command": source, "started": source.partition(",")[0], "provenance": facts}
    circumstances = {**facts, **settings, "ranks": job.topology.describe(), "architectures": architectures(job.device)}
    progress = _Progress(options, job, head, circumstances)
    writes = job.owner.rank == 0 and options.output is not None
    if writes:
        progress.begin()
    known, rows = job.gather("tune: what is measured already", progress.resume() if writes else ({}, []))[0]
    job.known.update(known)
    done = {row.bytes_per_rank for row in rows}
    for row in rows:
        show(row)
    storage = benchmark.in_place_storage(job)
    with LineUp() as line_up:
        for nbytes in options.sizes:
            if nbytes in done:
                continue
            began = time.monotonic()
            for row in benchmark.measure_size(job, nbytes, storage, line_up, None):
                rows.append(row)
                show(row)
            if writes:
                progress.save(rows, source, finished=False)
                progress.say(nbytes, rows, time.monotonic() - began)
    if storage is not None:
        tdcoll.free(storage)
    if writes:
        progress.save(rows, source, finished=True)
    return rows


def listing(options: Options, topology: Topology, ll: bool) -> str:
    """What would be measured, as text.

    Args:
        ll: whether the ranks of each node could store to each other's memory, and nodes are of one size.
    """
    lines, total = [], 0
    for nbytes in options.sizes:
        ll_bytes = min(nbytes, flagged_bytes(topology.world_size, topology.n_nodes)) if ll else -1
        found = _candidates(options, nbytes, topology, ll_bytes)
        total += len(found) * len(options.launches)
        lines.append(f"{format_bytes(nbytes)} per rank: {', '.join(candidate.name for candidate in found)}")
    what = f"{total} measurements of {options.iterations} iterations, {' and '.join(options.launches)}"
    return "\n".join([f"tune, {topology.describe()}: {what}", *lines])


def main(arguments: Sequence[str]) -> int:
    """The command; its exit status: 1 if a result was wrong, 2 where nothing can be measured."""
    options = parse(arguments)
    if options.dry_run:
        tdcoll.initialize()
        owner = runtime.current()
        topology = owner.topology()
        if owner.rank == 0:
            print(listing(options, topology, topology.ranks_per_node is not None), flush=True)
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

    def rows(simulated: bool, show: Callable[[Row], None]) -> list[Row]:
        return measure(options, arguments, show)

    in_place = [IN_PLACE] if options.in_place else []
    status = jobs.run(
        "tune",
        arguments,
        options.json,
        title="candidates",
        heap_bytes=lambda world: benchmark.heap_bytes(options.sizes, world, in_place),
        columns=None,
        measure=rows,
    )
    if os.environ.get("RANK", "0") == "0":
        print(f"tune: wrote {options.output}; use it with TDCOLL_TUNING={options.output}", flush=True)
    return status
