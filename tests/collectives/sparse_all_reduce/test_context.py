# SPDX-License-Identifier: Apache-2.0
"""The life of a SparseContext: its facts, its memory, and the arguments that make it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import on_ranks

import tdcoll
from tdcoll import runtime
from tdcoll.collectives.sparse_all_reduce.call import SparseCall
from tdcoll.runtime.heap import Arena

from .calls import (
    DIM,
    IDS,
    PART,
    ROWS,
    N,
    everywhere,
    ids_of,
    make,
    mine,
    reduce_and_compare,
    rows_of,
    same,
    sparse,
    symmetric_bytes,
    total,
)


@pytest.mark.parametrize("algorithm", ["owner", "gather"])
@on_ranks(2)
def test_fewer_blocks_do_the_same_work(pe: int, algorithm: str) -> None:
    with make(max_blocks=1 + pe) as ctx:  # it need not be the same on all ranks
        assert SparseCall.workers(SimpleNamespace(ctx=ctx), 99) == 1 + pe  # type: ignore[arg-type]
        for call in range(3):
            reduce_and_compare(ctx, call, algorithm=algorithm)


@on_ranks(4, ranks_per_node=2)
def test_facts(pe: int) -> None:
    with make(max_union_rows=40) as ctx:
        assert (ctx.rank, ctx.world_size) == (pe, 4)
        assert (ctx.max_rows_per_rank, ctx.max_row_bytes, ctx.max_union_rows) == (16, 64, 40)
        assert ctx.topology == tdcoll.topology()
        assert ctx.device == tdcoll.device()
        assert (ctx.grow, ctx.debug, ctx.closed) == (False, False, False)
        sizes = "16 rows of 64 bytes per rank, 40 together"
        assert (
            repr(ctx) == f"<SparseContext rank {pe}, 4 rank(s) on 2 node(s) (2 + 2), {sizes}, open>"
        )
        reduce_and_compare(ctx)
    assert ctx.closed
    assert repr(ctx).endswith("closed>")
    with make(grow=True) as ctx:
        assert ctx.max_union_rows == 4 * 16
        assert repr(ctx).endswith("64 together, grows, open>")


@pytest.mark.parametrize(
    ("world", "rows", "row_bytes", "union"),
    [
        (4, 256, 512, None),
        (4, 1000, 2048, None),
        (4, 1000, 2048, 1500),
        (1, 1, 0, None),
        (3, 7, 2, 9),
        (6, 100, 6, 1),
    ],
)
def test_symmetric_memory(world: int, rows: int, row_bytes: int, union: int | None) -> None:
    """Little beyond the rows themselves; no more than is said; all of it is given back."""

    def host(pe: int) -> None:
        before = tdcoll.heap_info()
        ctx = tdcoll.SparseContext(
            max_rows_per_rank=rows, max_row_bytes=row_bytes, max_union_rows=union
        )
        used = tdcoll.heap_info().used - before.used
        assert used <= symmetric_bytes(world, rows, row_bytes, union)
        known = ctx._symmetric
        assert used == sum(Arena.padded(tensor.nbytes) for tensor in known)
        if row_bytes >= 512:
            assert used <= 1.05 * (rows + ctx.max_union_rows) * row_bytes
        ctx.close()
        ctx.close()
        assert tdcoll.heap_info() == before

    everywhere(host, world, heap_bytes=16 << 20)


@pytest.mark.parametrize("row_bytes", [512, 2048])
@on_ranks(2)
def test_no_call_takes_more_symmetric_memory(pe: int, row_bytes: int) -> None:
    with make(max_row_bytes=row_bytes) as ctx:
        used = tdcoll.heap_info()
        for algorithm in ("auto", "owner", "gather"):
            reduce_and_compare(ctx, algorithm=algorithm)
            reduce_and_compare(ctx, 1, algorithm=algorithm, copy=False)
            tdcoll.sparse_all_reduce_padded(
                torch.tensor(ids_of(pe)),
                rows_of(pe, ids_of(pe)),
                ROWS,
                ctx=ctx,
                algorithm=algorithm,
            )
        assert tdcoll.heap_info() == used


@on_ranks(4, ranks_per_node=2)
def test_several_contexts_groups_and_shapes(pe: int) -> None:
    everybody = [make(), make(max_union_rows=30)]
    pair = [3, 1]
    of_two = make(group=pair) if pe in pair else None
    for call in range(2):
        reduce_and_compare(everybody[call % 2], call)
        if of_two is not None:
            assert of_two.rank == pair.index(pe)
            reduce_and_compare(of_two, call)
    view = tdcoll.sparse_all_reduce(mine(pe), ctx=everybody[0], algorithm="owner", copy=False)
    for shape in ((), (3, 5), (0,)):
        got = tdcoll.sparse_all_reduce(mine(pe, 0, 4, shape), ctx=everybody[1])
        wanted = total([mine(rank, 0, 4, shape) for rank in range(4)])
        assert same(got, wanted)
    assert same(view, total([mine(rank) for rank in range(4)])), (
        "calls on other contexts leave it alone"
    )
    for ctx in (everybody[1], of_two, everybody[0]):
        if ctx is not None:
            ctx.close()
    assert tdcoll.heap_info().used == 0


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        ({"max_rows_per_rank": 0}, ValueError, "max_rows_per_rank must be at least 1, got 0"),
        ({"max_rows_per_rank": 2.0}, TypeError, r"max_rows_per_rank must be an int, got 2\.0"),
        ({"max_row_bytes": -1}, ValueError, "max_row_bytes must be at least 0, got -1"),
        ({"max_row_bytes": "4K"}, TypeError, "max_row_bytes must be an int, got '4K'"),
        ({"max_union_rows": 0}, ValueError, "max_union_rows must be at least 1, got 0"),
        ({"max_blocks": 0}, ValueError, "max_blocks must be at least 1, got 0"),
        ({"max_blocks": 2.0}, TypeError, "max_blocks"),
        ({"max_union_rows": 1.5}, TypeError, r"max_union_rows must be an int, got 1\.5"),
        ({"timeout_s": -1.0}, ValueError, "timeout_s"),
        ({"group": "all"}, TypeError, "group must be a ProcessGroup"),
        ({"group": [0, 0]}, ValueError, "distinct"),
    ],
)
@on_ranks(1)
def test_capacities_that_are_none(
    pe: int, wrong: dict[str, Any], error: type[Exception], text: str
) -> None:
    before = tdcoll.heap_info()
    with pytest.raises(error, match=text):
        make(**wrong)
    assert tdcoll.heap_info() == before
    assert not runtime.current().kept_alive


@on_ranks(N)
def test_capacities_are_compared_and_a_context_that_does_not_fit_takes_nothing(pe: int) -> None:
    before = tdcoll.heap_info()
    for name in ("max_rows_per_rank", "max_row_bytes", "max_union_rows"):
        with pytest.raises(
            tdcoll.RankMismatchError, match=rf"must be the same.*{name} \(.*rank 2: "
        ):
            make(**{name: 64 + pe})
    with pytest.raises(
        tdcoll.RankMismatchError, match=r"differ in grow \(rank 0: False, rank 1: True, rank 2"
    ):
        make(grow=pe == 1)
    with pytest.raises(tdcoll.HeapExhaustedError, match="NVSHMEM_SYMMETRIC_SIZE"):
        make(max_row_bytes=before.total // 16)
    assert tdcoll.heap_info() == before
    assert not runtime.current().kept_alive
    with make() as ctx:
        reduce_and_compare(ctx)


# ---------------------------------------------------------------------- calls without a context


@on_ranks(2)
def test_without_a_context(pe: int) -> None:
    """Made at the first call, grows, serves rows of other sizes, and is one of tdcoll's own
    contexts."""
    contexts = runtime.current().contexts
    assert not contexts
    counts = ((3, 3), (5, 2), (300, 1), (1, 400), (2, 2))
    kept = []
    for call, pair in enumerate(counts):
        for shape in ((2,), (), (64,)) if call < 2 else ((2,),):
            parts = []
            for rank, n in enumerate(pair):
                ids = [(3 * i + call) % 1000 for i in range(n)]
                parts.append(sparse(ids, rows_of(rank, ids, shape), 1000))
            kept.append((tdcoll.sparse_all_reduce(parts[pe]), total(parts)))
            found, rows = tdcoll.sparse_all_reduce_rows(
                parts[pe]._indices()[0], parts[pe]._values(), 1000
            )
            assert torch.equal(found, kept[-1][1].indices()[0])
            assert torch.equal(rows, kept[-1][1].values())
        assert all(same(got, wanted) for got, wanted in kept)
        assert len(contexts) == 1
    (ctx,) = contexts.values()
    assert ctx.max_rows_per_rank >= 400
    assert ctx.max_row_bytes >= 256
    assert ctx.grow
    ctx.close()
    assert tdcoll.heap_info().used == 0


@on_ranks(N)
def test_without_a_context_and_rows_on_one_rank_only(pe: int) -> None:
    part = sparse([4, 2], PART) if pe == 1 else sparse([], torch.empty(0, DIM))
    assert same(tdcoll.sparse_all_reduce(part), sparse([2, 4], PART, coalesced=True))
    with pytest.raises(ValueError, match=r"must be in 0\.\.39"):
        tdcoll.sparse_all_reduce(sparse([ROWS], PART[:1]) if pe else part)
    assert same(tdcoll.sparse_all_reduce(part), sparse([2, 4], PART, coalesced=True))


def test_before_a_job() -> None:
    for call in (
        lambda: tdcoll.sparse_all_reduce(mine(0)),
        lambda: tdcoll.sparse_all_reduce_rows(IDS, PART, ROWS),
        make,
    ):
        with pytest.raises(tdcoll.NotInitializedError, match=r"tdcoll\.initialize"):
            call()
