# SPDX-License-Identifier: Apache-2.0
"""Results of fixed size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiers import second

import tdcoll

from .calls import DIM, PART, ROWS, N, everywhere, make, mine, total


@pytest.mark.parametrize("algorithm", ["owner", "gather", "auto"])
@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("ranks_per_node", [None, second(2)])
def test_padded(algorithm: str, debug: bool, ranks_per_node: int | None) -> None:
    def host(pe: int) -> None:
        with make(debug=debug) as ctx:
            for call, count in enumerate((4, 1, 6)):
                part = mine(pe, call, count)
                wanted = total([mine(rank, call, count) for rank in range(N)])
                padded = tdcoll.sparse_all_reduce_padded(
                    part._indices()[0], part._values(), ROWS, ctx=ctx, algorithm=algorithm
                )
                union = wanted._nnz()
                assert isinstance(padded, tdcoll.PaddedRows)
                assert (padded.indices.shape, padded.indices.dtype) == ((48,), torch.int64)
                assert (padded.values.shape, padded.values.dtype) == ((48, DIM), torch.float32)
                assert (padded.count.shape, padded.count.dtype, padded.count.tolist()) == ((1,), torch.int64, [union])
                assert padded.count.device == ctx.device
                assert torch.equal(padded.indices[:union], wanted.indices()[0])
                assert torch.equal(padded.values[:union], wanted.values())
                assert not padded.indices[union:].any()
                assert not padded.values[union:].any()
                dense = torch.zeros(ROWS, DIM).index_add_(0, padded.indices, padded.values)
                assert torch.equal(dense, wanted.to_dense()), "padding adds nothing"
                ids, rows = tdcoll.sparse_all_reduce_rows(
                    part._indices()[0], part._values(), ROWS, ctx=ctx, algorithm=algorithm
                )
                assert torch.equal(ids, wanted.indices()[0])
                assert torch.equal(rows, wanted.values())
                ctx.check()

    everywhere(host, ranks_per_node=ranks_per_node)


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        ({"indices": torch.tensor([ROWS, 1])}, ValueError, "indices of rank 1 must be in 0..39"),
        (
            {"indices": torch.tensor([2, 1]), "coalesced": True},
            ValueError,
            "indices of rank 1 are said to be coalesced",
        ),
        ({"op": "max"}, tdcoll.RankMismatchError, "ranks pass different"),
        (
            {"indices": torch.arange(9), "values": torch.ones(9, DIM)},
            tdcoll.ContextError,
            "9 different rows.*max_rows_per_rank=9",
        ),
        (
            {"indices": torch.arange(8) + 8, "values": torch.ones(8, DIM)},
            tdcoll.ContextError,
            "10 different rows together.*max_union_rows=10",
        ),
    ],
    ids=["range", "order", "op", "rows", "union"],
)
@pytest.mark.parametrize("algorithm", ["owner", "gather"])
def test_padded_remembers_what_was_wrong(
    wrong: dict[str, Any], error: type[Exception], text: str, algorithm: str
) -> None:
    """0 rows on every rank, the first error from check(), once; calls before it, between and after count as usual."""
    given: dict[str, Any] = {"indices": torch.tensor([1, 3]), "values": PART, "algorithm": algorithm}

    def host(pe: int) -> None:
        with make(max_rows_per_rank=8, max_union_rows=9, max_row_bytes=256, grow=True) as ctx:

            def call(**more: Any) -> tdcoll.PaddedRows:
                return tdcoll.sparse_all_reduce_padded(num_rows=ROWS, ctx=ctx, **(given | more))

            assert call().count.tolist() == [2]
            bad = call(**(wrong if pe == 1 else {}))
            assert bad.count.tolist() == [0]
            assert not bad.indices.any()
            assert not bad.values.any()
            later = call(indices=torch.tensor([ROWS + 5, 0]))  # not the first any more
            assert later.count.tolist() == [0]
            good = call()
            assert good.count.tolist() == [2]
            assert torch.equal(good.values[:2], N * PART)
            with pytest.raises(error, match=f"^sparse_all_reduce_padded: .*{text}"):
                ctx.check()
            ctx.check()
            assert call().count.tolist() == [2]
            ctx.check()
            call(indices=torch.tensor([-1, 0]))
            with pytest.raises(ValueError, match=r"must be in 0\.\.39"):
                ctx.check()
            assert ctx.max_union_rows == 9, "it does not grow here"

    everywhere(host)


def test_padded_of_nothing() -> None:
    def host(pe: int) -> None:
        with make(max_union_rows=5) as ctx:
            none = torch.empty(0, dtype=torch.int64)
            for num_rows in (0, ROWS, 1 << 40):
                for shape in ((DIM,), (), (0,)):
                    got = tdcoll.sparse_all_reduce_padded(none, torch.empty(0, *shape), num_rows, ctx=ctx)
                    assert got.values.shape == (5, *shape)
                    assert not got.values.any()
                    assert got.count.tolist() == [0]
            ctx.check()

    everywhere(host, 2)
