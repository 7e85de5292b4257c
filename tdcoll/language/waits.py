# SPDX-License-Identifier: Apache-2.0
"""The device language compiled by stock Triton: waits that end.

Waits are polling loops in PTX rather than in Triton: a loop per thread, no cross-warp traffic while
waiting, and the clock is read on every 256th miss only. A signal wait's result is AND-ed over the
block by ``bar.red``, because threads may disagree at the deadline and a block-wide branch on a
value that differs between warps is undefined; the result for a flagged word belongs to its thread.
"""

from __future__ import annotations

import re
from typing import Any

import triton
import triton.language as tl
from triton.language import core

from tdcoll.language.ptx import acquired, asm, proxy_fence, require_ptr64, syncthreads
from tdcoll.spec import constants
from tdcoll.spec.checks import comparison, consumed, integer_pointee, require_scalar

__all__ = [
    "block_and",
    "consume_token",
    "grid_barrier",
    "test_signal",
    "wait_signal",
    "wait_signals",
    "wait_token",
]
__all__ += ["wait_word"]

# A thread polls until `look` has set the predicate `done`, or another wait of the monitor has
# expired, or its own deadline has passed: the first of all threads for which it has leaves the
# record. A thread that has waited for long leaves a notice now and then, on the path that has read
# the clock anyway and where the fewest registers are in use. `ok` is a result, `active`, `peer`,
# `index`, `epoch` and `expected` are operands or registers; `prepare`, `look`, `whose`, which finds
# the peer of a notice, and `see`, which leaves in `word` what was seen last, are PTX. `notices` is
# where those of such a wait lie, and `place` distinguishes threads that wait for different peers.
# (Which number does it decides how many registers ptxas gives to a kernel.)
_POLL = """
.reg .pred done, again;
.reg .b32 misses, phase, flag, number;
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
ld.relaxed.gpu.global.b64 aborted, [$monitor+{MONITOR_ABORTED}];
setp.ne.u64 done, aborted, 0;
@done bra GIVE_UP;
ld.relaxed.gpu.global.b64 limit, [$monitor+{MONITOR_TIMEOUT_NS}];
sub.u64 now, now, begin;
setp.ge.u64 done, now, limit;
@done bra EXPIRED;
shr.u64 now, now, {NOTICE_SHIFT};
cvt.u32.u64 phase, now;
setp.eq.u32 again, phase, 0;
@again bra POLL;
and.b32 number, phase, {UNITS};
setp.ne.u32 again, number, 0;
@again bra POLL;
{whose}
ld.relaxed.gpu.global.b64 record, [$monitor+{MONITOR_RECORD}];
mov.u32 number, {place};
and.b32 number, number, {PLACES};
mad.wide.u32 record, number, 16, record;
mov.b64 now, {{phase, {peer}}};
st.relaxed.sys.global.b64 [record+{notices}+8], {epoch};
st.relaxed.sys.global.b64 [record+{notices}], now;
bra POLL;
EXPIRED:
atom.relaxed.gpu.global.cas.b64 aborted, [$monitor+{MONITOR_ABORTED}], 0, 1;
setp.ne.u64 done, aborted, 0;
@done bra GIVE_UP;
{see}
ld.global.b64 record, [$monitor+{MONITOR_RECORD}];
ld.global.b64 now, [$monitor+{MONITOR_RANK}];
st.global.b64 [record+{RECORD_RANK}], now;
cvt.s64.s32 now, {peer};
st.global.b64 [record+{RECORD_PEER}], now;
cvt.s64.s32 now, {index};
st.global.b64 [record+{RECORD_SIGNAL}], now;
st.global.b64 [record+{RECORD_EPOCH}], {epoch};
st.global.b64 [record+{RECORD_EXPECTED}], {expected};
st.global.b64 [record+{RECORD_SEEN}], word;
mov.b64 now, 1;
st.release.sys.global.b64 [record+{RECORD_VALID}], now;
GIVE_UP:
mov.b32 {ok}, 0;
END:
"""

_PLACES = {
    name: 8 * word.value
    for name, word in vars(constants).items()
    if re.match("MONITOR_|RECORD_", name)
}
"""Bytes from the start of the monitor's words, and of the record."""

_NUMBERS = {"NOTICE_SHIFT": constants.NOTICE_SHIFT.value, "UNITS": constants.NOTICE_EVERY.value - 1}
_NUMBERS["PLACES"] = constants.NOTICES.value - 1


def _polling(**pieces: str) -> str:
    """Return PTX that polls. Operands are called as the pieces that are left out; ``$monitor`` is
    always one."""
    usual: dict[str, str] = {name: f"${name}" for name in ("active", "peer", "index")}
    usual |= {"ok": "$0", "prepare": "", "see": "", "epoch": pieces["expected"]}
    lamport = "epoch" in pieces  # or the number of a Lamport call
    usual |= {
        "whose": "",
        "place": "%ctaid.x",
        "notices": str(_PLACES["RECORD_NOTICES"] + lamport * 16 * constants.NOTICES.value),
    }
    return "{" + _POLL.format(**(usual | pieces), **_PLACES, **_NUMBERS) + "}"


def _is_block(peer: Any) -> bool:
    """Return whether the threads of a block wait for different peers."""
    return isinstance(peer, tl.tensor) and peer.type.is_block()


def _report(monitor: Any, peer: Any, index: Any) -> dict[str, tuple[Any, Any]]:
    """Return the operands of a wait that say who reports what."""
    return {"monitor": (monitor, tl.int64), "peer": (peer, tl.int32), "index": (index, tl.int32)}


@core.extern
def _poll(signal, compare, value, monitor, active, peer, index, _semantic=None):
    """Per element: 1 once ``*signal compare value`` holds (or ``active`` is 0), 0 after the
    monitor's deadline."""
    look = f"ld.acquire.sys.global.b64 word, [$signal];\nsetp.{comparison(compare)}.u64 done, word, $value;"
    operands = {
        "signal": (signal, tl.int64),
        "value": (value, tl.uint64),
        "active": (active, tl.int32),
    }
    text = _polling(look=look, expected="$value", place="$peer" if _is_block(peer) else "%ctaid.x")
    return asm(_semantic, text, **operands, **_report(monitor, peer, index))


@core.extern
def _poll_word(word, compare, value, monitor, peer, index, _semantic=None):
    """Return 1 once ``*word compare value`` holds, as integers of the pointee's type; 0 after the
    deadline."""
    number = comparison(compare)
    pointee = integer_pointee("wait_word", word)
    require_scalar("wait_word", "word", word)
    bits = pointee.primitive_bitwidth
    sign = "s" if pointee.is_int_signed() else "u"
    seen, convert = ("half", f"cvt.{sign}64.{sign}32") if bits == 32 else ("word", "mov.b64")
    text = _polling(
        prepare=f".reg .b64 wanted;\n.reg .b32 half;\n{convert} wanted, $value;",
        look=f"ld.acquire.sys.global.b{bits} {seen}, [$word];\nsetp.{number}.{sign}{bits} done, {seen}, $value;",
        see="" if bits == 64 else f"{convert} word, half;",
        active="1",
        expected="wanted",
    )
    operands = {
        "word": (word, tl.int64),
        "value": (value, pointee),
        **_report(monitor, peer, index),
    }
    return asm(_semantic, text, **operands)


_poll.bounded = _poll_word.bounded = True


def _all_threads(flag: Any, then: str, semantic: Any) -> Any:
    """A barrier of the block's threads, which then execute ``then``: 1 if ``flag`` is not 0 in all
    of them, else 0."""
    text = "{ .reg .pred mine, all; setp.ne.u32 mine, $flag, 0; barrier.cta.red.and.pred all, 0, mine; "
    return asm(semantic, f"{text}{then}selp.u32 $0, 1, 0, all; }}", flag=(flag, tl.int32))


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
def wait_signal(signal, compare: tl.constexpr, value, monitor, peer=-1, index=-1):
    require_ptr64("wait_signal", "signal", signal)
    require_ptr64("wait_signal", "monitor", monitor)
    return block_and(_poll(signal, compare, value, monitor, 1, peer, index))


@triton.jit
def wait_signals(
    signals, count, skip, compare: tl.constexpr, value, monitor, BLOCK: tl.constexpr, peer=-1, index=0, stride=1
):  # fmt: skip
    require_ptr64("wait_signals", "signals", signals)
    require_ptr64("wait_signals", "monitor", monitor)
    number = tl.arange(0, BLOCK)
    wanted = (number < count) & (number != skip)
    mine = signals.to(tl.pointer_type(tl.int64)) + tl.where(wanted, number, 0) * stride
    whose = tl.where(number * 0 + peer < 0, number, peer)
    return block_and(
        tl.min(_poll(mine, compare, value, monitor, wanted.to(tl.int32), whose, index + number))
    )


@triton.jit
def wait_word(word, compare: tl.constexpr, value, monitor, peer=-1, index=-1):
    require_ptr64("wait_word", "monitor", monitor)
    return block_and(_poll_word(word, compare, value, monitor, peer, index))


@core.extern
def _holds(signal, compare, value, _semantic=None):
    text = "{ .reg .pred holds; .reg .b64 seen; ld.acquire.sys.global.b64 seen, [$signal]; "
    text += f"setp.{comparison(compare)}.u64 holds, seen, $value; selp.u32 $0, 1, 0, holds; }}"
    return asm(_semantic, text, signal=(signal, tl.int64), value=(value, tl.uint64))


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
    return wait_word(
        word, constants.CMP_GE, ((before >> 32) + 1) << 32, monitor, constants.OWN_GRID
    )


@triton.jit
def wait_token(signal, compare: tl.constexpr, value, monitor, peer=-1, index=-1):
    require_ptr64("wait_token", "signal", signal)
    require_ptr64("wait_token", "monitor", monitor)
    token = tl.cast(0, tl.int32)
    # Always true, which the compiler does not know. The pipeliner can make a branch, and what it
    # returns, part of an earlier iteration; an asm it leaves where it is.
    if tl.cast(signal, tl.int64) != 0:
        token = _block_and_for_descriptors(_poll(signal, compare, value, monitor, 1, peer, index))
    return token


@core.extern
def consume_token(value, token, _semantic=None):
    value, token = consumed(value, token, _semantic)
    # A token is 0 or 1, which the compiler does not know either. It still has to know a pointer's
    # alignment.
    nothing = core.cast(
        token.__rshift__(1, _semantic=_semantic),
        tl.int64 if value.dtype.is_ptr() else value.dtype,
        _semantic=_semantic,
    )
    step = nothing.__mul__(16, _semantic=_semantic) if value.dtype.is_ptr() else nothing
    return value.__add__(step, _semantic=_semantic)
