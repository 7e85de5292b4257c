# SPDX-License-Identifier: Apache-2.0
"""How the rows of each benchmark become the tables and panels of a report. Pure."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tdcoll.bench.arithmetic import Floor, format_bytes
from tdcoll.bench.rows import distinct

__all__ = ["LAYOUTS", "Layout", "launch_of", "machine", "name_of", "shown_labels"]

Text = Callable[[Any], str]


@dataclass(frozen=True)
class Layout:
    """How a benchmark's rows are shown.

    Attributes:
        title: of the benchmark.
        size: heading and text of the columns that say which size a line is of.
        shown: algorithms and peers that have a column unless others are asked for. Without any of tdcoll's all of them
            have one.
        drawn: algorithms and peers that a picture has where there are too many curves.
        about: what is the same for all rows of a table. Rows for which it differs get a table of their own.
        unit, scale: of times; a microsecond is ``scale`` of them.
        floor: the least time that a row could take, in microseconds; None: not known.
        floor_text: what that time is.
        x, x_text: place of a row on a picture's axis and what is written there; None: there are no pictures.
        panel: the line and the column of panels that a row belongs to.
    """

    title: str
    size: Mapping[str, Text]
    shown: tuple[str, ...]
    drawn: tuple[str, ...] = ()
    about: Text = lambda row: ""
    unit: str = "µs"
    scale: float = 1.0
    floor: Callable[[Any, Floor | None], float | None] = lambda row, floor: None
    floor_text: Callable[[Any, Floor | None], str] = lambda row, floor: ""
    x: Callable[[Any], int] | None = None
    x_text: Callable[[int], str] = str
    panel: Callable[[Any], tuple[str, str]] = lambda row: ("", launch_of(row))


_LAUNCHES = {"graph": "CUDA graphs", "eager": "eager calls", "simulator": "the simulator"}

_NAMES = {
    "tdcoll auto": "tdcoll",
    "tdcoll in-place": "tdcoll in place",
    "nccl": "NCCL",
    "trtllm-one-shot": "TensorRT-LLM one-shot",
    "trtllm-two-shot": "TensorRT-LLM two-shot",
    "vllm": "vLLM",
}


def launch_of(row: Any) -> str:
    """How a row's calls were launched, in words."""
    return _LAUNCHES.get(row.launch, str(row.launch))


def shown_labels(layout: Layout, rows: Sequence[Any], only: Sequence[str] = ()) -> list[str]:
    """The labels of rows that are shown, tdcoll's first: those of ``only``, or the layout's."""
    names = only or layout.shown
    ran = [row for row in rows if not row.peer or row.median_us]
    ours = distinct([row.label for row in ran if not row.peer and row.algorithm in names])
    if not ours and not only:
        ours = distinct([row.label for row in ran if not row.peer])
    return ours + distinct([row.label for row in ran if row.peer and row.algorithm in names])


def machine(head: dict[str, Any], row: Any) -> str:
    """``"4 × NVIDIA H200 on 1 node"``: what a row of the file was measured on."""
    facts = head["provenance"]
    gpus = Counter(gpu for gpu in facts.get("gpus", []) if gpu)
    names = " and ".join(f"{count} × {name}" for name, count in gpus.items()) or f"{row.ranks} simulated ranks"
    emulated = " (emulated)" if facts.get("environment", {}).get("TDCOLL_EMULATE_NODES", "1") not in ("", "1") else ""
    return f"{names} on {row.nodes} node{'s' if row.nodes > 1 else ''}{emulated}"


def name_of(label: str) -> str:
    """A row's label as a report says it: ``"nccl-symmetric"`` is "NCCL symmetric", ``"tdcoll auto"`` "tdcoll"."""
    first, comma, detail = label.partition(",")
    return _NAMES.get(first, first).replace("nccl-", "NCCL ") + comma + detail


def _indices(row: Any) -> str:
    return row.distribution + (f", repeated {row.duplicates}" if row.duplicates != "0" else "")


def _signal(row: Any) -> str:
    if row.peer_rank is None:
        return str(row.pattern)
    return f"0 to {row.peer_rank}" + ("" if row.same_node else ", other node")


def _dense_floor(row: Any, floor: Floor) -> str:
    return (
        f"The floor is a launch ({floor.launch_us:g} µs) and a crossing ({floor.crossing_us:.3g} µs), or what a rank "
        f"sends at {floor.gbps:g} GB/s, whichever takes longer."
    )


def _sparse_floor(row: Any, floor: Floor | None) -> str:
    rate = f"{row.bytes_per_rank / row.floor_us / 1e3:.3g}"
    return f"The floor is the least rows that can cross between ranks, at {rate} GB/s per rank."


def _buffers(row: Any) -> str:
    if row.buffers is None:
        return ""
    return "one buffer replayed" if row.buffers == 1 else f"{row.buffers} buffers in turn"


def _reduction(row: Any) -> str:
    """How the data were reduced, and whether each call of a launch had its own."""
    return ", ".join(filter(None, (" of ".join(part for part in (row.op, row.dtype) if part), _buffers(row))))


_DENSE = Layout(
    title="All-gather",
    size={"bytes per rank": lambda row: format_bytes(row.bytes_per_rank)},
    shown=("auto", "in-place", "nccl", "nccl-symmetric"),
    about=_buffers,
    floor=lambda row, floor: floor.us(row.sent_bytes, row.ranks) if floor else None,
    floor_text=lambda row, floor: _dense_floor(row, floor) if floor else "",
    x=lambda row: row.bytes_per_rank,
    x_text=format_bytes,
)


LAYOUTS: dict[str, Layout] = {
    "all_gather": _DENSE,
    "all_reduce": dataclasses.replace(
        _DENSE,
        title="All-reduce",
        about=_reduction,
        drawn=("auto", "nccl", "nccl-symmetric", "torch-one-shot", "torch-two-shot", "trtllm-one-shot", "vllm"),
    ),
    "reduce_scatter": dataclasses.replace(_DENSE, title="Reduce-scatter", about=_reduction),
    "tune": dataclasses.replace(_DENSE, title="Candidates of a tuning table", about=lambda row: row.operation),
    "all_reduce_rms_norm": Layout(
        title="All-reduce + residual + RMSNorm",
        size={"rows": lambda row: f"{row.rows:,}"},
        shown=(
            "auto",
            "nccl",
            "nccl-compiled",
            "torch-one-shot-compiled",
            "tdcoll-torch",
            "trtllm-one-shot",
            "trtllm-two-shot",
        ),
        about=lambda row: f"rows of {row.hidden:,} {row.dtype}",
        x=lambda row: row.rows,
        x_text=lambda rows: f"{rows:,}",
        panel=lambda row: ("", f"rows of {row.hidden:,}, {launch_of(row)}"),
    ),
    "sparse_all_reduce": Layout(
        title="Sparse all-reduce",
        size={"indices": _indices, "rows per rank": lambda row: f"{row.rows:,} × {row.dim}"},
        shown=("auto", "dense"),
        about=lambda row: f"{row.num_rows:,} rows of {row.dtype}",
        unit="ms",
        scale=1e-3,
        floor=lambda row, floor: row.floor_us or None,
        floor_text=lambda row, floor: _sparse_floor(row, floor) if row.floor_us else "",
        x=lambda row: row.rows,
        x_text=lambda rows: f"{rows:,}",
        panel=lambda row: (_indices(row), f"rows of {row.dim}, {launch_of(row)}"),
    ),
    "signal": Layout(
        title="Signals",
        size={"signals": _signal, "rounds in a launch": lambda row: str(row.rounds)},
        shown=(),
    ),
}
