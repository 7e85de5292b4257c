# SPDX-License-Identifier: Apache-2.0
"""Dense reductions whose result has another dtype than their tensor: :class:`CastCall`.

Kernels of reductions have one dtype. Such a call therefore takes up to three steps: the tensor is
copied to fp32, which is exact; the reduction of fp32 applies the epilogue; its result is rounded to
the dtype that is asked for. Elements are summed and rounded as if the kernels did it, because the
accumulator of these dtypes is fp32. But all ranks send fp32. Casts wait for no rank, so
``max_blocks`` of a context doesn't count their thread blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton

from tdcoll.calls.call_launches import prepare_steps
from tdcoll.calls.context import CollectiveContext
from tdcoll.calls.kernel_launch import KernelLaunch
from tdcoll.calls.operation import Bound, PreparedCall
from tdcoll.calls.tensors import tensors_overlap
from tdcoll.primitives import casts
from tdcoll.primitives.reduce import triton_dtype

WIDE = torch.float32

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
"""Dtypes of the tensors and of the results of such calls."""

_TILE = 4096


def check_out_dtype(name: str, tensor: torch.Tensor, out_dtype: Any, symmetric: bool) -> None:
    """Raise ``ValueError`` unless a reduction of the argument ``name`` can have results of this
    dtype."""
    known = ", ".join(map(str, DTYPES))
    if out_dtype not in DTYPES:
        raise ValueError(f"out_dtype must be None, {known}; got {out_dtype!r}")
    if out_dtype == tensor.dtype:
        return
    if tensor.dtype not in DTYPES:
        raise ValueError(
            f"out_dtype must be None or the dtype of {name} unless that is one of {known}; got "
            f"{out_dtype} with {name} of {tensor.dtype}"
        )
    if symmetric:
        raise ValueError(
            f"symmetric must be False if out_dtype isn't the dtype of {name}, because no peer writes "
            f"such a result; got True with out_dtype={out_dtype}"
        )


class CastCall(PreparedCall):
    """A reduction with an epilogue whose result has a dtype of its own.

    Args:
        reduction: Of fp32, prepared for ``(tensor, *read)``, or for ``(tensor, out, *read)`` if the
            result is fp32.
        tensor: The tensor of the first call.
        out_dtype: Of the result.
        n_tensors: The first tensors of a request, which are the reduction's.
        shape: Of results that calls make.
    """

    __slots__ = (
        "_n_tensors",
        "_narrow",
        "_new_result",
        "_new_wide",
        "_out_dtype",
        "_reduction",
        "_widen",
    )

    def __init__(
        self,
        ctx: CollectiveContext,
        operation: str,
        reduction: PreparedCall,
        tensor: torch.Tensor,
        out_dtype: torch.dtype,
        n_tensors: int,
        shape: Sequence[int],
    ) -> None:
        self._reduction = reduction
        self._n_tensors = n_tensors
        self._out_dtype = out_dtype
        make = functools.partial(torch.empty, device=ctx.device)
        self._new_wide = functools.partial(make, tuple(tensor.shape), dtype=WIDE)
        self._new_result = functools.partial(make, tuple(shape), dtype=out_dtype)
        n_results = torch.Size(shape).numel()
        self._widen = _cast_step(ctx, tensor.dtype, WIDE, tensor.numel())
        self._narrow = _cast_step(ctx, WIDE, out_dtype, n_results)
        self.record = reduction.record
        self.complex = False
        self.launch = self._launch
        casts_of_call = [step for step in (self._widen, self._narrow) if step is not None]
        dtypes = (tensor.dtype, out_dtype)
        prepare_steps(ctx, operation, ("casts", *dtypes, tensor.numel()), casts_of_call)
        self.variant = (reduction.variant, dtypes)

    def bind(self, *tensors: Any) -> Bound | None:
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            return None
        tensor = tensors[0]
        read = tensors[self._n_tensors :]
        if self._n_tensors == 2:
            out = tensors[1]
            if any(tensors_overlap(out, other) for other in (tensor, *read)):
                return None
        else:
            out = self._new_result()
        wide = tensor if tensor.dtype is WIDE else self._new_wide()
        own = (wide, out) if self._out_dtype is WIDE else (wide,)
        bound = self._reduction.bind(*own, *read)
        if bound is None:
            return None
        sums, frame = bound
        return out, (tensor, wide, sums, out, frame)

    def _launch(
        self,
        stream: int,
        tensor: torch.Tensor,
        wide: torch.Tensor,
        sums: torch.Tensor,
        out: torch.Tensor,
        frame: tuple[Any, ...],
    ) -> None:
        if self._widen is not None:
            self._widen(stream, tensor.data_ptr(), wide.data_ptr())
        self._reduction.launch(stream, *frame)
        if self._narrow is not None:
            self._narrow(stream, sums.data_ptr(), out.data_ptr())


def _cast_step(
    ctx: CollectiveContext, source: torch.dtype, target: torch.dtype, count: int
) -> KernelLaunch | None:
    """Return the launch that casts so many elements; None if there is nothing to do."""
    if source == target or not count:
        return None
    arguments = {
        "count": count,
        "FROM": triton_dtype(source),
        "TO": triton_dtype(target),
        "TILE": _TILE,
    }
    return KernelLaunch(
        casts.cast,
        triton.cdiv(count, _TILE),
        arguments,
        ("source", "out"),
        num_warps=8,
        allow_pdl=ctx.allow_pdl,
    )
