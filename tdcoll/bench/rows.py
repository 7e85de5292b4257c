# SPDX-License-Identifier: Apache-2.0
"""One row of a benchmark's table, and the file that rows are kept in."""

from __future__ import annotations

import dataclasses
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tdcoll.bench.arithmetic import Summary, ratio, sent_bytes

__all__ = [
    *("KINDS", "SCHEMA", "AnyRow", "Measured", "NormRow", "Row", "SignalRow", "SparseRow", "load", "save"),
    *("distinct", "with_ratios", "write_whole"),
]

SCHEMA = 1

AnyRow = TypeVar("AnyRow", bound="Measured")


@dataclass(frozen=True, kw_only=True)
class Measured(ABC):
    """What the rows of all benchmarks have.

    Attributes:
        ranks, nodes: of the job.
        algorithm: tdcoll's, or the peer's name.
        peer: whether it is a peer's.
        launch: ``"graph"``, ``"eager"`` or ``"simulator"``.
        check: ``"ok"``, ``"WRONG"``, or ``"not run"``, and then ``note`` says why.
        median_us, min_us, p90_us: per call; an iteration takes what its slowest rank took; None: not timed.
        skew_us: median over the iterations of what the slowest rank took longer than the fastest.
        ratios: for each peer whose result was right its median divided by this one.
        note: why it did not run, what was wrong, or what else has to be known.
        calls, iterations: calls timed together (alternating), and how many times.
        straggler: a random rank was delayed in each iteration; times hold what the others waited for it.
        counts: per call, of each rank, what the simulator counted.
    """

    ranks: int
    nodes: int
    algorithm: str
    peer: bool
    launch: str
    check: str
    median_us: float | None = None
    min_us: float | None = None
    p90_us: float | None = None
    skew_us: float | None = None
    ratios: dict[str, float] = field(default_factory=dict)
    note: str | None = None
    calls: tuple[int, ...] = ()
    iterations: int = 0
    straggler: bool = False
    counts: dict[str, list[float]] | None = None

    @property
    def label(self) -> str:
        """Name with its owner: ``"tdcoll 1d"``, or ``"nccl"``."""
        return self.algorithm if self.peer else f"tdcoll {self.algorithm}"

    @property
    @abstractmethod
    def size(self) -> Hashable:
        """What two rows of a file have to share to be compared."""

    def timed(self: AnyRow, summary: Summary, wall_us: float | None = None) -> AnyRow:
        """This row with its times and what follows from them; ``wall_us`` is by the host's clock."""
        return dataclasses.replace(self, **dataclasses.asdict(summary), **self._derived(summary.median_us, wall_us))

    def _derived(self, median_us: float, wall_us: float | None) -> dict[str, Any]:
        """Return what follows from the times."""
        return {}


@dataclass(frozen=True, kw_only=True)
class Row(Measured):
    """One size of a dense collective, one algorithm, one way to launch it.

    Attributes:
        bytes_per_rank: what one rank gives to an all-gather or an all-reduce, or gets from a reduce-scatter.
        operation: the collective.
        dtype, op: of the data, and how it is reduced; None: not known, or not reduced.
        buffers: inputs and results that the calls took in turn; None: each call of a launch had its own.
        busbw_gbps: bus bandwidth at the median, as nccl-tests defines it.
    """

    bytes_per_rank: int
    operation: str = "all_gather"
    dtype: str | None = None
    op: str | None = None
    buffers: int | None = None
    busbw_gbps: float | None = None

    @property
    def size(self) -> int:
        """Bytes per rank."""
        return self.bytes_per_rank

    @property
    def sent_bytes(self) -> float:
        """That each rank sends, at least."""
        return sent_bytes(self.operation, self.bytes_per_rank, self.ranks)

    def _derived(self, median_us: float, wall_us: float | None) -> dict[str, Any]:
        return {"busbw_gbps": self.sent_bytes / median_us / 1e3}


@dataclass(frozen=True, kw_only=True)
class SparseRow(Measured):
    """One row-sparse all-reduce.

    Attributes:
        rows: that each rank gives, repetitions counted.
        dim: numbers in a row.
        num_rows: of the whole tensor.
        dtype: of the values.
        distribution: that the indices are drawn from.
        duplicates: ``"0"``: none; a fraction: so many of the rows repeat others of the same rank; ``"drawn"``: each is
            drawn by itself, with repetition.
        form: ``"coo"``: from sparse tensor to sparse tensor; ``"padded"``: the form without host synchronisation.
        copy: whether the result is memory of its own; None where there is no choice.
        union_rows: of the result, the mean over the inputs that are taken in turn.
        moved_rows: least rows that cross between ranks, all of them together; see
            :func:`~tdcoll.bench.arithmetic.moved_rows`.
        bytes_per_rank: of ``moved_rows``, a rank's share.
        floor_us: time for ``bytes_per_rank`` at the assumed rate.
        wall_us: median on the host's clock, waiting for the result included.
        gbps: ``bytes_per_rank`` over the median.
        over_floor: the median over ``floor_us``.
    """

    rows: int
    dim: int
    num_rows: int
    dtype: str
    distribution: str
    duplicates: str = "0"
    form: str = "coo"
    copy: bool | None = None
    union_rows: float = 0.0
    moved_rows: float = 0.0
    bytes_per_rank: float = 0.0
    floor_us: float = 0.0
    wall_us: float | None = None
    gbps: float | None = None
    over_floor: float | None = None

    @property
    def label(self) -> str:
        """``"tdcoll owner"``, ``"tdcoll owner, no copy"``, ``"tdcoll owner, padded"``, or a peer's name."""
        detail = ", padded" if self.form == "padded" else ", no copy" if self.copy is False else ""
        return super().label + ("" if self.peer else detail)

    @property
    def size(self) -> tuple[str, str, int, int]:
        """Which rows, and how long."""
        return self.distribution, self.duplicates, self.rows, self.dim

    def _derived(self, median_us: float, wall_us: float | None) -> dict[str, Any]:
        rate, over = self.bytes_per_rank / median_us / 1e3, ratio(median_us, self.floor_us)
        return {"wall_us": wall_us, "gbps": rate, "over_floor": over}


@dataclass(frozen=True, kw_only=True)
class NormRow(Measured):
    """One all-reduce + residual + RMSNorm of ``rows`` rows of ``hidden`` numbers of ``dtype``."""

    rows: int
    hidden: int
    dtype: str

    @property
    def size(self) -> tuple[int, int]:
        """Return the rows and the numbers in each, by which results are compared."""
        return self.rows, self.hidden


@dataclass(frozen=True, kw_only=True)
class SignalRow(Measured):
    """Signals, without data.

    Attributes:
        pattern: ``"one-way"``: from rank 0 to ``peer_rank``, half of the time there and back; ``"all-to-all"``: every
            rank signals every other and waits for all.
        peer_rank: the other rank; None with all-to-all.
        same_node: whether it is on rank 0's node; with all-to-all, whether all are.
        rounds: how often in one launch; 1: the launch counts as well, more: it hardly does.
    """

    pattern: str
    peer_rank: int | None = None
    same_node: bool = True
    rounds: int = 1

    @property
    def size(self) -> tuple[str, int | None, int]:
        """Between whom, and how often in one launch."""
        return self.pattern, self.peer_rank, self.rounds


KINDS: dict[str, type[Measured]] = {
    "all_gather": Row,
    "all_reduce": Row,
    "all_reduce_rms_norm": NormRow,
    "reduce_scatter": Row,
    "tune": Row,
    "sparse_all_reduce": SparseRow,
    "signal": SignalRow,
}
"""The rows of each benchmark."""


def distinct(values: Iterable[Any]) -> list[Any]:
    """Each value once, in the order in which they came first."""
    return list(dict.fromkeys(values))


def with_ratios(rows: Sequence[AnyRow]) -> list[AnyRow]:
    """The rows, tdcoll's with their ratio to each peer of the same size and launch."""
    result = []
    peers = [row for row in rows if row.peer and row.check == "ok"]
    for row in rows:
        found = {
            peer.algorithm: ratio(peer.median_us, row.median_us)
            for peer in peers
            if not row.peer and (peer.launch, peer.size) == (row.launch, row.size)
        }
        ratios = {peer: value for peer, value in found.items() if value is not None}
        result.append(dataclasses.replace(row, ratios=ratios))
    return result


def save(path: Path, head: dict[str, Any], rows: Sequence[Measured]) -> None:
    """Write a benchmark's rows, after ``head``: benchmark, command, started, provenance."""
    document = {"schema": SCHEMA, **head, "rows": [dataclasses.asdict(row) for row in rows]}
    write_whole(path, json.dumps(document, indent=1, ensure_ascii=False) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write a file as a whole: whenever the process is ended, what was there before is there, or all of ``text``."""
    begun = path.with_name(path.name + ".tmp")
    begun.write_text(text, encoding="utf-8")
    os.replace(begun, path)


def load(path: Path) -> tuple[dict[str, Any], list[Any]]:
    """``(head, rows)`` of a file that :func:`save` wrote.

    Raises:
        ValueError: it is no such file.
        OSError: it cannot be read.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["schema"] != SCHEMA:
            raise ValueError(f"schema {document['schema']} (this version reads {SCHEMA})")
        for key in ("command", "started", "provenance"):
            document[key]
        if (kind := KINDS.get(document["benchmark"])) is None:
            raise ValueError(f"benchmark {document['benchmark']} (this version knows {', '.join(KINDS)})")
        rows = [kind(**{**row, "calls": tuple(row["calls"])}) for row in document.pop("rows")]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a result of tdcoll.bench: {error}") from error
    return document, rows
