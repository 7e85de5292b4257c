# SPDX-License-Identifier: Apache-2.0
"""One measurement, how it is shown, and the file that measurements are kept in. Pure.

A benchmark's :class:`Layout` has the columns of its lines on the terminal, and of a report's tables and pictures.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tdcoll.base.arguments import format_bytes
from tdcoll.base.limits import COLLECTIVES
from tdcoll.tools.bench.arithmetic import Floor, distinct, ratio

IN_PLACE = "in-place"
"""The name of calls in place, where ``--algorithms`` takes one and in rows."""


@dataclass(kw_only=True)
class Row:
    """One measurement.

    Attributes:
        ranks, nodes: of the job.
        algorithm: tdcoll's, or the baseline's name.
        peer: whether it is a baseline's.
        launch: ``"graph"``, ``"eager"`` or ``"simulator"``.
        check: ``"ok"``, ``"WRONG"``, or ``"not run"``, for which ``note`` gives the reason.
        median_us, min_us, p90_us: per call, of the slowest rank in each iteration; None if not timed.
        skew_us: median over the iterations of the time between the fastest and the slowest rank.
        note: for the reader: why it did not run, or an error, for example.
        calls, iterations: calls timed together (alternating), and how many times.
        facts: what was measured, by the names that the benchmark gives to them: its size, dtype and so on.
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
    note: str | None = None
    calls: Sequence[int] = (1,)
    iterations: int = 0
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The name with its owner and form: ``"tdcoll 1d"``, ``"tdcoll owner, no copy"``, or ``"nccl"``."""
        if self.peer:
            return self.algorithm
        padded, no_copy = self.facts.get("form") == "padded", self.facts.get("copy") is False
        return f"tdcoll {self.algorithm}" + (", padded" if padded else ", no copy" if no_copy else "")

    @property
    def blocks(self) -> int | None:
        """The thread blocks that ``--blocks`` requested."""
        _, *words = self.algorithm.split()
        return int(words[0]) if words[1:] == ["blocks"] else None


Text = Callable[[Row], str]

_LAUNCHES = {"graph": "CUDA graphs", "eager": "eager calls"}

_NAMES = {
    "tdcoll auto": "tdcoll",
    f"tdcoll {IN_PLACE}": "tdcoll in place",
    "nccl": "NCCL",
    "trtllm-one-shot": "TensorRT-LLM one-shot",
    "trtllm-two-shot": "TensorRT-LLM two-shot",
    "vllm": "vLLM",
}
"""Labels that are not shown as they are. Files also have baselines that are no longer measured."""


def number(value: float | None, digits: int) -> str:
    """Return the value with so many digits after the point; ``-`` if there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def launch_of(row: Row) -> str:
    """Return how a row's calls were launched, in words."""
    return _LAUNCHES.get(row.launch, row.launch)


def machine(head: dict[str, Any], row: Any) -> str:
    """Return the machine of a row of the file: ``"4 × NVIDIA H200 on 1 node"``."""
    facts = head["provenance"]
    gpus = Counter(gpu for gpu in facts.get("gpus", []) if gpu)
    names = " and ".join(f"{count} × {name}" for name, count in gpus.items())
    emulated = " (emulated)" if facts.get("environment", {}).get("TDCOLL_EMULATE_NODES", "1") not in ("", "1") else ""
    return f"{names} on {row.nodes} node{'s' if row.nodes > 1 else ''}{emulated}"


def name_of(label: str) -> str:
    """Return a row's label as a report has it: ``"NCCL symmetric"`` for ``"nccl-symmetric"``."""
    first, comma, detail = label.partition(",")
    return _NAMES.get(first, first).replace("nccl-", "NCCL ") + comma + detail


def _fact(template: str) -> Text:
    """Return the text that a template with names of facts makes."""
    return lambda row: template.format(**row.facts)


def _took(row: Row) -> str:
    """The label, and the algorithm that tdcoll chose if none was requested."""
    took = row.facts.get("took")
    return f"{row.label} ({took})" if took else row.label


def _attribute(name: str) -> Text:
    return lambda row: number(getattr(row, name), 2)


def _signal(row: Row) -> str:
    return f"0 to {row.facts['peer_rank']}" + ("" if row.facts["same_node"] else ", other node")


def _data(row: Row) -> str:
    """How the data were reduced."""
    return f"{op} of {row.facts['dtype']}" if (op := row.facts.get("op")) else ""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a benchmark's rows are shown.

    Attributes:
        size: heading and text of the columns that say which size a row is of. Rows of equal texts are compared.
        derived: further columns of the terminal, which follow from facts and times.
        shown: algorithms and baselines that have a column unless others are requested; if none is tdcoll's, all of its.
        drawn: algorithms and baselines that a picture has if it would have too many curves otherwise.
        about: text about all rows of a table. If it differs, rows get a table of their own.
        unit, scale: of times in tables; a microsecond is ``scale`` of them.
        floor: lower bound of a row's time, in microseconds; None if not known.
        floor_text: how that time is made up.
        x, x_text: place of a row on a picture's axis and its label there; None if there are no pictures.
        panel: the line and the column of panels that a row belongs to.
    """

    title: str
    size: Mapping[str, Text]
    derived: Mapping[str, Text] = field(default_factory=dict)
    shown: tuple[str, ...] = ()
    drawn: tuple[str, ...] = ()
    about: Text = lambda row: ""
    unit: str = "µs"
    scale: float = 1.0
    floor: Callable[[Any, Floor | None], float | None] = lambda row, floor: None
    floor_text: Callable[[Any, Floor | None], str] = lambda row, floor: ""
    x: Callable[[Row], int] | None = None
    x_text: Callable[[int], str] = "{:,}".format
    panel: Callable[[Row], tuple[str, str]] = lambda row: ("", launch_of(row))

    def key(self, row: Any) -> tuple[str, ...]:
        """Return the size of a row, in words."""
        return tuple(text(row) for text in self.size.values())

    @property
    def columns(self) -> dict[str, Text]:
        """Return heading and text of the columns on the terminal."""
        times = {"µs": "median_us", "min µs": "min_us", "p90 µs": "p90_us", "skew µs": "skew_us"}
        return {
            **self.size,
            "ranks": lambda row: str(row.ranks),
            "nodes": lambda row: str(row.nodes),
            f"{'algorithm':>24}": _took,
            "launch": lambda row: row.launch,
            **{heading: _attribute(name) for heading, name in times.items()},
            **self.derived,
            "check": lambda row: row.check if row.note is None else f"{row.check}: {row.note}",
        }


def line_of(columns: Mapping[str, Text], row: Row | None = None) -> str:
    """Return a row's line on the terminal, or the headings if there is no row."""
    texts = columns if row is None else [text(row) for text in columns.values()]
    shown = [text.strip().rjust(max(len(heading), 9)) for heading, text in zip(columns, texts, strict=True)]
    return ("# " if row is None else "  ") + "  ".join(shown)


def _dense_floor(row: Row, floor: Floor | None) -> str:
    if floor is None:
        return ""
    return (
        f"The floor is a launch ({floor.launch_us:g} µs) and a hop ({floor.hop_us:.3g} µs), or what a rank "
        f"sends at {floor.rate(row.ranks):g} GB/s, whichever takes longer."
    )


def _bytes(row: Row) -> str:
    return format_bytes(row.facts["bytes_per_rank"])


def _dense(name: str) -> Layout:
    """Return the layout of the collective of this name."""

    def sent(row: Row) -> float:
        from tdcoll.tools.bench.specs import SPECS  # which imports torch and the kernels: not for a --help

        return SPECS[name].sent_bytes(row.facts["bytes_per_rank"], row.ranks)

    return Layout(
        title=name.replace("_", "-").capitalize(),
        size={"bytes per rank": _bytes},
        derived={
            "bus GB/s": lambda row: number(row.median_us and sent(row) / row.median_us / 1e3, 1),
            "SMs": lambda row: str(row.facts.get("sms", "-")),
        },
        shown=("auto", IN_PLACE, "nccl", "nccl-symmetric"),
        drawn=("auto", "nccl", "nccl-symmetric", "torch-one-shot", "torch-two-shot", "trtllm-one-shot", "vllm"),
        about=_data,
        floor=lambda row, floor: floor.us(sent(row), row.ranks) if floor else None,
        floor_text=_dense_floor,
        x=lambda row: row.facts["bytes_per_rank"],
        x_text=format_bytes,
    )


def _sparse_floor(row: Row, floor: Floor | None) -> str:
    if not row.facts["floor_us"]:
        return ""
    rate = row.facts["bytes_per_rank"] / row.facts["floor_us"] / 1e3
    return f"The floor is the least rows that can cross between ranks, at {rate:.3g} GB/s per rank."


LAYOUTS: dict[str, Layout] = {
    **{name: _dense(name) for name in COLLECTIVES},
    "tune": Layout(
        title="Candidates of a tuning table", size={"collective": _fact("{operation}"), "bytes per rank": _bytes}
    ),
    "all_reduce_rms_norm": Layout(
        title="All-reduce + residual + RMSNorm",
        size={"rows": _fact("{rows:,}")},
        shown=(
            *("auto", "nccl", "nccl-compiled", "torch-one-shot-compiled", "tdcoll-torch"),
            *("trtllm-one-shot", "trtllm-two-shot"),
        ),
        about=_fact("rows of {hidden:,} {dtype}"),
        x=lambda row: row.facts["rows"],
        panel=lambda row: ("", f"rows of {row.facts['hidden']:,}, {launch_of(row)}"),
    ),
    "sparse_all_reduce": Layout(
        title="Sparse all-reduce",
        size={"indices": _fact("{distribution}"), "rows per rank": _fact("{rows:,} × {dim}")},
        derived={
            "GB/s": lambda row: number(row.median_us and row.facts["bytes_per_rank"] / row.median_us / 1e3, 1),
            "/ floor": lambda row: number(ratio(row.median_us, row.facts["floor_us"]), 2),
        },
        shown=("auto", "dense"),
        about=_fact("{num_rows:,} rows of {dtype}"),
        unit="ms",
        scale=1e-3,
        floor=lambda row, floor: row.facts["floor_us"] or None,
        floor_text=_sparse_floor,
        x=lambda row: row.facts["rows"],
        panel=lambda row: (row.facts["distribution"], f"rows of {row.facts['dim']}, {launch_of(row)}"),
    ),
    "beside": Layout(
        title="Two matmuls beside all-gathers",
        size={"all-gathers": lambda row: f"{row.facts['gathers']} of {format_bytes(row.facts['nbytes'])}"},
    ),
    "signal": Layout(title="Signals", size={"between": _signal, "rounds in a launch": _fact("{rounds}")}),
}
"""By the name of the benchmark."""


def shown_labels(layout: Layout, rows: Sequence[Row], only: Sequence[str] = ()) -> list[str]:
    """Return the labels of rows that are shown, tdcoll's first: those of ``only``, or the layout's."""
    names = only or layout.shown
    ran = [row for row in rows if not row.peer or row.median_us]
    ours = distinct([row.label for row in ran if not row.peer and row.algorithm in names])
    if not ours and not only:
        ours = distinct([row.label for row in ran if not row.peer])
    return ours + distinct([row.label for row in ran if row.peer and row.algorithm in names])


_SCHEMA = 1
_FIELDS = {field.name for field in dataclasses.fields(Row)} - {"facts"}


def save(path: Path, head: dict[str, Any], rows: Sequence[Row]) -> None:
    """Write a benchmark's rows, after ``head``: benchmark, command, started, provenance."""
    fields = [dataclasses.asdict(row) for row in rows]
    document = {"schema": _SCHEMA, **head, "rows": [{**one.pop("facts"), **one} for one in fields]}
    write_whole(path, json.dumps(document, indent=1, ensure_ascii=False) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write a file as a whole: if the process is killed, the file is as it was, or has all of ``text``."""
    begun = path.with_name(path.name + ".tmp")
    begun.write_text(text, encoding="utf-8")
    os.replace(begun, path)


def load(path: Path) -> tuple[dict[str, Any], list[Row]]:
    """Return ``(head, rows)`` of a file that :func:`save` wrote.

    Raises:
        ValueError: it is no such file.
        OSError: it cannot be read.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["schema"] != _SCHEMA:
            raise ValueError(f"schema {document['schema']} (this version reads {_SCHEMA})")
        for key in ("command", "started", "provenance"):
            document[key]
        if (layout := LAYOUTS.get(document["benchmark"])) is None:
            raise ValueError(f"benchmark {document['benchmark']} (this version knows {', '.join(LAYOUTS)})")
        rows = []
        for one in document.pop("rows"):
            fields: dict[str, Any] = {name: one.pop(name) for name in _FIELDS & set(one)}
            row = Row(**{**fields, "calls": tuple(fields["calls"])}, facts=one)
            layout.key(row)  # has all that says which size it is of
            rows.append(row)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a result of tdcoll.tools.bench: {error}") from error
    return document, rows
