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

    Collective over ``ctx``'s group; asynchronous on its stream, with no synchronisation, and CUDA-graph safe after one
    eager call of the size. A call of more than ``ctx.max_bytes_per_rank`` bytes per part (between nodes, of half as
    many) is several epochs, one launch each.

    Sums are in fp32 for fp8, fp16 and bf16, in rank order inside each node, then in node order; a mean is the sum
    divided once; what comes out is rounded once. So the bits are the same in every run, for every algorithm and size.
    Maximum and minimum propagate NaN, integers wrap, and no floating-point result is -0.0. A sum that is too large for
    e4m3fn becomes its largest number, 448, with its sign, also where the sum is infinite; one that is too large for
    e5m2 becomes infinite. (So does ``tensor.to(dtype)`` from PyTorch 2.12 on.)

    Differentiable for ``"sum"`` and ``"mean"``: the gradient is :func:`tdcoll.all_gather`'s on the same context.
    So all ranks pass a tensor that requires grad, or none does, and their backward passes make the same calls in the
    same order.

    Args:
        tensor: a part for each rank, contiguous, on the context's device, of fp16, bf16, fp32, fp64, fp8 (e4m3fn,
            e5m2), int32, int64, int8 or uint8. With ``out`` it may be ``[world, n, ...]`` as well; without, the first
            extent is what is divided.
        ctx: None: a context of tdcoll's own of all ranks, which is made at the first call and when a larger one comes.
            Making one is collective and synchronises.
        out: where the result goes, contiguous, same dtype. Made if None. May be this rank's own part of ``tensor``, and
            must not overlap it otherwise. It has no gradient: ``tensor`` must not require grad then, unless under
            ``torch.no_grad()``.
        op: ``"sum"``, ``"mean"`` (floating point only), ``"max"``, ``"min"`` or ``"prod"`` (not of fp8); of int8 and
            uint8 ``"max"`` or ``"min"``. Or the same as ``torch.distributed.ReduceOp``.
        algorithm: ``"ll"``, ``"direct"``, ``"pull"``, ``"1d"`` or ``"auto"``, or a :class:`~tdcoll.Plan`.
        symmetric: ``tensor`` is symmetric memory, which peers may read during the call: made by :func:`tdcoll.empty`
            over the context's group, or PyTorch's symmetric memory (``torch.distributed._symmetric_memory``) of its
            ProcessGroup; at the same offset on all ranks. All ranks pass the same. ``"pull"`` needs it.

    Returns:
        ``out``, or a new ordinary tensor.

    Raises:
        ContextError: the context is closed, bound to another stream, or far too small (the message has the number).
        CollectiveTimeout: an earlier wait on the context expired.
        NotSymmetricError: (``symmetric``) ``tensor`` is not symmetric memory of the context's group.
        RankMismatchError: (``debug``) ranks differ in size, dtype, operation, algorithm or ``requires_grad``.
        NotInitializedError: (without ``ctx``) before ``tdcoll.initialize()``.
        HeapExhaustedError: (without ``ctx``) the symmetric heap has no room.
        TypeError, ValueError: an argument is not as described; in a backward pass, ``op`` is neither sum nor mean.

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

    The context is tdcoll's own, see :func:`reduce_scatter`; ``tdcoll.finalize()`` frees it. Make the first
    and the largest call before capturing a CUDA graph.

    Args:
        output: ``[n, ...]``, contiguous, same dtype as ``input``.
        input: ``[world * n, ...]`` or ``[world, n, ...]``, contiguous.
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
        Others: as :func:`reduce_scatter`.
    """
    return drop_in(SPEC, output, input, op, group, async_op, ("input", "output"))
