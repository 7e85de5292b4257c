# SPDX-License-Identifier: Apache-2.0
"""Pictures of results: time against size or multiprocessors, for tdcoll and the baselines."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tdcoll.tools.bench.arithmetic import distinct, floor_of
from tdcoll.tools.bench.rows import LAYOUTS, Layout, Row, launch_of, machine, name_of, shown_labels

CURVES = 8
"""The most curves that a reader can tell apart, including the lower bound."""

_OURS = "#d55e00", "#e69f00", "#8c564b", "#f0e442", "#ff9896", "#c49c94", "#b5651d", "#ffbb78"
_PEERS = "#0072b2", "#56b4e9", "#009e73", "#cc79a7", "#7f7f7f", "#bcbd22", "#9467bd", "#98df8a"
"""Warm colours are tdcoll's."""

_MARKERS = "sD^vXPp*"


def _styles(ours: Sequence[str], peers: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return how the curve of each label looks."""
    styles: dict[str, dict[str, Any]] = {}
    for label, colour in zip(distinct(ours), _OURS, strict=False):
        styles[label] = {"color": colour, "marker": "o", "markersize": 5, "linewidth": 2.6, "zorder": 3}
        styles[label]["linestyle"] = "-" if len(styles) == 1 else "--"
    for label, colour, marker in zip(distinct(peers), _PEERS, _MARKERS, strict=False):
        styles[label] = {
            "color": colour,
            "marker": marker,
            "markersize": 4.5,
            "linewidth": 1.4,
            "zorder": 3 - len(styles) / 9,
        }
    return styles


def _panels(title: str, lines: int, columns: int, **shared: Any) -> tuple[Any, Any]:
    """Return a figure with so many panels, and these as an array."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(6.0, 4.6 * columns), 1.0 + 3.4 * lines), layout="constrained")
    figure.suptitle(title, fontsize=13)
    return figure, figure.subplots(lines, columns, squeeze=False, **shared)


def _legend(figure: Any, axes: Any) -> None:
    """Add one legend of all panels."""
    found = [axis.get_legend_handles_labels() for axis in axes.flat]
    handles = {label: handle for its in found for handle, label in zip(*its, strict=True)}
    columns = 3 + (axes.shape[1] > 1)
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=columns, frameon=False)


def draw(head: dict[str, Any], rows: Sequence[Row], only: Sequence[str] = ()) -> Any:
    """Return a matplotlib figure of one file's rows, both axes logarithmic, with a panel for each kind of row.

    Rows of ``--blocks`` are drawn over multiprocessors instead, if ``only`` is empty, with a panel for each size. Of
    matmuls beside all-gathers, the time that these add is drawn.

    Args:
        only: algorithms and baselines to draw; if empty, tdcoll's columns and all baselines, or a layout's if too many.

    Raises:
        ValueError: nothing was timed, there are more than :data:`CURVES` curves, or the benchmark has no pictures.
    """
    layout = LAYOUTS[head["benchmark"]]
    beside = head["benchmark"] == "beside"
    if layout.x is None and not beside:
        raise ValueError(f"expected a benchmark over sizes, got {head['benchmark']}, of which there are no pictures")
    timed = [row for row in rows if row.median_us and row.check == "ok"]

    from matplotlib import rc_context

    with rc_context({"font.size": 11, "axes.titlesize": 12, "axes.spines.top": False, "axes.spines.right": False}):
        if beside:
            return _beside(head, timed, layout, only)
        if not only and any(row.blocks for row in timed):
            return _by_blocks(head, timed, layout)
        return _by_size(head, timed, layout, only)


def _by_size(head: dict[str, Any], timed: Sequence[Row], layout: Layout, only: Sequence[str]) -> Any:
    """Return time over sizes."""
    x = layout.x
    assert x is not None
    shown = shown_labels(layout, timed, only)
    chosen = [row for row in timed if row.label in shown or (row.peer and not only)]
    if not chosen:
        raise ValueError("nothing to plot: expected rows with times, got none")
    least = floor_of(head, chosen)
    times = {id(row): (row.median_us or 0.0) * layout.scale for row in chosen}
    floors = {id(row): us * layout.scale for row in chosen if (us := layout.floor(row, least))}
    labels = distinct([row.label for row in sorted(chosen, key=lambda row: row.peer)])
    if len(labels) + bool(floors) > CURVES:
        if layout.drawn and not only:
            return _by_size(head, timed, layout, layout.drawn)
        raise ValueError(f"expected at most {CURVES} curves, the floor included, got {', '.join(labels)}: use --only")

    from matplotlib.ticker import LogLocator

    ours, peers = ([row.label for row in chosen if row.peer is peer] for peer in (False, True))
    styles = _styles(ours, peers)
    ticks = sorted({x(row) for row in [row for row in chosen if not row.peer] or chosen})
    lines, columns = (distinct([layout.panel(row)[part] for row in chosen]) for part in (0, 1))
    title = f"{layout.title}, {machine(head, chosen[0])}"
    figure, axes = _panels(title, len(lines), len(columns), sharex=True, sharey=True)
    for down, across in ((line, column) for line in lines for column in columns):
        axis = axes[lines.index(down)][columns.index(across)]
        here = sorted([row for row in chosen if layout.panel(row) == (down, across)], key=x)
        for label in labels:
            if mine := [(x(row), times[id(row)]) for row in here if row.label == label]:
                axis.plot(*zip(*mine, strict=True), **styles[label], label=name_of(label))
        if known := sorted({(x(row), floors[id(row)]) for row in here if id(row) in floors}):
            axis.plot(*zip(*known, strict=True), ":", color="black", linewidth=1.4, label="floor")
        axis.set(xscale="log", yscale="log", title=", ".join(filter(None, (down, across))))
        axis.set_xticks(ticks, map(layout.x_text, ticks), rotation=45, minor=False)
        axis.xaxis.minorticks_off()
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.minorticks_off()
        axis.set_ylim(0.6 * min(times.values()), 1.4 * max(times.values()))
        axis.grid(True, which="major", alpha=0.35)
        axis.label_outer()
    for axis in axes[-1]:
        axis.set_xlabel(list(layout.size)[-1])
    for axis in axes[:, 0]:
        axis.set_ylabel(f"time, {layout.unit} (lower is better)")
    _legend(figure, axes)
    return figure


def _by_blocks(head: dict[str, Any], rows: Sequence[Row], layout: Layout) -> Any:
    """Return time over multiprocessors, with curves of the algorithms that ``--blocks`` varied.

    tdcoll's other rows are points, without algorithms that are a curve, or that ``auto`` took. Baselines are lines.
    """

    def name(row: Row) -> str:
        return f"tdcoll {row.algorithm.split()[0]}" if row.blocks else row.label

    def panel(row: Row) -> str:
        return ", ".join([*layout.key(row), *([launch_of(row)] if len({row.launch for row in rows}) > 1 else [])])

    hidden = {row.facts.get("took") for row in rows} | {row.algorithm.split()[0] for row in rows if row.blocks}
    ours = [row for row in rows if row.facts.get("sms") and (row.blocks or row.algorithm not in hidden)]
    ours.sort(key=lambda row: (not row.blocks, row.facts["sms"]))
    peers = [row for row in rows if row.peer]
    styles = _styles([name(row) for row in ours], [row.label for row in peers])
    curves = {name(row) for row in ours if row.blocks}
    sms = [row.facts["sms"] for row in ours]
    ticks = sorted({min(sms), max(sms), *(row.facts["sms"] for row in ours if row.blocks)})
    panels = distinct(map(panel, rows))
    figure, axes = _panels(f"{layout.title}, {machine(head, rows[0])}", -(-len(panels) // 2), 2, sharex=True)
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    for axis, size in zip(axes.flat, panels, strict=False):
        for label in distinct(map(name, ours)):
            if mine := [(row.facts["sms"], row.median_us) for row in ours if (name(row), panel(row)) == (label, size)]:
                style = styles[label] if label in curves else {**styles[label], "linestyle": "none", "markersize": 7}
                axis.plot(*zip(*mine, strict=True), **style, label=name_of(label))
        for row in (row for row in peers if panel(row) == size):
            style = {**styles[row.label], "marker": None, "linestyle": "--"}
            axis.axhline(row.median_us, **style, label=name_of(row.label))
        axis.set_xscale("log", base=2)
        axis.set_xticks(ticks, map(str, ticks), minor=False)
        axis.set(title=size, ylim=(0, 1.1 * max(row.median_us or 0.0 for row in rows if panel(row) == size)))
        axis.grid(True, alpha=0.35)
    for axis in axes[-1]:
        axis.set_xlabel("multiprocessors of tdcoll")
    for axis in axes[:, 0]:
        axis.set_ylabel(f"time, {layout.unit} (lower is better)")
    _legend(figure, axes)
    return figure


def _beside(head: dict[str, Any], rows: Sequence[Row], layout: Layout, only: Sequence[str]) -> Any:
    """Return the time that all-gathers added to matmuls: a point for each round, and a line at the median."""
    labels = distinct([row.label for row in rows if row.label != "alone" and (not only or row.algorithm in only)])
    panels = distinct([layout.key(row) for row in rows])
    figure, axes = _panels(f"{layout.title}, {machine(head, rows[0])}", 1, len(panels), sharey=True)
    for axis, size in zip(axes.flat, panels, strict=True):
        for place, label in enumerate(labels):
            (added,) = (row.facts["added"] for row in rows if (layout.key(row), row.label) == (size, label))
            colour, median = _PEERS[0] if label == "nccl" else _OURS[0], statistics.median(added)
            axis.plot([place] * len(added), added, "o", color=colour, alpha=0.6)
            axis.plot([place - 0.3, place + 0.3], [median, median], color=colour, linewidth=2.6)
            axis.annotate(f"{median:.0f}", (place + 0.32, median), va="center", fontsize=9)
        axis.axhline(0, color="black", linewidth=0.8)
        axis.set_title(", ".join(size))
        axis.set_xticks(range(len(labels)), map(name_of, labels), rotation=30, ha="right")
        axis.set_xlim(-0.5, len(labels) - 0.2)
        axis.grid(True, axis="y", alpha=0.35)
    axes[0][0].set_ylabel(f"added to the matmuls, {layout.unit}\n(lower is better; line: median)")
    return figure


def plot(head: dict[str, Any], rows: Sequence[Row], path: Path, only: Sequence[str] = ()) -> None:
    """Write the figure of :func:`draw` as a PNG."""
    draw(head, rows, only).savefig(path, format="png", dpi=110, metadata={"Software": None})
