# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of reductions: what parts are added in, how they are added, and how the result is rounded.

A reduction goes over its parts in an order that its caller fixes, in an *accumulator* that is wider than fp16 and bf16
(:data:`ACCUMULATORS`), and begins with zeros::

    sum = zeros in the accumulator's type
    sum = accumulate(sum, part, first, OP)     for every part; ``first`` where nothing was added before
    out = rounded(sum, out's type, OP)

A mean divides by the number of ranks, in one of two places, and the bits differ. A dense collective divides the sum
once (:func:`finish`, before :func:`rounded`). The sparse all-reduce, where nobody adds all parts of a row, divides each
part (:func:`share`). Both divisions are correctly rounded.

No floating-point result is -0.0. A sum that began at +0.0 is never -0.0; a product, a maximum of zeros of both signs
and what is rounded to zero may be, and are replaced by 0. NaN propagates through maximum and minimum.
"""

import torch
import triton.language as tl

from tdcoll.language.jit import jit

__all__ = [
    *("ACCUMULATORS", "OPERATIONS"),
    *("MAX", "MEAN", "MIN", "PROD", "SUM"),
    *("accumulate", "accumulator", "check_operands", "check_operation", "finish", "rounded", "share"),
]

SUM, MEAN, MAX, MIN, PROD = (tl.constexpr(i) for i in range(5))

OPERATIONS = {"sum": SUM.value, "mean": MEAN.value, "max": MAX.value, "min": MIN.value, "prod": PROD.value}
"""The constant ``OP`` of every operation, by its name."""

ACCUMULATORS = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.int32: torch.int32,
    torch.int64: torch.int64,
}
"""The dtype of the accumulator for every dtype that can be reduced."""


def accumulator(dtype: torch.dtype) -> tl.dtype:
    """The constant ``ACC`` for values of ``dtype``, one of :data:`ACCUMULATORS`."""
    kind: tl.dtype = getattr(tl, str(ACCUMULATORS[dtype]).removeprefix("torch."))
    return kind


def check_operation(op: str, dtype: torch.dtype) -> None:
    """Raise unless ``op`` is one of :data:`OPERATIONS` and has a result of ``dtype``.

    Raises:
        ValueError: it is not, or it is the mean of integers.
    """
    if not isinstance(op, str) or op not in OPERATIONS:
        raise ValueError(f"op must be one of {', '.join(OPERATIONS)}; got {op!r}")
    if op == "mean" and not dtype.is_floating_point:
        raise ValueError(f"op='mean' needs values of a floating-point dtype, got {dtype}")


def check_operands(tensor: torch.Tensor, op: str) -> tuple[torch.dtype, str]:
    """``(dtype, op)`` of a dense reduction.

    Raises:
        TypeError: the dtype cannot be reduced.
        ValueError: as for :func:`check_operation`.
    """
    if tensor.dtype not in ACCUMULATORS:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in ACCUMULATORS)
        raise TypeError(f"tensor must be of {allowed}; got {tensor.dtype}")
    check_operation(op, tensor.dtype)
    return tensor.dtype, op


@jit
def accumulate(sum, part, first, OP: tl.constexpr):
    """``sum`` and one more ``part``. A ``sum`` to which nothing was added is zeros; ``part`` is then the ``first``."""
    if OP == MAX:
        both = tl.where(first, part, tl.maximum(sum, part, propagate_nan=tl.PropagateNan.ALL))
    elif OP == MIN:
        both = tl.where(first, part, tl.minimum(sum, part, propagate_nan=tl.PropagateNan.ALL))
    elif OP == PROD:
        both = tl.where(first, part, sum * part)
    else:
        both = sum + part
    return both


@jit
def _divided(value, world):
    """``value`` by the number of ranks, correctly rounded, which "/" of fp32 is not."""
    if value.dtype == tl.float32:
        part = tl.div_rn(value, tl.cast(world, value.dtype))
    else:
        part = value / tl.cast(world, value.dtype)
    return part


@jit
def share(values, world, ACC: tl.constexpr, OP: tl.constexpr):
    """What a rank brings to a sparse reduction, in ``ACC``: its ``values``, or for a mean its share of the mean."""
    part = values.to(ACC)
    if OP == MEAN:
        part = _divided(part, world)
    return part


@jit
def finish(sum, world, OP: tl.constexpr):
    """A dense reduction of all ``world`` parts, still in the accumulator: their ``sum``, or its mean."""
    if OP == MEAN:
        sum = _divided(sum, world) + 0.0  # a small negative sum may be divided to -0.0
    return sum


@jit
def rounded(sum, DTYPE: tl.constexpr, OP: tl.constexpr):
    """``sum`` as a result of type ``DTYPE`` is stored: rounded, -0.0 as +0.0."""
    result = sum.to(DTYPE)
    if sum.dtype.is_floating():
        if (OP != SUM and OP != MEAN) or sum.dtype != DTYPE:
            value = result.to(sum.dtype)
            # Not by adding 0: fused with a product that is about to be rounded to -0.0, that would change nothing.
            result = tl.where(value == 0, tl.zeros_like(value), value).to(DTYPE)
    return result
