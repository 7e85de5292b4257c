# SPDX-License-Identifier: Apache-2.0
"""Plots of results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tdcoll.bench.arithmetic import Floor, all_gather_bus_bandwidth, format_bytes
from tdcoll.bench.floors import floor_of
from tdcoll.bench.layouts import LAYOUTS, Layout, indices
from tdcoll.bench.rows import Row, distinct
from tdcoll.bench.table import signal_name

__all__ = ["plot"]


def _panel(axis: Any, lines: dict[str, list[Any]], x: Callable[[Any], int], y: Callable[[Any], float]) -> None:
    """One line for each name, both axes logarithmic; peers' are dashed. Names without rows keep their colour."""
    for position, (label, rows) in enumerate(lines.items()):
        if rows := sorted(rows, key=x):
            style = "--" if rows[0].peer else "-"
            style += f"C{position}"
            axis.plot([x(row) for row in rows], [y(row) for row in rows], style, marker="o", markersize=3, label=label)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    axis.yaxis.set_major_formatter("{x:g}")
    axis.grid(True, which="both", alpha=0.3)


def _ticks(axis: Any, values: Sequence[int], write: Callable[[int], str], heading: str) -> None:
    ticks = sorted(set(values))
    axis.set_xticks(ticks, [write(value) for value in ticks], rotation=45)
    axis.minorticks_off()
    axis.set_xlabel(heading)


def _plot_all_gather(plt: Any, lines: dict[str, list[Row]], floor: Floor | None = None) -> Any:
    """Latency and bus bandwidth against size, with the floor as a line where all rows are of one number of ranks."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    _panel(axes[0], lines, lambda row: row.bytes_per_rank, lambda row: row.median_us)
    _panel(axes[1], lines, lambda row: row.bytes_per_rank, lambda row: row.busbw_gbps)
    every = [row for rows in lines.values() for row in rows]
    if floor is not None and len(worlds := {row.ranks for row in every}) == 1:
        (world,) = worlds
        least = {nbytes: floor.us(nbytes, world) for nbytes in sorted({row.bytes_per_rank for row in every})}
        axes[0].plot(list(least), list(least.values()), ":", color="black", label="floor")
        rates = [all_gather_bus_bandwidth(nbytes, world, us) for nbytes, us in least.items()]
        if world > 1:
            axes[1].plot(list(least), rates, ":", color="black", label="floor")
    for axis, quantity in zip(axes, ("latency, µs", "bus bandwidth, GB/s"), strict=True):
        axis.set_ylabel(quantity)
        _ticks(axis, [row.bytes_per_rank for row in every], format_bytes, "bytes per rank")
    axes[0].legend()
    return figure


def _plot_panels(
    plt: Any, lines: dict[str, list[Any]], across: Callable[[Any], str], down: Callable[[Any], str], layout: Layout
) -> Any:
    """Time against rows per rank or list, a panel for each pair of ``across`` and ``down``."""
    every = [row for rows in lines.values() for row in rows]
    columns, rows = distinct([across(row) for row in every]), distinct([down(row) for row in every])
    size = (1 + 3.6 * len(columns), 1 + 2.8 * len(rows))
    figure, axes = plt.subplots(len(rows), len(columns), figsize=size, layout="constrained", squeeze=False)
    handles: dict[str, Any] = {}
    for axis, place in zip(axes.flat, ((row, column) for row in rows for column in columns), strict=True):
        chosen = {label: [row for row in its if (down(row), across(row)) == place] for label, its in lines.items()}
        _panel(axis, chosen, lambda row: row.rows, lambda row: row.median_us * layout.scale)
        here = [row for its in chosen.values() for row in its]
        if floors := sorted({(row.rows, row.floor_us * layout.scale) for row in here if getattr(row, "floor_us", 0)}):
            axis.plot(*zip(*floors, strict=True), ":", color="black", label="floor")
        _ticks(axis, [row.rows for row in here if not row.peer], lambda value: f"{value:,}", "rows")
        axis.set_ylabel(layout.unit)
        axis.set_title(", ".join(place))
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=max(1, int(size[0] // 2.6)))
    return figure


def _plot_signal(plt: Any, lines: dict[str, list[Any]]) -> Any:
    """Bars: what each pair, and all together, take."""
    places = distinct([(signal_name(row), row.rounds) for rows in lines.values() for row in rows])
    figure, axis = plt.subplots(figsize=(2 + 0.9 * len(places), 4.2), layout="constrained")
    width = 0.8 / len(lines)
    for position, (label, rows) in enumerate(lines.items()):
        at = [places.index((signal_name(row), row.rounds)) + (position + 0.5) * width - 0.4 for row in rows]
        axis.bar(at, [row.median_us for row in rows], width, label=label)
    names = [name + ("" if rounds > 1 else "\n(a launch)") for name, rounds in places]
    axis.set_xticks(range(len(places)), names, rotation=45, ha="right")
    axis.set_ylabel("µs")
    axis.grid(True, axis="y", alpha=0.3)
    axis.legend()
    return figure


_PLOTS: dict[str, Callable[..., Any]] = {
    "all_gather": _plot_all_gather,
    "tune": _plot_all_gather,
    "sparse_all_reduce": partial(
        _plot_panels, across=lambda row: f"dim {row.dim}", down=indices, layout=LAYOUTS["sparse_all_reduce"]
    ),
    "index_match": partial(
        _plot_panels,
        across=lambda row: f"task {row.task}",
        down=lambda row: row.distribution,
        layout=LAYOUTS["index_match"],
    ),
    "signal": _plot_signal,
}


def plot(results: Sequence[tuple[dict[str, Any], list[Any]]], path: Path, floor: Floor | None = None) -> None:
    """Times against size, one line for each algorithm and peer; ``floor`` as for :func:`.report.markdown`.

    Raises:
        ValueError: nothing was timed, or the files are of different benchmarks.
    """
    if len(kinds := distinct([head["benchmark"] for head, _ in results])) > 1:
        raise ValueError(f"a plot is of one benchmark; got {', '.join(kinds)}")
    lines: dict[str, list[Any]] = {}
    launches = {row.launch for _, others in results for row in others if row.median_us}
    for position, (_, rows) in enumerate(results):
        for row in rows:
            if row.median_us and row.check == "ok":
                launch = f", {row.launch}" if len(launches) > 1 else ""
                source = f" ({position + 1})" if len(results) > 1 else ""
                lines.setdefault(f"{row.label}{launch}{source}", []).append(row)
    if not lines:
        raise ValueError("nothing to plot: no times in these files")
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    make = _PLOTS[kinds[0]]
    if make is _plot_all_gather:
        floors = {floor_of(head, [row for row in rows if row.median_us], floor) for head, rows in results}
        make = partial(make, floor=floors.pop() if len(floors) == 1 else None)
    figure = make(plt, lines)
    figure.savefig(path, dpi=150)
    plt.close(figure)
