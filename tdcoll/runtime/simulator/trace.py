# SPDX-License-Identifier: Apache-2.0
"""The timeline of a run as Chrome trace JSON, to be looked at in Perfetto (https://ui.perfetto.dev).

One process per PE. Row 0 is the host with its launches, row ``k + 1`` is program ``k`` of each launch with
its waits. Transfers are spans of their own, from the call to the arrival of the last byte; signals are marks
on the PE that they arrive at. One unit of time is a scheduler step in a World, and a microsecond of wall time
where each rank is a process.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["Trace"]

HOST_TRACK = 0
SIGNAL_TRACK = 1_000_000


class Trace:
    """Collects events.

    Args:
        clock: the time now.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._events: list[dict[str, Any]] = []
        self._named: set[tuple[int, int]] = set()
        self._transfers = 0

    @contextmanager
    def slice(self, pe: int, track: int, name: str, **details: Any) -> Iterator[None]:
        """A span of time on a row; spans on one row nest, unless several threads of the host launch."""
        self._name(pe, track)
        begin = self._clock()
        try:
            yield
        finally:
            self._events.append(
                {
                    "ph": "X",
                    "name": name,
                    "pid": pe,
                    "tid": track,
                    "ts": begin,
                    "dur": max(self._clock() - begin, 0),
                    "args": details,
                }
            )

    def transfer(self, pe: int, track: int, name: str, details: dict[str, Any]) -> Callable[[], None]:
        """Begin a transfer; the result ends it."""
        self._name(pe, track)
        self._transfers += 1
        event = {"cat": "transfer", "id": f"{pe}.{self._transfers}", "name": name, "pid": pe, "tid": track}
        self._events.append({"ph": "b", "ts": self._clock(), "args": details, **event})

        def end() -> None:
            self._events.append({"ph": "e", "ts": self._clock(), "args": {}, **event})

        return end

    def instant(self, pe: int, name: str, details: dict[str, Any]) -> None:
        """A mark on the PE's row of signals."""
        self._name(pe, SIGNAL_TRACK)
        self._events.append(
            {
                "ph": "i",
                "s": "t",
                "name": name,
                "pid": pe,
                "tid": SIGNAL_TRACK,
                "ts": self._clock(),
                "args": details,
            }
        )

    def to_json(self) -> str:
        """The trace as JSON text."""
        return json.dumps({"traceEvents": self._events, "displayTimeUnit": "ns"})

    def save(self, path: str | Path) -> None:
        """Write the trace to a file."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    def _name(self, pe: int, track: int) -> None:
        if (pe, track) in self._named:
            return
        self._named.add((pe, track))
        name = {HOST_TRACK: "host", SIGNAL_TRACK: "signals"}.get(track, f"program {track - 1}")
        for what, value in (("process_name", f"pe{pe}"), ("thread_name", name)):
            self._events.append({"ph": "M", "name": what, "pid": pe, "tid": track, "args": {"name": value}})
        self._events.append(
            {"ph": "M", "name": "thread_sort_index", "pid": pe, "tid": track, "args": {"sort_index": track}}
        )
