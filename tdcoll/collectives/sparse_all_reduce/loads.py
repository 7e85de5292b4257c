# SPDX-License-Identifier: Apache-2.0
"""Kernels of sparse all-reduces on contexts that are in flight together, loaded before the first
call that needs them.

CUDA loads a kernel only while none is running. A rank that has to load one in the middle of a call
may wait for a kernel of another group, which waits for a peer, which may wait for this call
(:meth:`~tdcoll.CollectiveContext.wait_for_loads`). The first call of a kind therefore loads
everything that a later one may need, and all ranks wait for each other before they launch any of
it. Calls of one kind may differ in the number of rows, in whether they are coalesced, in where the
values lie, and in whether tensors are contiguous.
"""

from __future__ import annotations

import torch

from tdcoll.calls.launch_spec import refuse_capture
from tdcoll.collectives.sparse_all_reduce.call import SparseCall
from tdcoll.collectives.sparse_all_reduce.context import SparseContext
from tdcoll.collectives.sparse_all_reduce.rows import JoinedRows

_SORTED = (2048, 4096, 4097, 1 << 17)
"""Numbers of ids that PyTorch sorts by different kernels: up to the first two by one each, few
beyond, and many."""

_INDEXED = (1, 1024)
"""Numbers of rows for which PyTorch's indexing has different kernels."""


def load(
    ctx: SparseContext, operation: str, rows: JoinedRows, op: str, algorithm: str, padded: bool
) -> None:
    """Compile and load the kernels of all calls of this kind, PyTorch's among them; launch none
    that a peer notices.

    Args:
        padded: whether results have a fixed size.
    """

    def once() -> bool:
        refuse_capture(ctx, operation)
        for aligned in (True, False):
            call = SparseCall(ctx, rows, op, algorithm, aligned)
            call.load_forms(aligned, padded)
        for many in _SORTED:
            torch.sort(
                torch.zeros(many, dtype=call.kind.layout.ids_type, device=ctx.device), stable=True
            )
        for dtype in (torch.int64, rows.dtype):
            torch.zeros((2, 2), dtype=dtype, device=ctx.device).t().contiguous()
        return True

    ctx.cached(("sparse", "loaded", *_kind(rows, op, algorithm, padded)), once)


def wait_for_loads(
    ctx: SparseContext, operation: str, rows: JoinedRows, op: str, algorithm: str, padded: bool
) -> None:  # fmt: skip
    """Wait, if contexts are in flight together, until all ranks have loaded the kernels of such
    calls. Collective, once for each kind, and again when the context has grown, because it may take
    another algorithm then."""

    def once() -> bool:
        load(ctx, operation, rows, op, algorithm, padded)
        call = SparseCall(ctx, rows, op, algorithm)
        if call.algorithm == "dense" and not call.kind.too_wide:
            call.load_dense(_INDEXED)
        ctx.wait_for_loads(operation, kind)
        return True

    if ctx.loads_together:
        kind = "sparse", *_kind(rows, op, algorithm, padded)
        ctx.cached(("sparse", "agreed", *kind), once)


def _kind(rows: JoinedRows, op: str, algorithm: str, padded: bool) -> tuple[object, ...]:
    """Return what calls of one kind have in common; the same on all ranks."""
    return rows.order, rows.tables, rows.dtype, op, algorithm, padded
