# SPDX-License-Identifier: Apache-2.0
"""All-reduce + residual + RMSNorm, and the operators that torch.compile sees, on every rank of a job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from harness import check, device, expect, expect_raises, rank, run, scaled, shared, simulated, world
from torch import nn

import tdcoll
from tdcoll import ops, runtime
from tdcoll.collectives.all_reduce.algorithms import ALL_REDUCE
from tdcoll.collectives.reduce_scatter.reference import reduce_parts
from tdcoll.fused.policy import ALGORITHMS, Rows, choose
from tdcoll.fused.reference import norm_reference

FP8 = torch.float8_e4m3fn
tdc = torch.ops.tdcoll
EPS = 1e-5


def given(seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Made alike on all ranks: values of many magnitudes, whose sum shows its order."""
    source = torch.Generator().manual_seed(seed)
    values = torch.randn(*shape, generator=source) * 2.0 ** torch.randint(-3, 4, shape, generator=source)
    return values.to(dtype).to(device())


def inputs(
    seed: int, rows: int, hidden: int, dtype: torch.dtype
) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """``(x of every rank, residual, weight)``."""
    every = [given(1000 * seed + r, rows, hidden, dtype=dtype) for r in range(world())]
    return every, given(1000 * seed + 900, rows, hidden, dtype=dtype), given(7, hidden, dtype=dtype)


def same(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    """To the bit."""
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[got.element_size()]
    return got.shape == wanted.shape and torch.equal(got.cpu().view(kind), wanted.cpu().view(kind))


def algorithms(ctx: tdcoll.CollectiveContext, rows: int, hidden: int, dtype: torch.dtype) -> list[str | tdcoll.Plan]:
    """All that serve such rows: by name, and with rows in other pieces."""
    shape, found = Rows(rows, hidden, dtype.itemsize), []
    for name in ALGORITHMS[1:]:
        pieces = [
            tdcoll.Plan(name, -(-shape.words // block), 16 * block, max(1, min(8, block // 32))) for block in (32, 512)
        ]
        for asked in (name, *pieces):
            try:
                choose(shape, ALL_REDUCE.facts(ctx, 0, dtype), asked)
            except ValueError:
                continue
            found.append(asked)
    return found


@check
def rows_and_hidden_sizes() -> str:
    """Every algorithm, to the bit against arithmetic on the CPU, of fp32 but for squares that GPUs do not round."""
    seen: set[str] = set()
    cases = [(1, 576), (5, 512)] if simulated() else [(1, 8192), (9, 4160), (33, 512), (64, 8192), (5, 16384)]
    with tdcoll.CollectiveContext(max_bytes_per_rank=1 << 16, lamport_bytes=scaled(2 << 20, 1 << 17)) as ctx:
        for dtype in (torch.bfloat16,) if simulated() else (torch.bfloat16, torch.float16, torch.float32):
            for rows, hidden in cases:
                every, residual, weight = inputs(rows, rows, hidden, dtype)
                reduced = reduce_parts([x.cpu() for x in every], tdcoll.topology().nodes)
                wanted = norm_reference(reduced, residual.cpu(), weight.cpu(), EPS, "row")
                plain = norm_reference(reduced, residual.cpu(), weight.cpu(), EPS, None)[0]
                for algorithm in algorithms(ctx, rows, hidden, dtype):
                    x, old = every[rank()], residual.clone()
                    out, new = tdcoll.fused.all_reduce_rms_norm(
                        x, old, weight, ctx, EPS, in_place=True, algorithm=algorithm
                    )
                    eight = tdcoll.fused.all_reduce_rms_norm(
                        x, residual, weight, ctx, EPS, out_dtype=FP8, algorithm=algorithm
                    )
                    what = f"{algorithm}, {rows} rows of {hidden} {dtype}"
                    expect(new is old and same(new, wanted[1]), f"the new residual: {what}")
                    expect(same(eight[1], wanted[1]), f"the new residual beside fp8: {what}")
                    if dtype is torch.float32 and not simulated():
                        torch.testing.assert_close(out.cpu(), plain, atol=1e-5, rtol=1e-5)
                    else:
                        expect(same(out, plain), f"normalized: {what}")
                        expect(same(eight[2], wanted[2]), f"scales: {what}")
                        expect(same(eight[0], wanted[0]), f"fp8: {what}")
                    seen.add(algorithm if isinstance(algorithm, str) else algorithm.algorithm)
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
            return tdcoll.fused.all_reduce_rms_norm(x, old, weight, ctx, EPS, out_dtype=FP8)

        whole = call(0, rows)
        for size in (1, 2, 5, rows - 1):
            first = (7 * size) % (rows - size + 1)
            for got, wanted in zip(call(first, first + size), whole, strict=True):
                expect(same(got, wanted[first : first + size]), f"{size} rows from {first}")
        ctx.check()
    codes = whole[0].view(torch.uint8)
    everywhere = tdc.all_gather(codes.view(-1)).view(world(), *codes.shape)
    expect(all(torch.equal(codes, other) for other in everywhere), "ranks have different bits")


@check
def many_calls_with_a_straggler() -> str:
    """Calls of changing sizes and algorithms without a synchronisation, among all-reduces; one rank in turn is late."""
    calls, hidden = scaled(600, 8, shared_gpus=60), scaled(4096, 256)
    sizes = (1, 8, 3, 20, 2)
    wrong = torch.zeros((), dtype=torch.int64, device=device())
    with tdcoll.CollectiveContext(max_bytes_per_rank=1 << 16, lamport_bytes=1 << 20) as ctx:
        given_once = {}
        for rows in sizes:
            every, residual, weight = inputs(rows, rows, hidden, torch.bfloat16)
            expected = tdcoll.fused.all_reduce_rms_norm(every[rank()], residual, weight, ctx, algorithm="composed")
            given_once[rows] = every[rank()], residual, weight, expected, algorithms(ctx, rows, hidden, torch.bfloat16)
        for call in range(calls):
            x, residual, weight, expected, kinds = given_once[sizes[call % len(sizes)]]
            if rank() == call % world() and call % 3 == 0 and not simulated():
                torch.cuda._sleep(100_000)
            got = tdcoll.fused.all_reduce_rms_norm(x, residual, weight, ctx, algorithm=kinds[call % len(kinds)])
            wrong += (got[0] != expected[0]).sum() + (got[1] != expected[1]).sum()
            if call % 4 == 1:
                total = tdcoll.all_reduce(x[0].float(), ctx)
                wrong += (total.isnan()).sum()
        ctx.check()
    expect(int(wrong) == 0, f"{int(wrong)} wrong numbers in {calls} calls")
    return f"{calls} calls"


def replay_captured(rows: int, captured: int, ctx: tdcoll.CollectiveContext) -> None:
    """``captured`` calls as one graph, replayed with eager calls in between, of changing values."""
    hidden = 4096
    every, residual, weight = inputs(rows, rows, hidden, torch.bfloat16)
    kinds = algorithms(ctx, rows, hidden, torch.bfloat16)
    step = torch.ones((), device=device(), dtype=torch.bfloat16)
    wrong = torch.zeros((), dtype=torch.int64, device=device())

    def one(algorithm: str | tdcoll.Plan) -> None:
        step.mul_(-1)
        x = every[rank()] * step
        got = tdcoll.fused.all_reduce_rms_norm(x, residual, weight, ctx, EPS, algorithm=algorithm)
        want = tdcoll.fused.all_reduce_rms_norm(x, residual, weight, ctx, EPS, algorithm="composed")
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


# ---------------------------------------------------------------------- operators


@check
def operators() -> None:
    every = [given(r, 4 * world(), 64, dtype=torch.float32) for r in range(world())]
    x, residual, weight = (
        every[rank()],
        given(80, 4 * world(), 64, dtype=torch.float32),
        given(9, 64, dtype=torch.float32),
    )
    orders = [list(range(world())), list(range(world()))[::-1]]
    names = [(ops.group_name(order), order) for order in orders]
    groups = [("", orders[0]), *names, (ops.group_name(dist.group.WORLD), orders[0])]
    for name, order in groups:
        ours = [every[r] for r in order]
        total = reduce_parts(ours, tdcoll.topology(order).nodes)
        expect(same(tdc.all_gather(x, name), torch.cat(ours)), f"all_gather, {name!r}")
        expect(same(tdc.all_reduce(x, "sum", name), total), f"all_reduce, {name!r}")
        mine = total[4 * order.index(rank()) :][:4]
        expect(same(tdc.reduce_scatter(x, "sum", name), mine), f"reduce_scatter, {name!r}")
        normalized, new = tdc.all_reduce_rms_norm(x, residual, weight, EPS, name)
        expect(same(new, total + residual), f"new residual, {name!r}")
        torch.testing.assert_close(normalized, nn.functional.rms_norm(new, (64,), weight, EPS))
    expect_raises(ValueError, lambda: tdc.all_reduce(x, "sum", "nobody"), "group must be what tdcoll.ops.group_name")


@check
def operators_as_pytorch_checks_them() -> None:
    x, residual, weight = (
        given(s, *shape, dtype=torch.float32)
        for s, shape in ((rank(), (2 * world(), 64)), (8, (2 * world(), 64)), (9, (64,)))
    )
    for operator, arguments in (
        (tdc.all_gather.default, (x,)),
        (tdc.reduce_scatter.default, (x, "sum")),
        (tdc.all_reduce.default, (x, "mean")),
        (tdc.all_reduce_rms_norm.default, (x, residual, weight)),
    ):
        for wanted in (False, True):
            tensors = [a.clone().requires_grad_(wanted) if isinstance(a, torch.Tensor) else a for a in arguments]
            torch.library.opcheck(operator, tuple(tensors))


@check
def derivatives() -> None:
    """Those of the sum over ranks of what each computes, as torch has them of the same arithmetic."""
    n, me, rows = world(), rank(), 2 * world()
    every = [given(r, rows, 64, dtype=torch.float32) for r in range(n)]
    pull = [given(50 + r, rows * n, 64, dtype=torch.float32) for r in range(n)]
    residual, weight = given(8, rows, 64, dtype=torch.float32), given(9, 64, dtype=torch.float32)

    def compare(ours: Callable[..., Any], whole: Callable[..., Any]) -> None:
        x = every[me].clone().requires_grad_()
        made = ours(x)
        (made * pull[me][: made.shape[0]]).sum().backward()
        of = [part.double().requires_grad_() for part in every]
        total = sum((whole(r, of) * pull[r][: made.shape[0]].double()).sum() for r in range(n))
        total.backward()  # type: ignore[union-attr]
        torch.testing.assert_close(x.grad.double(), of[me].grad, atol=1e-3, rtol=1e-3)  # type: ignore[union-attr]

    compare(tdc.all_gather, lambda r, of: torch.cat(of))
    compare(tdc.all_reduce, lambda r, of: sum(of))
    compare(lambda x: tdc.all_reduce(x, "mean"), lambda r, of: sum(of) / n)
    compare(tdc.reduce_scatter, lambda r, of: sum(of)[2 * r : 2 * r + 2])
    compare(lambda x: tdc.reduce_scatter(x, "mean"), lambda r, of: sum(of)[2 * r : 2 * r + 2] / n)
    with (
        tdcoll.CollectiveContext(max_bytes_per_rank=512 * n) as ctx,
        tdcoll.CollectiveContext(max_bytes_per_rank=300) as small,  # of parts of 512 bytes
    ):
        compare(lambda x: tdcoll.all_gather(x, ctx), lambda r, of: torch.cat(of))
        compare(lambda x: tdcoll.all_reduce(x, ctx, op="mean"), lambda r, of: sum(of) / n)
        compare(lambda x: tdcoll.reduce_scatter(x, small), lambda r, of: sum(of)[2 * r : 2 * r + 2])
    for which in (0, 1):

        def reference(r: int, of: list[torch.Tensor], which: int = which) -> torch.Tensor:
            new = sum(of) + residual.double()
            return (nn.functional.rms_norm(new, (64,), weight.double(), 1e-6), new)[which]

        compare(lambda x, which=which: tdc.all_reduce_rms_norm(x, residual, weight)[which], reference)
    mine = [residual.clone().requires_grad_(), weight.clone().requires_grad_()]
    theirs = [residual.double().requires_grad_(), weight.double().requires_grad_()]
    made, new = tdc.all_reduce_rms_norm(every[me], *mine)
    (made * pull[me][:rows] + new).sum().backward()
    wide = sum(part.double() for part in every) + theirs[0]
    (nn.functional.rms_norm(wide, (64,), theirs[1], 1e-6) * pull[me][:rows].double() + wide).sum().backward()
    for ours, wanted in zip(mine, theirs, strict=True):
        torch.testing.assert_close(ours.grad.double(), wanted.grad, atol=1e-3, rtol=1e-3)  # type: ignore[union-attr]
    x = every[me].clone().requires_grad_()
    expect_raises(ValueError, lambda: tdc.all_reduce(x, "max").sum().backward(), "op must be 'sum' or 'mean'", "'max'")


@check(gpu_only=True)
def derivatives_on_another_stream() -> None:
    """A backward pass is on the stream of its forward pass, which the context is bound to; also in a CUDA graph."""
    side, n = torch.cuda.Stream(), world()
    with torch.cuda.stream(side), tdcoll.CollectiveContext(max_bytes_per_rank=1 << 16) as ctx:
        x = torch.full((1 << 10,), rank() + 1.0, device=device(), requires_grad=True)
        parts = [torch.full((1 << 10,), r + 1.0, device=device()) for r in range(n)]
        wanted = 2 * n * sum(parts)  # of the sum over ranks of each one's squares
        for _ in range(3):
            torch.cuda._sleep(1_000_000)
            loss = tdcoll.all_reduce(x, ctx).square().sum()
            with torch.cuda.stream(torch.cuda.default_stream()):
                (grad,) = torch.autograd.grad(loss, x)
            side.wait_stream(torch.cuda.default_stream())
            expect(torch.equal(grad, wanted), f"eager: {grad[:4]}")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            (grad,) = torch.autograd.grad(tdcoll.all_reduce(x, ctx).square().sum(), x)
        for factor in (1.0, 2.0, 3.0):
            with torch.no_grad():
                x.fill_(factor * (rank() + 1))
            graph.replay()
            expect(torch.equal(grad, factor * wanted), f"replayed: {grad[:4]}")
        ctx.check()


class Block(nn.Module):
    """A layer of a tensor-parallel model: two all-reduces, each followed by a residual and a norm."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList(given(rank() + 10 * i, hidden, hidden) / hidden for i in range(2))
        self.norms = nn.ModuleList(nn.RMSNorm(hidden, eps=EPS, device=device(), dtype=torch.bfloat16) for _ in "ab")

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for part, norm in zip(self.parts, self.norms, strict=True):
            residual = tdc.all_reduce(torch.relu(x @ part)) + residual
            x = norm(residual)
        return x, residual


def compiled_like_eager(**how: Any) -> None:
    hidden = 256
    model, x, residual = Block(hidden), given(1, 4, hidden), given(2, 4, hidden)
    with torch.no_grad():
        # What contexts and kernels need is made here: a CUDA graph's memory is no place for it.
        wanted = model(x, residual)
        tdc.all_reduce_rms_norm(x, residual, model.norms[0].weight, EPS)
        made = torch.compile(model, fullgraph=True, **how)
        for _ in range(4):
            got = [part.clone() for part in made(x, residual)]
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, atol=3e-2, rtol=3e-2)


@check
def compiled_models() -> None:
    compiled_like_eager(backend="aot_eager")
    torch._dynamo.reset()


@check(gpu_only=True)
def compiled_by_inductor() -> None:
    for how in (
        {},
        {"mode": "reduce-overhead"},
        {"backend": ops.fusing},
        {"backend": ops.fusing, "mode": "reduce-overhead"},
    ):
        torch._dynamo.reset()
        compiled_like_eager(**how)
    torch.cuda.synchronize()


@check
def fused_timeouts_name_the_peer() -> str:
    """The last check, because its contexts are never given back."""
    if world() == 1:
        return "one rank waits for nobody"
    absent, tried = world() - 1, []
    x, weight = given(1, world(), 512), given(2, 512)
    for algorithm in ALGORITHMS[1:]:
        runtime.current().failed = False  # what failed is over, and all ranks are here
        ctx = tdcoll.CollectiveContext(max_bytes_per_rank=1 << 16, timeout_s=5 if shared() else 1.5)
        if algorithm in algorithms(ctx, world(), 512, torch.bfloat16):
            tdcoll.fused.all_reduce_rms_norm(x, x.clone(), weight, ctx, algorithm=algorithm)
            if rank() != absent:
                tdcoll.fused.all_reduce_rms_norm(x, x.clone(), weight, ctx, algorithm=algorithm)
                error = expect_raises(tdcoll.CollectiveTimeout, ctx.check)
                peers = range(world()) if algorithm == "two_stage" else [absent]
                expect(error.peer in peers and error.epoch == 2, str(error))  # type: ignore[attr-defined]
                ctx.close()
            tried.append(algorithm)
        runtime.current().failed = True  # so that the absent rank, too, leaves without the others
    expect(tried, "no algorithm was to be had")
    return f"peer named by {', '.join(tried)}"


if __name__ == "__main__":
    run()
