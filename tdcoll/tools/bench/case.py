# SPDX-License-Identifier: Apache-2.0
"""A :class:`Case` holds the parts that differ between benchmarks. The command around it is the same for all."""

from __future__ import annotations

import argparse
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
from tdcoll.tools.bench.engine import Contender, Ranks, Wanted, measure, simulate
from tdcoll.tools.bench.options import Parser
from tdcoll.tools.bench.provenance import command_line, provenance
from tdcoll.tools.bench.rows import LAYOUTS, Row, line_of, save
from tdcoll.tools.bench.timing import LineUp
from tdcoll.tools.setenv import LAUNCHER

Show = Callable[[Sequence[Row]], object]
"""Receives the rows of a size when they are known."""

AllWanted = AbstractContextManager[tuple[Sequence[Wanted], Callable[[], object]]]
"""The subjects that are measured side by side, and a check for expired waits."""


class Case(Ranks, ABC):
    """A benchmark that measures several subjects side by side for each size.

    Attributes:
        benchmark: its name on the command line and in files.
    """

    benchmark: ClassVar[str]
    options: argparse.Namespace

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.options = options

    @classmethod
    @abstractmethod
    def parse(cls, arguments: Sequence[str]) -> argparse.Namespace:
        """Return the options from the command line; if one is wrong, end the process with status 2."""

    @classmethod
    def heap_bytes(cls, options: argparse.Namespace, world: int) -> int:
        """Return the bytes of symmetric heap that it needs."""
        return 1 << 20

    @abstractmethod
    def sizes(self) -> Iterator[Any]:
        """Return the sizes, which are the same on all ranks."""

    @abstractmethod
    def wanted(self, size: Any) -> AllWanted:
        """Yield the subjects of one size. Collective."""

    @abstractmethod
    def facts(self, size: Any) -> dict[str, Any]:
        """Return the facts of all rows of one size."""

    def measure_size(self, size: Any, line_up: LineUp | None) -> list[Row]:
        """Return the rows of one size, from GPUs or, if ``line_up`` is None, from the simulator. Collective."""
        entries, subjects = [], []
        with self.wanted(size) as (every, look):
            for one in every:
                subject, problem = self.agree(f"make {one.name}", one.make, one.peer)
                subjects += [] if subject is None else [subject]
                for launch in ["simulator"] if line_up is None else one.launches:
                    row = Row(
                        ranks=self.topology.world_size,
                        nodes=self.topology.n_nodes,
                        algorithm=one.name,
                        peer=one.peer,
                        launch=launch,
                        check="not run" if problem else "ok",
                        note=problem,
                        facts={**self.facts(size), **one.facts},
                    )
                    entries.append(Contender(row, subject))
            if line_up is None:
                for entry in entries:
                    simulate(self, entry)
                    look()
            else:
                measure(self, entries, line_up, self.options.iterations, self.options.warmup, look)
            for subject in subjects:
                subject.close()
        return [entry.row for entry in entries]

    def measure(self, show: Show) -> list[Row]:
        """Return the rows of all sizes; call ``show`` with those of each size when they are known. Collective."""
        rows: list[Row] = []
        with contextlib.nullcontext() if self.owner.simulated else LineUp() as line_up:
            for size in self.sizes():
                rows += (found := self.measure_size(size, line_up))
                show(found)
        return rows


def run(case: type[Case], arguments: Sequence[str]) -> int:
    """Join, measure, show, write, leave. Return 1 if a result was wrong; exit with 2 if ranks share GPUs.

    Rows are written after every size.
    """
    options = case.parse(arguments)
    if lifecycle.may_share_gpus():
        Parser(f"bench {case.benchmark}").error(
            f"TDCOLL_SHARE_GPUS ({LAUNCHER} --share-gpus) or initialize(share_gpus=True): expected neither, got a job "
            "whose ranks may share GPUs, where times mean nothing and gloo takes NCCL's place. Take as many ranks as "
            "GPUs, or --simulate"
        )
    needed = case.heap_bytes(options, int(os.environ.get("WORLD_SIZE", "1")))
    tdcoll.initialize(heap_bytes=max(environment.heap_bytes(INTERPRETED), needed))
    owner = runtime.current()
    started = datetime.now(timezone.utc).isoformat(timespec="seconds")
    command = command_line(case.benchmark, arguments, owner.world_size, owner.simulated)
    head = {"benchmark": case.benchmark, "command": command, "started": started, "provenance": provenance()}
    columns = LAYOUTS[case.benchmark].columns
    visible = owner.rank == 0
    if visible:
        print(f"# {owner.topology().describe()}: {command}\n{line_of(columns)}", flush=True)
    stream: Any = contextlib.nullcontext() if owner.simulated else torch.cuda.stream(torch.cuda.Stream())
    shown: list[Row] = []

    def show(rows: Sequence[Row]) -> None:
        shown.extend(rows)
        for row in rows if visible else ():
            print(line_of(columns, row), flush=True)
        if options.json is not None and visible:
            save(options.json, head, shown)

    with stream:
        rows = case(options).measure(show)
    tdcoll.finalize()
    return 1 if any(row.check == "WRONG" for row in rows) else 0
