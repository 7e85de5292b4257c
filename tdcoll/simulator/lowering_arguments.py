# SPDX-License-Identifier: Apache-2.0
"""Arguments and results of the simulated device language, converted from and to those of Triton's
interpreter."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as triton_interpreter

from tdcoll.base.errors import TdcollError
from tdcoll.simulator.bounds import Address
from tdcoll.simulator.branches import differs, one_value
from tdcoll.simulator.machine import Machine, machine
from tdcoll.spec import constants as c
from tdcoll.spec.checks import require_64_bits
from tdcoll.spec.functions import FUNCTIONS, no_puts, not_linked


def number_of(function: str, parameter: str, value: Any) -> int:
    """Return a scalar argument as a Python int."""
    if isinstance(value, tl.constexpr):
        value = value.value
    if isinstance(value, tl.tensor):
        data = value.handle.data
        if differs(value):
            raise one_value(f"{function}: {parameter}")
        if data.size != 1 or value.type.is_block():
            raise ValueError(
                f"{function}: {parameter} must be a scalar, got a block of shape {list(data.shape)}"
            )
        value = data.reshape(-1)[0].item()
    if not isinstance(value, int):
        hint = "; pass its words" if hasattr(value, "words") else ""  # of a WaitMonitor
        raise TypeError(
            f"{function}: {parameter} must be an integer or a pointer, got {value!r}{hint}"
        )
    return int(value)


def scalar(value: Any, numpy_type: Any, triton_type: Any) -> Any:
    """Return ``value`` as a scalar of a kernel."""
    return tl.tensor(
        triton_interpreter.TensorHandle(np.array([value], numpy_type), triton_type), triton_type
    )


def int32(value: int) -> Any:
    """Return ``value`` as an int32 of a kernel."""
    return scalar(value, np.int32, tl.int32)


def device(
    implementation: Callable[..., Any], name: str = "", *, as_given: tuple[str, ...] = ()
) -> Callable[..., Any]:
    """Make a function of the language from ``implementation(machine, *arguments)``.

    Args:
        name: of the function; default: the implementation's.
        as_given: kinds of parameters whose arguments it takes as the interpreter gives them; others
            are numbers.
    """
    name = name or implementation.__name__
    spec = FUNCTIONS[name]
    signature = spec.call

    def argument(running: Machine, parameter: str, kind: str, value: Any) -> Any:
        if kind in as_given:
            return value
        if kind == "ptr64":
            require_64_bits(name, parameter, value)
        number = number_of(name, parameter, value)
        if kind == "u64":
            return number & 0xFFFF_FFFF_FFFF_FFFF
        if kind in ("ptr", "ptr64") and isinstance(value, tl.tensor):
            number = Address(number)
            number.origin = value.handle.origin
        return running.check_pe(number) if kind == "pe" else number

    def call(*args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
        running = machine()
        if spec.symbol is not None:
            require_nvshmem(running, name)
        if kwargs or len(args) != len(spec.parameters):
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            args = bound.args
        given = [
            argument(running, *what, value)
            for what, value in zip(spec.parameters, args, strict=True)
        ]
        return implementation(running, *given)

    call.__name__ = call.__qualname__ = name
    call.__doc__ = spec.doc
    call.__signature__ = signature  # type: ignore[attr-defined]
    return call


blocks = partial(device, as_given=("ptr", "value", "constant"))
"""As :func:`device`, of functions that take blocks, or constants that are no numbers."""


def require_nvshmem(running: Machine, function: str) -> None:
    """Refuse what would not be linked on a GPU, or has nothing to work on there."""
    if not running.program.linked:
        raise ValueError(not_linked(function))
    if not running.memory.puts:
        raise TdcollError(no_puts(function))


def multiplicity(running: Machine, scope: str) -> int:
    """Return how many times a GPU makes a call that the program makes once: per thread, per warp or
    per block."""
    program = running.program
    if program.lane is not None or scope == "_block":
        return 1
    return program.threads if scope == "" else program.threads // 32


def checked_operation(operation: int) -> int:
    """Return ``SIGNAL_SET`` or ``SIGNAL_ADD`` as it is given."""
    if operation not in (c.SIGNAL_SET.value, c.SIGNAL_ADD.value):
        raise ValueError(f"sig_op must be SIGNAL_SET or SIGNAL_ADD, got {operation}")
    return operation
