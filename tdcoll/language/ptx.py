# SPDX-License-Identifier: Apache-2.0
"""The device language compiled by stock Triton: threads, loads and stores with an order, and what acquiring means.

Loads that follow a wait, or anything else that acquires, must stay behind it. For Triton's software pipeliner an asm or
an extern call is no obstacle: it takes the loads of later iterations above it. But it leaves a loop alone that holds a
barrier of Triton's, wherever in its body. So each function that acquires ends with one that is never reached
(:func:`_hold_loads`); the compiler finds that out when the pipeliner is done, and nothing of it is left in the PTX.
:func:`~tdcoll.language.waits.wait_token` is for loops that are to be pipelined.
"""

from __future__ import annotations

import re
from contextvars import ContextVar
from typing import Any

import triton
import triton.language as tl
from triton.language import core

from tdcoll.spec.functions import not_64_bits

__all__ = ["acquired", "atom_add", "atom_cas", "cast_all", "descriptors", "integer_pointee", "ld", "ld_acquire", "ntid"]
__all__ += ["proxy_fence", "require_ptr64", "st", "st_release", "stream_order", "syncthreads", "tid"]


@triton.jit
def _hold_loads():
    """A barrier that is never reached, for the pipeliner to find. That it is not, only MLIR's SCCP sees, which Triton
    runs after the pipeliner and not before it: no other pass follows a value around a loop."""
    never = tl.cast(0, tl.int32)
    while never != 0:
        never += 1
    if never != 0:
        tl.debug_barrier()


descriptors: ContextVar[bool] = ContextVar("descriptors", default=False)
"""Whether the kernel that is being compiled may load by descriptors."""


def proxy_fence(semantic: Any) -> str:
    """PTX, for kernels that load by descriptors: through the async proxy, which does not see what a thread has acquired
    before this fence."""
    has_async_proxy = int(re.sub(r"\D", "", semantic.builder.options.arch)) >= 90
    return "fence.proxy.async.global; " if descriptors.get() and has_async_proxy else ""


@core.extern
def acquired(_semantic=None, _generator=None):
    """End a function that acquires: loads that follow see what it has seen, and stay behind it."""
    if fence := proxy_fence(_semantic):
        core.inline_asm_elementwise(
            f"{fence}mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1, _semantic=_semantic
        )
    _generator.call_JitFunction(_hold_loads, (), {})


@core.extern
def require_ptr64(function, parameter, value, _semantic=None):
    """Refuse a pointer to anything but 64-bit integers; an address is as good."""
    if isinstance(value, core.tensor) and value.dtype.is_ptr():
        pointee = value.dtype.element_ty
        if not pointee.is_int() or pointee.primitive_bitwidth != 64:
            names = core._unwrap_if_constexpr(function), core._unwrap_if_constexpr(parameter)
            raise ValueError(not_64_bits(*names, pointee))


def cast_all(semantic: Any, *typed: tuple[Any, Any]) -> list[Any]:
    """Arguments of an asm block, each cast to its type."""
    return [core.cast(semantic.to_tensor(value), wanted, _semantic=semantic) for value, wanted in typed]


# ---------------------------------------------------------------------- threads


def _special_register(register: str, axis: Any, semantic: Any) -> Any:
    number = core._unwrap_if_constexpr(axis)
    if number not in (0, 1, 2):
        raise ValueError(f"axis must be 0, 1 or 2, got {number!r}")
    return core.inline_asm_elementwise(
        f"mov.u32 $0, %{register}.{'xyz'[number]};", "=r", [], tl.int32, is_pure=True, pack=1, _semantic=semantic
    )


@core.extern
def tid(axis, _semantic=None):
    return _special_register("tid", axis, _semantic)


@core.extern
def ntid(axis, _semantic=None):
    return _special_register("ntid", axis, _semantic)


@core.extern
def syncthreads(_semantic=None):
    return core.debug_barrier(_semantic=_semantic)


@core.extern
def stream_order(_semantic=None):
    """Make :func:`tdcoll.primitives.group.in_stream_order`: nothing, unless the kernel is compiled with ``launch_pdl``.
    So one that is launched early has the wait."""
    if getattr(_semantic.builder.options, "launch_pdl", False):
        core.inline_asm_elementwise(
            "griddepcontrol.wait; griddepcontrol.launch_dependents; mov.u32 $0, 0;",
            "=r,~{memory}",
            [],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
            _semantic=_semantic,
        )


stream_order.in_stream_order = True

# ---------------------------------------------------------------------- loads and stores with an order


def _choice(what: str, value: Any, allowed: tuple[str, ...]) -> str:
    chosen = core._unwrap_if_constexpr(value)
    if chosen not in allowed:
        raise ValueError(f"{what} must be one of {', '.join(allowed)}; got {chosen!r}")
    return str(chosen)


def integer_pointee(function: str, ptr: Any) -> tuple[Any, str]:
    """Pointee type and asm constraint of a pointer to 32- or 64-bit integers."""
    kind = ptr.dtype if isinstance(ptr, core.tensor) else None
    pointee = kind.element_ty if kind is not None and kind.is_ptr() else None
    if pointee is None or not pointee.is_int() or pointee.primitive_bitwidth not in (32, 64):
        raise ValueError(f"{function}: ptr must point to 32- or 64-bit integers, got {kind or repr(ptr)}")
    return pointee, {32: "r", 64: "l"}[pointee.primitive_bitwidth]


@core.extern
def ld(ptr, scope="gpu", semantic="relaxed", _semantic=None, _generator=None):
    scope = _choice("scope", scope, ("gpu", "sys"))
    order = _choice("semantic", semantic, ("relaxed", "acquire"))
    pointee, constraint = integer_pointee("ld", ptr)
    value = core.inline_asm_elementwise(
        f"ld.{order}.{scope}.global.b{pointee.primitive_bitwidth} $0, [$1];",
        f"={constraint},l,~{{memory}}",
        [ptr],
        pointee,
        is_pure=False,
        pack=1,
        _semantic=_semantic,
    )
    if order == "acquire":
        acquired(_semantic=_semantic, _generator=_generator)
    return value


@core.extern
def ld_acquire(ptr, scope="gpu", _semantic=None, _generator=None):
    return ld(ptr, scope, "acquire", _semantic=_semantic, _generator=_generator)


ld_acquire.acquires = True


@core.extern
def st(ptr, val, scope="gpu", semantic="relaxed", _semantic=None):
    scope = _choice("scope", scope, ("gpu", "sys"))
    order = _choice("semantic", semantic, ("relaxed", "release"))
    pointee, constraint = integer_pointee("st", ptr)
    value = core.cast(_semantic.to_tensor(val), pointee, _semantic=_semantic)
    core.inline_asm_elementwise(
        f"{{ st.{order}.{scope}.global.b{pointee.primitive_bitwidth} [$1], $2; mov.u32 $0, 0; }}",
        f"=r,l,{constraint},~{{memory}}",
        [ptr, value],
        tl.int32,
        is_pure=False,
        pack=1,
        _semantic=_semantic,
    )


@core.extern
def st_release(ptr, val, scope="gpu", _semantic=None):
    return st(ptr, val, scope, "release", _semantic=_semantic)


# ---------------------------------------------------------------------- atomics by the thread


def _atom(
    function: str, operation: str, ptr: Any, values: tuple[Any, ...], scope: Any, order: Any, semantic: Any
) -> Any:
    """Have every thread that gets here make an ``atom``; return what was there before."""
    scope = _choice("scope", scope, ("gpu", "sys"))
    order = _choice("semantic", order, ("relaxed", "acquire", "release", "acq_rel"))
    pointee, constraint = integer_pointee(function, ptr)
    if ptr.type.is_block():
        raise ValueError(
            f"{function}: ptr must be a scalar, got a block of shape {ptr.shape} (tl.atomic_* take blocks)"
        )
    operands = ", ".join(f"${2 + place}" for place in range(len(values)))
    return core.inline_asm_elementwise(
        f"atom.{order}.{scope}.global.{operation}{pointee.primitive_bitwidth} $0, [$1], {operands};",
        f"={constraint},l,{','.join([constraint] * len(values))},~{{memory}}",
        [ptr, *cast_all(semantic, *[(value, pointee) for value in values])],
        pointee,
        is_pure=False,
        pack=1,
        _semantic=semantic,
    )


@core.extern
def atom_add(ptr, val, scope="gpu", semantic="relaxed", _semantic=None, _generator=None):
    before = _atom("atom_add", "add.u", ptr, (val,), scope, semantic, _semantic)
    acquired(_semantic=_semantic, _generator=_generator)
    return before


@core.extern
def atom_cas(ptr, cmp, val, scope="gpu", semantic="relaxed", _semantic=None, _generator=None):
    before = _atom("atom_cas", "cas.b", ptr, (cmp, val), scope, semantic, _semantic)
    acquired(_semantic=_semantic, _generator=_generator)
    return before


atom_add.acquires = atom_cas.acquires = True
