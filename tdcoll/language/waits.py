# SPDX-License-Identifier: Apache-2.0
"""The device language compiled by stock Triton: waits that end.

Waits are polling loops in PTX rather than in Triton: a loop per thread, no cross-warp traffic while waiting, and
the clock is read on every 256th miss only. That of a signal is AND-ed over the block by ``bar.red``, because threads
may disagree at the deadline and a block-wide branch on a value that differs between warps is undefined; that of a
flagged word is its thread's own.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.language import core

from tdcoll.language.ptx import acquired, cast_all, integer_pointee, proxy_fence, require_ptr64, syncthreads
from tdcoll.spec.constants import (
    CMP_GE,
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

__all__ = ["block_and", "consume_token", "grid_barrier", "test_signal", "wait_signal", "wait_signals", "wait_token"]
__all__ += ["wait_until_any", "wait_word"]

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
{pace}
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
@again bra {again};
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

_PACE = """add.u32 misses, misses, 1;
and.b32 phase, misses, 255;
setp.ne.u32 again, phase, 0;
@again bra POLL;"""
"""The clock is read on every 256th miss."""

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
    pieces = {"prepare": "", "see": "", "epoch": pieces["expected"], "pace": _PACE, "again": "POLL", **pieces}
    return "{" + _POLL.format(**pieces, **_PLACES) + "}"


def _comparison(compare: Any) -> str:
    """Return PTX's name of a ``CMP_*`` constant."""
    number = core._unwrap_if_constexpr(compare)
    if number not in range(len(_COMPARISONS)):
        raise ValueError(f"compare must be a CMP_* constant, got {number!r}")
    return _COMPARISONS[number]


@core.extern
def _poll(signal, compare, value, monitor, active, peer, index, _semantic=None):
    """Per element: 1 once ``*signal compare value`` holds (or ``active`` is 0), 0 after the monitor's deadline."""
    look = f"ld.acquire.sys.global.b64 word, [$1];\nsetp.{_comparison(compare)}.u64 done, word, $2;"
    asm = _polling(look=look, ok="$0", monitor="$3", active="$4", peer="$5", index="$6", expected="$2")
    args = cast_all(
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
def _poll_word(word, compare, value, monitor, peer, index, _semantic=None):
    """Return 1 once ``*word compare value`` holds, as integers of the pointee's type; 0 after the deadline."""
    number = _comparison(compare)
    pointee, constraint = integer_pointee("wait_word", word)
    bits, sign = pointee.primitive_bitwidth, "s" if pointee.is_int_signed() else "u"
    seen = {32: "half", 64: "word"}[bits]
    convert = f"cvt.{sign}64.{sign}32" if bits == 32 else "mov.b64"
    asm = _polling(
        prepare=f".reg .b64 wanted;\n.reg .b32 half;\n{convert} wanted, $2;",
        look=f"ld.acquire.sys.global.b{bits} {seen}, [$1];\nsetp.{number}.{sign}{bits} done, {seen}, $2;",
        see="" if bits == 64 else f"{convert} word, half;",
        ok="$0",
        monitor="$3",
        active="1",
        peer="$4",
        index="$5",
        expected="wanted",
    )
    if word.type.is_block():
        raise ValueError(f"wait_word: word must be a scalar, got a block of shape {word.shape}")
    args = cast_all(
        _semantic, (word, tl.int64), (value, pointee), (monitor, tl.int64), (peer, tl.int32), (index, tl.int32)
    )
    return core.inline_asm_elementwise(
        asm, f"=&r,l,{constraint},l,r,r,~{{memory}}", args, tl.int32, is_pure=False, pack=1, _semantic=_semantic
    )


_poll_word.bounded = True


@core.extern
def _time_left(signals, value, monitor, index, begin, _semantic=None):
    """Return 1 while the monitor's deadline, counted from ``begin``, has not passed; then 0, and the record names
    ``signals[index]``."""
    asm = _polling(
        prepare="mov.b64 begin, $5;",
        look="ld.relaxed.sys.global.b64 word, [$1];\nsetp.ne.u32 done, 0, 0;",
        pace="",
        again="END",
        ok="$0",
        monitor="$3",
        active="1",
        peer="$4",
        index="$4",
        expected="$2",
    )
    args = cast_all(
        _semantic,
        (signals, tl.int64),
        (value, tl.uint64),
        (monitor, tl.int64),
        (index, tl.int32),
        (begin, tl.uint64),
    )
    return core.inline_asm_elementwise(
        asm, "=&r,l,l,l,r,l,~{memory}", args, tl.int32, is_pure=False, pack=1, _semantic=_semantic
    )


_time_left.bounded = True


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
    acquired(_semantic=_semantic, _generator=_generator)
    return result


block_and.acquires = True


@core.extern
def _block_and_for_descriptors(flag, _semantic=None):
    """As ``block_and``, but holds no loads."""
    return _all_threads(flag, proxy_fence(_semantic), _semantic)


@triton.jit
def wait_signal(signal, compare: tl.constexpr, value, monitor, peer, index):
    require_ptr64("wait_signal", "signal", signal)
    require_ptr64("wait_signal", "monitor", monitor)
    return block_and(_poll(signal, compare, value, monitor, 1, peer, index))


@triton.jit
def wait_signals(signals, count, skip, compare: tl.constexpr, value, monitor, BLOCK: tl.constexpr):
    require_ptr64("wait_signals", "signals", signals)
    require_ptr64("wait_signals", "monitor", monitor)
    index = tl.arange(0, BLOCK)
    wanted = (index < count) & (index != skip)
    mine = signals.to(tl.pointer_type(tl.int64)) + tl.where(wanted, index, 0)
    return block_and(tl.min(_poll(mine, compare, value, monitor, wanted.to(tl.int32), index, index)))


@triton.jit
def wait_word(word, compare: tl.constexpr, value, monitor, peer, index):
    require_ptr64("wait_word", "monitor", monitor)
    return block_and(_poll_word(word, compare, value, monitor, peer, index))


@core.extern
def _look(signals, count, skip, compare, value, none, _semantic=None):
    """Return the lowest of the indices in ``signals[0:count]`` that fall to this thread and whose signal compares true;
    else ``none``."""
    asm = f"""{{
.reg .pred more, holds, skipped;
.reg .b32 step;
.reg .b64 at, seen;
mov.u32 $0, %tid.x;
mov.u32 step, %ntid.x;
NEXT:
setp.ge.s32 more, $0, $2;
@more bra NONE;
mad.wide.u32 at, $0, 8, $1;
ld.acquire.sys.global.b64 seen, [at];
setp.eq.s32 skipped, $0, $3;
setp.{_comparison(compare)}.u64 holds, seen, $4;
@skipped bra ON;
@holds bra END;
ON:
add.s32 $0, $0, step;
bra NEXT;
NONE:
mov.b32 $0, $5;
END:
}}"""
    args = cast_all(
        _semantic, (signals, tl.int64), (count, tl.int32), (skip, tl.int32), (value, tl.uint64), (none, tl.int32)
    )
    return core.inline_asm_elementwise(
        asm, "=&r,l,r,r,l,r,~{memory}", args, tl.int32, is_pure=False, pack=1, _semantic=_semantic
    )


@core.extern
def _lowest(value, BITS, _semantic=None):
    """Return the lowest ``value`` of the block's threads, each of ``BITS`` bits. It is found bit by bit: of the threads
    that are left, those with a 0 stay, if there are any. So no shared memory is needed."""
    bits = int(core._unwrap_if_constexpr(BITS))
    step = """and.b32 bit, $1, {mask};
setp.eq.and.u32 zero, bit, 0, left;
barrier.cta.red.or.pred some, 0, zero;
setp.ne.and.u32 gone, bit, 0, some;
@gone setp.ne.u32 left, 0, 0;
@!some or.b32 $0, $0, {mask};
"""
    asm = "{ .reg .pred left, zero, some, gone; .reg .b32 bit; mov.b32 $0, 0; setp.eq.u32 left, 0, 0;\n"
    asm += "".join(step.format(mask=1 << bit) for bit in reversed(range(bits))) + "}"
    return core.inline_asm_elementwise(
        asm,
        "=&r,r,~{memory}",
        [core.cast(_semantic.to_tensor(value), tl.int32, _semantic=_semantic)],
        tl.int32,
        is_pure=False,
        pack=1,
        _semantic=_semantic,
    )


@core.extern
def _clock(_semantic=None):
    return core.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l", [], tl.uint64, is_pure=False, pack=1, _semantic=_semantic
    )


@triton.jit
def wait_until_any(signals, count, skip, compare: tl.constexpr, value, monitor, BLOCK: tl.constexpr):
    require_ptr64("wait_until_any", "signals", signals)
    require_ptr64("wait_until_any", "monitor", monitor)
    BITS: tl.constexpr = BLOCK.bit_length()  # BLOCK stands for none
    first = tl.where(skip == 0, 1, 0)
    begin = _clock()
    found = tl.cast(BLOCK, tl.int32)
    waiting = tl.cast(first < count, tl.int32)
    while waiting != 0:
        found = _lowest(_look(signals, count, skip, compare, value, BLOCK), BITS)
        waiting = tl.cast(found == BLOCK, tl.int32)
        if waiting != 0:
            waiting = block_and(_time_left(signals + first, value, monitor, first, begin))
    acquired()
    return tl.where(found == BLOCK, -1, found)


@core.extern
def _holds(signal, compare, value, _semantic=None):
    return core.inline_asm_elementwise(
        "{ .reg .pred holds; .reg .b64 seen; ld.acquire.sys.global.b64 seen, [$1]; "
        f"setp.{_comparison(compare)}.u64 holds, seen, $2; selp.u32 $0, 1, 0, holds; }}",
        "=r,l,l,~{memory}",
        cast_all(_semantic, (signal, tl.int64), (value, tl.uint64)),
        tl.int32,
        is_pure=False,
        pack=1,
        _semantic=_semantic,
    )


@triton.jit
def test_signal(signal, compare: tl.constexpr, value):
    require_ptr64("test_signal", "signal", signal)
    return block_and(_holds(signal, compare, value))


@triton.jit
def grid_barrier(counter, monitor):
    require_ptr64("grid_barrier", "counter", counter)
    require_ptr64("grid_barrier", "monitor", monitor)
    word = counter.to(tl.pointer_type(tl.int64))
    programs = tl.num_programs(0) * tl.num_programs(1) * tl.num_programs(2)
    # The upper half counts barriers. The shares of one launch's programs add up to one of them.
    share = tl.cast(1, tl.int64)
    if tl.program_id(0) + tl.program_id(1) + tl.program_id(2) == 0:
        share = (tl.cast(1, tl.int64) << 32) - (programs - 1)
    syncthreads()
    before = tl.atomic_add(word, share, sem="acq_rel", scope="gpu")
    me = tl.load(monitor.to(tl.pointer_type(tl.int64)) + MONITOR_RANK)
    return wait_word(word, CMP_GE, ((before >> 32) + 1) << 32, monitor, me, 0)


@triton.jit
def wait_token(signal, compare: tl.constexpr, value, monitor, peer, index):
    require_ptr64("wait_token", "signal", signal)
    require_ptr64("wait_token", "monitor", monitor)
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
