# SPDX-License-Identifier: Apache-2.0
"""``triton_dist.language.extra.language_extra``: threads, and loads and stores with an order, by the thread.

Loads, stores and atomics take pointers to anything of 32 or 64 bits. Exchanges of a warp through registers
(``__shfl_*``, ``__ballot_sync``, ``laneid``) raise an error on the simulator, because it runs a program as one thread.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.language import core

import tdcoll.language as tdl
from tdcoll.compat.missing import NotProvidedError, attributes_of
from tdcoll.language import INTERPRETED, ntid, tid
from tdcoll.language import syncthreads as __syncthreads

__all__ = ["__syncthreads", "atomic_add", "atomic_cas", "ld", "ld_acquire", "ld_b32", "membar", "ntid", "num_threads"]
__all__ += ["num_warps", "st", "threads_per_warp", "tid", "wait_eq"]
_OF_THREADS = ["__ballot_sync", "__shfl_down_sync_i32", "__shfl_sync_i32", "__shfl_up_sync_i32", "atomic_add_per_warp"]
_OF_THREADS += ["laneid", "load_v2_b64", "load_v4_b32", "load_v4_u32", "pack_b32_v2", "st_v2_u32", "st_v4_b32"]
__all__ += _OF_THREADS

# Defaults: triton 3.6 makes no compile-time value of a text.
_GPU, _CTA, _RELAXED = tl.constexpr("gpu"), tl.constexpr("cta"), tl.constexpr("relaxed")

__getattr__ = attributes_of("triton_dist.language.extra.language_extra")


@triton.jit
def _word(ptr):
    """Return the pointer as one to integers of the same size."""
    bits: tl.constexpr = ptr.dtype.element_ty.primitive_bitwidth
    if bits == 64:
        word = ptr.to(tl.pointer_type(tl.int64))
    else:
        tl.static_assert(bits == 32, "ptr must point to 32 or 64 bits")
        word = ptr.to(tl.pointer_type(tl.int32))
    return word


@triton.jit
def ld(ptr, scope: tl.constexpr = _GPU, semantic: tl.constexpr = _RELAXED):
    """Load from ``ptr``, in the order ``semantic`` (relaxed, acquire) at ``scope`` (gpu, sys)."""
    return tdl.ld(_word(ptr), scope, semantic).to(ptr.dtype.element_ty, bitcast=True)


@triton.jit
def ld_acquire(ptr, scope: tl.constexpr = _GPU):
    """Load from ``ptr`` with acquire order, at ``scope`` (gpu, sys)."""
    return ld(ptr, scope, "acquire")


@triton.jit
def ld_b32(ptr):
    """Load the 32 bits at ``ptr``, relaxed at scope gpu."""
    return ld(ptr, "gpu", "relaxed")


@triton.jit
def st(ptr, val, scope: tl.constexpr = _GPU, semantic: tl.constexpr = _RELAXED):
    """Store ``val`` at ``ptr``, in the order ``semantic`` (relaxed, release) at ``scope`` (gpu, sys)."""
    word = _word(ptr)
    value = tl.cast(val, ptr.dtype.element_ty).to(word.dtype.element_ty, bitcast=True)
    tdl.st(word, value, scope, semantic)


@triton.jit
def atomic_add(ptr, value, scope: tl.constexpr = _GPU, semantic: tl.constexpr = _RELAXED):
    """Add to the integer at ``ptr``, once for each thread that calls; return the old value."""
    return tdl.atom_add(ptr, value, scope, semantic)


@triton.jit
def atomic_cas(ptr, value, target_value, scope: tl.constexpr, semantic: tl.constexpr):
    """Write ``target_value`` to ``ptr`` if ``value`` is there, once for each calling thread; return the old value."""
    return tdl.atom_cas(ptr, value, target_value, scope, semantic)


@triton.jit
def wait_eq(barrier_ptr, thread_idx, value, scope: tl.constexpr):
    """Let the block wait until the integer at ``barrier_ptr`` is ``value``; unbounded, unlike ``tdl.wait_word``."""
    while tdl.ld(barrier_ptr, scope, "acquire") != value:
        pass
    tdl.syncthreads()


@triton.jit
def threads_per_warp():
    """Return 32."""
    return 32


@core.builtin
def num_warps(_semantic=None):
    """Return the number of warps of a block."""
    return core.constexpr(_threads(_semantic) // 32)


@core.builtin
def num_threads(_semantic=None):
    """Return the number of threads of a block."""
    return core.constexpr(_threads(_semantic))


if INTERPRETED:
    from tdcoll.simulator.machine import machine

    def _threads(semantic: Any) -> Any:
        return machine().program.threads

    @triton.jit
    def membar(scope: tl.constexpr = _CTA):
        """Order this thread's stores."""
        if scope != "cta":
            tdl.fence()

    def _refuse(name: str) -> Any:
        def refused(*args: Any, **kwargs: Any) -> Any:
            raise NotProvidedError(
                f"tdcoll.compat does not provide {name} on the simulator, which runs a program as one thread"
            )

        refused.__name__ = name
        return refused

    globals().update({name: _refuse(name) for name in _OF_THREADS})
else:
    from tdcoll.language.ptx import asm

    def _threads(semantic: Any) -> Any:
        return 32 * semantic.builder.options.num_warps

    @core.extern
    def membar(scope="cta", _semantic=None):
        """Order this thread's accesses (``membar``)."""
        level = {"cta": "cta", "gpu": "gl", "gl": "gl", "sys": "sys"}[core._unwrap_if_constexpr(scope)]
        asm(_semantic, f"membar.{level}; mov.u32 $0, 0;")

    @core.extern
    def laneid(_semantic=None):
        """Return this thread's place in its warp."""
        return asm(_semantic, "mov.u32 $0, %laneid;")

    def _shuffle(mode: str, clamp: int) -> Any:
        def exchange(mask: Any, value: Any, delta: Any, _semantic: Any = None) -> Any:
            text = f"shfl.sync.{mode}.b32 $0, $value, $delta, {clamp}, $mask;"
            operands = {"value": (value, value.dtype), "delta": (delta, tl.int32), "mask": (mask, tl.uint32)}
            return asm(_semantic, text, value.dtype, **operands)

        return core.extern(exchange)

    __shfl_sync_i32 = _shuffle("idx", 31)
    __shfl_up_sync_i32 = _shuffle("up", 0)
    __shfl_down_sync_i32 = _shuffle("down", 31)

    @core.extern
    def __ballot_sync(mask, predicate, _semantic=None):
        """Return a bit for each thread of the warp: whether ``predicate`` is not 0 in it."""
        text = "{ .reg .pred p; setp.ne.b32 p, $predicate, 0; vote.sync.ballot.b32 $0, p, $mask; }"
        return asm(_semantic, text, predicate=(predicate, tl.int32), mask=(mask, tl.uint32))

    def _order(semantic: Any, scope: Any) -> str:
        """Return the order of an access; volatile if it specifies none."""
        return "".join(f".{one}" for one in map(core._unwrap_if_constexpr, (semantic, scope)) if one) or ".volatile"

    def _loads(suffix: str, kind: Any, parts: int) -> Any:
        def load(ptr: Any, scope: Any = "", semantic: Any = "", _semantic: Any = None) -> Any:
            outputs = ", ".join(f"${place}" for place in range(parts))
            text = f"ld{_order(semantic, scope)}.global.v{parts}.{suffix} {{{outputs}}}, [$ptr];"
            return asm(_semantic, text, (kind,) * parts, ptr=(ptr, tl.int64))

        return core.extern(load)

    load_v4_u32 = _loads("u32", tl.uint32, 4)
    load_v4_b32 = _loads("b32", tl.int32, 4)
    load_v2_b64 = _loads("b64", tl.int64, 2)

    def _store(semantic: Any, order: str, ptr: Any, **values: Any) -> None:
        parts = ", ".join(f"${name}" for name in values)
        text = f"st{order}.global.v{len(values)}.b32 [$ptr], {{{parts}}}; mov.u32 $0, 0;"
        asm(semantic, text, ptr=(ptr, tl.int64), **{name: (value, tl.uint32) for name, value in values.items()})

    @core.extern
    def st_v4_b32(ptr, val0, val1, val2, val3, scope="", semantic="", _semantic=None):
        """Store four words of 32 bits by one access."""
        _store(_semantic, _order(semantic, scope), ptr, val0=val0, val1=val1, val2=val2, val3=val3)

    @core.extern
    def st_v2_u32(ptr, val0, val1, _semantic=None):
        """Store two words of 32 bits by one access."""
        _store(_semantic, ".volatile", ptr, val0=val0, val1=val1)

    @core.extern
    def pack_b32_v2(val0, val1, _semantic=None):
        """Return the 64 bits of two words of 32."""
        text = "mov.b64 $0, {$val0, $val1};"
        return asm(_semantic, text, tl.uint64, True, val0=(val0, tl.uint32), val1=(val1, tl.uint32))

    @triton.jit
    def atomic_add_per_warp(barrier_ptr, value, scope: tl.constexpr, semantic: tl.constexpr):
        """Add to the integer at ``barrier_ptr`` once for each warp; return the old value in all its threads."""
        before = tl.cast(0, barrier_ptr.dtype.element_ty)
        if laneid() == 0:
            before = tdl.atom_add(barrier_ptr, value, scope, semantic)
        return __shfl_sync_i32(0xFFFFFFFF, before, 0)
