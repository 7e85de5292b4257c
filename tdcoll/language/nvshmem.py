# SPDX-License-Identifier: Apache-2.0
"""The device language compiled by stock Triton: NVSHMEM's device functions as extern calls, and
what is made of them.

Stock Triton knows nothing of NVSHMEM. ``extern_elementwise`` with scalar arguments becomes one LLVM
call that every thread of the block makes, which is what NVSHMEM's ``_block`` functions want; the
definitions come from the bitcode library in NVIDIA's wheel, which :mod:`tdcoll.language.jit` adds
to the compilation. Pointers travel as int64, so that one signature serves all. Functions made of
PTX are in ``ptx``, ``waits`` and ``words``.
"""

from __future__ import annotations

import inspect
from typing import Any

import triton
import triton.language as tl
from triton.language import core
from triton.language.extra.cuda import num_threads

from tdcoll.language.ptx import *  # noqa: F403
from tdcoll.language.ptx import acquired, asm, require_ptr64, syncthreads, tid
from tdcoll.language.waits import *  # noqa: F403
from tdcoll.language.words import *  # noqa: F403
from tdcoll.spec.checks import WORDS, require_64_bits, require_scalar, word_type
from tdcoll.spec.entry import LIBRARY, DeviceFunction, not_linked
from tdcoll.spec.nvshmem import NVSHMEM_FUNCTIONS

_TYPES = {
    "ptr": tl.int64,
    "ptr64": tl.int64,
    "size": tl.int64,
    "pe": tl.int32,
    "int": tl.int32,
    "u64": tl.uint64,
}
_RETURNS = {"int32": tl.int32, "uint64": tl.uint64, "pointer": tl.int64, None: tl.int32}
_PURE = {"my_pe", "n_pes", "remote_ptr"}


def _lowered(spec: DeviceFunction) -> Any:
    """Return the extern call for one of NVSHMEM's functions."""
    name = spec.name
    signature = spec.call

    def call(*args: Any, _semantic: Any = None, _generator: Any = None, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).args
        if LIBRARY not in dict(_semantic.builder.options.extern_libs):
            raise ValueError(not_linked(name))
        kinds = dict(_TYPES)
        symbol = str(spec.symbol)
        returns = _RETURNS.get(spec.returns)
        if spec.types:
            word = word_type(spec, given[0])
            kinds["value"] = word
            symbol = symbol.replace("TYPE", WORDS[word])
            returns = word if spec.returns else tl.int32
        lowered = []
        for (parameter, kind), value in zip(spec.parameters, given, strict=True):
            if kind == "ptr64":
                require_64_bits(name, parameter, value)
            lowered.append(core.cast(_semantic.to_tensor(value), kinds[kind], _semantic=_semantic))
            require_scalar(name, parameter, lowered[-1])
        types = tuple(kinds[kind] for _, kind in spec.parameters)
        # A void function is declared with an int result: Triton wants one, which isn't read.
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
    own = [
        inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=None)
        for n in ("_semantic", "_generator")
    ]
    extern = core.extern(call)
    extern.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *own])
    extern.needs_nvshmem = True
    extern.acquires = spec.acquires
    return extern


_functions = {function.name: _lowered(function) for function in NVSHMEM_FUNCTIONS}
globals().update(_functions)
_fence = _functions["fence"]
_signal_op = _functions["signal_op"]


# ---------------------------------------------------------------------- by the block


@triton.jit
def signal_block(sig_addr, signal, sig_op, pe):
    require_ptr64("signal_block", "sig_addr", sig_addr)
    syncthreads()
    if tid(0) == 0:
        _fence()
        _signal_op(sig_addr, signal, sig_op, pe)


@triton.jit
def _copy_as(dst, src, nbytes, dtype: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr):
    size: tl.constexpr = dtype.primitive_bitwidth // 8
    target = dst.to(tl.pointer_type(dtype))
    source = src.to(tl.pointer_type(dtype))
    count = nbytes // size
    # on the pointers, because Triton forgets hints on the addresses that they are made from
    if ALIGNED:
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
    """``nbytes`` as int64. Triton 3.6 crashes over a loop whose constant mask lets nothing pass, as
    that of a copy of 0 or 1 bytes does, and it makes constants of arguments that are 1: so a small
    constant is made a value."""
    size = core.cast(_semantic.to_tensor(nbytes), tl.int64, _semantic=_semantic)
    constant = core._unwrap_if_constexpr(nbytes)
    if not isinstance(constant, int) or constant >= 16:
        return size
    return asm(_semantic, "mov.b64 $0, $size;", tl.int64, True, size=(size, tl.int64))


@triton.jit
def copy_block(dst, src, nbytes):
    to = dst.to(tl.int64)
    src_rank = src.to(tl.int64)
    size = _size_of_copy(nbytes)
    odd = to | src_rank | size
    if odd % 16 == 0:
        # Each thread has 64 bytes on the way, because a few thread blocks can't fill a link with
        # less.
        words: tl.constexpr = 16 * num_threads()
        _copy_as(to, src_rank, size, tl.int32, words if words > 4096 else 4096, True)
    else:
        if odd % 4 == 0:
            _copy_as(to, src_rank, size, tl.int32, 2048, False)
        else:
            _copy_as(to, src_rank, size, tl.int8, 2048, False)
