# SPDX-License-Identifier: Apache-2.0
"""Shapes, cuts and times of the kernels of ``matmul_kernels.py``."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from tdcoll.fused.matmul.launches import Cut, Operands

BF16 = torch.bfloat16
Times = list[tuple[float, str, str]]
"""Of calls: us, what was called, and a verdict."""
SIGNALLED = 1 << 40
"""An epoch that no call reaches, for signals of a peer that isn't there."""
SMS = 132
GATHERS = [
    (128, 8192, 3584),
    (512, 8192, 3584),
    (2048, 4096, 1792),
    (4096, 8192, 3584),
    (8192, 8192, 1280),
]
SCATTERS = [
    (128, 3584, 8192),
    (512, 3584, 8192),
    (2048, 1792, 4096),
    (4096, 3584, 8192),
    (8192, 1280, 8192),
]
"""Rows of all ranks, depth and columns of one rank's matmul."""
CUTS = [  # and thread blocks that fit on the GPU
    (Cut(128, 256, 64, 3, 8), SMS),
    (Cut(128, 256, 64, 4, 8), SMS),
    (Cut(128, 128, 64, 4, 4), SMS),
    (Cut(128, 128, 64, 3, 4), 2 * SMS),
    (Cut(128, 128, 64, 4, 8), SMS),
    (Cut(128, 128, 128, 3, 8), SMS),
    (Cut(64, 256, 64, 4, 4), SMS),
    (Cut(64, 128, 128, 4, 4), SMS),
    (Cut(64, 128, 128, 3, 4), 2 * SMS),
]


def clock(call: Callable[[], Any], calls: int = 6, rounds: int = 7) -> float:
    """Return us for a call, in a graph of several: the median."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    times = []
    graph.replay()
    for _ in range(rounds):
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / calls)
    return round(statistics.median(times), 1)


def data(*shape: int) -> torch.Tensor:
    """Return bf16 numbers whose products of several thousand stay small."""
    return torch.randn(*shape, device="cuda").to(BF16) / 20


def best(measured: Times, count: int = 2) -> str:
    """Return the fastest of ``(us, what, verdict)``."""
    return " | ".join(f"{us} {what} {said}" for us, what, said in sorted(measured)[:count])


def label(cut: Cut, blocks: int) -> str:
    """Return the short name of a cut."""
    return f"{cut.rows}x{cut.columns}x{cut.depth}/{cut.num_stages}st/{cut.num_warps}w/{blocks}b"


def timed(call: Callable[[], Any], what: str, check: Callable[[], str]) -> tuple[float, str, str]:
    """Return ``(us, what, verdict)`` of a call."""
    try:
        call()
        torch.cuda.synchronize()
        return clock(call), what, check()
    except Exception as error:
        return 9e9, what, f"{type(error).__name__}: {str(error)[-80:]}".replace("\n", " ")


class Matmul:
    """A matmul that is timed, of random operands.

    Attributes:
        shape: rows, depth, columns.
        out: result of kernels; has other rows than cuBLAS' if these communicate.
    """

    def __init__(self, shape: tuple[int, int, int], rows: int, rows_of_result: int) -> None:
        """``rows``: of ``x``."""
        self.shape = shape
        _, depth, columns = shape
        self.x = data(rows, depth)
        self.weight = data(columns, depth)
        self.out = torch.zeros(rows_of_result, columns, device="cuda", dtype=BF16)
        self.operands = Operands(self.x, self.weight, self.out)

    def cublas(self, x: torch.Tensor) -> tuple[torch.Tensor, float]:
        """Return cuBLAS' product with the weight, and its time."""
        out = torch.mm(x, self.weight.t())
        return out, clock(lambda: torch.mm(x, self.weight.t(), out=out))
