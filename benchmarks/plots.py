# SPDX-License-Identifier: Apache-2.0
"""Pictures of results: time against size or multiprocessors, for tdcoll and the baselines."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks import registry
from benchmarks.layout import (
    Bars,
    Layout,
    floor_of,
    label_name,
    launch_name,
    machine_name,
    requested_blocks,
)
from tdcoll.tools.measure.results import Row

MAX_CURVES = 8
"""The most curves that a reader can tell apart, including the lower bound."""

_OUR_COLOURS = (
    "#d55e00",
    "#e69f00",
    "#8c564b",
    "#f0e442",
    "#ff9896",
    "#c49c94",
    "#b5651d",
    "#ffbb78",
)
_BASELINE_COLOURS = (
    "#0072b2",
    "#56b4e9",
    "#009e73",
    "#cc79a7",
    "#7f7f7f",
    "#bcbd22",
    "#9467bd",
    "#98df8a",
)
"""Warm colours are tdcoll's."""

_BASELINE_MARKERS = "sD^vXPp*"

_STYLE: dict[Any, Any] = {
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


Styles = dict[str, dict[str, Any]]
"""The style of each label's curve, as arguments of ``plot``."""


def _styles(ours: Sequence[str], baselines: Sequence[str]) -> Styles:
    """Return how the curve of each label looks."""
    styles: Styles = {}
    for label, colour in zip(dict.fromkeys(ours), _OUR_COLOURS, strict=False):
        styles[label] = {
            "color": colour,
            "marker": "o",
            "markersize": 5,
            "linewidth": 2.6,
            "zorder": 3,
            "linestyle": "--" if styles else "-",
        }
    marked = zip(_BASELINE_COLOURS, _BASELINE_MARKERS, strict=True)
    for label, (colour, marker) in zip(dict.fromkeys(baselines), marked, strict=False):
        styles[label] = {
            "color": colour,
            "marker": marker,
            "markersize": 4.5,
            "linewidth": 1.4,
            "zorder": 3 - len(styles) / 9,
        }
    return styles


def _panels(title: str, lines: int, columns: int, **shared: Any) -> tuple[Any, Any]:
    """Return a figure with ``lines`` times ``columns`` panels, and these as an array."""
    from matplotlib.figure import Figure

    size = (max(6.0, 4.6 * columns), 1.0 + 3.4 * lines)
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(title, fontsize=13)
    return figure, figure.subplots(lines, columns, squeeze=False, **shared)


def _add_legend(figure: Any, axes: Any) -> None:
    """Add one legend of all panels."""
    handles = {}
    for axis in axes.flat:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles[label] = handle
    columns = 3 if axes.shape[1] == 1 else 4
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=columns, frameon=False
    )


def _name_axes(axes: Any, x: str, unit: str) -> None:
    """Name the horizontal axes at the bottom and the vertical ones at the left."""
    for axis in axes[-1]:
        axis.set_xlabel(x)
    for axis in axes[:, 0]:
        axis.set_ylabel(f"time, {unit} (lower is better)")


def draw(head: dict[str, Any], rows: Sequence[Row], only: Sequence[str] = ()) -> Any:
    """Return a matplotlib figure of one file's rows, with a panel for each kind of row.

    Both axes are logarithmic. Rows of ``--blocks`` are drawn over multiprocessors instead, if
    ``only`` is empty, with a panel for each size. Of matmuls beside all-gathers, the time that
    these add is drawn. Matmuls that communicate have bars instead of curves.

    Args:
        only: algorithms and baselines to draw; if empty, tdcoll's columns and all baselines, or a
            layout's if these are too many. Bars are always the layout's.

    Raises:
        ValueError: nothing was timed, there are more than :data:`MAX_CURVES` curves, or the
            benchmark has no pictures.
    """
    layout: Layout = registry.layout(head["benchmark"])
    is_beside = head["benchmark"] == "beside"
    if layout.x is None and layout.bars is None and not is_beside:
        raise ValueError(
            f"expected a benchmark over sizes, got {head['benchmark']}, which has no pictures"
        )
    timed = [row for row in rows if row.median_us and row.check == "ok"]

    from matplotlib import rc_context

    with rc_context(_STYLE):
        if is_beside:
            return _draw_added(head, timed, layout, only)
        if layout.bars is not None:
            return _draw_bars(head, timed, layout, layout.bars)
        if not only and any(requested_blocks(row) for row in timed):
            return _draw_by_blocks(head, timed, layout)
        return _draw_by_size(head, timed, layout, only)


def _points(head: dict[str, Any], rows: list[Row], layout: Layout) -> pd.DataFrame:
    """Return a line for each row: its place, time, lower bound, label and panel."""
    assert layout.x is not None
    floor = floor_of(head, rows)
    bounds = pd.Series([layout.floor(row, floor) for row in rows], dtype=float)
    panels = [layout.panel(row) for row in rows]
    return pd.DataFrame(
        {
            "x": [layout.x(row) for row in rows],
            "time": [layout.time_of(row) for row in rows],
            "floor": bounds * layout.scale,
            "label": [layout.label(row) for row in rows],
            "peer": [row.peer for row in rows],
            "line": [line for line, _ in panels],
            "column": [column for _, column in panels],
        }
    )


def _rows_to_draw(
    head: dict[str, Any], timed: list[Row], layout: Layout, only: Sequence[str]
) -> list[Row]:
    """Return the rows of a picture over sizes."""
    labels = layout.labels(timed, tuple(only))
    rows = [row for row in timed if layout.label(row) in labels or (row.peer and not only)]
    if not rows:
        raise ValueError("nothing to plot: expected rows with times, got none")
    floor = floor_of(head, rows)
    curves = list(
        dict.fromkeys(layout.label(row) for row in sorted(rows, key=lambda row: row.peer))
    )
    count = len(curves) + any(layout.floor(row, floor) for row in rows)
    if count <= MAX_CURVES:
        return rows
    if layout.drawn and not only:
        return _rows_to_draw(head, timed, layout, layout.drawn)
    raise ValueError(
        f"expected at most {MAX_CURVES} curves, the floor included, got {', '.join(curves)}: use "
        "--only"
    )


def _draw_by_size(
    head: dict[str, Any], timed: list[Row], layout: Layout, only: Sequence[str]
) -> Any:
    """Return time over sizes."""
    rows = _rows_to_draw(head, timed, layout, only)
    points = _points(head, rows, layout)
    ours = points[~points["peer"]]
    baselines = points[points["peer"]]
    styles = _styles(list(ours["label"]), list(baselines["label"]))
    ticks = sorted((points if ours.empty else ours)["x"].unique())
    limits = (0.6 * points["time"].min(), 1.4 * points["time"].max())
    lines = list(points["line"].unique())
    columns = list(points["column"].unique())
    title = f"{layout.title}, {machine_name(head, rows[0])}"
    figure, axes = _panels(title, len(lines), len(columns), sharex=True, sharey=True)
    for place, line in enumerate(lines):
        for column, axis in zip(columns, axes[place], strict=True):
            in_panel = (points["line"] == line) & (points["column"] == column)
            here = points[in_panel].sort_values("x", kind="stable")
            _draw_curves(axis, here, "x", styles)
            _draw_floor(axis, here)
            axis.set(xscale="log", yscale="log", title=", ".join(filter(None, (line, column))))
            _set_ticks(axis, ticks, layout, limits)
    _name_axes(axes, list(layout.size)[-1], layout.unit)
    _add_legend(figure, axes)
    return figure


def _draw_curves(axis: Any, points: pd.DataFrame, x: str, styles: Styles) -> None:
    """Draw the time of each label over a column of its points."""
    for label, style in styles.items():
        curve = points[points["label"] == label]
        if len(curve):
            axis.plot(curve[x], curve["time"], **style, label=label_name(label))


def _draw_floor(axis: Any, points: pd.DataFrame) -> None:
    """Draw the lower bound, if it is known."""
    bounds = points[["x", "floor"]].dropna().drop_duplicates().sort_values(["x", "floor"])
    if len(bounds):
        axis.plot(bounds["x"], bounds["floor"], ":", color="black", linewidth=1.4, label="floor")


def _set_ticks(axis: Any, ticks: list[int], layout: Layout, limits: tuple[float, float]) -> None:
    """Set ticks at the sizes, and at 1, 2 and 5 times powers of ten."""
    from matplotlib.ticker import LogLocator

    axis.set_xticks(ticks, [layout.x_text(x) for x in ticks], rotation=45, minor=False)
    axis.xaxis.minorticks_off()
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.minorticks_off()
    axis.set_ylim(*limits)
    axis.grid(True, which="major", alpha=0.35)
    axis.label_outer()


def _panel_title(row: Row, layout: Layout, several_launches: bool) -> str:
    parts = [*layout.size_of(row)]
    if several_launches:
        parts.append(launch_name(row))
    return ", ".join(parts)


def _block_points(rows: list[Row], panels: list[str], layout: Layout) -> pd.DataFrame:
    """Return a line for each row of tdcoll's that is drawn over multiprocessors.

    A curve has the rows in which ``--blocks`` varied an algorithm. Other rows are points, unless
    their algorithm has a curve, or ``auto`` took it.
    """
    hidden = {row.facts.get("took") for row in rows}
    hidden |= {row.algorithm.split()[0] for row in rows if requested_blocks(row)}
    points = []
    for row, panel in zip(rows, panels, strict=True):
        on_curve = bool(requested_blocks(row))
        if not row.facts.get("sms") or (row.algorithm in hidden and not on_curve):
            continue
        name = row.algorithm.split()[0] if on_curve else row.algorithm
        point = {
            "panel": panel,
            "label": layout.label(replace(row, algorithm=name)),
            "sms": row.facts["sms"],
            "time": layout.time_of(row),
            "on_curve": on_curve,
        }
        points.append(point)
    return pd.DataFrame(points).sort_values(["on_curve", "sms"], ascending=[False, True])


def _draw_by_blocks(head: dict[str, Any], rows: list[Row], layout: Layout) -> Any:
    """Return time over multiprocessors. Baselines are horizontal lines."""
    several_launches = len({row.launch for row in rows}) > 1
    panels = [_panel_title(row, layout, several_launches) for row in rows]
    points = _block_points(rows, panels, layout)
    labels = list(points["label"].unique())
    styles = _styles(labels, [layout.label(row) for row in rows if row.peer])
    on_curve = points[points["on_curve"]]
    for label in labels:
        if label not in set(on_curve["label"]):
            styles[label] |= {"linestyle": "none", "markersize": 7}
    ticks = sorted({points["sms"].min(), points["sms"].max(), *on_curve["sms"]})
    titles = list(dict.fromkeys(panels))
    title = f"{layout.title}, {machine_name(head, rows[0])}"
    figure, axes = _panels(title, -(-len(titles) // 2), 2, sharex=True)
    for axis in axes.flat[len(titles) :]:
        axis.remove()
    for axis, panel in zip(axes.flat, titles, strict=False):
        _draw_curves(axis, points[points["panel"] == panel], "sms", styles)
        in_panel = [row for row, title in zip(rows, panels, strict=True) if title == panel]
        for row in in_panel:
            if row.peer:
                style = {**styles[layout.label(row)], "marker": None, "linestyle": "--"}
                name = label_name(layout.label(row))
                axis.axhline(layout.time_of(row), **style, label=name)
        slowest = max(layout.time_of(row) or 0.0 for row in in_panel)
        axis.set_xscale("log", base=2)
        axis.set_xticks(ticks, [str(tick) for tick in ticks], minor=False)
        axis.set(title=panel, ylim=(0, 1.1 * slowest))
        axis.grid(True, alpha=0.35)
    _name_axes(axes, "multiprocessors of tdcoll", layout.unit)
    _add_legend(figure, axes)
    return figure


def _draw_added(head: dict[str, Any], rows: list[Row], layout: Layout, only: Sequence[str]) -> Any:
    """Return the time that all-gathers added to matmuls.

    Each round is a point, and the median a line.
    """
    beside = [
        row for row in rows if row.algorithm != "alone" and (not only or row.algorithm in only)
    ]
    labels = list(dict.fromkeys(layout.label(row) for row in beside))
    sizes = list(dict.fromkeys(layout.size_of(row) for row in rows))
    title = f"{layout.title}, {machine_name(head, rows[0])}"
    figure, axes = _panels(title, 1, len(sizes), sharey=True)
    for axis, size in zip(axes.flat, sizes, strict=True):
        added = {
            layout.label(row): row.facts["added"] for row in beside if layout.size_of(row) == size
        }
        for place, label in enumerate(labels):
            colour = _BASELINE_COLOURS[0] if label == "nccl" else _OUR_COLOURS[0]
            median = statistics.median(added[label])
            axis.plot([place] * len(added[label]), added[label], "o", color=colour, alpha=0.6)
            axis.plot([place - 0.3, place + 0.3], [median, median], color=colour, linewidth=2.6)
            axis.annotate(f"{median:.0f}", (place + 0.32, median), va="center", fontsize=9)
        axis.axhline(0, color="black", linewidth=0.8)
        axis.set_title(", ".join(size))
        names = [label_name(label) for label in labels]
        axis.set_xticks(range(len(labels)), names, rotation=30, ha="right")
        axis.set_xlim(-0.5, len(labels) - 0.2)
        axis.grid(True, axis="y", alpha=0.35)
    axes[0][0].set_ylabel(f"added to the matmuls, {layout.unit}\n(lower is better; line: median)")
    return figure


def _draw_bars(head: dict[str, Any], rows: list[Row], layout: Layout, bars: Bars) -> Any:
    """Return bars of times as multiples of a baseline's, whose own time stands below them."""
    graphs = [row for row in rows if row.launch == "graph"]
    times = {
        (bars.panel(row), bars.size(row), row.algorithm): layout.time_of(row) or 0.0
        for row in graphs
    }
    places = [(panel, size) for panel, size, name in times if name == bars.unit]
    if not places:
        raise ValueError(f"nothing to plot: expected rows of {bars.unit} with times, got none")
    panels = list(dict.fromkeys(panel for panel, _ in places))
    title = f"{layout.title}, {machine_name(head, graphs[0])}, {launch_name(graphs[0])}"
    figure, axes = _panels(title, len(panels), 1, sharey=True)
    figure.set_size_inches(9.0, 1.0 + 2.9 * len(panels))
    colours = [_OUR_COLOURS[0], *_BASELINE_COLOURS]
    width = 0.8 / len(bars.names)
    for axis, panel in zip(axes.flat, panels, strict=True):
        sizes = [size for place, size in places if place == panel]
        for number, (algorithm, name) in enumerate(bars.names.items()):
            found = [
                (place, times[panel, size, algorithm] / times[panel, size, bars.unit])
                for place, size in enumerate(sizes)
                if times.get((panel, size, algorithm))
            ]
            if not found:
                continue
            offset = (number + 0.5) * width - 0.4
            x = [place + offset for place, _ in found]
            drawn = axis.bar(x, [height for _, height in found], width, color=colours[number])
            drawn.set_label(name)
            axis.bar_label(drawn, fmt="%.2f", fontsize=8)
        axis.axhline(1, color="black", linewidth=1.0, linestyle=":")
        labels = [f"{size}\n{times[panel, size, bars.unit]:.0f} {layout.unit}" for size in sizes]
        axis.set_xticks(range(len(sizes)), labels, fontsize=9)
        axis.set_title(panel)
        axis.set_ylabel(f"time / {bars.unit_name}")
        axis.grid(True, axis="y", alpha=0.35)
    axes[-1][0].set_xlabel(f"last line: time of {bars.unit_name} (bars: lower is better)")
    _add_legend(figure, axes)
    return figure


def plot(head: dict[str, Any], rows: Sequence[Row], path: Path, only: Sequence[str] = ()) -> None:
    """Write the figure of :func:`draw` as a PNG."""
    figure = draw(head, rows, only)
    figure.savefig(path, format="png", dpi=110, metadata={"Software": None})
