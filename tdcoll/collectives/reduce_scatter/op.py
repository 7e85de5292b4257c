# SPDX-License-Identifier: Apache-2.0
"""Reduce-scatter: what users call."""

from __future__ import annotations

from typing import Any

import torch

from tdcoll import runtime
from tdcoll.collectives._host.call import make
from tdcoll.collectives._host.drop_in import drop_in
from tdcoll.collectives._host.plan import Plan
from tdcoll.collectives.reduce_scatter.spec import SPEC
from tdcoll.context import CollectiveContext

__all__ = ["reduce_scatter", "reduce_scatter_tensor"]


def reduce_scatter(
    tensor: torch.Tensor,
    ctx: CollectiveContext | None = None,
    out: torch.Tensor | None = None,
    op: str | torch.distributed.ReduceOp = "sum",
    algorithm: str | Plan = "auto",
    symmetric: bool = False,
) -> torch.Tensor:
    """``[world * n, ...] -> [n, ...]``: this rank's part of the reduction of all ranks' tensors.

    Collective, asynchronous and CUDA-graph safe as :func:`tdcoll.all_gather`. A call of more than
    ``ctx.max_bytes_per_rank`` bytes per part (between nodes, of half as many) is several epochs, one launch each.

    The bits are those that :func:`tdcoll.all_reduce` gives, which says how elements are reduced. Differentiable for
    ``"sum"`` and ``"mean"``, under the rules of :func:`tdcoll.all_gather`, which makes the gradient.

    Args:
        tensor: a part for each rank, contiguous, on the context's device, of fp16, bf16, fp32, fp64, fp8 (e4m3fn,
            e5m2), int32, int64, int8 or uint8. With ``out`` it may be ``[world, n, ...]`` as well; without, the first
            extent is what is divided.
        ctx: as for :func:`tdcoll.all_gather`.
        out: where the result goes, contiguous, same dtype; made, and without a gradient, as there. May be this rank's
            own part of ``tensor``, and must not overlap it otherwise.
        op: as for :func:`tdcoll.all_reduce`.
        algorithm: ``"ll"``, ``"direct"``, ``"pull"``, ``"1d"`` or ``"auto"``, or a :class:`~tdcoll.Plan`.
        symmetric: ``tensor`` is symmetric memory, which peers may read during the call; of which kinds, see
            :func:`tdcoll.all_reduce`. All ranks pass the same. ``"pull"`` needs it.

    Returns:
        ``out``, or a new ordinary tensor.

    Raises:
        NotSymmetricError: (``symmetric``) ``tensor`` is not symmetric memory of the context's group.
        ValueError: (in a backward pass) ``op`` is neither sum nor mean.
        Others: as :func:`tdcoll.all_gather`.

    Algorithms: one stage, in which every rank sends each part to the rank that reduces it (direct reduce-scatter;
    Thakur, Rabenseifner and Gropp, 2005, call its pattern pairwise exchange); by words that need no signal (``"ll"``:
    data that announces itself, as in TensorRT-LLM's Lamport kernels, or carries a flag, as in NCCL's LL), by stores
    with a signal per chunk (``"direct"``), or by puts (``"1d"``). ``"pull"`` is the same by loads, without a staging
    copy.
    """
    return make(SPEC, tensor, ctx, out, algorithm, op, symmetric)


def reduce_scatter_tensor(
    output: torch.Tensor,
    input: torch.Tensor,
    op: Any = torch.distributed.ReduceOp.SUM,
    group: runtime.Group = None,
    async_op: bool = False,
) -> torch.distributed.Work | None:
    """Drop-in for ``torch.distributed.reduce_scatter_tensor``, in the order of the current stream.

    Args:
        output: ``[n, ...]``, contiguous, same dtype as ``input``.
        input: ``[world * n, ...]`` or ``[world, n, ...]``, contiguous.
        op: ``ReduceOp.SUM``, ``AVG``, ``MAX``, ``MIN`` or ``PRODUCT``; or its name, ``"sum"`` for instance.
        group, async_op: as for :func:`tdcoll.all_gather_into_tensor`, whose context is of the same kind.

    Returns:
        None, or the ``Work``.

    Raises:
        ValueError: ``op`` is another one, or not of this dtype.
        Others: as :func:`reduce_scatter` and :func:`tdcoll.all_gather_into_tensor`.
    """
    return drop_in(SPEC, output, input, op, group, async_op, ("input", "output"))
