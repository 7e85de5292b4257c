# SPDX-License-Identifier: Apache-2.0
"""One row of a benchmark's table, and the file that rows are kept in."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tdcoll.bench.arithmetic import Summary, all_gather_bus_bandwidth, ratio

__all__ = ["SCHEMA", "Row", "load", "save", "with_ratios"]

SCHEMA = 1


@dataclass(frozen=True)
class Row:
    """One size, one algorithm, one way to launch it.

    Attributes:
        bytes_per_rank: what one rank contributes.
        ranks, nodes: of the job.
        algorithm: tdcoll's, or the peer's name.
        peer: whether it is a peer's.
        launch: ``"graph"``, ``"eager"`` or ``"simulator"``.
        check: ``"ok"``, ``"WRONG"``, or ``"not run"``, and then ``note`` says why.
        median_us, min_us, p90_us: per call; an iteration takes what its slowest rank took; None: not timed.
        busbw_gbps: bus bandwidth at the median, as nccl-tests defines it.
        ratios: for each peer its median divided by this one.
        note: why it did not run, what was wrong, or what else has to be known.
        calls, iterations: calls timed together (alternating), and how many times.
        straggler: a random rank was delayed in each iteration; times hold what the others waited for it.
        counts: per call, of each rank, what the simulator counted.
    """

    bytes_per_rank: int
    ranks: int
    nodes: int
    algorithm: str
    peer: bool
    launch: str
    check: str
    median_us: float | None = None
    min_us: float | None = None
    p90_us: float | None = None
    busbw_gbps: float | None = None
    ratios: dict[str, float] = field(default_factory=dict)
    note: str | None = None
    calls: tuple[int, ...] = ()
    iterations: int = 0
    straggler: bool = False
    counts: dict[str, list[float]] | None = None

    def timed(self, summary: Summary) -> Row:
        """This row with its times and bus bandwidth."""
        busbw = all_gather_bus_bandwidth(self.bytes_per_rank, self.ranks, summary.median_us)
        return dataclasses.replace(self, **dataclasses.asdict(summary), busbw_gbps=busbw)

    @property
    def label(self) -> str:
        """Name with its owner: ``"tdcoll 1d"``, or ``"nccl"``."""
        return self.algorithm if self.peer else f"tdcoll {self.algorithm}"


def with_ratios(rows: Sequence[Row]) -> list[Row]:
    """The rows of one size, tdcoll's with their ratio to each peer of the same launch."""
    result = []
    for row in rows:
        found = {
            other.algorithm: ratio(other.median_us, row.median_us)
            for other in rows
            if other.peer and not row.peer and other.launch == row.launch
        }
        ratios = {peer: value for peer, value in found.items() if value is not None}
        result.append(dataclasses.replace(row, ratios=ratios))
    return result


def save(path: Path, head: dict[str, Any], rows: Sequence[Row]) -> None:
    """Write a benchmark's rows, after ``head``: benchmark, command, started, provenance."""
    document = {"schema": SCHEMA, **head, "rows": [dataclasses.asdict(row) for row in rows]}
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def load(path: Path) -> tuple[dict[str, Any], list[Row]]:
    """``(head, rows)`` of a file that :func:`save` wrote.

    Raises:
        ValueError: it is no such file.
        OSError: it cannot be read.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["schema"] != SCHEMA:
            raise ValueError(f"schema {document['schema']} (this version reads {SCHEMA})")
        rows = [Row(**{**row, "calls": tuple(row["calls"])}) for row in document.pop("rows")]
        for key in ("benchmark", "command", "started", "provenance"):
            document[key]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a result of tdcoll.bench: {error}") from error
    return document, rows
