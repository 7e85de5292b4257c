# SPDX-License-Identifier: Apache-2.0
"""What ``kernel[grid](...)`` does: it binds the arguments, and hands the launch to the machine."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import TracebackType
from typing import Any

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as triton_interpreter
from triton.runtime.errors import InterpreterError
from triton.tools.tensor_descriptor import TensorDescriptor

from tdcoll.runtime.simulator.builder import numpy_dtype
from tdcoll.runtime.simulator.current import machine
from tdcoll.runtime.simulator.tasks import Launch
from tdcoll.spec.functions import LINKED

__all__ = ["MachineLauncher", "root_cause"]

_THREADS_PER_WARP = 32


def root_cause(error: BaseException) -> BaseException:
    """The error that Triton's interpreter wrapped, maybe several times over."""
    while isinstance(error, InterpreterError) and error.__cause__ is not None:
        error = error.__cause__
    return error


def _unwrapped(error: BaseException) -> BaseException:
    """The :func:`root_cause` of an error that a kernel raised, with the frames of all functions that led to it.

    Each wrapper has the frames of one Triton function, and the cause only those of the innermost; none at all if a call
    of that function does not fit its parameters.
    """
    cause, traces = root_cause(error), []
    while error is not cause:
        traces.append(error.__traceback__)
        error = error.__cause__  # type: ignore[assignment]
    traces[0] = traces[0] and traces[0].tb_next  # the frame that raises the cause again is added once more
    whole = cause.__traceback__
    for trace in reversed(traces):
        entries = []
        while trace is not None:
            entries.append(trace)
            trace = trace.tb_next
        for entry in reversed(entries):
            whole = TracebackType(whole, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return cause.with_traceback(whole)


_INTEGERS = {"i32": tl.int32, "i64": tl.int64}


class _Signature:
    """What a launch needs to know of a rewritten kernel; kept, because finding it out costs time."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        from triton.runtime.jit import _normalize_ty

        specification = inspect.getfullargspec(fn)
        self.name = fn.__name__
        self.place = f"it is defined in {fn.__code__.co_filename}, line {fn.__code__.co_firstlineno}"
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
            raise TypeError(f"{self.name}() misses argument(s) {', '.join(missing)}; {self.place}")
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
        return tl.tensor(triton_interpreter.TensorHandle(np.array([value], dtype=numpy_dtype(kind)), kind), kind)
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


class MachineLauncher(triton_interpreter.GridExecutor):
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
            except InterpreterError as error:
                cause = _unwrapped(error)
                raise cause from cause.__cause__

        threads = _THREADS_PER_WARP * int(kwargs.get("num_warps") or 4)
        x, y, z = (*grid, 1, 1)[:3]
        machine().launch(Launch(signature.name, program, (x, y, z), threads))
