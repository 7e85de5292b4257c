# SPDX-License-Identifier: Apache-2.0
"""Sparse contexts that tdcoll makes by itself, when the first call comes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tdcoll import runtime
from tdcoll.base.errors import HeapExhaustedError
from tdcoll.calls.pool import on
from tdcoll.collectives.sparse_all_reduce.context import SparseContext
from tdcoll.runtime import Runtime

_FEWEST_ROWS = 256
"""Rows per rank of the smallest context."""


def default_context(group: runtime.Group) -> SparseContext:
    """Return tdcoll's own context of a group: it grows, follows the stream, and lives until ``finalize``."""
    owner = runtime.current()
    key = ("sparse", owner.ranks_of(group))
    if key not in owner.contexts:
        with on(owner.device):  # the first call makes it as large as it needs
            owner.contexts[key] = SparseContext(key[1], max_rows_per_rank=_FEWEST_ROWS, max_row_bytes=0, grow=True)
    found: SparseContext = owner.contexts[key]
    return found


def growing_context(owner: Runtime, ranks: Sequence[int], rows: int, row_bytes: int, **options: Any) -> SparseContext:
    """A context of these global ranks that grows and follows the stream. Collective.

    It has room for what the rank with the most brings, or for 256 rows if the heap has no more: there may be fewer
    different rows.

    Args:
        rows, row_bytes: what this rank brings to the first call.

    Raises:
        HeapExhaustedError: the heap has no room for either. On all ranks.
    """
    asked = owner.exchange(ranks, "sparse all-reduce: rows, row bytes", (rows, row_bytes))
    most, widest = max(_FEWEST_ROWS, *(n for n, _ in asked)), max(nbytes for _, nbytes in asked)
    options |= {"max_row_bytes": widest, "grow": True}
    with on(owner.device):
        try:
            return SparseContext(ranks, max_rows_per_rank=most, **options)
        except HeapExhaustedError:  # on all ranks alike
            if most == _FEWEST_ROWS:
                raise
            return SparseContext(ranks, max_rows_per_rank=_FEWEST_ROWS, **options)
