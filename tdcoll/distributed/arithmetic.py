# SPDX-License-Identifier: Apache-2.0
"""Reductions that a fallback backend lacks, or has with another arithmetic than tdcoll's kernels.

A mean is the sum of all ranks in the accumulator, divided once and then rounded
(``docs/architecture.md``), so that a sum which the dtype has no number for is still averaged,
whether a call is small enough for tdcoll's kernels or not. ``PREMUL_SUM`` multiplies in the
accumulator, too. Means of integers are as NCCL has them: the sum in the dtype itself, which wraps
around, divided and truncated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.distributed import ReduceOp

from tdcoll.primitives.reduce import ACCUMULATORS, operation_name

PREMULTIPLIED = "RedOpType.PREMUL_SUM"
"""The name of NCCL's operation ``PREMUL_SUM`` in a call."""


def operation(reduce_op: Any) -> str:
    """Return tdcoll's name of a ``ReduceOp``, or torch's name if tdcoll doesn't have the
    operation."""
    return str(operation_name(reduce_op))


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which floating-point numbers of ``dtype`` are added; other dtypes as they
    are."""
    return ACCUMULATORS.get(dtype, dtype) if dtype.is_floating_point else dtype


def mean_of(total: torch.Tensor, world: int) -> torch.Tensor:
    """Return a sum over ``world`` ranks divided by their number: correctly rounded, or truncated
    for integers."""
    if total.is_floating_point():
        return total / world + 0.0  # no result is -0.0
    return total.div(world, rounding_mode="trunc")


class Arithmetic(NamedTuple):
    """A reduction as one that gloo has, between conversions.

    Attributes:
        dtype: of the tensors that gloo reduces.
        op: of gloo.
        before: applied to this rank's part, in ``dtype``; None if nothing is.
        after: applied to the reduction of all parts, in ``dtype``; None if nothing is.
    """

    dtype: torch.dtype
    op: Any
    before: Callable[[torch.Tensor], torch.Tensor] | None = None
    after: Callable[[torch.Tensor], torch.Tensor] | None = None

    def part(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor that gloo reduces: ``tensor`` itself, if nothing has to be
        converted."""
        part = tensor.to(self.dtype)
        return part if self.before is None else self.before(part)

    def result(self, reduced: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the result in the call's ``dtype``: ``reduced`` itself, if nothing has to be
        converted."""
        if self.after is not None:
            reduced = self.after(reduced)
        return reduced.to(dtype)


def arithmetic_of(name: str, reduce_op: Any, dtype: torch.dtype, world: int) -> Arithmetic:
    """Return the arithmetic of an operation on elements of ``dtype``.

    Raises:
        TypeError: the operation is not defined for ``dtype``, by NCCL either.
    """
    op = operation(reduce_op)
    wide = accumulator(dtype)
    if op == "mean":
        if dtype is torch.bool:
            raise TypeError(f"{name}: AVG must be of numbers; got {dtype}")
        return Arithmetic(wide, ReduceOp.SUM, after=lambda total: mean_of(total, world))
    if op == PREMULTIPLIED:
        if not dtype.is_floating_point:
            raise TypeError(f"{name}: PREMUL_SUM needs a floating-point dtype; got {dtype}")
        factor = reduce_op.__getstate__()[1]  # a number, or a tensor of one element
        return Arithmetic(wide, ReduceOp.SUM, before=lambda part: part * factor)
    if dtype is torch.bool and op == "sum":
        return Arithmetic(dtype, ReduceOp.MAX)  # gloo would add bytes
    if dtype.itemsize == 1 and dtype.is_floating_point:
        return Arithmetic(wide, reduce_op, after=lambda reduced: reduced + 0.0)
    return Arithmetic(dtype, reduce_op)
