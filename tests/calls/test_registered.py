# SPDX-License-Identifier: Apache-2.0
"""Callers' memory that peers access: which calls find it checked already."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from ranks import on_ranks

import tdcoll

CALLS: dict[str, Callable[[torch.Tensor, tdcoll.CollectiveContext], torch.Tensor]] = {
    "all_gather_": lambda x, ctx: tdcoll.all_gather_(x, ctx=ctx),
    "all_reduce": lambda x, ctx: tdcoll.all_reduce(torch.ones_like(x), ctx=ctx, out=x, symmetric=True),
    "all_reduce_": lambda x, ctx: tdcoll.all_reduce_(x, ctx=ctx, symmetric=True),
    "reduce_scatter": lambda x, ctx: tdcoll.reduce_scatter(x, ctx=ctx, symmetric=True),
}


@pytest.mark.parametrize("name", CALLS)
@on_ranks(2)
def test_memory_that_was_released_is_no_longer_known(pe: int, name: str) -> None:
    """Nor is what now lies at its address."""
    call = CALLS[name]
    x, other = tdcoll.zeros((2, 64)), tdcoll.zeros((2, 64))
    with tdcoll.CollectiveContext(max_bytes_per_rank=1024) as ctx:
        for _ in range(2):
            call(x, ctx)
        tdcoll.free(x)
        call(other, ctx)  # which is found right again, and only that
        with pytest.raises(tdcoll.NotSymmetricError, match="it is not allocated"):
            call(x, ctx)
        alone = tdcoll.empty((2, 64), group=[pe])
        assert alone.data_ptr() == x.data_ptr()
        with pytest.raises(tdcoll.NotSymmetricError, match="belongs to ranks"):
            call(x, ctx)
        ctx.check()


@pytest.mark.parametrize("name", CALLS)
@on_ranks(2)
def test_buffers_in_turn_are_told_apart(pe: int, name: str) -> None:
    """Of one shape, on one context; also where memory is released in between."""
    call = CALLS[name]
    buffers = [tdcoll.zeros((2, 64)) for _ in range(2)]
    with tdcoll.CollectiveContext(max_bytes_per_rank=1024) as ctx:
        for turn in range(6):
            for number, x in enumerate(buffers):
                x.fill_(10 * turn + 4 * number + pe + 1)
                other = buffers[1 - number].clone()
                got = call(x, ctx)
                both = {10 * turn + 4 * number + q + 1 for q in range(2)}
                if name == "all_gather_":
                    assert [set(row.tolist()) for row in got] == [{value} for value in sorted(both)]
                else:
                    assert set(got.flatten().tolist()) == {2.0 if name == "all_reduce" else float(sum(both))}
                assert torch.equal(buffers[1 - number], other)
                tdcoll.barrier()
            if turn == 2:
                tdcoll.free(tdcoll.empty((8,)))
        ctx.check()


@on_ranks(2)
def test_other_shapes_at_the_same_address_are_told_apart(pe: int) -> None:
    raw = tdcoll.zeros(256, torch.uint8)
    with tdcoll.CollectiveContext(max_bytes_per_rank=1024) as ctx:
        for other in (raw.view(torch.float32), raw[:64].view(torch.float32), raw[:128].view(torch.float64), raw):
            other.view(2, -1)[pe].fill_(pe + 1)
            tdcoll.all_gather_(other, ctx=ctx)
            assert other.view(2, -1).double().mean(1).tolist() == [1, 2]
            tdcoll.barrier()
