# SPDX-License-Identifier: Apache-2.0
"""Sparse contexts that tdcoll makes by itself, when the first call comes."""

from __future__ import annotations

from collections.abc import Sequence

from tdcoll.collectives._host.pool import on
from tdcoll.collectives.sparse_all_reduce.context import SparseContext
from tdcoll.errors import HeapExhaustedError
from tdcoll.runtime import Runtime

__all__ = ["growing_context"]

_FEWEST_ROWS = 256


def growing_context(
    owner: Runtime,
    ranks: Sequence[int],
    rows: int,
    row_bytes: int,
    *,
    max_programs: int | None = None,
    timeout_s: float | None = None,
) -> SparseContext:
    """A context that grows and follows the stream. Collective.

    It has room for what the rank with the most brings, or for 256 rows if the heap has no more: there may be fewer
    different rows.

    Args:
        owner: the job.
        ranks: global ranks, in the order of the group.
        rows, row_bytes: what this rank brings to the first call.
        max_programs, timeout_s: as for :class:`SparseContext`.

    Raises:
        HeapExhaustedError: the heap has no room for either. On all ranks.
    """
    asked = owner.exchange(ranks, "sparse all-reduce: rows, row bytes", (rows, row_bytes))
    most, widest = max(_FEWEST_ROWS, *(n for n, _ in asked)), max(nbytes for _, nbytes in asked)

    def make(rows: int) -> SparseContext:
        with on(owner.device):
            made = SparseContext(
                ranks,
                max_rows_per_rank=rows,
                max_row_bytes=widest,
                grow=True,
                max_programs=max_programs,
                timeout_s=timeout_s,
            )
        made.collective.follows_stream = True
        return made

    try:
        return make(most)
    except HeapExhaustedError:  # on all ranks alike
        if most == _FEWEST_ROWS:
            raise
        return make(_FEWEST_ROWS)
