# SPDX-License-Identifier: Apache-2.0
"""The interpreter's builder on a simulated machine: the operations that it sees, and their effect
on values.

Switching tasks has nothing to save or restore, because the position in the grid is read from the
running task, and loads, stores and atomics are shown to the machine. Handles carry the origin of
their values (:mod:`.bounds`), in an attribute that :class:`.interpreter.Installed` gives them.
Arithmetic on bf16, and casts to and from bf16 and fp8, which Triton's interpreter gets wrong, are
done here (:mod:`.floats`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as triton_interpreter

from tdcoll.simulator import transfers
from tdcoll.simulator.bounds import MIXED, joined
from tdcoll.simulator.floats import (
    from_float32,
    fused_multiply_add,
    is_fp8,
    is_narrow,
    narrowed,
    to_float32,
)
from tdcoll.simulator.machine import machine
from tdcoll.simulator.memory import NULL_PAGE
from tdcoll.simulator.pointers import pointers, replace_word, store_now
from tdcoll.simulator.races import ACQUIRE, BOTH, RELAXED, RELEASE
from tdcoll.simulator.shortcuts import block_type

StockBuilder = type(triton_interpreter.interpreter_builder)
_SEMANTIC = triton_interpreter._ir.MEM_SEMANTIC
_SYSTEM = triton_interpreter._ir.MEM_SYNC_SCOPE.SYSTEM
_RELEASES = (_SEMANTIC.RELEASE, _SEMANTIC.ACQUIRE_RELEASE)
_ORDERS = {
    _SEMANTIC.RELAXED: RELAXED,
    _SEMANTIC.ACQUIRE: ACQUIRE,
    _SEMANTIC.RELEASE: RELEASE,
    _SEMANTIC.ACQUIRE_RELEASE: BOTH,
}
_BITS = "HB"
"""Codes of the numpy types that hold the bits of bf16 and fp8."""
_MOVING = "addptr ashr bitcast broadcast expand_dims gather idiv int_to_ptr ptr_to_int reshape trans unsplat"
"""Operations whose result has the origin of their first operand."""


def _flat(handle: Any) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(handle.data).reshape(-1)


def _flat_mask(mask: Any, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    # triton passes a handle or, for descriptors, an array
    data = mask if isinstance(mask, np.ndarray) else mask.data
    if data.shape != shape:
        data = np.broadcast_to(data, shape)
    return np.ascontiguousarray(data).reshape(-1).astype(bool, copy=False)


class MachineBuilder(StockBuilder):  # type: ignore[misc, valid-type]
    """The interpreter's builder while a machine is installed."""

    @property
    def grid_idx(self) -> Any:
        return machine().program.grid_idx

    @property
    def grid_dim(self) -> Any:
        return machine().program.grid_dim

    def create_masked_load(
        self, ptrs: Any, mask: Any, other: Any, *options: Any, **named: Any
    ) -> Any:
        volatile = named.get("is_volatile", options[-1] if options else False)
        addresses = _flat(ptrs)
        wanted = _flat_mask(mask, ptrs.data.shape)
        with pointers().loading(
            addresses, wanted, _itemsize(ptrs), ptrs.origin, polls=volatile is True
        ):
            return super().create_masked_load(ptrs, mask, other, *options, **named)

    def create_masked_store(
        self, ptrs: Any, value: Any, mask: Any, *options: Any, **named: Any
    ) -> None:
        _store(ptrs, value, mask, "store")

    def create_descriptor_store(self, desc: Any, value: Any, indices: Any) -> None:
        ptrs, mask = desc.materialize_pointers(indices)
        _store(ptrs, value, mask, "descriptor store")

    def create_atomic_cas(self, ptr: Any, cmp: Any, val: Any, sem: Any, scope: Any) -> Any:
        with self._atomic(ptr, np.ones(ptr.data.size, dtype=bool), sem, scope):
            return super().create_atomic_cas(ptr, cmp, val, sem, scope)

    def create_atomic_rmw(
        self, rmw: Any, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any
    ) -> Any:
        wanted = _flat_mask(mask, ptr.data.shape)
        with self._atomic(ptr, wanted, sem, scope):
            if is_narrow_handle(val):
                return _add_narrow(ptr, val, wanted)
            return super().create_atomic_rmw(rmw, ptr, val, mask, sem, scope)

    # triton >= 3.9
    def create_atomic_store(self, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any) -> None:
        self._release(sem, scope)
        with pointers().in_order(_ORDERS[sem], system=scope == _SYSTEM):
            super().create_atomic_store(ptr, val, mask, sem, scope)

    def create_barrier(self) -> None:
        races = machine().races
        if races is not None:
            races.barrier()

    @contextmanager
    def _atomic(self, ptr: Any, wanted: Any, sem: Any, scope: Any) -> Iterator[None]:
        addresses = _flat(ptr)
        nbytes = _itemsize(ptr)
        symmetric = pointers().check(addresses, wanted, nbytes, ptr.origin, "store to")
        self._release(sem, scope)
        with pointers().atomic(addresses, wanted, nbytes, symmetric=symmetric):
            yield
        races = machine().races
        if races is not None:
            races.change(
                addresses[wanted], nbytes, ptr.origin, _ORDERS[sem], system=scope == _SYSTEM
            )

    def _release(self, sem: Any, scope: Any) -> None:
        if sem in _RELEASES:
            transfers.release(machine(), system=scope == _SYSTEM)

    def cast_impl(self, src: Any, dst_type: Any) -> Any:
        target = dst_type.scalar
        if not (is_narrow_handle(src) or is_narrow(target)):
            data = src.data.astype(numpy_dtype(target))
            return moved_from(src, triton_interpreter.TensorHandle(data, target))
        values = to_float32(src.data, src.dtype.scalar) if is_narrow_handle(src) else src.data
        data = narrowed(values, target) if is_narrow(target) else values.astype(numpy_dtype(target))
        return triton_interpreter.TensorHandle(data, target)

    def create_fp_to_fp(self, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        target = dst_type.scalar
        if not (is_narrow_handle(src) or is_narrow(target)):
            return super().create_fp_to_fp(src, dst_type, rounding_mode)
        if rounding_mode == triton_interpreter._ir.ROUNDING_MODE.RTZ:
            raise ValueError(
                f"fp_downcast_rounding='rtz' to {target} is not simulated; leave it out"
            )
        return self.cast_impl(src, dst_type)

    def binary_op(self, lhs: Any, rhs: Any, op: Any) -> Any:
        if lhs.data.dtype.char in _BITS and is_narrow_handle(lhs):
            return _computed(op, lhs, rhs)
        result = super().binary_op(lhs, rhs, op)
        if result.data.dtype.char == "?":
            result.dtype = tl.int1  # the interpreter gives a comparison the type of its operands
        if lhs.origin is not None or rhs.origin is not None:
            # A distance within one tensor is no address, nor is the remainder of one.
            distance = op is np.subtract and lhs.origin is rhs.origin
            remainder = op is np.fmod or (
                op is np.bitwise_and and result.data.max(initial=0) < NULL_PAGE
            )
            if not distance and not remainder:
                result.origin = joined(lhs.origin, rhs.origin)
        return result

    def ternary_op(self, lhs: Any, rhs: Any, other: Any, op: Any) -> Any:
        if op is np.where:
            return _either(rhs, other, super().ternary_op(lhs, rhs, other, op))
        return (
            _computed(op, lhs, rhs, other)
            if is_narrow_handle(other)
            else super().ternary_op(lhs, rhs, other, op)
        )

    def unary_op(self, arg: Any, op: Any) -> Any:
        return _computed(op, arg) if is_narrow_handle(arg) else super().unary_op(arg, op)

    # The one that is a number, as on GPUs. Before Triton 3.9 its interpreter returns NaN.
    def create_maxnumf(self, lhs: Any, rhs: Any) -> Any:
        return self.binary_op(lhs, rhs, np.fmax)

    def create_minnumf(self, lhs: Any, rhs: Any) -> Any:
        return self.binary_op(lhs, rhs, np.fmin)

    def create_fma(self, x: Any, y: Any, z: Any) -> Any:
        if z.data.dtype in (np.float16, np.float32):
            # Before Triton 3.9 its interpreter rounds twice.
            rounded = fused_multiply_add(x.data, y.data, z.data)
            return triton_interpreter.TensorHandle(rounded, z.dtype.scalar)
        if not is_narrow_handle(z):
            return super().create_fma(x, y, z)
        return _computed(lambda x, y, z: x.astype(np.float64) * y + z, x, y, z)

    def create_dot(self, a: Any, b: Any, d: Any, *options: Any) -> Any:
        wide = (
            self.cast_impl(operand, tl.float32) if is_narrow_handle(operand) else operand
            for operand in (a, b)
        )
        return super().create_dot(*wide, d, *options)

    def get_block_ty(self, dtype: Any, shape: Any) -> Any:
        return block_type(dtype, shape)

    def get_bf16(self, value: float) -> Any:
        return triton_interpreter.TensorHandle(
            narrowed(np.array([value], np.float64), tl.bfloat16), tl.bfloat16
        )

    def create_splat(self, ret_ty: Any, arg: Any) -> Any:
        return moved_from(arg, super().create_splat(ret_ty, arg))

    def create_cat(self, lhs: Any, rhs: Any) -> Any:
        return _either(lhs, rhs, super().create_cat(lhs, rhs))

    def create_join(self, lhs: Any, rhs: Any) -> Any:
        return _either(lhs, rhs, super().create_join(lhs, rhs))

    def create_split(self, val: Any) -> Any:
        return tuple(moved_from(val, half) for half in super().create_split(val))


def _passing_on(name: str) -> Any:
    moved = getattr(StockBuilder, name)

    def move(self: Any, arg: Any, *rest: Any, **named: Any) -> Any:
        return moved_from(arg, moved(self, arg, *rest, **named))

    return move


for _name in _MOVING.split():
    setattr(MachineBuilder, f"create_{_name}", _passing_on(f"create_{_name}"))


def moved_from(source: Any, result: Any) -> Any:
    """Return ``result``, which was made of ``source``."""
    if source.origin is not None:
        result.origin = source.origin
    return result


def _either(one: Any, other: Any, result: Any) -> Any:
    """Return ``result``, each of whose elements is one of ``one`` or of ``other``."""
    if one.origin is not None or other.origin is not None:
        result.origin = one.origin if one.origin is other.origin else MIXED
    return result


def _store(ptrs: Any, value: Any, mask: Any, kind: str) -> None:
    """Store a block, or what a descriptor stores, through pointers. ``kind``: see
    :class:`.network.Operation`."""
    shape, access = ptrs.data.shape, pointers()
    addresses, wanted = _flat(ptrs), _flat_mask(mask, shape)
    values = np.ascontiguousarray(np.broadcast_to(value.data, shape)).reshape(-1)
    symmetric = access.check(addresses, wanted, _itemsize(ptrs), ptrs.origin, "store to")
    here = access.store_weakly(addresses, values, wanted, kind, ptrs.origin)
    store_now(addresses, values, here)
    if symmetric:
        access.stored(addresses, wanted)
    else:
        machine().scheduler.progress += 1


def _itemsize(ptrs: Any) -> int:
    return max(1, ptrs.get_element_ty().primitive_bitwidth // 8)


def is_narrow_handle(handle: Any) -> bool:
    """Return whether a handle holds bf16 or fp8."""
    return handle.data.dtype.char in _BITS and is_narrow(handle.dtype.scalar)


def _computed(op: Callable[..., Any], *operands: Any) -> Any:
    """Return ``op`` of bf16, computed in fp32 and rounded."""
    kind = operands[-1].dtype.scalar
    if is_fp8(kind):
        raise TypeError(
            f"Triton has no arithmetic on {kind}: cast to a wider type first, such as .to(tl.float32)"
        )
    result = op(*(to_float32(operand.data, kind) for operand in operands))
    if result.dtype == np.bool_:
        return triton_interpreter.TensorHandle(result, tl.int1)
    return triton_interpreter.TensorHandle(narrowed(result, kind), kind)


def _add_narrow(ptr: Any, val: Any, wanted: Any) -> Any:
    """Add bf16 atomically, because the interpreter cannot; return the old value."""
    kind = val.dtype.scalar
    addresses = _flat(ptr)
    before = np.zeros(ptr.data.size, np.uint16)
    summands = to_float32(np.broadcast_to(val.data, ptr.data.shape).reshape(-1), kind)
    for place in np.flatnonzero(wanted).tolist():

        def add(old: Any, summand: Any = summands[place]) -> Any:
            return from_float32(to_float32(old, kind) + summand, kind)

        before[place] = replace_word(int(addresses[place]), before.dtype, add)
    return triton_interpreter.TensorHandle(before.reshape(ptr.data.shape), kind)


_numpy_dtypes: dict[str, Any] = {}
_uncached_numpy_dtype = triton_interpreter._get_np_dtype


def numpy_dtype(dtype: Any) -> Any:
    """Return the numpy type of a Triton type. Triton's own function builds a table of all types for
    every operation."""
    found = _numpy_dtypes.get(dtype.name)
    if found is None:
        found = _numpy_dtypes[dtype.name] = _uncached_numpy_dtype(dtype)
    return found
