# SPDX-License-Identifier: Apache-2.0
"""The device language compiled by stock Triton: NVSHMEM's device functions as extern calls, and what is made of them.

Stock Triton knows nothing of NVSHMEM. ``extern_elementwise`` with scalar arguments becomes one LLVM call that
every thread of the block makes, which is what NVSHMEM's ``_block`` functions want; the definitions come from the
bitcode library in NVIDIA's wheel, which :mod:`tdcoll.language.jit` adds to the compilation. Pointers travel as
int64, which makes one signature serve pointers to anything. What is PTX is in ``ptx``, ``waits`` and ``words``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl
from triton.language import core

from tdcoll.language.ptx import *  # noqa: F403
from tdcoll.language.ptx import acquired, require_ptr64, syncthreads, tid
from tdcoll.language.waits import *  # noqa: F403
from tdcoll.language.words import *  # noqa: F403
from tdcoll.spec.functions import FUNCTIONS, LIBRARY, not_linked, not_typed

_TYPES = {"ptr": tl.int64, "ptr64": tl.int64, "size": tl.int64, "pe": tl.int32, "int": tl.int32, "u64": tl.uint64}
_RETURNS = {"int32": tl.int32, "uint64": tl.uint64, "pointer": tl.int64, None: tl.int32}
_PURE = {"my_pe", "n_pes", "remote_ptr"}


_TYPED = {
    tl.int32: "int",
    tl.uint32: "uint",
    tl.int64: "long",
    tl.uint64: "ulong",
    tl.float32: "float",
    tl.float64: "double",
}
"""NVSHMEM's names of the types of words."""


def _declared(name: str, argument_types: Callable[..., tuple[Any, Any, str]]) -> Callable[..., Any]:
    """Return the extern call for an NVSHMEM function of :data:`FUNCTIONS`. ``argument_types`` gives, for the arguments
    of a call, their types, that of the result, and the symbol."""
    spec = FUNCTIONS[name]
    signature = inspect.Signature(
        [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n, _ in spec.parameters]
    )

    def call(*args: Any, _semantic: Any = None, _generator: Any = None, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).args
        if LIBRARY not in dict(_semantic.builder.options.extern_libs):
            raise ValueError(not_linked(name))
        for (parameter, kind), value in zip(spec.parameters, given, strict=True):
            if kind == "ptr64":
                require_ptr64(name, parameter, value, _semantic=_semantic)
        types, returns, symbol = argument_types(*given)
        lowered = [
            core.cast(_semantic.to_tensor(arg), wanted, _semantic=_semantic)
            for arg, wanted in zip(given, types, strict=True)
        ]
        for (parameter, _), value in zip(spec.parameters, lowered, strict=True):
            if value.type.is_block():
                raise ValueError(f"{name}: {parameter} must be a scalar, got a block of shape {value.shape}")
        # A void function is declared with an int result: Triton wants one, and nobody reads it.
        result = core.extern_elementwise(
            "", "", lowered, {types: (symbol, returns)}, name in _PURE, _semantic=_semantic
        )
        if spec.acquires:
            acquired(_semantic=_semantic, _generator=_generator)
        if spec.returns == "pointer":
            return core.cast(result, _semantic.to_tensor(given[0]).dtype, _semantic=_semantic)
        return result

    call.__name__ = call.__qualname__ = name
    call.__doc__ = spec.doc
    # Triton passes these only to functions whose signature names them.
    own = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=None) for n in ("_semantic", "_generator")]
    extern = core.extern(call)
    extern.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *own])
    extern.needs_nvshmem = True
    extern.acquires = spec.acquires
    return extern


def _lower(name: str) -> Callable[..., Any]:
    """Return the function ``name``, whose types are those of the table."""
    spec = FUNCTIONS[name]
    types = tuple(_TYPES[kind] for _, kind in spec.parameters)
    return _declared(name, lambda *given: (types, _RETURNS[spec.returns], str(spec.symbol)))


def _lower_typed(name: str) -> Callable[..., Any]:
    """Return the function ``name`` of words, whose type is that of the first argument's pointee."""
    spec = FUNCTIONS[name]

    def argument_types(pointer: Any, *rest: Any) -> tuple[Any, Any, str]:
        kind = pointer.dtype if isinstance(pointer, core.tensor) else None
        pointee = kind.element_ty if kind is not None and kind.is_ptr() else None
        if pointee is None or _TYPED.get(pointee) not in spec.types:
            raise ValueError(not_typed(spec, pointer.type if kind is not None else repr(pointer)))
        types = (tl.int64, *[pointee] * (len(rest) - 1), tl.int32)
        symbol = str(spec.symbol).replace("TYPE", _TYPED[pointee])
        return types, pointee if spec.returns else tl.int32, symbol

    return _declared(name, argument_types)


my_pe = _lower("my_pe")
n_pes = _lower("n_pes")
remote_ptr = _lower("remote_ptr")
int_p = _lower("int_p")
p = _lower_typed("p")
g = _lower_typed("g")
atomic_fetch = _lower_typed("atomic_fetch")
atomic_set = _lower_typed("atomic_set")
atomic_add = _lower_typed("atomic_add")
atomic_fetch_add = _lower_typed("atomic_fetch_add")
atomic_swap = _lower_typed("atomic_swap")
atomic_compare_swap = _lower_typed("atomic_compare_swap")
putmem = _lower("putmem")
putmem_warp = _lower("putmem_warp")
putmem_block = _lower("putmem_block")
putmem_nbi = _lower("putmem_nbi")
putmem_nbi_warp = _lower("putmem_nbi_warp")
putmem_nbi_block = _lower("putmem_nbi_block")
putmem_signal = _lower("putmem_signal")
putmem_signal_warp = _lower("putmem_signal_warp")
putmem_signal_block = _lower("putmem_signal_block")
putmem_signal_nbi = _lower("putmem_signal_nbi")
putmem_signal_nbi_warp = _lower("putmem_signal_nbi_warp")
putmem_signal_nbi_block = _lower("putmem_signal_nbi_block")
getmem = _lower("getmem")
getmem_warp = _lower("getmem_warp")
getmem_block = _lower("getmem_block")
getmem_nbi = _lower("getmem_nbi")
getmem_nbi_warp = _lower("getmem_nbi_warp")
getmem_nbi_block = _lower("getmem_nbi_block")
signal_op = _lower("signal_op")
signal_wait_until = _lower("signal_wait_until")
fence = _lower("fence")
quiet = _lower("quiet")
barrier_all = _lower("barrier_all")
barrier_all_warp = _lower("barrier_all_warp")
barrier_all_block = _lower("barrier_all_block")
sync_all = _lower("sync_all")
sync_all_warp = _lower("sync_all_warp")
sync_all_block = _lower("sync_all_block")


# ---------------------------------------------------------------------- by the block


@triton.jit
def signal_block(sig_addr, signal, sig_op, pe):
    require_ptr64("signal_block", "sig_addr", sig_addr)
    syncthreads()
    if tid(0) == 0:
        fence()
        signal_op(sig_addr, signal, sig_op, pe)


@triton.jit
def _copy_as(dst, src, nbytes, dtype: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr):
    size: tl.constexpr = dtype.primitive_bitwidth // 8
    target = dst.to(tl.pointer_type(dtype))
    source = src.to(tl.pointer_type(dtype))
    count = nbytes // size
    if ALIGNED:  # said of the pointers: Triton forgets what it is told of the addresses that they are made from
        target = tl.multiple_of(target, 16)
        source = tl.multiple_of(source, 16)
        count = tl.multiple_of(count, 16 // size)
    lane = tl.arange(0, BLOCK)
    begin = tl.cast(0, tl.int64)
    while begin < count:
        index = begin + lane
        mask = index < count
        tl.store(target + index, tl.load(source + index, mask=mask), mask=mask)
        begin += BLOCK


@core.extern
def _size_of_copy(nbytes, _semantic=None):
    """``nbytes`` as int64. Triton 3.6 crashes over a loop whose constant mask lets nothing pass, as that of a copy of
    0 or 1 bytes does, and it makes constants of arguments that are 1: so a small constant is made a value."""
    size = core.cast(_semantic.to_tensor(nbytes), tl.int64, _semantic=_semantic)
    constant = core._unwrap_if_constexpr(nbytes)
    if not isinstance(constant, int) or constant >= 16:
        return size
    return core.inline_asm_elementwise(
        "mov.b64 $0, $1;", "=l,l", [size], tl.int64, is_pure=True, pack=1, _semantic=_semantic
    )


@triton.jit
def copy_block(dst, src, nbytes):
    to = dst.to(tl.int64)
    frm = src.to(tl.int64)
    size = _size_of_copy(nbytes)
    odd = to | frm | size
    if odd % 16 == 0:
        _copy_as(to, frm, size, tl.int32, 4096, True)
    else:
        if odd % 4 == 0:
            _copy_as(to, frm, size, tl.int32, 2048, False)
        else:
            _copy_as(to, frm, size, tl.int8, 2048, False)
