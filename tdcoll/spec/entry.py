# SPDX-License-Identifier: Apache-2.0
"""The form of an entry of the device language's table, and the errors that all lowerings share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["LIBRARY", "LINKED", "DeviceFunction", "Kind"]
__all__ += ["no_puts", "not_64_bits", "not_a_monitor", "not_linked", "not_typed"]

LIBRARY = "libnvshmem_device"
"""NVSHMEM's bitcode library, as its file and Triton's ``extern_libs`` name it."""

LINKED = "linked_by_tdcoll_jit"
"""A launch option by which ``tdcoll.jit`` tells the simulator that a compiled kernel would have NVSHMEM linked in."""

Kind = Literal["ptr", "ptr64", "size", "pe", "int", "u64", "value", "constant"]


@dataclass(frozen=True)
class DeviceFunction:
    """One function of the device language.

    Attributes:
        name: as a kernel writes it.
        parameters: ``(name, kind)``: ``ptr`` an address or pointer, ``ptr64`` an address or a pointer to 64-bit
            integers, ``size`` bytes (int64), ``pe`` a PE (int32), ``int`` an int32, ``u64`` an unsigned 64-bit value,
            ``value`` of the pointee's type, ``constant`` a compile-time constant.
        defaults: default values of the last parameters.
        symbol: NVSHMEM's device function, in which TYPE stands for that of the pointee; or None where PTX or Triton
            itself does the work.
        returns: what it returns, or None.
        prototype: what it stands for: NVSHMEM's C prototype, or the PTX instruction.
        doc: meaning, units, who must call it, ordering.
        types: what NVSHMEM calls the types that TYPE may be.
        acquires: loads that follow it in the program see what others have written, so the compiler must not move
            them above it.
    """

    name: str
    parameters: tuple[tuple[str, Kind], ...]
    symbol: str | None
    returns: Literal["int32", "uint64", "pointer", "value"] | None
    prototype: str
    doc: str
    defaults: tuple[object, ...] = ()
    acquires: bool = False
    types: tuple[str, ...] = ()

    @property
    def symbols(self) -> tuple[str, ...]:
        """NVSHMEM's functions that it may call."""
        if self.symbol is None:
            return ()
        return tuple(self.symbol.replace("TYPE", kind) for kind in self.types) or (self.symbol,)

    @property
    def signature(self) -> str:
        """``name(a, b=default)``."""
        names = [name for name, _ in self.parameters]
        first = len(names) - len(self.defaults)
        shown = names[:first] + [f"{n}={d!r}" for n, d in zip(names[first:], self.defaults, strict=True)]
        return f"{self.name}({', '.join(shown)})"


def not_64_bits(function: str, parameter: str, pointee: object) -> str:
    """Return the error for a pointer to ``pointee`` where ``parameter`` of ``function`` is of kind ``ptr64``."""
    return (
        f"{function}: {parameter} must point to 64-bit integers (int64 or uint64), got a pointer to {pointee}; 64 bits "
        "there take in the neighbour"
    )


def not_a_monitor(address: int) -> str:
    """Return the error for an ``address`` where a monitor's words are wanted."""
    return (
        "monitor must be the words of an open tdcoll.WaitMonitor of this job (monitor.words, ctx.monitor.words), got "
        f"other memory at {address:#x}"
    )


def not_linked(function: str) -> str:
    """Return the error for ``function``, which is NVSHMEM's, in a kernel that was launched without NVSHMEM."""
    return (
        f"{function} calls NVSHMEM: decorate the kernel that is launched with @tdcoll.jit instead of @triton.jit (its "
        "helpers may have either)"
    )


def no_puts(caller: str) -> str:
    """Return the error for ``caller``, a kernel or function that needs NVSHMEM, in a job whose heap has none of it."""
    return (
        f"{caller} calls NVSHMEM, and the symmetric heap of this job is PyTorch's, which has loads and stores only: "
        "tdcoll.initialize(heap='nvshmem') or TDCOLL_HEAP=nvshmem"
    )


def not_typed(function: DeviceFunction, got: object) -> str:
    """Return the error for ``got`` where the first parameter of ``function`` must point to one of its types."""
    allowed = "integers of 32 or 64 bits" + (", or to fp32 or fp64" if "float" in function.types else "")
    return f"{function.name}: {function.parameters[0][0]} must be a pointer to {allowed}, got {got}"
