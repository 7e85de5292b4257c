# SPDX-License-Identifier: Apache-2.0
"""The timeline of a run as Chrome trace JSON, to be looked at in Perfetto
(https://ui.perfetto.dev).

One process per PE. Row 0 is the host with its launches, row ``k + 1`` is program ``k`` of each
launch with its waits. Transfers are spans of their own, from the call to the arrival of the last
byte; loads of symmetric memory are marks on their program's row, and signals on the PE that they
arrive at. One unit of time is a scheduler step.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

HOST_TRACK = 0
_SIGNAL_TRACK = 1_000_000


class Trace:
    """Collects events."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._events: list[dict[str, Any]] = []
        self._rows: set[tuple[int, int]] = set()
        self._transfers = 0

    @contextmanager
    def slice(self, pe: int, track: int, name: str) -> Iterator[None]:
        """Record a span of time on a row; spans on one row nest."""
        begin = self._clock()
        try:
            yield
        finally:
            self._add("X", pe, track, name, ts=begin, dur=max(self._clock() - begin, 0))

    def transfer(
        self, pe: int, track: int, name: str, details: dict[str, Any]
    ) -> Callable[[], None]:
        """Begin a transfer; the result ends it."""
        self._transfers += 1
        this = {"cat": "transfer", "id": f"{pe}.{self._transfers}"}
        self._add("b", pe, track, name, args=details, **this)
        return lambda: self._add("e", pe, track, name, **this)

    def load(self, pe: int, track: int, name: str, details: dict[str, Any]) -> None:
        """Record a load as a mark on the row of its program."""
        self._add("i", pe, track, name, s="t", args=details)

    def instant(self, pe: int, name: str, details: dict[str, Any]) -> None:
        """Record a mark on the PE's row of signals."""
        self._add("i", pe, _SIGNAL_TRACK, name, s="t", args=details)

    def to_json(self) -> str:
        """Return the trace as JSON text."""
        return json.dumps({"traceEvents": self._events, "displayTimeUnit": "ns"})

    def save(self, path: str | Path) -> None:
        """Write the trace to a file."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    def _add(self, phase: str, pe: int, track: int, name: str, **rest: Any) -> None:
        where = {"pid": pe, "tid": track}
        if (pe, track) not in self._rows:
            self._rows.add((pe, track))
            row = {HOST_TRACK: "host", _SIGNAL_TRACK: "signals"}.get(track, f"program {track - 1}")
            for what, key, value in (
                ("process_name", "name", f"pe{pe}"),
                ("thread_name", "name", row),
                ("thread_sort_index", "sort_index", track),
            ):
                self._events.append({"ph": "M", "name": what, **where, "args": {key: value}})
        self._events.append(
            {"ph": phase, "name": name, **where, "ts": self._clock(), "args": {}, **rest}
        )


def slice_of(trace: Trace | None, pe: int, track: int, name: str) -> AbstractContextManager[None]:
    """:meth:`Trace.slice`, if there is a trace."""
    return nullcontext() if trace is None else trace.slice(pe, track, name)
