# SPDX-License-Identifier: Apache-2.0
"""Hooks into Triton's interpreter, so that kernels run as programs of a simulated machine.

While a machine is installed:

- launches go to the machine (a subclass of ``GridExecutor``), which runs the programs as tasks;
- the position in the grid is read from the running task, and loads, stores and atomics are shown to the
  machine (a subclass of the interpreter's builder), so that switching tasks has nothing to save or restore;
- Triton's language is patched once, not at every launch and at every call of a nested function;
- kernels written for threads have their ``if <test on tid>`` turned into loops (:mod:`.lanes`).

Everything is put back by :meth:`Installed.remove`, also after errors.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import triton
import triton.language as tl
import triton.runtime.interpreter as triton_interpreter
from triton.runtime.errors import InterpreterError

from tdcoll.errors import NotInitializedError, TdcollError
from tdcoll.language.spec import LINKED
from tdcoll.runtime.simulator.lanes import LaneTransformer, lane_globals
from tdcoll.runtime.simulator.machine import Machine

__all__ = ["Installed", "machine", "machine_or_none", "root_cause"]

_machine: Machine | None = None
_rewritten: dict[Any, Any] = {}  # kernels rewritten with LaneTransformer

_Builder = type(triton_interpreter.interpreter_builder)
_SEMANTIC = triton_interpreter._ir.MEM_SEMANTIC
_SYSTEM = triton_interpreter._ir.MEM_SYNC_SCOPE.SYSTEM
_RELEASES = (_SEMANTIC.RELEASE, _SEMANTIC.ACQUIRE_RELEASE)
_THREADS_PER_WARP = 32


def machine_or_none() -> Machine | None:
    """The machine that kernels run on, or None."""
    return _machine


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
    return np.ascontiguousarray(np.broadcast_to(data, shape)).reshape(-1).astype(bool)


class _MachineBuilder(_Builder):  # type: ignore[misc, valid-type]
    """The interpreter's builder, with the grid position of the running task and an eye on memory."""

    @property
    def grid_idx(self) -> Any:
        return machine().program.grid_idx

    @property
    def grid_dim(self) -> Any:
        return machine().program.grid_dim

    def create_masked_load(self, ptrs: Any, mask: Any, other: Any, *options: Any, **named: Any) -> Any:
        volatile = named.get("is_volatile", options[-1] if options else False)
        machine().pointers.before_load(_flat(ptrs), _flat_mask(mask, ptrs.data.shape), polls=volatile is True)
        return super().create_masked_load(ptrs, mask, other, *options, **named)

    def create_masked_store(self, ptrs: Any, value: Any, mask: Any, *options: Any, **named: Any) -> Any:
        shape = ptrs.data.shape
        addresses, wanted = _flat(ptrs), _flat_mask(mask, shape)
        values = np.ascontiguousarray(np.broadcast_to(value.data, shape)).reshape(-1)
        local = machine().pointers.store_weakly(addresses, values, wanted)
        if local is not wanted:
            mask = triton_interpreter.TensorHandle(local.reshape(shape), tl.int1)
        super().create_masked_store(ptrs, value, mask, *options, **named)
        machine().pointers.stored(addresses, wanted)

    def create_atomic_cas(self, ptr: Any, cmp: Any, val: Any, sem: Any, scope: Any) -> Any:
        shape = ptr.data.shape
        addresses, mask = _flat(ptr), np.ones(ptr.data.size, dtype=bool)
        machine().pointers.before_atomic(addresses, mask, release=sem in _RELEASES, system=scope == _SYSTEM)
        old = super().create_atomic_cas(ptr, cmp, val, sem, scope)
        swapped = np.broadcast_to(old.data == cmp.data, shape) & np.broadcast_to(cmp.data != val.data, shape)
        machine().pointers.after_atomic(addresses, mask, changed=bool(swapped.any()))
        return old

    def create_atomic_rmw(self, rmw: Any, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any) -> Any:
        addresses, wanted = _flat(ptr), _flat_mask(mask, ptr.data.shape)
        machine().pointers.before_atomic(addresses, wanted, release=sem in _RELEASES, system=scope == _SYSTEM)
        old = super().create_atomic_rmw(rmw, ptr, val, mask, sem, scope)
        new = triton_interpreter._interpreter.load(ptr.data, mask.data, np.zeros_like(old.data), old.data.dtype)
        machine().pointers.after_atomic(addresses, wanted, changed=not np.array_equal(new, old.data))
        return old

    def create_atomic_store(self, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any) -> None:  # triton >= 3.9
        if sem in _RELEASES and scope == _SYSTEM:
            machine().release()
        super().create_atomic_store(ptr, val, mask, sem, scope)


_numpy_dtypes: dict[str, Any] = {}
_uncached_numpy_dtype = triton_interpreter._get_np_dtype


def _numpy_dtype(dtype: Any) -> Any:
    """The numpy type of a Triton type. Triton builds a table of all types to answer that, for every operation."""
    found = _numpy_dtypes.get(dtype.name)
    if found is None:
        found = _numpy_dtypes[dtype.name] = _uncached_numpy_dtype(dtype)
    return found


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
        self.constexprs = frozenset(
            name for name, kind in specification.annotations.items() if _normalize_ty(kind) == "constexpr"
        )

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
        return {name: value if name in self.constexprs else _to_device(name, value) for name, value in bound.items()}


def _to_device(name: str, value: Any) -> Any:
    if isinstance(value, bool):  # triton before 3.9 makes 32 bits of a 1-bit integer
        return tl.tensor(triton_interpreter.TensorHandle(np.array([value], dtype=np.bool_), tl.int1), tl.int1)
    device = getattr(value, "device", None)
    if getattr(device, "type", "cpu") != "cpu":
        raise ValueError(f"{name} must be a CPU tensor: kernels run in the simulator; got one on {device}")
    return triton_interpreter._implicit_cvt(value)


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
        self._replace(module.FunctionRewriter, "ast_transformer", LaneTransformer())
        self._replace(module.InterpretedFunction, "rewritten_fn", _rewritten)
        for name, value in lane_globals(machine).items():
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
