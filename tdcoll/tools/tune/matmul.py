# SPDX-License-Identifier: Apache-2.0
"""Measure the tuning tables of matmuls that communicate: ``python -m tdcoll run -m tdcoll tune
matmul --help``.

For each number of rows all candidates are measured as :mod:`tdcoll.tools.tune.command` does it:
algorithms, and for those of one kernel several tiles and numbers of thread blocks that send. The
policy decides by rows, so depth and columns are those of a typical layer of yours.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch

import tdcoll
from tdcoll import fused
from tdcoll.base.limits import MATMULS
from tdcoll.calls.context import CollectiveContext
from tdcoll.calls.plan import Facts
from tdcoll.calls.tuning import Entry, Section
from tdcoll.fused.matmul import policy
from tdcoll.fused.matmul.operation import machine_of
from tdcoll.fused.matmul.policy import (
    COMPOSED,
    COPIED,
    GATHER,
    REDUCE,
    SCATTER,
    MatmulPlan,
    MatmulShape,
)
from tdcoll.language import INTERPRETED
from tdcoll.runtime.topology import Topology
from tdcoll.tools.measure.benchmark import Benchmark, Show, run
from tdcoll.tools.measure.engine import Errors, Variant, Workload
from tdcoll.tools.measure.results import Columns, Row, fact
from tdcoll.tools.options import JobParser, comma_list, new_file, one_of, whole
from tdcoll.tools.setenv import COMMAND
from tdcoll.tools.tune.tuner import pick
from tdcoll.tools.tune.writing import read_output, saving, source_of

_TILES = {
    GATHER: (
        ((64, 128, 128), 4, 4),
        ((128, 128, 64), 4, 4),
        ((128, 128, 64), 4, 8),
        ((128, 256, 64), 3, 8),
        ((128, 256, 64), 4, 8),
    ),
    SCATTER: (
        ((64, 128, 128), 4, 4),
        ((128, 128, 64), 4, 8),
        ((128, 256, 64), 3, 8),
    ),
    REDUCE: (
        ((16, 64, 256), 4, 4),
        ((64, 64, 128), 4, 4),
        ((128, 128, 128), 3, 8),
    ),
}
"""Tiles, stages and warps that are tried: those that were fast on an H200, which is what fits into
its shared memory."""

_PUSHERS = (8, 16, 32)
_LAGS = (1, 2)

_LARGEST = 3
"""Operands are whole numbers up to this, so that products of 8192 are exact in fp32."""

_INPUTS = 2


@dataclass(frozen=True)
class MatmulCandidate:
    """A way to make a call; if a field is None, the default decides.

    Attributes:
        algorithm, tile, num_stages, num_warps, pushers, lag: as in
            :class:`~tdcoll.calls.tuning.Entry`.
    """

    algorithm: str
    tile: tuple[int, int, int] | None = None
    num_stages: int | None = None
    num_warps: int | None = None
    pushers: int | None = None
    lag: int | None = None

    @property
    def name(self) -> str:
        """``"fused 128x256x64 3 stages 8 warps 16 pushers"``."""
        words = [self.algorithm]
        if self.tile is not None:
            words.append("x".join(map(str, self.tile)))
            words.append(f"{self.num_stages} stages {self.num_warps} warps")
        if self.pushers is not None:
            words.append(f"{self.pushers} pushers")
        if self.lag is not None:
            words.append(f"lag {self.lag}")
        return " ".join(words)

    def entry(self, up_to: int | None) -> Entry:
        """Return the table's entry with this candidate, for up to ``up_to`` rows."""
        return Entry(up_to, **asdict(self))


Times = dict[int, dict[MatmulCandidate, float]]
"""Microseconds of each candidate by rows, ascending."""


class TunedContext(NamedTuple):
    """Arguments of :class:`~tdcoll.CollectiveContext`."""

    max_bytes_per_rank: int
    lamport_bytes: int


@dataclass(frozen=True)
class MatmulTuner:
    """The choice of plans for one operation on a machine.

    Attributes:
        name: of the operation.
        topology: the ranks, of one node.
        depth, columns: of one rank's matmul.
        machine: multiprocessors, and whether there are stores by descriptors.
    """

    name: str
    topology: Topology
    depth: int
    columns: int
    machine: tuple[int, bool]

    def shape(self, rows: int) -> MatmulShape:
        """Return a call, of bf16, as the policy sees it."""
        return MatmulShape(self.name, rows, self.columns, self.depth, 2, 2, False, *self.machine)

    def sizes(self, rows: int) -> TunedContext:
        """Return the sizes of a context on which every candidate can be made."""
        world = self.topology.world_size
        plans = [self.plan(candidate, rows) for candidate in self._all(rows)]
        nbytes = [policy.inbox_bytes(self.shape(rows), plan, world) for plan in plans]
        if self.name == REDUCE:
            return TunedContext(self.shape(rows).nbytes, max(nbytes))
        segment = self.shape(rows).nbytes // world
        return TunedContext(max(segment, *nbytes), 0)

    def plan(self, candidate: MatmulCandidate, rows: int) -> MatmulPlan:
        """Return the candidate's plan."""
        shape = self.shape(rows)
        tuned = replace(shape, measured=candidate.entry(None))
        return policy.plan_of(tuned, self.topology.world_size, candidate.algorithm, False)

    def _all(self, rows: int) -> list[MatmulCandidate]:
        found = []
        for algorithm in policy.ALGORITHMS[self.name]:
            if algorithm != COMPOSED and self.name == REDUCE and rows > policy.REDUCED_ROWS:
                continue
            found.append(MatmulCandidate(algorithm))
            if algorithm == COMPOSED:
                continue
            for tile, stages, warps in _TILES[self.name]:
                tiled = partial(MatmulCandidate, algorithm, tile, stages, warps)
                if algorithm == COPIED:
                    found.append(tiled())
                elif self.name == GATHER:
                    found += [tiled(pushers=count) for count in _PUSHERS]
                elif self.name == SCATTER:
                    found += [tiled(lag=lag) for lag in _LAGS]
                else:
                    found.append(tiled())
        return found

    def candidates(self, rows: int) -> list[MatmulCandidate]:
        """List different supported plans, for each algorithm the default's first; none if there is
        no choice, or the ranks have no equal shares of the rows."""
        by_plan: dict[MatmulPlan, MatmulCandidate] = {}
        if self.name != REDUCE and rows % self.topology.world_size:
            return []
        sizes = self.sizes(rows)
        facts = Facts(
            0,
            self.topology,
            stores=True,
            lamport_bytes=sizes.lamport_bytes,
            capacity=sizes.max_bytes_per_rank,
            chunks=policy.CHUNKS,
        )
        for candidate in self._all(rows):
            plan = self.plan(candidate, rows)
            if policy.problem_of(self.shape(rows), plan, facts) is None:
                by_plan.setdefault(plan, candidate)
        return list(by_plan.values()) if len(by_plan) > 1 else []

    def default(self, rows: int) -> MatmulCandidate:
        """Return what is taken without a table, if the context is large enough."""
        facts = Facts(
            0,
            self.topology,
            stores=True,
            lamport_bytes=1 << 40,
            capacity=1 << 40,
            chunks=policy.CHUNKS,
        )
        plan, _ = policy.choose(self.shape(rows), facts, "auto", False, False)
        return MatmulCandidate(plan.algorithm)

    def section(self, rows: Sequence[Row], architecture: str, source: str) -> Section | None:
        """Return the table's section from the rows whose results were right; None without any.

        An entry holds up to the largest number of rows that it was picked for. Above all entries
        the default decides.
        """
        times: Times = {}
        for row in sorted(rows, key=lambda row: row.facts["rows"]):
            values = dict(row.facts["candidate"])
            if values["tile"] is not None:
                values["tile"] = tuple(values["tile"])  # a list, if the row is from a file
            if row.check == "ok" and row.median_us:
                measured = times.setdefault(row.facts["rows"], {})
                measured[MatmulCandidate(**values)] = row.median_us
        picks: list[tuple[int, MatmulCandidate]] = []
        for count, of_candidates in times.items():
            before = picks[-1][1] if picks else None
            picks.append((count, pick(of_candidates, before, self.default(count))))
        entries = [
            candidate.entry(count)
            for place, (count, candidate) in enumerate(picks)
            if place == len(picks) - 1 or picks[place + 1][1] != candidate
        ]
        if not entries:
            return None
        world = self.topology.world_size
        return Section(architecture, self.name, world, 1, False, tuple(entries), source)


class MatmulTuneSize(NamedTuple):
    """An operation to tune, and the rows of all ranks."""

    tuner: MatmulTuner
    rows: int


class TuneMatmul(Benchmark):
    """The command, as a benchmark of candidates."""

    name = "tune matmul"
    columns = Columns(size={"operation": fact("{operation}"), "rows": fact("{rows:,}")})

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> argparse.Namespace:
        parser = _parser()
        options = parser.parse_args(arguments)
        read_output(parser, options.output)
        if options.depth % 8:
            parser.error(f"--depth must be a multiple of 8, got {options.depth}")
        options.arguments = list(arguments)
        return options

    @classmethod
    def heap_bytes(cls, options: argparse.Namespace, world: int) -> int:
        topology = Topology.of(0, range(world), [0] * world)
        most = 0
        for name in options.operation:
            tuner = MatmulTuner(name, topology, options.depth, options.columns, (1, True))
            for rows in options.rows:
                sizes = tuner.sizes(rows)
                most = max(most, 2 * sizes.max_bytes_per_rank + 3 * sizes.lamport_bytes)
        return world * most + (64 << 20)

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        topology = self.ranks.topology
        if topology.n_nodes != 1:
            raise ValueError(
                f"matmuls are tuned on one node, between which there is no choice; this job has "
                f"{topology.describe()}"
            )
        machine = machine_of(self.ranks.device)
        self._tuners = [
            MatmulTuner(name, topology, options.depth, options.columns, machine)
            for name in options.operation
        ]
        self._source = source_of(self.name, options.arguments, self.ranks.owner)

    def sizes(self) -> Iterator[MatmulTuneSize]:
        for tuner in self._tuners:
            for rows in sorted(self.options.rows):
                if tuner.candidates(rows):
                    yield MatmulTuneSize(tuner, rows)

    @contextlib.contextmanager
    def variants(
        self, size: MatmulTuneSize
    ) -> Iterator[tuple[list[Variant], Callable[[], object]]]:
        """Yield every candidate, in CUDA graphs. They share operands and a context."""
        tuner, rows = size
        sizes = tuner.sizes(rows)
        with CollectiveContext(
            max_bytes_per_rank=sizes.max_bytes_per_rank,
            lamport_bytes=sizes.lamport_bytes,
            chunks=policy.CHUNKS,
        ) as context:
            calls = _Calls.of(tuner, rows, context)
            variants = [
                Variant(
                    name=candidate.name,
                    is_baseline=False,
                    make=partial(calls.workload, tuner.plan(candidate, rows)),
                    launches=["graph"],
                    facts={"candidate": asdict(candidate)},
                )
                for candidate in tuner.candidates(rows)
            ]
            yield variants, context.check

    def facts(self, size: MatmulTuneSize) -> dict[str, Any]:
        tuner = size.tuner
        return {
            "operation": tuner.name,
            "rows": size.rows,
            "depth": tuner.depth,
            "columns": tuner.columns,
            "dtype": "bfloat16",
        }

    def measure(self, show: Show) -> list[Row]:
        """Write the table after every size. Collective."""
        return super().measure(saving(show, self.options.output, self.ranks, self._sections))

    def _sections(self, rows: Sequence[Row], architecture: str) -> list[Section]:
        found = []
        for tuner in self._tuners:
            own = [row for row in rows if row.facts["operation"] == tuner.name]
            section = tuner.section(own, architecture, self._source)
            if section is not None:
                found.append(section)
        return found


@dataclass(frozen=True)
class _Calls:
    """The calls of one size, with what they share.

    Attributes:
        inputs: ``x`` of this rank, for each number of a call.
        weight: this rank's.
        expected: the exact results.
    """

    name: str
    inputs: Sequence[torch.Tensor]
    weight: torch.Tensor
    expected: Sequence[torch.Tensor]
    context: CollectiveContext

    @staticmethod
    def of(tuner: MatmulTuner, rows: int, context: CollectiveContext) -> _Calls:
        world, rank = context.world_size, context.rank
        own_rows = rows // world if tuner.name == GATHER else rows
        device = tdcoll.device()

        def operand(key: int, *shape: int) -> torch.Tensor:
            numbers = torch.Generator().manual_seed(key)
            made = torch.randint(-_LARGEST, _LARGEST + 1, shape, generator=numbers)
            return made.to(device, torch.bfloat16)

        def x_of(number: int, of_rank: int) -> torch.Tensor:
            return operand(100 * number + of_rank, own_rows, tuner.depth)

        def weight_of(of_rank: int) -> torch.Tensor:
            return operand(50 + of_rank, tuner.columns, tuner.depth)

        inputs = []
        expected = []
        for number in range(_INPUTS):
            every = [x_of(number, one) for one in range(world)]
            inputs.append(every[rank])
            if tuner.name == GATHER:
                result = torch.cat(every).float() @ weight_of(rank).float().t()
            else:
                result = torch.zeros(rows, tuner.columns, device=device)
                for one, x in enumerate(every):
                    part = x.float() @ weight_of(one).float().t()
                    result += part.bfloat16().float()
                if tuner.name == SCATTER:
                    result = result.chunk(world)[rank]
            expected.append(result.bfloat16())
        return _Calls(tuner.name, inputs, weight_of(rank), expected, context)

    def workload(self, plan: MatmulPlan) -> Workload:
        """Return the calls by a plan."""
        function = getattr(fused, self.name)

        def call(number: int) -> torch.Tensor:
            made: torch.Tensor = function(
                self.inputs[number], self.weight, ctx=self.context, algorithm=plan
            )
            return made

        def errors(number: int, result: torch.Tensor) -> Errors:
            wrong = int((result != self.expected[number]).sum())
            return wrong, f"call {number}: {wrong} of {result.numel()} elements"

        return Workload(call=call, errors=errors, n_inputs=_INPUTS, launch_calls=(20, 21))


def _parser() -> JobParser:
    """Return the parser of the command line."""
    parser = JobParser(
        prog=f"{COMMAND} [--nproc N] -m tdcoll tune matmul",
        description="Measures which algorithm and which tile of a matmul that communicates is the "
        "fastest on this machine by rows, and writes a table for TDCOLL_TUNING.",
        epilog=f"example: {COMMAND} -m tdcoll tune matmul --depth 8192 --columns 3584 -o mine.json",
    )

    def add(*names: str, default: str, text: str, **more: Any) -> None:
        parser.add_argument(*names, default=default, help=f"{text} (default {default})", **more)

    small = INTERPRETED
    add(
        "--operation",
        type=comma_list(one_of(MATMULS)),
        default=",".join(MATMULS),
        metavar="A,B",
        text=f"some of {', '.join(MATMULS)}",
    )
    add(
        "--rows",
        type=comma_list(whole(1)),
        default="16" if small else "16,64,128,256,512,1024,2048,4096,8192",
        metavar="N,N",
        text="rows of all ranks",
    )
    add(
        "--depth", type=whole(8), default="32" if small else "4096", text="depth of a rank's matmul"
    )
    add(
        "--columns",
        type=whole(1),
        default="32" if small else "4096",
        text="columns of a rank's matmul",
    )
    add("--iterations", type=whole(2), default="40", metavar="N", text="timed launches of each")
    add("--warmup", type=whole(1), default="5", metavar="N", text="untimed launches before")
    parser.add_argument("--json", type=new_file, metavar="FILE", help="write the candidates' rows")
    parser.add_argument(
        "-o",
        "--output",
        type=new_file,
        metavar="FILE",
        required=True,
        help="the table, written after every size; if it exists, its other sections are kept",
    )
    return parser


def main(arguments: Sequence[str]) -> int:
    """Run the command; return 1 if a result was wrong."""
    return run(TuneMatmul, arguments)
