# SPDX-License-Identifier: Apache-2.0
"""Sparse contexts that tdcoll makes by itself, when the first call comes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tdcoll import runtime
from tdcoll.base.errors import HeapExhaustedError
from tdcoll.calls.pool import on
from tdcoll.collectives.sparse_all_reduce.context import SparseContext
from tdcoll.runtime import Runtime

__all__ = ["FEWEST_ROWS", "default_context", "growing_context", "row_sizes_of"]

FEWEST_ROWS = 256
"""Rows per rank of the smallest context."""


def default_context(group: runtime.Group, values: Sequence[Any], num_rows: Sequence[Any]) -> SparseContext:
    """Return tdcoll's own context of a group: it grows, follows the stream, and lives until ``finalize``.

    ``values`` are the rows, or the sparse tensors, of this rank's first call, not checked yet; ``num_rows``, of the
    tables, says nothing of sparse tensors.
    """
    owner = runtime.current()
    key = ("sparse", owner.ranks_of(group))
    if key not in owner.contexts:
        sizes = [row_sizes_of(of, rows) for of, rows in zip(values, num_rows, strict=True)]
        n, row_bytes = sum(n for n, _ in sizes), max((nbytes for _, nbytes in sizes), default=0)
        owner.contexts[key] = growing_context(owner, key[1], n, row_bytes)
    found: SparseContext = owner.contexts[key]
    return found


def row_sizes_of(values: Any, num_rows: Any = None) -> tuple[int, int]:
    """Return how many rows there are at most in ``values``, rows or a sparse tensor, and the bytes of one; zeros of
    anything else.

    Args:
        num_rows: of the table, if ``values`` are rows: repeated rows count once.
    """
    n, row_bytes = 0, 0
    if isinstance(values, torch.Tensor) and values.layout == torch.sparse_coo:
        values, num_rows = values.detach()._values(), values.shape[0]
    if isinstance(values, torch.Tensor) and values.layout == torch.strided and values.dim():
        n, row_bytes = values.shape[0], values.shape[1:].numel() * values.dtype.itemsize
    return min(n, num_rows) if isinstance(num_rows, int) else n, row_bytes


def growing_context(owner: Runtime, ranks: Sequence[int], rows: int, row_bytes: int, **options: Any) -> SparseContext:
    """A context of these global ranks that grows and follows the stream. Collective.

    It has room for what the rank with the most brings, or for 256 rows if the heap has no more: there may be fewer
    different rows.

    Args:
        rows, row_bytes: what this rank brings to the first call.
        options: others of :class:`SparseContext`.

    Raises:
        HeapExhaustedError: the heap has no room for either. On all ranks.
    """
    asked = owner.exchange(ranks, "sparse all-reduce: rows, row bytes", (rows, row_bytes))
    most, widest = max(FEWEST_ROWS, *(n for n, _ in asked)), max(nbytes for _, nbytes in asked)
    options |= {"max_row_bytes": widest, "grow": True}
    with on(owner.device):
        try:
            made = SparseContext(ranks, max_rows_per_rank=most, **options)
        except HeapExhaustedError:  # on all ranks alike
            if most == FEWEST_ROWS:
                raise
            made = SparseContext(ranks, max_rows_per_rank=FEWEST_ROWS, **options)
    return made
