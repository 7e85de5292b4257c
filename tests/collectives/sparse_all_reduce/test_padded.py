# SPDX-License-Identifier: Apache-2.0
"""Results of fixed size."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tdcoll

from .calls import DIM, PART, ROWS, N, everywhere, make


def _more(first: int, count: int) -> dict[str, torch.Tensor]:
    return {"indices": torch.arange(count) + first, "values": torch.ones(count, DIM)}


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "range": ({"indices": torch.tensor([ROWS, 1])}, ValueError, "indices of rank 1 must be in 0..39"),
    "order": ({"indices": torch.tensor([2, 1]), "coalesced": True}, ValueError, "rank 1 are said to be coalesced"),
    "op": ({"op": "max"}, tdcoll.RankMismatchError, "ranks pass different"),
    "rows": (_more(0, 9), tdcoll.ContextError, "9 different rows.*max_rows_per_rank=9"),
    "union": (_more(8, 8), tdcoll.ContextError, "10 different rows together.*max_union_rows=10"),
}


@pytest.mark.parametrize(("wrong", "error", "text"), WRONG.values(), ids=WRONG)
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
