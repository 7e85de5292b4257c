# SPDX-License-Identifier: Apache-2.0
"""Short ways through Triton's language, for operands that need no conversion.

Before every ``a + b`` Triton works out a common type, makes constants of numbers, casts and broadcasts. Under the
interpreter that takes ten times as long as the addition, and most of what kernels compute is indices: scalars of one
type, and numbers. For those, and for blocks of one shape, the functions here go straight to the interpreter's builder,
which does what it does after all those steps. Everything else is left to Triton.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any

import triton.language as tl
import triton.runtime.interpreter as triton_interpreter

__all__ = ["block_type", "shortcuts"]

Function = Callable[..., Any]
_Builders = tuple[str | None, ...]
_Table = dict[str, _Builders]

_SIGNED, _UNSIGNED, _FLOAT, _BOOL = range(4)
_KINDS = {
    "int32": (_SIGNED, -(2**31), 2**31 - 1),
    "int64": (_SIGNED, -(2**63), 2**63 - 1),
    "uint32": (_UNSIGNED, 0, 2**32 - 1),
    "uint64": (_UNSIGNED, 0, 2**64 - 1),
    "fp32": (_FLOAT, 0, -1),
    "fp64": (_FLOAT, 0, -1),
    "int1": (_BOOL, 0, -1),
}
"""Kind of each type that has a short way, and the least and the greatest number that may be the other operand."""
_INTEGERS = ("int32", "int64", "uint32", "uint64")
_OFFSETS = ("int32", "int64")
"""Types of what may be added to a pointer."""
_WIDENED = frozenset([("int32", "int64"), ("int64", "int32")])
"""Types of two operands that are computed with as int64."""

# What may overflow, and the rest: the builder's functions for operands that are signed, unsigned, floats, booleans.
_CHECKED: _Table = {
    "add": ("create_add", "create_add", "create_fadd", None),
    "sub": ("create_sub", "create_sub", "create_fsub", None),
    "mul": ("create_mul", "create_mul", "create_fmul", None),
}
_UNCHECKED: _Table = {
    "floordiv": ("create_sdiv", "create_udiv", None, None),
    "mod": ("create_srem", "create_urem", "create_frem", None),
    "and": ("create_and", "create_and", None, "create_and"),
    "or": ("create_or", "create_or", None, "create_or"),
    "xor": ("create_xor", "create_xor", None, "create_xor"),
}
_SHIFTS: _Table = {
    "lshift": ("create_shl", "create_shl", None, None),
    "rshift": ("create_ashr", "create_lshr", None, None),
}
_COMPARISONS: _Table = {
    "lt": ("create_icmpSLT", "create_icmpULT", "create_fcmpOLT", None),
    "le": ("create_icmpSLE", "create_icmpULE", "create_fcmpOLE", None),
    "gt": ("create_icmpSGT", "create_icmpUGT", "create_fcmpOGT", None),
    "ge": ("create_icmpSGE", "create_icmpUGE", "create_fcmpOGE", None),
    "eq": ("create_icmpEQ", "create_icmpEQ", "create_fcmpOEQ", None),
    "ne": ("create_icmpNE", "create_icmpNE", "create_fcmpUNE", None),
}

_SHORTEST_BITS = 32
_MOST_CONSTANTS = 10_000
_constants: dict[tuple[int, str], Any] = {}
_block_types: dict[tuple[str, tuple[int, ...]], Any] = {}


def _constant(value: int, dtype: Any) -> Any:
    """The handle of a number, which is shared: the builder makes new handles of its operands."""
    key = value, dtype.name
    found = _constants.get(key)
    if found is None:
        if len(_constants) >= _MOST_CONSTANTS:
            _constants.clear()
        found = _constants[key] = triton_interpreter.interpreter_semantic.scalar_constant(value, dtype).handle
    return found


def block_type(dtype: Any, shape: Sequence[int]) -> Any:
    """The type of a block of this shape."""
    key = dtype.name, tuple(shape)
    found = _block_types.get(key)
    if found is None:
        found = _block_types[key] = tl.block_type(dtype, list(shape))
    return found


def _like(shaped: Any, dtype: Any) -> Any:
    """``dtype``, or the type of a block of it as large as the block ``shaped``."""
    return block_type(dtype, shaped.handle.data.shape) if shaped.type.is_block() else dtype


def _in_64_bits(tensor: Any) -> Any:
    """The handle of a tensor of int32 or int64, as int64."""
    if tensor.dtype.name == "int64":
        return tensor.handle
    return triton_interpreter.interpreter_builder.create_int_cast(tensor.handle, tl.int64, True)


def _operator(stock: Function, table: _Table, builders: _Builders, *, reflected: bool) -> Function:
    """A binary operator of ``tl.tensor`` that is in ``table``; ``stock`` is Triton's."""
    compares, shifts = table is _COMPARISONS, table is _SHIFTS
    tensor, builder = tl.tensor, triton_interpreter.interpreter_builder

    @wraps(stock)
    def operator(self: Any, other: Any, **options: Any) -> Any:
        dtype = self.dtype
        kind, least, greatest = _KINDS.get(dtype.name, (None, 0, 0))
        function = None if kind is None else builders[kind]
        if function is None:
            return stock(self, other, **options)
        if type(other) is tl.constexpr:
            other = other.value
        mine, shaped = self.handle, self
        if type(other) is int and least <= other <= greatest and (not shifts or 0 <= other < _SHORTEST_BITS):
            others = _constant(other, dtype)
        elif type(other) is tensor:
            others = other.handle
            if other.dtype.name != dtype.name:
                if (dtype.name, other.dtype.name) not in _WIDENED:
                    return stock(self, other, **options)
                mine, others, dtype = _in_64_bits(self), _in_64_bits(other), tl.int64
            if not self.type.is_block():
                shaped = other
            elif other.type.is_block() and mine.data.shape != others.data.shape:
                return stock(self, other, **options)
        else:
            return stock(self, other, **options)
        made = getattr(builder, function)(*((others, mine) if reflected else (mine, others)))
        return tensor(made, _like(shaped, tl.int1 if compares else dtype))

    return operator


def _addition(stock: Function) -> Function:
    """``tl.tensor.__add__`` of a pointer; of other tensors it is ``stock``."""
    tensor, builder = tl.tensor, triton_interpreter.interpreter_builder

    @wraps(stock)
    def add(self: Any, other: Any, **options: Any) -> Any:
        if self.dtype.is_ptr():
            if type(other) is tl.constexpr:
                other = other.value
            if type(other) is int and -(2**63) <= other < 2**63:
                return tensor(builder.create_addptr(self.handle, _constant(other, tl.int64)), self.type)
            if type(other) is tensor and other.dtype.name in _OFFSETS:
                shaped = self if self.type.is_block() else other
                if not other.type.is_block() or other.handle.data.shape == shaped.handle.data.shape:
                    return tensor(builder.create_addptr(self.handle, other.handle), _like(shaped, self.dtype))
        return stock(self, other, **options)

    return add


def _remembering_types(stock: Function) -> Function:
    """``tl.tensor.__init__``, which finds out what a tensor has of its type only for the first one of a type."""
    of_type: dict[str, dict[str, Any]] = {}

    @wraps(stock)
    def __init__(self: Any, handle: Any, type: Any) -> None:
        known = of_type.get(type.name)
        if known is None:
            stock(self, handle, type)
            of_type[type.name] = {name: value for name, value in self.__dict__.items() if name != "handle"}
        else:
            self.__dict__.update(known)
            self.handle = handle

    return __init__


def _checking_once(stock: Function) -> Function:
    """``TensorHandle.__post_init__``, which compares the size of numbers with that of a type once for each pair."""
    right: set[tuple[int, str]] = set()

    @wraps(stock)
    def __post_init__(self: Any) -> None:
        pair = self.data.itemsize, self.dtype.name
        if pair not in right:
            stock(self)
            right.add(pair)

    return __post_init__


def _sharing(stock: Function) -> Function:
    """``tl.block_type.with_element_ty``, which gives the same object for the same type."""

    @wraps(stock)
    def with_element_ty(self: Any, scalar_ty: Any) -> Any:
        return block_type(scalar_ty, self.shape)

    return with_element_ty


def _broadcasting(stock: Function) -> Function:
    """``TritonSemantic.broadcast_impl_value``, which has nothing to do with operands of one shape."""

    @wraps(stock)
    def broadcast_impl_value(self: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.type.is_block() == rhs.type.is_block():
            if not lhs.type.is_block() or lhs.handle.data.shape == rhs.handle.data.shape:
                return lhs, rhs
        return stock(self, lhs, rhs)

    return broadcast_impl_value


def _casting(stock: Function) -> Function:
    """``TritonSemantic.cast``, between integers."""
    builder = triton_interpreter.interpreter_builder

    @wraps(stock)
    def cast(self: Any, input: Any, dst_ty: Any, fp_downcast_rounding: str | None = None) -> Any:
        source, target = input.dtype.name, dst_ty.scalar
        if fp_downcast_rounding is None and target.name in _INTEGERS and (source in _INTEGERS or source == "int1"):
            if source == target.name:
                return input
            signed = _KINDS[source][0] == _SIGNED
            return self.tensor(builder.create_int_cast(input.handle, target, signed), _like(input, target))
        return stock(self, input, dst_ty, fp_downcast_rounding)

    return cast


def shortcuts(*, check_overflow: bool) -> Iterator[tuple[Any, str, Function]]:
    """Return what replaces Triton's functions: class, name, and a function that falls back on the one that is there.

    Each is to be put in place before the next is asked for: two of them share ``__add__``.

    Args:
        check_overflow: sums, differences and products are left to Triton, which checks them.
    """
    tensor, semantic = tl.tensor, type(triton_interpreter.interpreter_semantic)
    for owner, name, shortened in (
        (tensor, "__init__", _remembering_types),
        (tensor, "__add__", _addition),
        (triton_interpreter.TensorHandle, "__post_init__", _checking_once),
        (tl.block_type, "with_element_ty", _sharing),
        (semantic, "broadcast_impl_value", _broadcasting),
        (semantic, "cast", _casting),
    ):
        yield owner, name, shortened(getattr(owner, name))
    for table in (_COMPARISONS, _SHIFTS, _UNCHECKED, _CHECKED):
        if table is _CHECKED and check_overflow:
            continue
        for operation, builders in table.items():
            for sign in ("", "r") if table in (_UNCHECKED, _CHECKED) else ("",):
                name = f"__{sign}{operation}__"
                yield tensor, name, _operator(getattr(tensor, name), table, builders, reflected=sign == "r")
