# SPDX-License-Identifier: Apache-2.0
"""Fast paths through Triton's language, for operands that need no conversion.

Before every ``a + b`` Triton finds a common type, makes constants of numbers, casts and broadcasts.
Under the interpreter that takes ten times as long as the addition, although most operands are
indices: scalars of one type, and numbers. For those, and for blocks of one shape, the functions
here compute at once. All other operands fall back to Triton, and so do integers that were made of
pointers (:mod:`.bounds`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as triton_interpreter

Function = Callable[..., Any]
_Table = dict[str, tuple[Function, str]]

_KINDS = {
    "int32": ("i", -(2**31), 2**31 - 1),
    "int64": ("i", -(2**63), 2**63 - 1),
    "uint32": ("u", 0, 2**32 - 1),
    "uint64": ("u", 0, 2**64 - 1),
    "fp32": ("f", 0, -1),
    "fp64": ("f", 0, -1),
    "int1": ("b", 0, -1),
}
"""Kind of each type that has a fast path, and the least and the greatest number that may be the
other operand."""
_POINTER = ("p", -(2**63), 2**63 - 1)
_NO_KIND = (" ", 0, -1)
_INTEGERS = ("int32", "int64", "uint32", "uint64")
_SIGNED = ("int32", "int64")
"""Types that may be added to a pointer; if two operands have different ones, they are computed as
int64."""


def _divided(lhs: Any, rhs: Any) -> Any:
    return (lhs - np.fmod(lhs, rhs)) // rhs  # towards 0, unlike Python's


# Functions and the kinds of their operands: those that may overflow, and the rest.
_CHECKED: _Table = {
    "add": (np.add, "iuf"),
    "sub": (np.subtract, "iuf"),
    "mul": (np.multiply, "iuf"),
}
_UNCHECKED: _Table = {
    "floordiv": (_divided, "iu"),
    "mod": (np.fmod, "iuf"),
    "and": (np.bitwise_and, "iub"),
    "or": (np.bitwise_or, "iub"),
    "xor": (np.bitwise_xor, "iub"),
}
_SHIFTS: _Table = {"lshift": (np.left_shift, "iu"), "rshift": (np.right_shift, "iu")}
_COMPARISONS: _Table = {
    "lt": (np.less, "iuf"),
    "le": (np.less_equal, "iuf"),
    "gt": (np.greater, "iuf"),
    "ge": (np.greater_equal, "iuf"),
    "eq": (np.equal, "iuf"),
    "ne": (np.not_equal, "iuf"),
}

_SHORTEST_BITS = 32
_block_types: dict[tuple[str, tuple[int, ...]], Any] = {}


def block_type(dtype: Any, shape: Sequence[int]) -> Any:
    """Return the type of a block of this shape."""
    key = dtype.name, tuple(shape)
    found = _block_types.get(key)
    if found is None:
        found = _block_types[key] = tl.block_type(dtype, list(shape))
    return found


def _tensor(data: Any, kind: Any, shaped: Any) -> Any:
    """Return a scalar, or a block if ``shaped`` is one."""
    handle = triton_interpreter.TensorHandle(data, kind)
    return tl.tensor(handle, block_type(kind, data.shape) if shaped.type.is_block() else kind)


def _operator(
    stock: Function, compute: Function, kinds: str, table: _Table, *, reflected: bool
) -> Function:
    """Return a binary operator of ``tl.tensor`` that is in ``table``; ``stock`` is Triton's."""
    compares = table is _COMPARISONS
    shifts = table is _SHIFTS
    moves = compute is np.add and not reflected
    tensor = tl.tensor
    constexpr = tl.constexpr
    bit = tl.int1
    wide = tl.int64

    @wraps(stock)
    def operator(self: Any, other: Any, **options: Any) -> Any:
        dtype = self.dtype
        handle = self.handle
        shaped = self
        kind, least, greatest = _KINDS.get(dtype.name) or (
            _POINTER if moves and dtype.is_ptr() else _NO_KIND
        )
        pointer = kind == "p"
        if not pointer and (kind not in kinds or handle.origin is not None):
            return stock(self, other, **options)
        if type(other) is constexpr:
            other = other.value
        if (
            type(other) is int
            and least <= other <= greatest
            and (not shifts or 0 <= other < _SHORTEST_BITS)
        ):
            operand = other
        elif type(other) is tensor and (pointer or other.handle.origin is None):
            operand = other.handle.data
            if other.dtype.name != dtype.name:
                if other.dtype.name not in _SIGNED or not (pointer or dtype.name in _SIGNED):
                    return stock(self, other, **options)
                dtype = dtype if pointer else wide
            if not self.type.is_block():
                shaped = other
            elif other.type.is_block() and handle.data.shape != operand.shape:
                return stock(self, other, **options)
        else:
            return stock(self, other, **options)
        if pointer:
            width = max(1, dtype.element_ty.primitive_bitwidth // 8)
            moved = _tensor(
                handle.data + np.asarray(operand).astype(np.uint64) * np.uint64(width),
                dtype,
                shaped,
            )
            moved.handle.origin = handle.origin
            return moved
        data = compute(operand, handle.data) if reflected else compute(handle.data, operand)
        return _tensor(data, bit if compares else dtype, shaped)

    return operator


def _remembering_types(stock: Function) -> Function:
    """Return a ``tl.tensor.__init__`` that derives a tensor's attributes only for the first one of
    a type."""
    of_type: dict[str, dict[str, Any]] = {}

    @wraps(stock)
    def __init__(self: Any, handle: Any, type: Any) -> None:
        known = of_type.get(type.name)
        if known is None:
            stock(self, handle, type)
            of_type[type.name] = {
                name: value for name, value in self.__dict__.items() if name != "handle"
            }
        else:
            self.__dict__.update(known)
            self.handle = handle

    return __init__


def _checking_once(stock: Function) -> Function:
    """Return a ``TensorHandle.__post_init__`` that compares a NumPy dtype's size with a type's once
    for each pair."""
    right: set[tuple[int, str]] = set()

    @wraps(stock)
    def __post_init__(self: Any) -> None:
        pair = self.data.itemsize, self.dtype.name
        if pair not in right:
            stock(self)
            right.add(pair)

    return __post_init__


def _casting(stock: Function) -> Function:
    """Return a ``TritonSemantic.cast`` with a fast path between integers."""

    @wraps(stock)
    def cast(self: Any, input: Any, dst_ty: Any, *rest: Any) -> Any:
        kind = dst_ty.scalar
        source = input.dtype.name
        if any(rest) or kind.name not in _INTEGERS or source not in _INTEGERS:
            return stock(self, input, dst_ty, *rest)
        made = (
            _tensor(input.handle.data.astype(kind.name), kind, input)
            if source != kind.name
            else input
        )
        made.handle.origin = input.handle.origin
        return made

    return cast


def shortcuts(*, check_overflow: bool) -> Iterator[tuple[Any, str, Function]]:
    """Return replacements of Triton's functions: class, name, and a function that falls back to the
    existing one.

    Args:
        check_overflow: sums, differences and products are left to Triton, which checks them.
    """
    tensor = tl.tensor
    handle = triton_interpreter.TensorHandle
    yield handle, "__post_init__", _checking_once(handle.__post_init__)
    semantic = type(triton_interpreter.interpreter_semantic)
    yield semantic, "cast", _casting(semantic.cast)
    yield tensor, "__init__", _remembering_types(tensor.__init__)
    other_element = tl.block_type.with_element_ty
    yield (
        tl.block_type,
        "with_element_ty",
        wraps(other_element)(lambda self, kind: block_type(kind, self.shape)),
    )
    for table in (_COMPARISONS, _SHIFTS, _UNCHECKED, *(() if check_overflow else (_CHECKED,))):
        for operation, (compute, kinds) in table.items():
            for sign in ("", "r") if table in (_UNCHECKED, _CHECKED) else ("",):
                name = f"__{sign}{operation}__"
                yield (
                    tensor,
                    name,
                    _operator(getattr(tensor, name), compute, kinds, table, reflected=sign == "r"),
                )
