# SPDX-License-Identifier: Apache-2.0
"""``kernel[grid](...)``: bind the arguments, and pass the launch to the machine."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as triton_interpreter
from triton.runtime.errors import InterpreterError
from triton.runtime.jit import _normalize_ty
from triton.tools.tensor_descriptor import TensorDescriptor

from tdcoll.simulator.builder import numpy_dtype
from tdcoll.simulator.machine import machine
from tdcoll.simulator.tasks import GridLaunch
from tdcoll.spec.functions import LINKED

_THREADS_PER_WARP = 32


def root_cause(error: BaseException) -> BaseException:
    """Return the error that Triton's interpreter wrapped, perhaps several times."""
    while isinstance(error, InterpreterError) and error.__cause__ is not None:
        error = error.__cause__
    return error


_INTEGERS = {"i32": tl.int32, "i64": tl.int64}


class _Signature:
    """The signature of a rewritten kernel, for launches."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.name = fn.__name__
        self.signature = inspect.signature(fn)
        # Rewriting makes strings of annotations.
        kinds = {name: _normalize_ty(kind) for name, kind in fn.__annotations__.items()}
        self.types = {name: _INTEGERS[kind] for name, kind in kinds.items() if kind in _INTEGERS}
        self.constexprs = frozenset(name for name, kind in kinds.items() if kind == "constexpr")

    def known(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return those that are arguments of the kernel; the others are launch options."""
        return {name: value for name, value in kwargs.items() if name in self.signature.parameters}

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return arguments by name, tensors as pointers. Raises TypeError as a Python call
        would."""
        try:
            bound = self.signature.bind(*args, **self.known(kwargs))
        except TypeError as error:
            raise TypeError(f"{self.name}(): {error}") from None
        bound.apply_defaults()
        return {
            name: value
            if name in self.constexprs
            else _to_device(name, value, self.types.get(name))
            for name, value in bound.arguments.items()
        }


_signature = functools.cache(_Signature)


def _to_device(name: str, value: Any, kind: Any = None) -> Any:
    """Return a kernel's argument as the interpreter needs it, with its origin; of the type ``kind``
    if that is one."""
    if isinstance(value, tuple):
        fields = getattr(value, "_fields", None)
        kinds = getattr(type(value), "__annotations__", {})
        if fields is None:
            return type(value)(
                _to_device(f"{name}[{place}]", inner) for place, inner in enumerate(value)
            )
        inner = zip(fields, value, strict=True)
        return type(value)(
            *(_to_device(f"{name}.{field}", one, kinds.get(field)) for field, one in inner)
        )
    if isinstance(value, tl.constexpr):
        return value.value
    device = getattr(value, "device", None)
    if getattr(device, "type", "cpu") != "cpu":
        raise ValueError(
            f"{name} must be a CPU tensor: kernels run in the simulator; got one on {device}"
        )
    if isinstance(value, bool):
        kind = tl.int1  # triton before 3.9 makes 32 bits of it
    if isinstance(value, int) and kind in (tl.int1, *_INTEGERS.values()):
        return tl.tensor(
            triton_interpreter.TensorHandle(np.array([value], numpy_dtype(kind)), kind), kind
        )
    converted = triton_interpreter._implicit_cvt(value)
    is_descriptor = isinstance(value, TensorDescriptor)
    tensor = triton_interpreter._unwrap_tensor(value.base if is_descriptor else value)
    if isinstance(tensor, torch.Tensor) and tensor.data_ptr():
        handle = converted.handle.base if is_descriptor else converted.handle
        handle.origin = machine().bounds.of_tensor(tensor, name)
    return converted


class MachineLauncher(triton_interpreter.GridExecutor):
    """The result of ``kernel[grid]``, which passes the launch to the machine."""

    def __init__(self, fn: Any, arg_names: Any, grid: Any, pre_run_hooks: Any = ()) -> None:
        self.fn = fn
        self.grid = grid
        self.pre_run_hooks = pre_run_hooks

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        fn = self.fn
        signature = _signature(self.fn)
        for hook in self.pre_run_hooks:
            hook(*args, **signature.known(kwargs))
        linked = bool(kwargs.get(LINKED))
        bound = signature.bind(args, kwargs)
        grid = tuple(int(size) for size in (self.grid(bound) if callable(self.grid) else self.grid))
        if not 1 <= len(grid) <= 3 or any(size < 0 for size in grid):
            raise ValueError(
                f"the grid of {signature.name} must have 1 to 3 sizes of at least 0, got {grid}"
            )

        def program(keep_alive: object = (args, kwargs)) -> None:
            # Keep the tensors, because messages, which hold their program, may use them after the
            # kernel's end.
            machine().program.linked = linked
            fn(**bound)

        threads = _THREADS_PER_WARP * int(kwargs.get("num_warps") or 4)
        x, y, z = (*grid, 1, 1)[:3]
        machine().launch(GridLaunch(signature.name, program, (x, y, z), threads))
