# SPDX-License-Identifier: Apache-2.0
"""The device language compiled by stock Triton: threads, loads and stores with an order, and what
acquiring means.

Loads that follow a wait, or anything else that acquires, must stay behind it. For Triton's software
pipeliner an asm or an extern call is no obstacle: it takes the loads of later iterations above it.
But it leaves a loop alone that holds a barrier of Triton's, wherever in its body. Each function
that acquires therefore ends with one that is never reached (:func:`_hold_loads`); the compiler
finds that out when the pipeliner is done, and nothing of it is left in the PTX.
:func:`~tdcoll.language.waits.wait_token` is for loops that are to be pipelined.
"""

from __future__ import annotations

import re
from contextvars import ContextVar
from typing import Any

import triton
import triton.language as tl
from triton.language import core

from tdcoll.spec.checks import axis_letter, choice, integer_pointee, require_64_bits, require_scalar

__all__ = [
    "acquired",
    "asm",
    "atom_add",
    "atom_cas",
    "descriptors",
    "ld",
    "ld_acquire",
    "ntid",
    "proxy_fence",
]
__all__ += ["require_ptr64", "st", "st_release", "stream_order", "syncthreads", "tid"]
__all__ += ["wait_descriptor_stores"]


def asm(
    semantic: Any, text: str, results: Any = tl.int32, pure: bool = False, /, **operands: Any
) -> Any:
    """Let every thread execute PTX, and return its results.

    Args:
        text: in which ``$0``, ``$1`` and so on are the results, and ``$name`` is an operand.
        results: a type, or a tuple of types.
        pure: without effects, and a function of the operands.
        operands: ``(value, type)`` by name. A value is a scalar or a block, of which each thread
            has its elements.
    """
    kinds = results if isinstance(results, tuple) else (results,)
    places = {name: f"${len(kinds) + place}" for place, name in enumerate(operands)}
    given = [
        core.cast(semantic.to_tensor(value), kind, _semantic=semantic)
        for value, kind in operands.values()
    ]
    registers = [f"=&{_register(kind)}" for kind in kinds] + [
        _register(kind) for _, kind in operands.values()
    ]
    return core.inline_asm_elementwise(
        re.sub(r"\$([a-z]\w*)", lambda name: places[name[1]], text),
        ",".join(registers if pure else [*registers, "~{memory}"]),
        given,
        results,
        is_pure=pure,
        pack=1,
        _semantic=semantic,
    )


def _register(kind: tl.dtype) -> str:
    return "l" if kind.is_ptr() or kind.primitive_bitwidth == 64 else "r"


# ---------------------------------------------------------------------- acquiring


@triton.jit
def _hold_loads():
    """A barrier that is never reached, for the pipeliner to find. Only MLIR's SCCP sees that it is
    never reached, because no other pass follows a value around a loop, and Triton runs it after the
    pipeliner."""
    never = tl.cast(0, tl.int32)
    while never != 0:
        never += 1
    if never != 0:
        tl.debug_barrier()


descriptors: ContextVar[bool] = ContextVar("descriptors", default=False)
"""Whether the kernel that is being compiled may load by descriptors."""


def _has_async_proxy(semantic: Any) -> bool:
    """Return whether loads and stores by descriptors are asynchronous copies; before Hopper they go
    by pointers."""
    return int(re.sub(r"\D", "", semantic.builder.options.arch)) >= 90


def proxy_fence(semantic: Any) -> str:
    """PTX, for loads by descriptors, because the async proxy sees what a thread has acquired only
    after this fence."""
    return "fence.proxy.async.global; " if descriptors.get() and _has_async_proxy(semantic) else ""


@core.extern
def acquired(_semantic=None, _generator=None):
    """End a function that acquires: loads that follow see what it has seen, and stay behind it."""
    fence = proxy_fence(_semantic)
    if fence:
        asm(_semantic, f"{fence}mov.u32 $0, 0;")
    _generator.call_JitFunction(_hold_loads, (), {})


@core.extern
def require_ptr64(function, parameter, value, _semantic=None):
    """Refuse a pointer to anything but 64-bit integers; an address is as good."""
    require_64_bits(
        core._unwrap_if_constexpr(function), core._unwrap_if_constexpr(parameter), value
    )


# ---------------------------------------------------------------------- threads


@core.extern
def tid(axis, _semantic=None):
    return asm(_semantic, f"mov.u32 $0, %tid.{axis_letter(axis)};", tl.int32, True)


@core.extern
def ntid(axis, _semantic=None):
    return asm(_semantic, f"mov.u32 $0, %ntid.{axis_letter(axis)};", tl.int32, True)


@core.extern
def syncthreads(_semantic=None):
    return core.debug_barrier(_semantic=_semantic)


@core.extern
def stream_order(_semantic=None):
    """Make :func:`tdcoll.primitives.group.in_stream_order`: a wait if the kernel is compiled with
    ``launch_pdl``."""
    if getattr(_semantic.builder.options, "launch_pdl", False):
        asm(_semantic, "griddepcontrol.wait; griddepcontrol.launch_dependents; mov.u32 $0, 0;")


stream_order.in_stream_order = True

# ---------------------------------------------------------------------- loads, stores and atomics with an order

_SCOPES = ("gpu", "sys")


@core.extern
def ld(ptr, scope="gpu", semantic="relaxed", _semantic=None, _generator=None):
    scope = choice("scope", scope, _SCOPES)
    order = choice("semantic", semantic, ("relaxed", "acquire"))
    kind = integer_pointee("ld", ptr)
    text = f"ld.{order}.{scope}.global.b{kind.primitive_bitwidth} $0, [$ptr];"
    value = asm(_semantic, text, kind, ptr=(ptr, ptr.dtype))
    if order == "acquire":
        acquired(_semantic=_semantic, _generator=_generator)
    return value


@core.extern
def ld_acquire(ptr, scope="gpu", _semantic=None, _generator=None):
    return ld(ptr, scope, "acquire", _semantic=_semantic, _generator=_generator)


@core.extern
def st(ptr, val, scope="gpu", semantic="relaxed", _semantic=None):
    scope = choice("scope", scope, _SCOPES)
    order = choice("semantic", semantic, ("relaxed", "release"))
    kind = integer_pointee("st", ptr)
    text = (
        f"{{ st.{order}.{scope}.global.b{kind.primitive_bitwidth} [$ptr], $val; mov.u32 $0, 0; }}"
    )
    asm(_semantic, text, ptr=(ptr, ptr.dtype), val=(val, kind))


@core.extern
def st_release(ptr, val, scope="gpu", _semantic=None):
    return st(ptr, val, scope, "release", _semantic=_semantic)


def _atom(
    name: str,
    operation: str,
    ptr: Any,
    scope: Any,
    order: Any,
    _semantic: Any,
    _generator: Any,
    **values: Any,
):
    """Have every thread that gets here make an ``atom``; return what was there before."""
    scope = choice("scope", scope, _SCOPES)
    order = choice("semantic", order, ("relaxed", "acquire", "release", "acq_rel"))
    kind = integer_pointee(name, ptr)
    require_scalar(name, "ptr", ptr)
    before = asm(
        _semantic,
        f"atom.{order}.{scope}.global.{operation}{kind.primitive_bitwidth} $0, [$ptr], "
        + ", ".join(f"${value}" for value in values)
        + ";",
        kind,
        ptr=(ptr, ptr.dtype),
        **{value: (given, kind) for value, given in values.items()},
    )
    acquired(_semantic=_semantic, _generator=_generator)
    return before


@core.extern
def atom_add(ptr, val, scope="gpu", semantic="relaxed", _semantic=None, _generator=None):
    return _atom("atom_add", "add.u", ptr, scope, semantic, _semantic, _generator, val=val)


@core.extern
def atom_cas(ptr, cmp, val, scope="gpu", semantic="relaxed", _semantic=None, _generator=None):
    return _atom("atom_cas", "cas.b", ptr, scope, semantic, _semantic, _generator, cmp=cmp, val=val)


ld_acquire.acquires = atom_add.acquires = atom_cas.acquires = True


@core.extern
def wait_descriptor_stores(_semantic=None):
    # Each thread waits for the copies that it began itself, and Triton lets several warps begin
    # some.
    if _has_async_proxy(_semantic):
        asm(_semantic, "cp.async.bulk.wait_group 0; mov.u32 $0, 0;")
