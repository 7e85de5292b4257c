# SPDX-License-Identifier: Apache-2.0
"""Arguments of calls: what is refused, and what is taken as it is meant."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from ranks import on_ranks

import tdcoll

from .calls import IDS, PART, ROWS, everywhere, make, mine, reduce_and_compare, sparse


def _csr() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.eye(3).to_sparse_csr()


TENSORS: list[tuple[Any, type[Exception], str]] = [
    ([1, 2], TypeError, r"^tensor\[0\] must be a torch\.Tensor, got 1$"),
    ({}, TypeError, r"^tensor must be a torch\.Tensor, got dict$"),
    (
        torch.ones(3, 4),
        ValueError,
        r"^tensor must have the layout torch\.sparse_coo, got torch\.strided\. tdcoll\.all",
    ),
    (_csr(), ValueError, r"^tensor must have the layout torch\.sparse_coo, .*sparse_csr\. tdcoll"),
    (
        torch.ones(ROWS, 4).to_sparse(),
        ValueError,
        r"^tensor must have one sparse dimension.*got 2 of shape \[40, 4\]$",
    ),
    (
        sparse([1], torch.ones(1, 4).bool()),
        TypeError,
        r"^tensor must have one of the dtypes .* torch\.bool$",
    ),
    (
        sparse([1], torch.ones(1, 4)).to("meta"),
        ValueError,
        r"^tensor must be on cpu, where the context is; got meta$",
    ),
]


@pytest.mark.parametrize(("tensor", "error", "text"), TENSORS)
@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("own", [True, False], ids=["", "ctx=None"])
@on_ranks(1)
def test_tensors_that_are_refused(
    pe: int, tensor: Any, error: type[Exception], text: str, debug: bool, own: bool
) -> None:
    with make(debug=debug) as ctx:
        with pytest.raises(error, match=text):
            tdcoll.sparse_all_reduce(tensor, ctx=ctx if own else None)
        reduce_and_compare(ctx)


PAIRS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"indices": [1, 2]}, TypeError, r"^indices must be a torch\.Tensor, got list$"),
    ({"values": None}, TypeError, r"^values must be a torch\.Tensor, got NoneType$"),
    (
        {"indices": IDS.int()},
        ValueError,
        r"^indices must be int64 .*got torch\.int32 of shape \[2\] on cpu$",
    ),
    (
        {"indices": IDS[None]},
        ValueError,
        r"^indices must be int64 of one dimension on.*got.* \[1, 2\]",
    ),
    (
        {"indices": IDS.to_sparse()},
        ValueError,
        r"^indices must be a dense tensor, got .*sparse_coo$",
    ),
    ({"indices": IDS.to("meta")}, ValueError, r"^indices must be int64 .* on cpu; got .* on meta$"),
    (
        {"values": PART.to_sparse()},
        ValueError,
        r"^values must be a dense tensor, got .*sparse_coo$",
    ),
    (
        {"values": PART[:1]},
        ValueError,
        r"^values must have a row for each of the 2 indices; got shape \[1, 4\]$",
    ),
    (
        {"values": PART[0, 0]},
        ValueError,
        r"^values must have a row for each of the 2 indices; got shape \[\]$",
    ),
    (
        {"values": PART.to("meta")},
        ValueError,
        r"^values must be on cpu, where the context is; got meta$",
    ),
    ({"num_rows": 40.0}, TypeError, r"^num_rows must be an int, got 40\.0$"),
    ({"num_rows": -1}, ValueError, r"^num_rows must be at least 0, got -1$"),
    ({"num_rows": 1 << 63}, ValueError, r"^num_rows must be .*2\*\*62.* got 9223372036854775808$"),
    ({"op": "median"}, ValueError, r"^op must be one of sum, mean, max, min, prod; got 'median'$"),
    (
        {"op": "mean", "values": PART.int()},
        ValueError,
        r"^op must be one of sum, max, min, prod for torch\.int32; got",
    ),
    ({"algorithm": ["owner"]}, TypeError, r"^algorithm must be a str, got list$"),
    (
        {"algorithm": "ring"},
        ValueError,
        r"^algorithm must be one of auto, owner, gather, dense; got 'ring'$",
    ),
]


@pytest.mark.parametrize(("wrong", "error", "text"), PAIRS)
@pytest.mark.parametrize("debug", [False, True])
def test_pairs_that_are_refused(
    wrong: dict[str, Any], error: type[Exception], text: str, debug: bool
) -> None:
    given: dict[str, Any] = {"indices": IDS, "values": PART, "num_rows": ROWS} | wrong

    def host(pe: int) -> None:
        with make(debug=debug) as ctx:
            for call in (tdcoll.sparse_all_reduce_rows, tdcoll.sparse_all_reduce_padded):
                with pytest.raises(error, match=text):
                    call(ctx=ctx, **given)
            reduce_and_compare(ctx)

    everywhere(host, 1)


@on_ranks(2)
def test_contexts_that_are_refused(pe: int) -> None:
    with tdcoll.CollectiveContext(max_bytes_per_rank=64) as other:
        wanted = r"^ctx must be a tdcoll\.SparseContext or None, got CollectiveContext$"
        with pytest.raises(TypeError, match=wanted):
            tdcoll.sparse_all_reduce(mine(pe), ctx=other)
        with pytest.raises(TypeError, match=wanted):
            tdcoll.sparse_all_reduce_rows(IDS, PART, ROWS, ctx=other)
        for wrong in (other, None):
            name = type(wrong).__name__
            with pytest.raises(
                TypeError, match=rf"^ctx must be a tdcoll\.SparseContext, got {name}$"
            ):
                tdcoll.sparse_all_reduce_padded(IDS, PART, ROWS, ctx=wrong)
    with make(max_union_rows=12) as ctx:
        with pytest.raises(ValueError, match=r"^algorithm='gather' needs room .* \(16\)$"):
            tdcoll.sparse_all_reduce(mine(pe, shape=(16,)), ctx=ctx, algorithm="gather")
        with pytest.raises(
            ValueError, match=r"^algorithm must be 'owner', 'gather' or 'auto'.*got 'dense'$"
        ):
            tdcoll.sparse_all_reduce_padded(IDS, PART, ROWS, ctx=ctx, algorithm="dense")
        tdcoll.sparse_all_reduce(mine(pe), ctx=ctx)


@on_ranks(2)
def test_values_are_taken_as_they_are_meant(pe: int) -> None:
    """Lazy negation, strides, gradients, other orders of memory."""
    with make() as ctx:
        base = torch.arange(24.0).reshape(6, 4)
        ids = torch.tensor([9, 2, 7, 30, 1, 0])
        for given in (
            torch._neg_view(base),
            torch.complex(base, base).conj().imag,
            base.t().contiguous().t(),
            base[:, ::2],
            base[::1, 1:3],
            base[:1].expand(6, 4),
            base.clone().requires_grad_(),
        ):
            found, got = tdcoll.sparse_all_reduce_rows(ids, given, ROWS, ctx=ctx)
            wanted = sparse(ids, given.detach().resolve_neg() * 2).coalesce()
            assert torch.equal(found, wanted.indices()[0])
            assert torch.equal(got, wanted.values())
            assert not got.requires_grad
            got = tdcoll.sparse_all_reduce(sparse(ids, given), ctx=ctx)
            assert torch.equal(got.values(), wanted.values())
        wide = torch.stack((ids, ids), 1)[:, 0]
        assert not wide.is_contiguous()
        assert torch.equal(
            tdcoll.sparse_all_reduce_rows(wide, base, ROWS, ctx=ctx)[1],
            sparse(ids, 2 * base).coalesce().values(),
        )
