# SPDX-License-Identifier: Apache-2.0
"""All-to-all: the public function."""

from __future__ import annotations

import torch

from tdcoll import runtime
from tdcoll.calls.collective import CollectiveOptions
from tdcoll.calls.context import CollectiveContext
from tdcoll.calls.plan import Plan
from tdcoll.calls.run import run
from tdcoll.collectives.all_to_all.spec import OPERATION


def all_to_all(
    tensor: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    group: runtime.Group = None,
    ctx: CollectiveContext | None = None,
    algorithm: str | Plan = "auto",
    symmetric: bool = False,
) -> torch.Tensor:
    """``[world * n, ...] -> [world * n, ...]``: send segment r to rank r; segment r of the result
    comes from rank r.

    Collective, asynchronous, safe in CUDA graphs, and for any dtype as :func:`tdcoll.all_gather`.
    All segments have one size. Differentiable, under the rules given there: the gradient is the
    same all-to-all of the result's.

    >>> tdcoll.all_to_all(torch.arange(4.0) + 10 * tdcoll.rank())  # on 2 ranks; rank 1 gets
    tensor([ 2.,  3., 12., 13.])

    Args:
        tensor: a segment for each rank, contiguous, on the context's device; divisible by the
            number of ranks.
        out: the result: of the same shape and dtype, contiguous, apart from ``tensor``. Made if
            None. Gets no gradient.
        group, ctx: as for :func:`tdcoll.all_gather`.
        algorithm: ``"ll"``, ``"direct"``, ``"loop"``, ``"ce"``, ``"1d"`` or ``"auto"``.
        symmetric: ``out`` is symmetric memory, as for :func:`tdcoll.all_gather_`. No algorithm
            makes use of it today.

    Returns:
        ``out``, or a new ordinary tensor.

    Raises:
        Errors as :func:`tdcoll.all_gather`.

    Algorithms: every rank sends each segment to the rank that it is for (pairwise exchange; Thakur,
    Rabenseifner and Gropp, 2005): by LL (after NCCL's protocol of that name), by stores with a
    signal per chunk, or by puts.
    """
    tensors = (tensor,) if out is None else (tensor, out)
    options = CollectiveOptions(None, algorithm, symmetric)
    return run(OPERATION, tensors, options, group, ctx)
