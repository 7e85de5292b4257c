# SPDX-License-Identifier: Apache-2.0
"""bf16 and fp8: the interpreter keeps their bits in unsigned integers, because numpy does not have
them.

Every operation on them is computed in fp32 and rounded once, to nearest even, as GPUs do. That is
exact for bf16, because fp32 has more than twice its bits. Conversions to fp8 saturate, as those of
NVIDIA's GPUs do.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, Any]

_SATURATING = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}
_FP8 = {**_SATURATING, "fp8e4b8": torch.float8_e4m3fnuz, "fp8e5b16": torch.float8_e5m2fnuz}
_NARROW = {**_FP8, "bf16": torch.bfloat16}
_BITS = {1: torch.uint8, 2: torch.uint16}


def is_fp8(kind: Any) -> bool:
    """Return whether a scalar Triton type is one of the 8-bit floating types that PyTorch has,
    too."""
    return kind.name in _FP8


def is_narrow(kind: Any) -> bool:
    """Return whether a scalar Triton type is bf16 or fp8."""
    return kind.name in _NARROW


def to_float32(bits: Array, kind: Any) -> Array:
    """Return the values of bits of a narrow type."""
    return torch.from_numpy(np.array(bits)).view(_NARROW[kind.name]).to(torch.float32).numpy()


def from_float32(values: Array, kind: Any) -> Array:
    """Return the bits of fp32 rounded to a narrow type, to nearest even."""
    target = _NARROW[kind.name]
    if kind.name in _SATURATING:
        limit = torch.finfo(target).max
        values = np.clip(values, -limit, limit)  # leaves NaN as it is
    return (
        torch.from_numpy(np.array(values, np.float32))
        .to(target)
        .view(_BITS[target.itemsize])
        .numpy()
    )


def fused_multiply_add(x: Array, y: Array, z: Array) -> Array:
    """Return ``x * y + z`` of fp16 or fp32 numbers, rounded once to the type of ``z``, as GPUs do.

    The product is exact in fp64. The sum is rounded to odd there, which the second rounding needs
    to be right (Boldo and Melquiond, "Emulation of FMA and Correctly Rounded Sums", 2008).
    """
    with np.errstate(all="ignore"):
        product = x.astype(np.float64) * y.astype(np.float64)
        added = z.astype(np.float64)
        total = np.asarray(product + added)
        # The rounding error of the sum (Knuth's TwoSum).
        other = total - product
        error = np.asarray((product - (total - other)) + (added - other))
        bits = total.view(np.int64)
        even = (bits & 1) == 0
        inexact = np.isfinite(total) & (error != 0)
        # One step away from zero if the exact sum is beyond, otherwise one step towards zero.
        step = np.where((error > 0) == (total > 0), 1, -1)
        odd = np.where(inexact & even, bits + step, bits).view(np.float64)
        return np.asarray(odd.astype(z.dtype))


def narrowed(values: Array, kind: Any) -> Array:
    """Return the bits of floating numbers rounded once to a narrow type; whole numbers go through
    fp32."""
    if values.dtype != np.float64:
        return from_float32(values.astype(np.float32), kind)
    # Rounded to odd in fp32 first: bits that are cut off mark the last one, so that only the second
    # rounding counts.
    with np.errstate(over="ignore"):
        nearest = values.astype(np.float32)
    bits = nearest.view(np.uint32)
    inexact = np.isfinite(nearest) & (nearest != values)
    away = inexact & (np.abs(nearest) > np.abs(values))
    odd = np.where(inexact, (bits - away) | np.uint32(1), bits).astype(np.uint32)
    return from_float32(odd.view(np.float32), kind)
