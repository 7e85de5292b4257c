# SPDX-License-Identifier: Apache-2.0
"""``triton_dist.language.extra.language_extra``: threads, and loads and stores with an order, by
the thread.

Loads, stores and atomics take pointers to anything of 32 or 64 bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

import tdcoll.language as tdl
from tdcoll.language import ntid, tid
from tdcoll.language import syncthreads as __syncthreads

__all__ = ["__syncthreads", "atomic_add", "atomic_cas", "ld", "ld_acquire", "ntid", "st", "tid"]

# Defaults: triton 3.6 makes no compile-time value of a text.
_GPU = tl.constexpr("gpu")
_RELAXED = tl.constexpr("relaxed")


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
def st(ptr, val, scope: tl.constexpr = _GPU, semantic: tl.constexpr = _RELAXED):
    """Store ``val`` at ``ptr``, in the order ``semantic`` (relaxed, release) at ``scope`` (gpu,
    sys)."""
    word = _word(ptr)
    value = tl.cast(val, ptr.dtype.element_ty).to(word.dtype.element_ty, bitcast=True)
    tdl.st(word, value, scope, semantic)


@triton.jit
def atomic_add(ptr, value, scope: tl.constexpr = _GPU, semantic: tl.constexpr = _RELAXED):
    """Add to the integer at ``ptr``, once for each thread that calls; return the old value."""
    return tdl.atom_add(ptr, value, scope, semantic)


@triton.jit
def atomic_cas(ptr, value, target_value, scope: tl.constexpr, semantic: tl.constexpr):
    """Write ``target_value`` to ``ptr`` if ``value`` is there, once for each calling thread; return
    the old value."""
    return tdl.atom_cas(ptr, value, target_value, scope, semantic)
