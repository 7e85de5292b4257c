# SPDX-License-Identifier: Apache-2.0
"""What a benchmark computes from sizes and times. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from tdcoll.arguments import parse_bytes, parse_whole

__all__ = [
    "Floor",
    "Summary",
    "calls_per_launch",
    "floor_us",
    "format_bytes",
    "message_sizes",
    "moved_rows",
    "ratio",
    "sent_bytes",
    "summarize",
]

_MOST_CALLS = 20
_RESULT_BYTES = 1 << 30
"""About as much memory as the results of one launch take, each call having a result of its own."""


@dataclass(frozen=True)
class Summary:
    """Microseconds per call over the iterations, each taken by its slowest rank.

    ``skew_us`` is the median over the iterations of what the slowest rank took longer than the fastest.
    """

    median_us: float
    min_us: float
    p90_us: float
    skew_us: float | None = None


def summarize(times_us: Sequence[Sequence[float]]) -> Summary:
    """``times_us[rank][iteration]``: the maximum over ranks of each iteration; its median, minimum and p90; the skew.

    Raises:
        ValueError: no times, or ranks with different numbers of them.
    """
    if not times_us or not times_us[0] or any(len(times) != len(times_us[0]) for times in times_us):
        raise ValueError(f"every rank needs the same number of times, got {[len(times) for times in times_us]}")
    iterations = list(zip(*times_us, strict=True))
    slowest = sorted(map(max, iterations))
    p90 = slowest[math.ceil(0.9 * len(slowest)) - 1]
    skew = statistics.median(max(of_ranks) - min(of_ranks) for of_ranks in iterations)
    return Summary(statistics.median(slowest), slowest[0], p90, skew)


def sent_bytes(operation: str, nbytes: int, world: int) -> float:
    """Bytes that each rank sends, at least, and receives: what nccl-tests takes for bus bandwidth.

    Args:
        operation: ``"all_gather"``, ``"reduce_scatter"`` (``nbytes`` of a segment) or ``"all_reduce"`` (of all).
    """
    return (world - 1) * nbytes * (2 / world if operation == "all_reduce" else 1)


def moved_rows(held: int, union: int, world: int) -> int:
    """Rows that cross between ranks if a contributor of each row sums it and tells all others.

    ``sum(c_u - 1) + U (W - 1)``, c_u the contributors of row u: nothing that sums each row in one place and then
    spreads it moves fewer.

    Args:
        held: ``sum(c_u)``, distinct rows of each rank, all ranks together.
        union: U, distinct rows of all.
        world: W, ranks.
    """
    return held - union + union * (world - 1)


def floor_us(nbytes: float, gbps: float) -> float:
    """Microseconds that ``nbytes`` bytes take at ``gbps`` GB/s."""
    return nbytes / gbps / 1e3


@dataclass(frozen=True)
class Floor:
    """What bounds an all-gather inside a node from below.

    Attributes:
        launch_us: an empty kernel, as it is launched.
        crossing_us: a store until the other GPU sees it.
        gbps: rate at which a rank can store to all others.
    """

    launch_us: float
    crossing_us: float
    gbps: float

    def us(self, sent: float, world: int) -> float:
        """A launch and a crossing, or all that a rank sends (bytes) at the full rate: whichever takes longer."""
        return max(self.launch_us + (self.crossing_us if world > 1 else 0.0), floor_us(sent, self.gbps))


def ratio(peer_us: float | None, ours_us: float | None) -> float | None:
    """Return how many times faster than the peer we are; below 1 we lose. None if either was not measured."""
    return None if not peer_us or not ours_us else peer_us / ours_us


def message_sizes(begin: str, end: str, factor: str, itemsize: int) -> list[int]:
    """Bytes per rank: ``begin``, ``begin * factor``, ... up to ``end``; sizes such as 1024, 1K or 64M.

    Raises:
        ValueError: something is no size, the range is empty, or ``begin`` is no multiple of ``itemsize``.
    """
    first, last = parse_bytes(begin, "-b"), parse_bytes(end, "-e")
    step = parse_whole(factor, "-f", 2)
    if first > last:
        raise ValueError(f"-b must be at most -e, got {begin} and {end}")
    if first % itemsize:
        raise ValueError(f"-b must be a multiple of the dtype's {itemsize} bytes, got {begin}")
    sizes = [first]
    while sizes[-1] * step <= last:
        sizes.append(sizes[-1] * step)
    return sizes


def calls_per_launch(nbytes: int, world: int) -> tuple[int, int]:
    """Return how many calls are timed together: an even number and the odd one after it.

    20 and 21, fewer where the results of so many calls would take too much memory.
    """
    even = min(_MOST_CALLS, max(2, _RESULT_BYTES // (nbytes * world) // 2 * 2))
    return even, even + 1


def format_bytes(nbytes: int) -> str:
    """4096 -> "4 KB": exact, in the largest unit (powers of 1024) that divides it."""
    for shift, unit in ((30, "GB"), (20, "MB"), (10, "KB")):
        if nbytes and nbytes % (1 << shift) == 0:
            return f"{nbytes >> shift} {unit}"
    return f"{nbytes} B"
