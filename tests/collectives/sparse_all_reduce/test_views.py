# SPDX-License-Identifier: Apache-2.0
"""Results that are views of symmetric memory, and how long they last."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import on_ranks

import tdcoll
from tdcoll import runtime

from .calls import DIM, ROWS, N, make, mine, reduce_and_compare, same, total


def in_symmetric_memory(tensor: torch.Tensor) -> bool:
    heap = runtime.current().heap
    return heap.base <= tensor.data_ptr() < heap.base + heap.nbytes


@pytest.mark.parametrize("debug", [False, True])
@on_ranks(N)
def test_copies_and_views(pe: int, debug: bool) -> None:
    """copy=False is symmetric memory where rows are put, and the next call overwrites it; a copy
    stays."""
    with make(debug=debug) as ctx:
        wanted = [total([mine(rank, call) for rank in range(N)]) for call in range(3)]
        copy = tdcoll.sparse_all_reduce(mine(pe), ctx=ctx, algorithm="owner")
        assert not in_symmetric_memory(copy.values())
        view = tdcoll.sparse_all_reduce(mine(pe, 1), ctx=ctx, algorithm="owner", copy=False)
        assert in_symmetric_memory(view._values())
        assert same(view, wanted[1])
        assert same(copy, wanted[0])
        gathered = tdcoll.sparse_all_reduce(mine(pe, 2), ctx=ctx, algorithm="gather", copy=False)
        assert not in_symmetric_memory(gathered.values())
        reduce_and_compare(ctx, algorithm="owner")
        assert same(gathered, wanted[2])
        assert torch.equal(view.indices(), wanted[1].indices()), "only the rows are shared"
        assert not torch.equal(view.values(), wanted[1].values()), "another call's rows by now"


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [("SGD", {}), ("SGD", {"foreach": True}), ("SparseAdam", {}), ("Adagrad", {})],
)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@on_ranks(2)
def test_a_view_as_a_gradient(pe: int, optimizer: str, options: dict[str, Any]) -> None:
    with make() as ctx:
        weight = torch.nn.Parameter(torch.ones(ROWS, DIM))
        twin = torch.nn.Parameter(torch.ones(ROWS, DIM))
        ours, theirs = (
            getattr(torch.optim, optimizer)([p], lr=0.5, **options) for p in (weight, twin)
        )
        for call in range(2):
            weight.grad = tdcoll.sparse_all_reduce(
                mine(pe, call), ctx=ctx, algorithm="owner", copy=False
            )
            twin.grad = total([mine(rank, call) for rank in range(2)])
            ours.step()
            theirs.step()
            assert torch.equal(weight.detach(), twin.detach())
