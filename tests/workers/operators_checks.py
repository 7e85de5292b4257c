# SPDX-License-Identifier: Apache-2.0
"""The operators that torch.compile sees, their derivatives, and models compiled with them, on every
rank of a job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from harness import check, device, expect, expect_raises, rank, world
from tensors import given, same_bits
from torch import nn

import tdcoll
from tdcoll import ops
from tdcoll.collectives.reduce_scatter.reference import reduce_parts

EPS = 1e-5
tdc = torch.ops.tdcoll


@check
def operators() -> None:
    every = [given(r, 4 * world(), 64, dtype=torch.float32) for r in range(world())]
    x, weight = every[rank()], given(9, 64, dtype=torch.float32)
    residual = given(80, 4 * world(), 64, dtype=torch.float32)
    orders = [list(range(world())), list(range(world()))[::-1]]
    names = [(ops.group_name(order), order) for order in orders]
    groups = [("", orders[0]), *names, (ops.group_name(dist.group.WORLD), orders[0])]
    for name, order in groups:
        ours = [every[r] for r in order]
        total = reduce_parts(ours, tdcoll.topology(order).nodes)
        expect(same_bits(tdc.all_gather(x, name), torch.cat(ours)), f"all_gather, {name!r}")
        expect(same_bits(tdc.all_reduce(x, "sum", name), total), f"all_reduce, {name!r}")
        mine = total[4 * order.index(rank()) :][:4]
        expect(same_bits(tdc.reduce_scatter(x, "sum", name), mine), f"reduce_scatter, {name!r}")
        normalized, new = tdc.all_reduce_rms_norm(x, residual, weight, EPS, name)
        expect(same_bits(new, total + residual), f"new residual, {name!r}")
        torch.testing.assert_close(normalized, nn.functional.rms_norm(new, (64,), weight, EPS))
    expect(same_bits(tdc.broadcast(x, 1, ""), every[1]), "broadcast")
    expect_raises(
        ValueError,
        lambda: tdc.all_reduce(x, "sum", "nobody"),
        "group must be what tdcoll.ops.group_name",
    )


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
        (tdc.broadcast.default, (x, 1)),
        (tdc.all_reduce_rms_norm.default, (x, residual, weight)),
        (tdc.all_gather_matmul.default, (x, residual, None, False, True)),
        (tdc.matmul_reduce_scatter.default, (x, residual)),
        (tdc.matmul_all_reduce.default, (x, residual)),
        (tdc.matmul_all_reduce.default, (x, residual, None, False, "", None, None, torch.float16)),
    ):
        tensors = [
            a.clone().requires_grad_() if isinstance(a, torch.Tensor) else a for a in arguments
        ]
        torch.library.opcheck(operator, tuple(tensors))
    fp8 = [tensor.to(torch.float8_e4m3fn) for tensor in (x, residual)]
    scale = torch.ones(1, device=device())
    for operator, group in (
        (tdc.all_gather_matmul.default, (False, "")),
        (tdc.matmul_reduce_scatter.default, ("",)),
        (tdc.matmul_all_reduce.default, ("",)),
    ):
        given_fp8 = (*fp8, None, False, *group, scale, scale, torch.float16)
        # PyTorch can't compare fp8, which its other checks do.
        torch.library.opcheck(operator, given_fp8, test_utils="test_faketensor")


@check
def derivatives() -> None:
    """Derivatives are those that torch has of the sum over ranks of what each computes."""
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
    compare(lambda x: tdc.broadcast(x, 1), lambda r, of: of[1] + 0 * sum(of))
    compare(tdc.reduce_scatter, lambda r, of: sum(of)[2 * r : 2 * r + 2])
    compare(lambda x: tdc.reduce_scatter(x, "mean"), lambda r, of: sum(of)[2 * r : 2 * r + 2] / n)
    with (
        tdcoll.CollectiveContext(max_bytes_per_rank=512 * n) as ctx,
        tdcoll.CollectiveContext(max_bytes_per_rank=300) as small,  # of parts of 512 bytes
    ):
        compare(lambda x: tdcoll.all_gather(x, ctx=ctx), lambda r, of: torch.cat(of))
        compare(lambda x: tdcoll.all_reduce(x, ctx=ctx, op="mean"), lambda r, of: sum(of) / n)
        compare(
            lambda x: tdcoll.reduce_scatter(x, ctx=small), lambda r, of: sum(of)[2 * r : 2 * r + 2]
        )
    for which in (0, 1):

        def reference(r: int, of: list[torch.Tensor], which: int = which) -> torch.Tensor:
            new = sum(of) + residual.double()
            return (nn.functional.rms_norm(new, (64,), weight.double(), 1e-6), new)[which]

        compare(
            lambda x, which=which: tdc.all_reduce_rms_norm(x, residual, weight)[which], reference
        )
    mine = [residual.clone().requires_grad_(), weight.clone().requires_grad_()]
    theirs = [residual.double().requires_grad_(), weight.double().requires_grad_()]
    made, new = tdc.all_reduce_rms_norm(every[me], *mine)
    (made * pull[me][:rows] + new).sum().backward()
    wide = sum(part.double() for part in every) + theirs[0]
    (
        nn.functional.rms_norm(wide, (64,), theirs[1], 1e-6) * pull[me][:rows].double() + wide
    ).sum().backward()
    for ours, wanted in zip(mine, theirs, strict=True):
        torch.testing.assert_close(ours.grad.double(), wanted.grad, atol=1e-3, rtol=1e-3)  # type: ignore[union-attr]
    x = every[me].clone().requires_grad_()
    expect_raises(
        ValueError,
        lambda: tdc.all_reduce(x, "max").sum().backward(),
        "op must be 'sum' or 'mean'",
        "'max'",
    )


@check
def derivatives_of_matmuls() -> None:
    """Results and derivatives of a tensor-parallel MLP are those of the whole one, whatever is
    kept."""
    n, me = world(), rank()
    rows, depth, hidden = 4, 16 * n, 32 * n
    x = given(1, n * rows, depth, dtype=torch.float32).double()
    first, second = (given(s, hidden, depth, dtype=torch.float32).double() for s in (2, 3))
    pull = given(4, n * rows, depth, dtype=torch.float32).double()
    whole = [tensor.clone().requires_grad_() for tensor in (x, first, second)]
    wanted = torch.relu(whole[0] @ whole[1].t()) @ whole[2]
    (wanted * pull).sum().backward()
    columns = slice(hidden // n * me, hidden // n * (me + 1))
    shard = slice(rows * me, rows * (me + 1))
    for keep in (False, True):
        for scattered in (False, True):
            mine = [
                tensor.float().contiguous().requires_grad_()
                for tensor in (x[shard] if scattered else x, first[columns], second[columns])
            ]
            if scattered:
                inner, _ = tdc.all_gather_matmul(mine[0], mine[1], None, False, keep)
                made = tdc.matmul_reduce_scatter(torch.relu(inner), mine[2], None, True)
                of_result = pull[shard]
            else:
                made = tdc.matmul_all_reduce(torch.relu(mine[0] @ mine[1].t()), mine[2], None, True)
                of_result = pull / n  # every rank has the whole loss
            torch.testing.assert_close(
                made.double(), wanted[shard] if scattered else wanted, atol=1e-2, rtol=1e-3
            )
            (made * of_result.float()).sum().backward()
            grads = [tensor.grad for tensor in whole]
            parts = [grads[1][columns], grads[2][columns]]  # type: ignore[index]
            if scattered:
                parts = [grads[0][shard], *parts]  # type: ignore[index]
            for got, want in zip(mine[-len(parts) :], parts, strict=True):
                torch.testing.assert_close(got.grad.double(), want, atol=1e-2, rtol=1e-3)  # type: ignore[union-attr]


@check(gpu_only=True)
def derivatives_on_another_stream() -> None:
    """A backward pass is on the stream of its forward pass, which the context is bound to; also in
    a CUDA graph."""
    side_stream, n = torch.cuda.Stream(), world()
    with (
        torch.cuda.stream(side_stream),
        tdcoll.CollectiveContext(max_bytes_per_rank=1 << 16) as ctx,
    ):
        x = torch.full((1 << 10,), rank() + 1.0, device=device(), requires_grad=True)
        parts = [torch.full((1 << 10,), r + 1.0, device=device()) for r in range(n)]
        wanted = 2 * n * sum(parts)  # of the sum over ranks of each one's squares
        for _ in range(3):
            torch.cuda._sleep(1_000_000)
            loss = tdcoll.all_reduce(x, ctx=ctx).square().sum()
            with torch.cuda.stream(torch.cuda.default_stream()):
                (grad,) = torch.autograd.grad(loss, x)
            side_stream.wait_stream(torch.cuda.default_stream())
            expect(torch.equal(grad, wanted), f"eager: {grad[:4]}")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side_stream):
            (grad,) = torch.autograd.grad(tdcoll.all_reduce(x, ctx=ctx).square().sum(), x)
        for factor in (1.0, 2.0, 3.0):
            with torch.no_grad():
                x.fill_(factor * (rank() + 1))
            graph.replay()
            expect(torch.equal(grad, factor * wanted), f"replayed: {grad[:4]}")
        ctx.check()


class Block(nn.Module):
    """A layer of a tensor-parallel model: two all-reduces, each followed by a residual and a
    norm."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList(
            given(rank() + 10 * i, hidden, hidden) / hidden for i in range(2)
        )
        self.norms = nn.ModuleList(
            nn.RMSNorm(hidden, eps=EPS, device=device(), dtype=torch.bfloat16) for _ in "ab"
        )

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
def own_calls_in_compiled_code() -> None:
    """The graph breaks at each, on every rank alike; ``tests/calls/test_compiled.py`` has all
    kinds."""

    def step(x: torch.Tensor, ctx: tdcoll.CollectiveContext | None) -> torch.Tensor:
        y = tdcoll.all_reduce(x * 2, ctx=ctx) + 1
        return tdcoll.all_gather(y.relu())

    def with_gradient(x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        tdcoll.reduce_scatter(x * (rank() + 1)).sum().backward()
        return x.grad

    x = torch.arange(2.0 * world(), device=device()) + rank()
    with tdcoll.CollectiveContext() as ctx:
        for call in (lambda f: f(x, None), lambda f: f(x, ctx)):
            wanted = call(step)
            torch._dynamo.reset()
            made = torch.compile(step, backend="aot_eager")
            for _ in range(3):
                expect(torch.equal(call(made), wanted), "a compiled step")
        wanted = with_gradient(x)
        expect(
            torch.equal(torch.compile(with_gradient, backend="aot_eager")(x), wanted),
            "a compiled backward pass",
        )
        ctx.check()


@check(gpu_only=True)
def compiled_by_inductor() -> None:
    graphs, fused = {"mode": "reduce-overhead"}, {"backend": ops.fusing}
    for how in ({}, graphs, fused, fused | graphs):
        torch._dynamo.reset()
        compiled_like_eager(**how)
    torch.cuda.synchronize()
