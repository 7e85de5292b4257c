# SPDX-License-Identifier: Apache-2.0
"""Calls of sparse all-reduces as users make them, and what the tests of their behaviour share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import tdcoll
from tdcoll import runtime
from tdcoll.testing import World

N = 3
ROWS = 40
DIM = 4
IDS, PART = torch.tensor([3, 1]), torch.ones(2, DIM)


def sparse(
    ids: Sequence[int] | torch.Tensor,
    values: torch.Tensor,
    num_rows: int = ROWS,
    coalesced: bool = False,
) -> torch.Tensor:
    """``[n], [n, ...] -> [num_rows, ...]`` COO."""
    indices = torch.as_tensor(ids, dtype=torch.int64).reshape(1, -1)
    return torch.sparse_coo_tensor(
        indices,
        values,
        (num_rows, *values.shape[1:]),
        is_coalesced=coalesced,
        check_invariants=False,
    )


def ids_of(rank: int, call: int = 0, count: int = 6) -> list[int]:
    """Rows of a rank in a call: not sorted, the first one twice, most of them other ranks' as
    well."""
    ids = [(7 * i + rank + 3 * call) % ROWS for i in reversed(range(count))]
    return [*ids, ids[0]]


def rows_of(
    rank: int,
    ids: Sequence[int],
    shape: tuple[int, ...] = (DIM,),
    dtype: torch.dtype = torch.float32,
) -> Any:
    """``-> [n, *shape]``: small whole numbers, so that sums are exact in any order and any
    dtype."""
    elements = torch.Size(shape).numel()
    number = torch.arange(len(ids) * elements).reshape(len(ids), *shape)
    return ((number + 3 * rank) % 7 - 2).to(dtype)


def mine(rank: int, call: int = 0, count: int = 6, shape: tuple[int, ...] = (DIM,)) -> torch.Tensor:
    ids = ids_of(rank, call, count)
    return sparse(ids, rows_of(rank, ids, shape))


def total(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of COO tensors by PyTorch, coalesced."""
    whole = parts[0]
    for part in parts[1:]:
        whole = whole + part
    return whole.coalesce()


def same(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    return (
        got.shape == wanted.shape
        and got.is_coalesced()
        and torch.equal(got.indices(), wanted.indices())
        and torch.equal(got.values(), wanted.values())
    )


def reduce_and_compare(
    ctx: tdcoll.SparseContext, call: int = 0, count: int = 6, **options: Any
) -> None:
    got = tdcoll.sparse_all_reduce(mine(ctx.rank, call, count), ctx=ctx, **options)
    assert same(got, total([mine(rank, call, count) for rank in range(ctx.world_size)]))


def make(**options: Any) -> tdcoll.SparseContext:
    return tdcoll.SparseContext(**({"max_rows_per_rank": 16, "max_row_bytes": 64} | options))


def symmetric_bytes(world: int, rows: int, row_bytes: int, union: int | None = None) -> int:
    """Bytes of symmetric heap that a context takes on each rank."""
    sizes = {"max_rows_per_rank": rows, "max_row_bytes": row_bytes}
    sizes |= {} if union is None else {"max_union_rows": union}
    return tdcoll.memory_plan({"rows": sizes}, world_size=world).total


def everywhere(host: Callable[[int], Any], n_pes: int = N, **options: Any) -> list[Any]:
    return World(n_pes, **options).run(host)


SENTINEL = 77


def moved(ctx: tdcoll.SparseContext) -> torch.Tensor:
    """The context's symmetric memory behind the lists: rows that go out, rows that come in."""
    return ctx.area[ctx.world_size * ctx.capacities.list_bytes :]


def refused_everywhere(
    ctx: tdcoll.SparseContext,
    error: type[Exception],
    text: str,
    call: Callable[[], Any],
    algorithm: str = "owner",
) -> None:
    """All ranks raise the same, and no row has been stored anywhere, unless rows travel with their
    ids (gather)."""
    moved(ctx).fill_(SENTINEL)
    tdcoll.barrier()
    with pytest.raises(error, match=text) as raised:
        call()
    tdcoll.barrier()
    assert algorithm == "gather" or bool((moved(ctx) == SENTINEL).all()), "rows were moved"
    messages = runtime.current().exchange(range(ctx.world_size), "messages", str(raised.value))
    assert len(set(messages)) == 1, messages
