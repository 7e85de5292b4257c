# SPDX-License-Identifier: Apache-2.0
"""``triton_dist.language.extra.language_extra``: threads, and loads and stores with an order, by the thread.

Loads, stores and atomics take pointers to anything of 32 or 64 bits. What threads of a warp exchange through registers
(``__shfl_*``, ``__ballot_sync``, ``laneid``) cannot be simulated, since the simulator runs a program as one thread:
there it is an error that says so.
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

__all__ = [
    "__ballot_sync",
    "__fence",
    "__shfl_down_sync_i32",
    "__shfl_sync_i32",
    "__shfl_up_sync_i32",
    "__shfl_xor_sync_i32",
    "__syncthreads",
    "arrive_inc",
    "atomic_add",
    "atomic_add_per_warp",
    "atomic_cas",
    "fence",
    "globaltimer",
    "globaltimer_hi",
    "globaltimer_lo",
    "laneid",
    "ld",
    "ld_acquire",
    "ld_b32",
    "load_v2_b64",
    "load_v4_b32",
    "load_v4_s32",
    "load_v4_u32",
    "membar",
    "ntid",
    "num_threads",
    "num_warps",
    "pack_b32_v2",
    "red_release",
    "smid",
    "st",
    "st_b32",
    "st_v2_u32",
    "st_v4_b32",
    "st_v4_u32",
    "threads_per_warp",
    "tid",
    "wait_eq",
]

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
    """Load what is at ``ptr``, in the order ``semantic`` (relaxed, acquire) at ``scope`` (gpu, sys)."""
    return tdl.ld(_word(ptr), scope, semantic).to(ptr.dtype.element_ty, bitcast=True)


@triton.jit
def ld_acquire(ptr, scope: tl.constexpr = _GPU):
    """Load what is at ``ptr`` with acquire order, at ``scope`` (gpu, sys)."""
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
def st_b32(ptr, val0):
    """Store 32 bits at ``ptr``, relaxed at scope gpu."""
    st(ptr, val0, "gpu", "relaxed")


@triton.jit
def atomic_add(ptr, value, scope: tl.constexpr = _GPU, semantic: tl.constexpr = _RELAXED):
    """Add to the integer at ``ptr``, once for each thread that calls; return what was there before."""
    return tdl.atom_add(ptr, value, scope, semantic)


@triton.jit
def atomic_cas(ptr, value, target_value, scope: tl.constexpr, semantic: tl.constexpr):
    """Write ``target_value`` to ``ptr`` if ``value`` is there, once for each calling thread; return what was there."""
    return tdl.atom_cas(ptr, value, target_value, scope, semantic)


@triton.jit
def red_release(barrier_ptr, value, scope: tl.constexpr = _GPU):
    """Add to the integer at ``barrier_ptr`` with release order, once for each thread that calls."""
    tdl.atom_add(barrier_ptr, value, scope, "release")


@triton.jit
def arrive_inc(barrier_ptr, thread_idx, value, scope: tl.constexpr):
    """Wait for the block's threads; thread 0 then adds to the integer at ``barrier_ptr`` with release order."""
    tdl.syncthreads()
    if tdl.tid(0) == 0:
        tdl.atom_add(barrier_ptr, value, scope, "release")


@triton.jit
def wait_eq(barrier_ptr, thread_idx, value, scope: tl.constexpr):
    """Let the block wait until the integer at ``barrier_ptr`` is ``value``; unbounded, unlike ``tdl.wait_word``."""
    while tdl.ld(barrier_ptr, scope, "acquire") != value:
        pass
    tdl.syncthreads()


# ---------------------------------------------------------------------- instructions


@triton.jit
def threads_per_warp():
    """Return 32."""
    return 32


def _one(asm: str, constraints: str, arguments: list[Any], kind: Any, semantic: Any, *, pure: bool = False) -> Any:
    return core.inline_asm_elementwise(
        asm, f"{constraints},~{{memory}}", arguments, kind, is_pure=pure, pack=1, _semantic=semantic
    )


def _of_threads(name: str) -> Any:
    """Make the function that refuses what the simulator does not have."""

    def refused(*args: Any, **kwargs: Any) -> Any:
        raise NotProvidedError(
            f"tdcoll.compat does not provide {name} on the simulator, which runs a program as one thread"
        )

    refused.__name__ = name
    return refused


if INTERPRETED:
    from tdcoll.runtime.simulator.current import machine

    @core.builtin
    def num_threads(_semantic=None):
        """Return the number of threads of a block."""
        return core.constexpr(machine().program.threads)

    @core.builtin
    def num_warps(_semantic=None):
        """Return the number of warps of a block."""
        return core.constexpr(machine().program.threads // 32)

    @triton.jit
    def membar(scope: tl.constexpr = _CTA):
        """Order this thread's stores."""
        if scope != "cta":
            tdl.fence()

    for _name in __all__:
        if _name not in globals():
            globals()[_name] = _of_threads(_name)
else:

    @core.builtin
    def num_threads(_semantic=None):
        """Return the number of threads of a block."""
        return core.constexpr(32 * _semantic.builder.options.num_warps)

    @core.builtin
    def num_warps(_semantic=None):
        """Return the number of warps of a block."""
        return core.constexpr(_semantic.builder.options.num_warps)

    def _register(name: str, kind: Any) -> Any:
        bits = kind.primitive_bitwidth

        def read(_semantic: Any = None) -> Any:
            constraint = "=l" if bits == 64 else "=r"
            return _one(f"mov.u{bits} $0, %{name};", constraint, [], kind, _semantic)

        return core.extern(read)

    laneid = _register("laneid", tl.int32)
    smid = _register("smid", tl.uint32)
    globaltimer = _register("globaltimer", tl.uint64)
    globaltimer_lo = _register("globaltimer_lo", tl.uint32)
    globaltimer_hi = _register("globaltimer_hi", tl.uint32)

    @core.extern
    def membar(scope="cta", _semantic=None):
        """Order this thread's accesses (``membar``)."""
        level = {"cta": "cta", "gpu": "gl", "gl": "gl", "sys": "sys"}[core._unwrap_if_constexpr(scope)]
        _one(f"membar.{level}; mov.u32 $0, 0;", "=r", [], tl.int32, _semantic)

    @core.extern
    def fence(semantic="sc", scope="gpu", _semantic=None):
        """Order this thread's accesses (``fence``)."""
        kind, level = core._unwrap_if_constexpr(semantic), core._unwrap_if_constexpr(scope)
        _one(f"fence.{kind}.{level}; mov.u32 $0, 0;", "=r", [], tl.int32, _semantic)

    __fence = fence

    def _shuffle(mode: str, clamp: int) -> Any:
        def exchange(mask: Any, value: Any, delta: Any, _semantic: Any = None) -> Any:
            arguments = [
                value,
                core.cast(_semantic.to_tensor(delta), tl.int32, _semantic=_semantic),
                core.cast(_semantic.to_tensor(mask), tl.uint32, _semantic=_semantic),
            ]
            asm = f"shfl.sync.{mode}.b32 $0, $1, $2, {clamp}, $3;"
            return _one(asm, "=r,r,r,r", arguments, value.dtype, _semantic)

        return core.extern(exchange)

    __shfl_sync_i32 = _shuffle("idx", 31)
    __shfl_up_sync_i32 = _shuffle("up", 0)
    __shfl_down_sync_i32 = _shuffle("down", 31)
    __shfl_xor_sync_i32 = _shuffle("bfly", 31)

    @core.extern
    def __ballot_sync(mask, predicate, _semantic=None):
        """Return a bit for each thread of the warp: whether ``predicate`` is not 0 in it."""
        arguments = [
            core.cast(_semantic.to_tensor(predicate), tl.int32, _semantic=_semantic),
            core.cast(_semantic.to_tensor(mask), tl.uint32, _semantic=_semantic),
        ]
        asm = "{ .reg .pred p; setp.ne.b32 p, $1, 0; vote.sync.ballot.b32 $0, p, $2; }"
        return _one(asm, "=r,r,r", arguments, tl.int32, _semantic)

    def _order(semantic: Any, scope: Any) -> str:
        """Return what an access says of its order; one that says nothing is volatile."""
        return "".join(f".{one}" for one in map(core._unwrap_if_constexpr, (semantic, scope)) if one) or ".volatile"

    def _loads(suffix: str, constraint: str, kind: Any, parts: int) -> Any:
        def load(ptr: Any, scope: Any = "", semantic: Any = "", _semantic: Any = None) -> Any:
            outputs = ", ".join(f"${place}" for place in range(parts))
            asm = f"ld{_order(semantic, scope)}.global.v{parts}.{suffix} {{{outputs}}}, [${parts}];"
            address = core.cast(ptr, tl.int64, _semantic=_semantic)
            return _one(asm, ",".join([f"={constraint}"] * parts) + ",l", [address], (kind,) * parts, _semantic)

        return core.extern(load)

    load_v4_u32 = _loads("u32", "r", tl.uint32, 4)
    load_v4_s32 = _loads("s32", "r", tl.int32, 4)
    load_v4_b32 = _loads("b32", "r", tl.int32, 4)
    load_v2_b64 = _loads("b64", "l", tl.int64, 2)

    def _store(ptr: Any, values: list[Any], scope: Any, semantic: Any, builder: Any) -> None:
        parts = len(values)
        operands = ", ".join(f"${2 + place}" for place in range(parts))
        asm = f"st{_order(semantic, scope)}.global.v{parts}.b32 [$1], {{{operands}}}; mov.u32 $0, 0;"
        words = [core.cast(builder.to_tensor(value), tl.uint32, _semantic=builder) for value in values]
        address = core.cast(ptr, tl.int64, _semantic=builder)
        _one(asm, "=r,l" + ",r" * parts, [address, *words], tl.int32, builder)

    @core.extern
    def st_v4_b32(ptr, val0, val1, val2, val3, scope="", semantic="", _semantic=None):
        """Store four words of 32 bits by one access."""
        _store(ptr, [val0, val1, val2, val3], scope, semantic, _semantic)

    @core.extern
    def st_v4_u32(ptr, val0, val1, val2, val3, _semantic=None):
        """Store four words of 32 bits by one access, relaxed at scope gpu."""
        _store(ptr, [val0, val1, val2, val3], "gpu", "relaxed", _semantic)

    @core.extern
    def st_v2_u32(ptr, val0, val1, _semantic=None):
        """Store two words of 32 bits by one access."""
        _store(ptr, [val0, val1], "", "", _semantic)

    @core.extern
    def pack_b32_v2(val0, val1, _semantic=None):
        """Return the 64 bits of two words of 32."""
        return _one("mov.b64 $0, {$1, $2};", "=l,r,r", [val0, val1], tl.uint64, _semantic, pure=True)

    @triton.jit
    def atomic_add_per_warp(barrier_ptr, value, scope: tl.constexpr, semantic: tl.constexpr):
        """Add to the integer at ``barrier_ptr`` once for each warp; return in all its threads what was there."""
        before = tl.cast(0, barrier_ptr.dtype.element_ty)
        if laneid() == 0:
            before = tdl.atom_add(barrier_ptr, value, scope, semantic)
        return __shfl_sync_i32(0xFFFFFFFF, before, 0)
