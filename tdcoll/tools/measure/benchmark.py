# SPDX-License-Identifier: Apache-2.0
"""An :class:`Experiment` is what a command measures or checks; :func:`run` is the command.

A :class:`Benchmark` is an experiment that times several variants side by side.
"""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import datetime, timezone
from typing import Any, ClassVar

import torch

import tdcoll
from tdcoll import runtime
from tdcoll.base import environment
from tdcoll.job import lifecycle
from tdcoll.language import INTERPRETED
from tdcoll.tools.measure.engine import JobRanks, Measurement, Variant, measure
from tdcoll.tools.measure.provenance import command_line, provenance
from tdcoll.tools.measure.results import Columns, Row, save
from tdcoll.tools.measure.timing import LineUp
from tdcoll.tools.options import exit_with_error
from tdcoll.tools.setenv import LAUNCHER

Show = Callable[[Sequence[Row]], object]
"""Receives the rows of a size when they are known."""

Variants = AbstractContextManager[tuple[Sequence[Variant], Callable[[], object]]]
"""What is measured side by side, and a function that raises if a wait has expired."""


class Experiment(ABC):
    """An experiment whose findings are rows. An instance is made in a job, by all ranks.

    Attributes:
        name: the experiment's name on the command line and in files.
        columns: the columns of its rows.
        shares_gpus: whether it also runs if ranks share GPUs.
        options: its options, with at least ``json``.
        ranks: the ranks of the job.
    """

    name: ClassVar[str]
    columns: ClassVar[Columns]
    shares_gpus: ClassVar[bool] = False

    def __init__(self, options: Any) -> None:
        self.options = options
        self.ranks = JobRanks()

    @classmethod
    @abstractmethod
    def parse(cls, arguments: Sequence[str]) -> Any:
        """Return the options of a command line; if one is wrong, end the process with status 2."""

    @classmethod
    def heap_bytes(cls, options: Any, world: int) -> int:
        """Return the bytes of symmetric heap that it needs."""
        return 1 << 20

    @abstractmethod
    def measure(self, show: Show) -> list[Row]:
        """Return all rows. Collective.

        Args:
            show: called with some rows as soon as they are known.
        """


class Benchmark(Experiment):
    """An experiment that measures several variants side by side for each size.

    Attributes:
        options: also has ``iterations`` and ``warmup``.
    """

    @abstractmethod
    def sizes(self) -> Iterator[Any]:
        """Return the sizes, which are the same on all ranks."""

    @abstractmethod
    def variants(self, size: Any) -> Variants:
        """Yield the variants of one size. Collective."""

    @abstractmethod
    def facts(self, size: Any) -> dict[str, Any]:
        """Return the facts of all rows of one size."""

    def measure_size(self, size: Any, line_up: LineUp | None) -> list[Row]:
        """Return the rows of one size. Collective.

        Args:
            line_up: None in the simulator, which has no times.
        """
        measurements = []
        workloads = []
        with self.variants(size) as (variants, check):
            for variant in variants:
                what = f"make {variant.name}"
                workload, problem = self.ranks.agree(what, variant.make, variant.is_baseline)
                if workload is not None:
                    workloads.append(workload)
                for launch in ["simulator"] if line_up is None else variant.launches:
                    row = self._row(size, variant, launch, problem)
                    measurements.append(Measurement(self.ranks, row, workload))
            if line_up is None:
                for measurement in measurements:
                    measurement.simulate()
                    check()
            else:
                measure(measurements, line_up, self.options.iterations, self.options.warmup, check)
            for workload in workloads:
                workload.close()
        return [measurement.row for measurement in measurements]

    def _row(self, size: Any, variant: Variant, launch: str, problem: str | None) -> Row:
        """Return the row of a variant before it is measured.

        Args:
            problem: the reason if the variant can't run here.
        """
        topology = self.ranks.topology
        return Row(
            ranks=topology.world_size,
            nodes=topology.n_nodes,
            algorithm=variant.name,
            peer=variant.is_baseline,
            launch=launch,
            check="not run" if problem else "ok",
            note=problem,
            facts={**self.facts(size), **variant.facts},
        )

    def measure(self, show: Show) -> list[Row]:
        """Return the rows of all sizes, and show those of each size. Collective."""
        rows: list[Row] = []
        simulated = self.ranks.owner.simulated
        with contextlib.nullcontext() if simulated else LineUp() as line_up:
            for size in self.sizes():
                found = self.measure_size(size, line_up)
                rows += found
                show(found)
        return rows


def refuse_shared_gpus(command: str) -> None:
    """End the process with status 2 if the job's ranks may share GPUs.

    Args:
        command: the command of tdcoll, as ``"bench signal"``.
    """
    if lifecycle.may_share_gpus():
        exit_with_error(
            f"{command}: error: TDCOLL_SHARE_GPUS ({LAUNCHER} --share-gpus) or "
            "initialize(share_gpus=True): expected neither, got a job whose ranks may share GPUs, "
            "where times mean nothing and gloo takes NCCL's place. Take as many ranks as GPUs, or "
            "--simulate"
        )


def run(experiment: type[Experiment], arguments: Sequence[str]) -> int:
    """Join, measure, show, write, leave. Return 1 if a result was wrong.

    If ranks share GPUs and the experiment doesn't run then, the process ends with status 2. Rows
    are written whenever some are shown.
    """
    options = experiment.parse(arguments)
    if not experiment.shares_gpus:
        refuse_shared_gpus(experiment.name)
    needed = experiment.heap_bytes(options, int(os.environ.get("WORLD_SIZE", "1")))
    tdcoll.initialize(heap_bytes=max(environment.heap_bytes(INTERPRETED), needed))
    owner = runtime.current()
    command = command_line(experiment.name, arguments, owner.world_size, owner.simulated)
    head = {
        "benchmark": experiment.name,
        "command": command,
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "provenance": provenance(),
    }
    columns = experiment.columns
    is_first = owner.rank == 0
    if is_first:
        print(f"# {owner.topology().describe()}: {command}\n{columns.heading_line()}", flush=True)
    shown: list[Row] = []

    def show(rows: Sequence[Row]) -> None:
        shown.extend(rows)
        if not is_first:
            return
        for row in rows:
            print(columns.line(row), flush=True)
        if options.json is not None:
            save(options.json, head, shown)

    stream: Any = contextlib.nullcontext()
    if not owner.simulated:
        stream = torch.cuda.stream(torch.cuda.Stream())
    with stream:
        rows = experiment(options).measure(show)
    tdcoll.finalize()
    return 1 if any(row.check == "WRONG" for row in rows) else 0
