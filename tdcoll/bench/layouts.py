# SPDX-License-Identifier: Apache-2.0
"""How the rows of each benchmark become a table of a report."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tdcoll.bench.arithmetic import format_bytes
from tdcoll.bench.rows import SparseRow
from tdcoll.bench.table import (
    Column,
    all_gather_columns,
    match_columns,
    signal_columns,
    signal_name,
    sparse_columns,
)

__all__ = ["LAYOUTS", "Layout", "indices"]


@dataclass(frozen=True)
class Layout:
    """How a benchmark's rows become a table.

    Attributes:
        title: of the benchmark.
        about: what else was the same for all rows of a table; rows for which it differs get tables of their own.
        leading: columns that say which size it is; ``where``: the same in a few words.
        unit, scale: of times, and how many of them a microsecond is.
        rival: whether a row of tdcoll's is compared with the peers; if there is none, all are.
        measured: columns of the fastest of those.
        footnote: how to read it, from one of the rows.
        counted: columns where there are no times.
    """

    title: str
    about: Callable[[Any], str]
    leading: Sequence[Column]
    where: Callable[[Any], str]
    unit: str
    scale: float
    rival: Callable[[Any], bool]
    measured: Sequence[Column]
    footnote: Callable[[Any], str]
    counted: Callable[[Sequence[str], bool], Sequence[Column]]


def indices(row: SparseRow) -> str:
    return row.distribution + (f", repeated {row.duplicates}" if row.duplicates != "0" else "")


def _sparse_footnote(row: SparseRow) -> str:
    rate = f"{row.bytes_per_rank / row.floor_us / 1e3:.3g}" if row.floor_us else "the assumed"
    floor = (
        f"The floor is the time for the least rows that can cross between ranks, at {rate} GB/s per rank; GB/s are "
        "those rows' bytes over the time."
    )
    if row.launch == "graph":
        room = "which needs no host and has room for as many rows as all ranks could bring"
        return f"{_MEDIANS}, of the padded form, {room}. {floor}"
    return (
        f"{_MEDIANS}, from an idle GPU to a sparse tensor that is there. {floor} tdcoll's best is among results with "
        "memory of their own, as the peers' have, if there are any. Where a peer's time is less, the ratio is below 1."
    )


_MEDIANS = "Times are medians over iterations of the slowest rank"

LAYOUTS: dict[str, Layout] = {
    "all_gather": Layout(
        title="All-gather",
        about=lambda row: "",
        leading=[Column("bytes per rank", lambda row: format_bytes(row.bytes_per_rank))],
        where=lambda row: f"{format_bytes(row.bytes_per_rank)} per rank",
        unit="µs",
        scale=1.0,
        rival=lambda row: True,
        measured=[Column("bus GB/s", lambda row: f"{row.busbw_gbps:.3g}")],
        footnote=lambda row: f"{_MEDIANS}; bus bandwidth is as in nccl-tests.",
        counted=all_gather_columns,
    ),
    "sparse_all_reduce": Layout(
        title="Sparse all-reduce",
        about=lambda row: f", {row.num_rows:,} rows of {row.dtype}",
        leading=[
            Column("indices", lambda row: indices(row)),
            Column("rows per rank", lambda row: f"{row.rows:,}"),
            Column("dim", lambda row: str(row.dim)),
            Column("union", lambda row: f"{row.union_rows:,.0f}"),
            Column("floor, ms", lambda row: f"{row.floor_us / 1e3:.3g}"),
        ],
        where=lambda row: f"{indices(row)}, {row.rows:,} × {row.dim}",
        unit="ms",
        scale=1e-3,
        rival=lambda row: row.copy is not False,
        measured=[
            Column("GB/s", lambda row: f"{row.gbps:.3g}"),
            Column("/ floor", lambda row: "–" if row.over_floor is None else f"{row.over_floor:.2f}"),
        ],
        footnote=_sparse_footnote,
        counted=sparse_columns,
    ),
    "index_match": Layout(
        title="Index matching",
        about=lambda row: f", task {row.task}, {row.lists} lists of ids below {row.num_rows:,}",
        leading=[
            Column("indices", lambda row: row.distribution),
            Column("rows per list", lambda row: f"{row.rows:,}"),
            Column("union", lambda row: f"{row.union_rows:,.0f}"),
        ],
        where=lambda row: f"{row.distribution}, {row.rows:,} rows",
        unit="µs",
        scale=1.0,
        rival=lambda row: True,
        measured=[],
        footnote=lambda row: f"{_MEDIANS}" + (", from an idle GPU." if row.launch == "eager" else "."),
        counted=match_columns,
    ),
    "signal": Layout(
        title="Signals",
        about=lambda row: "",
        leading=[
            Column("signals", lambda row: signal_name(row)),
            Column("rounds in a launch", lambda row: str(row.rounds)),
        ],
        where=lambda row: f"{signal_name(row)}, {row.rounds} round(s)",
        unit="µs",
        scale=1.0,
        rival=lambda row: True,
        measured=[],
        footnote=lambda row: (
            f"{_MEDIANS}. One-way is half of the time there and back, seeing the signal included. With one round in a "
            "launch the launch counts, too."
        ),
        counted=lambda peers, simulated: signal_columns(simulated),
    ),
}

LAYOUTS["tune"] = dataclasses.replace(LAYOUTS["all_gather"], title="All-gather, candidates of a tuning table")
