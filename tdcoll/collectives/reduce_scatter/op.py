# SPDX-License-Identifier: Apache-2.0
"""Reduce-scatter: the public function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tdcoll import runtime
from tdcoll.calls.collective import CollectiveOptions
from tdcoll.calls.collective_epilogue import run_with_epilogue
from tdcoll.calls.context import CollectiveContext
from tdcoll.calls.plan import Plan
from tdcoll.calls.run import run
from tdcoll.collectives.reduce_scatter.spec import OPERATION, WITH_EPILOGUE


def reduce_scatter(
    tensor: torch.Tensor,
    op: str | torch.distributed.ReduceOp = "sum",
    *,
    out: torch.Tensor | None = None,
    group: runtime.Group = None,
    ctx: CollectiveContext | None = None,
    algorithm: str | Plan = "auto",
    epilogue: Callable[..., Any] | None = None,
    extra: Any = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """``[world * n, ...] -> [n, ...]``: reduce the tensors of all ranks, and keep this rank's
    segment.

    Collective, asynchronous and safe in CUDA graphs as :func:`tdcoll.all_gather`.

    >>> tdcoll.reduce_scatter(torch.arange(4.0))  # on 2 ranks; rank 1 gets
    tensor([4., 6.])

    The bits are those of :func:`tdcoll.all_reduce`. Differentiable for ``"sum"`` and ``"mean"``,
    under the rules of :func:`tdcoll.all_gather`, which makes the gradient.

    Args:
        tensor: a segment for each rank, contiguous, on the context's device, of a dtype that
            :func:`tdcoll.all_reduce` takes. With ``out`` it may be ``[world, n, ...]`` as well;
            without, the first dimension is what is divided.
        op: as for :func:`tdcoll.all_reduce`.
        out: the result: contiguous, same dtype. Made if None. May be this rank's own segment of
            ``tensor``, and must not overlap it otherwise. It gets no gradient.
        group, ctx: as for :func:`tdcoll.all_gather`.
        algorithm: ``"ll"``, ``"direct"``, ``"loop"``, ``"ce"``, ``"1d"`` or ``"auto"``.
        epilogue, extra: as for :func:`tdcoll.all_reduce`. The epilogue gets indices in this rank's
            result, and ranks may pass different values in ``extra``, of the same types.
        out_dtype: as for :func:`tdcoll.all_reduce`.

    Returns:
        ``out``, or a new ordinary tensor.

    Raises:
        ValueError: (in a backward pass) ``op`` is neither sum nor mean.
        Others: as for :func:`tdcoll.all_gather`.

    Algorithms: every rank sends each segment to the rank that reduces it (pairwise exchange;
    Thakur, Rabenseifner and Gropp, 2005), by the Lamport protocol or LL, by stores with a signal
    per chunk, or by puts.
    """
    tensors = (tensor,) if out is None else (tensor, out)
    options = CollectiveOptions(op, algorithm)
    if epilogue is None and extra is None and out_dtype is None:
        return run(OPERATION, tensors, options, group, ctx)
    return run_with_epilogue(
        WITH_EPILOGUE, tensors, options, epilogue, extra, group, ctx, out_dtype=out_dtype
    )
