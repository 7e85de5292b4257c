# SPDX-License-Identifier: Apache-2.0
"""Sparse contexts that tdcoll makes by itself, when the first call comes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tdcoll import runtime
from tdcoll.collectives._host.pool import on
from tdcoll.collectives.sparse_all_reduce.context import SparseContext
from tdcoll.errors import HeapExhaustedError
from tdcoll.runtime import Runtime

__all__ = ["default_context", "growing_context"]

_FEWEST_ROWS = 256


def default_context(group: runtime.Group, values: Sequence[Any], num_rows: Sequence[Any]) -> SparseContext:
    """Return tdcoll's own context of a group: it grows, follows the stream, and lives until ``finalize``.

    ``values`` are the rows, or the sparse tensors, of this rank's first call, not checked yet; ``num_rows``, of the
    tables, says nothing of sparse tensors.
    """
    owner = runtime.current()
    key = ("sparse", owner.ranks_of(group))
    if key not in owner.contexts:
        sizes = [_size(of, rows) for of, rows in zip(values, num_rows, strict=True)]
        n, row_bytes = sum(n for n, _ in sizes), max((nbytes for _, nbytes in sizes), default=0)
        owner.contexts[key] = growing_context(owner, key[1], n, row_bytes, group=group)
    found: SparseContext = owner.contexts[key]
    return found


def _size(values: Any, num_rows: Any) -> tuple[int, int]:
    """``(rows, bytes of a row)`` of one table's rows; 0 of what no call takes."""
    if isinstance(values, torch.Tensor) and values.layout == torch.sparse_coo:
        values, num_rows = values.detach()._values(), values.shape[0]
    if not isinstance(values, torch.Tensor) or values.layout != torch.strided or not values.dim():
        return 0, 0
    n = min(values.shape[0], num_rows) if isinstance(num_rows, int) else values.shape[0]  # repeated rows count once
    return n, values.shape[1:].numel() * values.dtype.itemsize


def growing_context(owner: Runtime, ranks: Sequence[int], rows: int, row_bytes: int, **options: Any) -> SparseContext:
    """A context of these global ranks that grows and follows the stream. Collective.

    It has room for what the rank with the most brings, or for 256 rows if the heap has no more: there may be fewer
    different rows.

    Args:
        rows, row_bytes: what this rank brings to the first call.
        options: others of :class:`SparseContext`; its ``group`` if that is a ProcessGroup, for the dense algorithm.

    Raises:
        HeapExhaustedError: the heap has no room for either. On all ranks.
    """
    asked = owner.exchange(ranks, "sparse all-reduce: rows, row bytes", (rows, row_bytes))
    most, widest = max(_FEWEST_ROWS, *(n for n, _ in asked)), max(nbytes for _, nbytes in asked)
    options |= {"max_row_bytes": widest, "grow": True}
    group = options.pop("group", None) or ranks
    with on(owner.device):
        try:
            made = SparseContext(group, max_rows_per_rank=most, **options)
        except HeapExhaustedError:  # on all ranks alike
            if most == _FEWEST_ROWS:
                raise
            made = SparseContext(group, max_rows_per_rank=_FEWEST_ROWS, **options)
    return made
