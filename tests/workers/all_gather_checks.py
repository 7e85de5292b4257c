# SPDX-License-Identifier: Apache-2.0
"""All-gather, as users call it, on every rank of a job."""

from __future__ import annotations

import random
from functools import partial

import torch
import torch.distributed as dist
from harness import check, device, expect, expect_raises, patience_s, puts, rank, run, scaled, simulated, world

import tdcoll
from tdcoll import runtime
from tdcoll.limits import flagged_bytes
from tdcoll.primitives.group import EPOCH_SHIFT

DTYPES = [
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.bool, torch.complex64, torch.float8_e4m3fn,
]  # fmt: skip
SIZES = [0, 1, 2, 3, 15, 16, 17, 255, 1000, 4096, 65536 + 3, 1 << 20, (1 << 20) + 13]


def pattern(owner: int, call: int, nbytes: int) -> torch.Tensor:
    """``[nbytes]`` uint8 in which owner, position and call number show."""
    index = torch.arange(nbytes, dtype=torch.int64, device=device())
    return ((index * 7 + (index >> 8) * 3 + owner * 41 + call * 89) % 251).to(torch.uint8)


def expected(ranks: list[int], call: int, nbytes: int) -> torch.Tensor:
    return torch.cat([pattern(r, call, nbytes) for r in ranks])


def everyone() -> list[int]:
    return list(range(world()))


def algorithms(nbytes: int) -> list[str]:
    """Those that serve ``nbytes`` per rank on all ranks of this job."""
    topology = tdcoll.topology()
    one_node = topology.n_nodes == 1
    most = flagged_bytes(topology.world_size, topology.n_nodes)
    ll = ["ll"] if topology.ranks_per_node is not None and nbytes <= most else []
    by_puts = ["1d", *([] if topology.ranks_per_node is None else ["2d"])] if puts() else []
    return [*ll, *(["direct", "ring"] if one_node else []), *by_puts]


def small(sizes: list[int]) -> list[int]:
    return [size for size in sizes if size <= 70000] if simulated() else sizes


@check
def sizes() -> None:
    with tdcoll.CollectiveContext(max_bytes_per_rank=max(small(SIZES))) as ctx:
        for call, nbytes in enumerate(small(SIZES)):
            for algorithm in algorithms(nbytes):
                mine = pattern(rank(), call, nbytes)
                out = torch.full((world() * nbytes,), 255, dtype=torch.uint8, device=device())
                got = tdcoll.all_gather(mine, ctx, out=out, algorithm=algorithm)
                expect(got is out, "all_gather must return out")
                expect(torch.equal(got, expected(everyone(), call, nbytes)), f"{algorithm}, {nbytes} bytes")
        ctx.check()


@check
def dtypes_and_shapes() -> None:
    with tdcoll.CollectiveContext(max_bytes_per_rank=1 << 14) as ctx:
        for call, dtype in enumerate(DTYPES):
            for shape in ((3, 5, 8), (), (7,), (0, 4)):
                count = torch.Size(shape).numel() * dtype.itemsize
                limit = 2 if dtype is torch.bool else 255
                pieces = [
                    (pattern(r, call, count) % limit).view(dtype).view(shape)
                    if count
                    else torch.empty(shape, dtype=dtype, device=device())
                    for r in everyone()
                ]
                got = tdcoll.all_gather(pieces[rank()], ctx, algorithm=algorithms(count)[0])
                wanted = torch.cat(pieces) if shape else torch.stack(pieces)
                expect(got.dtype == dtype and got.shape == wanted.shape, f"{dtype} {shape}: got {got.shape}")
                if count:
                    same = torch.equal(got.view(-1).view(torch.uint8), wanted.view(-1).view(torch.uint8))
                    expect(same, f"{dtype} {shape}")
        stacked = torch.empty(world(), 4, dtype=torch.int32, device=device())
        tdcoll.all_gather(torch.full((4,), rank(), dtype=torch.int32, device=device()), ctx, out=stacked)
        expect(stacked.tolist() == [[r] * 4 for r in everyone()], "stacked out")
        ctx.check()


@check
def unaligned_tensors() -> None:
    """Inputs and outputs that start at odd addresses."""
    with tdcoll.CollectiveContext(max_bytes_per_rank=8192) as ctx:
        for shift in (1, 2, 4, 8):
            for nbytes in (1000, 1024, 8001):
                source = torch.zeros(nbytes + shift, dtype=torch.uint8, device=device())[shift:]
                source.copy_(pattern(rank(), shift, nbytes))
                room = torch.full((world() * nbytes + shift + 64,), 7, dtype=torch.uint8, device=device())
                out = room[shift : shift + world() * nbytes]
                for algorithm in algorithms(nbytes):
                    out.fill_(9)
                    tdcoll.all_gather(source, ctx, out, algorithm)
                    what = f"{algorithm}, shift {shift}, {nbytes} bytes"
                    expect(torch.equal(out, expected(everyone(), shift, nbytes)), what)
                    beyond = torch.cat((room[:shift], room[shift + world() * nbytes :]))
                    expect(bool((beyond == 7).all()), f"{what}: wrote outside out")


@check
def in_place() -> None:
    ctx = tdcoll.CollectiveContext(max_bytes_per_rank=1024)
    for nbytes in small([0, 1, 48, 1000, 65536 + 3, 1 << 20]):
        buffer = tdcoll.empty(world() * nbytes, torch.uint8)
        for call in range(scaled(20, 3, shared_gpus=5)):
            for algorithm in algorithms(nbytes if nbytes <= 1024 else 1 << 30):
                buffer[rank() * nbytes : (rank() + 1) * nbytes] = pattern(rank(), call, nbytes)
                got = tdcoll.all_gather_in_place(buffer, ctx, algorithm=algorithm)
                wanted = expected(everyone(), call, nbytes)
                expect(torch.equal(got, wanted), f"{algorithm}, {nbytes} bytes, call {call}")
                if nbytes <= 1024:  # out of place in between: the epochs are shared
                    other = tdcoll.all_gather(pattern(rank(), call + 1, nbytes), ctx)
                    expect(torch.equal(other, expected(everyone(), call + 1, nbytes)), "mixed calls")
        tdcoll.free(buffer)
    ctx.close()
    expect_raises(tdcoll.NotSymmetricError, lambda: _in_place_of_ordinary(), "buffer", "symmetric memory")


def _in_place_of_ordinary() -> None:
    with tdcoll.CollectiveContext(max_bytes_per_rank=64) as ctx:
        try:
            tdcoll.all_gather_in_place(torch.zeros(world() * 4, device=device()), ctx)
        except tdcoll.NotSymmetricError as error:
            kept = error
        else:
            return
    raise kept


@check
def many_calls_with_a_straggler() -> str:
    """Thousands of calls without a synchronisation; one rank at a time is late."""
    calls = scaled(4000, 12, shared_gpus=600)
    nbytes = 1536
    wrong = torch.zeros((), dtype=torch.int64, device=device())
    chooser = random.Random(5)
    with tdcoll.CollectiveContext(max_bytes_per_rank=nbytes) as ctx:
        algorithm = algorithms(nbytes)
        base = torch.stack([pattern(r, 0, nbytes) for r in everyone()]).to(torch.int64)
        for call in range(calls):
            wanted = ((base + call) % 251).to(torch.uint8)
            late, cycles = chooser.randrange(world()), chooser.choice((0, 0, 20_000, 200_000))
            if rank() == late and cycles and not simulated():
                torch.cuda._sleep(cycles)
            got = tdcoll.all_gather(wanted[rank()].clone(), ctx, algorithm=algorithm[call % len(algorithm)])
            wrong += (got != wanted.view(-1)).sum()
        ctx.check()
    expect(int(wrong) == 0, f"{int(wrong)} wrong bytes in {calls} calls")
    return f"{calls} calls"


@check
def epochs_of_more_than_32_bits() -> None:
    """LL's flags are 32 of them: the second call has words that were never written, and whose flag would be zero."""
    for algorithm in algorithms(4096):
        with tdcoll.CollectiveContext(max_bytes_per_rank=4096) as ctx:
            ctx.control.fill_(((1 << 32) - 2) << EPOCH_SHIFT.value)
            tdcoll.barrier()
            for call, nbytes in enumerate((100, 1000, 4096, 4096)):
                got = tdcoll.all_gather(pattern(rank(), call, nbytes), ctx, algorithm=algorithm)
                expect(torch.equal(got, expected(everyone(), call, nbytes)), f"{algorithm}, call {call}")
            ctx.check()


@check
def subgroups() -> None:
    """A strided half of the ranks, as a ProcessGroup and as a list; reversed ranks; heap use that differs."""
    halves = [list(range(first, world(), 2)) for first in range(min(2, world()))]
    groups = [dist.new_group(half) for half in halves]
    mine = rank() % 2 if world() > 1 else 0
    half = halves[mine]
    extra = tdcoll.empty(4096, torch.uint8, group=half) if mine == 0 else None
    for group in (groups[mine], half, list(reversed(half))):
        order = half if not isinstance(group, list) else group
        with tdcoll.CollectiveContext(group, max_bytes_per_rank=1000) as ctx:
            expect(ctx.rank == order.index(rank()), f"group rank {ctx.rank}")
            for call in range(5):
                got = tdcoll.all_gather(pattern(rank(), call, 1000), ctx)
                expect(torch.equal(got, expected(order, call, 1000)), f"{order}, call {call}")
        if world() > 1:
            outside = partial(tdcoll.CollectiveContext, halves[1 - mine], max_bytes_per_rank=1)
            expect_raises(ValueError, outside, "does not contain")
    with tdcoll.CollectiveContext(max_bytes_per_rank=100) as ctx:  # all ranks, whose heaps differ now
        got = tdcoll.all_gather(pattern(rank(), 1, 100), ctx)
        expect(torch.equal(got, expected(everyone(), 1, 100)), "after the subgroups")
    if extra is not None:
        tdcoll.free(extra)


@check
def several_contexts() -> None:
    used = tdcoll.heap_info().used
    contexts = [tdcoll.CollectiveContext(max_bytes_per_rank=512 * (i + 1)) for i in range(4)]
    for call in range(scaled(50, 3, shared_gpus=9)):
        for i, ctx in enumerate(contexts):
            if (call + i) % 3:
                got = tdcoll.all_gather(pattern(rank(), call + i, 512), ctx)
                expect(torch.equal(got, expected(everyone(), call + i, 512)), f"context {i}, call {call}")
    for ctx in contexts[::2] + contexts[1::2]:
        ctx.close()
        ctx.close()
    expect(tdcoll.heap_info().used == used, f"leaked {tdcoll.heap_info().used - used} bytes of heap")


@check
def drop_in() -> None:
    for call, count in enumerate((10, 5, 400_000 if not simulated() else 300_000, 7)):
        ranks = [(r * 1000 + call + torch.arange(count, device=device())) % 8191 for r in everyone()]
        pieces = [values.to(torch.float32) for values in ranks]
        ours = torch.empty(world() * count, device=device())
        theirs = torch.empty_like(ours)
        tdcoll.all_gather_into_tensor(ours, pieces[rank()])
        dist.all_gather_into_tensor(theirs, pieces[rank()])
        expect(torch.equal(ours, theirs) and torch.equal(ours, torch.cat(pieces)), f"{count} floats")
    group = dist.new_group(everyone())
    out = torch.empty(world(), 3, device=device())
    tdcoll.all_gather_into_tensor(out, torch.full((3,), float(rank()), device=device()), group)
    expect(out.tolist() == [[float(r)] * 3 for r in everyone()], "stacked")


@check
def errors() -> None:
    context = tdcoll.ContextError
    with tdcoll.CollectiveContext(max_bytes_per_rank=64) as ctx:
        grid = torch.zeros(4, 4, device=device())
        expect_raises(ValueError, lambda: tdcoll.all_gather(grid.t(), ctx), "tensor", "contiguous")
        expect_raises(TypeError, lambda: tdcoll.all_gather([1, 2], ctx), "tensor", "list")  # type: ignore[arg-type]
        row = grid[0].contiguous()
        wrong = torch.zeros(5, device=device())
        expect_raises(ValueError, lambda: tdcoll.all_gather(row, ctx, out=wrong), "out", "[5]")
        expect_raises(ValueError, lambda: tdcoll.all_gather(row, ctx, out=wrong.int()), "out", "float32")
        expect_raises(ValueError, lambda: tdcoll.all_gather(row, ctx, algorithm="3d"), "algorithm", "3d")
        room = torch.zeros(world() * 4 + 1, device=device())
        overlap = room[rank() * 4 + 1 : rank() * 4 + 5]
        expect_raises(ValueError, lambda: tdcoll.all_gather(overlap, ctx, out=room[: world() * 4]), "overlap")
        inside = room[: world() * 4]
        inside[rank() * 4 : rank() * 4 + 4] = float(rank())
        tdcoll.all_gather(inside[rank() * 4 : rank() * 4 + 4], ctx, out=inside)
        expect(inside.view(world(), 4)[:, 0].tolist() == [float(r) for r in everyone()], "own segment as input")
        if not simulated():
            expect_raises(ValueError, lambda: tdcoll.all_gather(row.cpu(), ctx), "tensor", "cuda")
            with torch.cuda.stream(torch.cuda.Stream()):
                expect_raises(context, lambda: tdcoll.all_gather(row, ctx), "stream")
        tdcoll.all_gather(row, ctx)
    expect_raises(context, lambda: tdcoll.all_gather(row, ctx), "closed")
    expect_raises(ValueError, lambda: tdcoll.CollectiveContext(max_bytes_per_rank=-1), "max_bytes_per_rank")
    expect_raises(ValueError, lambda: tdcoll.CollectiveContext([0, 0], max_bytes_per_rank=1), "distinct")
    expect_raises(TypeError, lambda: tdcoll.CollectiveContext("all", max_bytes_per_rank=1), "group")
    if tdcoll.topology().ranks_per_node is None:
        with tdcoll.CollectiveContext(max_bytes_per_rank=64) as ctx:
            expect_raises(ValueError, lambda: tdcoll.all_gather(row, ctx, algorithm="2d"), "same number of ranks")


@check
def heap_errors() -> None:
    info = tdcoll.heap_info()
    error = expect_raises(
        tdcoll.HeapExhaustedError, lambda: tdcoll.empty(2 * info.total, torch.uint8), "NVSHMEM_SYMMETRIC_SIZE"
    )
    expect(str(2 * info.total) in str(error) and str(info.free) in str(error), str(error))
    if world() > 1:
        expect_raises(tdcoll.RankMismatchError, lambda: tdcoll.empty(100 + rank(), torch.uint8), "rank 1: 101")
        debug = tdcoll.CollectiveContext(max_bytes_per_rank=1024, debug=True)
        mine = torch.zeros(4 + rank() % 2, dtype=torch.uint8, device=device())
        expect_raises(tdcoll.RankMismatchError, lambda: tdcoll.all_gather(mine, debug), "all_gather arguments")
        tdcoll.all_gather(mine[:4], debug)
        debug.close()
    expect_raises(tdcoll.NotSymmetricError, lambda: tdcoll.free(torch.zeros(3, device=device())), "tensor")
    expect(tdcoll.heap_info() == info, "a refused call must leave the heap as it was")
    tdcoll.initialize()
    expect_raises(tdcoll.AlreadyInitializedError, lambda: tdcoll.initialize(heap_bytes=12345 << 10), "12641280")


def replay_captured(nbytes: int, captured: int, replays: int) -> None:
    """``captured`` calls, each out of place and in place, as one graph, replayed with eager calls in between."""
    ctx = tdcoll.CollectiveContext(max_bytes_per_rank=nbytes)
    buffer = tdcoll.empty(world() * nbytes, torch.uint8)
    segment = buffer[rank() * nbytes : (rank() + 1) * nbytes]
    base = torch.stack([pattern(r, 0, nbytes) for r in everyone()]).to(torch.int32)
    step = torch.zeros((), dtype=torch.int32, device=device())
    wrong = torch.zeros((), dtype=torch.int64, device=device())

    kinds = [kind for kind in algorithms(nbytes) for _ in range(2)] if captured > 2 else algorithms(nbytes)

    def one(algorithm: str) -> None:
        step.add_(1)
        wanted = ((base + step) % 251).to(torch.uint8)
        got = tdcoll.all_gather(wanted[rank()].clone(), ctx, algorithm=algorithm)
        wrong.add_((got != wanted.view(-1)).sum())
        segment.copy_(wanted[rank()])
        tdcoll.all_gather_in_place(buffer, ctx, algorithm=algorithm)
        wrong.add_((buffer != wanted.view(-1)).sum())

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
    expect(int(wrong) == 0, f"{int(wrong)} wrong bytes, {captured} calls of {nbytes} bytes captured")
    expect(int(step) >= replays * captured, "the graph did not run")
    ctx.close()
    tdcoll.free(buffer)


@check(gpu_only=True)
def graphs() -> None:
    """Odd and even numbers of captured calls."""
    for nbytes, captured in ((1000, 1), (4096, 2), (65536, 3), (1 << 20, 5), (512, 20)):
        replay_captured(nbytes, captured, scaled(50, 0, shared_gpus=11))


@check(gpu_only=True)
def capture_errors() -> None:
    ctx = tdcoll.CollectiveContext(max_bytes_per_rank=4096)
    data = torch.zeros(128, device=device())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        expect_raises(tdcoll.ContextError, lambda: tdcoll.all_gather(data, ctx), "capturing")
        data.add_(1)
    ctx.close()


@check(gpu_only=True)
def streams() -> None:
    """A context on a side stream, and the drop-in call on changing streams."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), tdcoll.CollectiveContext(max_bytes_per_rank=4096) as ctx:
        for call in range(50):
            got = tdcoll.all_gather(pattern(rank(), call, 4096), ctx)
            expect(torch.equal(got, expected(everyone(), call, 4096)), f"side stream, call {call}")
    outputs = []
    for call in range(50):
        stream = (side, torch.cuda.current_stream())[call % 2]
        with torch.cuda.stream(stream):
            mine = pattern(rank(), call, 4096)
            out = torch.empty(world() * 4096, dtype=torch.uint8, device=device())
            if rank() == call % world():
                torch.cuda._sleep(100_000)
            tdcoll.all_gather_into_tensor(out, mine)
            outputs.append(out)
    torch.cuda.synchronize()
    for call, out in enumerate(outputs):
        expect(torch.equal(out, expected(everyone(), call, 4096)), f"changing streams, call {call}")


def owed(algorithm: str, absent: int) -> set[int]:
    """Whose data does not come to this rank when one is absent, which passes some on."""
    topology = tdcoll.topology()
    if algorithm == "ring":
        return {(rank() - 1) % world()}
    mates = topology.members[topology.node]
    if algorithm in ("2d", "ll") and absent in mates:
        return {ranks[mates.index(absent)] for ranks in topology.members}
    return {absent}


def one_stays_away(algorithm: str) -> None:
    """One rank does not make the second call; the others must say whose data they lack. On a ring they name the rank
    before them."""
    absent = world() - 1
    ctx = tdcoll.CollectiveContext(max_bytes_per_rank=256, timeout_s=patience_s())
    data = pattern(rank(), 0, 256)
    tdcoll.all_gather(data, ctx, algorithm=algorithm)
    if rank() != absent:
        tdcoll.all_gather(data, ctx, algorithm=algorithm)
        error = expect_raises(tdcoll.CollectiveTimeout, ctx.check)
        told = error.peer in owed(algorithm, absent)  # type: ignore[attr-defined]
        expect(told and error.rank == rank() and error.epoch == 2, str(error))  # type: ignore[attr-defined]
        expect_raises(tdcoll.CollectiveTimeout, lambda: tdcoll.all_gather(data, ctx))
        ctx.close()
    runtime.current().failed = True  # so that the absent rank, too, leaves without the others


@check
def timeouts_name_the_peer() -> str:
    """The last check, because its contexts are never given back."""
    if world() == 1:
        return "one rank waits for nobody"
    kinds = algorithms(256)
    for algorithm in kinds:
        runtime.current().failed = False  # what failed is over, and all ranks are here
        one_stays_away(algorithm)
    return f"peer named by {', '.join(kinds)}"


if __name__ == "__main__":
    run()
