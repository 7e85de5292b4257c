# SPDX-License-Identifier: Apache-2.0
"""Rows on the terminal as they come: a live table with rich, where it is installed, else lines of text."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from tdcoll.bench.arithmetic import format_bytes

__all__ = [
    *(
        "Column",
        "Table",
        "all_gather_columns",
        "duration",
        "norm_columns",
        "number",
        "signal_columns",
        "signal_name",
    ),
    "sparse_columns",
]

_COUNTED = {
    "puts": "puts",
    "put_bytes": "put bytes",
    "signals": "signals",
    "waits": "waits",
    "inter_node_puts": "inter-node puts",
    "inter_node_bytes": "inter-node bytes",
}


@dataclass(frozen=True)
class Column:
    """A heading, and the text under it for a row. ``width`` counts where there is no rich."""

    heading: str
    text: Callable[[Any], str]
    width: int = 9
    left: bool = False


def number(value: float | None, digits: int) -> str:
    """With so many digits after the point; ``-`` if there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def duration(seconds: float) -> str:
    """``"12 s"``, ``"3 min 20 s"``, ``"1 h 5 min"``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def _of(heading: str, attribute: str) -> Column:
    return Column(heading, lambda row: str(getattr(row, attribute)))


def _fixed(heading: str, attribute: str, digits: int) -> Column:
    return Column(heading, lambda row: number(getattr(row, attribute), digits))


def _labels(width: int) -> list[Column]:
    return [
        Column("algorithm", lambda row: row.label, width, left=True),
        Column("launch", lambda row: row.launch, left=True),
    ]


def _times() -> list[Column]:
    columns = {"µs": "median_us", "min µs": "min_us", "p90 µs": "p90_us", "skew µs": "skew_us"}
    return [_fixed(heading, attribute, 2) for heading, attribute in columns.items()]


def _counts() -> list[Column]:
    """Return what the simulator counted per call, the most of any rank: all but loads and stores through pointers."""

    def column(key: str, heading: str) -> Column:
        return Column(heading, lambda row: f"{max(row.counts[key]):g}" if key in (row.counts or {}) else "-")

    return [column(key, heading) for key, heading in _COUNTED.items()]


def _ratios(peers: Sequence[str]) -> list[Column]:
    def column(peer: str) -> Column:
        return Column(f"{peer} / this", lambda row: number(row.ratios.get(peer), 2))

    return [column(peer) for peer in peers]


_CHECK = Column("check", lambda row: row.check if row.note is None else f"{row.check}: {row.note}", left=True)


def all_gather_columns(peers: Sequence[str], simulated: bool) -> list[Column]:
    """Columns of :class:`~tdcoll.bench.rows.Row`."""
    measured = [*_times(), _fixed("bus GB/s", "busbw_gbps", 1), *_ratios(peers)]
    return [
        Column("bytes/rank", lambda row: format_bytes(row.bytes_per_rank)),
        *(_of("ranks", "ranks"), _of("nodes", "nodes")),
        *_labels(16),  # wide enough for "in-place" with its owner
        *(_counts() if simulated else measured),
        _CHECK,
    ]


def sparse_columns(peers: Sequence[str], simulated: bool) -> list[Column]:
    """Columns of :class:`~tdcoll.bench.rows.SparseRow`."""
    timed = [
        *_times(),
        _fixed("wall µs", "wall_us", 2),
        _fixed("GB/s", "gbps", 1),
        _fixed("/ floor", "over_floor", 2),
        *_ratios(peers),
    ]
    return [
        Column("indices", lambda row: row.distribution + (f", dup {row.duplicates}" if row.duplicates != "0" else "")),
        *(_of("rows/rank", "rows"), _of("dim", "dim"), _of("ranks", "ranks"), _of("nodes", "nodes")),
        _fixed("union", "union_rows", 0),
        Column("MB/rank", lambda row: f"{row.bytes_per_rank / 1e6:.3g}"),
        *_labels(22),
        *(_counts() if simulated else timed),
        _CHECK,
    ]


def norm_columns(peers: Sequence[str], simulated: bool) -> list[Column]:
    """Columns of :class:`~tdcoll.bench.rows.NormRow`."""
    return [
        *(_of("rows", "rows"), _of("hidden", "hidden"), _of("ranks", "ranks"), _of("nodes", "nodes")),
        *_labels(24),
        *(_counts() if simulated else [*_times(), *_ratios(peers)]),
        _CHECK,
    ]


def signal_columns(simulated: bool) -> list[Column]:
    """Columns of :class:`~tdcoll.bench.rows.SignalRow`."""
    return [
        Column("signals", lambda row: signal_name(row), 16, left=True),
        _of("ranks", "ranks"),
        _of("nodes", "nodes"),
        _of("rounds", "rounds"),
        *_labels(20),
        *(_counts() if simulated else _times()),
        _CHECK,
    ]


def signal_name(row: Any) -> str:
    """``"0 to 3"``, ``"0 to 5, other node"``, ``"all-to-all"``."""
    if row.peer_rank is None:
        return str(row.pattern)
    return f"0 to {row.peer_rank}" + ("" if row.same_node else ", other node")


class Table:
    """Prints rows. A context manager; does nothing unless ``visible``."""

    def __init__(self, title: str, columns: Sequence[Column], visible: bool) -> None:
        self._columns, self._visible = columns, visible
        self._live: Any = None
        self._table: Any = None
        if not visible:
            return
        if sys.stdout.isatty():
            try:
                import rich.live
                import rich.table
            except ImportError:
                pass
            else:
                self._table = rich.table.Table(title=title)
                for column in columns:
                    self._table.add_column(column.heading, justify="left" if column.left else "right")
                self._live = rich.live.Live(self._table, vertical_overflow="visible")
                return
        print(f"# {title}\n# {self._line([column.heading for column in columns])}", flush=True)

    def _line(self, texts: Sequence[str]) -> str:
        widths = [max(len(column.heading), column.width) for column in self._columns]
        return "  ".join(text.rjust(width) for text, width in zip(texts, widths, strict=True)).rstrip()

    def add(self, row: Any) -> None:
        """Show one more row."""
        if not self._visible:
            return
        texts = [column.text(row) for column in self._columns]
        if self._live is None:
            print(f"  {self._line(texts)}", flush=True)
            return
        from rich.text import Text

        style = {"ok": "", "WRONG": "bold red"}.get(row.check, "dim")
        self._table.add_row(*(Text(text, style) for text in texts))

    def __enter__(self) -> Table:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
