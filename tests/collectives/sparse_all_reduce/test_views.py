# SPDX-License-Identifier: Apache-2.0
"""Results that are views of symmetric memory, and how long they last."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tdcoll
from tdcoll import runtime

from .calls import DIM, ROWS, N, everywhere, make, mine, reduce_and_compare, same, total


def in_symmetric_memory(tensor: torch.Tensor) -> bool:
    heap = runtime.current().heap
    return heap.base <= tensor.data_ptr() < heap.base + heap.nbytes


@pytest.mark.parametrize("debug", [False, True])
def test_copies_and_views(debug: bool) -> None:
    """copy=False is symmetric memory where rows are put, and the next call overwrites it; a copy stays."""

    def host(pe: int) -> None:
        with make(debug=debug) as ctx:
            wanted = [total([mine(rank, call) for rank in range(N)]) for call in range(3)]
            copy = tdcoll.sparse_all_reduce(mine(pe), ctx, algorithm="owner")
            assert not in_symmetric_memory(copy.values())
            view = tdcoll.sparse_all_reduce(mine(pe, 1), ctx, algorithm="owner", copy=False)
            assert in_symmetric_memory(view._values())
            assert same(view, wanted[1])
            assert same(copy, wanted[0])
            assert (type(view) is torch.Tensor) is not debug
            gathered = tdcoll.sparse_all_reduce(mine(pe, 2), ctx, algorithm="gather", copy=False)
            assert not in_symmetric_memory(gathered.values())
            assert type(gathered) is torch.Tensor
            reduce_and_compare(ctx, algorithm="owner")
            assert same(gathered, wanted[2])
            if not debug:
                assert not torch.equal(view.values(), wanted[1].values()), "another call's rows by now"

    everywhere(host)


USES: dict[str, Callable[[torch.Tensor], Any]] = {
    "values()": lambda t: t.values(),
    "indices()": lambda t: t.indices(),
    "coalesce()": lambda t: t.coalesce(),
    "to_dense()": lambda t: t.to_dense(),
    "dense.add_": lambda t: torch.zeros(ROWS, DIM).add_(t),
    "dense + ": lambda t: torch.zeros(ROWS, DIM) + t,
    "t + t": lambda t: t + t,
    "t * 2": lambda t: t * 2,
    "sparse.sum": lambda t: torch.sparse.sum(t),
    "clone()": lambda t: t.clone(),
    "detach()": lambda t: t.detach(),
    "to(float64)": lambda t: t.to(torch.float64),
    "copy_": lambda t: torch.empty(ROWS, DIM).to_sparse(1).copy_(t),
}

DENSE_USES: dict[str, Callable[[torch.Tensor], Any]] = {
    "t[0]": lambda t: t[0],
    "view": lambda t: t.view(-1),
    "tolist()": lambda t: t.tolist(),
    "sum": lambda t: t.sum(),
    "t + 1": lambda t: t + 1,
    "add_": lambda t: t.add_(0),
    "copy_": lambda t: torch.empty(t.shape).copy_(t),
    "cat": lambda t: torch.cat([torch.ones(1, DIM), t]),
    "index_add_": lambda t: torch.zeros(t.shape).index_add_(0, torch.arange(len(t)), t),
    "out=": lambda t: torch.add(t, 1, out=torch.empty(t.shape)),
    "numpy()": lambda t: t.numpy(),
    "clone()": lambda t: t.clone(),
    "detach()": lambda t: t.detach(),
    "split": lambda t: t.split(1),
}


def ordinary(result: Any) -> bool:
    """Whether a result has nothing to do with symmetric memory, or else is lent as well."""
    if isinstance(result, (tuple, list)):
        return all(ordinary(part) for part in result)
    if not isinstance(result, torch.Tensor) or type(result) is not torch.Tensor:
        return True
    values = result._values() if result.layout == torch.sparse_coo else result
    return not in_symmetric_memory(values)


LATE = "a result of copy=False was used after {}, when its memory was no longer its own"


@pytest.mark.parametrize("ended", ["the next call on its context was made", "its context was closed"])
def test_a_sparse_view_is_refused_when_it_is_stale(ended: str) -> None:
    def host(pe: int) -> None:
        ctx = make(debug=True)
        wanted = total([mine(rank) for rank in range(2)])
        view = tdcoll.sparse_all_reduce(mine(pe), ctx, algorithm="owner", copy=False)
        assert same(view, wanted)
        for name, use in USES.items():
            got, right = use(view), use(wanted)
            assert ordinary(got), name
            got, right = (t.to_dense() if t.layout == torch.sparse_coo else t for t in (got, right))
            assert torch.equal(got, right), name
        kept = [view.detach(), view.values(), view.values()[1:], view.values().view(-1)[3:]]
        other = view.to_dense()
        assert isinstance(view, torch.Tensor)
        assert "values" in repr(view)
        if "closed" in ended:
            ctx.close()
        else:
            reduce_and_compare(ctx, 1)
        for name, use in USES.items():
            with pytest.raises(tdcoll.ContextError, match=rf"^sparse_all_reduce: {LATE.format(ended)}"):
                pytest.fail(f"{name} gave {use(view)}")
        for tensor in kept:
            with pytest.raises(tdcoll.ContextError, match=LATE.format(ended)):
                tensor.sum()
        assert torch.equal(other, wanted.to_dense()), "an ordinary tensor stays what it is"
        assert ended in repr(view)
        ctx.close()

    everywhere(host, 2)


@pytest.mark.parametrize("ended", ["the next call on its context was made", "its context was closed"])
def test_a_view_of_rows_is_refused_when_it_is_stale(ended: str) -> None:
    def host(pe: int) -> None:
        ctx = make(debug=True)
        wanted = total([mine(rank) for rank in range(2)])
        part = mine(pe)
        ids, view = tdcoll.sparse_all_reduce_rows(
            part._indices()[0], part._values(), ROWS, ctx, algorithm="owner", copy=False
        )
        assert in_symmetric_memory(view)
        assert type(ids) is torch.Tensor
        for name, use in DENSE_USES.items():
            got, right = use(view), use(wanted.values())
            assert ordinary(got), name
            assert str(torch.as_tensor(got[1] if name == "split" else got)) == str(
                torch.as_tensor(right[1] if name == "split" else right)
            ), name
        first, flat = view[0], view.view(-1)[1:][1:]
        summed = view + 0
        if "closed" in ended:
            ctx.close()
        else:
            reduce_and_compare(ctx, 1)
        for name, use in DENSE_USES.items():
            with pytest.raises(tdcoll.ContextError, match=rf"^sparse_all_reduce_rows: {LATE.format(ended)}"):
                pytest.fail(f"{name} gave {use(view)}")
        for tensor in (first, flat):
            with pytest.raises(tdcoll.ContextError, match=LATE.format(ended)):
                tensor.tolist()
        assert torch.equal(summed, wanted.values())
        assert torch.equal(ids, wanted.indices()[0])
        ctx.close()

    everywhere(host, 2)


def test_a_view_changes_the_symmetric_rows_and_nothing_else() -> None:
    def host(pe: int) -> None:
        with make(debug=True) as ctx:
            view = tdcoll.sparse_all_reduce(mine(pe), ctx, algorithm="owner", copy=False)
            values = view.values().mul_(3)
            assert torch.equal(view.values(), 3 * total([mine(rank) for rank in range(2)]).values())
            other = tdcoll.zeros(tuple(values.shape))
            got = other.add_(values)  # symmetric memory too, but the caller's
            root = values[2:].as_strided((4,), (1,), values.storage_offset())  # before where the part begins
            reduce_and_compare(ctx, 1)
            assert int(got.abs().sum()) > 0
            with pytest.raises(tdcoll.ContextError, match="used after the next call"):
                root.sum()
            tdcoll.free(other)

    everywhere(host, 2)


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize(
    ("optimizer", "options"), [("SGD", {}), ("SGD", {"foreach": True}), ("SparseAdam", {}), ("Adagrad", {})]
)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_a_view_as_a_gradient(optimizer: str, options: dict[str, Any], debug: bool) -> None:
    """It serves an optimizer while it is fresh, and is refused after."""

    def host(pe: int) -> None:
        with make(debug=debug) as ctx:
            weight = torch.nn.Parameter(torch.ones(ROWS, DIM))
            twin = torch.nn.Parameter(torch.ones(ROWS, DIM))
            ours, theirs = (getattr(torch.optim, optimizer)([p], lr=0.5, **options) for p in (weight, twin))
            for call in range(2):
                weight.grad = tdcoll.sparse_all_reduce(mine(pe, call), ctx, algorithm="owner", copy=False)
                twin.grad = total([mine(rank, call) for rank in range(2)])
                ours.step()
                theirs.step()
                assert torch.equal(weight.detach(), twin.detach())
            before = weight.detach().clone()
            reduce_and_compare(ctx, 5)
            if debug:
                with pytest.raises(tdcoll.ContextError, match="used after the next call"):
                    ours.step()
                assert torch.equal(weight.detach(), before)

    everywhere(host, 2)
