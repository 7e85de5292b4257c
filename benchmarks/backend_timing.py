# SPDX-License-Identifier: Apache-2.0
"""Times of calls of torch.distributed for ``backend_calls.py``, on the host and in CUDA graphs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

ROUNDS = 5
CALLS = 50
"""Calls of a host time."""
CAPTURED = 10
"""Calls in a graph."""
_REPLAYS = 3

GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""Newer PyTorch has renamed them."""

Call = Callable[..., Any]
"""A call of a collective; that of a group takes ``async_op``."""

Measures = dict[str, Callable[[], float]]
"""Compared measurements by name, in microseconds."""

Times = dict[str, list[float]]
"""Microseconds of each round, by the name of the compared call."""


def group_call(kind: str, nbytes: int, group: Any) -> Call:
    """Return a function that makes a call of ``nbytes`` on a group; it takes ``async_op``."""
    world = dist.get_world_size()
    n = max(1, nbytes // 2)
    device = torch.device("cuda", torch.cuda.current_device())
    if kind == "all_reduce":
        tensor = torch.ones(n, dtype=torch.bfloat16, device=device)
        maximum = dist.ReduceOp.MAX
        return lambda async_op=False: dist.all_reduce(
            tensor, maximum, group=group, async_op=async_op
        )
    whole = torch.ones(world * n, dtype=torch.bfloat16, device=device)
    if kind == "all_to_all":  # nbytes is a rank's part for each other one
        out = torch.empty_like(whole)
        return lambda async_op=False: dist.all_to_all_single(
            out, whole, group=group, async_op=async_op
        )
    part = torch.ones(n, dtype=torch.bfloat16, device=device)
    if kind == "reduce_scatter":
        return lambda async_op=False: SCATTER(part, whole, group=group, async_op=async_op)
    if kind == "all_gather in place":
        rank = dist.get_rank()
        part = whole[rank * n : (rank + 1) * n]
    return lambda async_op=False: GATHER(whole, part, group=group, async_op=async_op)


class Clock:
    """Times of the slowest rank.

    Attributes:
        nccl: a group of all ranks on NCCL, for barriers and maxima.
    """

    def __init__(self, nccl: Any) -> None:
        self.nccl = nccl

    def slowest(self, us: float) -> float:
        """Return the largest of all ranks' times. Collective."""
        found = torch.tensor([us], device="cuda")
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.nccl)
        return float(found)

    def call_us(self, call: Call, *, asynchronous: bool = False) -> float:
        """Return the microseconds of this rank's host per call. Collective."""
        torch.cuda.synchronize()
        dist.barrier(group=self.nccl)
        torch.cuda.synchronize()
        began = time.perf_counter()
        if asynchronous:
            for _ in range(CALLS):
                call(async_op=True).wait()
        else:
            for _ in range(CALLS):
                call()
        took = time.perf_counter() - began
        torch.cuda.synchronize()
        return 1e6 * took / CALLS

    def host_us(self, call: Call, *, asynchronous: bool = False) -> float:
        """Return the microseconds of the slowest rank's host per call. Collective."""
        return self.slowest(self.call_us(call, asynchronous=asynchronous))

    def device_us(self, graph: torch.cuda.CUDAGraph, calls: int = CAPTURED) -> float:
        """Return the microseconds of the slowest rank's device per captured call. Collective."""
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        dist.barrier(group=self.nccl)
        torch.cuda.synchronize()
        graph.replay()
        begin.record()
        for _ in range(_REPLAYS):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        return self.slowest(1e3 * begin.elapsed_time(end) / (_REPLAYS * calls))


def captured(call: Call, calls: int = CAPTURED) -> torch.cuda.CUDAGraph:
    """Return a graph of so many calls, which keeps their tensors."""
    side_stream = torch.cuda.Stream()
    side_stream.wait_stream(torch.cuda.current_stream())
    graph: Any = torch.cuda.CUDAGraph()
    with torch.cuda.stream(side_stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(side_stream)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=side_stream):
        for _ in range(calls):
            call()
    graph.kept = call
    return graph


def rounds(measures: Measures) -> Times:
    """Return the times of each measure; they take turns."""
    found: Times = {name: [] for name in measures}
    for _ in range(ROUNDS + 1):
        for name, measure in measures.items():
            found[name].append(measure())
    return {name: times[1:] for name, times in found.items()}  # the first round warms up


def show(rows: Iterable[dict[str, Any]], what: str) -> None:
    """Print rows on rank 0: median, fastest and slowest round."""
    if dist.get_rank() != 0:
        return
    for row in rows:
        cells = []
        for name, times in row["us"].items():
            cells.append(
                f"{name} {statistics.median(times):.1f} [{min(times):.1f}, {max(times):.1f}]"
            )
        print(
            f"{what:6s} {row['kind']:20s} {row['nbytes']:>9d} bytes  {'  '.join(cells)}", flush=True
        )
