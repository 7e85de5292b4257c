# SPDX-License-Identifier: Apache-2.0
"""Sizes, times, numbers that follow from them, and lower bounds of times. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


def summarize(times_us: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return the median, minimum and p90 of the slowest rank in each iteration, and the median of the skew.

    Args:
        times_us: of each rank, microseconds per call in each iteration.
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


def distinct(values: Iterable[Any]) -> list[Any]:
    """Return each value once, in the order in which they came first."""
    return list(dict.fromkeys(values))


@dataclass(frozen=True)
class Floor:
    """The lower bound of a dense collective inside a node whose GPUs have NVLink to all others.

    Attributes:
        launch_us: of an empty kernel, as it is launched.
        hop_us: of a hop: from a store until the other GPU sees it.
        gbps: rate at which a rank can store to all others.
        pair_gbps: the same, if there is one other.
    """

    launch_us: float
    hop_us: float
    gbps: float
    pair_gbps: float

    def rate(self, world: int) -> float:
        """Return the rate among so many ranks, in GB/s."""
        return self.pair_gbps if world == 2 else self.gbps

    def us(self, sent: float, world: int) -> float:
        """Return the longer of a launch with one hop, and of sending all bytes of a rank at the full rate."""
        return max(self.launch_us + (self.hop_us if world > 1 else 0.0), sent / self.rate(world) / 1e3)


FLOORS = {"NVIDIA H200": Floor(launch_us=0.8, hop_us=1.0, gbps=390.0, pair_gbps=361.0)}
"""Launch and rates are measured. The rate is the best that was seen, when copy engines sent around a ring of 8 (stores
to all 7 others at once reached 341). Between two GPUs, both ways at once, stores, bulk copies (TMA) and copy engines
have the same. A hop is about a store and the load that sees it; the signal benchmark measures it."""


def floor_of(head: dict[str, Any], rows: Sequence[Any]) -> Floor | None:
    """Return the lower bound for rows of a file; None between nodes, and for other GPUs."""
    gpus = {*head["provenance"].get("gpus", [])}
    return None if len(gpus) != 1 or any(row.nodes > 1 for row in rows) else FLOORS.get(gpus.pop())
