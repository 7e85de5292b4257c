# SPDX-License-Identifier: Apache-2.0
"""All-gathers beside matmuls, for ``backend_calls.py --beside``."""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import tdcoll
from benchmarks.backend_timing import GATHER, Call, Clock, Measures, captured, rounds, show
from benchmarks.layout import Layout
from tdcoll.base.arguments import format_bytes
from tdcoll.tools.measure.results import Row

WORK = ((4, 16 << 20), (18, 4 << 20))
"""The all-gathers beside two matmuls: their number, and the bytes of each."""

_WIDTH = 8192


def _gathers_text(row: Row) -> str:
    return f"{row.facts['gathers']} of {format_bytes(row.facts['nbytes'])}"


BESIDE_LAYOUT = Layout(title="Two matmuls beside all-gathers", size={"all-gathers": _gathers_text})
"""The layout of the rows of :func:`beside_rows`."""


def measure_beside(clock: Clock, count: int, nbytes: int) -> dict[str, Any]:
    """Measure and show two matmuls, alone and with ``count`` all-gathers on another stream.

    Collective. Matrices are 8192 x 8192 of bfloat16.
    """
    a = torch.randn(_WIDTH, _WIDTH, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(a)
    side_stream = torch.cuda.Stream(priority=-1)
    part = torch.ones(nbytes, dtype=torch.uint8, device="cuda")
    whole = torch.empty(dist.get_world_size() * nbytes, dtype=torch.uint8, device="cuda")
    shared = tdcoll.empty(whole.numel(), torch.uint8)

    def step(gather: Call) -> None:
        main = torch.cuda.current_stream()
        side_stream.wait_stream(main)
        with torch.cuda.stream(side_stream):
            for _ in range(count):
                gather()
        for _ in range(2):
            torch.mm(a, a, out=out)
        main.wait_stream(side_stream)

    with tdcoll.CollectiveContext(max_bytes_per_rank=nbytes, max_blocks=64) as ctx:

        def by_algorithm(name: str) -> Call:
            return lambda: tdcoll.all_gather(part, ctx=ctx, out=whole, algorithm=name)

        gathers: dict[str, Call] = {
            "alone": lambda: None,
            "nccl": lambda: GATHER(whole, part, group=clock.nccl),
            "ce in place": lambda: tdcoll.all_gather_(shared, ctx=ctx, algorithm="ce"),
            "ce": by_algorithm("ce"),
            "loop": by_algorithm("loop"),
            "direct": by_algorithm("direct"),
        }
        graphs = {}
        for name, gather in gathers.items():
            graphs[name] = captured(partial(step, gather), 1)
        measures: Measures = {
            name: partial(clock.device_us, graph, 1) for name, graph in graphs.items()
        }
        row = {"kind": f"{count} all-gathers", "nbytes": nbytes, "us": rounds(measures)}
        # NCCL's group cannot be destroyed while a graph lives.
        measures.clear()
        graphs.clear()
    tdcoll.free(shared)
    show([row], "beside")
    return row


def beside_rows(measured: dict[str, Any], ranks: int) -> list[Row]:
    """Return the rows of a result of :func:`measure_beside`, for `tdcoll report`.

    The fact ``added`` is by how much each round took longer than that without all-gathers.
    """
    alone = measured["us"]["alone"]
    rows = []
    for name, times in measured["us"].items():
        facts = {
            "gathers": measured["kind"],
            "nbytes": measured["nbytes"],
            "times": times,
            "added": [time - least for time, least in zip(times, alone, strict=True)],
        }
        row = Row(
            ranks=ranks,
            nodes=1,
            algorithm=name,
            peer=name in ("alone", "nccl"),
            launch="graph",
            check="ok",
            median_us=statistics.median(times),
            facts=facts,
        )
        rows.append(row)
    return rows
