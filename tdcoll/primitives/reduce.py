# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of reductions: the accumulator, the operations, and how the result is rounded.

A reduction goes over its parts in an order that its caller fixes, in an *accumulator* that is wider
than types of less than 32 bits (:data:`ACCUMULATORS`), and begins with zeros::

    sum = zeros in the accumulator's type
    sum = accumulate(sum, part, first, OP)     for every part; ``first`` where nothing was added before
    out = rounded(sum, out's type, OP)

A mean divides by the number of ranks, in one of two places, and the bits differ. A dense collective
divides the sum once (:func:`finish`, before :func:`rounded`). The sparse all-reduce divides each
part (:func:`share`), because no rank adds all parts of a row. Both divisions are correctly rounded.

No floating-point result is -0.0. A sum that began at +0.0 is never -0.0; if a product, a maximum of
zeros of both signs or a value rounded to zero is, it is replaced by 0. NaN propagates through
maximum and minimum.
"""

from collections.abc import Mapping
from typing import Any

import torch
import triton.language as tl
from torch.distributed import ReduceOp

from tdcoll.language.jit import jit
from tdcoll.primitives import fp8

SUM, MEAN, MAX, MIN, PROD = (tl.constexpr(i) for i in range(5))

OPERATIONS = {
    "sum": SUM.value,
    "mean": MEAN.value,
    "max": MAX.value,
    "min": MIN.value,
    "prod": PROD.value,
}
"""The constant ``OP`` of every operation, by its name."""

TORCH_OPERATIONS = {
    ReduceOp.SUM: "sum",
    ReduceOp.AVG: "mean",
    ReduceOp.MAX: "max",
    ReduceOp.MIN: "min",
    ReduceOp.PRODUCT: "prod",
}
"""tdcoll's names of torch.distributed's operations."""

ALIASES = {**dict(zip(OPERATIONS, OPERATIONS, strict=True)), "avg": "mean", "product": "prod"}
"""tdcoll's names of operations, by those names and by torch's."""

NAMES_BY_HASH = {hash(ReduceOp(kind)): name for kind, name in TORCH_OPERATIONS.items()}
"""Maps an operation's hash, which is its number, to tdcoll's name. Comparing operations takes three
times as long."""

ACCUMULATORS = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.int32: torch.int32,
    torch.int64: torch.int64,
    torch.int8: torch.int32,
    torch.uint8: torch.int32,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e5m2: torch.float32,
}
"""The dtype of the accumulator for every dtype that can be reduced."""

_EIGHT_BITS: Mapping[torch.dtype, tuple[str, ...]] = {
    torch.int8: ("max", "min"),
    torch.uint8: ("max", "min"),
    torch.float8_e4m3fn: ("sum", "mean", "max", "min"),
    torch.float8_e5m2: ("sum", "mean", "max", "min"),
}

OPERATIONS_OF: Mapping[torch.dtype, tuple[str, ...]] = {
    dtype: _EIGHT_BITS.get(dtype)
    or tuple(op for op in OPERATIONS if op != "mean" or dtype.is_floating_point)
    for dtype in ACCUMULATORS
}
"""The names of the operations of each dtype."""

_TRITON = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}


def triton_dtype(dtype: torch.dtype) -> tl.dtype:
    """Return the constant ``DTYPE`` for values of ``dtype``."""
    kind: tl.dtype = _TRITON.get(dtype) or getattr(tl, str(dtype).removeprefix("torch."))
    return kind


def accumulator(dtype: torch.dtype) -> tl.dtype:
    """Return the constant ``ACC`` for values of ``dtype``, one of :data:`ACCUMULATORS`."""
    return triton_dtype(ACCUMULATORS[dtype])


def check_dtype(name: str, tensor: torch.Tensor) -> None:
    """Raise ``TypeError`` unless the argument ``name`` has one of the dtypes of
    :data:`ACCUMULATORS`."""
    if tensor.dtype not in ACCUMULATORS:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in ACCUMULATORS)
        raise TypeError(f"{name} must be of {allowed}; got {tensor.dtype}")


def operation_name(op: Any) -> Any:
    """Return tdcoll's name of an operation that is given by a name or as a ``ReduceOp``; other
    values as they are."""
    if type(op) is str:
        return ALIASES.get(op, op)
    if type(op) is ReduceOp or type(op) is ReduceOp.RedOpType:
        return NAMES_BY_HASH.get(hash(op)) or getattr(op, "op", op)
    return op


def check_operation(op: Any, dtype: torch.dtype) -> str:
    """Return the name of ``op``, which must be an operation that ``dtype`` has.

    Args:
        op: a name of :data:`OPERATIONS`, or a ``torch.distributed.ReduceOp``. Errors name
            operations in the same way.

    Raises:
        ValueError: there is no such operation, or not of this dtype (:data:`OPERATIONS_OF`).
    """
    name = operation_name(op)
    of_dtype = OPERATIONS_OF.get(dtype, tuple(OPERATIONS))
    if isinstance(name, str) and name in of_dtype:
        return name
    known = isinstance(name, str) and name in OPERATIONS
    allowed = list(of_dtype if known else OPERATIONS)
    got = repr(op)
    if isinstance(op, (ReduceOp, ReduceOp.RedOpType)):
        spelled = {name: kind.name for kind, name in TORCH_OPERATIONS.items()}
        allowed, got = [spelled[name] for name in allowed], spelled.get(name) or name.name
    named = isinstance(op, (str, ReduceOp, ReduceOp.RedOpType))
    hint = "" if named else ". Arguments behind op are passed by name, such as ctx="
    raise ValueError(
        f"op must be one of {', '.join(allowed)}{f' for {dtype}' if known else ''}; got {got}{hint}"
    )


@jit
def accumulate(sum, part, first, OP: tl.constexpr):
    """Combine ``sum`` and one more ``part``. If nothing was added yet, ``sum`` is zeros and
    ``part`` is the ``first``."""
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
    """Divide ``value`` by the number of ranks, correctly rounded, because "/" of fp32 is not."""
    if value.dtype == tl.float32:
        part = tl.div_rn(value, tl.cast(world, value.dtype))
    else:
        part = value / tl.cast(world, value.dtype)
    return part


@jit
def share(values, world, ACC: tl.constexpr, OP: tl.constexpr):
    """Return a rank's part of a sparse reduction, in ``ACC``: its ``values``, or its share of the
    mean."""
    part = values.to(ACC)
    if OP == MEAN:
        part = _divided(part, world)
    return part


@jit
def finish(sum, world, OP: tl.constexpr):
    """Return a dense reduction of all ``world`` parts, still in the accumulator: their ``sum``, or
    its mean."""
    if OP == MEAN:
        sum = _divided(sum, world) + 0.0  # a small negative sum may be divided to -0.0
    return sum


@jit
def rounded(sum, DTYPE: tl.constexpr, OP: tl.constexpr):
    """Return ``sum`` as a result of type ``DTYPE`` is stored: rounded, -0.0 as +0.0; for fp8, its
    codes."""
    if DTYPE.is_fp8():
        result = fp8.encode(sum, DTYPE)
        result = tl.where(result == 0x80, tl.zeros_like(result), result)
    else:
        result = sum.to(DTYPE)
    if sum.dtype.is_floating() and not DTYPE.is_fp8():
        if (OP != SUM and OP != MEAN) or sum.dtype != DTYPE:
            value = result.to(sum.dtype)
            # Adding 0 wouldn't do: fused with a product that is about to be rounded to -0.0, it
            # would change nothing.
            result = tl.where(value == 0, tl.zeros_like(value), value).to(DTYPE)
    return result
