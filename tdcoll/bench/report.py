# SPDX-License-Identifier: Apache-2.0
"""``python -m tdcoll.bench report``: Markdown tables and plots of the benchmarks' JSON files."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tdcoll.bench import rows as files
from tdcoll.bench.arithmetic import Floor, all_gather_bus_bandwidth, format_bytes, ratio
from tdcoll.bench.rows import MatchRow, Measured, Row, SparseRow
from tdcoll.bench.table import (
    Column,
    all_gather_columns,
    match_columns,
    signal_columns,
    signal_name,
    sparse_columns,
)

__all__ = ["FLOORS", "caption", "insert", "main", "markdown", "plot"]

_LAUNCHES = {"graph": "CUDA graph replays", "eager": "eager calls", "simulator": "the simulator"}


def _short(value: float | None) -> str:
    """Three digits or more."""
    return "–" if value is None else f"{value:.3g}" if value < 100 else f"{value:.0f}"


@dataclass(frozen=True)
class _Layout:
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


def _indices(row: SparseRow) -> str:
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

_LAYOUTS: dict[str, _Layout] = {
    "all_gather": _Layout(
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
    "sparse_all_reduce": _Layout(
        title="Sparse all-reduce",
        about=lambda row: f", {row.num_rows:,} rows of {row.dtype}",
        leading=[
            Column("indices", lambda row: _indices(row)),
            Column("rows per rank", lambda row: f"{row.rows:,}"),
            Column("dim", lambda row: str(row.dim)),
            Column("union", lambda row: f"{row.union_rows:,.0f}"),
            Column("floor, ms", lambda row: f"{row.floor_us / 1e3:.3g}"),
        ],
        where=lambda row: f"{_indices(row)}, {row.rows:,} × {row.dim}",
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
    "index_match": _Layout(
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
    "signal": _Layout(
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

_LAYOUTS["tune"] = dataclasses.replace(_LAYOUTS["all_gather"], title="All-gather, candidates of a tuning table")


def _distinct(values: Sequence[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


def _hardware(provenance: dict[str, Any], row: Measured) -> str:
    gpus = Counter(gpu for gpu in provenance.get("gpus", []) if gpu)
    names = " and ".join(f"{count} × {name}" for name, count in gpus.items()) or f"{row.ranks} simulated ranks"
    emulated = provenance.get("environment", {}).get("TDCOLL_EMULATE_NODES", "1")
    nodes = f"{row.nodes} node{'s' if row.nodes > 1 else ''}"
    return f"{names} on {nodes}{' (emulated)' if emulated not in ('', '1') else ''}"


def caption(head: dict[str, Any], row: Measured) -> str:
    """What the rows like ``row`` of a file were measured with, in a sentence or two."""
    facts, layout = head["provenance"], _LAYOUTS[head["benchmark"]]
    commit = f" at {facts['commit'][:12]}" if facts.get("commit") else ""
    changed = " with uncommitted changes" if facts.get("dirty") else ""
    versions = [f"tdcoll {facts['tdcoll']}{commit}{changed}"]
    for key, name in (
        ("torch", "PyTorch"),
        ("triton", "Triton"),
        ("nvshmem", "NVSHMEM"),
        ("nccl", "NCCL"),
        ("cuda", "CUDA"),
        ("driver", "driver"),
    ):
        if facts.get(key):
            versions.append(f"{name} {facts[key]}")
    straggler = ", a random rank delayed in each iteration" if row.straggler else ""
    launch = _LAUNCHES.get(row.launch, row.launch)
    where = f"{_hardware(facts, row)}{layout.about(row)}, {launch}{straggler}"
    return f"**{layout.title} on {where}.** {', '.join(versions)}; {head['started'][:10]}."


def _line(texts: Sequence[str]) -> str:
    return "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |"


def _grid(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    return [_line(headings), _line(["---:"] * len(headings)), *map(_line, lines)]


def _time(row: Measured | None, scale: float) -> str:
    if row is None or row.check == "not run":
        return "–"
    time = _short(None if row.median_us is None else row.median_us * scale)
    return time if row.check == "ok" else f"{time} WRONG"


def _fastest(rows: Sequence[Measured]) -> Measured | None:
    """The fastest whose result was right."""
    good = [row for row in rows if row.check == "ok" and row.median_us]
    return min(good, key=lambda row: row.median_us or 0.0, default=None)


def _ratio(peer: Measured | None, ours: Measured | None) -> str:
    """How many times faster than the peer ours is."""
    faster = ratio(peer.median_us if peer else None, ours.median_us if ours else None)
    return "–" if faster is None else f"{faster:.2f}"


FLOORS = {"NVIDIA H200": Floor(launch_us=0.8, crossing_us=1.0, gbps=341.0)}
"""Of GPUs with NVLink to all others of the node: launch and rate are measured; the crossing is about what a store and
the load that sees it take, and a result of the signal benchmark says it better."""

PAIR_GBPS = {"NVIDIA H200": 361.0}
"""The rate between two GPUs that have nobody else to send to, both ways at once: the same for stores, bulk copies (TMA)
and copy engines."""


def _floor(head: dict[str, Any], rows: Sequence[Measured], floor: Floor | None) -> Floor | None:
    """That of these rows, if there is one: inside a node, of GPUs all of one kind."""
    gpus = set(head["provenance"].get("gpus", []))
    if not all(isinstance(row, Row) and row.nodes == 1 and row.launch != "simulator" for row in rows):
        return None
    if floor is not None or len(gpus) != 1 or (name := gpus.pop()) not in FLOORS:
        return floor
    pair = name in PAIR_GBPS and all(row.ranks == 2 for row in rows)
    return dataclasses.replace(FLOORS[name], gbps=PAIR_GBPS[name]) if pair else FLOORS[name]


def _timed_table(layout: _Layout, rows: Sequence[Measured], floor: Floor | None = None) -> list[str]:
    """One line per size: times of all, then what tdcoll's fastest reaches, and ratios to it."""
    sizes = _distinct([row.size for row in rows if not row.peer]) or _distinct([row.size for row in rows])
    lines = {size: {row.label: row for row in rows if row.size == size} for size in sizes}
    ours = _distinct([row.label for row in rows if not row.peer])
    ran = _distinct([row.label for row in rows if row.peer and row.median_us and row.size in sizes])
    headings = [column.heading for column in layout.leading]
    headings += [f"{label}, {layout.unit}" for label in (*ours, *ran)]
    if floor is not None:
        headings += [f"floor, {layout.unit}", "tdcoll's best / floor"]
    headings += [f"tdcoll's best{'' if c.heading[0] == '/' else ','} {c.heading}" for c in layout.measured]
    headings += [f"{peer} / tdcoll's best" for peer in ran]
    if len(ran) > 1:
        headings.append("fastest peer / tdcoll's best")
    texts = []
    for found in lines.values():
        mine = [row for row in found.values() if not row.peer]
        best = _fastest([row for row in mine if layout.rival(row)] or mine)
        peers = [found.get(peer) for peer in ran]
        line = [column.text(next(iter(found.values()))) for column in layout.leading]
        line += [_time(found.get(label), layout.scale) for label in (*ours, *ran)]
        if floor is not None:
            row: Any = next(iter(found.values()))
            least = floor.us(row.bytes_per_rank, row.ranks)
            line += [_short(least), "–" if best is None or not best.median_us else f"{best.median_us / least:.2f}"]
        line += ["–" if best is None else column.text(best) for column in layout.measured]
        line += [_ratio(peer, best) for peer in peers]
        if len(ran) > 1:
            line.append(_ratio(_fastest([peer for peer in peers if peer]), best))
        texts.append(line)
    return _grid(headings, texts)


def _notes(layout: _Layout, rows: Sequence[Measured]) -> list[str]:
    """Why what did not run did not, what was wrong, what was of another size, and what else has to be known."""
    sizes = _distinct([row.size for row in rows if not row.peer]) or _distinct([row.size for row in rows])

    notes = []
    for label, check, note in _distinct([(r.label, r.check, r.note) for r in rows if r.size in sizes]):
        if check == "ok" and note is None:
            continue
        same = [row for row in rows if (row.label, row.check, row.note) == (label, check, note)]
        everywhere = len(same) == sum(row.label == label for row in rows)
        where = "" if everywhere and check != "WRONG" else " at " + "; ".join(map(layout.where, same))
        said = note or "" if check == "ok" else f"{check}{f' ({note})' if note else ''}"
        notes.append(f"- {label}{where}: {said}")
    others = [row for row in rows if row.size not in sizes]
    for label in _distinct([row.label for row in others]):
        texts = [
            f"{layout.where(row)}: {_time(row, layout.scale)} {layout.unit}" for row in others if row.label == label
        ]
        notes.append(f"- {label}, of other sizes: {'; '.join(texts)}")
    return notes


def markdown(head: dict[str, Any], rows: Sequence[Measured], floor: Floor | None = None) -> str:
    """Tables of one file, one for each way to launch, with captions and notes.

    Args:
        floor: what all-gathers inside a node are compared with, in place of that of :data:`FLOORS`.
    """
    layout = _LAYOUTS[head["benchmark"]]
    parts: list[str] = []
    kinds = [(row.launch, row.straggler, row.ranks, row.nodes, layout.about(row)) for row in rows]
    for kind in _distinct(kinds):
        chosen = [row for row, its in zip(rows, kinds, strict=True) if its == kind]
        simulated = kind[0] == "simulator"
        parts += [caption(head, chosen[0]), ""]
        if simulated:
            parts += ["Per call, the most of any rank (LL and direct stores are no puts, and are not counted):", ""]
            columns = layout.counted((), True)
            lines = [[column.text(row) for column in columns] for row in chosen if row.check != "not run"]
            parts += _grid([column.heading for column in columns], lines)
        else:
            least = _floor(head, chosen, floor)
            parts += _timed_table(layout, chosen, least)
        if notes := _notes(layout, [row for row in chosen if not simulated or row.check != "ok"]):
            parts += ["", *notes]
        if not simulated:
            parts += ["", layout.footnote(chosen[0]) + (f" {_floor_note(least)}" if least else "")]
        parts.append("")
    if projection := head.get("projection"):
        parts += [*projection, ""]
    parts += ["```bash", head["command"], "```"]
    return "\n".join(parts) + "\n"


def _floor_note(floor: Floor) -> str:
    return (
        f"The floor is a launch ({floor.launch_us:g} µs) and one crossing ({floor.crossing_us:.3g} µs), or what a rank "
        f"sends at {floor.gbps:g} GB/s, whichever takes longer."
    )


def insert(text: str, benchmark: str, content: str) -> str:
    """``text`` with ``content`` between the benchmark's two markers.

    Raises:
        ValueError: the markers are missing, repeated or in the wrong order.
    """
    begin, end = f"<!-- benchmark:{benchmark} -->", f"<!-- /benchmark:{benchmark} -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"expected {begin} and, after it, {end}, each once")
    before, rest = text.split(begin)
    return f"{before}{begin}\n{content}{end}{rest.split(end)[1]}"


# ---------------------------------------------------------------------- plots


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
    plt: Any, lines: dict[str, list[Any]], across: Callable[[Any], str], down: Callable[[Any], str], layout: _Layout
) -> Any:
    """Time against rows per rank or list, a panel for each pair of ``across`` and ``down``."""
    every = [row for rows in lines.values() for row in rows]
    columns, rows = _distinct([across(row) for row in every]), _distinct([down(row) for row in every])
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


def _plot_sparse(plt: Any, lines: dict[str, list[SparseRow]]) -> Any:
    return _plot_panels(plt, lines, lambda row: f"dim {row.dim}", _indices, _LAYOUTS["sparse_all_reduce"])


def _plot_match(plt: Any, lines: dict[str, list[MatchRow]]) -> Any:
    return _plot_panels(
        plt, lines, lambda row: f"task {row.task}", lambda row: row.distribution, _LAYOUTS["index_match"]
    )


def _plot_signal(plt: Any, lines: dict[str, list[Any]]) -> Any:
    """Bars: what each pair, and all together, take."""
    places = _distinct([(signal_name(row), row.rounds) for rows in lines.values() for row in rows])
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


_PLOTS: dict[str, Callable[[Any, dict[str, list[Any]]], Any]] = {
    "all_gather": _plot_all_gather,
    "tune": _plot_all_gather,
    "sparse_all_reduce": _plot_sparse,
    "index_match": _plot_match,
    "signal": _plot_signal,
}


def plot(results: Sequence[tuple[dict[str, Any], list[Any]]], path: Path, floor: Floor | None = None) -> None:
    """Times against size, one line for each algorithm and peer; ``floor`` as for :func:`markdown`.

    Raises:
        ValueError: nothing was timed, or the files are of different benchmarks.
    """
    if len(kinds := _distinct([head["benchmark"] for head, _ in results])) > 1:
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

    make: Callable[..., Any] = _PLOTS[kinds[0]]
    if make is _plot_all_gather:
        floors = {_floor(head, [row for row in rows if row.median_us], floor) for head, rows in results}
        make = partial(make, floor=floors.pop() if len(floors) == 1 else None)
    figure = make(plt, lines)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _positive(text: str) -> float:
    try:
        if (value := float(text)) > 0:
            return value
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")


def _given_floor(options: argparse.Namespace, results: Sequence[tuple[dict[str, Any], list[Any]]]) -> Floor | None:
    """The floor that options and a file of the signal benchmark give; None: that of the GPUs, if it is known.

    Raises:
        ValueError: something is missing.
    """
    crossings = [
        row.median_us
        for head, rows in results
        if head["benchmark"] == "signal"
        for row in rows
        if row.pattern == "one-way" and row.same_node and row.median_us and row.check == "ok"
    ]
    given = {
        "launch_us": options.floor_launch_us,
        "crossing_us": options.floor_crossing_us or min(crossings, default=None),
        "gbps": options.floor_GBps,
    }
    given = {name: value for name, value in given.items() if value is not None}
    if not given:
        return None
    gpus = {gpu for head, _ in results for gpu in head["provenance"].get("gpus", [])}
    usual = FLOORS.get(gpus.pop()) if len(gpus) == 1 else None
    if usual is not None:
        return dataclasses.replace(usual, **given)
    if len(given) == 3:
        return Floor(**given)
    if options.floor_launch_us or options.floor_crossing_us or options.floor_GBps:
        raise ValueError(
            "of these GPUs the floor is not known: give --floor-launch-us, --floor-crossing-us, --floor-GBps"
        )
    return None


def _only(rows: Sequence[Any], names: Sequence[str]) -> list[Any]:
    """The rows of these algorithms and peers.

    Raises:
        ValueError: there is none of some name.
    """
    known = _distinct([row.algorithm for row in rows])
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"--only: expected some of {', '.join(known)}; got {', '.join(unknown)}")
    return [row for row in rows if row.algorithm in names]


def main(arguments: Sequence[str]) -> int:
    """The command; its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tdcoll.bench report",
        description="Markdown tables, and plots, of results written with --json.",
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.json")
    parser.add_argument(
        "--readme",
        type=Path,
        metavar="FILE.md",
        help="write the tables between <!-- benchmark:NAME --> and <!-- /benchmark:NAME --> of this file, "
        "instead of printing them",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="times against size")
    parser.add_argument(
        "--only",
        type=lambda text: text.split(","),
        metavar="A,B",
        help="show these algorithms and peers (default: all)",
    )
    for name, metavar, what in (
        ("launch-us", "X", "an empty kernel takes"),
        ("crossing-us", "X", "a store takes until another GPU sees it; a file of the signal benchmark says it, too"),
        ("GBps", "X", "rate at which a rank can store to all others"),
    ):
        parser.add_argument(
            f"--floor-{name}",
            dest=f"floor_{name.replace('-', '_')}",
            type=_positive,
            metavar=metavar,
            help=f"floor of all-gathers inside a node: {what} (known for {', '.join(FLOORS)}; else give all three)",
        )
    options = parser.parse_args(arguments)
    try:
        results = [files.load(path) for path in options.files]
        floor = _given_floor(options, results)
        contents: dict[str, str] = {}
        if options.only is not None:
            results = [(head, _only(rows, options.only)) for head, rows in results]
        for head, rows in results:
            name = head["benchmark"]
            contents[name] = "\n".join([*([contents[name]] if name in contents else []), markdown(head, rows, floor)])
        if options.readme is None:
            print("\n".join(contents.values()), end="")
        else:
            text = options.readme.read_text(encoding="utf-8")
            for name, content in contents.items():
                text = insert(text, name, content)
            options.readme.write_text(text, encoding="utf-8")
        if options.plot is not None:
            drawn = [(head, rows) for head, rows in results if head["benchmark"] != "signal"]
            plot(drawn or results, options.plot, floor)
    except ImportError as error:
        print(f"--plot needs matplotlib ({error}): install tdcoll[bench]", file=sys.stderr)
        return 1
    except (OSError, ValueError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 1
    return 0
