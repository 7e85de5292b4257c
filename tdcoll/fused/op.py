# SPDX-License-Identifier: Apache-2.0
"""All-reduce + residual + RMSNorm: the public function."""

from __future__ import annotations

import logging
import struct
from collections.abc import Hashable
from typing import Any

import torch
import triton

from tdcoll import runtime
from tdcoll.base import arguments
from tdcoll.base.arguments import byte_text
from tdcoll.base.call_log import kind_of
from tdcoll.base.ranges import ranged
from tdcoll.calls.call import Ready, again, check_context, check_tensor, overlap
from tdcoll.calls.context import CollectiveContext
from tdcoll.calls.launch import Launch
from tdcoll.calls.launches import facts_of, launches_of, prepare
from tdcoll.calls.plan import Plan
from tdcoll.calls.pool import pooled, strided_bytes
from tdcoll.collectives.all_reduce.spec import SPEC as ALL_REDUCE
from tdcoll.fused import kernels
from tdcoll.fused import kernels_rows as arithmetic
from tdcoll.fused.policy import COMPOSED, MOST_HIDDEN, NAME, ONE_SHOT, NormRows, choose, explain_rows, takes
from tdcoll.primitives.reduce import triton_dtype

_log = logging.getLogger("tdcoll")

_FP8 = torch.float8_e4m3fn
_REGISTERS = 128  # of a thread, if a thread block has the most warps, 16

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""Dtypes of rows that can be reduced and normalized."""


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
    """``[..., hidden] -> [..., hidden]``, twice: ``new = all_reduce(x) + residual``, and ``new`` normalized.

    ``normalized = new / sqrt(mean(new ** 2) + eps) * weight`` over the last dimension, from ``new`` as it is rounded to
    its dtype. Collective, asynchronous and CUDA-graph safe as :func:`tdcoll.all_gather`; one kernel inside a node.

    Because it has no derivative, ``x``, ``residual`` and ``weight`` must not require grad, unless under
    ``torch.no_grad()``. The operator ``torch.ops.tdcoll.all_reduce_rms_norm`` has one (:mod:`tdcoll.ops`).

    ``new`` has the bits of :func:`tdcoll.all_reduce` and an addition. All results have the same bits on every rank and
    in every run, for every algorithm, and for a row whatever rows are beside it; :mod:`tdcoll.fused.kernels_rows` says
    how they are computed. In between is fp32, and everything is rounded once.

    >>> normalized, new = tdcoll.fused.all_reduce_rms_norm(torch.ones(2, 8), torch.zeros(2, 8), torch.ones(8))
    >>> new[0, 0]
    tensor(2.)

    Args:
        x: the rows to reduce: contiguous, on the context's device, of fp16, bf16 or fp32. ``hidden`` is at most 16384
            and ``hidden * x.element_size()`` a multiple of 16.
        residual: the rows to add, of the same shape and dtype, and with the same values on all ranks.
        weight: ``[hidden]``, of the same dtype or fp32; the same on all ranks.
        eps: added to the mean of squares.
        group, ctx: as for :func:`tdcoll.all_gather`.
        in_place: write ``new`` over ``residual``.
        out_dtype: ``torch.float8_e4m3fn`` for a quantized ``normalized``; else None or the dtype of ``x``.
        scale: with fp8: the divisor of ``normalized``, one fp32 on the device. If None, each row has its own.
        algorithm: ``"one_shot"``, ``"two_shot"``, ``"composed"`` (an all-reduce and a kernel) or ``"auto"``. If the
            ranks are not of one node, or ``lamport_bytes`` do not hold the rows, ``"auto"`` is ``"composed"``.

    Returns:
        ``(normalized, new)``; with fp8 ``(normalized, new, scale)``, of which the last is ``scale`` or, for each row,
        fp32 ``[..., 1]``. A tensor whose address is no multiple of 16 is copied first.

    Raises:
        RankMismatchError: (``debug``) ranks pass different shapes, dtypes or algorithms.
        Others: as :func:`tdcoll.all_gather`.

    Algorithms: one-shot and two-shot all-reduces by the Lamport protocol, followed by the norm in the same kernel, are
    TensorRT-LLM's; the fixed order of the sums, and rows of several thread blocks, are tdcoll's.
    """
    if ctx is None:
        arguments.tensor("x", x)
        ctx = pooled(ALL_REDUCE, x, group, NAME)
    elif group is not None:
        raise ValueError(f"{NAME}: group must be None with ctx, which has a group already; got {group!r}")
    check_context(ctx)
    tensors = (x, residual, weight) if scale is None else (x, residual, weight, scale)
    key: Hashable = None
    ready = None
    try:
        # All that the launches depend on, except the tensors' addresses; types belong to it because ``True == 1``.
        shapes = x.shape, residual.shape, weight.shape, x.dtype, residual.dtype, weight.dtype
        scaling = None if scale is None else (scale.shape, scale.dtype)
        key = (NAME, *shapes, type(eps), eps, type(in_place), in_place, scaling, out_dtype, algorithm)
        ready = ctx.known.get(key)
    except (AttributeError, TypeError, RuntimeError):  # no tensors, nested ones, or no valid key
        pass
    made = None if ready is None else again(ctx, ready, *tensors)
    return _first(ctx, key, tensors, eps, in_place, out_dtype, algorithm) if made is None else made


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def _requiring(*tensors: Any) -> list[str]:
    """Return the names of those of x, residual and weight that require grad."""
    pairs = zip(("x", "residual", "weight"), tensors, strict=True)
    return [name for name, tensor in pairs if getattr(tensor, "requires_grad", False)]


def _overlap(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two contiguous tensors share memory."""
    return overlap(first.data_ptr(), first.nbytes, second.data_ptr(), second.nbytes, None)


def _first(
    ctx: CollectiveContext,
    key: Hashable,
    tensors: tuple[Any, ...],
    eps: Any,
    in_place: Any,
    out_dtype: Any,
    algorithm: Any,
) -> tuple[torch.Tensor, ...]:
    """Check everything, and make the call; return its result. Calls like it are then made by :func:`again`."""
    x = tensors[0]

    def checked() -> tuple[Ready, Any]:
        _check(ctx, *tensors, eps=eps, in_place=in_place, out_dtype=out_dtype, algorithm=algorithm)
        ready = ctx.known.get(key) or _ready(ctx, tensors, eps, in_place, out_dtype, algorithm)
        return ready, ready.place(*tensors)

    facts = {
        "bytes": strided_bytes(x),
        "dtype": getattr(x, "dtype", None),
        "shape": "nested" if getattr(x, "is_nested", False) else str(tuple(getattr(x, "shape", ()))),
        "eps": eps,
        "out_dtype": str(out_dtype),
        "scale": len(tensors) > 3,
        "algorithm": algorithm,
    }
    with ctx.calling(NAME, facts, checked) as (ready, (result, given)):
        ctx.wait_for_loads(NAME, key)
        ctx.noted(ready.made)
        ready.run(ctx.current_stream(), *given)
    ctx.once(key, lambda: ready)  # not before, because a call that ranks disagree about is compared again
    made: tuple[torch.Tensor, ...] = result
    return made


def _check(
    ctx: CollectiveContext, x: Any, residual: Any, weight: Any, scale: Any = None,
    *, eps: Any, in_place: Any, out_dtype: Any, algorithm: Any,
) -> None:  # fmt: skip
    """Raise unless such a call can be made."""
    device = ctx.device
    check_tensor("x", x, device)
    if x.dtype not in DTYPES:
        raise TypeError(f"x must be of float16, bfloat16 or float32; got {x.dtype}")
    hidden = x.shape[-1] if x.dim() else 0
    if not takes(hidden, x.element_size()):
        raise ValueError(
            f"x must have rows of at most {MOST_HIDDEN} elements, a multiple of {16 // x.element_size()} of {x.dtype}; "
            f"got shape {list(x.shape)}"
        )
    check_tensor("residual", residual, device)
    if residual.shape != x.shape or residual.dtype != x.dtype:
        raise ValueError(
            f"residual must be {x.dtype} of shape {list(x.shape)}; got {residual.dtype} of {list(residual.shape)}"
        )
    check_tensor("weight", weight, device)
    if weight.shape != (hidden,) or weight.dtype not in (x.dtype, torch.float32):
        allowed = " or ".join(dict.fromkeys((str(x.dtype), "torch.float32")))
        raise ValueError(f"weight must be {allowed} of shape [{hidden}]; got {weight.dtype} of {list(weight.shape)}")
    if isinstance(eps, bool) or not isinstance(eps, (int, float)):
        raise TypeError(f"eps must be a number, got {eps!r}")
    if not 0 <= eps < 1e30:
        raise ValueError(f"eps must be at least 0 and finite, got {eps!r}")
    if torch.is_grad_enabled() and (names := _requiring(x, residual, weight)):
        raise ValueError(
            f"{names[0]} must not require grad, since the call has no derivative; use the operator "
            f"torch.ops.tdcoll.{NAME}, which has one, pass {names[0]}.detach(), or make the call under torch.no_grad()"
        )
    arguments.instance("in_place", in_place, bool, "a bool")
    if in_place and _overlap(x, residual):
        raise ValueError("residual must not overlap x for a call in place")
    if out_dtype is not None and out_dtype not in (x.dtype, _FP8):
        raise ValueError(f"out_dtype must be None, {x.dtype} or {_FP8}; got {out_dtype!r}")
    if scale is not None:
        if out_dtype is not _FP8:
            raise ValueError(f"scale is for out_dtype={_FP8}; got out_dtype={out_dtype}")
        check_tensor("scale", scale, device)
        if scale.numel() != 1 or scale.dtype is not torch.float32:
            raise ValueError(f"scale must be one torch.float32; got {scale.dtype} of shape {list(scale.shape)}")
    arguments.instance("algorithm", algorithm, (str, Plan), "a str")


def _ready(
    ctx: CollectiveContext, tensors: tuple[Any, ...], eps: Any, in_place: bool, out_dtype: Any, algorithm: Any
) -> Ready:
    """Return the object that makes calls like this one; its kernel is compiled and loaded."""
    x, _, weight = tensors[:3]
    hidden, shape = x.shape[-1], x.shape
    rows = NormRows(shape.numel() // hidden, hidden, x.dtype.itemsize)
    facts = facts_of(ctx, 0, x.dtype)
    plan = choose(rows, facts, algorithm)
    if ctx.rank == 0 and _log.isEnabledFor(logging.DEBUG):
        _log.debug("%s", explain_rows(rows, facts, algorithm).line)
    composed, by_rows = plan.algorithm == COMPOSED, out_dtype is _FP8 and len(tensors) == 3

    def place(x: Any, residual: Any, weight: Any, scale: Any = None) -> tuple[Any, tuple[Any, ...]] | None:
        if torch.is_grad_enabled() and _requiring(x, residual, weight):
            return None
        if in_place and _overlap(x, residual):
            return None
        given, residual = residual, _aligned(residual)
        new = residual if in_place else torch.empty_like(x)
        out = torch.empty_like(x) if out_dtype is None else torch.empty(shape, dtype=out_dtype, device=x.device)
        if by_rows:
            scale = torch.empty((*shape[:-1], 1), dtype=torch.float32, device=x.device)
        summed = torch.empty_like(x) if composed else None
        result = given if in_place else new
        made = (out, result) if out_dtype is not _FP8 else (out, result, scale)
        return made, (_aligned(x), residual, _aligned(weight), new, out, scale, summed, result)

    if not rows.rows:
        return Ready(kind_of(NAME, 0), place, lambda *given: None)
    (bits,) = struct.unpack("<i", struct.pack("<f", eps))
    scaling = arithmetic.NONE if out_dtype is not _FP8 else arithmetic.PER_ROW if by_rows else arithmetic.GIVEN
    given: dict[str, Any] = {
        "eps": bits,
        "HIDDEN": hidden,
        "DTYPE": triton_dtype(x.dtype),
        "WEIGHT": triton_dtype(weight.dtype),
        "SCALE": scaling.value,
        "PIECES": plan.chunks,
        "ROOM": triton.next_power_of_2(plan.chunks),
        "BLOCK": plan.chunk // 16,
    }
    if composed:
        kernel = kernels.norm_rows
        reduce = launches_of(ALL_REDUCE, ctx, strided_bytes(x), options=(x.dtype, "sum"))
    else:
        kernel = kernels.norm_rows_one_shot if plan.algorithm == ONE_SHOT else kernels.norm_rows_two_shot
        given |= {"rows": rows.rows, "inbox": ctx.device_lamport, "g": ctx.device_group}
    changing = ("x", "residual", "weight", "new", "out", "scale")
    options: dict[str, Any] = {"num_warps": plan.num_warps, "maxnreg": _REGISTERS, "early": ctx.early}
    launch = Launch(kernel, plan.blocks, given, changing, **options)
    prepare(ctx, NAME, (NAME, plan.algorithm, *(v for k, v in given.items() if k.isupper()), plan.num_warps), [launch])

    def run(
        stream: int, x: Any, residual: Any, weight: Any, new: Any, out: Any, scale: Any, summed: Any, result: Any
    ) -> None:
        if summed is not None:
            reduce(x.data_ptr(), summed.data_ptr())
            x = summed
        scales = 0 if scale is None else scale.data_ptr()
        launch(stream, x.data_ptr(), residual.data_ptr(), weight.data_ptr(), new.data_ptr(), out.data_ptr(), scales)
        if result is not new:
            result.copy_(new)

    run_in_range = ranged(f"tdcoll.{NAME}[{plan.algorithm}, {byte_text(x.nbytes)}]", run)
    return Ready(kind_of(NAME, *(reduce.counts if composed else (0, 1))), place, run_in_range)
