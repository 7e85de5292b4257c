# SPDX-License-Identifier: Apache-2.0
"""A :class:`Case` says what a benchmark has of its own. The command around it is the same for all."""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, ClassVar

import torch

import tdcoll
from tdcoll import environment, runtime
from tdcoll.bench import rows as files
from tdcoll.bench.engine import Entry, Plan, Subject, measure_entries, simulate_entry
from tdcoll.bench.job import Job
from tdcoll.bench.options import Parser
from tdcoll.bench.provenance import command_line, provenance
from tdcoll.bench.rows import Measured, with_ratios
from tdcoll.bench.table import Table
from tdcoll.bench.timing import LineUp, Straggler
from tdcoll.language import INTERPRETED
from tdcoll.runtime import lifecycle

__all__ = ["Benchmark", "Case", "Show", "Wanted", "refuse_shared_gpus", "run"]

_SAVE_AFTER_S = 5.0
"""A job writes its file this often, so one that is ended early has lost no more."""

Show = Callable[[Measured], object]
"""Takes a row as soon as it is known."""


@dataclass(frozen=True)
class Wanted:
    """Something that was asked for, of one size.

    Attributes:
        name, peer: of its rows.
        make: makes the subject; raises what keeps it from running. Collective.
        launches: in which ways.
        fields: what its rows have besides.
    """

    name: str
    peer: bool
    make: Callable[[], Subject]
    launches: Sequence[str]
    fields: dict[str, Any] = field(default_factory=dict)


class Benchmark(Job, ABC):
    """One benchmark, on the ranks of this job.

    Attributes:
        benchmark: its name on the command line and in files.
        columns: of the table, from the peers and whether there are no times; None: it prints what there is to see.
        options: of the command line.
    """

    benchmark: ClassVar[str]
    columns: ClassVar[Any] = None
    options: argparse.Namespace

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.options = options

    @classmethod
    @abstractmethod
    def parse(cls, arguments: Sequence[str]) -> argparse.Namespace:
        """Options from the command line; a wrong one ends the process with status 2."""

    @classmethod
    def title(cls, options: argparse.Namespace) -> str:
        """Say what is measured with."""
        return ""

    @classmethod
    def heap_bytes(cls, options: argparse.Namespace, world: int) -> int:
        """Symmetric heap that it needs."""
        return 1 << 20

    @abstractmethod
    def measure(self, show: Show) -> list[Measured]:
        """Rows of everything; each goes to ``show`` as soon as it is known. Collective."""


class Case(Benchmark):
    """A benchmark of sizes, of each of which several subjects are measured side by side."""

    @abstractmethod
    def sizes(self) -> Iterator[Any]:
        """Everything that is measured side by side, alike on all ranks."""

    @abstractmethod
    def wanted(self, size: Any) -> AbstractContextManager[tuple[Sequence[Wanted], Callable[[], object]]]:
        """Give what to measure of one size, and a check for expired waits. Collective."""

    @abstractmethod
    def row(self, size: Any, entry: Entry, /, **common: Any) -> Measured:
        """The entry's row, without times."""

    def close(self) -> None:
        """Give back what was held for all sizes. Collective."""

    @property
    def straggler(self) -> bool:
        """True if each iteration delays a random rank."""
        return getattr(self.options, "straggler", False)

    def measure_size(
        self,
        size: Any,
        line_up: LineUp | None,
        straggler: Straggler | None = None,
        wanted: Callable[[Any], AbstractContextManager[tuple[Sequence[Wanted], Callable[[], object]]]] | None = None,
    ) -> list[Measured]:
        """Rows of one size, from GPUs, or, without ``line_up``, from the simulator. Collective.

        Args:
            wanted: in the place of :meth:`wanted`.
        """
        entries, subjects = [], []
        with (wanted or self.wanted)(size) as (every, look):
            for one in every:
                subject, problem = self.agree(f"make {one.name}", one.make, one.peer)
                subjects += [] if subject is None else [subject]
                for launch in ["simulator"] if line_up is None else one.launches:
                    entries.append(Entry(one.name, one.peer, launch, subject, problem, one.fields))
            if line_up is None:
                for entry in entries:
                    simulate_entry(self, entry)
                    look()
            else:
                plan = Plan(self.options.iterations, self.options.warmup, straggler)
                measure_entries(self, entries, plan, line_up, look)
            rows = []
            for entry in entries:
                row = self.row(size, entry, **entry.common(self, self.straggler))
                rows.append(row if entry.summary is None else row.timed(entry.summary, entry.wall_us))
            for subject in subjects:
                subject.close()
        return with_ratios(rows)

    def measure(self, show: Show) -> list[Measured]:
        """Rows of all sizes. Collective."""
        straggler = Straggler(self.topology.rank, self.topology.world_size) if self.straggler else None
        rows: list[Measured] = []
        with contextlib.nullcontext() if self.owner.simulated else LineUp() as line_up:
            for size in self.sizes():
                found = self.measure_size(size, line_up, straggler)
                rows += found
                for row in found:
                    show(row)
        self.close()
        return rows


# ---------------------------------------------------------------------- the command


def refuse_shared_gpus(benchmark: str) -> None:
    """End with status 2 where ranks may share GPUs."""
    if lifecycle.may_share_gpus():
        Parser(prog=f"bash launch.sh [--nproc N] -m tdcoll bench {benchmark}", usage="%(prog)s [options]").error(
            "TDCOLL_SHARE_GPUS (launch.sh --share-gpus) or initialize(share_gpus=True): expected neither, got a job "
            "whose ranks may share GPUs, where times mean nothing and gloo takes NCCL's place. Take as many ranks as "
            "GPUs, or --simulate"
        )


def run(case: type[Benchmark], arguments: Sequence[str], options: argparse.Namespace | None = None) -> int:
    """Join, measure, show, write, leave. The exit status: 1 if a result was wrong; ends with 2 on shared GPUs.

    Rows are written in the end and every few seconds.

    Args:
        arguments: the command line; ``options``: what was read from it, if it has been.
    """
    options = case.parse(arguments) if options is None else options
    refuse_shared_gpus(case.benchmark)
    needed = case.heap_bytes(options, int(os.environ.get("WORLD_SIZE", "1")))
    tdcoll.initialize(heap_bytes=max(environment.heap_bytes(INTERPRETED), needed))
    owner = runtime.current()
    started = datetime.now(timezone.utc).isoformat(timespec="seconds")
    command = command_line(case.benchmark, arguments, owner.world_size, owner.simulated)
    head = {"benchmark": case.benchmark, "command": command, "started": started, "provenance": provenance()}
    columns = () if case.columns is None else case.columns(getattr(options, "peers", ()), owner.simulated)
    heading = f"{case.benchmark}, {owner.topology().describe()}, {case.title(options)}"
    table = Table(heading, columns, case.columns is not None and owner.rank == 0)
    stream: Any = contextlib.nullcontext() if owner.simulated else torch.cuda.stream(torch.cuda.Stream())
    json = options.json if owner.rank == 0 else None
    shown: list[Measured] = []
    saved = time.monotonic()

    def show(row: Measured) -> None:
        nonlocal saved
        table.add(row)
        shown.append(row)
        if json is not None and time.monotonic() - saved > _SAVE_AFTER_S:
            files.save(json, head, shown)
            saved = time.monotonic()

    with table, stream:
        rows = case(options).measure(show)
    if json is not None:
        files.save(json, head, rows)
    tdcoll.finalize()
    return 1 if any(row.check == "WRONG" for row in rows) else 0
