# SPDX-License-Identifier: Apache-2.0
"""Reduce-scatter: what users call."""

from __future__ import annotations

from typing import Any

import torch

from tdcoll import arguments, runtime
from tdcoll.collectives._host.checks import check_context
from tdcoll.collectives._host.drop_in import inbox, pooled, pooled_for, work_of
from tdcoll.collectives._host.gradient import attach, linear, refuse
from tdcoll.collectives._host.plan import Plan
from tdcoll.collectives.reduce_scatter.algorithms import REDUCE_SCATTER
from tdcoll.context import CollectiveContext
from tdcoll.primitives.reduce import check_dtype, check_operation, operation_name

__all__ = ["pooled_context", "reduce_scatter", "reduce_scatter_tensor"]


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

    Differentiable for ``"sum"`` and ``"mean"``: the gradient is :func:`tdcoll.all_gather`'s on the same context, in
    several calls if it is larger than ``ctx.max_bytes_per_rank``. So all ranks pass a tensor that requires grad, or
    none does, and their backward passes make the same calls in the same order.

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
    given = ctx
    if ctx is None:
        ctx = pooled_context("tensor", tensor, None)
    check_context(ctx)
    if getattr(tensor, "requires_grad", False) and torch.is_grad_enabled():
        if out is not None:
            return _reduce_scatter(tensor, ctx, out, op, algorithm, symmetric=symmetric, refused=True)
        made = _reduce_scatter(tensor.detach(), ctx, None, op, algorithm, symmetric=symmetric, gradient=True)
        return attach(tensor, made, lambda grad: _derivative(grad, given, op))
    return _reduce_scatter(tensor, ctx, out, op, algorithm, symmetric=symmetric)


def _derivative(grad: torch.Tensor, ctx: CollectiveContext | None, op: Any) -> torch.Tensor:
    """``[n, ...] -> [world * n, ...]``: the gradient of the tensor that was reduced on ``ctx``."""
    import tdcoll

    mean = linear("reduce_scatter", operation_name(op)) == "mean"
    if ctx is None:
        ctx = pooled("all_gather", None, grad.nbytes)
    if mean:
        grad = grad / ctx.world_size
    if grad.nbytes <= ctx.max_bytes_per_rank:
        return tdcoll.all_gather(grad, ctx)
    pieces = grad.view(-1).split(max(1, ctx.max_bytes_per_rank // grad.itemsize))
    return torch.cat([tdcoll.all_gather(piece, ctx).view(ctx.world_size, -1) for piece in pieces], 1)


def _reduce_scatter(
    tensor: Any,
    ctx: CollectiveContext,
    out: Any,
    op: Any,
    algorithm: Any = "auto",
    names: tuple[str, str] = ("tensor", "out"),
    symmetric: bool = False,
    refused: bool = False,
    gradient: bool = False,
) -> torch.Tensor:
    """Make the call of :func:`reduce_scatter` without a gradient.

    Args:
        names: the caller's names of ``tensor`` and ``out``, for errors.
        refused: raise, since the call cannot have a gradient; in debug mode on all ranks.
        gradient: the result will have one, so there will be a backward pass; compared in debug mode.
    """
    name = operation_name(op)
    wish = (algorithm, name)
    if not refused and (made := REDUCE_SCATTER.at_once(tensor, ctx, out, wish, symmetric)) is not None:
        return made

    def options() -> tuple[torch.dtype, str]:
        if refused:
            refuse()
        check_dtype(names[0], tensor)
        return tensor.dtype, check_operation(op, tensor.dtype)

    agree = {"op": name, "symmetric": symmetric, "requires_grad": gradient}
    return REDUCE_SCATTER(
        tensor, ctx, out, algorithm, wish=wish, options=options, agree=agree, names=names, symmetric=symmetric
    )


def inbox_bytes(nbytes: int, world: int, heap_bytes: int) -> int:
    """Return the bytes per rank of tdcoll's own context for tensors of ``nbytes``; a call may be several epochs."""
    return inbox(2 * nbytes // world, world, heap_bytes)  # half is to put from


def pooled_context(name: str, tensor: Any, group: runtime.Group) -> CollectiveContext:
    """Return tdcoll's own context of a group."""
    return pooled_for("reduce_scatter", name, tensor, group, inbox_bytes)


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
    ctx = pooled_context("input", input, group)
    arguments.tensor("output", output)
    _reduce_scatter(input, ctx, output, op, names=("input", "output"))
    return work_of(ctx, output) if async_op else None
