# SPDX-License-Identifier: Apache-2.0
"""Hooks into Triton's interpreter, so that kernels run as programs of a simulated machine.

While a machine is installed:

- launches go to the machine (a subclass of ``GridExecutor``), which runs the programs as tasks;
- the position in the grid is read from the running task, and loads, stores and atomics are shown to the
  machine (a subclass of the interpreter's builder), so that switching tasks has nothing to save or restore;
- Triton's language is patched once, not at every launch and at every call of a nested function;
- kernels are rewritten (:mod:`.rewrite`): tensors in ``and``, ``or``, ``not``, and branches on ``tid``.

Everything is put back by :meth:`Installed.remove`, also after errors.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
import triton.runtime.interpreter as triton_interpreter
from triton.runtime.errors import InterpreterError
from triton.tools.tensor_descriptor import TensorDescriptor

from tdcoll.errors import NotInitializedError, TdcollError
from tdcoll.language.spec import LINKED
from tdcoll.runtime.simulator.extents import MIXED, Extents, joined
from tdcoll.runtime.simulator.floats import from_float32, is_fp8, is_narrow, narrowed, to_float32
from tdcoll.runtime.simulator.lanes import kernel_globals
from tdcoll.runtime.simulator.machine import Machine
from tdcoll.runtime.simulator.memory import NULL_PAGE
from tdcoll.runtime.simulator.rewrite import KernelTransformer

__all__ = ["Installed", "machine", "root_cause"]

_machine: Machine | None = None
_rewritten: dict[Any, Any] = {}  # kernels rewritten with KernelTransformer

_Builder = type(triton_interpreter.interpreter_builder)
_SEMANTIC = triton_interpreter._ir.MEM_SEMANTIC
_SYSTEM = triton_interpreter._ir.MEM_SYNC_SCOPE.SYSTEM
_RELEASES = (_SEMANTIC.RELEASE, _SEMANTIC.ACQUIRE_RELEASE)
_THREADS_PER_WARP = 32
_BITS = "HB"
"""Codes of the numpy types that hold the bits of bf16 and fp8."""


def machine() -> Machine:
    """The machine that kernels run on.

    Raises:
        NotInitializedError: there is none.
    """
    if _machine is None:
        raise NotInitializedError(
            "the device language needs a simulated machine: call tdcoll.initialize(), or run inside "
            "tdcoll.testing.World.run()"
        )
    return _machine


def root_cause(error: BaseException) -> BaseException:
    """The error that Triton's interpreter wrapped, maybe several times over."""
    while isinstance(error, InterpreterError) and error.__cause__ is not None:
        error = error.__cause__
    return error


def _flat(handle: Any) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(handle.data).reshape(-1)


def _flat_mask(mask: Any, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    data = mask if isinstance(mask, np.ndarray) else mask.data  # triton passes a handle or, for descriptors, an array
    return np.ascontiguousarray(np.broadcast_to(data, shape)).reshape(-1).astype(bool, copy=False)


class _MachineBuilder(_Builder):  # type: ignore[misc, valid-type]
    """The interpreter's builder, with the grid position of the running task, an eye on memory, and bf16.

    Handles carry the origin of what they hold (:mod:`.extents`), in an attribute that :class:`Installed` gives them.
    """

    @property
    def grid_idx(self) -> Any:
        return machine().program.grid_idx

    @property
    def grid_dim(self) -> Any:
        return machine().program.grid_dim

    # ------------------------------------------------------------------ memory

    def create_masked_load(self, ptrs: Any, mask: Any, other: Any, *options: Any, **named: Any) -> Any:
        volatile = named.get("is_volatile", options[-1] if options else False)
        addresses, wanted = _flat(ptrs), _flat_mask(mask, ptrs.data.shape)
        pointers = machine().pointers
        symmetric = pointers.check(addresses, wanted, _itemsize(ptrs), ptrs.origin, "load from")
        pointers.before_load(addresses, wanted, polls=volatile is True, symmetric=symmetric)
        if not symmetric:
            return super().create_masked_load(ptrs, mask, other, *options, **named)
        touched = addresses[wanted]
        with pointers.as_seen(int(touched.min()), int(touched.max()) + _itemsize(ptrs)):
            return super().create_masked_load(ptrs, mask, other, *options, **named)

    def create_masked_store(self, ptrs: Any, value: Any, mask: Any, *options: Any, **named: Any) -> Any:
        shape = ptrs.data.shape
        addresses, wanted = _flat(ptrs), _flat_mask(mask, shape)
        pointers = machine().pointers
        if not pointers.check(addresses, wanted, _itemsize(ptrs), ptrs.origin, "store to"):
            super().create_masked_store(ptrs, value, mask, *options, **named)
            machine().scheduler.progress += 1
            return
        values = np.ascontiguousarray(np.broadcast_to(value.data, shape)).reshape(-1)
        local = pointers.store_weakly(addresses, values, wanted)
        if local is not wanted:
            mask = triton_interpreter.TensorHandle(local.reshape(shape), tl.int1)
        super().create_masked_store(ptrs, value, mask, *options, **named)
        pointers.stored(addresses, wanted)

    def create_atomic_cas(self, ptr: Any, cmp: Any, val: Any, sem: Any, scope: Any) -> Any:
        shape = ptr.data.shape
        addresses, mask = _flat(ptr), np.ones(ptr.data.size, dtype=bool)
        self._before_atomic(ptr, addresses, mask, sem, scope)
        old = super().create_atomic_cas(ptr, cmp, val, sem, scope)
        swapped = np.broadcast_to(old.data == cmp.data, shape) & np.broadcast_to(cmp.data != val.data, shape)
        machine().pointers.after_atomic(addresses, mask, changed=bool(swapped.any()))
        return old

    def create_atomic_rmw(self, rmw: Any, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any) -> Any:
        addresses, wanted = _flat(ptr), _flat_mask(mask, ptr.data.shape)
        self._before_atomic(ptr, addresses, wanted, sem, scope)
        if _narrow(val):
            old = _add_narrow(ptr, val, wanted)
        else:
            old = super().create_atomic_rmw(rmw, ptr, val, mask, sem, scope)
        new = triton_interpreter._interpreter.load(ptr.data, mask.data, np.zeros_like(old.data), old.data.dtype)
        machine().pointers.after_atomic(addresses, wanted, changed=not np.array_equal(new, old.data))
        return old

    def create_atomic_store(self, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any) -> None:  # triton >= 3.9
        if sem in _RELEASES:
            machine().release(system=scope == _SYSTEM)
        super().create_atomic_store(ptr, val, mask, sem, scope)

    def _before_atomic(self, ptr: Any, addresses: Any, wanted: Any, sem: Any, scope: Any) -> None:
        pointers = machine().pointers
        symmetric = pointers.check(addresses, wanted, _itemsize(ptr), ptr.origin, "store to")
        if sem in _RELEASES:
            machine().release(system=scope == _SYSTEM)
        pointers.before_atomic(addresses, wanted, symmetric=symmetric)

    # ------------------------------------------------------------------ arithmetic, of narrow types and of addresses

    def cast_impl(self, src: Any, dst_type: Any) -> Any:
        target = dst_type.scalar
        if not (_narrow(src) or is_narrow(target)):
            return _from(src, super().cast_impl(src, dst_type))
        values = to_float32(src.data, src.dtype.scalar) if _narrow(src) else src.data
        data = narrowed(values, target) if is_narrow(target) else values.astype(_numpy_dtype(target))
        return triton_interpreter.TensorHandle(data, target)

    def create_fp_to_fp(self, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        target = dst_type.scalar
        if not (_narrow(src) or is_narrow(target)):
            return super().create_fp_to_fp(src, dst_type, rounding_mode)
        if rounding_mode == triton_interpreter._ir.ROUNDING_MODE.RTZ:
            raise ValueError(f"fp_downcast_rounding='rtz' to {target} is not simulated; leave it out")
        return self.cast_impl(src, dst_type)

    def binary_op(self, lhs: Any, rhs: Any, op: Any) -> Any:
        if lhs.data.dtype.char in _BITS and _narrow(lhs):
            return _computed(op, lhs, rhs)
        result = super().binary_op(lhs, rhs, op)
        if result.data.dtype.char == "?":
            result.dtype = tl.int1  # the interpreter gives a comparison the type of what was compared
        if lhs.origin is not None or rhs.origin is not None:
            # A distance within one tensor is no address, nor is the remainder of one.
            distance = op is np.subtract and lhs.origin is rhs.origin
            remainder = op is np.fmod or (op is np.bitwise_and and result.data.max(initial=0) < NULL_PAGE)
            if not distance and not remainder:
                result.origin = joined(lhs.origin, rhs.origin)
        return result

    def ternary_op(self, lhs: Any, rhs: Any, other: Any, op: Any) -> Any:
        if op is np.where:
            return _either(rhs, other, super().ternary_op(lhs, rhs, other, op))
        return _computed(op, lhs, rhs, other) if _narrow(other) else super().ternary_op(lhs, rhs, other, op)

    def unary_op(self, arg: Any, op: Any) -> Any:
        return _computed(op, arg) if _narrow(arg) else super().unary_op(arg, op)

    def create_fma(self, x: Any, y: Any, z: Any) -> Any:
        if not _narrow(z):
            return super().create_fma(x, y, z)
        return _computed(lambda x, y, z: x.astype(np.float64) * y + z, x, y, z)

    def create_dot(self, a: Any, b: Any, d: Any, *options: Any) -> Any:
        wide = [
            triton_interpreter.TensorHandle(to_float32(h.data, h.dtype.scalar), tl.float32) if _narrow(h) else h
            for h in (a, b)
        ]
        return super().create_dot(*wide, d, *options)

    def get_bf16(self, value: float) -> Any:
        return triton_interpreter.TensorHandle(narrowed(np.array([value], np.float64), tl.bfloat16), tl.bfloat16)

    # ------------------------------------------------------------------ what only moves values

    def create_addptr(self, ptr: Any, offset: Any) -> Any:
        return _from(ptr, super().create_addptr(ptr, offset))

    def create_splat(self, ret_ty: Any, arg: Any) -> Any:
        return _from(arg, super().create_splat(ret_ty, arg))

    def create_cat(self, lhs: Any, rhs: Any) -> Any:
        return _either(lhs, rhs, super().create_cat(lhs, rhs))

    def create_join(self, lhs: Any, rhs: Any) -> Any:
        return _either(lhs, rhs, super().create_join(lhs, rhs))

    def create_split(self, val: Any) -> Any:
        return tuple(_from(val, half) for half in super().create_split(val))


def _passing_on(name: str) -> Any:
    moved = getattr(_Builder, name)

    def move(self: Any, arg: Any, *rest: Any, **named: Any) -> Any:
        return _from(arg, moved(self, arg, *rest, **named))

    return move


for _name in (
    "create_ashr",
    "create_bitcast",
    "create_broadcast",
    "create_expand_dims",
    "create_gather",
    "create_idiv",
    "create_int_to_ptr",
    "create_ptr_to_int",
    "create_reshape",
    "create_trans",
    "create_unsplat",
):
    setattr(_MachineBuilder, _name, _passing_on(_name))


def _from(source: Any, result: Any) -> Any:
    """``result``, which was made of ``source``."""
    if source.origin is not None:
        result.origin = source.origin
    return result


def _either(one: Any, other: Any, result: Any) -> Any:
    """``result``, each of whose elements is one of ``one`` or of ``other``."""
    if one.origin is not None or other.origin is not None:
        result.origin = one.origin if one.origin is other.origin else MIXED
    return result


def _itemsize(ptrs: Any) -> int:
    return max(1, ptrs.get_element_ty().primitive_bitwidth // 8)


def _narrow(handle: Any) -> bool:
    """Whether a handle holds bf16 or fp8."""
    return handle.data.dtype.char in _BITS and is_narrow(handle.dtype.scalar)


def _computed(op: Callable[..., Any], *operands: Any) -> Any:
    """``op`` of bf16, computed in fp32 and rounded."""
    kind = operands[-1].dtype.scalar
    if is_fp8(kind):
        raise TypeError(f"Triton has no arithmetic on {kind}: cast to a wider type first, such as .to(tl.float32)")
    result = op(*(to_float32(operand.data, kind) for operand in operands))
    if result.dtype == np.bool_:
        return triton_interpreter.TensorHandle(result, tl.int1)
    return triton_interpreter.TensorHandle(narrowed(result, kind), kind)


def _add_narrow(ptr: Any, val: Any, wanted: Any) -> Any:
    """An atomic addition of bf16, which the interpreter does not have; what was there before."""
    atomics, kind = triton_interpreter._interpreter, val.dtype.scalar
    order = atomics.MEM_SEMANTIC.ACQUIRE_RELEASE
    summands = np.broadcast_to(val.data, ptr.data.shape).reshape(-1)
    before = np.zeros(ptr.data.size, np.uint16)
    for place in np.flatnonzero(wanted):
        at = _flat(ptr)[place : place + 1]
        while True:
            old = atomics.load(at, np.ones(1, bool), np.zeros(1, np.uint16), np.dtype(np.uint16))
            new = from_float32(to_float32(old, kind) + to_float32(summands[place : place + 1], kind), kind)
            if atomics.atomic_cas(at, old, new, order)[0] == old[0]:
                break
        before[place] = old[0]
    return triton_interpreter.TensorHandle(before.reshape(ptr.data.shape), kind)


def _reducing(original: Callable[..., Any], element_by_element: str) -> Callable[..., Any]:
    """A reduction or a scan that leaves bf16 to the function that combines, as numpy cannot add it up."""

    def apply_impl(self: Any, input: Any) -> Any:
        if any(_narrow(value.handle) for value in input):
            return getattr(self, element_by_element)(input)
        return original(self, input)

    return apply_impl


def _remembering(original: Callable[..., int], extents: Extents) -> Callable[..., int]:
    """``Tensor.data_ptr``, and whose address it was."""

    def data_ptr(self: torch.Tensor) -> int:
        first = original(self)
        extents.remember(self, first)
        return first

    return data_ptr


def _materializing(original: Callable[..., Any]) -> Callable[..., Any]:
    """Pointers of a block pointer or a descriptor have the origin of its base."""

    def materialize_pointers(self: Any, *args: Any) -> Any:
        pointers, mask = original(self, *args)
        return _from(self.base, pointers), mask

    return materialize_pointers


_numpy_dtypes: dict[str, Any] = {}
_uncached_numpy_dtype = triton_interpreter._get_np_dtype


def _numpy_dtype(dtype: Any) -> Any:
    """The numpy type of a Triton type. Triton builds a table of all types to answer that, for every operation."""
    found = _numpy_dtypes.get(dtype.name)
    if found is None:
        found = _numpy_dtypes[dtype.name] = _uncached_numpy_dtype(dtype)
    return found


_INTEGERS = {"i32": tl.int32, "i64": tl.int64}


class _Signature:
    """What a launch needs to know of a rewritten kernel; kept, because finding it out costs time."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        from triton.runtime.jit import _normalize_ty

        specification = inspect.getfullargspec(fn)
        self.name = fn.__name__
        self.parameters = (*specification.args, *specification.kwonlyargs)
        self.defaults = {
            **dict(zip(reversed(specification.args), reversed(specification.defaults or ()), strict=False)),
            **(specification.kwonlydefaults or {}),
        }
        self.positional = len(specification.args)
        # Rewriting makes strings of annotations.
        kinds = {name: _normalize_ty(kind) for name, kind in specification.annotations.items()}
        self.types = {name: _INTEGERS[kind] for name, kind in kinds.items() if kind in _INTEGERS}
        self.constexprs = frozenset(name for name, kind in kinds.items() if kind == "constexpr")

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Arguments by name, tensors as pointers. Raises TypeError as a Python call would."""
        given = dict(zip(self.parameters, args, strict=False))
        if len(args) > self.positional:
            raise TypeError(f"{self.name}() takes {self.positional} positional arguments, got {len(args)}")
        for name, value in kwargs.items():
            if name in self.parameters:
                if name in given:
                    raise TypeError(f"{self.name}() got multiple values for argument {name!r}")
                given[name] = value
        bound = {**self.defaults, **given}
        missing = [name for name in self.parameters if name not in bound]
        if missing:
            raise TypeError(f"{self.name}() misses argument(s) {', '.join(missing)}")
        return {
            name: value if name in self.constexprs else _to_device(name, value, self.types.get(name))
            for name, value in bound.items()
        }


def _to_device(name: str, value: Any, kind: Any = None) -> Any:
    """A kernel's argument as the interpreter wants it, with its origin; of the type ``kind`` if that is one."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        kinds = type(value).__annotations__
        fields = zip(value._fields, value, strict=True)
        return type(value)(*(_to_device(f"{name}.{field}", inner, kinds.get(field)) for field, inner in fields))
    if isinstance(value, tl.constexpr):
        return value.value
    if isinstance(value, bool):  # triton before 3.9 makes 32 bits of a 1-bit integer
        return tl.tensor(triton_interpreter.TensorHandle(np.array([value], dtype=np.bool_), tl.int1), tl.int1)
    device = getattr(value, "device", None)
    if getattr(device, "type", "cpu") != "cpu":
        raise ValueError(f"{name} must be a CPU tensor: kernels run in the simulator; got one on {device}")
    if isinstance(value, int) and kind is not None and kind in _INTEGERS.values():
        return tl.tensor(triton_interpreter.TensorHandle(np.array([value], dtype=_numpy_dtype(kind)), kind), kind)
    converted = triton_interpreter._implicit_cvt(value)
    _give_origin(name, value, converted)
    return converted


def _give_origin(name: str, value: Any, converted: Any) -> None:
    """The tensors in ``value`` are the origins of the pointers in ``converted``."""
    if isinstance(value, tuple):
        for place, (part, into) in enumerate(zip(value, converted, strict=True)):
            _give_origin(f"{name}[{place}]", part, into)
    elif isinstance(value, TensorDescriptor):
        _set_origin(converted.handle.base, name, value.base)
    elif hasattr(value, "data_ptr"):
        _set_origin(converted.handle, name, value)


def _set_origin(handle: Any, name: str, tensor: Any) -> None:
    tensor = triton_interpreter._unwrap_tensor(tensor)
    if isinstance(tensor, torch.Tensor) and tensor.data_ptr():
        handle.origin = machine().extents.of_tensor(tensor, name)


_signatures: dict[Callable[..., Any], _Signature] = {}


class _MachineLauncher(triton_interpreter.GridExecutor):
    """What ``kernel[grid]`` makes: hands the launch to the machine."""

    def __init__(self, fn: Any, arg_names: Any, grid: Any, pre_run_hooks: Any = ()) -> None:
        self.fn, self.grid, self.pre_run_hooks = fn, grid, pre_run_hooks

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        fn = self.fn
        signature = _signatures.get(fn)
        if signature is None:
            signature = _signatures[fn] = _Signature(fn)
        for hook in self.pre_run_hooks:
            hook(*args, **{name: value for name, value in kwargs.items() if name in signature.parameters})
        linked = bool(kwargs.get(LINKED))
        bound = signature.bind(args, kwargs)
        grid = tuple(int(extent) for extent in (self.grid(bound) if callable(self.grid) else self.grid))
        if not 1 <= len(grid) <= 3 or any(extent < 0 for extent in grid):
            raise ValueError(f"the grid of {signature.name} must have 1 to 3 extents of at least 0, got {grid}")

        def program(keep_alive: object = (args, kwargs)) -> None:
            # Messages may read and write the kernel's tensors after its end; they hold their program, it these.
            machine().program.linked = linked
            try:
                fn(**bound)
            except Exception as error:
                cause = root_cause(error)
                if cause is error:
                    raise
                raise cause from cause.__cause__

        threads = _THREADS_PER_WARP * int(kwargs.get("num_warps") or 4)
        x, y, z = (*grid, 1, 1)[:3]
        machine().launch(signature.name, program, (x, y, z), threads)


class Installed:
    """The hooks, from construction until :meth:`remove`."""

    def __init__(self, wanted: Machine) -> None:
        global _machine
        if not triton.knobs.runtime.interpret:
            raise TdcollError(
                "the simulator needs TRITON_INTERPRET=1 in the environment before triton is first imported"
            )
        if _machine is not None:
            raise TdcollError("a simulated machine is active in this process already; only one can be")
        module = triton_interpreter
        self._language = module._patch_lang(types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
        # triton 3.6 with numpy >= 2.4: int() of a one-element array fails, and with it range(runtime value)
        self._language.set_attr(tl.tensor, "__index__", lambda tensor: int(tensor.handle.data.item()))
        self._saved: list[tuple[Any, str, Any]] = []
        self._replace(module, "GridExecutor", _MachineLauncher)
        self._replace(module, "_patch_lang", lambda fn: _NOTHING)
        self._replace(module, "_get_np_dtype", _numpy_dtype)
        self._replace_method(torch.Tensor, "data_ptr", partial(_remembering, extents=wanted.extents))
        self._replace(module.TensorHandle, "origin", None)
        for handle in ("BlockPointerHandle", "TensorDescHandle"):
            if hasattr(module, handle):  # triton 3.9 has no block pointers
                self._replace_method(getattr(module, handle), "materialize_pointers", _materializing)
        self._replace_method(module.ReduceOps, "apply_impl", partial(_reducing, element_by_element="generic_reduce"))
        self._replace_method(module.ScanOps, "apply_impl", partial(_reducing, element_by_element="generic_scan"))
        self._replace(module.FunctionRewriter, "ast_transformer", KernelTransformer())
        self._replace(module.InterpretedFunction, "rewritten_fn", _rewritten)
        for name, value in kernel_globals(machine).items():
            self._replace(module, name, value)
        # By default Triton's interpreter computes every int32 result in int64 too, and does nothing with it.
        check = wanted.check_overflow
        options = replace(module.interpreter_builder.options, sanitize_overflow=check, debug=check)
        self._replace(module.interpreter_builder, "options", options)
        module.interpreter_builder.__class__ = _MachineBuilder
        _machine = wanted

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        self._saved.append((owner, name, owner.__dict__.get(name, _NOTHING)))
        setattr(owner, name, value)

    def _replace_method(self, owner: Any, name: str, replacement: Callable[[Any], Any]) -> None:
        self._replace(owner, name, replacement(getattr(owner, name)))

    def remove(self) -> None:
        """Put everything back. Idempotent."""
        global _machine
        if not self._saved:
            return
        _machine = None
        triton_interpreter.interpreter_builder.__class__ = _Builder
        while self._saved:
            owner, name, value = self._saved.pop()
            if value is _NOTHING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
        self._language.restore()


class _Nothing:
    """Stands for an attribute that was not there, and for a patch that there is nothing to undo of."""

    def restore(self) -> None:
        pass


_NOTHING = _Nothing()
