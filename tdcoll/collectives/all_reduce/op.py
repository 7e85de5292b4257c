# SPDX-License-Identifier: Apache-2.0
"""All-reduce: what users call."""

from __future__ import annotations

from typing import Any

import torch

from tdcoll import runtime
from tdcoll.collectives._host.call import make
from tdcoll.collectives._host.drop_in import drop_in
from tdcoll.collectives._host.plan import Plan
from tdcoll.collectives.all_reduce.spec import SPEC
from tdcoll.context import CollectiveContext

__all__ = ["all_reduce", "all_reduce_", "all_reduce_in_group"]


def all_reduce(
    tensor: torch.Tensor,
    ctx: CollectiveContext | None = None,
    out: torch.Tensor | None = None,
    op: str | torch.distributed.ReduceOp = "sum",
    algorithm: str | Plan = "auto",
    symmetric: bool = False,
) -> torch.Tensor:
    """``[...] -> the same``: the reduction of all ranks' tensors, with the same bits on every rank.

    Collective, asynchronous and CUDA-graph safe as :func:`tdcoll.all_gather`. A call whose parts (one for each rank)
    are over half of ``ctx.max_bytes_per_rank``, between nodes over a third, is several epochs, one launch each. By
    ``"two_shot"`` a call of floating point is several epochs if its parts are over half of ``ctx.lamport_bytes`` (and
    do not go by words that carry a flag).

    Sums are in fp32 for fp8, fp16 and bf16, in rank order inside each node, then in node order; a mean is the sum
    divided once; what comes out is rounded once. So the bits are the same on all ranks and in every run, for every
    algorithm and size, and for each row of a batch whatever else is in it. Maximum and minimum propagate NaN, integers
    wrap, and no floating-point result is -0.0. A sum that is too large for e4m3fn becomes its largest number, 448, with
    its sign, also where the sum is infinite; one that is too large for e5m2 becomes infinite. (So does
    ``tensor.to(dtype)`` from PyTorch 2.12 on.)

    Differentiable for ``"sum"`` and ``"mean"``, under the rules of :func:`tdcoll.all_gather`: the gradient is the same
    all-reduce of the result's.

    Args:
        tensor: contiguous, on the context's device, of fp16, bf16, fp32, fp64, fp8 (e4m3fn, e5m2), int32, int64, int8
            or uint8; the same shape on all ranks, any number of elements.
        ctx: as for :func:`tdcoll.all_gather`.
        out: where the result goes: contiguous, of the same shape and dtype; made, and without a gradient, as there. May
            be ``tensor``, and must not overlap it otherwise.
        op: ``"sum"``, ``"mean"`` (floating point only), ``"max"``, ``"min"`` or ``"prod"`` (not of fp8); of int8 and
            uint8 ``"max"`` or ``"min"``. Or the same as ``torch.distributed.ReduceOp``.
        algorithm: ``"one_shot"``, ``"two_shot"``, ``"direct"``, ``"1d"``, ``"2d"`` or ``"auto"``, or a
            :class:`~tdcoll.Plan`.
        symmetric: ``out`` is symmetric memory, which peers may write to during the call: made by :func:`tdcoll.empty`
            over the context's group, or PyTorch's symmetric memory (``torch.distributed._symmetric_memory``) of its
            ProcessGroup; at the same offset on all ranks. All ranks pass the same. ``"direct"`` then stores sums
            straight into it, and copies nothing; other algorithms are as without it. After a timeout, peers that are
            only late may still write to ``out``: don't use it for anything else in this job.

    Returns:
        ``out``, or a new ordinary tensor.

    Raises:
        NotSymmetricError: (``symmetric``) ``out`` is not symmetric memory of the context's group.
        ValueError: (in a backward pass) ``op`` is neither sum nor mean.
        Others: as :func:`tdcoll.all_gather`.

    Algorithms: one-shot, every rank reduces what all have sent it; two-shot, a reduce-scatter and an all-gather in one
    kernel (Rabenseifner, 2004). Small messages go by words that need no signal: data that announces itself (the Lamport
    kernels of TensorRT-LLM) or carries a flag (NCCL's LL). Others go by stores (``"direct"``) or puts (``"1d"``) with a
    signal per chunk; between nodes of as many ranks each the sums of nodes go by rails (``"2d"``).
    """
    return make(SPEC, tensor, ctx, out, algorithm, op, symmetric)


def all_reduce_(
    tensor: torch.Tensor,
    ctx: CollectiveContext | None = None,
    op: str | torch.distributed.ReduceOp = "sum",
    algorithm: str | Plan = "auto",
    symmetric: bool = False,
) -> torch.Tensor:
    """``tensor`` becomes the reduction of all ranks': :func:`all_reduce` with ``out=tensor``, and the same bits.

    Args:
        tensor, ctx, op, algorithm: as for :func:`all_reduce`; ``tensor`` must not require grad, unless under
            ``torch.no_grad()``.
        symmetric: as there; ``tensor`` is the result.

    Returns:
        ``tensor``.

    Raises:
        Errors as :func:`all_reduce`.
    """
    return make(SPEC, tensor, ctx, tensor, algorithm, op, symmetric, names=("tensor", "tensor"))


def all_reduce_in_group(
    tensor: torch.Tensor,
    op: Any = torch.distributed.ReduceOp.SUM,
    group: runtime.Group = None,
    async_op: bool = False,
) -> torch.distributed.Work | None:
    """Drop-in for ``torch.distributed.all_reduce``, in place, in the order of the current stream.

    Public as ``tdcoll.distributed.all_reduce``.

    Args:
        tensor: contiguous, as for :func:`tdcoll.all_reduce`.
        op, group, async_op: as for :func:`tdcoll.reduce_scatter_tensor`.

    Returns:
        None, or the ``Work``.

    Raises:
        Errors as :func:`tdcoll.all_reduce` and :func:`tdcoll.reduce_scatter_tensor`.
    """
    return drop_in(SPEC, tensor, tensor, op, group, async_op, ("tensor", "tensor"))
