# SPDX-License-Identifier: Apache-2.0
"""All-reduce + residual + RMSNorm: the operation."""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import torch
import triton

from tdcoll.base import arguments
from tdcoll.base.arguments import byte_text
from tdcoll.base.call_log import record_of
from tdcoll.base.ranges import ranged
from tdcoll.calls.call_launches import CallLaunches, launches_of, prepare_steps
from tdcoll.calls.context import CollectiveContext
from tdcoll.calls.explain import Explanation
from tdcoll.calls.kernel_launch import KernelLaunch
from tdcoll.calls.launch_spec import KernelOptions
from tdcoll.calls.operation import Bound, PreparedCall, Request
from tdcoll.calls.plan import Facts, Plan
from tdcoll.calls.tensors import check_fits, check_tensor
from tdcoll.collectives.all_reduce.spec import SPEC as ALL_REDUCE
from tdcoll.fused import kernels
from tdcoll.fused import kernels_rows as arithmetic
from tdcoll.fused.operation import FusedOperation, aligned, requires_gradient, tensors_overlap
from tdcoll.fused.policy import (
    COMPOSED,
    MOST_HIDDEN,
    NAME,
    ONE_SHOT,
    NormRows,
    choose,
    explain_rows,
    takes,
)
from tdcoll.primitives.reduce import triton_dtype

_FP8 = torch.float8_e4m3fn
_REGISTERS = 128  # of a thread, if a thread block has the most warps, 16

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""Dtypes of rows that can be reduced and normalized."""


class NormOptions(NamedTuple):
    """Arguments of :func:`~tdcoll.fused.op.all_reduce_rms_norm` beside tensors, as passed."""

    eps: Any
    in_place: Any
    out_dtype: Any
    algorithm: Any


class _AllReduceRmsNorm(FusedOperation):
    """Requests have ``(x, residual, weight)`` or ``(x, residual, weight, scale)``."""

    name = NAME
    collective = ALL_REDUCE
    names = ("x", "residual", "weight")
    local_options = ("in_place",)

    def check(self, request: Request, ctx: Any) -> None:
        eps, in_place, out_dtype, algorithm = request.options
        x, residual, weight, *scales = request.tensors
        check_rows("x", x, ctx.device)
        check_fits("residual", residual, ctx.device, [x.dtype], [x.shape])
        check_fits("weight", weight, ctx.device, [x.dtype, torch.float32], [x.shape[-1:]])
        arguments.number("eps", eps, 0, 1e30)
        self.check_no_gradient(request)
        arguments.instance("in_place", in_place, bool, "a bool")
        if in_place and tensors_overlap(x, residual):
            raise ValueError("residual must not overlap x for a call in place")
        if out_dtype is not None and out_dtype not in (x.dtype, _FP8):
            raise ValueError(f"out_dtype must be None, {x.dtype} or {_FP8}; got {out_dtype!r}")
        for scale in scales:
            if out_dtype is not _FP8:
                raise ValueError(f"scale is for out_dtype={_FP8}; got out_dtype={out_dtype}")
            check_tensor("scale", scale, ctx.device)
            if scale.numel() != 1 or scale.dtype is not torch.float32:
                raise ValueError(
                    f"scale must be one torch.float32; got {scale.dtype} of shape "
                    f"{list(scale.shape)}"
                )
        arguments.instance("algorithm", algorithm, (str, Plan), "a str")

    def explain(self, request: Request, ctx: Any) -> Explanation:
        x = request.tensors[0]
        return explain_rows(_rows_of(x), Facts.of(ctx, 0, x.dtype), request.options.algorithm)

    def prepare(self, request: Request, ctx: Any) -> PreparedCall:
        self.log_plan(request, ctx)
        x = request.tensors[0]
        plan = choose(_rows_of(x), Facts.of(ctx, 0, x.dtype), request.options.algorithm)
        return _PreparedNorm(request, ctx, plan)


OPERATION = _AllReduceRmsNorm()


def check_rows(name: str, x: Any, device: torch.device) -> None:
    """Raise unless kernels on ``device`` can take ``x`` as rows to normalize."""
    check_tensor(name, x, device)
    if x.dtype not in DTYPES:
        raise TypeError(f"{name} must be of float16, bfloat16 or float32; got {x.dtype}")
    hidden = x.shape[-1] if x.dim() else 0
    if not takes(hidden, x.element_size()):
        raise ValueError(
            f"{name} must have rows of at most {MOST_HIDDEN} elements, a multiple of "
            f"{16 // x.element_size()} of {x.dtype}; got shape {list(x.shape)}"
        )


def _rows_of(x: torch.Tensor) -> NormRows:
    hidden = x.shape[-1]
    return NormRows(x.numel() // hidden, hidden, x.itemsize)


class _PreparedNorm(PreparedCall):
    """One kernel, or an all-reduce and a kernel if the plan is composed."""

    complex = False

    def __init__(self, request: Request, ctx: CollectiveContext, plan: Plan) -> None:
        x, _, weight, *scales = request.tensors
        self._options: NormOptions = request.options
        self._ctx = ctx
        self._scale_is_made = self._options.out_dtype is _FP8 and not scales
        self._all_reduce: CallLaunches | None = None
        self.variant = None
        if not x.numel():
            self.record = record_of(NAME, 0)
            self.launch = _launch_nothing
            return
        self.record = record_of(NAME, 0, 1)
        if plan.algorithm == COMPOSED:
            facts = Facts.of(ctx, x.nbytes, x.dtype)
            self._all_reduce = launches_of(
                ALL_REDUCE, ctx, facts, options=KernelOptions(x.dtype, "sum")
            )
            _, *counts = self._all_reduce.record
            self.record = record_of(NAME, *counts)
        self._kernel = self._kernel_launch(x, weight, plan)
        self.launch = ranged(
            f"tdcoll.{NAME}[{plan.algorithm}, {byte_text(x.nbytes)}]", self._launch
        )

    def _kernel_launch(self, x: torch.Tensor, weight: torch.Tensor, plan: Plan) -> KernelLaunch:
        scaling = arithmetic.NONE
        if self._options.out_dtype is _FP8:
            scaling = arithmetic.PER_ROW if self._scale_is_made else arithmetic.GIVEN
        constants = {
            "HIDDEN": x.shape[-1],
            "DTYPE": triton_dtype(x.dtype),
            "WEIGHT": triton_dtype(weight.dtype),
            "SCALE": scaling.value,
            "PIECES": plan.chunks,
            "ROOM": triton.next_power_of_2(plan.chunks),
            "BLOCK": plan.chunk // 16,
        }
        (eps_bits,) = struct.unpack("<i", struct.pack("<f", self._options.eps))
        given: dict[str, Any] = {"eps": eps_bits, **constants}
        kernel = kernels.norm_rows
        if plan.algorithm != COMPOSED:
            kernel = kernels.norm_rows_two_shot
            if plan.algorithm == ONE_SHOT:
                kernel = kernels.norm_rows_one_shot
            given |= {
                "rows": _rows_of(x).rows,
                "inbox": self._ctx.device_lamport,
                "g": self._ctx.device_group,
            }
        launch = KernelLaunch(
            kernel,
            plan.blocks,
            given,
            ("x", "residual", "weight", "new", "out", "scale"),
            num_warps=plan.num_warps,
            maxnreg=_REGISTERS,
            early=self._ctx.early,
        )
        self.variant = (NAME, plan.algorithm, *constants.values(), plan.num_warps)
        prepare_steps(self._ctx, NAME, self.variant, [launch])
        return launch

    def bind(self, x: Any, residual: Any, weight: Any, scale: Any = None) -> Bound | None:
        if requires_gradient(x, residual, weight):
            return None
        in_place = self._options.in_place
        if in_place and tensors_overlap(x, residual):
            return None
        out_dtype = self._options.out_dtype
        old = aligned(residual)
        new = old if in_place else torch.empty_like(x)
        if out_dtype is None:
            out = torch.empty_like(x)
        else:
            out = torch.empty(x.shape, dtype=out_dtype, device=x.device)
        if self._scale_is_made:
            scale = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
        summed = None if self._all_reduce is None else torch.empty_like(x)
        result = residual if in_place else new
        results = (out, result) if out_dtype is not _FP8 else (out, result, scale)
        # Tensors rather than addresses, because the copies have to live until the launch.
        return results, (aligned(x), old, aligned(weight), new, out, scale, summed, result)

    def _launch(
        self,
        stream: int,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        new: torch.Tensor,
        out: torch.Tensor,
        scale: torch.Tensor | None,
        summed: torch.Tensor | None,
        result: torch.Tensor,
    ) -> None:
        if self._all_reduce is not None and summed is not None:
            self._all_reduce(x.data_ptr(), summed.data_ptr())
            x = summed
        tensors = (x, residual, weight, new, out)
        addresses = [tensor.data_ptr() for tensor in tensors]
        self._kernel(stream, *addresses, 0 if scale is None else scale.data_ptr())
        if result is not new:  # the residual of a call in place was at an odd address
            result.copy_(new)


def _launch_nothing(stream: int, *tensors: Any) -> None:
    """There are no rows."""
