# SPDX-License-Identifier: Apache-2.0
"""Rows on the terminal as they come: a live table with rich, where it is installed, else lines of text."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from tdcoll.bench.arithmetic import format_bytes
from tdcoll.bench.rows import Row

__all__ = ["Table", "cells", "columns"]

_TIMED = ("µs", "min µs", "p90 µs", "bus GB/s")
_COUNTED = {
    "puts": "puts",
    "put_bytes": "put bytes",
    "signals": "signals",
    "waits": "waits",
    "inter_node_puts": "inter-node puts",
    "inter_node_bytes": "inter-node bytes",
}


def columns(peers: Sequence[str], simulated: bool) -> list[str]:
    """Headings; those of the simulator's counts are per call, the most of any rank."""
    measured = [*_COUNTED.values()] if simulated else [*_TIMED, *(f"{peer} / this" for peer in peers)]
    return ["bytes/rank", "ranks", "nodes", "algorithm", "launch", *measured, "check"]


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def cells(row: Row, peers: Sequence[str], simulated: bool) -> list[str]:
    """The row's text under :func:`columns`."""
    if simulated:
        counts = row.counts or {}
        measured = [f"{max(counts[key]):g}" if key in counts else "-" for key in _COUNTED]
    else:
        measured = [_number(value, 2) for value in (row.median_us, row.min_us, row.p90_us)]
        measured.append(_number(row.busbw_gbps, 1))
        measured += [_number(row.ratios.get(peer), 2) for peer in peers]
    size = format_bytes(row.bytes_per_rank)
    check = row.check if row.note is None else f"{row.check}: {row.note}"
    return [size, str(row.ranks), str(row.nodes), row.label, row.launch, *measured, check]


class Table:
    """Prints rows. A context manager; does nothing unless ``visible``."""

    def __init__(self, title: str, peers: Sequence[str], simulated: bool, visible: bool) -> None:
        self._peers, self._simulated, self._visible = tuple(peers), simulated, visible
        self._headings = columns(peers, simulated)
        # Wide enough for "in-place" with its owner and for numbers such as 123456.78.
        self._widths = [max(len(heading), 9) for heading in self._headings]
        self._widths[3] = 16
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
                for i, heading in enumerate(self._headings):
                    self._table.add_column(heading, justify="left" if i in (3, 4, len(self._headings) - 1) else "right")
                self._live = rich.live.Live(self._table, vertical_overflow="visible")
                return
        print(f"# {title}\n# {self._line(self._headings)}", flush=True)

    def _line(self, texts: Sequence[str]) -> str:
        return "  ".join(text.rjust(width) for text, width in zip(texts, self._widths, strict=True)).rstrip()

    def add(self, row: Row) -> None:
        """Show one more row."""
        if not self._visible:
            return
        texts = cells(row, self._peers, self._simulated)
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
