# SPDX-License-Identifier: Apache-2.0
"""Sizes, times, numbers that follow from them, and lower bounds of times. Pure."""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["FLOORS", "Floor", "distinct", "floor_of", "format_bytes", "parse_floor", "ratio", "summarize"]


def summarize(times_us: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return the median, minimum and p90 of the slowest rank in each iteration, and the median of the skew.

    Args:
        times_us: of each rank, microseconds per call in each iteration.

    Raises:
        ValueError: no times, or ranks with different numbers of them.
    """
    if not times_us or not times_us[0] or any(len(times) != len(times_us[0]) for times in times_us):
        raise ValueError(f"every rank needs the same number of times, got {[len(times) for times in times_us]}")
    iterations = list(zip(*times_us, strict=True))
    slowest = sorted(map(max, iterations))
    return {
        "median_us": statistics.median(slowest),
        "min_us": slowest[0],
        "p90_us": slowest[math.ceil(0.9 * len(slowest)) - 1],
        "skew_us": statistics.median(max(of_ranks) - min(of_ranks) for of_ranks in iterations),
    }


def ratio(peer_us: float | None, ours_us: float | None) -> float | None:
    """Return how many times faster than the baseline tdcoll is; None if either was not measured."""
    return None if not peer_us or not ours_us else peer_us / ours_us


def format_bytes(nbytes: int) -> str:
    """4096 -> "4 KB": exact, in the largest unit (powers of 1024) that divides it."""
    for shift, unit in ((30, "GB"), (20, "MB"), (10, "KB")):
        if nbytes and nbytes % (1 << shift) == 0:
            return f"{nbytes >> shift} {unit}"
    return f"{nbytes} B"


def distinct(values: Iterable[Any]) -> list[Any]:
    """Return each value once, in the order in which they came first."""
    return list(dict.fromkeys(values))


@dataclass(frozen=True)
class Floor:
    """The lower bound of a dense collective inside a node.

    Attributes:
        launch_us: of an empty kernel, as it is launched.
        crossing_us: of a hop: from a store until the other GPU sees it.
        gbps: rate at which a rank can store to all others.
    """

    launch_us: float
    crossing_us: float
    gbps: float

    def us(self, sent: float, world: int) -> float:
        """Return the longer of a launch with one hop, and of sending all bytes of a rank at the full rate."""
        return max(self.launch_us + (self.crossing_us if world > 1 else 0.0), sent / self.gbps / 1e3)


FLOORS = {"NVIDIA H200": Floor(launch_us=0.8, crossing_us=1.0, gbps=390.0)}
"""Of GPUs with NVLink to all others of the node: launch and rate are measured. The rate is the best that was seen, when
copy engines sent around a ring of 8 (stores to all 7 others at once reached 341). A hop is about a store and the load
that sees it; the signal benchmark measures it."""

PAIR_GBPS = {"NVIDIA H200": 361.0}
"""The rate between two GPUs if they send to no other, both ways at once: the same for stores, bulk copies (TMA) and
copy engines."""


def floor_of(head: dict[str, Any], rows: Sequence[Any], given: Floor | None = None) -> Floor | None:
    """Return the lower bound for these rows: ``given``, or the known one of their GPUs. None between nodes."""
    if not rows or any(row.nodes > 1 for row in rows):
        return None
    gpus = set(head["provenance"].get("gpus", []))
    if given is not None or len(gpus) != 1 or (name := gpus.pop()) not in FLOORS:
        return given
    pair = name in PAIR_GBPS and all(row.ranks == 2 for row in rows)
    return dataclasses.replace(FLOORS[name], gbps=PAIR_GBPS[name]) if pair else FLOORS[name]


def parse_floor(text: str) -> Floor:
    """``"0.8,1,341"``: an empty kernel, a hop (both in microseconds), and the rate in GB/s.

    Raises:
        argparse.ArgumentTypeError: it is not three numbers above 0.
    """
    try:
        launch_us, crossing_us, gbps = map(float, text.split(","))
        if min(launch_us, crossing_us, gbps) > 0:
            return Floor(launch_us, crossing_us, gbps)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"expected three numbers above 0, such as 0.8,1,341; got {text!r}")
