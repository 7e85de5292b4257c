# SPDX-License-Identifier: Apache-2.0
"""How a report shows a benchmark's rows in tables and pictures, and the names that it uses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tdcoll.tools.measure.dense import IN_PLACE
from tdcoll.tools.measure.floor import FLOORS, Floor
from tdcoll.tools.measure.results import Columns, Row, Text

_LAUNCHES = {"graph": "CUDA graphs", "eager": "eager calls"}

_NAMES = {
    "tdcoll auto": "tdcoll",
    f"tdcoll {IN_PLACE}": "tdcoll in place",
    "nccl": "NCCL",
    "trtllm-one-shot": "TensorRT-LLM one-shot",
    "trtllm-two-shot": "TensorRT-LLM two-shot",
    "vllm": "vLLM",
}
"""Labels that are shown by another name. Files also have baselines that are no longer measured."""


def launch_name(row: Row) -> str:
    """Return how a row's calls were launched, in words."""
    return _LAUNCHES.get(row.launch, row.launch)


def label_name(label: str) -> str:
    """Return a label as a report shows it: ``"NCCL symmetric"`` for ``"nccl-symmetric"``."""
    first, comma, detail = label.partition(",")
    return _NAMES.get(first, first).replace("nccl-", "NCCL ") + comma + detail


def machine_name(head: dict[str, Any], row: Row) -> str:
    """Return the machine of a row of the file: ``"4 × NVIDIA H200 on 1 node"``."""
    facts = head["provenance"]
    gpus = Counter(gpu for gpu in facts.get("gpus", []) if gpu)
    names = " and ".join(f"{count} × {name}" for name, count in gpus.items())
    nodes = "1 node" if row.nodes == 1 else f"{row.nodes} nodes"
    emulated = facts.get("environment", {}).get("TDCOLL_EMULATE_NODES", "1")
    if emulated not in ("", "1"):
        nodes += " (emulated)"
    return f"{names} on {nodes}"


def floor_of(head: dict[str, Any], rows: list[Row]) -> Floor | None:
    """Return the lower bound for rows of a file; None between nodes, and for GPUs without one."""
    gpus = set(head["provenance"].get("gpus", []))
    if len(gpus) != 1 or any(row.nodes > 1 for row in rows):
        return None
    return FLOORS.get(gpus.pop())


def requested_blocks(row: Row) -> int | None:
    """Return the thread blocks that ``--blocks`` requested: 8 for ``"loop 8 blocks"``."""
    _, *words = row.algorithm.split()
    return int(words[0]) if words[1:] == ["blocks"] else None


@dataclass(frozen=True, kw_only=True)
class Bars:
    """A picture of bars: times as multiples of a baseline's.

    Attributes:
        unit: The baseline whose time is 1.
        unit_name: The same in words.
        names: The algorithms and baselines that have a bar, and what the legend calls them.
        panel: The panel of a row.
        size: The place of a row in its panel, in words.
    """

    unit: str
    unit_name: str
    names: dict[str, str]
    panel: Text
    size: Text


@dataclass(frozen=True, kw_only=True)
class Layout(Columns):
    """How a benchmark's rows are shown on the terminal, in tables and in pictures.

    Attributes:
        title: the benchmark's subject, as the caption of tables begins.
        shown: algorithms and baselines that have a column unless others are requested. If no row is
            of one of tdcoll's among them, all of tdcoll's algorithms have one.
        drawn: algorithms and baselines of a picture that would have too many curves otherwise.
        about: text about all rows of a table. Rows with different texts get different tables.
        unit: unit of times in tables and pictures.
        scale: number of units in a microsecond.
        floor: lower bound of a row's time, in microseconds; None if not known.
        floor_text: explanation of the lower bound.
        x: place of a row on a picture's axis; None if there are no curves.
        x_text: label of a place.
        panel: the line and the column of panels that a row belongs to.
        bars: the picture if it has no curves, since sizes have no order; None if there are none.
        timed: whether rows have times; without them, a report has nothing to show.
    """

    title: str
    shown: tuple[str, ...] = ()
    drawn: tuple[str, ...] = ()
    about: Text = lambda row: ""
    unit: str = "µs"
    scale: float = 1.0
    floor: Callable[[Row, Floor | None], float | None] = lambda row, floor: None
    floor_text: Callable[[Row, Floor | None], str] = lambda row, floor: ""
    x: Callable[[Row], int] | None = None
    x_text: Callable[[int], str] = "{:,}".format
    panel: Callable[[Row], tuple[str, str]] = lambda row: ("", launch_name(row))
    bars: Bars | None = None
    timed: bool = True

    def size_of(self, row: Row) -> tuple[str, ...]:
        """Return the size of a row, in words."""
        return tuple(text(row) for text in self.size.values())

    def time_of(self, row: Row) -> float | None:
        """Return a row's time in the layout's unit; None if it was not timed."""
        return None if row.median_us is None else row.median_us * self.scale

    def labels(self, rows: list[Row], only: tuple[str, ...] = ()) -> list[str]:
        """Return the labels of the names in ``only``, or of the layout's names; tdcoll's first."""
        names = only or self.shown
        ours = [row for row in rows if not row.peer]
        baselines = [row for row in rows if row.peer and row.median_us]
        named = [row for row in ours if row.algorithm in names]
        if not named and not only:
            named = ours
        named += [row for row in baselines if row.algorithm in names]
        return list(dict.fromkeys(self.label(row) for row in named))
