# SPDX-License-Identifier: Apache-2.0
"""Broadcast: the public functions."""

from __future__ import annotations

import torch

from tdcoll import runtime
from tdcoll.calls.collective import CollectiveOptions
from tdcoll.calls.context import CollectiveContext
from tdcoll.calls.plan import Plan
from tdcoll.calls.run import run
from tdcoll.collectives.broadcast.spec import OPERATION


def broadcast(
    tensor: torch.Tensor,
    root: int = 0,
    *,
    out: torch.Tensor | None = None,
    group: runtime.Group = None,
    ctx: CollectiveContext | None = None,
    algorithm: str | Plan = "auto",
    symmetric: bool = False,
) -> torch.Tensor:
    """``[...] -> the same``: every rank gets the tensor of rank ``root``.

    Collective, asynchronous, safe in CUDA graphs, and for any dtype as :func:`tdcoll.all_gather`.
    Every rank waits until all ranks have entered the call. Differentiable, under the rules given
    there: on the root the gradient is the sum of the gradients of all ranks' results, elsewhere it
    is zero. All ranks must take part in the backward pass, so ``tensor`` must require grad on all
    of them or on none.

    >>> tdcoll.broadcast(torch.full((2,), float(tdcoll.rank())), root=1)  # on 2 ranks
    tensor([1., 1.])

    Args:
        tensor: contiguous, on the context's device, of one shape and dtype on all ranks. Only the
            root's values count.
        root: group rank: its place in the group, not the global rank; the same on all ranks.
        out: the result: contiguous, of the same shape and dtype. Made if None. May be ``tensor``,
            and must not overlap it otherwise. It gets no gradient.
        group, ctx: as for :func:`tdcoll.all_gather`.
        algorithm: ``"ll"``, ``"direct"``, ``"loop"``, ``"1d"`` or ``"auto"``.
        symmetric: ``out`` is symmetric memory, as for :func:`tdcoll.all_gather_`. No algorithm
            makes use of it today.

    Returns:
        ``out``, or a new ordinary tensor.

    Raises:
        TypeError, ValueError: ``root`` is not an int, or no rank of the group.
        Others: as for :func:`tdcoll.all_gather`.

    Algorithms: the root sends to every rank (a flat tree): by LL (after NCCL's protocol of that
    name), by stores with a signal per chunk, or by puts.
    """
    tensors = (tensor,) if out is None else (tensor, out)
    options = CollectiveOptions(None, algorithm, symmetric, root=root)
    return run(OPERATION, tensors, options, group, ctx)


def broadcast_(
    tensor: torch.Tensor,
    root: int = 0,
    *,
    group: runtime.Group = None,
    ctx: CollectiveContext | None = None,
    algorithm: str | Plan = "auto",
) -> torch.Tensor:
    """``[...] -> the same``: broadcast in place; :func:`broadcast` with ``out=tensor``.

    >>> tdcoll.broadcast_(x, root=1)

    Args:
        tensor: as for :func:`broadcast`; the result. Must not require grad, unless under
            ``torch.no_grad()``.
        root, group, ctx, algorithm: as for :func:`broadcast`.

    Returns:
        ``tensor``.

    Raises:
        Errors as :func:`broadcast`.
    """
    options = CollectiveOptions(None, algorithm, root=root)
    return run(OPERATION, (tensor, tensor), options, group, ctx, names=("tensor", "tensor"))
