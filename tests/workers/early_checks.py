# SPDX-License-Identifier: Apache-2.0
"""Launches that begin before the one ahead has ended, among themselves and other kernels: results
are the same."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from dense_parts import SPECS, wanted
from harness import check, device, expect, rank, scaled, simulated, world
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

import tdcoll
from tdcoll.calls import kernel_launch as launches
from tdcoll.calls.call_launches import CallLaunches
from tdcoll.calls.kernel_launch import KernelLaunch

N = 3000
"""How many numbers a tensor has. They are whole ones, so that sums are exact in any order."""


@triton.jit
def add_late(x, n, turns, WAITS: tl.constexpr, LETS: tl.constexpr, BLOCK: tl.constexpr):
    """Add 1 to ``x``, after a while. ``WAITS``: wait for the launch before; ``LETS``: let the next
    begin at once."""
    if WAITS:
        gdc_wait()
    if LETS:
        gdc_launch_dependents()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n)
    for _ in range(turns):
        value += tl.load(x + at, mask=at < n, volatile=True) * 0
    tl.store(x + at, value + 1, mask=at < n)


def writers() -> dict[str, Callable[[torch.Tensor], object]]:
    """Return what adds 1 before a collective, or after one: kernels of other libraries."""
    if simulated():
        return {"torch": lambda x: x.add_(1)}

    def of(waits: bool, lets: bool) -> Callable[[torch.Tensor], object]:
        options = {"launch_pdl": True} if waits else {}
        return lambda x: add_late[(triton.cdiv(x.numel(), 512),)](
            x, x.numel(), 300, waits, lets, 512, **options
        )

    return {
        "torch": lambda x: x.add_(1),
        "as usual": of(False, False),
        "lets the next begin": of(False, True),
        "begins early": of(True, False),
        "begins early and lets the next": of(True, True),
    }


KINDS = [
    (spec, name)
    for spec in SPECS
    for name in ("auto", "one_shot", "direct")
    if name in ("auto", *spec.names)
]
"""Collectives and algorithms, one after the other."""


def step(
    kind: int, write: Callable[[torch.Tensor], object], ctx: tdcoll.CollectiveContext
) -> torch.Tensor:
    """Make a writer, a collective and one writer more; return how many numbers are wrong."""
    spec, algorithm = KINDS[kind % len(KINDS)]
    n = scaled(N, 60) // world() * world()
    base = torch.arange(n, device=device(), dtype=torch.float32) % 97
    x = base + rank()
    expected = wanted(spec, [base + r + 1 for r in range(world())]) + 1
    in_place = algorithm == "one_shot"  # which only all-reduces have
    write(x)
    out = getattr(tdcoll, spec.name)(x, ctx=ctx, out=x if in_place else None, algorithm=algorithm)
    write(out)
    return (out != expected).sum()


@check
def launches_are_early() -> str:
    """Launches are early where the GPU and Triton can; never in the simulator."""
    with tdcoll.CollectiveContext(max_bytes_per_rank=1024) as ctx:
        expect(ctx.allow_pdl, "a context of the usual kind")
        tdcoll.all_reduce(torch.ones(4, device=device()), ctx=ctx)
        made = [made for made in ctx.cache.values() if isinstance(made, CallLaunches)]
        expect(made, "nothing was launched")
        first: KernelLaunch = made[0].steps[0]
        early = "launch_pdl" in first._options
        expect(early == launches._supports_early_launches(), f"early: {early}")
        if early:
            assert first._loaded is not None
            expect(first._loaded.config.n_attributes == 1, "the driver is not asked for it")
        ctx.check()
    with tdcoll.CollectiveContext(max_bytes_per_rank=1024, max_blocks=64) as ctx:
        expect(not ctx.allow_pdl, "a context with a budget of thread blocks")
    return "early" if early else "as usual"


@check
def chains_among_other_kernels() -> str:
    wrong = torch.zeros((), dtype=torch.int64, device=device())
    chooser = random.Random(3)
    turns = scaled(3000, 8, shared_gpus=200)
    made = list(writers().values())
    with tdcoll.CollectiveContext(max_bytes_per_rank=4 * N * world()) as ctx:
        for turn in range(turns):
            late = chooser.randrange(world())
            if not simulated() and turn % 5 == 0 and rank() == late:
                torch.cuda._sleep(100_000)
            wrong += step(turn, made[chooser.randrange(len(made))], ctx)
        ctx.check()
    expect(int(wrong) == 0, f"{int(wrong)} wrong numbers")
    return f"{turns} calls"


@check(gpu_only=True)
def captured_chains() -> None:
    ctx = tdcoll.CollectiveContext(max_bytes_per_rank=4 * N * world())
    for name, write in writers().items():
        for kind in range(len(KINDS)):
            step(kind, write, ctx)
        torch.cuda.synchronize()
        for captured in (len(KINDS), 2 * len(KINDS) + 1):
            wrong = torch.zeros((), dtype=torch.int64, device=device())
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for turn in range(captured):
                    wrong.add_(step(turn, write, ctx))
            for replay in range(scaled(40, 0, shared_gpus=5)):
                graph.replay()
                if replay % 3 == 0:
                    wrong.add_(step(replay, write, ctx))
            ctx.check()
            expect(
                int(wrong) == 0, f"{name}: {int(wrong)} wrong numbers, {captured} steps captured"
            )
    ctx.close()
