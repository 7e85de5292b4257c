# SPDX-License-Identifier: Apache-2.0
"""Callers' tensors that are PyTorch's symmetric memory, on every rank of a job on GPUs: read and written by peers."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from harness import check, device, expect, expect_raises, rank, run, scaled, world

import tdcoll

SIZES = (8, 1000, 70_000, 1 << 20)
"""Elements of a rank's part; the last is larger than the contexts."""


def given(numel: int, seed: int) -> torch.Tensor:
    """Return what each rank brings, ``[world, numel]``; the same on all."""
    made = torch.Generator().manual_seed(1000 * numel + seed)
    return torch.randint(-50, 50, (world(), numel), generator=made).float().to(device())


def symmetric(numel: int) -> torch.Tensor:
    """Return ``[numel]`` of PyTorch's memory, somewhere in the middle of an allocation."""
    import torch.distributed._symmetric_memory as symm_mem

    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"  # to ask for it hangs on some hosts
    whole = symm_mem.empty(numel + 64, dtype=torch.float32, device=device())
    symm_mem.rendezvous(whole, dist.group.WORLD)
    return whole[32 : 32 + numel]


def context() -> tdcoll.CollectiveContext:
    return tdcoll.CollectiveContext(group=dist.group.WORLD, max_bytes_per_rank=1 << 20)


def turns() -> Iterator[tuple[int, int]]:
    for numel in SIZES:
        for turn in range(3):
            yield numel, turn


@check(gpu_only=True)
def all_reduces() -> None:
    with context() as ctx:
        for algorithm in ("auto", "direct"):
            for numel, turn in turns():
                every = given(numel, turn)
                out = symmetric(numel)
                got = tdcoll.all_reduce(every[rank()].clone(), ctx=ctx, out=out, algorithm=algorithm, symmetric=True)
                expect(got is out and torch.equal(out, every.sum(0)), f"{algorithm}, {numel} numbers")
                out.copy_(every[rank()])
                tdcoll.all_reduce_(out, ctx=ctx, algorithm=algorithm, symmetric=True)
                expect(torch.equal(out, every.sum(0)), f"{algorithm}, {numel} numbers in place")
        ctx.check()


@check(gpu_only=True)
def reduce_scatters() -> None:
    with context() as ctx:
        for algorithm in ("auto", "pull"):
            for numel, turn in turns():
                every = given(world() * numel, turn)
                whole = symmetric(world() * numel)
                whole.copy_(every[rank()])
                got = tdcoll.reduce_scatter(whole, ctx=ctx, algorithm=algorithm, symmetric=True)
                wanted = every.sum(0).view(world(), numel)[rank()]
                expect(torch.equal(got, wanted), f"{algorithm}, {numel} numbers")
        ctx.check()


@check(gpu_only=True)
def all_gathers_in_place() -> None:
    with context() as ctx:
        for algorithm in ("auto", "direct", "ring"):
            for numel, turn in turns():
                every = given(numel, turn)
                buffer = symmetric(world() * numel).view(world(), numel)
                buffer[rank()].copy_(every[rank()])
                tdcoll.all_gather_(buffer, ctx=ctx, algorithm=algorithm)
                expect(torch.equal(buffer, every), f"{algorithm}, {numel} numbers")
        expect_raises(ValueError, lambda: tdcoll.all_gather_(buffer, ctx=ctx, algorithm="1d"), "memory of PyTorch's")
        ctx.check()


@check(gpu_only=True)
def calls_in_graphs() -> None:
    numel, replays = 5000, scaled(200, 0)
    out, step = symmetric(numel), torch.zeros((), device=device())
    every = given(numel, 7)
    wrong = torch.zeros((), dtype=torch.int64, device=device())
    with context() as ctx:

        def one() -> None:
            step.add_(1)
            out.copy_(every[rank()] * step)
            tdcoll.all_reduce_(out, ctx=ctx, algorithm="direct", symmetric=True)
            wrong.add_((out != every.sum(0) * step).sum())

        one()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            one()
            one()
        for _ in range(replays):
            graph.replay()
        ctx.check()
    expect(int(wrong) == 0, f"{int(wrong)} wrong numbers")
    expect(int(step) == 1 + 2 * replays, "the graph did not run")


@check(gpu_only=True)
def what_is_neither_is_refused() -> None:
    usual = torch.zeros(64, device=device())
    with context() as ctx:
        expect_raises(
            tdcoll.NotSymmetricError, lambda: tdcoll.all_reduce_(usual, ctx=ctx, symmetric=True), "tensor must be"
        )


if __name__ == "__main__":
    run()
