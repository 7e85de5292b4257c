# SPDX-License-Identifier: Apache-2.0
"""Draw the figures of the documentation: ``python docs/figures.py [FOLDER]``. It needs matplotlib
(extra ``bench``).

``docs/figures/NAME.svg`` is a sequence diagram of an entry of ``docs/sequences.py``. The file also
holds :func:`sequences.summary`, which a test compares with that of a new run.
``docs/results/tutorials/ddp-2xH200.svg`` is drawn from the result file beside it.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from sequences import PROTOCOLS, ROOT, Event, Protocol, events, held, reason, summary

SLOTS = "#0072b2", "#d55e00", "#009e73", "#cc79a7"
"""Colours of slots, or of the ranks whose pieces travel."""

STYLE = {
    "font.size": 9,
    "axes.titlesize": 10.5,
    "svg.fonttype": "none",
    "svg.hashsalt": "tdcoll",
    "font.family": "sans-serif",
}


class Diagram:
    """A sequence diagram: a lane for each rank, time runs downwards, one step for each moment at
    which something begins or ends. Beside the lanes of two ranks stand their slots, filled from
    arrival until they were read."""

    def __init__(self, protocol: Protocol, found: Sequence[Event]) -> None:
        self.protocol, self.found = protocol, found
        moments = sorted({time for event in found for time in (event.begin, event.end)})
        self.when = {moments[0]: 0.0}
        for before, time in pairwise(moments):  # in order, and not to scale
            self.when[time] = self.when[before] + min(max((time - before) / 8, 1.0), 4.0)
        last = self.when[moments[-1]]
        self.reason = reason(protocol, found) if protocol.reason else None
        self.slots = 0 if protocol.pieces else 1 + max(event.slot for event in found)
        figure = self.figure = Figure(
            figsize=(7.2, 1.2 + (0.12 if self.slots else 0.09) * last),
            facecolor="white",
            layout="constrained",
        )
        self.axes = figure.subplots()
        self.axes.set(
            title=protocol.title,
            ylim=(last + 0.5, -5.5 if self.slots else -2.5),
            xticks=[],
            yticks=[],
            xlabel=self.legend(),
        )
        self.axes.set_xlim(-0.55, len(protocol.lanes) - 0.45)
        self.axes.set_frame_on(False)
        self.width = 0.11 if self.slots else 0.16

    def legend(self) -> str:
        """Return the text below the figure."""
        if self.protocol.pieces:
            marks = "thick: the piece of rank 0; dashed: signals; hatched: waits"
            return f"{marks}; time runs downwards and is not to scale"
        text = "hatched: waits; beside each rank: the data of peers in its slots, from arrival until it was read"
        return f"{text}\n{self.protocol.reason}" if self.reason else text

    def draw(self) -> Any:
        """Return the figure."""
        for rank, heading in enumerate(self.protocol.lanes):
            self.axes.text(
                rank,
                -0.8 if self.protocol.pieces else -4.0,
                heading,
                ha="center",
                va="bottom",
                weight="bold",
            )
            self.axes.axvline(rank, color="#bbbbbb", linewidth=0.8, zorder=0)
        for event in self.found:
            {"call": self.call, "wait": self.wait, "read": self.read}.get(event.kind, self.message)(
                event
            )
        if self.slots:
            self.memory()
        if self.reason:
            self.because(*self.reason)
        return self.figure

    def bar(self, x: float, begin: float, end: float, width: float, **style: Any) -> float:
        """Draw a bar from ``begin`` to ``end``; return the middle."""
        first, last = self.when.get(begin, begin), self.when.get(end, end)
        self.axes.bar(
            x, last - first, width, first, **{"edgecolor": "#555555", "linewidth": 0.6, **style}
        )
        return (first + last) / 2

    def call(self, event: Event) -> None:
        """Draw a call, with its number inside, or an item."""
        middle = self.bar(event.rank, event.begin, event.end, self.width, color="#eeeeee", zorder=1)
        what = "item" if self.protocol.rows else "call"
        long = self.when[event.end] - self.when[event.begin] > 3.5
        text, rotation = (f"{what} {event.call}", 90) if long else (str(event.call), 0)
        x = event.rank + 0.15 * self.width * (1 if event.rank else -1)  # beside the waits
        self.axes.text(x, middle, text, ha="center", va="center", rotation=rotation, zorder=5)

    def wait(self, event: Event) -> None:
        """Draw a wait in its call."""
        x = event.rank + 0.35 * self.width * (-1 if event.rank else 1)
        self.bar(
            x, event.begin, event.end, 0.3 * self.width, color="white", hatch="//////", zorder=2
        )

    def read(self, event: Event) -> None:
        """Draw a read outside of a call in the colour of its slot."""
        slot = next(
            one.slot
            for one in self.found
            if (one.to, one.call) == (event.rank, event.call) and one.slot >= 0
        )
        if event.end > event.begin:
            middle = self.bar(
                event.rank,
                event.begin,
                event.end,
                self.width,
                color=SLOTS[slot],
                alpha=0.5,
                zorder=2,
            )
            if not self.protocol.rows:
                long = self.when[event.end] - self.when[event.begin] > 3.5
                text, rotation = (f"read {event.call}", 90) if long else ("read", 0)
                self.axes.text(
                    event.rank, middle, text, ha="center", va="center", rotation=rotation
                )

    def message(self, event: Event) -> None:
        """Draw an arrow from the moment when something is sent to that of its last byte."""
        right = event.to > event.rank
        offset = self.width / 2 * (1 if right else -1)
        begin, end = (
            (event.rank + offset, self.when[event.begin]),
            (event.to - offset, self.when[event.end]),
        )
        colour = SLOTS[event.slot] if event.kind == "data" else "#333333"
        thick = event.slot == 0 if self.protocol.pieces else event.kind == "data"
        style = {"color": colour, "linewidth": 1.8 if thick else 0.9, "shrinkA": 0, "shrinkB": 0}
        style["linestyle"] = "-" if event.kind == "data" else (0, (3, 2))
        self.axes.annotate("", end, begin, arrowprops={"arrowstyle": "-|>", **style}, zorder=4)
        text = self.protocol.label(event)
        if text:
            share = 0.5 if self.protocol.pieces else 0.3
            at = (begin[0] + share * (end[0] - begin[0]), begin[1] + share * (end[1] - begin[1]))
            box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
            self.axes.text(*at, text, color=colour, ha="center", va="center", bbox=box, zorder=4.5)

    def memory(self) -> None:
        """Draw the slots beside the lanes, with the data of peers that they hold."""
        for rank in range(2):
            for slot in range(self.slots):
                x = rank + (0.14 + 0.085 * slot) * (1 if rank else -1)
                self.axes.text(
                    x,
                    -0.2,
                    f"slot {slot}",
                    ha="center",
                    va="bottom",
                    rotation=90,
                    color=SLOTS[slot],
                )
                self.axes.axvline(
                    x, ymax=0.9, color=SLOTS[slot], linewidth=0.5, alpha=0.5, zorder=0
                )
                for event in self.found:
                    if (event.to, event.slot) == (rank, slot):
                        self.hold(x, event)

    def hold(self, x: float, event: Event) -> None:
        """Draw how long a slot holds data."""
        begin, end, free = held(self.protocol, self.found, event)
        middle = self.bar(x, begin, end, 0.06, color=SLOTS[event.slot], alpha=0.35, zorder=1)
        self.axes.text(x, middle, str(event.call), ha="center", va="center")
        if free > end:
            middle = self.bar(x, end, free, 0.06, color="white", zorder=1)
            self.axes.text(x, middle, "cleared", ha="center", va="center", rotation=90, size=8)

    def because(self, earlier: Event, message: Event, later: Event) -> None:
        """Mark the reason why the slot may be reused."""
        free, half = self.when[held(self.protocol, self.found, earlier)[2]], self.width / 2
        x = earlier.to + 0.14 + 0.085 * earlier.slot
        places = (
            (x, free),
            (message.rank - half, self.when[message.begin]),
            (later.rank + half, self.when[later.begin]),
        )
        for number, (at, step) in enumerate(places, 1):
            circle = {"boxstyle": "circle,pad=0.15", "facecolor": "black", "edgecolor": "none"}
            self.axes.text(
                at,
                step,
                str(number),
                color="white",
                ha="center",
                va="center",
                bbox=circle,
                zorder=6,
                size=8,
            )


def training_step(result: dict[str, Any]) -> Any:
    """Return the figure of a result of tutorial 04: losses, bytes and times of training in several
    ways."""
    figure = Figure(figsize=(10, 3.2), facecolor="white", layout="constrained")
    losses, moved, times = figure.subplots(1, 3, width_ratios=(1.1, 1, 1))
    for (name, values), style in zip(result["losses"].items(), ("-", "--", "-.", ":"), strict=True):
        losses.plot(
            range(1, len(values) + 1), values, style, linewidth=5 if style == "-" else 2, label=name
        )
    losses.set(title="Loss: all ways agree", xlabel="step", ylabel="loss (lower is better)")
    losses.legend(frameon=False)
    sizes = result["bytes_per_rank_and_step"]
    megabytes = {"sparse": sizes["table, sparse"] / 1e6, "dense": sizes["table, dense"] / 1e6}
    moved.scatter(list(megabytes.values()), list(megabytes), s=70, zorder=3)
    for name, size in megabytes.items():
        moved.annotate(
            f"{size:.0f} MB", (size, name), xytext=(0, 9), textcoords="offset points", ha="center"
        )
    moved.set(
        title="Sent for the table's gradient",
        xlabel="MB per rank and step, logarithmic (lower is better)",
    )
    moved.set(xscale="log", xlim=(3, 16e3))
    for name, its in result["step_ms"].items():
        slowest = [max(ranks) for ranks in zip(*its["ranks"], strict=True)]
        times.scatter(slowest, [name] * len(slowest), s=14, color="#999999", zorder=2)
        median = statistics.median(slowest)
        times.scatter([median], [name], s=70, color="C0", zorder=3)
        times.annotate(
            f"{median:.1f} ms",
            (median, name),
            xytext=(0, 9),
            textcoords="offset points",
            ha="center",
        )
    times.set(
        title="Step, on the slowest rank",
        xlabel="ms; large: median (lower is better)",
        xlim=(0, 25),
    )
    for axes in (moved, times):
        axes.margins(y=0.3)
        axes.invert_yaxis()
        axes.grid(axis="x", alpha=0.35)
    for axes in (losses, moved, times):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def save(figure: Any, path: Path, about: str = "") -> None:
    """Write a figure as SVG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(
        path, metadata={"Date": None, "Creator": "docs/figures.py", "Description": about}
    )
    print(path)


def main(root: Path) -> None:
    """Draw all figures into the checkout ``root``, or another folder."""
    with rc_context(STYLE):
        for name, protocol in PROTOCOLS.items():
            found = events(protocol)
            save(
                Diagram(protocol, found).draw(),
                root / f"docs/figures/{name}.svg",
                "\n".join(summary(found)),
            )
        name = "docs/results/tutorials/ddp-2xH200"
        result = json.loads((ROOT / f"{name}.json").read_text(encoding="utf-8"))
        save(training_step(result), root / f"{name}.svg")


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1].startswith("-"):
        sys.exit(f"usage: python docs/figures.py [FOLDER]; got {sys.argv[1]}")
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
