# SPDX-License-Identifier: Apache-2.0
"""Results of the sparse all-reduce, as users call it, on every rank of a job: eager, padded, in graphs, on streams."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from harness import check, device, everyone, expect, expect_raises, rank, run, scaled, simulated, world
from sparse_parts import Part, Shape, call, compare, compare_rows, part, parts, reduced

import tdcoll
from tdcoll import runtime
from tdcoll.collectives.sparse_all_reduce import policy


def algorithms() -> tuple[str, ...]:
    return ("owner", "gather", "dense", "auto")


CASES: list[tuple[str, torch.dtype, Shape]] = [
    ("sum", torch.float32, (4,)),
    ("sum", torch.bfloat16, (3,)),
    ("sum", torch.int64, (2, 2)),
    ("mean", torch.float32, (4,)),
    ("mean", torch.bfloat16, (8,)),
    ("max", torch.float32, (4,)),
    ("min", torch.bfloat16, (8,)),
    ("prod", torch.float32, (4,)),
    ("max", torch.int32, ()),
]
MORE_CASES: list[tuple[str, torch.dtype, Shape]] = [
    ("sum", torch.float16, (64,)),
    ("sum", torch.float64, (5,)),
    ("sum", torch.int32, (33,)),
    ("prod", torch.int64, (4,)),
    ("min", torch.float16, (1,)),
]


@check
def sparse_operations() -> None:
    """Operations, dtypes, shapes, algorithms."""
    rows = 12
    with tdcoll.SparseContext(max_rows_per_rank=rows, max_row_bytes=256) as ctx:
        for number, (op, dtype, shape) in enumerate(CASES + ([] if simulated() else MORE_CASES)):
            for algorithm in algorithms():
                # Powers of two are exact whatever they are divided by, if that is one, too.
                every = parts(number, rows, 20, shape, dtype, most=2)
                if op == "mean" and world() & (world() - 1):
                    every = [Part(p.ids, p.values * world()) for p in every]
                call(ctx, every, 20, op, algorithm=algorithm, copy=bool(number % 2))
        ctx.check()


@check
def sparse_nan() -> None:
    """NaN of one rank is everybody's, whoever it is, and infinities are ordinary numbers."""
    nan, inf = float("nan"), float("inf")
    ids = torch.tensor([1], device=device())
    with tdcoll.SparseContext(max_rows_per_rank=1, max_row_bytes=64) as ctx:
        for dtype in (torch.float32, torch.bfloat16):
            rows = [torch.full((1, world() + 2), float(r), device=device()) for r in everyone()]
            for r, values in enumerate(rows):
                values[0, r] = nan  # each rank has one of its own
                values[0, -1] = inf if r == 0 else values[0, -1]
            for op, last in (("max", inf), ("min", inf if world() == 1 else 1.0)):
                for algorithm in algorithms():
                    mine = Part(ids, rows[rank()].to(dtype)).sparse(2)
                    got = tdcoll.sparse_all_reduce(mine, ctx=ctx, op=op, algorithm=algorithm).values()[0].tolist()
                    middle = float(world() - 1) if op == "max" else 0.0
                    expect(all(x != x for x in got[:-2]) and got[-2:] == [middle, last], f"{op}, {algorithm}: {got}")


@check
def sparse_zeros() -> None:
    """No result is -0.0: of one rank's row, of its repeated rows, of all ranks' zeros, of what is rounded to zero."""
    with tdcoll.SparseContext(max_rows_per_rank=8, max_row_bytes=64) as ctx:
        ids = torch.tensor([0, 1, 1, 2 + rank(), 2 + rank()], device=device())
        more = [] if simulated() else [torch.bfloat16, torch.float64]
        for dtype in (torch.float16, torch.float32, *more):
            values = torch.full((5, 3), -0.0, dtype=dtype, device=device())
            values[1, 1] = values[0, 2] = 0.0 if rank() % 2 else -0.0
            for op in ("sum", "max", *([] if simulated() else ["min", "prod"]), "mean"):
                if op == "mean" and dtype == torch.float16 and world() > 1:
                    values[3, 0] = -6e-8  # the smallest number: a half of it is rounded to zero
                for algorithm in ("owner", "gather", "dense"):
                    got = tdcoll.sparse_all_reduce(
                        Part(ids, values).sparse(2 + world()), ctx=ctx, op=op, algorithm=algorithm
                    )
                    signs = got.values().signbit()
                    what = f"{op}, {dtype}, {algorithm}: {got.values().tolist()}"
                    expect(got.values().shape == (2 + world(), 3) and not signs.any() and not got.values().any(), what)
        ctx.check()


@check
def sparse_few_and_none() -> None:
    """Rows on one rank, on none; tables of 2**40 rows; rows of no elements."""
    with tdcoll.SparseContext(max_rows_per_rank=8, max_row_bytes=64, debug=True) as ctx:
        for algorithm in ("owner", "gather"):
            for shape in ((4,), (), (0,)):
                none = [part(r, 1, 0, 10, shape) for r in everyone()]
                call(ctx, none, 10, algorithm=algorithm)
                call(ctx, none, 0, algorithm=algorithm)
            some = [part(r, 2, 5 if r == world() - 1 else 0, 10) for r in everyone()]
            call(ctx, some, 10, algorithm=algorithm)
            call(ctx, some, 10, "max", algorithm=algorithm)
            call(ctx, parts(3, 8, 1 << 40), 1 << 40, algorithm=algorithm)
            call(ctx, parts(4, 8, 9), 1 << 40, algorithm=algorithm)  # many rows in common
            call(ctx, parts(5, 8, 9), 9, algorithm=algorithm)
        ctx.check()


def zipf(of: int, number: int, count: int, num_rows: int, dim: int, dtype: torch.dtype) -> Part:
    """Rows as words of a text: few of them often, on every rank; -1, 0 or 1, so that bf16 holds every sum."""
    chooser = torch.Generator().manual_seed(77 * number + of)
    shares = 1 / torch.arange(1, num_rows + 1, dtype=torch.float64)
    ids = torch.multinomial(shares, count, replacement=True, generator=chooser)
    values = torch.randint(-1, 2, (count, dim), generator=chooser)
    return Part(ids.to(device()), values.to(device()).to(dtype))


@check
def sparse_text_like_rows() -> str:
    """Repeated rows, some of them very often; the reference adds them up in a table."""
    count, num_rows = scaled(5000, 60), scaled(100_000, 150)
    dims = (8,) if simulated() else (64, 512)
    found = 0
    for dim in dims:
        for dtype in (torch.float32, torch.bfloat16):
            with tdcoll.SparseContext(max_rows_per_rank=count, max_row_bytes=dim * dtype.itemsize) as ctx:
                for number in range(scaled(3, 1)):
                    every = [zipf(r, number, count, num_rows, dim, dtype) for r in everyone()]
                    table = torch.zeros(num_rows, dim, device=device())
                    for p in every:
                        table.index_add_(0, p.ids, p.values.float())
                    union = torch.cat([p.ids for p in every]).unique()
                    for coalesced in (False, True):
                        mine = every[rank()].sparse(num_rows)
                        got = tdcoll.sparse_all_reduce(
                            mine.coalesce() if coalesced else mine, ctx=ctx, algorithm="owner"
                        )
                        what = f"{dim} x {dtype}, coalesced {coalesced}"
                        compare_rows(got.indices()[0], got.values(), union, table[union], what)
                    found = len(union)
                ctx.check()
    return f"{count} rows per rank, {found} different ones of {num_rows}"


@check
def sparse_dense_by_policy() -> str:
    """ "auto" reduces the whole table where several nodes bring most of it each, also without a context."""
    rows, dim = scaled(4096, 64), 512
    ids = torch.arange(rows, device=device())
    every = [Part(ids, part(r, 1, rows, rows, (dim,)).values) for r in everyone()]
    nodes, gathered = tdcoll.topology().n_nodes, policy.GATHERED_BYTES
    with tdcoll.SparseContext(max_rows_per_rank=rows, max_row_bytes=4 * dim) as ctx:
        policy.GATHERED_BYTES = 0  # the simulator's rows are few, and would be gathered
        try:
            for num_rows, wanted in ((rows, "dense" if nodes > 1 else "owner"), (2 * rows, "owner")):
                call(ctx, every, num_rows)
                expect(ctx.last_algorithm == wanted, f"{rows} rows of {num_rows}: {ctx.last_algorithm}")
                made = tdcoll.sparse_all_reduce(every[rank()].sparse(num_rows))
                compare(made, every, what=f"drop-in, {rows} rows of {num_rows}")
                of_tdcoll = runtime.current().contexts["sparse", tuple(everyone())]
                expect(of_tdcoll.last_algorithm == wanted, f"drop-in: {of_tdcoll.last_algorithm}")
        finally:
            policy.GATHERED_BYTES = gathered
        ctx.check()
    return f"{nodes} node(s)"


@check
def sparse_subgroups() -> None:
    """A strided half of the ranks, as a ProcessGroup and as a list; reversed ranks."""
    halves = [list(range(first, world(), 2)) for first in range(min(2, world()))]
    groups = [dist.new_group(half) for half in halves]
    mine = rank() % 2 if world() > 1 else 0
    half = halves[mine]
    for group in (groups[mine], half, list(reversed(half))):
        order = half if not isinstance(group, list) else group
        with tdcoll.SparseContext(group, max_rows_per_rank=10, max_row_bytes=16) as ctx:
            expect(ctx.rank == order.index(rank()), f"group rank {ctx.rank}")
            every = [part(r, 1, 10, 15) for r in order]
            for algorithm in ("owner", "gather", "dense"):
                got = tdcoll.sparse_all_reduce(every[ctx.rank].sparse(15), ctx=ctx, algorithm=algorithm)
                compare(got, every, what=f"{order}, {algorithm}")


@check
def sparse_many_calls_with_a_straggler() -> str:
    """Calls in a row, each compared on the device; one rank at a time is late."""
    calls, num_rows, rows = scaled(200, 4, shared_gpus=40), scaled(500, 20), scaled(128, 8)
    wrong = torch.zeros((), dtype=torch.int64, device=device())
    chooser = random.Random(5)
    with tdcoll.SparseContext(max_rows_per_rank=rows, max_row_bytes=64) as ctx:
        base = [part(r, 0, rows, num_rows, (16,)) for r in everyone()]
        for number in range(calls):
            every = [Part((p.ids + number * (r + 1)) % num_rows, p.values + number % 5) for r, p in enumerate(base)]
            late, cycles = chooser.randrange(world()), chooser.choice((0, 0, 20_000, 200_000))
            if rank() == late and cycles and not simulated():
                torch.cuda._sleep(cycles)
            got = tdcoll.sparse_all_reduce(
                every[rank()].sparse(num_rows),
                ctx=ctx,
                algorithm=("owner", "gather", "owner")[number % 3],
                copy=number % 2 == 0,
            )
            table = torch.zeros(num_rows, 16, device=device())
            for p in every:
                table.index_add_(0, p.ids, p.values)
            wrong += (torch.zeros_like(table).index_add_(0, got.indices()[0], got.values()) != table).sum()
        ctx.check()
    expect(int(wrong) == 0, f"{int(wrong)} wrong elements in {calls} calls")
    return f"{calls} calls"


# ---------------------------------------------------------------------- results of fixed size


def _compare_padded(got: tdcoll.PaddedRows, every: Sequence[Part], what: str) -> None:
    ids, values = reduced(every)
    union = len(ids)
    expect(got.count.device == device() and got.count.tolist() == [union], f"{what}: {got.count}, not {union}")
    compare_rows(got.indices[:union], got.values[:union], ids, values, what)
    expect(not got.indices[union:].any() and not got.values[union:].any(), f"{what}: padding")


@check
def sparse_padded() -> None:
    with tdcoll.SparseContext(max_rows_per_rank=16, max_row_bytes=512) as ctx:
        for algorithm in ("owner", "gather"):
            for number in range(3):
                every = parts(number, 16 - number, 25, dtype=(torch.float32, torch.bfloat16)[number % 2])
                mine = every[rank()]
                got = tdcoll.sparse_all_reduce_padded(mine.ids, mine.values, 25, ctx=ctx, algorithm=algorithm)
                expect(got.indices.shape == (16 * world(),), f"{got.indices.shape}")
                _compare_padded(got, every, f"padded, {algorithm}, call {number}")
                call(ctx, every, 25, algorithm=algorithm)
            bad = torch.tensor([25 if rank() == world() - 1 else 1], device=device())
            ones = torch.ones(1, 4, device=device())
            got = tdcoll.sparse_all_reduce_padded(bad, ones, 25, ctx=ctx, algorithm=algorithm)
            expect(got.count.tolist() == [0] and not got.values.any(), "0 rows where an index is out of range")
            expect_raises(ValueError, ctx.check, "sparse_all_reduce_padded", f"rank {world() - 1} ", "0..24")
            ctx.check()
        dense = partial(tdcoll.sparse_all_reduce_padded, bad, ones, 25, ctx=ctx, algorithm="dense")
        expect_raises(ValueError, dense, "algorithm", "dense")


def _replay(captured: int, replays: int, algorithm: str, coalesced: bool, dtype: torch.dtype, rows: int) -> None:
    """``captured`` calls as one graph, with other rows and values in every replay, and eager calls in between."""
    num_rows, dim = 40 * rows, 64
    ctx = tdcoll.SparseContext(max_rows_per_rank=rows, max_row_bytes=dim * dtype.itemsize)
    step = torch.zeros((), dtype=torch.int64, device=device())
    wrong = torch.zeros((), dtype=torch.int64, device=device())
    if coalesced:
        base = [
            Part(torch.arange(rows, device=device()) * (r % 3 + 2), part(r, 1, rows, 9, (dim,)).values)
            for r in everyone()
        ]
    else:
        base = [part(r, 1, rows, num_rows, (dim,)) for r in everyone()]

    def one() -> None:
        step.add_(1)
        every = []
        for r, p in enumerate(base):
            ids = p.ids + step % rows if coalesced else (p.ids + step * (r + 1)) % num_rows
            every.append(Part(ids, (p.values + step % 5).to(dtype)))
        mine = every[rank()]
        got = tdcoll.sparse_all_reduce_padded(
            mine.ids, mine.values, num_rows, ctx=ctx, algorithm=algorithm, coalesced=coalesced
        )
        table = torch.zeros(num_rows, dim, device=device())
        there = torch.zeros(num_rows, dtype=torch.int64, device=device())
        for p in every:
            table.index_add_(0, p.ids, p.values.float())
            there.index_fill_(0, p.ids, 1)
        ours = torch.zeros_like(table).index_add_(0, got.indices, got.values.float())
        wrong.add_((ours != table).sum() + (got.count[0] != there.sum()))

    one()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(captured):
            one()
    for replay in range(replays):
        graph.replay()
        if replay % 7 == 3:
            one()
    ctx.check()
    what = f"{captured} calls captured, {algorithm}, {dtype}, coalesced {coalesced}"
    expect(int(wrong) == 0, f"{int(wrong)} wrong elements, {what}")
    expect(int(step) >= replays * captured, f"the graph did not run, {what}")
    ctx.close()


@check(gpu_only=True)
def sparse_graphs() -> None:
    """Odd and even numbers of captured calls, of one epoch (gather) and of several (owner)."""
    replays = scaled(50, 0, shared_gpus=11)
    for captured in (1, 2, 3):
        _replay(captured, replays, "owner", False, torch.float32, 300)
        _replay(captured, replays, "gather", False, torch.float32, 20)
        _replay(captured, replays, "owner", True, torch.bfloat16, 300)


# ---------------------------------------------------------------------- streams


@check(gpu_only=True)
def sparse_streams() -> None:
    """A context on a side stream, and calls without one on changing streams."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), tdcoll.SparseContext(max_rows_per_rank=100, max_row_bytes=256) as ctx:
        for number in range(20):
            call(ctx, parts(number, 100, 300, (64,)), 300, algorithm=("owner", "gather")[number % 2], copy=False)
    torch.cuda.current_stream().wait_stream(side)
    every = [parts(number, 200, 300, (64,)) for number in range(6)]
    torch.cuda.synchronize()
    results = []
    for number in range(30):
        stream = (side, torch.cuda.current_stream())[number % 2]
        with torch.cuda.stream(stream):
            mine = every[number % 6][rank()].sparse(300)
            if rank() == number % world():
                torch.cuda._sleep(100_000)
            results.append(tdcoll.sparse_all_reduce(mine))
    torch.cuda.synchronize()
    for number, got in enumerate(results):
        compare(got, every[number % 6], what=f"changing streams, call {number}")


if __name__ == "__main__":
    run()
