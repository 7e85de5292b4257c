# SPDX-License-Identifier: Apache-2.0
"""Calls that do not fit a context: an error on all ranks, or a context that grows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import on_ranks

import tdcoll
from tdcoll import runtime
from tdcoll.calls.kernel_launch import LaunchCache

from .calls import (
    ROWS,
    N,
    everywhere,
    make,
    mine,
    reduce_and_compare,
    refused_everywhere,
    rows_of,
    same,
    sparse,
    symmetric_bytes,
    total,
)  # fmt: skip


@pytest.mark.parametrize(
    ("algorithm", "ranks_per_node", "debug"),
    [("owner", None, False), ("auto", 2, True), ("owner", 2, False)],
)
def test_more_rows_than_fit_is_an_error_on_all_ranks(
    algorithm: str, ranks_per_node: int | None, debug: bool
) -> None:
    """Only rank 1 brings too many. Nothing moves, and the context goes on."""

    def host(pe: int) -> None:
        ids = list(range(9 if pe == 1 else 3)) * 2  # rows that are there twice count once
        part = sparse(ids, rows_of(pe, ids))
        text = (
            r"^sparse_all_reduce: a rank brings 9 different rows, .* capacity of 8; "
            r".*max_rows_per_rank=9 or more.*grow"
        )
        with make(max_rows_per_rank=8, max_row_bytes=8 << 10, debug=debug) as ctx:
            for call in range(2):
                refused_everywhere(
                    ctx,
                    tdcoll.ContextError,
                    text,
                    lambda: tdcoll.sparse_all_reduce(part, ctx=ctx, algorithm=algorithm),
                )
                reduce_and_compare(ctx, call, algorithm=algorithm)

    everywhere(host, ranks_per_node=ranks_per_node)


@pytest.mark.parametrize("algorithm", ["owner", "gather"])
@on_ranks(N)
def test_a_larger_union_than_fits_is_an_error_on_all_ranks(pe: int, algorithm: str) -> None:
    ids = [10 * pe + i for i in range(4)]
    text = r"^sparse_all_reduce_rows: the ranks bring 12 different rows together, .* 11; .*max_union_rows=12 or"
    # Rows that are small in memory for larger ones leave gather its room.
    with make(max_rows_per_rank=4, max_row_bytes=256, max_union_rows=11) as ctx:
        values = rows_of(pe, ids)

        def call() -> Any:
            return tdcoll.sparse_all_reduce_rows(
                torch.tensor(ids), values, ROWS, ctx=ctx, algorithm=algorithm
            )

        refused_everywhere(ctx, tdcoll.ContextError, text, call, algorithm)
        got = tdcoll.sparse_all_reduce(sparse(ids[:3], values[:3]), ctx=ctx, algorithm=algorithm)
        wanted = total(
            [sparse([10 * r + i for i in range(3)], rows_of(r, ids)[:3]) for r in range(N)]
        )
        assert same(got, wanted)


@pytest.mark.parametrize("loads", [False, True])
def test_rows_that_are_too_long(loads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if all kernels of a call are loaded before it, as on a GPU that the context shares."""
    monkeypatch.setattr(tdcoll.CollectiveContext, "loads_together", loads)
    monkeypatch.setattr(tdcoll.CollectiveContext, "wait_for_loads", lambda *_: None)

    def host(pe: int) -> None:
        text = r"rows of 20 bytes are over the context's capacity of 16; make it with max_row_bytes=20 or more"
        with make(max_row_bytes=16) as ctx:
            for row in ((5,), (5, 1)):
                part = mine(pe, shape=row)
                call = lambda: tdcoll.sparse_all_reduce(part, ctx=ctx, algorithm="owner")  # noqa: B023, E731
                refused_everywhere(ctx, tdcoll.ContextError, text, call)
                for algorithm in ("auto", "gather"):
                    with pytest.raises(tdcoll.ContextError, match=text):
                        tdcoll.sparse_all_reduce(part, ctx=ctx, algorithm=algorithm)
                with pytest.raises(tdcoll.ContextError, match=text):
                    tdcoll.sparse_all_reduce_padded(
                        part._indices()[0], part._values(), ROWS, ctx=ctx
                    )
            reduce_and_compare(ctx)

    everywhere(host, 2)


@on_ranks(2)
def test_exactly_full(pe: int) -> None:
    with make(max_rows_per_rank=6, max_row_bytes=16, max_union_rows=12) as ctx:
        used = tdcoll.heap_info()
        for algorithm in ("owner", "auto"):
            ids = [20 * pe + i for i in range(6)]
            got = tdcoll.sparse_all_reduce(
                sparse(ids, rows_of(pe, ids)), ctx=ctx, algorithm=algorithm
            )
            assert same(
                got,
                total([sparse([20 * r + i for i in range(6)], rows_of(r, ids)) for r in range(2)]),
            )
        assert tdcoll.heap_info() == used


@pytest.mark.parametrize("algorithm", ["auto", "owner", "gather"])
@on_ranks(N)
def test_growing(pe: int, algorithm: str) -> None:
    """On all ranks, several times, by rows of one rank, by the union, by the row; results made
    before stay."""
    before = tdcoll.heap_info()
    with make(max_rows_per_rank=2, max_row_bytes=4, max_union_rows=2, grow=True) as ctx:
        kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        seen = {(2, 4, 2)}
        for call, (counts, width) in enumerate(
            (
                ((1, 1, 1), 1),
                ((2, 2, 2), 1),
                ((2, 9, 1), 1),
                ((2, 1, 3), 6),
                ((12, 3, 30), 6),
                ((1, 1, 1), 2),
            )
        ):
            parts = [mine(rank, call, counts[rank], (width,)) for rank in range(N)]
            got = tdcoll.sparse_all_reduce(parts[pe], ctx=ctx, algorithm=algorithm)
            kept.append((got, total(parts)))
            seen.add((ctx.max_rows_per_rank, ctx.max_row_bytes, ctx.max_union_rows))
            assert ctx.max_rows_per_rank >= max(counts)
            assert ctx.max_row_bytes >= 4 * width
            assert ctx.max_union_rows >= kept[-1][1]._nnz()
            assert all(same(result, wanted) for result, wanted in kept)
        assert len(seen) >= 4, seen
        facts = (ctx.max_rows_per_rank, ctx.max_row_bytes, ctx.max_union_rows)
        assert len(set(runtime.current().exchange(range(N), "facts", facts))) == 1
        used = tdcoll.heap_info().used - before.used
        assert used <= symmetric_bytes(N, *facts), "what was outgrown is given back"
    assert tdcoll.heap_info() == before


@pytest.fixture
def dtypes(monkeypatch: pytest.MonkeyPatch) -> dict[Any, Any]:
    """Of the tensors of each launch. A launch with the key of an earlier one takes what that has
    compiled."""
    found: dict[Any, Any] = {}
    launch = LaunchCache.__call__

    def noted(
        self: LaunchCache, kernel: Any, blocks: Any, given: Any, constants: Any = (), **more: Any
    ) -> None:
        kinds = [one.dtype for one in given if isinstance(one, torch.Tensor)]
        assert (
            found.setdefault((self, kernel.__name__, constants, *more.values()), kinds) == kinds
        ), kernel.__name__
        launch(self, kernel, blocks, given, constants, **more)

    monkeypatch.setattr(LaunchCache, "__call__", noted)
    return found


@pytest.mark.parametrize("algorithm", ["owner", "dense"])
@on_ranks(2)
def test_a_call_that_grows_rows_compiles_nothing_wrong(
    pe: int, algorithm: str, dtypes: dict[Any, Any]
) -> None:
    """Also with rows so often there that several programs add them, in fp32."""
    ids = torch.cat([torch.full((150,), 3), torch.arange(40)]).view(1, -1)
    tensor = torch.sparse_coo_tensor(ids, torch.ones(190, 8, dtype=torch.bfloat16), (ROWS, 8))
    with make(max_rows_per_rank=4, max_row_bytes=8, max_union_rows=8, grow=True) as ctx:
        for _ in range(2):
            got = tdcoll.sparse_all_reduce(tensor, ctx=ctx, algorithm=algorithm)
            assert got.to_dense()[3].tolist() == [302] * 8
    assert len(dtypes) > 4


@pytest.mark.slow
@on_ranks(4, ranks_per_node=2)
def test_growing_on_several_nodes_in_debug_mode(pe: int) -> None:
    with make(max_rows_per_rank=1, max_row_bytes=4, grow=True, debug=True) as ctx:
        for call in range(3):
            reduce_and_compare(ctx, call, 4 + 3 * call, algorithm="owner")


@on_ranks(2, heap_bytes=256 << 10)
def test_growing_beyond_the_heap_leaves_the_context_as_it_was(pe: int) -> None:
    with make(max_rows_per_rank=8, grow=True) as ctx:
        reduce_and_compare(ctx)
        before, facts = (
            tdcoll.heap_info(),
            (ctx.max_rows_per_rank, ctx.max_row_bytes, ctx.max_union_rows),
        )
        many = list(range(3000 if pe == 1 else 3))
        long = mine(pe, 0, 2, (1 << 16,))
        for part in (sparse(many, rows_of(pe, many), 5000), long):
            with pytest.raises(tdcoll.HeapExhaustedError, match="NVSHMEM_SYMMETRIC_SIZE"):
                tdcoll.sparse_all_reduce(part, ctx=ctx)
            assert tdcoll.heap_info() == before
            assert facts == (ctx.max_rows_per_rank, ctx.max_row_bytes, ctx.max_union_rows)
            reduce_and_compare(ctx)
        reduce_and_compare(ctx, 1, 12)  # it still grows as far as it can


@on_ranks(2)
def test_memory_that_a_graph_uses_does_not_move(pe: int) -> None:
    with make(grow=True) as ctx:
        ctx.captured = True  # as a call under capture would leave it
        area = ctx.area.data_ptr()
        for part in (mine(pe, 0, 20), mine(pe, 0, 3, (30,))):
            with pytest.raises(
                tdcoll.ContextError, match=r"cannot grow after a call was captured.*make it larger"
            ):
                tdcoll.sparse_all_reduce(part, ctx=ctx)
        reduce_and_compare(ctx)
        assert ctx.area.data_ptr() == area
