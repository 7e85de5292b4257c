# SPDX-License-Identifier: Apache-2.0
"""Times on GPUs: CUDA-graph replays, or batches of eager calls, between two CUDA events.

The slowest rank counts: each iteration takes as long as its slowest rank did, and the result is the
median of that over the iterations. Before each iteration the ranks line up *on their streams*: a
pause, in which the host issues the timed work, and then a small all-gather, which no rank leaves
before all are there. Because of this order, neither a late host nor GPUs with different clocks,
whose pauses differ, add to the measured skew; one or two microseconds of an NVLink hop remain,
spread over the calls of an iteration. Eager calls have no pause before them: issuing them may take
longer.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tdcoll import runtime
from tdcoll.base.errors import TdcollError
from tdcoll.calls.context import CollectiveContext
from tdcoll.collectives.all_gather.op import all_gather

_ASSUMED_CLOCK_KHZ = 1_800_000
_GRAPH_HEAD_START_US = 500.0
_WARMUP = 3
_REPLAYS = 50


@dataclass(frozen=True)
class TimeSummary:
    """Times over iterations, in microseconds per call.

    Attributes:
        median_us, min_us, p90_us: median, minimum and 90th percentile of the slowest rank's time.
        skew_us: median of the time between the fastest and the slowest rank.
    """

    median_us: float
    min_us: float
    p90_us: float
    skew_us: float


def summarize(times_us: Sequence[Sequence[float]]) -> TimeSummary:
    """Return the summary of times.

    Args:
        times_us: for each rank, the microseconds per call in each iteration.
    """
    counts = [len(times) for times in times_us]
    if not counts or not counts[0] or len(set(counts)) > 1:
        raise ValueError(f"every rank needs the same number of times, got {counts}")
    iterations = list(zip(*times_us, strict=True))
    slowest = sorted(max(times) for times in iterations)
    return TimeSummary(
        median_us=statistics.median(slowest),
        min_us=slowest[0],
        p90_us=slowest[math.ceil(0.9 * len(slowest)) - 1],
        skew_us=statistics.median(max(times) - min(times) for times in iterations),
    )


class LineUp:
    """When called, let the current streams of all ranks continue at about the same moment.

    A context manager. Collective. If a rank does not come, the others raise
    :class:`~tdcoll.CollectiveTimeout`.
    """

    def __init__(self) -> None:
        self._context = CollectiveContext(max_bytes_per_rank=8, debug=False)
        device = self._context.device
        self._token = torch.zeros(1, dtype=torch.int64, device=device)
        self._tokens = torch.zeros(self._context.world_size, dtype=torch.int64, device=device)

    def __call__(self, head_start_us: float = 0.0) -> None:
        """Line up after at least ``head_start_us`` microseconds, in which the host issues work."""
        if head_start_us:
            properties = torch.cuda.get_device_properties(torch.cuda.current_device())
            clock_khz = getattr(properties, "clock_rate", 0) or _ASSUMED_CLOCK_KHZ
            torch.cuda._sleep(int(head_start_us * clock_khz / 1e3))
        all_gather(self._token, ctx=self._context, out=self._tokens, algorithm="1d")

    def check(self) -> None:
        """Wait for the stream; raise if a rank did not come."""
        self._context.check()

    def __enter__(self) -> LineUp:
        return self

    def __exit__(self, *exception: Any) -> None:
        self._context.__exit__(*exception)


@dataclass(frozen=True)
class TimedLaunch:
    """Work to time: ``run`` makes ``calls`` calls, which the host issues in ``head_start_us``."""

    run: Callable[[], object]
    calls: int
    head_start_us: float = 0.0


def capture(call: Callable[[int], object], calls: int) -> TimedLaunch:
    """Capture ``call(0)`` ... ``call(calls - 1)`` as one CUDA graph.

    Each must have run once before, uncaptured.
    """
    graph = torch.cuda.CUDAGraph()
    # NCCL's watchdog thread polls its events all the time; its calls are not part of this capture.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for position in range(calls):
            call(position)
    return TimedLaunch(graph.replay, calls, _GRAPH_HEAD_START_US)


def time_launches(
    launches: Sequence[TimedLaunch],
    iterations: int,
    line_up: LineUp,
    before: Callable[[int], object] | None = None,
    last: int = 0,
) -> list[float]:
    """Return the microseconds per call of each iteration, on this rank.

    Collective; waits for the GPU.

    Args:
        launches: taken in turn.
        before: runs before each launch, with the launch's number of calls; untimed, in stream
            order.
        last: index of the launch that the last iteration takes.
    """
    timed: list[tuple[torch.cuda.Event, torch.cuda.Event, int]] = []
    for iteration in range(iterations):
        launch = launches[(last + iterations - 1 - iteration) % len(launches)]
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        if before is not None:
            before(launch.calls)
        line_up(launch.head_start_us)
        begin.record()
        launch.run()
        end.record()
        timed.append((begin, end, launch.calls))
    torch.cuda.synchronize()
    line_up.check()
    return [begin.elapsed_time(end) * 1e3 / calls for begin, end, calls in timed]


def graph_time_us(function: Callable[[], object], calls: Sequence[int] = (20, 21)) -> float:
    """Return the microseconds per call of ``function`` in a CUDA graph.

    The result is the median over replays of the slowest rank's time. Collective: all ranks make
    this call, on the stream that the function's context has::

        us = graph_time_us(lambda: tdcoll.all_gather(x, ctx=ctx, out=out))

    Args:
        function: issues work on the current stream; no host synchronisation, the same on every
            replay.
        calls: calls per graph, one graph for each number; an odd number shows that slots may end up
            swapped.

    Raises:
        NotInitializedError: before ``tdcoll.initialize()``.
        TdcollError: in the simulator, which has no times.
    """
    owner = runtime.current()
    if owner.simulated:
        raise TdcollError("graph_time_us needs GPUs; the simulator has no times")
    for _ in range(_WARMUP):
        function()
    launches = [capture(lambda _: function(), count) for count in calls]
    with LineUp() as line_up:
        time_launches(launches, _WARMUP * len(launches), line_up)
        times = time_launches(launches, _REPLAYS, line_up)
    of_ranks = owner.control.all_gather(range(owner.world_size), "graph_time_us", times)
    return summarize(of_ranks).median_us
