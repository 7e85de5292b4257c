# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments that all lowerings share: a kernel gets the same errors compiled and
simulated."""

from __future__ import annotations

from typing import Any

import triton.language as tl
from triton.language import core

from tdcoll.spec.entry import DeviceFunction

WORDS = {
    tl.int32: "int",
    tl.uint32: "uint",
    tl.int64: "long",
    tl.uint64: "ulong",
    tl.float32: "float",
    tl.float64: "double",
}
"""NVSHMEM's names of the types of words."""

_COMPARISONS = ("eq", "ne", "gt", "le", "lt", "ge")
"""PTX's names of the ``CMP_*`` constants."""


def choice(parameter: str, value: Any, allowed: tuple[str, ...]) -> str:
    """Return a compile-time argument, which must be one of ``allowed``."""
    chosen = core._unwrap_if_constexpr(value)
    if chosen not in allowed:
        raise ValueError(f"{parameter} must be one of {', '.join(allowed)}; got {chosen!r}")
    return str(chosen)


def axis_letter(axis: Any) -> str:
    """Return the letter of a compile-time axis."""
    number = core._unwrap_if_constexpr(axis)
    if number not in (0, 1, 2):
        raise ValueError(f"axis must be 0, 1 or 2, got {number!r}")
    return "xyz"[number]


def comparison(compare: Any, parameter: str = "compare") -> str:
    """Return PTX's name of a ``CMP_*`` constant."""
    number = core._unwrap_if_constexpr(compare)
    if number not in range(len(_COMPARISONS)):
        raise ValueError(f"{parameter} must be a CMP_* constant, got {number!r}")
    return _COMPARISONS[number]


def _pointee(pointer: Any) -> Any:
    """Return what a pointer, or a block of pointers, points to; None of anything else."""
    kind = pointer.dtype if isinstance(pointer, tl.tensor) else None
    return kind.element_ty if kind is not None and kind.is_ptr() else None


def require_64_bits(function: str, parameter: str, value: Any) -> None:
    """Refuse a pointer to anything but 64-bit integers; an address is as good."""
    kind = _pointee(value)
    if kind is not None and not (kind.is_int() and kind.primitive_bitwidth == 64):
        raise ValueError(
            f"{function}: {parameter} must point to 64-bit integers (int64 or uint64), got a pointer to {kind}; 64 "
            "bits there take in the neighbour"
        )


def require_scalar(function: str, parameter: str, value: Any) -> None:
    """Refuse a block."""
    if value.type.is_block():
        shape = [core._unwrap_if_constexpr(size) for size in value.shape]
        raise ValueError(f"{function}: {parameter} must be a scalar, got a block of shape {shape}")


def integer_pointee(function: str, ptr: Any) -> Any:
    """Return the type that ``ptr`` points to, which must be integers of 32 or 64 bits."""
    kind = _pointee(ptr)
    if kind is None or not kind.is_int() or kind.primitive_bitwidth not in (32, 64):
        got = ptr.dtype if isinstance(ptr, tl.tensor) else repr(ptr)
        raise ValueError(f"{function}: ptr must point to 32- or 64-bit integers, got {got}")
    return kind


def word_type(function: DeviceFunction, pointer: Any) -> Any:
    """Return the type that the first argument of ``function`` points to, which must be one that the
    function has."""
    kind = _pointee(pointer)
    if kind is None or WORDS.get(kind) not in function.types:
        allowed = "integers of 32 or 64 bits" + (
            ", or to fp32 or fp64" if "float" in function.types else ""
        )
        got = pointer.type if isinstance(pointer, tl.tensor) else repr(pointer)
        raise ValueError(
            f"{function.name}: {function.parameters[0][0]} must be a pointer to {allowed}, got {got}"
        )
    return kind


def consumed(value: Any, token: Any, semantic: Any) -> tuple[Any, Any]:
    """Return the arguments of ``consume_token`` as tensors."""
    if isinstance(value, core.tensor_descriptor_base):
        raise ValueError(
            "consume_token: value must be a pointer or an offset, got a descriptor: give an offset of its load"
        )
    value = semantic.to_tensor(value)
    token = semantic.to_tensor(token)
    if not (value.dtype.is_ptr() or value.dtype.is_int()):
        raise ValueError(
            f"consume_token: value must be a pointer or an integer offset, got {value.type}"
        )
    if token.type != tl.int32:
        raise ValueError(
            f"consume_token: token must be what wait_token returned, an int32; got {token.type}"
        )
    return value, token
