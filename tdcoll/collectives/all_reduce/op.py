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

    Collective over ``ctx``'s group; asynchronous on its stream, with no synchronisation, and CUDA-graph safe after one
    eager call of the size. A call whose parts (one for each rank) are over half of ``ctx.max_bytes_per_rank``, between
    nodes over a third, is several epochs, one launch each. By ``"two_shot"`` a call of floating point is several epochs
    if its parts are over half of ``ctx.lamport_bytes`` (and do not go by words that carry a flag).

    Sums are in fp32 for fp8, fp16 and bf16, in rank order inside each node, then in node order; a mean is the sum
    divided once; what comes out is rounded once. So the bits are the same on all ranks and in every run, for every
    algorithm and size, and for each row of a batch whatever else is in it. Maximum and minimum propagate NaN, integers
    wrap, and no floating-point result is -0.0. A sum that is too large for e4m3fn becomes its largest number, 448, with
    its sign, also where the sum is infinite; one that is too large for e5m2 becomes infinite. (So does
    ``tensor.to(dtype)`` from PyTorch 2.12 on.)

    Differentiable for ``"sum"`` and ``"mean"``: the gradient is the same all-reduce of the result's, on the same
    context. So all ranks pass a tensor that requires grad, or none does, and their backward passes make the same calls
    in the same order.

    Args:
        tensor: contiguous, on the context's device, of fp16, bf16, fp32, fp64, fp8 (e4m3fn, e5m2), int32, int64, int8
            or uint8; the same shape on all ranks, any number of elements.
        ctx: None: a context of tdcoll's own of all ranks, which is made at the first call and when a larger one comes.
            Making one is collective and synchronises.
        out: where the result goes: contiguous, of the same shape and dtype. Made if None. May be ``tensor``, and must
            not overlap it otherwise. It has no gradient: ``tensor`` must not require grad then, unless under
            ``torch.no_grad()``.
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
        ContextError: the context is closed, bound to another stream, or far too small (the message has the number).
        CollectiveTimeout: an earlier wait on the context expired.
        NotSymmetricError: (``symmetric``) ``out`` is not symmetric memory of the context's group.
        RankMismatchError: (``debug``) ranks differ in size, dtype, operation, algorithm or ``requires_grad``.
        NotInitializedError: (without ``ctx``) before ``tdcoll.initialize()``.
        HeapExhaustedError: (without ``ctx``) the symmetric heap has no room.
        TypeError, ValueError: an argument is not as described; in a backward pass, ``op`` is neither sum nor mean.

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

    The context is tdcoll's own, see :func:`tdcoll.all_reduce`; ``tdcoll.finalize()`` frees it. Make the first and the
    largest call before capturing a CUDA graph. Public as ``tdcoll.distributed.all_reduce``.

    Args:
        tensor: contiguous, as for :func:`tdcoll.all_reduce`.
        op: ``ReduceOp.SUM``, ``AVG``, ``MAX``, ``MIN`` or ``PRODUCT``; or its name, ``"sum"`` for instance.
        group: a ProcessGroup, a sequence of global ranks, or None for all ranks.
        async_op: return a ``torch.distributed.Work``. The call is queued on the current stream in any case; ``wait()``
            makes the stream that is current then wait for it.

    Returns:
        None, or the ``Work``.

    Raises:
        NotInitializedError: before ``tdcoll.initialize()``.
        ValueError: ``op`` is another one, or not of this dtype.
        BackendTimeout: (``async_op``) a wait expired. ``Work.wait(timeout)`` raises it; in the simulator, the call.
        Others: as :func:`tdcoll.all_reduce`.
    """
    return drop_in(SPEC, tensor, tensor, op, group, async_op, ("tensor", "tensor"))
