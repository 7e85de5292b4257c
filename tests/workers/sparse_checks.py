# SPDX-License-Identifier: Apache-2.0
"""Results of the sparse all-reduce, as users call it, on every rank of a job: eager, padded, in
graphs, on streams."""

from __future__ import annotations

import random

import torch
from harness import check, device, everyone, expect, rank, scaled, simulated, world
from sparse_parts import Rows, Shape, call, compare, coo, part, parts

import tdcoll

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


def special(op: str, dtype: torch.dtype) -> list[Rows]:
    """What ranks bring with zeros of both signs, in one row and in repeated ones, numbers that a
    mean rounds to zero, NaN of each rank, and an infinity of the first."""
    found = []
    for r in everyone():
        ids = torch.tensor([0, 1, 1, 2 + r, 2 + r, 2 + world()], device=device())
        values = torch.full((6, world() + 2), -0.0, dtype=dtype, device=device())
        values[1, 1] = values[0, 2] = 0.0 if r % 2 else -0.0
        if op == "mean" and dtype == torch.float16 and world() > 1:
            values[3, 0] = -6e-8  # the smallest number: a half of it is rounded to zero
        values[5] = r * world()
        values[5, r] = float("nan")
        if r == 0:
            values[5, -1] = float("inf")
        found.append(Rows(ids, values))
    return found


@check
def sparse_operations() -> None:
    """Operations, dtypes, shapes, algorithms, special numbers."""
    rows = 12
    with tdcoll.SparseContext(max_rows_per_rank=rows, max_row_bytes=256) as ctx:
        for number, (op, dtype, shape) in enumerate(CASES + ([] if simulated() else MORE_CASES)):
            for algorithm in ("owner", "gather", "dense", "auto"):
                # Powers of two are exact whatever they are divided by, if that is one, too.
                every = parts(number, rows, 20, shape, dtype, most=2)
                if op == "mean" and world() & (world() - 1):
                    every = [Rows(p.indices, p.values * world()) for p in every]
                call(ctx, every, 20, op, algorithm=algorithm, copy=bool(number % 2))
                if dtype.is_floating_point:
                    call(ctx, special(op, dtype), 3 + world(), op, algorithm=algorithm)
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


def zipf(of: int, number: int, count: int, num_rows: int, dim: int, dtype: torch.dtype) -> Rows:
    """Rows as words of a text: few of them often, on every rank; -1, 0 or 1, so that bf16 holds
    every sum."""
    chooser = torch.Generator().manual_seed(77 * number + of)
    shares = 1 / torch.arange(1, num_rows + 1, dtype=torch.float64)
    ids = torch.multinomial(shares, count, replacement=True, generator=chooser)
    values = torch.randint(-1, 2, (count, dim), generator=chooser)
    return Rows(ids.to(device()), values.to(device()).to(dtype))


@check
def sparse_text_like_rows() -> str:
    """Repeated rows, some of them very often; the reference adds them up in a table."""
    count, num_rows = scaled(5000, 60), scaled(100_000, 150)
    dims = (8,) if simulated() else (64, 512)
    found = 0
    for dim in dims:
        for dtype in (torch.float32, torch.bfloat16):
            with tdcoll.SparseContext(
                max_rows_per_rank=count, max_row_bytes=dim * dtype.itemsize
            ) as ctx:
                for number in range(scaled(3, 1)):
                    every = [zipf(r, number, count, num_rows, dim, dtype) for r in everyone()]
                    for coalesced in (False, True):
                        mine = coo(every[rank()], num_rows)
                        mine = mine.coalesce() if coalesced else mine
                        got = tdcoll.sparse_all_reduce(mine, ctx=ctx, algorithm="owner")
                        what = f"{dim} x {dtype}, coalesced {coalesced}"
                        compare(got.indices()[0], got.values(), every, what=what)
                    found = got._nnz()
                ctx.check()
    return f"{count} rows per rank, {found} different ones of {num_rows}"


@check
def sparse_many_calls_with_a_straggler() -> str:
    """Calls in a row, each compared on the device; one rank at a time is late."""
    calls, num_rows, rows = scaled(200, 4, shared_gpus=40), scaled(500, 20), scaled(128, 8)
    wrong = torch.zeros((), dtype=torch.int64, device=device())
    chooser = random.Random(5)
    with tdcoll.SparseContext(max_rows_per_rank=rows, max_row_bytes=64) as ctx:
        base = [part(r, 0, rows, num_rows, (16,)) for r in everyone()]
        for number in range(calls):
            every = [
                Rows((p.indices + number * (r + 1)) % num_rows, p.values + number % 5)
                for r, p in enumerate(base)
            ]
            late, cycles = chooser.randrange(world()), chooser.choice((0, 0, 20_000, 200_000))
            if rank() == late and cycles and not simulated():
                torch.cuda._sleep(cycles)
            got = tdcoll.sparse_all_reduce(
                coo(every[rank()], num_rows),
                ctx=ctx,
                algorithm=("owner", "gather", "owner")[number % 3],
                copy=number % 2 == 0,
            )
            table = torch.zeros(num_rows, 16, device=device())
            for p in every:
                table.index_add_(0, p.indices, p.values)
            wrong += (
                torch.zeros_like(table).index_add_(0, got.indices()[0], got.values()) != table
            ).sum()
        ctx.check()
    expect(int(wrong) == 0, f"{int(wrong)} wrong elements in {calls} calls")
    return f"{calls} calls"


# ---------------------------------------------------------------------- results of fixed size


def _replay(
    captured: int,
    replays: int,
    algorithm: str,
    coalesced: bool,
    dtype: torch.dtype,
    rows: int,
    alone: bool = False,
) -> None:
    """``captured`` calls as one graph, with other rows and values in every replay, and eager calls
    in between.

    ``alone``: on rank 0 only, which also captures a graph that it doesn't replay; the other ranks
    make all calls eagerly.
    """
    num_rows, dim = 40 * rows, 64
    ctx = tdcoll.SparseContext(max_rows_per_rank=rows, max_row_bytes=dim * dtype.itemsize)
    step = torch.zeros((), dtype=torch.int64, device=device())
    wrong = torch.zeros((), dtype=torch.int64, device=device())
    if coalesced:
        base = [
            Rows(
                torch.arange(rows, device=device()) * (r % 3 + 2),
                part(r, 1, rows, 9, (dim,)).values,
            )
            for r in everyone()
        ]
    else:
        base = [part(r, 1, rows, num_rows, (dim,)) for r in everyone()]

    def one() -> None:
        step.add_(1)
        every = []
        for r, p in enumerate(base):
            ids = p.indices + step % rows if coalesced else (p.indices + step * (r + 1)) % num_rows
            every.append(Rows(ids, (p.values + step % 5).to(dtype)))
        mine = every[rank()]
        got = tdcoll.sparse_all_reduce_padded(
            mine.indices, mine.values, num_rows, ctx=ctx, algorithm=algorithm, coalesced=coalesced
        )
        table = torch.zeros(num_rows, dim, device=device())
        there = torch.zeros(num_rows, dtype=torch.int64, device=device())
        for p in every:
            table.index_add_(0, p.indices, p.values.float())
            there.index_fill_(0, p.indices, 1)
        ours = torch.zeros_like(table).index_add_(0, got.indices, got.values.float())
        wrong.add_((ours != table).sum() + (got.count[0] != there.sum()))

    one()
    torch.cuda.synchronize()
    graphs = [torch.cuda.CUDAGraph() for _ in range(1 + alone)] if rank() == 0 or not alone else []
    for graph in graphs:
        with torch.cuda.graph(graph):
            for _ in range(captured):
                one()
    for replay in range(replays):
        if graphs:
            graphs[-1].replay()
        else:
            for _ in range(captured):
                one()
        if replay % 7 == 3:
            one()
    ctx.check()
    what = f"{captured} calls captured{' on rank 0' * alone}, {algorithm}, {dtype}, coalesced {coalesced}"
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


@check(gpu_only=True)
def sparse_graphs_on_one_rank() -> None:
    """A rank replays while the others call, and has captured a graph that it doesn't use."""
    replays = scaled(50, 0, shared_gpus=11)
    for captured in (1, 2):
        _replay(captured, replays, "owner", False, torch.float32, 300, alone=True)
        _replay(captured, replays, "gather", False, torch.float32, 20, alone=True)


# ---------------------------------------------------------------------- streams


@check(gpu_only=True)
def sparse_streams() -> None:
    """A context on a side stream, and calls without one on changing streams."""
    side_stream = torch.cuda.Stream()
    side_stream.wait_stream(torch.cuda.current_stream())
    with (
        torch.cuda.stream(side_stream),
        tdcoll.SparseContext(max_rows_per_rank=100, max_row_bytes=256) as ctx,
    ):
        for number in range(20):
            call(
                ctx,
                parts(number, 100, 300, (64,)),
                300,
                algorithm=("owner", "gather")[number % 2],
                copy=False,
            )
    torch.cuda.current_stream().wait_stream(side_stream)
    every = [parts(number, 200, 300, (64,)) for number in range(6)]
    torch.cuda.synchronize()
    results = []
    for number in range(30):
        stream = (side_stream, torch.cuda.current_stream())[number % 2]
        with torch.cuda.stream(stream):
            mine = coo(every[number % 6][rank()], 300)
            if rank() == number % world():
                torch.cuda._sleep(100_000)
            results.append(tdcoll.sparse_all_reduce(mine))
    torch.cuda.synchronize()
    for number, got in enumerate(results):
        compare(
            got.indices()[0],
            got.values(),
            every[number % 6],
            what=f"changing streams, call {number}",
        )
