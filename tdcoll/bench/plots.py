# SPDX-License-Identifier: Apache-2.0
"""Pictures of results: time against size, for tdcoll and the baselines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tdcoll.bench.arithmetic import Floor, distinct, floor_of
from tdcoll.bench.rows import LAYOUTS, Row, machine, name_of, shown_labels

__all__ = ["CURVES", "draw", "plot"]

CURVES = 8
"""The most curves that a reader can tell apart, including the lower bound."""

_OURS = "#d55e00", "#e69f00", "#8c564b", "#f0e442", "#ff9896", "#c49c94", "#b5651d", "#ffbb78"
_PEERS = "#0072b2", "#56b4e9", "#009e73", "#cc79a7", "#7f7f7f", "#bcbd22", "#9467bd", "#98df8a"
"""Warm colours are tdcoll's."""

_MARKERS = "sD^vXPp*"


def draw(head: dict[str, Any], rows: Sequence[Row], only: Sequence[str] = (), floor: Floor | None = None) -> Any:
    """Return a matplotlib figure of one file's rows, both axes logarithmic, with a panel for each kind of row.

    Args:
        only: algorithms and baselines to draw; if empty, tdcoll's columns of the table and all baselines, or, if these
            are too many, those that the layout names.
        floor: lower bound to use instead of the known one.

    Raises:
        ValueError: nothing was timed, there are more than :data:`CURVES` curves, or the benchmark has no pictures.
    """
    layout = LAYOUTS[head["benchmark"]]
    if (x := layout.x) is None:
        raise ValueError(f"expected a benchmark over sizes, got {head['benchmark']}, of which there are no pictures")
    timed = [row for row in rows if row.median_us and row.check == "ok"]
    shown = shown_labels(layout, timed, only)
    chosen = [row for row in timed if row.label in shown or (row.peer and not only)]
    if not chosen:
        raise ValueError("nothing to plot: expected rows with times, got none")
    least = floor_of(head, chosen, floor)
    times = {id(row): (row.median_us or 0.0) * layout.scale for row in chosen}
    floors = {id(row): us * layout.scale for row in chosen if (us := layout.floor(row, least))}
    labels = distinct([row.label for row in sorted(chosen, key=lambda row: row.peer)])
    if len(labels) + bool(floors) > CURVES:
        if layout.drawn and not only:
            return draw(head, rows, layout.drawn, floor)
        raise ValueError(f"expected at most {CURVES} curves, the floor included, got {', '.join(labels)}: use --only")

    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    ours, peers = ([row.label for row in chosen if row.peer is peer] for peer in (False, True))
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
    ticks = sorted({x(row) for row in [row for row in chosen if not row.peer] or chosen})
    lines, columns = (distinct([layout.panel(row)[side] for row in chosen]) for side in (0, 1))
    size = (max(6.0, 4.6 * len(columns)), 1.0 + 3.4 * len(lines))
    with rc_context({"font.size": 11, "axes.titlesize": 12, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots(len(lines), len(columns), squeeze=False, sharex=True, sharey=True)
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
            axis.set_ylabel(f"time, {layout.unit}")
        figure.suptitle(f"{layout.title}, {machine(head, chosen[0])}", fontsize=13)
        found = [axis.get_legend_handles_labels() for axis in axes.flat]
        handles = {label: handle for its in found for handle, label in zip(*its, strict=True)}
        figure.legend(
            handles.values(), handles.keys(), loc="outside lower center", ncols=3 + (len(columns) > 1), frameon=False
        )
    return figure


def plot(
    head: dict[str, Any], rows: Sequence[Row], path: Path, only: Sequence[str] = (), floor: Floor | None = None
) -> None:
    """Write the figure of :func:`draw` as a PNG."""
    draw(head, rows, only, floor).savefig(path, format="png", dpi=150, metadata={"Software": None})
