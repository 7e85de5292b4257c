# SPDX-License-Identifier: Apache-2.0
"""Markdown tables of results.

Times of all sizes and labels are a data frame, and a table is a list of columns.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import pandas as pd

from benchmarks import registry
from benchmarks.grid import Column, grid
from benchmarks.layout import (
    Layout,
    floor_of,
    label_name,
    launch_name,
    machine_name,
    requested_blocks,
)
from tdcoll.tools.measure.results import Row

_BRIEF_SIZES = 6
"""Sizes of a brief table."""

_MAX_PLACES = 4
"""A note that holds at more sizes counts them instead of naming them."""

_ABSENT = "–"
_SLOWER = " †"

_VERSIONS = {
    "torch": "PyTorch",
    "triton": "Triton",
    "nvshmem": "NVSHMEM",
    "nccl": "NCCL",
    "flashinfer": "flashinfer",
    "cuda": "CUDA",
    "driver": "driver",
}
_NO_MULTICAST = (
    "NCCL_NVLS_ENABLE=0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST=1",
    "NVSHMEM_DISABLE_NVLS=1",
)


def digits(value: float | None) -> str:
    """Return a number with three digits, or with all digits before the point."""
    if value is None:
        return _ABSENT
    if value < 100:
        return f"{value:#.3g}".rstrip(".")
    return f"{value:.0f}"


def _ratio_text(ratio: float) -> str:
    return _ABSENT if math.isnan(ratio) else f"{ratio:.2f}"


def spread(values: Sequence[float]) -> str:
    """Return the median, and the least and the most in brackets."""
    return f"{statistics.median(values):.0f} [{min(values):.0f}, {max(values):.0f}]"


def _text(row: Row, layout: Layout) -> str:
    """Return a row's time, with the spread if the row has the times of all rounds."""
    if row.check == "not run":
        return _ABSENT
    if "times" in row.facts:
        return spread(row.facts["times"])
    text = digits(layout.time_of(row))
    return text if row.check == "ok" else f"{text} WRONG"


def _detail(row: Row) -> str:
    """Return the time that all-gathers added to a row's matmuls, or a row's multiprocessors."""
    if "added" in row.facts:
        return "" if row.algorithm == "alone" else spread(row.facts["added"])
    return str(row.facts.get("sms") or "")


class ResultTable:
    """Rows of one file with the same launch, number of ranks, and ``about``.

    Attributes:
        rows: the rows.
        sizes: the different sizes, in the order of the rows.
        baselines: the labels of baselines that were timed.
        times: times of right results in the layout's unit, with a line for each size and a column
            for each label.
        texts, details: the same of :func:`_text` and :func:`_detail`, of all results.
        fastest: the time of the fastest baseline at each size.
        fastest_labels: the fastest baseline at each size that has one.
    """

    def __init__(self, head: dict[str, Any], layout: Layout, rows: list[Row]) -> None:
        self.head = head
        self.layout = layout
        self.rows = rows
        self.sizes = list(dict.fromkeys(layout.size_of(row) for row in rows))
        timed = [layout.label(row) for row in rows if row.peer and row.median_us]
        self.baselines = list(dict.fromkeys(timed))
        places = {size: place for place, size in enumerate(self.sizes)}
        lines = pd.DataFrame(
            {
                "size": [places[layout.size_of(row)] for row in rows],
                "label": [layout.label(row) for row in rows],
                "time": [layout.time_of(row) if row.check == "ok" else None for row in rows],
                "text": [_text(row, layout) for row in rows],
                "detail": [_detail(row) for row in rows],
            }
        )
        lines = lines.drop_duplicates(["size", "label"], keep="last")
        self.times = lines.pivot(index="size", columns="label", values="time").astype(float)
        self.texts = lines.pivot(index="size", columns="label", values="text").fillna(_ABSENT)
        self.details = lines.pivot(index="size", columns="label", values="detail").fillna("")
        compared = self.times[self.baselines]
        self.fastest = compared.min(axis=1)
        self.fastest_labels = compared.dropna(how="all").idxmin(axis=1)

    @property
    def is_by_label(self) -> bool:
        """True if the table has a line for each label, instead of one for each size.

        These are tables of ``--blocks``, and of matmuls beside all-gathers.
        """
        return any(requested_blocks(row) or "added" in row.facts for row in self.rows)

    def speedup(self, label: str) -> pd.Series:
        """Return how many times faster than the fastest baseline a label is at each size."""
        return self.fastest / self.times[label]

    def floors(self) -> list[float | None]:
        """Return the lower bound at each size, in the layout's unit; None if not known."""
        floor = floor_of(self.head, self.rows)
        bounds = {}
        for row in reversed(self.rows):  # the first row of a size decides
            bound = self.layout.floor(row, floor)
            bounds[self.layout.size_of(row)] = bound and bound * self.layout.scale
        return [bounds[size] for size in self.sizes]

    def caption(self) -> str:
        """Return the benchmark, the machine and the launch, of all rows."""
        row = self.rows[0]
        parts = [
            self.layout.title,
            machine_name(self.head, row),
            self.layout.about(row),
            launch_name(row),
        ]
        return ", ".join(part for part in parts if part)

    def columns(self, labels: Sequence[str], brief: bool = False) -> list[Column]:
        """Return the columns of a table with a line for each size.

        They are: the size, the times, the fastest baseline, the lower bound, and the speedups over
        that baseline. A brief table has fewer lines, one baseline, and no columns after the
        fastest.
        """
        ours = [label for label in labels if self._is_ours(label)]
        if brief:
            labels = [*ours, *(label for label in labels if label in self.baselines[:1])]
        found = [
            Column(heading, [size[place] for size in self.sizes])
            for place, heading in enumerate(self.layout.size)
        ]
        for label in labels:
            texts = self.texts[label]
            if label in ours:
                texts = texts.mask(self.speedup(label) < 1, texts + _SLOWER)
            found.append(Column(label_name(label), list(texts)))
        rival = label_name(self.baselines[0]) if self.baselines else ""
        if len(self.baselines) > 1:
            rival = "fastest baseline"
            found.append(Column(rival, self._fastest_texts()))
        if brief:
            return [Column(column.heading, _evenly(column.texts, _BRIEF_SIZES)) for column in found]
        floors = self.floors()
        if any(floors):
            found.append(Column("floor", [digits(bound or 0.0) for bound in floors]))
        if self.baselines:
            for label in ours:
                ratios = [_ratio_text(ratio) for ratio in self.speedup(label)]
                found.append(Column(f"{rival} / {label_name(label)}", ratios))
        return found

    def _is_ours(self, label: str) -> bool:
        return any(self.layout.label(row) == label and not row.peer for row in self.rows)

    def _fastest_texts(self) -> list[str]:
        texts = []
        for size, time in self.fastest.items():
            label = self.fastest_labels.get(size)
            texts.append(_ABSENT if label is None else f"{digits(time)} ({label_name(label)})")
        return texts

    def columns_by_label(self, labels: Sequence[str]) -> list[Column]:
        """Return the columns of a table with a line for each label.

        For each size they have the time, and the multiprocessors or the time that all-gathers
        added.
        """
        heading = "added" if "added" in self.rows[0].facts else "SMs"
        found = [Column("calls", [label_name(label) for label in labels])]
        for place, size in enumerate(self.sizes):
            found.append(Column(", ".join(size), list(self.texts.loc[place, labels])))
            found.append(Column(heading, list(self.details.loc[place, labels])))
        return found

    def notes(self, labels: Sequence[str]) -> list[str]:
        """Return lines for rows that did not run, errors, and other notes.

        They are those of ``labels``, of baselines, and of wrong results.
        """
        notes: dict[tuple[str, str, str | None], list[str]] = {}
        total: dict[str, int] = {}
        for row in self.rows:
            label = self.layout.label(row)
            if label not in labels and not row.peer and row.check != "WRONG":
                continue
            total[label] = total.get(label, 0) + 1
            if row.check != "ok" or row.note is not None:
                key = (label, row.check, row.note)
                notes.setdefault(key, []).append(", ".join(self.layout.size_of(row)))
        lines = []
        for (label, check, note), sizes in notes.items():
            place = " at " + "; ".join(sizes)
            if check != "WRONG" and len(sizes) > _MAX_PLACES:
                place = f" at {len(sizes)} of {len(self.sizes)} sizes"
            if check != "WRONG" and len(sizes) == total[label]:
                place = ""
            text = note or ""
            if check != "ok":
                text = f"{check} ({note})" if note else check
            lines.append(f"- {label_name(label)}{place}: {text}")
        return lines

    def losses(self) -> list[tuple[str, ...]]:
        """Return ``(calls, sizes, by how much longer, fastest baselines)`` for each label of
        tdcoll's that a baseline beats at some size."""
        right = [row for row in self.rows if row.check == "ok" and not row.peer]
        found: list[tuple[str, ...]] = []
        for label in self.layout.labels(right):
            slower = self.times[label] / self.fastest
            lost = slower[slower > 1].index
            if lost.empty:
                continue
            percents = [f"{100 * slower[size] - 100:.1f}" for size in lost]
            rivals = dict.fromkeys(label_name(self.fastest_labels[size]) for size in lost)
            found.append(
                (
                    f"{self.caption()}, {label_name(label)}",
                    ", ".join(", ".join(self.sizes[size]) for size in lost),
                    f"{', '.join(percents)}%",
                    ", ".join(rivals),
                )
            )
        return found

    def standing(self) -> tuple[str, ...]:
        """Return ``(calls, sizes, ratios, at how many sizes tdcoll is ahead)`` of ``"auto"``."""
        right = [row for row in self.rows if row.check == "ok" and not row.peer]
        label = self.layout.labels(right)[0]
        ratios = self.speedup(label).dropna()
        first, last = (", ".join(self.sizes[ratios.index[place]]) for place in (0, -1))
        return (
            self.caption(),
            f"{first} to {last}",
            f"{ratios.min():.2f} to {ratios.max():.2f}",
            f"{int((ratios >= 1).sum())} of {len(ratios)}",
        )


def _evenly(texts: Sequence[str], count: int) -> list[str]:
    """Return ``count`` of the texts, from the first to the last; all, if there are fewer."""
    last = len(texts) - 1
    places = dict.fromkeys(round(place * last / (count - 1)) for place in range(count))
    return [texts[place] for place in places]


def tables(head: dict[str, Any], rows: Sequence[Row]) -> list[ResultTable]:
    """Return the tables of a file, in the order of its rows."""
    layout: Layout = registry.layout(head["benchmark"])
    found: dict[Any, list[Row]] = {}
    for row in rows:
        key = (row.launch, row.ranks, row.nodes, layout.about(row))
        found.setdefault(key, []).append(row)
    return [ResultTable(head, layout, of_table) for of_table in found.values()]


def versions(head: dict[str, Any]) -> str:
    """Return versions, date, and whether multicast was off."""
    facts = head["provenance"]
    tdcoll = f"tdcoll {facts['tdcoll']}"
    if facts.get("commit"):
        tdcoll += f" at {facts['commit'][:12]}"
    if facts.get("dirty"):
        tdcoll += " with uncommitted changes"
    names = [f"{name} {facts[key]}" for key, name in _VERSIONS.items() if facts.get(key)]
    text = f"Measured with {', '.join([tdcoll, *names])}"
    date = head["started"][:10]
    if date:
        text += f"; {date}"
    environment = {f"{name}={value}" for name, value in facts.get("environment", {}).items()}
    off = [f"`{variable}`" for variable in _NO_MULTICAST if variable in environment]
    if off:
        return f"{text}. Multicast was off ({', '.join(off)})."
    return f"{text}."


def _check_only(only: Sequence[str], rows: Sequence[Row]) -> None:
    """Raise ``ValueError`` if a name is not in the rows."""
    known = list(dict.fromkeys(row.algorithm for row in rows))
    unknown = [name for name in only if name not in known]
    if unknown:
        raise ValueError(f"--only: expected some of {', '.join(known)}; got {', '.join(unknown)}")


def _titled(table: ResultTable, columns: Sequence[Column]) -> str:
    """Return a table under its caption."""
    return f"**{table.caption()}.** Times in {table.layout.unit}.\n\n{grid(columns)}"


def _explanation(text: str, rest: Sequence[str]) -> str:
    """Return the sentences that follow tables: the first explains the mark, if ``text`` has it."""
    mark = ["† slower than the fastest baseline."] if f"{_SLOWER} |" in text else []
    return " ".join([*mark, *rest])


def markdown(head: dict[str, Any], rows: Sequence[Row], *, only: Sequence[str] = ()) -> str:
    """Return the tables of one file, one for each way to launch, with versions and machine.

    A file with rows of ``--blocks``, or of matmuls beside all-gathers, has a line for each
    algorithm and baseline.

    Args:
        only: algorithms and baselines that have a column, besides the fastest of all; if empty,
            those of the layout.
    """
    _check_only(only, rows)
    if any(row.launch == "simulator" for row in rows):
        raise ValueError("expected rows with times, got those of a simulated job, which has none")
    if not registry.layout(head["benchmark"]).timed:
        raise ValueError(f"expected rows with times, got those of {head['benchmark']}")
    parts = []
    hidden: list[str] = []
    floor_text = ""
    for table in tables(head, rows):
        layout = table.layout
        names = tuple(only)
        if table.is_by_label and not names:
            names = tuple(dict.fromkeys(row.algorithm for row in rows))
        labels = layout.labels(table.rows, names)
        if table.is_by_label:
            parts.append(_titled(table, table.columns_by_label(labels)))
        else:
            parts.append(_titled(table, table.columns(labels)))
            if any(table.floors()):
                floor_text = layout.floor_text(rows[0], floor_of(head, table.rows))
        notes = table.notes(labels)
        if notes:
            parts.append("\n".join(notes))
        hidden += [row.algorithm for row in table.rows if layout.label(row) not in labels]
    rest = [floor_text] if floor_text else []
    if hidden and not only:
        names_text = ", ".join(f"`{name}`" for name in dict.fromkeys(hidden))
        rest.append(f"The file also has {names_text}, which `report --only` shows.")
    explanation = _explanation("\n".join(parts), rest)
    if explanation:
        parts.append(explanation)
    parts += [versions(head), f"```bash\n{head['command']}\n```"]
    return "\n\n".join(parts) + "\n"


def brief_markdown(head: dict[str, Any], rows: Sequence[Row]) -> str:
    """Return the first table, with few sizes, one baseline and the fastest."""
    table = tables(head, rows)[0]
    labels = table.layout.labels(table.rows)
    columns = (
        table.columns_by_label(labels) if table.is_by_label else table.columns(labels, brief=True)
    )
    text = _titled(table, columns)
    explanation = _explanation(text, [])
    return f"{text}\n\n{explanation}\n" if explanation else f"{text}\n"


Results = Sequence[tuple[dict[str, Any], Sequence[Row]]]
"""Heads and rows of files."""


def _compared(results: Results) -> list[ResultTable]:
    return [table for head, rows in results for table in tables(head, rows) if table.baselines]


def _grid_of(headings: Sequence[str], lines: Sequence[tuple[str, ...]]) -> str:
    columns = [
        Column(heading, [line[place] for line in lines], "right" if place else "left")
        for place, heading in enumerate(headings)
    ]
    return grid(columns) + "\n"


def losses(results: Results) -> str:
    """Return a table with a line for each column of tdcoll's that loses.

    It has the sizes at which a baseline is faster, and by how much.
    """
    compared = _compared(results)
    lines = [line for table in compared for line in table.losses()]
    if lines:
        headings = ("calls", "sizes that lose", "tdcoll's time is longer by", "fastest baseline")
        return _grid_of(headings, lines)
    captions = "; ".join(table.caption() for table in compared)
    return f"tdcoll loses at no size: {captions}.\n"


def standing(results: Results) -> str:
    """Return a table with a line for each table of the files: how ``"auto"`` compares with the
    fastest baseline."""
    lines = [table.standing() for table in _compared(results)]
    headings = ("calls", "sizes", "fastest baseline / tdcoll", "tdcoll isn't slower at")
    return _grid_of(headings, lines)
