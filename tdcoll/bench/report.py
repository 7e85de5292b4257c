# SPDX-License-Identifier: Apache-2.0
"""``python -m tdcoll.bench report``: Markdown tables and plots of the benchmark's JSON files."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tdcoll.bench import rows as files
from tdcoll.bench.arithmetic import format_bytes, ratio
from tdcoll.bench.rows import Row
from tdcoll.bench.table import cells, columns

__all__ = ["caption", "insert", "main", "markdown", "plot"]

_LAUNCHES = {"graph": "CUDA graph replays", "eager": "eager calls", "simulator": "the simulator"}


def _distinct(values: Sequence[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


def _hardware(provenance: dict[str, Any], row: Row) -> str:
    gpus = Counter(gpu for gpu in provenance.get("gpus", []) if gpu)
    names = " and ".join(f"{count} × {name}" for name, count in gpus.items()) or f"{row.ranks} simulated ranks"
    emulated = provenance.get("environment", {}).get("TDCOLL_EMULATE_NODES", "1")
    nodes = f"{row.nodes} node{'s' if row.nodes > 1 else ''}"
    return f"{names} on {nodes}{' (emulated)' if emulated not in ('', '1') else ''}"


def caption(head: dict[str, Any], row: Row) -> str:
    """What the rows like ``row`` of a file were measured with, in a sentence or two."""
    facts = head["provenance"]
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
    what = head["benchmark"].replace("_", "-").capitalize()
    where = f"{_hardware(facts, row)}, {_LAUNCHES.get(row.launch, row.launch)}{straggler}"
    return f"**{what} on {where}.** {', '.join(versions)}; {head['started'][:10]}."


def _line(texts: Sequence[str]) -> str:
    return "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |"


def _grid(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    return [_line(headings), _line(["---:"] * len(headings)), *map(_line, lines)]


def _time(row: Row | None) -> str:
    if row is None or row.check == "not run":
        return "–"
    time = "–" if row.median_us is None else f"{row.median_us:.3g}" if row.median_us < 100 else f"{row.median_us:.0f}"
    return time if row.check == "ok" else f"{time} WRONG"


def _timed_table(rows: Sequence[Row]) -> list[str]:
    """One line per size: times of all, then bus bandwidth and ratios of tdcoll's fastest."""
    ours = _distinct([row.label for row in rows if not row.peer])
    peers = _distinct([row.label for row in rows if row.peer])
    ran = [peer for peer in peers if any(row.label == peer and row.median_us for row in rows)]
    headings = ["bytes per rank", *(f"{label}, µs" for label in (*ours, *ran))]
    headings += ["tdcoll's best, bus GB/s", *(f"{peer} / tdcoll's best" for peer in ran)]
    lines = []
    for size in _distinct([row.bytes_per_rank for row in rows]):
        found = {row.label: row for row in rows if row.bytes_per_rank == size}
        good = [row for row in found.values() if not row.peer and row.check == "ok" and row.median_us]
        best = min(good, key=lambda row: row.median_us or 0.0, default=None)
        texts = [format_bytes(size), *(_time(found.get(label)) for label in (*ours, *ran))]
        texts.append("–" if best is None or best.busbw_gbps is None else f"{best.busbw_gbps:.3g}")
        for peer in ran:
            other = found.get(peer)
            faster = ratio(other.median_us if other else None, best.median_us if best else None)
            texts.append("–" if faster is None else f"{faster:.2f}")
        lines.append(texts)
    return _grid(headings, lines)


def _notes(rows: Sequence[Row]) -> list[str]:
    """Why what did not run did not, and what was wrong."""
    notes = []
    for label, check, note in _distinct([(r.label, r.check, r.note) for r in rows if r.check != "ok"]):
        sizes = [r.bytes_per_rank for r in rows if (r.label, r.check, r.note) == (label, check, note)]
        where = "" if check == "not run" else f" at {', '.join(map(format_bytes, sizes))} per rank"
        notes.append(f"- {label}{where}: {check}{f' ({note})' if note else ''}")
    return notes


def markdown(head: dict[str, Any], rows: Sequence[Row]) -> str:
    """Tables of one file, one for each way to launch, with captions and notes."""
    parts: list[str] = []
    kinds = [(row.launch, row.straggler, row.ranks, row.nodes) for row in rows]
    for kind in _distinct(kinds):
        chosen = [row for row, its in zip(rows, kinds, strict=True) if its == kind]
        simulated = kind[0] == "simulator"
        parts += [caption(head, chosen[0]), ""]
        if simulated:
            parts += ["Per call, the most of any rank:", ""]
            counted = [row for row in chosen if row.check != "not run"]
            parts += _grid(columns((), True), [cells(row, (), True) for row in counted])
        else:
            parts += _timed_table(chosen)
        if notes := _notes(chosen):
            parts += ["", *notes]
        if not simulated:
            parts += [
                "",
                "Times are medians over iterations of the slowest rank; bus bandwidth is as in nccl-tests.",
            ]
        parts.append("")
    parts += ["```bash", head["command"], "```"]
    return "\n".join(parts) + "\n"


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


def plot(results: Sequence[tuple[dict[str, Any], list[Row]]], path: Path) -> None:
    """Latency and bus bandwidth against size, one line for each algorithm and peer.

    Raises:
        ValueError: nothing was timed.
    """
    lines: dict[str, list[Row]] = {}
    for number, (_, rows) in enumerate(results):
        launches = {row.launch for _, others in results for row in others if row.median_us}
        for row in rows:
            if row.median_us and row.check == "ok":
                launch = f", {row.launch}" if len(launches) > 1 else ""
                source = f" ({number + 1})" if len(results) > 1 else ""
                lines.setdefault(f"{row.label}{launch}{source}", []).append(row)
    if not lines:
        raise ValueError("nothing to plot: no times in these files")
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for label, rows in lines.items():
        rows = sorted(rows, key=lambda row: row.bytes_per_rank)
        sizes = [row.bytes_per_rank for row in rows]
        style = "--" if rows[0].peer else "-"
        axes[0].plot(sizes, [row.median_us for row in rows], style, marker="o", markersize=3, label=label)
        axes[1].plot(sizes, [row.busbw_gbps for row in rows], style, marker="o", markersize=3, label=label)
    for axis, quantity in zip(axes, ("latency, µs", "bus bandwidth, GB/s"), strict=True):
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", base=2)
        axis.yaxis.set_major_formatter("{x:g}")
        axis.set_xlabel("bytes per rank")
        axis.set_ylabel(quantity)
        axis.grid(True, which="both", alpha=0.3)
        ticks = sorted({row.bytes_per_rank for rows in lines.values() for row in rows})
        axis.set_xticks(ticks, [format_bytes(size) for size in ticks], rotation=45)
        axis.minorticks_off()
    axes[0].legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


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
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="latency and bus bandwidth against size")
    options = parser.parse_args(arguments)
    try:
        results = [files.load(path) for path in options.files]
        contents: dict[str, str] = {}
        for head, rows in results:
            name = head["benchmark"]
            contents[name] = "\n".join([*([contents[name]] if name in contents else []), markdown(head, rows)])
        if options.readme is None:
            print("\n".join(contents.values()), end="")
        else:
            text = options.readme.read_text(encoding="utf-8")
            for name, content in contents.items():
                text = insert(text, name, content)
            options.readme.write_text(text, encoding="utf-8")
        if options.plot is not None:
            plot(results, options.plot)
    except ImportError as error:
        print(f"--plot needs matplotlib ({error}): install tdcoll[bench]", file=sys.stderr)
        return 1
    except (OSError, ValueError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 1
    return 0
