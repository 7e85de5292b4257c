# SPDX-License-Identifier: Apache-2.0
"""All-reduce + residual + RMSNorm: the operation."""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import torch
import triton

from tdcoll.base import arguments
from tdcoll.base.call_log import record_of
from tdcoll.calls.context import CollectiveContext
from tdcoll.calls.explain import Explanation
from tdcoll.calls.launch_spec import KernelOptions
from tdcoll.calls.operation import Bound, PreparedCall, Request
from tdcoll.calls.plan import Facts, Plan
from tdcoll.calls.tensors import check_fits, check_tensor, tensors_overlap
from tdcoll.collectives.all_reduce.spec import SPEC as ALL_REDUCE
from tdcoll.fused import kernels, policy
from tdcoll.fused import kernels_rows as arithmetic
from tdcoll.fused.operation import (
    FusedOperation,
    aligned,
    check_scale,
    requires_gradient,
)
from tdcoll.fused.policy import COMPOSED, NAME, ONE_SHOT, NormRows, choose
from tdcoll.fused.prepared import Frame, PreparedSteps
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
            check_scale("scale", scale, ctx.device, (1,))
        arguments.instance("algorithm", algorithm, (str, Plan), "a str")

    def explain(self, request: Request, ctx: Any) -> Explanation:
        x = request.tensors[0]
        return policy.explain_rows(
            _rows_of(x), Facts.of(ctx, 0, x.dtype), request.options.algorithm
        )

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
    if not policy.takes(hidden, x.element_size()):
        raise ValueError(
            f"{name} must have rows of at most {policy.MOST_HIDDEN} elements, a multiple of "
            f"{16 // x.element_size()} of {x.dtype}; got shape {list(x.shape)}"
        )


def _rows_of(x: torch.Tensor) -> NormRows:
    hidden = x.shape[-1]
    return NormRows(x.numel() // hidden, hidden, x.itemsize)


class _PreparedNorm(PreparedSteps):
    """One kernel, or an all-reduce and a kernel if the plan is composed."""

    def __init__(self, request: Request, ctx: CollectiveContext, plan: Plan) -> None:
        super().__init__(ctx, NAME)
        x, _, weight, *scales = request.tensors
        options: NormOptions = request.options
        self._in_place = options.in_place
        self._results = ["out", "residual" if options.in_place else "new"]
        parameters = {name: name for name in ("x", "residual", "weight", "new", "out", "scale")}
        parameters["residual"] = "old"
        self.add_temporary("out", x.shape, options.out_dtype or x.dtype)
        if options.in_place:
            parameters["new"] = "old"
        else:
            self.add_temporary("new", x.shape, x.dtype)
        scaling = arithmetic.NONE
        if options.out_dtype is _FP8:
            self._results.append("scale")
            scaling = arithmetic.GIVEN
            if not scales:
                scaling = arithmetic.PER_ROW
                self.add_temporary("scale", (*x.shape[:-1], 1), torch.float32)
        if not x.numel():
            return
        constants = {
            "HIDDEN": x.shape[-1],
            "DTYPE": triton_dtype(x.dtype),
            "WEIGHT": triton_dtype(weight.dtype),
            "SCALE": scaling.value,
            "PIECES": plan.chunks,
            "ROOM": triton.next_power_of_2(plan.chunks),
            "BLOCK": plan.chunk // 16,
        }
        (eps_bits,) = struct.unpack("<i", struct.pack("<f", options.eps))
        arguments: dict[str, Any] = {"eps": eps_bits, **constants}
        record = None
        if plan.algorithm == COMPOSED:
            kernel = kernels.norm_rows
            facts = Facts.of(ctx, x.nbytes, x.dtype)
            self.add_temporary("summed", x.shape, x.dtype)
            self.add_collective(ALL_REDUCE, facts, "x", "summed", KernelOptions(x.dtype, "sum"))
            parameters["x"] = "summed"
        else:
            kernel = kernels.norm_rows_two_shot
            if plan.algorithm == ONE_SHOT:
                kernel = kernels.norm_rows_one_shot
            record = record_of(NAME, 0, 1)
            arguments["rows"] = _rows_of(x).rows
            arguments["inbox"] = ctx.device_lamport
            arguments["g"] = ctx.device_group
        self.add_kernel(
            kernel,
            plan.blocks,
            arguments,
            parameters,
            record,
            num_warps=plan.num_warps,
            maxnreg=_REGISTERS,
        )
        if options.in_place:
            self.add_host_step(_copy_to_residual)
        variant = (NAME, plan.algorithm, *constants.values(), plan.num_warps)
        self.complete(plan.algorithm, x.nbytes, variant)

    def bind(self, x: Any, residual: Any, weight: Any, scale: Any = None) -> Bound | None:
        if requires_gradient(x, residual, weight):
            return None
        if self._in_place and tensors_overlap(x, residual):
            return None
        # Tensors rather than addresses, because the copies have to live until the launch.
        frame = {
            "x": aligned(x),
            "residual": residual,
            "old": aligned(residual),
            "weight": aligned(weight),
            "scale": scale,
        }
        self.make_temporaries(frame)
        return tuple([frame[name] for name in self._results]), (frame,)


def _copy_to_residual(frame: Frame) -> None:
    """Finish a call in place whose residual was copied, because its address is odd."""
    if frame["residual"] is not frame["old"]:
        frame["residual"].copy_(frame["old"])
