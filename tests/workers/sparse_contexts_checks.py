# SPDX-License-Identifier: Apache-2.0
"""Contexts of the sparse all-reduce, on every rank of a job: tdcoll's own, and what is said of
wrong calls."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from harness import check, device, everyone, expect, expect_raises, rank, world
from sparse_parts import Rows, call, compare, coo, part, parts

import tdcoll
from tdcoll import runtime

# ---------------------------------------------------------------------- memory


@check
def sparse_without_context() -> None:
    contexts = runtime.current().contexts
    for number, (count, shape) in enumerate(((5, (2,)), (3, ()), (400, (2,)), (2, (40,)))):
        every = [part(r, number, count if r == world() - 1 else 2, 900, shape) for r in everyone()]
        call(None, every, 900)
        mine = every[rank()]
        compare(*tdcoll.sparse_all_reduce_rows(*mine, 900), every, what="rows without a context")
    expect(sum("sparse" in key for key in contexts) == 1, f"{list(contexts)}")


# ---------------------------------------------------------------------- errors


def _goes_on(ctx: tdcoll.SparseContext) -> None:
    for algorithm in ("owner", "auto"):
        call(ctx, parts(9, 6, 40), 40, algorithm=algorithm)


@check
def sparse_errors_of_one_rank() -> None:
    """What is wrong with the lists of the last rank is an error on all of them, and the context
    goes on."""
    last = rank() == world() - 1
    with tdcoll.SparseContext(max_rows_per_rank=8, max_row_bytes=16 << 10) as ctx:
        for algorithm in ("owner", "gather"):
            count = 9 if last else 3
            many = Rows(torch.arange(count, device=device()), torch.ones(count, 4, device=device()))
            reduce_many = partial(
                tdcoll.sparse_all_reduce, coo(many, 40), ctx=ctx, algorithm=algorithm
            )
            expect_raises(
                tdcoll.ContextError,
                reduce_many,
                "9 different rows",
                "capacity of 8",
                "max_rows_per_rank=9",
            )
            _goes_on(ctx)
            for ids, coalesced, text in (
                ([3, 40], False, "must be in 0..39"),
                ([-1, 3], False, "must be in 0..39"),
                ([9, 3], True, "not ascending"),
                ([3, 3], True, "not different"),
            ):
                given = (
                    torch.tensor(ids if last else [1, 2], device=device()),
                    torch.ones(2, 4, device=device()),
                    40,
                )
                options = {"coalesced": coalesced, "algorithm": algorithm}
                reduce_bad = partial(tdcoll.sparse_all_reduce_rows, *given, ctx=ctx, **options)
                expect_raises(ValueError, reduce_bad, f"indices of rank {world() - 1} ", text)
                _goes_on(ctx)
    with tdcoll.SparseContext(max_rows_per_rank=8, max_row_bytes=16, max_union_rows=5) as ctx:
        some = torch.arange(6, device=device())[:: 1 if last else 2]
        large = partial(
            tdcoll.sparse_all_reduce_rows,
            some,
            torch.ones(len(some), 4, device=device()),
            40,
            ctx=ctx,
        )
        expect_raises(tdcoll.ContextError, large, "6 different rows together", "max_union_rows=6")
        call(ctx, [part(r, 1, 5, 5) for r in everyone()], 5)


@check(gpu_only=True)
def sparse_other_devices() -> None:
    """What tests on CPUs cannot refuse: tensors on another device."""
    mine = Rows(torch.tensor([2, 1], device=device()), torch.ones(2, 4, device=device()))
    with tdcoll.SparseContext(max_rows_per_rank=8, max_row_bytes=16) as ctx:
        reduce = partial(tdcoll.sparse_all_reduce, ctx=ctx)
        rows = partial(tdcoll.sparse_all_reduce_rows, mine.indices.cpu(), mine.values, 9, ctx=ctx)
        expect_raises(ValueError, partial(reduce, coo(mine, 9).cpu()), "tensor", "cuda", "cpu")
        expect_raises(ValueError, rows, "indices", "cuda", "cpu")
        call(ctx, [mine] * world(), 9)


@check(gpu_only=True)
def sparse_capture_errors() -> None:
    mine = Rows(torch.tensor([2, 1], device=device()), torch.ones(2, 4, device=device()))
    ctx = tdcoll.SparseContext(max_rows_per_rank=8, max_row_bytes=64, grow=True)
    padded: Callable[..., Any] = tdcoll.sparse_all_reduce_padded
    counted = torch.zeros((), device=device())
    for eager in (False, True):
        if eager:
            call(ctx, [mine] * world(), 9)
            padded(mine.indices, mine.values, 9, ctx=ctx)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            expect_raises(
                tdcoll.ContextError,
                lambda: tdcoll.sparse_all_reduce(coo(mine, 9), ctx=ctx),
                "CUDA graph",
                "padded",
            )
            if not eager:
                expect_raises(
                    tdcoll.ContextError,
                    lambda: padded(mine.indices, mine.values, 9, ctx=ctx),
                    "before",
                )
            expect_raises(
                tdcoll.ContextError,
                lambda: padded(mine.indices, mine.values.double(), 9, ctx=ctx),
                "before",
            )
            expect_raises(
                tdcoll.ContextError,
                lambda: padded(mine.indices, mine.values, 1 << 24, ctx=ctx),
                "before",
            )
            counted.add_(1)
        graph.replay()
    expect(int(counted) == 2, "a refused call must not spoil the capture")
    call(ctx, [mine] * world(), 9)
    many = Rows(torch.arange(9, device=device()), torch.ones(9, 4, device=device()))
    grow = partial(tdcoll.sparse_all_reduce, coo(many, 9), ctx=ctx, algorithm="owner")
    expect_raises(tdcoll.ContextError, grow, "captured in a CUDA graph")
    ctx.close()
