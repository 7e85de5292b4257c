# SPDX-License-Identifier: Apache-2.0
"""Arguments and results of the simulated device language, converted from and to those of Triton's interpreter."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as triton_interpreter

from tdcoll.errors import TdcollError
from tdcoll.runtime.simulator.branches import differs, one_value
from tdcoll.runtime.simulator.current import machine
from tdcoll.runtime.simulator.extents import Address
from tdcoll.runtime.simulator.machine import Machine
from tdcoll.spec import constants as c
from tdcoll.spec.functions import FUNCTIONS, no_puts, not_64_bits, not_linked

__all__ = [
    "MASK64",
    "address64",
    "checked_compare",
    "checked_operation",
    "choice",
    "device",
    "int32",
    "integer_pointee",
    "multiplicity",
    "named",
    "number_of",
    "require_nvshmem",
    "scalar",
]

_THREADS_PER_WARP = 32
MASK64 = 0xFFFF_FFFF_FFFF_FFFF


def number_of(function: str, parameter: str, value: Any) -> int:
    """Return a scalar argument as a Python int."""
    if isinstance(value, tl.constexpr):
        value = value.value
    if isinstance(value, tl.tensor):
        data = value.handle.data
        if differs(value):
            raise one_value(f"{function}: {parameter}")
        if data.size != 1 or value.type.is_block():
            raise ValueError(f"{function}: {parameter} must be a scalar, got a block of shape {list(data.shape)}")
        value = data.reshape(-1)[0].item()
    if not isinstance(value, int):
        hint = "; pass its words" if hasattr(value, "words") else ""  # of a WaitMonitor
        raise TypeError(f"{function}: {parameter} must be an integer or a pointer, got {value!r}{hint}")
    return int(value)


def address64(function: str, parameter: str, value: Any) -> int:
    """Return an address, or a pointer to 64-bit integers, as a Python int."""
    if isinstance(value, tl.tensor) and value.dtype.is_ptr():
        pointee = value.dtype.element_ty
        if not pointee.is_int() or pointee.primitive_bitwidth != 64:
            raise ValueError(not_64_bits(function, parameter, pointee))
    return number_of(function, parameter, value)


def require_nvshmem(running: Machine, function: str) -> None:
    """Refuse what would not be linked on a GPU, or has nothing to work on there."""
    if not running.program.linked:
        raise ValueError(not_linked(function))
    if not running.memory.puts:
        raise TdcollError(no_puts(function))


def scalar(value: Any, numpy_type: Any, triton_type: Any) -> Any:
    """Return ``value`` as a scalar of a kernel."""
    return tl.tensor(triton_interpreter.TensorHandle(np.array([value], numpy_type), triton_type), triton_type)


def int32(value: int) -> Any:
    """Return ``value`` as an int32 of a kernel."""
    return scalar(value, np.int32, tl.int32)


def device(implementation: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function of the language from ``implementation(machine, *numbers)``."""
    return named(implementation.__name__, implementation)


def named(name: str, implementation: Callable[..., Any], *, as_given: bool = False) -> Callable[..., Any]:
    """Make the function ``name`` of the language; ``implementation`` takes its arguments ``as_given`` or as numbers."""
    spec = FUNCTIONS[name]
    names = [parameter for parameter, _ in spec.parameters]
    kinds = [kind for _, kind in spec.parameters]
    signature = inspect.Signature([inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in names])

    def call(*args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
        running = machine()
        if spec.symbol is not None:
            require_nvshmem(running, name)
        if kwargs or len(args) != len(names):
            args = signature.bind(*args, **kwargs).args
        if as_given:
            return implementation(running, *args)
        numbers = []
        for parameter, kind, value in zip(names, kinds, args, strict=True):
            number = (address64 if kind == "ptr64" else number_of)(name, parameter, value)
            if kind == "u64":
                number &= MASK64
            elif kind in ("ptr", "ptr64") and isinstance(value, tl.tensor):
                number = Address(number)
                number.origin = value.handle.origin
            numbers.append(running.check_pe(number) if kind == "pe" else number)
        return implementation(running, *numbers)

    call.__name__ = call.__qualname__ = name
    call.__doc__ = spec.doc
    call.__signature__ = signature  # type: ignore[attr-defined]
    return call


def multiplicity(running: Machine, scope: str) -> int:
    """Return how many times a GPU makes a call that the program makes once: per thread, per warp or per block."""
    program = running.program
    if program.lane is not None or scope == "_block":
        return 1
    return program.threads if scope == "" else program.threads // _THREADS_PER_WARP


def checked_operation(operation: int) -> int:
    if operation not in (c.SIGNAL_SET.value, c.SIGNAL_ADD.value):
        raise ValueError(f"sig_op must be SIGNAL_SET or SIGNAL_ADD, got {operation}")
    return operation


def checked_compare(parameter: str, compare: int) -> int:
    if compare not in range(6):
        raise ValueError(f"{parameter} must be a CMP_* constant, got {compare}")
    return compare


def choice(parameter: str, value: Any, allowed: tuple[str, ...]) -> str:
    """Return a compile-time argument, which must be one of ``allowed``."""
    chosen = value.value if isinstance(value, tl.constexpr) else value
    if chosen not in allowed:
        raise ValueError(f"{parameter} must be one of {', '.join(allowed)}; got {chosen!r}")
    return chosen


def integer_pointee(function: str, ptr: Any) -> Any:
    """Return the type that ``ptr`` points to, which must be integers of 32 or 64 bits."""
    kind = ptr.dtype if isinstance(ptr, tl.tensor) else None
    pointee = kind.element_ty if kind is not None and kind.is_ptr() else None
    if pointee is None or not pointee.is_int() or pointee.primitive_bitwidth not in (32, 64):
        raise ValueError(f"{function}: ptr must point to 32- or 64-bit integers, got {kind or repr(ptr)}")
    return pointee
