# SPDX-License-Identifier: Apache-2.0
"""All-reduce, as users call it, on every rank of a job; compared with the reference, to the bit."""

from __future__ import annotations

import random
import time

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
import tdcoll.distributed
from tdcoll import runtime
from tdcoll.collectives._host.launch import Launch
from tdcoll.collectives._host.launches import facts_of, launches_of
from tdcoll.collectives.all_reduce.spec import SPEC
from tdcoll.collectives.all_reduce.spec import SPEC as ALL_REDUCE
from tdcoll.collectives.reduce_scatter.reference import reduce_parts
from tdcoll.primitives.reduce import OPERATIONS_OF

SIZES = [0, 1, 2, 7, 255, 1000, 4096, 65536 + 3, 1 << 18, 3 << 20]


def given(call: int, numel: int, dtype: torch.dtype, ranks: int | None = None) -> list[torch.Tensor]:
    """``[numel]`` of every rank, made alike on all: floating-point values of many magnitudes, whose sum shows its
    order."""
    source = torch.Generator().manual_seed(1000 * call + numel)
    made = []
    for _ in range(ranks or world()):
        values = torch.randn(numel, generator=source, dtype=torch.float64)
        values *= 2.0 ** torch.randint(-6, 7, values.shape, generator=source)
        made.append(numbers(values, dtype).to(device()))
    return made


def wanted(tensors: list[torch.Tensor], op: str = "sum") -> torch.Tensor:
    return reduce_parts(tensors, tdcoll.topology().nodes, op)


def algorithms(ctx: tdcoll.CollectiveContext, nbytes: int, dtype: torch.dtype) -> list[str]:
    """Those that serve so many bytes on all ranks of this context."""
    facts = facts_of(ctx, nbytes, dtype)
    return [each.name for each in SPEC.algorithms if each.supports(facts) is None]


def small(sizes: list[int]) -> list[int]:
    return [size for size in sizes if size <= 1000] if simulated() else sizes


@check
def sizes() -> str:
    seen = set()
    with tdcoll.CollectiveContext(max_bytes_per_rank=4 * max(small(SIZES))) as ctx:
        for call, numel in enumerate(small(SIZES)):
            for dtype in (torch.float32, torch.bfloat16):
                tensors = given(call, numel, dtype)
                expected = wanted(tensors)
                for algorithm in algorithms(ctx, numel * dtype.itemsize, dtype):
                    out = torch.full((numel,), 99, dtype=dtype, device=device())
                    got = tdcoll.all_reduce(tensors[rank()], ctx, out, algorithm=algorithm)
                    expect(got is out, "all_reduce must return out")
                    expect(same(got, expected), f"{algorithm}, {numel} of {dtype}")
                    seen.add(algorithm)
        ctx.check()
    inside = set(SPEC.names) - ({"2d"} if puts() else {"1d", "2d"})
    expect(tdcoll.topology().n_nodes > 1 or seen == inside, f"only {seen} were to be had")
    return ", ".join(sorted(seen))


@check
def dtypes_and_operations() -> str:
    """Every dtype by every algorithm, and with every operation."""
    done, make = 0, tdcoll.CollectiveContext
    with make(max_bytes_per_rank=1 << 14) as usual, make(max_bytes_per_rank=1 << 14, lamport_bytes=0) as flagged:
        for call, (dtype, ops) in enumerate(OPERATIONS_OF.items()):
            tensors = given(call, 333, dtype)
            if dtype.is_floating_point:
                tensors[-1][::7] = float("nan")
                for tensor in tensors:
                    tensor[3::11] = -0.0
            ways = [(usual, name) for name in algorithms(usual, 333 * dtype.itemsize, dtype)]
            if dtype.is_floating_point:  # others go by flagged words in any case
                ways += [(flagged, name) for _, name in ways if name.endswith("shot")]
            for (ctx, algorithm), op in covering(ways, ops, call):
                got = tdcoll.all_reduce(tensors[rank()], ctx, None, op, algorithm)
                where = f"{algorithm}, {op} of {dtype}, lamport_bytes={ctx.lamport_bytes}"
                expect(same(got, wanted(tensors, op)), where)
                expect(not negative_zeros(got), f"-0.0: {where}")
                done += 1
        usual.check()
        flagged.check()
    return f"{done} kinds of calls"


@check
def unaligned_and_in_place() -> None:
    with tdcoll.CollectiveContext(max_bytes_per_rank=8192) as ctx:
        for shift in (1, 2, 8):
            for numel in (512, 1001):
                for algorithm in algorithms(ctx, 2 * numel, torch.float16):
                    tensors = given(shift, numel, torch.float16)
                    room = torch.full((shift + numel + 5,), 9.0, dtype=torch.float16, device=device())
                    mine = room[shift : shift + numel]
                    mine.copy_(tensors[rank()])
                    expect(tdcoll.all_reduce_(mine, ctx, algorithm=algorithm) is mine, "all_reduce_ returns its tensor")
                    expect(same(mine, wanted(tensors)), f"{algorithm}, shift {shift}, {numel} numbers")
                    around = torch.cat([room[:shift], room[shift + numel :]])
                    expect(bool(around.eq(9).all()), f"{algorithm}: wrote elsewhere")
        ctx.check()


@check
def symmetric_results() -> None:
    """Results are filled anew and read between calls, which follow each other without a synchronisation."""
    sizes = [1, 1001, 5000] if simulated() else [1, 1001, 65536, (1 << 20) + 3, 8 << 20]
    buffer = tdcoll.empty((8 + max(sizes),), torch.bfloat16)
    wrong = torch.zeros((), dtype=torch.int64, device=device())
    # In one epoch, and the largest in several.
    with tdcoll.CollectiveContext(max_bytes_per_rank=2 * max(sizes) // world() // 3 + 16) as ctx:
        for call, numel in enumerate([*sizes, *sizes[::-1]]):
            tensors = given(call, numel, torch.bfloat16)
            expected = wanted(tensors)
            for shift in (0, 3):
                out = buffer[shift : shift + numel]
                for algorithm in ("auto", *algorithms(ctx, 2 * numel, torch.bfloat16)):
                    for in_place in (False, True):
                        tensor = out.copy_(tensors[rank()]) if in_place else tensors[rank()]
                        tdcoll.all_reduce(tensor, ctx, out, algorithm=algorithm, symmetric=True)
                        wrong += (out != expected).sum()
        ordinary = torch.zeros(4, device=device())
        expect_raises(
            tdcoll.NotSymmetricError, lambda: tdcoll.all_reduce_(ordinary, ctx, symmetric=True), "tensor must"
        )
        ctx.check()
    expect(int(wrong) == 0, f"{int(wrong)} wrong numbers")
    tdcoll.free(buffer)


@check
def larger_calls_are_several_epochs() -> None:
    with tdcoll.CollectiveContext(max_bytes_per_rank=512) as ctx:
        for numel in (128, 129, 1000, 1280):
            tensors = given(numel, numel, torch.float32)
            for algorithm in ("auto", *algorithms(ctx, 4 * numel, torch.float32)):
                got = tdcoll.all_reduce(tensors[rank()], ctx, algorithm=algorithm)
                expect(same(got, wanted(tensors)), f"{algorithm}, {numel} numbers")
        far = torch.zeros(world() << 18, device=device())
        expect_raises(tdcoll.ContextError, lambda: tdcoll.all_reduce(far, ctx), "epochs of", "max_bytes_per_rank=")
        ctx.check()


@check(gpu_only=True)
def large_calls_by_words_are_several_epochs() -> str:
    """Such calls are several epochs by default, out of place and in place, in one graph with calls of one epoch."""
    numel, room = (17 << 20) + 5, (32 << 20) // world()  # of bfloat16, three epochs of at most 16 MB
    tensors = given(5, numel, torch.bfloat16)
    mine, expected = tensors[rank()], wanted(tensors)
    few = wanted([tensor[:1000] for tensor in tensors])
    with tdcoll.CollectiveContext(max_bytes_per_rank=room) as ctx:
        launch = launches_of(ALL_REDUCE, ctx, mine.nbytes, "auto", options=(mine.dtype, "sum"), dtype=mine.dtype)
        out, inside, small = torch.empty_like(mine), mine.clone(), mine[:1000].clone()

        def calls() -> None:
            tdcoll.all_reduce(mine, ctx, out)
            tdcoll.all_reduce_(small.copy_(mine[:1000]), ctx)
            tdcoll.all_reduce_(inside.copy_(mine), ctx)

        def right(where: str) -> None:
            ctx.check()
            for got, should in ((out, expected), (inside, expected), (small, few)):
                expect(same(got, should), f"{where}: {got.numel()} numbers")
                got.zero_()

        calls()
        right("eager")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            calls()
        for replay in range(5):
            graph.replay()
            right(f"replay {replay}")
    if ctx.lamport_bytes == room:  # on one node whose ranks can store to each other's memory
        expect(launch.plan.algorithm == "two_shot", f"{launch.plan} was taken")
    return str(launch.plan)


@check
def many_calls_with_a_straggler() -> str:
    """Hundreds of calls without a synchronisation, of changing sizes, among all-gathers; one rank at a time is late."""
    calls, numel = scaled(2000, 12, shared_gpus=300), 2000
    wrong = torch.zeros((), dtype=torch.int64, device=device())
    chooser = random.Random(7)
    tensors = given(0, numel, torch.float32)
    expected = wanted(tensors, "max")
    ranks = torch.arange(world(), device=device())
    with tdcoll.CollectiveContext(max_bytes_per_rank=4 * numel) as ctx:
        kinds = algorithms(ctx, 4 * numel, torch.float32)
        for call in range(calls):
            n = chooser.randrange(1, scaled(numel, 200))
            mine = tensors[rank()][:n] * (call % 5 + 1)
            late, cycles = chooser.randrange(world()), chooser.choice((0, 0, 20_000, 200_000))
            if rank() == late and cycles and not simulated():
                torch.cuda._sleep(cycles)
            got = tdcoll.all_reduce(mine, ctx, mine if call % 2 else None, "max", kinds[chooser.randrange(len(kinds))])
            wrong += (got != expected[:n] * (call % 5 + 1)).sum()
            if call % 3 == 0:
                wrong += (tdcoll.all_gather(ranks[rank()].clone(), ctx) != ranks).sum()
        ctx.check()
    expect(int(wrong) == 0, f"{int(wrong)} wrong numbers in {calls} calls")
    return f"{calls} calls"


@check
def subgroups_and_the_pool() -> None:
    tensors = given(1, 50, torch.float32)
    expect(same(tdcoll.all_reduce(tensors[rank()]), wanted(tensors)), "without a context")
    for op, name in (
        (dist.ReduceOp.SUM, "sum"),
        (dist.ReduceOp.AVG, "mean"),
        (dist.ReduceOp.MAX, "max"),
        (dist.ReduceOp.MIN, "min"),
        (dist.ReduceOp.PRODUCT, "prod"),
    ):
        mine = tensors[rank()].clone()
        expect(tdcoll.distributed.all_reduce(mine, op) is None, "torch's function returns None")
        expect(same(mine, wanted(tensors, name)), f"the drop-in, {op}")
    half = list(range(rank() % 2, world(), 2))
    group = [dist.new_group(list(range(first, world(), 2))) for first in range(min(2, world()))][rank() % 2]
    for order, given_group in ((half, group), (half[::-1], half[::-1])):
        ours = given(2, 40, torch.float32, len(order))
        mine = ours[order.index(rank())].clone()
        tdcoll.distributed.all_reduce(mine, group=given_group)
        nodes = tdcoll.topology(given_group).nodes
        expect(same(mine, reduce_parts(ours, nodes, "sum")), f"group {order}")


@check
def asynchronous_drop_ins() -> None:
    """Each call is behind what its own stream has; ``wait()`` brings the stream that is current then behind it."""
    tensors = given(4, 6 * world(), torch.float32)
    pieces, sums = torch.stack(tensors), wanted(tensors)
    streams = [None, None] if simulated() else [torch.cuda.Stream(device()) for _ in "ab"]
    for late in [None, *range(world())]:  # the first makes the contexts, which waits for all
        mine, part = torch.zeros_like(tensors[0]), torch.zeros(6, device=device())
        out = torch.zeros(world() * mine.numel(), device=device())
        if not simulated():
            torch.cuda.synchronize()
        with torch.cuda.stream(streams[0]):
            if rank() == late and not simulated():
                torch.cuda._sleep(50_000_000)
            mine.copy_(tensors[rank()])
            works = [
                tdcoll.all_gather_into_tensor(out, mine, async_op=True),
                tdcoll.reduce_scatter_tensor(part, mine, async_op=True),
                tdcoll.distributed.all_reduce(mine, "sum", async_op=True),
            ]
            expect(all(isinstance(work, dist.Work) for work in works), "each returns a Work")
            if rank() == late and not simulated():
                expect(not works[-1].is_completed(), "what is on the stream still sleeps, and the call is not complete")
        with torch.cuda.stream(streams[1]):
            for work in works:
                expect(work.wait(), "wait() says that it is there")
            copies = [tensor.clone() for tensor in (out, part, mine)]
            (futures,) = works[-1].get_future().wait()
            expect(futures.data_ptr() == mine.data_ptr(), "the result of the future")
        if not simulated():
            streams[1].synchronize()
            expect(all(work.is_completed() for work in works), "they are complete now")
        gathered = copies[0].view(world(), -1)
        expect(torch.equal(gathered, pieces), "all-gather")
        expect(same(copies[1], sums.view(world(), -1)[rank()]), "reduce-scatter")
        expect(same(copies[2], sums), "all-reduce")


def replay_captured(numel: int, captured: int, replays: int) -> None:
    """``captured`` calls as one graph, replayed with eager calls in between."""
    ctx = tdcoll.CollectiveContext(max_bytes_per_rank=8192)
    kinds = ["auto", *algorithms(ctx, 4 * numel, torch.float32)]
    tensors = [tensor.remainder(100).float() for tensor in given(3, numel, torch.int32)]
    total = torch.stack(tensors).sum(0)  # of whole numbers: exact in any order
    step = torch.ones((), device=device())
    wrong = torch.zeros((), dtype=torch.int64, device=device())

    def one(algorithm: str, in_place: bool) -> None:
        step.add_(1)
        mine = tensors[rank()] * step
        got = tdcoll.all_reduce(mine, ctx, mine if in_place else None, algorithm=algorithm)
        wrong.add_((got != total * step).sum())

    for algorithm in kinds:
        one(algorithm, True)
        one(algorithm, False)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in range(captured):
            one(kinds[call % len(kinds)], call % 2 == 1)
    for replay in range(replays):
        step.fill_(replay % 100)
        graph.replay()
        if replay % 7 == 3:
            one(kinds[replay % len(kinds)], False)
    ctx.check()
    expect(int(wrong) == 0, f"{int(wrong)} wrong numbers, {captured} calls of {numel} captured")
    expect(int(step) >= captured, "the graph did not run")
    ctx.close()


@check(gpu_only=True)
def graphs() -> None:
    """Odd and even numbers of captured calls; among them calls of several epochs."""
    for numel, captured in ((100, 1), (1000, 2), (5000, 3), (333, 8), (30_000, 5)):
        replay_captured(numel, captured, scaled(50, 0, shared_gpus=11))


@check(gpu_only=True)
def some_ranks_replay_what_others_call() -> str:
    """Even ranks replay a graph while odd ones call eagerly, in place or not: all have the same plan. Here the tables
    that are shipped for two H200s say most."""
    sizes = [1 << n for n in range(15, 23)]
    ctx = tdcoll.CollectiveContext(max_bytes_per_rank=32 << 20)
    plans = []
    for numel in sizes:
        tensors = given(5, numel, torch.bfloat16)
        expected, mine = wanted(tensors), tensors[rank()]
        out = torch.empty_like(mine)
        tdcoll.all_reduce(mine, ctx, out)
        plan = launches_of(
            ALL_REDUCE, ctx, mine.nbytes, "auto", options=(torch.bfloat16, "sum"), dtype=torch.bfloat16
        ).plan
        plans.append(f"{mine.nbytes >> 10} KB {plan.algorithm}")
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            tdcoll.all_reduce(mine, ctx, out)
        for _ in range(3):
            out.zero_()
            got = out
            if rank() % 2 == 0:
                graph.replay()
            else:
                got = tdcoll.all_reduce_(mine.clone(), ctx)
            ctx.check()
            expect(same(got, expected), f"{mine.nbytes} bytes")
    ctx.close()
    return ", ".join(plans)


@check
def an_interrupted_call_gives_its_peers_a_timeout() -> str:
    """Between two epochs of one rank's call. The last but one check, because its contexts are never given back."""
    if world() == 1:
        return "one rank has no peers"
    real, numel, made = Launch.__call__, 200, [0]
    ctx = tdcoll.CollectiveContext(max_bytes_per_rank=256, timeout_s=patience_s())
    data = torch.arange(numel, dtype=torch.float32, device=device())
    tdcoll.all_reduce(data, ctx, algorithm="direct")

    def interrupted(launch: Launch, *arguments: int) -> None:
        made[0] += 1
        if made[0] == 2:
            raise KeyboardInterrupt
        real(launch, *arguments)

    if rank() == 1:
        Launch.__call__ = interrupted  # type: ignore[method-assign]
        expect_raises(KeyboardInterrupt, lambda: tdcoll.all_reduce(data, ctx, algorithm="direct"))
        Launch.__call__ = real  # type: ignore[method-assign]
        error = expect_raises(tdcoll.ContextError, lambda: tdcoll.all_reduce(data, ctx, algorithm="direct"))
        expect("ended with KeyboardInterrupt" in str(error), str(error))
        time.sleep(2 * patience_s())
    else:
        tdcoll.all_reduce(data, ctx, algorithm="direct")
        error = expect_raises(tdcoll.CollectiveTimeout, ctx.check)
    runtime.current().failed = True  # so that all leave without each other
    return str(error)


@check
def timeouts_name_the_peer() -> str:
    """The last check, because its contexts are never given back."""
    if world() == 1:
        return "one rank waits for nobody"
    absent, tried = world() - 1, []
    for algorithm in SPEC.names:
        runtime.current().failed = False  # what failed is over, and all ranks are here
        ctx = tdcoll.CollectiveContext(max_bytes_per_rank=1024, timeout_s=patience_s())
        if algorithm in algorithms(ctx, 256, torch.float32):
            data = torch.ones(64, device=device())
            tdcoll.all_reduce(data, ctx, algorithm=algorithm)
            if rank() != absent:
                tdcoll.all_reduce(data, ctx, algorithm=algorithm)
                error = expect_raises(tdcoll.CollectiveTimeout, ctx.check)
                expect(error.peer == absent and error.epoch == 2, str(error))  # type: ignore[attr-defined]
                ctx.close()
            tried.append(algorithm)
        runtime.current().failed = True  # so that the absent rank, too, leaves without the others
    expect(tried, "no algorithm was to be had")
    return f"peer named by {', '.join(tried)}"


if __name__ == "__main__":
    run()
