# SPDX-License-Identifier: Apache-2.0
"""``tdcoll report``: Markdown tables and pictures of the benchmarks' files.

A page of the documentation says where a file's tables go::

    <!-- report: all-gather-4xH200 -->         all tables of docs/results/all-gather-4xH200.json
    <!-- /report -->
    <!-- report: all-gather-4xH200 brief -->   one table, of few sizes and columns
    <!-- /report -->
    <!-- report: all-gather-4xH200 losses -->  a list of the sizes at which a baseline is faster
    <!-- /report -->
    ![...](results/all-gather-4xH200.png)      a picture of the same file

``tdcoll report --write`` fills them in.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tdcoll.tools.bench import rows as files
from tdcoll.tools.bench.arithmetic import Floor, distinct, floor_of, ratio
from tdcoll.tools.bench.plots import plot
from tdcoll.tools.bench.rows import LAYOUTS, Layout, Row, launch_of, machine, name_of, shown_labels
from tdcoll.tools.setenv import COMMAND

_EXAMPLE = f"""\
example:
  {COMMAND} -m tdcoll bench all_gather --json result.json
  python -m tdcoll report result.json --plot result.png"""

_BRIEF_LINES, _MOST_PLACES = 6, 4
_VERSIONS = {"torch": "PyTorch", "triton": "Triton", "nvshmem": "NVSHMEM", "nccl": "NCCL"}
_VERSIONS |= {"flashinfer": "flashinfer", "cuda": "CUDA", "driver": "driver"}
_NO_MULTICAST = "NCCL_NVLS_ENABLE=0", "TORCH_SYMM_MEM_DISABLE_MULTICAST=1", "NVSHMEM_DISABLE_NVLS=1"


def _short(value: float | None) -> str:
    """Return three digits or more."""
    return "–" if value is None else f"{value:#.3g}".rstrip(".") if value < 100 else f"{value:.0f}"


def _grid(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    rows = [[text.replace("|", "\\|") for text in texts] for texts in (headings, ["---:"] * len(headings), *lines)]
    return [f"| {' | '.join(texts)} |" for texts in rows]


def _caption(head: dict[str, Any], row: Row) -> str:
    """Return the benchmark, machine and launch of the rows like ``row``."""
    layout = LAYOUTS[head["benchmark"]]
    said = [layout.title, machine(head, row), layout.about(row), launch_of(row)]
    return f"**{', '.join(filter(None, said))}.** Times in {layout.unit}."


def _measured_with(head: dict[str, Any]) -> str:
    """Return versions, date, and whether multicast was off."""
    facts = head["provenance"]
    commit = f" at {facts['commit'][:12]}" if facts.get("commit") else ""
    changed = " with uncommitted changes" if facts.get("dirty") else ""
    versions = [f"tdcoll {facts['tdcoll']}{commit}{changed}"]
    versions += [f"{name} {facts[key]}" for key, name in _VERSIONS.items() if facts.get(key)]
    text = "; ".join(filter(None, [f"Measured with {', '.join(versions)}", head["started"][:10]])) + "."
    environment = {f"{name}={value}" for name, value in facts.get("environment", {}).items()}
    off = [f"`{variable}`" for variable in _NO_MULTICAST if variable in environment]
    return text + (f" Multicast was off ({', '.join(off)})." if off else "")


def _time(row: Row | None, layout: Layout, fastest: Row | None = None) -> str:
    """Return a time, marked if the result was wrong or slower than the fastest baseline."""
    if row is None or row.check == "not run":
        return "–"
    text = _short(None if row.median_us is None else row.median_us * layout.scale)
    if row.check != "ok":
        return f"{text} WRONG"
    return f"{text} †" if fastest and (ratio(fastest.median_us, row.median_us) or 1) < 1 else text


def _fastest(rows: Sequence[Row]) -> Row | None:
    """Return the fastest row with a right result."""
    good = [row for row in rows if row.check == "ok" and row.median_us]
    return min(good, key=lambda row: row.median_us or 0.0, default=None)


def _table(layout: Layout, rows: Sequence[Row], shown: Sequence[str], floor: Floor | None, brief: bool) -> list[str]:
    """Return a line for each size: times, the fastest baseline, the lower bound, and the speedup over that baseline."""
    sizes = distinct(map(layout.key, rows))
    ours = [label for label in shown if any(row.label == label and not row.peer for row in rows)]
    peers = distinct([row.label for row in rows if row.peer and row.median_us])
    if brief:
        last = len(sizes) - 1
        sizes = distinct([sizes[round(line * last / (_BRIEF_LINES - 1))] for line in range(_BRIEF_LINES)])
        shown = [*ours, *(label for label in shown if label in peers[:1])]
    with_floor = not brief and any(layout.floor(row, floor) for row in rows)
    headings = [*layout.size, *map(name_of, shown), *(["fastest baseline"] if len(peers) > 1 else [])]
    headings += ["floor"] if with_floor else []
    rival = "fastest baseline" if len(peers) > 1 else name_of(peers[0]) if peers else ""
    headings += [f"{rival} / {name_of(label)}" for label in ours if peers and not brief]
    lines = []
    for size in sizes:
        found = {row.label: row for row in rows if layout.key(row) == size}
        of_size = next(iter(found.values()))
        fastest = _fastest([found[label] for label in peers if label in found])
        line = [*size, *(_time(found.get(label), layout, fastest if label in ours else None) for label in shown)]
        if len(peers) > 1:
            line.append(f"{_time(fastest, layout)} ({name_of(fastest.label)})" if fastest else "–")
        if with_floor:
            line.append(_short((layout.floor(of_size, floor) or 0.0) * layout.scale))
        for label in ours if peers and not brief else ():
            mine = _fastest([found[label]]) if label in found else None
            faster = ratio(fastest.median_us, mine.median_us) if fastest and mine else None
            line.append("–" if faster is None else f"{faster:.2f}")
        lines.append(line)
    return _grid(headings, lines)


def _spread(values: Sequence[float]) -> str:
    """Return the median, and the least and the most in brackets."""
    return f"{statistics.median(values):.0f} [{min(values):.0f}, {max(values):.0f}]"


def _by_label(layout: Layout, rows: Sequence[Row], shown: Sequence[str]) -> list[str]:
    """Return a line for each algorithm and baseline: for each size the time, and multiprocessors or the added time."""
    sizes, beside = distinct(map(layout.key, rows)), "added" in rows[0].facts
    second = "added" if beside else "SMs"

    def cells(row: Row | None) -> list[str]:
        if row is not None and beside:
            return [_spread(row.facts["times"]), "" if row.label == "alone" else _spread(row.facts["added"])]
        return [_time(row, layout), str(row.facts.get("sms") or "") if row else ""]

    lines = []
    for label in shown:
        found = {layout.key(row): row for row in rows if row.label == label}
        lines.append([name_of(label), *(text for size in sizes for text in cells(found.get(size)))])
    return _grid(["calls", *(text for size in sizes for text in (", ".join(size), second))], lines)


def _notes(layout: Layout, rows: Sequence[Row]) -> list[str]:
    """Return the reasons of rows that did not run, errors, and other notes."""
    sizes, notes = len(distinct(map(layout.key, rows))), []
    for label, check, note in distinct([(row.label, row.check, row.note) for row in rows]):
        if check == "ok" and note is None:
            continue
        same = [layout.key(row) for row in rows if (row.label, row.check, row.note) == (label, check, note)]
        at = " at " + "; ".join(map(", ".join, same))
        if check != "WRONG" and len(same) > _MOST_PLACES:
            at = f" at {len(same)} of {sizes} sizes"
        if check != "WRONG" and len(same) == sum(row.label == label for row in rows):
            at = ""
        said = note or "" if check == "ok" else f"{check}{f' ({note})' if note else ''}"
        notes.append(f"- {name_of(label)}{at}: {said}")
    return notes


def _tables(layout: Layout, rows: Sequence[Row]) -> list[list[Row]]:
    """Return the rows of each table."""
    found: dict[Any, list[Row]] = {}
    for row in rows:
        found.setdefault((row.launch, row.ranks, row.nodes, layout.about(row)), []).append(row)
    return list(found.values())


def markdown(head: dict[str, Any], rows: Sequence[Row], *, only: Sequence[str] = (), brief: bool = False) -> str:
    """Return the tables of one file, one for each way to launch, with versions and machine.

    A file with rows of ``--blocks``, or of matmuls beside all-gathers, has a line for each algorithm and baseline.

    Args:
        only: algorithms and baselines that have a column, besides the fastest of all; if empty, those of the layout.
        brief: the first table, of at most 6 sizes, without lower bound and ratios, with one baseline and the fastest.
    """
    layout = LAYOUTS[head["benchmark"]]
    known = distinct([row.algorithm for row in rows])
    if unknown := [name for name in only if name not in known]:
        raise ValueError(f"--only: expected some of {', '.join(known)}; got {', '.join(unknown)}")
    if any(row.launch == "simulator" for row in rows):
        raise ValueError("expected rows with times, got those of a simulated job, which has none")
    parts: list[str] = []
    hidden: list[str] = []
    for chosen in _tables(layout, rows)[: 1 if brief else None]:
        across = any(row.blocks or "added" in row.facts for row in chosen)
        names = only or (known if across and not brief else ())
        shown, least = shown_labels(layout, chosen, names), floor_of(head, chosen)
        told = [row for row in chosen if row.label in shown or row.peer or row.check == "WRONG"]
        notes = [] if brief else _notes(layout, told)
        table = _by_label(layout, chosen, shown) if across else _table(layout, chosen, shown, least, brief)
        parts += [_caption(head, chosen[0]), "", *table, ""]
        parts += [*notes, ""] if notes else []
        hidden += [row.algorithm for row in chosen if row.label not in shown]
    marks = ["† slower than the fastest baseline."] if any(" † |" in part for part in parts) else []
    if brief:
        return "\n".join([*parts[:-1], *(["", *marks] if marks else [])]) + "\n"
    if not across and any(layout.floor(row, least) for row in rows):
        marks.append(layout.floor_text(rows[0], least))
    if hidden and not only:
        marks.append(
            f"The file also has {', '.join(f'`{name}`' for name in distinct(hidden))}, which `report --only` shows."
        )
    parts += [" ".join(marks), ""] if marks else []
    return "\n".join([*parts, _measured_with(head), "", "```bash", head["command"], "```"]) + "\n"


def losses(head: dict[str, Any], rows: Sequence[Row]) -> str:
    """Return a line for each column of tdcoll's that loses: sizes at which a baseline is faster, and by how much."""
    layout = LAYOUTS[head["benchmark"]]
    lines = []
    launches: list[str] = []
    for chosen in _tables(layout, rows):
        if not (peers := [row for row in chosen if row.peer and row.median_us]):
            continue
        launches = distinct([*launches, launch_of(chosen[0])])
        of_table = _caption(head, chosen[0]).partition(".**")[0].removeprefix("**")
        ours = [row for row in chosen if not row.peer and row.check == "ok"]
        for label in shown_labels(layout, ours):
            found = []
            for row in (row for row in ours if row.label == label):
                fastest = _fastest([peer for peer in peers if layout.key(peer) == layout.key(row)])
                if fastest and (over := ratio(row.median_us, fastest.median_us) or 0.0) > 1:
                    found.append(f"{', '.join(layout.key(row))} (by {100 * over - 100:.1f}%, {name_of(fastest.label)})")
            if found:
                lines.append(f"- {of_table}, {name_of(label)}: {', '.join(found)}.")
    if not lines:
        where = filter(None, [layout.title, machine(head, rows[0]), " and ".join(launches)])
        lines.append(f"- {', '.join(where)}: tdcoll loses at no size.")
    return "\n".join(lines) + "\n"


_BLOCK = re.compile(r"^(<!-- report: (\S+)( brief| losses)? -->\n)(.*?)^<!-- /report -->$", re.M | re.S)
_PICTURE = re.compile(r"\]\((?:docs/)?results/([\w.-]+)\.png\)")


def _documents(root: Path) -> dict[Path, str]:
    """Return the pages of a checkout, by path."""
    if not (root / "docs/results").is_dir():
        raise ValueError(f"--write: expected a checkout of tdcoll, with docs/results, got {root}")
    return {page: page.read_text(encoding="utf-8") for page in (root / "README.md", *sorted(root.glob("docs/*.md")))}


def pages(root: Path) -> dict[Path, str]:
    """Return the pages of the checkout ``root`` that have tables, with the tables filled in.

    Raises:
        ValueError: ``root`` is no checkout, a page's markers are wrong, or a file is no result.
        OSError: a file cannot be read.
    """

    def block(found: re.Match[str]) -> str:
        head, rows = files.load(root / f"docs/results/{found[2]}.json")
        text = losses(head, rows) if found[3] == " losses" else markdown(head, rows, brief=bool(found[3]))
        return f"{found[1]}{text}<!-- /report -->"

    made = {}
    for page, text in _documents(root).items():
        markers = text.count("<!-- report:")
        if not markers == text.count("<!-- /report") == len(_BLOCK.findall(text)):
            raise ValueError(
                f"{page}: expected each <!-- report: NAME --> with a <!-- /report --> after it, on lines of their own"
            )
        if markers:
            made[page] = _BLOCK.sub(block, text)
    return made


def pictures(root: Path) -> list[str]:
    """Return the names, as in markers, of the results of which a page shows a picture."""
    return distinct([name for text in _documents(root).values() for name in _PICTURE.findall(text)])


def main(arguments: Sequence[str]) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tdcoll report",
        description="Markdown tables, and pictures, of results that `tdcoll bench` wrote with --json.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE.json", help="print its tables")
    what = "draw one file: time against size, or against multiprocessors if it has rows of --blocks"
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help=what)
    what = "columns and curves: these algorithms and peers; the fastest baseline is found among all"
    parser.add_argument("--only", type=lambda text: text.split(","), default=[], metavar="A,B", help=what)
    what = "write the tables and pictures of a checkout's README and docs from its docs/results (default: here)"
    parser.add_argument("--write", nargs="?", type=Path, const=Path(), metavar="DIR", help=what)
    options = parser.parse_args(arguments)
    if bool(options.files) == (options.write is not None):
        parser.error("expected either FILE.json or --write")
    if options.plot is not None and len(options.files) != 1:
        parser.error(f"--plot: expected one FILE.json, got {len(options.files)}")
    try:
        if options.write is not None:
            for page, text in pages(options.write).items():
                files.write_whole(page, text)
            results = options.write / "docs/results"
            for name in pictures(options.write):
                plot(*files.load(results / f"{name}.json"), results / f"{name}.png")
        given = [files.load(path) for path in options.files]
        print("\n".join(markdown(*one, only=options.only) for one in given), end="")
        if options.plot is not None:
            plot(*given[0], options.plot, options.only)
    except ImportError as error:
        print(f"report: pictures need matplotlib ({error}): install tdcoll[bench]", file=sys.stderr)
        return 1
    except (OSError, ValueError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 1
    return 0
