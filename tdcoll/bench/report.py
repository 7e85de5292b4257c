# SPDX-License-Identifier: Apache-2.0
"""``python -m tdcoll.bench report``: Markdown tables and plots of the benchmarks' JSON files."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tdcoll.bench import rows as files
from tdcoll.bench.arithmetic import Floor, ratio
from tdcoll.bench.floors import FLOORS, floor_of, given_floor
from tdcoll.bench.layouts import LAYOUTS, Layout
from tdcoll.bench.plots import plot
from tdcoll.bench.rows import Measured, distinct

__all__ = ["caption", "insert", "main", "markdown"]

_LAUNCHES = {"graph": "CUDA graph replays", "eager": "eager calls", "simulator": "the simulator"}


def _short(value: float | None) -> str:
    """Three digits or more."""
    return "–" if value is None else f"{value:.3g}" if value < 100 else f"{value:.0f}"


def _hardware(provenance: dict[str, Any], row: Measured) -> str:
    gpus = Counter(gpu for gpu in provenance.get("gpus", []) if gpu)
    names = " and ".join(f"{count} × {name}" for name, count in gpus.items()) or f"{row.ranks} simulated ranks"
    emulated = provenance.get("environment", {}).get("TDCOLL_EMULATE_NODES", "1")
    nodes = f"{row.nodes} node{'s' if row.nodes > 1 else ''}"
    return f"{names} on {nodes}{' (emulated)' if emulated not in ('', '1') else ''}"


def caption(head: dict[str, Any], row: Measured) -> str:
    """What the rows like ``row`` of a file were measured with, in a sentence or two."""
    facts, layout = head["provenance"], LAYOUTS[head["benchmark"]]
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


def _timed_table(layout: Layout, rows: Sequence[Measured], floor: Floor | None = None) -> list[str]:
    """One line per size: times of all, then what tdcoll's fastest reaches, and ratios to it."""
    sizes = distinct([row.size for row in rows if not row.peer]) or distinct([row.size for row in rows])
    lines = {size: {row.label: row for row in rows if row.size == size} for size in sizes}
    ours = distinct([row.label for row in rows if not row.peer])
    ran = distinct([row.label for row in rows if row.peer and row.median_us and row.size in sizes])
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


def _notes(layout: Layout, rows: Sequence[Measured]) -> list[str]:
    """Why what did not run did not, what was wrong, what was of another size, and what else has to be known."""
    sizes = distinct([row.size for row in rows if not row.peer]) or distinct([row.size for row in rows])

    notes = []
    for label, check, note in distinct([(r.label, r.check, r.note) for r in rows if r.size in sizes]):
        if check == "ok" and note is None:
            continue
        same = [row for row in rows if (row.label, row.check, row.note) == (label, check, note)]
        everywhere = len(same) == sum(row.label == label for row in rows)
        where = "" if everywhere and check != "WRONG" else " at " + "; ".join(map(layout.where, same))
        said = note or "" if check == "ok" else f"{check}{f' ({note})' if note else ''}"
        notes.append(f"- {label}{where}: {said}")
    others = [row for row in rows if row.size not in sizes]
    for label in distinct([row.label for row in others]):
        texts = [
            f"{layout.where(row)}: {_time(row, layout.scale)} {layout.unit}" for row in others if row.label == label
        ]
        notes.append(f"- {label}, of other sizes: {'; '.join(texts)}")
    return notes


def markdown(head: dict[str, Any], rows: Sequence[Measured], floor: Floor | None = None) -> str:
    """Tables of one file, one for each way to launch, with captions and notes.

    Args:
        floor: what all-gathers inside a node are compared with, in place of that of :data:`.floors.FLOORS`.
    """
    layout = LAYOUTS[head["benchmark"]]
    parts: list[str] = []
    kinds = [(row.launch, row.straggler, row.ranks, row.nodes, layout.about(row)) for row in rows]
    for kind in distinct(kinds):
        chosen = [row for row, its in zip(rows, kinds, strict=True) if its == kind]
        simulated = kind[0] == "simulator"
        parts += [caption(head, chosen[0]), ""]
        if simulated:
            parts += ["Per call, the most of any rank (LL and direct stores are no puts, and are not counted):", ""]
            columns = layout.counted((), True)
            lines = [[column.text(row) for column in columns] for row in chosen if row.check != "not run"]
            parts += _grid([column.heading for column in columns], lines)
        else:
            least = floor_of(head, chosen, floor)
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


def _positive(text: str) -> float:
    try:
        if (value := float(text)) > 0:
            return value
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")


def _only(rows: Sequence[Any], names: Sequence[str]) -> list[Any]:
    """The rows of these algorithms and peers.

    Raises:
        ValueError: there is none of some name.
    """
    known = distinct([row.algorithm for row in rows])
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
        floor = given_floor(options, results)
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
