# SPDX-License-Identifier: Apache-2.0
"""Kernels of tests/primitives on every rank of a job, one node: eager calls, and on GPUs CUDA graphs of them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from harness import check, device, expect, rank, run, scaled, simulated, world

import tdcoll

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from primitives import cases

Call = tuple[Callable[[], object], torch.Tensor, torch.Tensor]
"""What launches a call, its result, and what that should be."""


def run_and_replay(ctx: tdcoll.CollectiveContext, calls: list[Call]) -> None:
    """Each call by itself, then all of them in one CUDA graph, and all but the last in another. Replays of both take
    turns, so that what came before a call differs from replay to replay."""

    def compare(done: list[Call], what: str) -> None:
        ctx.check()
        for i, (_, result, wanted) in enumerate(done):
            expect(torch.equal(result, wanted), f"{what}, call {i}: {int((result != wanted).sum())} wrong numbers")
            result.fill_(-1)

    for i, call in enumerate(calls):
        call[0]()
        compare([call], f"eager call {i}")
    if simulated():
        return
    graphs = []
    stream = ctx._stream
    for captured in (calls, calls[:-1]):
        graph = torch.cuda.CUDAGraph()
        side = torch.cuda.Stream()
        side.wait_stream(stream)
        with torch.cuda.graph(graph, stream=side):
            for launch, _, _ in captured:
                launch()
        stream.wait_stream(side)
        graphs.append((graph, captured))
    for turn in range(scaled(20, 0, shared_gpus=4)):
        graph, captured = graphs[turn % 3 % 2]
        graph.replay()
        compare(captured, f"replay {turn}")
    for turn in range(scaled(200, 0, shared_gpus=4)):  # without a pause
        graphs[turn % 3 % 2][0].replay()
    ctx.check()
    compare(calls, "many replays")


def numbers(owner: int, call: int, count: int) -> torch.Tensor:
    return cases.numbers(owner, call, count).to(device())


@check
def words_that_announce_themselves() -> None:
    counts = [9, 30, 1, 0, 30] if simulated() else [9, 16384, 1, 0, 5000, 3, 16000]
    case = cases.Words(counts, block=4 if simulated() else 128)
    with tdcoll.CollectiveContext(max_bytes_per_rank=16, lamport_bytes=65536) as ctx:
        calls: list[Call] = []
        for call, count in enumerate(counts):
            source = cases.floats(rank(), call, count).to(device())
            result = torch.full((count,), -1.0, device=device())
            wanted = cases.sum_in_rank_order(call, count, world()).to(device())
            calls.append((lambda s=source, r=result: case.launch(ctx, s, r), result, wanted))
            mine, gathered = numbers(rank(), call, 4), torch.empty(4 * world(), dtype=torch.int32, device=device())
            if call % 2:
                others = torch.cat([numbers(owner, call, 4) for owner in range(world())])
                calls.append((lambda m=mine, o=gathered: tdcoll.all_gather(m, ctx, out=o), gathered, others))
        run_and_replay(ctx, calls)


@check
def numbers_of_8_bits() -> None:
    """Numbers are rounded as PyTorch rounds on CPUs. In the simulator tests of their own show it."""
    codes = torch.arange(256).to(torch.uint8)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        got, expected = cases.decoded(codes.to(device()), dtype).cpu(), codes.view(dtype).float()
        nan = expected.isnan()
        right = torch.equal(got.isnan(), nan) and torch.equal(
            got[~nan].view(torch.int32), expected[~nan].view(torch.int32)
        )
        expect(right, f"{dtype}: codes as numbers")
        values, wanted = cases.roundings(dtype)
        got, nan = cases.encoded(values.to(device()), dtype).cpu(), values.isnan()
        expect(torch.equal(got[~nan], wanted[~nan]), f"{dtype}: {int((got != wanted)[~nan].sum())} wrongly rounded")
        expect(bool((got[nan] & 0x7F == 0x7F).all()), f"{dtype}: NaN")


if __name__ == "__main__":
    run()
