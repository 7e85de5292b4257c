# SPDX-License-Identifier: Apache-2.0
"""Fused operations: the public functions."""

from __future__ import annotations

import torch

from tdcoll import runtime
from tdcoll.calls.context import CollectiveContext
from tdcoll.calls.plan import Plan
from tdcoll.calls.run import run
from tdcoll.fused.rms_norm import OPERATION, NormOptions


def all_reduce_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float = 1e-6,
    group: runtime.Group = None,
    ctx: CollectiveContext | None = None,
    in_place: bool = False,
    out_dtype: torch.dtype | None = None,
    scale: torch.Tensor | None = None,
    algorithm: str | Plan = "auto",
) -> tuple[torch.Tensor, ...]:
    """``[..., hidden] -> [..., hidden]``, twice: ``new = all_reduce(x) + residual``, and ``new``
    normalized.

    ``normalized = new / sqrt(mean(new ** 2) + eps) * weight`` over the last dimension, from ``new``
    as it is rounded to its dtype. Collective, asynchronous and CUDA-graph safe as
    :func:`tdcoll.all_gather`; one kernel inside a node.

    Because it has no derivative, ``x``, ``residual`` and ``weight`` must not require grad, unless
    under ``torch.no_grad()``. The operator ``torch.ops.tdcoll.all_reduce_rms_norm`` has one
    (:mod:`tdcoll.ops`).

    ``new`` has the bits of :func:`tdcoll.all_reduce` and an addition. All results have the same
    bits on every rank and in every run, for every algorithm, and for a row whatever rows are beside
    it; :mod:`tdcoll.fused.kernels_rows` says how they are computed. In between is fp32, and
    everything is rounded once.

    >>> normalized, new = tdcoll.fused.all_reduce_rms_norm(torch.ones(2, 8), torch.zeros(2, 8), torch.ones(8))
    >>> new[0, 0]
    tensor(2.)

    Args:
        x: the rows to reduce: contiguous, on the context's device, of fp16, bf16 or fp32.
            ``hidden`` is at most 16384 and ``hidden * x.element_size()`` a multiple of 16.
        residual: the rows to add, of the same shape and dtype, and with the same values on all
            ranks.
        weight: ``[hidden]``, of the same dtype or fp32; the same on all ranks.
        eps: added to the mean of squares.
        group, ctx: as for :func:`tdcoll.all_gather`.
        in_place: write ``new`` over ``residual``.
        out_dtype: ``torch.float8_e4m3fn`` for a quantized ``normalized``; else None or the dtype of
            ``x``.
        scale: with fp8: the divisor of ``normalized``, one fp32 on the device. If None, each row
            has its own.
        algorithm: ``"one_shot"``, ``"two_shot"``, ``"composed"`` (an all-reduce and a kernel) or
            ``"auto"``. If the ranks are not of one node, or ``lamport_bytes`` do not hold the rows,
            ``"auto"`` is ``"composed"``.

    Returns:
        ``(normalized, new)``; with fp8 ``(normalized, new, scale)``, of which the last is ``scale``
        or, for each row, fp32 ``[..., 1]``. A tensor whose address is no multiple of 16 is copied
        first.

    Raises:
        RankMismatchError: (``debug``) ranks pass different shapes, dtypes or algorithms.
        Others: as :func:`tdcoll.all_gather`.

    Algorithms: one-shot and two-shot all-reduces by the Lamport protocol, followed by the norm in
    the same kernel, are TensorRT-LLM's; the fixed order of the sums, and rows of several thread
    blocks, are tdcoll's.
    """
    tensors = (x, residual, weight) if scale is None else (x, residual, weight, scale)
    options = NormOptions(eps, in_place, out_dtype, algorithm)
    made: tuple[torch.Tensor, ...] = run(OPERATION, tensors, options, group, ctx)
    return made
