# SPDX-License-Identifier: Apache-2.0
"""All-reduce: the public functions."""

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
from tdcoll.collectives.all_reduce.spec import OPERATION, WITH_EPILOGUE


def all_reduce(
    tensor: torch.Tensor,
    op: str | torch.distributed.ReduceOp = "sum",
    *,
    out: torch.Tensor | None = None,
    group: runtime.Group = None,
    ctx: CollectiveContext | None = None,
    algorithm: str | Plan = "auto",
    symmetric: bool = False,
    epilogue: Callable[..., Any] | None = None,
    extra: Any = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """``[...] -> the same``: reduce the tensors of all ranks, with the same bits on every rank.

    Collective, asynchronous and safe in CUDA graphs as :func:`tdcoll.all_gather`.

    >>> tdcoll.all_reduce(torch.ones(2), "sum")  # on 2 ranks
    tensor([2., 2.])

    The bits are the same in every run, for every algorithm and size, and for a row whatever else is
    in the batch: ``docs/architecture.md#dense-reductions`` describes how elements are summed and
    rounded. Differentiable for ``"sum"`` and ``"mean"``, under the rules of
    :func:`tdcoll.all_gather`.

    Args:
        tensor: contiguous, on the context's device, of fp16, bf16, fp32, fp64, fp8 (e4m3fn, e5m2),
            int32, int64, int8 or uint8; the same shape on all ranks.
        op: ``"sum"``, ``"mean"`` or ``"avg"`` (floating point only), ``"max"``, ``"min"``,
            ``"prod"`` or ``"product"`` (not of fp8), or a ``torch.distributed.ReduceOp``; of int8
            and uint8 ``"max"`` or ``"min"``.
        out: the result: contiguous, of the same shape and dtype (or of ``out_dtype``). Made if
            None. May be ``tensor``, and must not overlap it otherwise. It gets no gradient.
        group, ctx: as for :func:`tdcoll.all_gather`.
        algorithm: ``"auto"``, ``"one_shot"``, ``"two_shot"``, ``"direct"``, ``"loop"``, ``"ce"``,
            ``"1d"``, ``"2d"``.
        symmetric: ``out`` is symmetric memory, as for :func:`tdcoll.all_gather_`, on all ranks.
            ``"direct"``, ``"loop"`` and ``"ce"`` then bring sums directly into it, without a copy;
            others don't use that.
        epilogue: a function of ``triton.jit`` from sums to results
            (:mod:`tdcoll.primitives.epilogue`), which gets each element before it is rounded. The
            call then has no derivative, and ``tensor`` must not require grad, unless under
            ``torch.no_grad()``.
        extra: for the epilogue: a NamedTuple of tensors and numbers, or None. Its tensors are
            contiguous, on the context's device, and don't overlap ``out``. All ranks must pass
            equal values, because one rank may compute what all ranks get.
        out_dtype: the dtype of the result, to which sums, through the epilogue, are rounded once:
            fp32, bf16, fp16 or fp8, for a ``tensor`` of one of these. The call then has no
            derivative. If it isn't the dtype of ``tensor``, ranks send fp32, ``out`` must not
            overlap ``tensor``, and ``symmetric`` must be False. None: the dtype of ``tensor``.

    Returns:
        ``out``, or a new ordinary tensor.

    Raises:
        NotSymmetricError: (``symmetric``) ``out`` is not symmetric memory of the group.
        ValueError: (in a backward pass) ``op`` is neither sum nor mean.
        Others: as for :func:`tdcoll.all_gather`.

    Algorithms: one-shot and two-shot (Rabenseifner, 2004) by the Lamport protocol (TensorRT-LLM) or
    LL (NCCL); stores or puts with a signal per chunk; between nodes, the sums of nodes are
    exchanged by rails.
    """
    tensors = (tensor,) if out is None else (tensor, out)
    options = CollectiveOptions(op, algorithm, symmetric)
    if epilogue is None and extra is None and out_dtype is None:
        return run(OPERATION, tensors, options, group, ctx)
    return run_with_epilogue(
        WITH_EPILOGUE, tensors, options, epilogue, extra, group, ctx, out_dtype=out_dtype
    )


def all_reduce_(
    tensor: torch.Tensor,
    op: str | torch.distributed.ReduceOp = "sum",
    *,
    group: runtime.Group = None,
    ctx: CollectiveContext | None = None,
    algorithm: str | Plan = "auto",
    symmetric: bool = False,
    epilogue: Callable[..., Any] | None = None,
    extra: Any = None,
) -> torch.Tensor:
    """``[...] -> the same``: reduce in place; :func:`all_reduce` with ``out=tensor``, and the same
    bits.

    >>> tdcoll.all_reduce_(x, "mean", group=[0, 1])

    Args:
        tensor: as for :func:`all_reduce`; the result. Must not require grad, unless under
            ``torch.no_grad()``.
        op, group, ctx, algorithm, symmetric, epilogue, extra: as for :func:`all_reduce`.

    Returns:
        ``tensor``.

    Raises:
        Errors as :func:`all_reduce`.
    """
    options = CollectiveOptions(op, algorithm, symmetric)
    names = ("tensor", "tensor")
    tensors = (tensor, tensor)
    if epilogue is None and extra is None:
        return run(OPERATION, tensors, options, group, ctx, names)
    return run_with_epilogue(WITH_EPILOGUE, tensors, options, epilogue, extra, group, ctx, names)
