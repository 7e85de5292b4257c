# SPDX-License-Identifier: Apache-2.0
"""Reduce-scatter, as users call it, on every rank of a job; compared with the reference, to the bit."""

from __future__ import annotations

import random

import torch
import torch.distributed as dist
from harness import (
    check,
    covering,
    device,
    expect,
    expect_raises,
    negative_zeros,
    numbers,
    patience_s,
    puts,
    rank,
    run,
    same,
    scaled,
    simulated,
    world,
)

import tdcoll
from tdcoll import runtime
from tdcoll.collectives.reduce_scatter.reference import reduce_scatter_reference
from tdcoll.limits import flagged_bytes
from tdcoll.primitives.reduce import OPERATIONS_OF

SIZES = [0, 1, 2, 7, 255, 1000, 4096, 65536 + 3, 1 << 18]


def given(call: int, numel: int, dtype: torch.dtype, ranks: int | None = None) -> list[torch.Tensor]:
    """``[ranks * numel]`` of every rank, made alike on all: floating-point values of many magnitudes, whose sum shows
    its order."""
    source = torch.Generator().manual_seed(1000 * call + numel)
    made = []
    for _ in range(ranks or world()):
        values = torch.randn((ranks or world()) * numel, generator=source, dtype=torch.float64)
        values *= 2.0 ** torch.randint(-6, 7, values.shape, generator=source)
        made.append(numbers(values, dtype).to(device()))
    return made


def wanted(tensors: list[torch.Tensor], op: str, nodes: tuple[int, ...] | None = None) -> torch.Tensor:
    nodes = nodes or tdcoll.topology().nodes
    return reduce_scatter_reference(tensors, nodes, op)[rank()]


def algorithms(nbytes: int, dtype: torch.dtype) -> list[str]:
    """Those that serve parts of ``nbytes`` bytes on all ranks of this job."""
    topology = tdcoll.topology()
    if topology.n_nodes > 1:
        return ["1d"]
    fits = nbytes <= flagged_bytes(topology.world_size, 1) and dtype.itemsize <= 4
    return [*(["ll"] if fits else []), "direct", *(["1d"] if puts() else [])]


def small(sizes: list[int]) -> list[int]:
    return [size for size in sizes if size <= 1000] if simulated() else sizes


@check
def sizes() -> None:
    with tdcoll.CollectiveContext(max_bytes_per_rank=4 * max(small(SIZES))) as ctx:
        for call, numel in enumerate(small(SIZES)):
            for dtype in (torch.float32, torch.bfloat16):
                tensors = given(call, numel, dtype)
                expected = wanted(tensors, "sum")
                for algorithm in algorithms(numel * dtype.itemsize, dtype):
                    out = torch.full((numel,), 99, dtype=dtype, device=device())
                    got = tdcoll.reduce_scatter(tensors[rank()], ctx, out, algorithm=algorithm)
                    expect(got is out, "reduce_scatter must return out")
                    expect(same(got, expected), f"{algorithm}, {numel} of {dtype}")
        ctx.check()


@check
def dtypes_and_operations() -> str:
    """Every dtype by every algorithm, and with every operation."""
    done = 0
    with tdcoll.CollectiveContext(max_bytes_per_rank=1 << 14) as ctx:
        for call, (dtype, ops) in enumerate(OPERATIONS_OF.items()):
            tensors = given(call, 333, dtype)
            if dtype.is_floating_point:
                tensors[-1][::7] = float("nan")
                for tensor in tensors:
                    tensor[3::11] = -0.0
            for algorithm, op in covering(algorithms(333 * dtype.itemsize, dtype), ops, call):
                got = tdcoll.reduce_scatter(tensors[rank()], ctx, None, op, algorithm)
                expect(same(got, wanted(tensors, op)), f"{algorithm}, {op} of {dtype}")
                expect(not negative_zeros(got), f"-0.0: {algorithm}, {op} {dtype}")
                done += 1
        ctx.check()
    return f"{done} kinds of calls"


@check
def unaligned_and_in_place() -> None:
    with tdcoll.CollectiveContext(max_bytes_per_rank=8192) as ctx:
        for shift in (1, 3, 4):
            for numel in (512, 1001):
                for algorithm in algorithms(2 * numel, torch.float16):
                    tensors = given(shift, numel, torch.float16)
                    room = torch.zeros(world() * numel + shift, dtype=torch.float16, device=device())
                    room[shift:] = tensors[rank()]
                    source = room[shift:]
                    own = source[rank() * numel : (rank() + 1) * numel]
                    tdcoll.reduce_scatter(source, ctx, own, algorithm=algorithm)
                    expect(same(own, wanted(tensors, "sum")), f"{algorithm}, shift {shift}, {numel} numbers")
                    others = torch.ones(world() * numel, dtype=torch.bool, device=device())
                    others[rank() * numel : (rank() + 1) * numel] = False
                    expect(torch.equal(source[others], tensors[rank()][others]), f"{algorithm}: wrote elsewhere")


@check
def symmetric_tensors() -> None:
    """Tensors are filled anew between calls, which follow each other without a synchronisation."""
    sizes = [1, 333, 2000] if simulated() else [1, 1001, 65536, (1 << 20) + 3, 4 << 20]
    buffer = tdcoll.empty((8 + world() * max(sizes),), torch.bfloat16)
    wrong = torch.zeros((), dtype=torch.int64, device=device())
    with tdcoll.CollectiveContext(max_bytes_per_rank=1 << 16) as ctx:
        kinds = ["auto", "pull"] if tdcoll.topology().n_nodes == 1 else ["auto", "1d"]
        for call, numel in enumerate([*sizes, *sizes[::-1]]):
            tensors = given(call, numel, torch.bfloat16)
            expected = wanted(tensors, "sum")
            for shift in (0, 3):
                tensor = buffer[shift : shift + world() * numel]
                for algorithm in kinds:
                    for own in (None, tensor[rank() * numel : (rank() + 1) * numel]):
                        tensor.copy_(tensors[rank()])
                        got = tdcoll.reduce_scatter(tensor, ctx, own, algorithm=algorithm, symmetric=True)
                        wrong += (got != expected).sum()
                    tensor.zero_()
        ctx.check()
    expect(int(wrong) == 0, f"{int(wrong)} wrong numbers")
    tdcoll.free(buffer)


@check
def larger_calls_are_several_epochs() -> None:
    with tdcoll.CollectiveContext(max_bytes_per_rank=512) as ctx:
        for numel in (128, 129, 1000, 1280):
            tensors = given(numel, numel, torch.float32)
            for algorithm in ("auto", *algorithms(1 << 30, torch.float32)):
                got = tdcoll.reduce_scatter(tensors[rank()], ctx, algorithm=algorithm)
                expect(same(got, wanted(tensors, "sum")), f"{algorithm}, {numel} numbers")
        far = torch.zeros(world() << 18, device=device())
        expect_raises(tdcoll.ContextError, lambda: tdcoll.reduce_scatter(far, ctx), "epochs of", "max_bytes_per_rank=")
        ctx.check()


@check
def many_calls_with_a_straggler() -> str:
    """Hundreds of calls without a synchronisation, of changing sizes, among all-gathers; one rank at a time is late."""
    calls, numel = scaled(2000, 12, shared_gpus=300), 700
    wrong = torch.zeros((), dtype=torch.int64, device=device())
    chooser = random.Random(7)
    tensors = given(0, numel, torch.float32)
    ranks = torch.arange(world(), device=device())
    with tdcoll.CollectiveContext(max_bytes_per_rank=4 * numel) as ctx:
        kinds = algorithms(4 * numel, torch.float32)
        for call in range(calls):
            n = chooser.randrange(1, numel)
            mine = torch.cat([part[:n] for part in tensors[rank()].chunk(world())]).mul_(call % 5 + 1)
            late, cycles = chooser.randrange(world()), chooser.choice((0, 0, 20_000, 200_000))
            if rank() == late and cycles and not simulated():
                torch.cuda._sleep(cycles)
            got = tdcoll.reduce_scatter(mine, ctx, op="max", algorithm=kinds[call % len(kinds)])
            most = torch.stack([tensor.chunk(world())[rank()][:n] for tensor in tensors]).amax(0)
            wrong += (got != most * (call % 5 + 1)).sum()
            if call % 3 == 0:
                wrong += (tdcoll.all_gather(ranks[rank()].clone(), ctx) != ranks).sum()
        ctx.check()
    expect(int(wrong) == 0, f"{int(wrong)} wrong numbers in {calls} calls")
    return f"{calls} calls"


@check
def subgroups_and_the_pool() -> None:
    tensors = given(1, 50, torch.float32)
    expected = wanted(tensors, "sum")
    expect(same(tdcoll.reduce_scatter(tensors[rank()]), expected), "without a context")
    out = torch.empty(50, device=device())
    tdcoll.reduce_scatter_tensor(out, tensors[rank()].view(world(), 50))
    expect(same(out, expected), "the drop-in")
    for op, name in ((dist.ReduceOp.AVG, "mean"), (dist.ReduceOp.MAX, "max"), (dist.ReduceOp.PRODUCT, "prod")):
        tdcoll.reduce_scatter_tensor(out, tensors[rank()], op)
        expect(same(out, wanted(tensors, name)), f"the drop-in, {op}")
    half = list(range(rank() % 2, world(), 2))
    group = [dist.new_group(list(range(first, world(), 2))) for first in range(min(2, world()))][rank() % 2]
    for order, given_group in ((half, group), (half[::-1], half[::-1])):
        ours = given(2, 40, torch.float32, len(order))
        me = order.index(rank())
        ids = tdcoll.topology(given_group)
        tdcoll.reduce_scatter_tensor(out[:40], ours[me], group=given_group)
        expect(same(out[:40], reduce_scatter_reference(ours, ids.nodes, "sum")[me]), f"group {order}")


@check
def errors() -> None:
    data = torch.zeros(world() * 4, device=device())
    with tdcoll.CollectiveContext(max_bytes_per_rank=64) as ctx:
        call = tdcoll.reduce_scatter
        expect_raises(TypeError, lambda: call([1, 2], ctx), "tensor", "list")  # type: ignore[arg-type]
        expect_raises(TypeError, lambda: call(data, 3), "ctx", "CollectiveContext", "3")  # type: ignore[arg-type]
        expect_raises(TypeError, lambda: call(data.bool(), ctx), "tensor must be of float16", "bool")
        expect_raises(ValueError, lambda: call(data[:0].sum(), ctx), "first extent", "[]")
        if world() > 1:
            expect_raises(ValueError, lambda: call(data[1:], ctx), "first extent must be divisible", str(world()))
        expect_raises(ValueError, lambda: call(data, ctx, op="avg"), "op must be one of sum", "'avg'")
        expect_raises(ValueError, lambda: call(data.int(), ctx, op="mean"), "sum, max, min, prod for torch.int32")
        expect_raises(ValueError, lambda: call(data, ctx, out=data.new_empty(5)), "out must be", "[4]", "[5]")
        expect_raises(ValueError, lambda: call(data, ctx, out=data.new_empty(4).int()), "out must be", "int32")
        expect_raises(ValueError, lambda: call(data, ctx, algorithm="ring"), "algorithm must be one of auto", "'ring'")
        expect_raises(ValueError, lambda: call(data.double(), ctx, algorithm="ll"), "algorithm='ll' needs")
        out = torch.empty(4, device=device())
        expect_raises(ValueError, lambda: tdcoll.reduce_scatter_tensor(data[1:], data), "output must be")
        expect_raises(ValueError, lambda: tdcoll.reduce_scatter_tensor(out, data.int(), dist.ReduceOp.AVG), "got AVG")
        expect_raises(
            ValueError, lambda: tdcoll.reduce_scatter_tensor(out, data, dist.ReduceOp.BXOR), "op must be one of SUM"
        )
        expect_raises(ValueError, lambda: tdcoll.reduce_scatter_tensor(out, data, 3), "op must be one of", "got 3")
        if world() > 1:
            begin = rank() * 4 + (1 if rank() + 1 < world() else -1)
            expect_raises(ValueError, lambda: call(data, ctx, out=data[begin : begin + 4]), "out must not overlap")
            with tdcoll.CollectiveContext(max_bytes_per_rank=64, debug=True) as debug:
                op = "sum" if rank() else "max"
                expect_raises(tdcoll.RankMismatchError, lambda: call(data, debug, op=op), "reduce_scatter arguments")
                call(data, debug)
        call(data, ctx)
        ctx.check()


def replay_captured(numel: int, captured: int, replays: int) -> None:
    """``captured`` calls as one graph, replayed with eager calls in between."""
    ctx = tdcoll.CollectiveContext(max_bytes_per_rank=8192)
    kinds = ["auto", *algorithms(4 * numel if numel <= 2048 else 1 << 30, torch.float32)]
    parts = torch.stack([tensor.view(world(), numel) for tensor in given(3, numel, torch.int32)])
    step = torch.ones((), dtype=torch.int32, device=device())
    wrong = torch.zeros((), dtype=torch.int64, device=device())

    def one(algorithm: str) -> None:
        step.add_(1)
        got = tdcoll.reduce_scatter(parts[rank()] * step, ctx, algorithm=algorithm)
        wrong.add_((got != parts[:, rank()].sum(0, dtype=torch.int32) * step).sum())

    for algorithm in kinds:
        one(algorithm)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in range(captured):
            one(kinds[call % len(kinds)])
    for replay in range(replays):
        graph.replay()
        if replay % 7 == 3:
            one("1d" if puts() else "direct")
    ctx.check()
    expect(int(wrong) == 0, f"{int(wrong)} wrong numbers, {captured} calls of {numel} captured")
    expect(int(step) > replays * captured, "the graph did not run")
    ctx.close()


@check(gpu_only=True)
def graphs() -> None:
    """Odd and even numbers of captured calls; among them calls of several epochs."""
    for numel, captured in ((100, 1), (4096, 2), (5000, 3), (333, 8)):
        replay_captured(numel, captured, scaled(50, 0, shared_gpus=11))


@check
def timeouts_name_the_peer() -> str:
    """The last check, because its contexts are never given back."""
    if world() == 1:
        return "one rank waits for nobody"
    kinds, absent = algorithms(256, torch.float32), world() - 1
    for algorithm in kinds:
        runtime.current().failed = False  # what failed is over, and all ranks are here
        ctx = tdcoll.CollectiveContext(max_bytes_per_rank=1024, timeout_s=patience_s())
        data = torch.ones(world() * 64, device=device())
        tdcoll.reduce_scatter(data, ctx, algorithm=algorithm)
        if rank() != absent:
            tdcoll.reduce_scatter(data, ctx, algorithm=algorithm)
            error = expect_raises(tdcoll.CollectiveTimeout, ctx.check)
            expect(error.peer == absent and error.epoch == 2, str(error))  # type: ignore[attr-defined]
            ctx.close()
        runtime.current().failed = True  # so that the absent rank, too, leaves without the others
    return f"peer named by {', '.join(kinds)}"


if __name__ == "__main__":
    run()
