# SPDX-License-Identifier: Apache-2.0
"""Calls without a context, which tdcoll makes and grows."""

from __future__ import annotations

import pytest
import torch
from ranks import on_ranks

import tdcoll
from tdcoll import runtime

from .calls import DIM, IDS, PART, ROWS, N, make, mine, rows_of, same, sparse, total


@on_ranks(2)
def test_without_a_context(pe: int) -> None:
    """Made at the first call, grows, serves rows of other sizes, and is one of tdcoll's own contexts."""
    contexts = runtime.current().contexts
    assert not contexts
    counts = ((3, 3), (5, 2), (300, 1), (1, 400), (2, 2))
    kept = []
    for call, pair in enumerate(counts):
        for shape in ((2,), (), (64,)) if call < 2 else ((2,),):
            parts = [
                sparse(ids := [(3 * i + call) % 1000 for i in range(n)], rows_of(rank, ids, shape), 1000)
                for rank, n in enumerate(pair)
            ]
            kept.append((tdcoll.sparse_all_reduce(parts[pe]), total(parts)))
            found, rows = tdcoll.sparse_all_reduce_rows(parts[pe]._indices()[0], parts[pe]._values(), 1000)
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
    with pytest.raises(TypeError, match=r"tensor(\[0\])? must be a torch\.Tensor"):
        tdcoll.sparse_all_reduce([1])  # type: ignore[arg-type]
    assert same(tdcoll.sparse_all_reduce(part), sparse([2, 4], PART, coalesced=True))


def test_before_a_job() -> None:
    for call in (
        lambda: tdcoll.sparse_all_reduce(mine(0)),
        lambda: tdcoll.sparse_all_reduce_rows(IDS, PART, ROWS),
        make,
    ):
        with pytest.raises(tdcoll.NotInitializedError, match=r"tdcoll\.initialize"):
            call()
