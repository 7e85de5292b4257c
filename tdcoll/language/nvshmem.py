# SPDX-License-Identifier: Apache-2.0
"""The device language compiled by stock Triton: NVSHMEM's device functions as extern calls, PTX for the rest.

Stock Triton knows nothing of NVSHMEM. ``extern_elementwise`` with scalar arguments becomes one LLVM call that
every thread of the block makes, which is what NVSHMEM's ``_block`` functions want; the definitions come from the
bitcode library in NVIDIA's wheel, which :mod:`tdcoll.language.jit` adds to the compilation. Pointers travel as
int64, which makes one signature serve pointers to anything.

Waits are polling loops in PTX rather than in Triton: a loop per thread, no cross-warp traffic while waiting, and
the clock is read on every 256th miss only. That of a signal is AND-ed over the block by ``bar.red``, because threads
may disagree at the deadline and a block-wide branch on a value that differs between warps is undefined; that of a
flagged word is its thread's own.

Loads that follow a wait, or anything else that acquires, must stay behind it. For Triton's software pipeliner an asm or
an extern call is no obstacle: it takes the loads of later iterations above it. But it leaves a loop alone that holds a
barrier of Triton's, wherever in its body. So each of these functions ends with one that is never reached
(:func:`_hold_loads`); the compiler finds that out when the pipeliner is done, and nothing of it is left in the PTX.
:func:`wait_token` is for loops that are to be pipelined.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import triton
import triton.language as tl
from triton.language import core

from tdcoll.spec.constants import (
    MONITOR_ABORTED,
    MONITOR_RANK,
    MONITOR_RECORD,
    MONITOR_TIMEOUT_NS,
    RECORD_EPOCH,
    RECORD_EXPECTED,
    RECORD_PEER,
    RECORD_RANK,
    RECORD_SEEN,
    RECORD_SIGNAL,
    RECORD_VALID,
)
from tdcoll.spec.functions import FUNCTIONS, LIBRARY, not_64_bits, not_linked

_TYPES = {"ptr": tl.int64, "ptr64": tl.int64, "size": tl.int64, "pe": tl.int32, "int": tl.int32, "u64": tl.uint64}
_RETURNS = {"int32": tl.int32, "uint64": tl.uint64, "pointer": tl.int64, None: tl.int32}
_PURE = {"my_pe", "n_pes", "remote_ptr"}


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


def _proxy_fence(semantic: Any) -> str:
    """PTX, for kernels that load by descriptors: through the async proxy, which does not see what a thread has acquired
    before this fence."""
    has_async_proxy = int(re.sub(r"\D", "", semantic.builder.options.arch)) >= 90
    return "fence.proxy.async.global; " if descriptors.get() and has_async_proxy else ""


@core.extern
def _acquired(_semantic=None, _generator=None):
    """What every function that acquires ends with: loads that follow see what it has seen, and stay behind it."""
    if fence := _proxy_fence(_semantic):
        core.inline_asm_elementwise(
            f"{fence}mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1, _semantic=_semantic
        )
    _generator.call_JitFunction(_hold_loads, (), {})


@core.extern
def _require_ptr64(function, parameter, value, _semantic=None):
    """Refuse a pointer to anything but 64-bit integers; an address is as good."""
    if isinstance(value, core.tensor) and value.dtype.is_ptr():
        pointee = value.dtype.element_ty
        if not pointee.is_int() or pointee.primitive_bitwidth != 64:
            names = core._unwrap_if_constexpr(function), core._unwrap_if_constexpr(parameter)
            raise ValueError(not_64_bits(*names, pointee))


def _lower(name: str) -> Callable[..., Any]:
    """The extern call for an NVSHMEM function of :data:`FUNCTIONS`."""
    spec = FUNCTIONS[name]
    kinds = [kind for _, kind in spec.parameters]
    types = tuple(_TYPES[kind] for kind in kinds)
    signature = inspect.Signature(
        [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n, _ in spec.parameters]
    )

    def call(*args: Any, _semantic: Any = None, _generator: Any = None, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).args
        if LIBRARY not in dict(_semantic.builder.options.extern_libs):
            raise ValueError(not_linked(name))
        for (parameter, kind), value in zip(spec.parameters, given, strict=True):
            if kind == "ptr64":
                _require_ptr64(name, parameter, value, _semantic=_semantic)
        lowered = [
            core.cast(_semantic.to_tensor(arg), wanted, _semantic=_semantic)
            for arg, wanted in zip(given, types, strict=True)
        ]
        for (parameter, _), value in zip(spec.parameters, lowered, strict=True):
            if value.type.is_block():
                raise ValueError(f"{name}: {parameter} must be a scalar, got a block of shape {value.shape}")
        # A void function is declared with an int result: Triton wants one, and nobody reads it.
        result = core.extern_elementwise(
            "", "", lowered, {types: (spec.symbol, _RETURNS[spec.returns])}, name in _PURE, _semantic=_semantic
        )
        if spec.acquires:
            _acquired(_semantic=_semantic, _generator=_generator)
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


my_pe = _lower("my_pe")
n_pes = _lower("n_pes")
remote_ptr = _lower("remote_ptr")
int_p = _lower("int_p")
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


# ---------------------------------------------------------------------- loads and stores with an order


def _choice(what: str, value: Any, allowed: tuple[str, ...]) -> str:
    chosen = core._unwrap_if_constexpr(value)
    if chosen not in allowed:
        raise ValueError(f"{what} must be one of {', '.join(allowed)}; got {chosen!r}")
    return str(chosen)


def _integer_pointee(function: str, ptr: Any) -> tuple[Any, str]:
    """Pointee type and asm constraint of a pointer to 32- or 64-bit integers."""
    pointee = ptr.dtype.element_ty if ptr.dtype.is_ptr() else None
    if pointee is None or not pointee.is_int() or pointee.primitive_bitwidth not in (32, 64):
        raise ValueError(f"{function}: ptr must point to 32- or 64-bit integers, got {ptr.dtype}")
    return pointee, {32: "r", 64: "l"}[pointee.primitive_bitwidth]


@core.extern
def ld(ptr, scope="gpu", semantic="relaxed", _semantic=None, _generator=None):
    scope = _choice("scope", scope, ("gpu", "sys"))
    order = _choice("semantic", semantic, ("relaxed", "acquire"))
    pointee, constraint = _integer_pointee("ld", ptr)
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
        _acquired(_semantic=_semantic, _generator=_generator)
    return value


@core.extern
def ld_acquire(ptr, scope="gpu", _semantic=None, _generator=None):
    return ld(ptr, scope, "acquire", _semantic=_semantic, _generator=_generator)


ld_acquire.acquires = True


@core.extern
def st(ptr, val, scope="gpu", semantic="relaxed", _semantic=None):
    scope = _choice("scope", scope, ("gpu", "sys"))
    order = _choice("semantic", semantic, ("relaxed", "release"))
    pointee, constraint = _integer_pointee("st", ptr)
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


# ---------------------------------------------------------------------- bounded waits

_COMPARISONS = ("eq", "ne", "gt", "le", "lt", "ge")  # by CMP_* value

# A thread polls until `look` has set the predicate `done`, or another wait of the monitor has expired, or its own
# deadline has passed: the first of all threads for which it has leaves the record. `ok`, `monitor`, `active`, `peer`,
# `index`, `epoch` and `expected` are operands of the asm; `prepare`, `look`, and `see`, which leaves in `word` what was
# seen last, are PTX.
_POLL = """
.reg .pred done, again;
.reg .b32 misses, phase, flag;
.reg .b64 word, begin, now, limit, aborted, record;
mov.b32 misses, 0;
mov.b64 begin, 0;
mov.b32 {ok}, 1;
{prepare}
setp.eq.b32 done, {active}, 0;
@done bra END;
POLL:
{look}
@done bra END;
add.u32 misses, misses, 1;
and.b32 phase, misses, 255;
setp.ne.u32 again, phase, 0;
@again bra POLL;
mov.u64 now, %globaltimer;
setp.ne.u64 again, begin, 0;
@again bra CHECK;
mov.b64 begin, now;
CHECK:
ld.relaxed.gpu.global.b64 aborted, [{monitor}+{aborted_at}];
setp.ne.u64 done, aborted, 0;
@done bra GIVE_UP;
ld.relaxed.gpu.global.b64 limit, [{monitor}+{timeout_at}];
sub.u64 now, now, begin;
setp.lt.u64 again, now, limit;
@again bra POLL;
atom.relaxed.gpu.global.cas.b64 aborted, [{monitor}+{aborted_at}], 0, 1;
setp.ne.u64 done, aborted, 0;
@done bra GIVE_UP;
{see}
ld.global.b64 record, [{monitor}+{record_at}];
ld.global.b64 now, [{monitor}+{rank_at}];
st.global.b64 [record+{RANK}], now;
cvt.s64.s32 now, {peer};
st.global.b64 [record+{PEER}], now;
cvt.s64.s32 now, {index};
st.global.b64 [record+{SIGNAL}], now;
st.global.b64 [record+{EPOCH}], {epoch};
st.global.b64 [record+{EXPECTED}], {expected};
st.global.b64 [record+{SEEN}], word;
mov.b64 now, 1;
st.release.sys.global.b64 [record+{VALID}], now;
GIVE_UP:
mov.b32 {ok}, 0;
END:
"""

_PLACES = {
    name: 8 * word.value
    for name, word in {
        "aborted_at": MONITOR_ABORTED,
        "timeout_at": MONITOR_TIMEOUT_NS,
        "record_at": MONITOR_RECORD,
        "rank_at": MONITOR_RANK,
        "RANK": RECORD_RANK,
        "PEER": RECORD_PEER,
        "SIGNAL": RECORD_SIGNAL,
        "EPOCH": RECORD_EPOCH,
        "EXPECTED": RECORD_EXPECTED,
        "SEEN": RECORD_SEEN,
        "VALID": RECORD_VALID,
    }.items()
}
"""Bytes from the start of the monitor's words, and of the record."""


def _polling(**pieces: str) -> str:
    pieces = {"prepare": "", "see": "", "epoch": pieces["expected"], **pieces}
    return "{" + _POLL.format(**pieces, **_PLACES) + "}"


def _cast_all(semantic: Any, *typed: tuple[Any, Any]) -> list[Any]:
    """Arguments of an asm block, each cast to its type."""
    return [core.cast(semantic.to_tensor(value), wanted, _semantic=semantic) for value, wanted in typed]


@core.extern
def _poll(signal, compare, value, monitor, active, peer, index, _semantic=None):
    """Per element: 1 once ``*signal compare value`` holds (or ``active`` is 0), 0 after the monitor's deadline."""
    number = core._unwrap_if_constexpr(compare)
    if number not in range(len(_COMPARISONS)):
        raise ValueError(f"compare must be a CMP_* constant, got {number!r}")
    look = f"ld.acquire.sys.global.b64 word, [$1];\nsetp.{_COMPARISONS[number]}.u64 done, word, $2;"
    asm = _polling(look=look, ok="$0", monitor="$3", active="$4", peer="$5", index="$6", expected="$2")
    args = _cast_all(
        _semantic,
        (signal, tl.int64),
        (value, tl.uint64),
        (monitor, tl.int64),
        (active, tl.int32),
        (peer, tl.int32),
        (index, tl.int32),
    )
    return core.inline_asm_elementwise(
        asm, "=&r,l,l,l,r,r,r,~{memory}", args, tl.int32, is_pure=False, pack=1, _semantic=_semantic
    )


_poll.bounded = True


@core.extern
def _poll_flagged(words, flag, monitor, active, peer, index, _semantic=None):
    """Per element: (data, data, data, 1) once the word's last 32 bits are ``flag``; (any, 0) after the deadline."""
    prepare = (
        ".reg .b128 wide;\n.reg .b64 low, high, wanted;\ncvt.u64.u32 wanted, $5;\n"
        "mov.b32 $0, 0;\nmov.b32 $1, 0;\nmov.b32 $2, 0;"
    )
    look = (
        "ld.relaxed.sys.global.b128 wide, [$4];\nmov.b128 {low, high}, wide;\n"
        "mov.b64 {$0, $1}, low;\nmov.b64 {$2, flag}, high;\nsetp.eq.b32 done, flag, $5;"
    )
    asm = _polling(
        prepare=prepare,
        look=look,
        see="cvt.u64.u32 word, flag;",
        ok="$3",
        monitor="$6",
        active="$7",
        peer="$8",
        index="$9",
        expected="wanted",
    )
    args = _cast_all(
        _semantic,
        (words, tl.int64),
        (flag, tl.int32),
        (monitor, tl.int64),
        (active, tl.int32),
        (peer, tl.int32),
        (index, tl.int32),
    )
    outputs = "=&r,=&r,=&r,=&r,l,r,l,r,r,r,~{memory}"
    return core.inline_asm_elementwise(asm, outputs, args, (tl.int32,) * 4, is_pure=False, pack=1, _semantic=_semantic)


_poll_flagged.bounded = True


@core.extern
def _poll_words(words, absent, monitor, active, peer, index, call, _semantic=None):
    """Per element: (data, data, data, data, 1) once no part of the word is ``absent``; (any, 0) after the deadline."""
    parts = ("$0", "$1", "$2", "$3")
    look = "ld.relaxed.sys.global.v4.b32 {$0, $1, $2, $3}, [$5];\nsetp.ne.b32 done, $0, $6;\n"
    look += "\n".join(f"setp.ne.and.b32 done, {part}, $6, done;" for part in parts[1:])
    count = "setp.ne.b32 again, {}, $6;\nselp.u64 now, 1, 0, again;\nadd.u64 word, word, now;"
    asm = _polling(
        prepare=".reg .b64 four;\nmov.b64 four, 4;\n" + "\n".join(f"mov.b32 {part}, 0;" for part in parts),
        look=look,
        see="mov.b64 word, 0;\n" + "\n".join(map(count.format, parts)),
        ok="$4",
        monitor="$7",
        active="$8",
        peer="$9",
        index="$10",
        epoch="$11",
        expected="four",
    )
    args = _cast_all(
        _semantic,
        (words, tl.int64),
        (absent, tl.int32),
        (monitor, tl.int64),
        (active, tl.int32),
        (peer, tl.int32),
        (index, tl.int32),
        (call, tl.uint64),
    )
    outputs = "=&r,=&r,=&r,=&r,=&r,l,r,l,r,r,r,l,~{memory}"
    return core.inline_asm_elementwise(asm, outputs, args, (tl.int32,) * 5, is_pure=False, pack=1, _semantic=_semantic)


_poll_words.bounded = True


def _all_threads(flag: Any, then: str, semantic: Any) -> Any:
    """A barrier of the block's threads, which then execute ``then``: 1 if ``flag`` is not 0 in all of them, else 0."""
    return core.inline_asm_elementwise(
        "{ .reg .pred mine, all; setp.ne.u32 mine, $1, 0; barrier.cta.red.and.pred all, 0, mine; "
        f"{then}selp.u32 $0, 1, 0, all; }}",
        "=r,r,~{memory}",
        [core.cast(semantic.to_tensor(flag), tl.int32, _semantic=semantic)],
        tl.int32,
        is_pure=False,
        pack=1,
        _semantic=semantic,
    )


@core.extern
def block_and(flag, _semantic=None, _generator=None):
    result = _all_threads(flag, "", _semantic)
    _acquired(_semantic=_semantic, _generator=_generator)
    return result


block_and.acquires = True


@core.extern
def _block_and_for_descriptors(flag, _semantic=None):
    """As ``block_and``, but holds no loads."""
    return _all_threads(flag, _proxy_fence(_semantic), _semantic)


@triton.jit
def wait_signal(signal, compare: tl.constexpr, value, monitor, peer, index):
    _require_ptr64("wait_signal", "signal", signal)
    _require_ptr64("wait_signal", "monitor", monitor)
    return block_and(_poll(signal, compare, value, monitor, 1, peer, index))


@triton.jit
def wait_signals(signals, count, skip, compare: tl.constexpr, value, monitor, BLOCK: tl.constexpr):
    _require_ptr64("wait_signals", "signals", signals)
    _require_ptr64("wait_signals", "monitor", monitor)
    index = tl.arange(0, BLOCK)
    wanted = (index < count) & (index != skip)
    mine = signals.to(tl.pointer_type(tl.int64)) + tl.where(wanted, index, 0)
    return block_and(tl.min(_poll(mine, compare, value, monitor, wanted.to(tl.int32), index, index)))


@triton.jit
def wait_token(signal, compare: tl.constexpr, value, monitor, peer, index):
    _require_ptr64("wait_token", "signal", signal)
    _require_ptr64("wait_token", "monitor", monitor)
    token = tl.cast(0, tl.int32)
    # Always true, which the compiler does not know. The pipeliner can make a branch, and what it returns, part of an
    # earlier iteration; an asm it leaves where it is.
    if tl.cast(signal, tl.int64) != 0:
        token = _block_and_for_descriptors(_poll(signal, compare, value, monitor, 1, peer, index))
    return token


@core.extern
def consume_token(value, token, _semantic=None):
    if isinstance(value, core.tensor_descriptor_base):
        raise ValueError(
            "consume_token: value must be a pointer or an offset, got a descriptor: give an offset of its load"
        )
    value, token = _semantic.to_tensor(value), _semantic.to_tensor(token)
    if not (value.dtype.is_ptr() or value.dtype.is_int()):
        raise ValueError(f"consume_token: value must be a pointer or an integer offset, got {value.type}")
    if token.type != tl.int32:
        raise ValueError(f"consume_token: token must be what wait_token returned, an int32; got {token.type}")
    # A token is 0 or 1, which the compiler does not know either. Of a pointer it still has to know the alignment.
    nothing = core.cast(
        token.__rshift__(1, _semantic=_semantic), tl.int64 if value.dtype.is_ptr() else value.dtype, _semantic=_semantic
    )
    step = nothing.__mul__(16, _semantic=_semantic) if value.dtype.is_ptr() else nothing
    return value.__add__(step, _semantic=_semantic)


@triton.jit
def wait_flagged(words, flag, mask, monitor, peer):
    _require_ptr64("wait_flagged", "monitor", monitor)
    place = tl.arange(0, words.shape[0])
    found = _poll_flagged(words, flag, monitor, mask.to(tl.int32), peer, place)
    _acquired()
    return found


@core.extern
def store_flagged(words, first, second, third, flag, mask, _semantic=None):
    data = [(part, tl.int32) for part in (first, second, third, flag)]
    args = _cast_all(_semantic, (words, tl.int64), *data, (mask, tl.int32))
    core.inline_asm_elementwise(
        "{ .reg .pred active; .reg .b64 low, high; .reg .b128 wide; setp.ne.b32 active, $6, 0; "
        "mov.b64 low, {$2, $3}; mov.b64 high, {$4, $5}; mov.b128 wide, {low, high}; "
        "@active st.relaxed.sys.global.b128 [$1], wide; mov.b32 $0, 0; }",
        "=r,l,r,r,r,r,r,~{memory}",
        args,
        tl.int32,
        is_pure=False,
        pack=1,
        _semantic=_semantic,
    )


@triton.jit
def wait_words(words, absent, mask, monitor, peer, call):
    _require_ptr64("wait_words", "monitor", monitor)
    place = tl.arange(0, words.shape[0])
    found = _poll_words(words, absent, monitor, mask.to(tl.int32), peer, place, call)
    _acquired()
    return found


@core.extern
def store_words(words, first, second, third, fourth, mask, _semantic=None):
    data = [(part, tl.int32) for part in (first, second, third, fourth)]
    core.inline_asm_elementwise(
        "{ .reg .pred active; setp.ne.b32 active, $6, 0; "
        "@active st.relaxed.sys.global.v4.b32 [$1], {$2, $3, $4, $5}; mov.b32 $0, 0; }",
        "=r,l,r,r,r,r,r,~{memory}",
        _cast_all(_semantic, (words, tl.int64), *data, (mask, tl.int32)),
        tl.int32,
        is_pure=False,
        pack=1,
        _semantic=_semantic,
    )


# ---------------------------------------------------------------------- by the block


@triton.jit
def signal_block(sig_addr, signal, sig_op, pe):
    _require_ptr64("signal_block", "sig_addr", sig_addr)
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
