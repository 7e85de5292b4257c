# SPDX-License-Identifier: Apache-2.0
"""All-reduce + residual + RMSNorm in one kernel, and reductions whose result has another dtype than
their tensor, on every rank of a job."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import torch
from harness import check, device, expect, rank, scaled, simulated, world
from tensors import given, same_bits

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fused.norms import norm_reference

import tdcoll
from tdcoll.calls.plan import Facts, Plan
from tdcoll.collectives.reduce_scatter.reference import reduce_parts
from tdcoll.fused.policy import ALGORITHMS, COMPOSED, NormRows, choose

FP8 = torch.float8_e4m3fn
EPS = 1e-5


def inputs(
    seed: int, rows: int, hidden: int, dtype: torch.dtype
) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """``(x of every rank, residual, weight)``."""
    every = [given(1000 * seed + r, rows, hidden, dtype=dtype) for r in range(world())]
    return every, given(1000 * seed + 900, rows, hidden, dtype=dtype), given(7, hidden, dtype=dtype)


def algorithms(
    ctx: tdcoll.CollectiveContext, rows: int, hidden: int, dtype: torch.dtype
) -> list[str | Plan]:
    """Return all algorithms that serve such rows: by name, and with rows in other pieces."""
    shape, found = NormRows(rows, hidden, dtype.itemsize), []
    for name in ALGORITHMS[1:]:
        pieces = [
            Plan(name, -(-shape.words // block), 16 * block, max(1, min(8, block // 32)))
            for block in (32, 512)
        ]
        if name == COMPOSED and not simulated():
            # its code is repeated for each; 64 take minutes
            pieces = [plan for plan in pieces if plan.chunks <= 8]
        for asked in (name, *pieces):
            try:
                choose(shape, Facts.of(ctx, 0, dtype), asked)
            except ValueError:
                continue
            found.append(asked)
    return found


def cases() -> list[tuple[torch.dtype, int, int]]:
    """Return a few ``(dtype, rows, hidden)``: each algorithm is compiled for each of them."""
    if simulated():
        return [(torch.bfloat16, 1, 576), (torch.bfloat16, 5, 512)]
    sizes = [(1, 8192), (9, 4160), (33, 512), (64, 8192), (5, 16384)]
    others = [
        (torch.float16, 9, 4160),
        (torch.float16, 64, 8192),
        (torch.float32, 33, 512),
        (torch.float32, 5, 16384),
    ]
    return [*((torch.bfloat16, *size) for size in sizes), *others]


@check
def rows_and_hidden_sizes() -> str:
    """Every algorithm, to the bit against arithmetic on the CPU."""
    seen: set[str] = set()
    with tdcoll.CollectiveContext(
        max_bytes_per_rank=1 << 16, lamport_bytes=scaled(2 << 20, 1 << 17)
    ) as ctx:
        for dtype, rows, hidden in cases():
            every, residual, weight = inputs(rows, rows, hidden, dtype)
            reduced = reduce_parts([x.cpu() for x in every], tdcoll.topology().nodes)
            wanted = norm_reference(reduced, residual.cpu(), weight.cpu(), EPS, "row")
            plain = norm_reference(reduced, residual.cpu(), weight.cpu(), EPS, None)[0]
            for algorithm in algorithms(ctx, rows, hidden, dtype):
                x, old, what = (
                    every[rank()],
                    residual.clone(),
                    f"{algorithm}, {rows} rows of {hidden} {dtype}",
                )
                out, new = tdcoll.fused.all_reduce_rms_norm(
                    x, old, weight, ctx=ctx, eps=EPS, in_place=True, algorithm=algorithm
                )
                expect(new is old and same_bits(new, wanted[1]), f"the new residual: {what}")
                expect(same_bits(out, plain), f"normalized: {what}")
                seen.add(algorithm if isinstance(algorithm, str) else algorithm.algorithm)
                if isinstance(algorithm, Plan) and algorithm.chunk == 16 * 512:
                    continue  # of plans one for each algorithm, as each is compiled
                eight = tdcoll.fused.all_reduce_rms_norm(
                    x, residual, weight, ctx=ctx, eps=EPS, out_dtype=FP8, algorithm=algorithm
                )
                expect(same_bits(eight[1], wanted[1]), f"the new residual beside fp8: {what}")
                expect(same_bits(eight[2], wanted[2]), f"scales: {what}")
                expect(same_bits(eight[0], wanted[0]), f"fp8: {what}")
        ctx.check()
    several = tdcoll.topology().n_nodes > 1 or world() == 1
    expect(several or seen == set(ALGORITHMS[1:]), f"only {seen} were to be had")
    return ", ".join(sorted(seen))


@check
def a_row_has_the_same_bits_in_every_batch() -> None:
    rows, hidden = scaled(48, 6), scaled(8192, 512)
    every, residual, weight = inputs(3, rows, hidden, torch.bfloat16)
    with tdcoll.CollectiveContext(max_bytes_per_rank=1 << 16, lamport_bytes=2 << 20) as ctx:

        def call(first: int, last: int) -> tuple[torch.Tensor, ...]:
            x, old = every[rank()][first:last].clone(), residual[first:last].clone()
            return tdcoll.fused.all_reduce_rms_norm(x, old, weight, ctx=ctx, eps=EPS, out_dtype=FP8)

        whole = call(0, rows)
        for size in (1, 2, 5, rows - 1):
            first = (7 * size) % (rows - size + 1)
            for got, wanted in zip(call(first, first + size), whole, strict=True):
                expect(same_bits(got, wanted[first : first + size]), f"{size} rows from {first}")
        ctx.check()
    codes = whole[0].view(torch.uint8)
    everywhere = torch.empty(world(), *codes.shape, dtype=torch.uint8, device=device())
    tdcoll.distributed.all_gather_into_tensor(everywhere, codes)
    expect(all(torch.equal(codes, other) for other in everywhere), "ranks have different bits")


@check
def many_calls_with_a_straggler() -> str:
    """Calls of changing sizes and algorithms without a synchronisation, among all-reduces; one rank
    in turn is late."""
    calls, hidden = scaled(600, 8, shared_gpus=60), scaled(4096, 256)
    sizes = (1, 8, 3, 20, 2)
    wrong = torch.zeros((), dtype=torch.int64, device=device())
    with tdcoll.CollectiveContext(max_bytes_per_rank=1 << 16, lamport_bytes=1 << 20) as ctx:
        given_once = {}
        for rows in sizes:
            every, residual, weight = inputs(rows, rows, hidden, torch.bfloat16)
            expected = tdcoll.fused.all_reduce_rms_norm(
                every[rank()], residual, weight, ctx=ctx, algorithm="composed"
            )
            given_once[rows] = (
                every[rank()],
                residual,
                weight,
                expected,
                algorithms(ctx, rows, hidden, torch.bfloat16),
            )
        for call in range(calls):
            x, residual, weight, expected, kinds = given_once[sizes[call % len(sizes)]]
            if rank() == call % world() and call % 3 == 0 and not simulated():
                torch.cuda._sleep(100_000)
            got = tdcoll.fused.all_reduce_rms_norm(
                x, residual, weight, ctx=ctx, algorithm=kinds[call % len(kinds)]
            )
            wrong += (got[0] != expected[0]).sum() + (got[1] != expected[1]).sum()
            if call % 4 == 1:
                total = tdcoll.all_reduce(x[0].float(), ctx=ctx)
                wrong += (total.isnan()).sum()
        ctx.check()
    expect(int(wrong) == 0, f"{int(wrong)} wrong numbers in {calls} calls")
    return f"{calls} calls"


def replay_captured(rows: int, captured: int, ctx: tdcoll.CollectiveContext) -> None:
    """Capture ``captured`` calls as one graph; replay it with eager calls in between, of changing
    values."""
    hidden = 4096
    every, residual, weight = inputs(rows, rows, hidden, torch.bfloat16)
    kinds = algorithms(ctx, rows, hidden, torch.bfloat16)
    step = torch.ones((), device=device(), dtype=torch.bfloat16)
    wrong = torch.zeros((), dtype=torch.int64, device=device())

    def one(algorithm: str | Plan) -> None:
        step.mul_(-1)
        x = every[rank()] * step
        got = tdcoll.fused.all_reduce_rms_norm(
            x, residual, weight, ctx=ctx, eps=EPS, algorithm=algorithm
        )
        want = tdcoll.fused.all_reduce_rms_norm(
            x, residual, weight, ctx=ctx, eps=EPS, algorithm="composed"
        )
        wrong.add_((got[0] != want[0]).sum() + (got[1] != want[1]).sum())

    for kind in kinds:
        one(kind)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in range(captured):
            one(kinds[call % len(kinds)])
    for replay in range(scaled(50, 0, shared_gpus=7)):
        graph.replay()
        if replay % 7 == 3:
            one(kinds[replay % len(kinds)])
    ctx.check()
    expect(int(wrong) == 0, f"{int(wrong)} wrong numbers, {captured} calls of {rows} rows captured")


@check(gpu_only=True)
def fused_graphs() -> None:
    """Odd and even numbers of captured calls."""
    for rows, captured in ((1, 1), (8, 2), (40, 3)):
        with tdcoll.CollectiveContext(max_bytes_per_rank=1 << 16, lamport_bytes=2 << 20) as ctx:
            replay_captured(rows, captured, ctx)


@check
def reductions_to_another_dtype() -> None:
    """Rounded once from the sum in fp32, eager and replayed."""
    rows, columns = scaled((96, 1024), (6, 5))
    dtypes = [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)]
    dtypes.append((torch.bfloat16, FP8))
    with tdcoll.CollectiveContext(max_bytes_per_rank=1 << 20) as ctx:
        for dtype, out_dtype in dtypes:
            every = [given(one, world() * rows, columns, dtype=dtype) for one in range(world())]
            wide = [x.cpu().float() for x in every]
            total = reduce_parts(wide, tdcoll.topology().nodes)
            if out_dtype is FP8:
                total = total.clamp(-448, 448)
            wanted = total.to(out_dtype).float() + 0.0  # -0.0 becomes +0.0
            wanted = wanted.to(out_dtype)
            x = every[rank()]
            for name in ("all_reduce", "reduce_scatter"):
                part = wanted
                if name == "reduce_scatter":
                    part = wanted.chunk(world())[rank()]

                function = getattr(tdcoll, name)
                call = functools.partial(function, x, out_dtype=out_dtype, ctx=ctx)
                expect(same_bits(call(), part), f"{name}, {dtype} to {out_dtype}")
                if simulated():
                    continue
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    made = call()
                graph.replay()
                expect(same_bits(made, part), f"{name}, {dtype} to {out_dtype}, replayed")
        ctx.check()
