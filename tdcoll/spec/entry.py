# SPDX-License-Identifier: Apache-2.0
"""The form of an entry of the device language's table, and the errors that all lowerings share."""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import dataclass
from typing import Any, Literal

from tdcoll.base.device_library import LIBRARY as LIBRARY

LINKED = "linked_by_tdcoll_jit"
"""A launch option by which ``tdcoll.jit`` tells the simulator that a compiled kernel would have
NVSHMEM linked in."""


@dataclass(frozen=True)
class DeviceFunction:
    """One function of the device language.

    Attributes:
        parameters: ``(name, kind)``: ``ptr`` an address or pointer, ``ptr64`` an address or a
            pointer to 64-bit integers, ``size`` bytes (int64), ``pe`` a PE (int32), ``int`` an
            int32, ``u64`` an unsigned 64-bit value, ``value`` of the pointee's type, or a block,
            ``constant`` a compile-time constant.
        returns: what it returns, or None.
        prototype: what it stands for: NVSHMEM's C prototype, or the PTX instruction.
        doc: meaning, units, who must call it, ordering.
        acquires: loads that follow it see what others have written, so the compiler must not move
            them above it.
        types: what NVSHMEM calls the types that TYPE in the prototype may be.
    """

    name: str
    parameters: tuple[tuple[str, str], ...]
    defaults: tuple[object, ...]
    returns: Literal["int32", "uint64", "pointer", "value"] | None
    prototype: str
    doc: str
    acquires: bool
    types: tuple[str, ...]

    @property
    def symbol(self) -> str | None:
        """NVSHMEM's device function; None where PTX or Triton itself does the work."""
        found = re.search(r"\b(nvshmemx?_\w+)\(", self.prototype)
        return found and found[1]

    @property
    def symbols(self) -> tuple[str, ...]:
        """NVSHMEM's functions that it may call."""
        if self.symbol is None:
            return ()
        return tuple(self.symbol.replace("TYPE", kind) for kind in self.types) or (self.symbol,)

    @property
    def call(self) -> inspect.Signature:
        """How it is called in Python's terms."""
        none = (inspect.Parameter.empty,) * (len(self.parameters) - len(self.defaults))
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        return inspect.Signature(
            [
                inspect.Parameter(name, kind, default=default)
                for (name, _), default in zip(self.parameters, (*none, *self.defaults), strict=True)
            ]
        )

    @property
    def signature(self) -> str:
        """``name(a, b=default)``."""
        return f"{self.name}{self.call}"


def declared(
    declaration: str,
    prototype: str,
    doc: str,
    *,
    acquires: bool = False,
    types: tuple[str, ...] = (),
) -> DeviceFunction:
    """Return the entry of a declaration by kinds, such as ``"ld(ptr: ptr, scope: constant = 'gpu')
    -> value"``."""
    function = ast.parse(f"def {declaration}: ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    parameters = tuple(
        (one.arg, ast.unparse(one.annotation)) for one in function.args.args if one.annotation
    )
    defaults = tuple(ast.literal_eval(default) for default in function.args.defaults)
    returns: Any = function.returns and ast.unparse(function.returns)
    return DeviceFunction(
        function.name, parameters, defaults, returns, prototype, doc, acquires, types
    )


def not_a_monitor(address: int) -> str:
    """Return the error for an ``address`` where a monitor's words are wanted."""
    return (
        "monitor must be the words of an open tdcoll.WaitMonitor of this job (monitor.words, ctx.monitor.words), got "
        f"other memory at {address:#x}"
    )


def not_linked(function: str) -> str:
    """Return the error for ``function``, which is NVSHMEM's, in a kernel that was launched without
    NVSHMEM."""
    return (
        f"{function} calls NVSHMEM: decorate the kernel that is launched with @tdcoll.jit instead of @triton.jit (its "
        "helpers may have either), or give triton.compile NVSHMEM's library in options['extern_libs']"
    )


def no_puts(caller: str) -> str:
    """Return the error for ``caller``, a kernel or function that needs NVSHMEM, in a job whose heap
    has none of it."""
    return (
        f"{caller} calls NVSHMEM, and the symmetric heap of this job is PyTorch's, which has loads and stores only: "
        "tdcoll.initialize(heap='nvshmem') or TDCOLL_HEAP=nvshmem"
    )
