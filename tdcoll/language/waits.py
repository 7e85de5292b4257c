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

from tdcoll.language.ptx import acquired, cast_all, proxy_fence, require_ptr64
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

__all__ = ["block_and", "consume_token", "load_words", "store_flagged", "store_words", "wait_flagged", "wait_signal"]
__all__ += ["wait_signals", "wait_token", "wait_words", "wait_words_of_all"]

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


@core.extern
def _poll(signal, compare, value, monitor, active, peer, index, _semantic=None):
    """Per element: 1 once ``*signal compare value`` holds (or ``active`` is 0), 0 after the monitor's deadline."""
    number = core._unwrap_if_constexpr(compare)
    if number not in range(len(_COMPARISONS)):
        raise ValueError(f"compare must be a CMP_* constant, got {number!r}")
    look = f"ld.acquire.sys.global.b64 word, [$1];\nsetp.{_COMPARISONS[number]}.u64 done, word, $2;"
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
    args = cast_all(
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
    args = cast_all(
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


@core.extern
def _poll_words_of_all(words, stride, count, skip, absent, monitor, active, index, call, _semantic=None):
    """Per element: ``count`` times (data, data, data, data), and 1 once no part of the words is ``absent``, 0 after the
    deadline. All loads are under way at the same time; that of ``skip`` is one of its successor's word."""
    n = core._unwrap_if_constexpr(count)
    if not isinstance(n, int) or n < 2:
        raise ValueError(f"wait_words_of_all: count must be a constant of at least 2, got {n!r}")
    parts = [[f"${4 * rank + part}" for part in range(4)] for rank in range(n)]
    at, stride_at, skip_at, absent_at, monitor_at, active_at, index_at, call_at = (
        f"${4 * n + 1 + i}" for i in range(8)
    )
    prepare = [
        f".reg .b64 place<{n}>, four, there;",
        f".reg .b32 differ<{4 * n}>, who;",
        ".reg .pred own;",
        "mov.b64 four, 4;",
        "mov.b32 who, 0;",
        *(f"mov.b32 {part}, 0;" for rank in parts for part in rank),
        *(f"mad.lo.s64 place{rank}, {stride_at}, {rank}, {at};" for rank in range(n)),
    ]
    for rank in range(n):
        prepare += [f"setp.eq.s32 own, {skip_at}, {rank};", f"@own mov.b64 place{rank}, place{(rank + 1) % n};"]
    look = [f"ld.relaxed.sys.global.v4.b32 {{{', '.join(parts[rank])}}}, [place{rank}];" for rank in range(n)]
    look += [f"xor.b32 differ{4 * r + p}, {parts[r][p]}, {absent_at};" for r in range(n) for p in range(4)]
    width = 1
    while width < 4 * n:  # the least of all is 0 if a part is absent
        pairs = range(0, 4 * n - width, 2 * width)
        look += [f"min.u32 differ{i}, differ{i}, differ{i + width};" for i in pairs]
        width *= 2
    look.append("setp.ne.u32 done, differ0, 0;")
    see = ["mov.b64 word, 0;"]
    for rank in reversed(range(n)):
        see.append("mov.b64 there, 0;")
        for part in parts[rank]:
            see += [
                f"setp.ne.b32 again, {part}, {absent_at};",
                "selp.u64 now, 1, 0, again;",
                "add.u64 there, there, now;",
            ]
        see += ["setp.ne.u64 again, there, 4;", f"setp.ne.and.s32 again, {skip_at}, {rank}, again;"]
        see += ["selp.b64 word, there, word, again;", f"selp.b32 who, {rank}, who, again;"]
    asm = _polling(
        prepare="\n".join(prepare),
        look="\n".join(look),
        see="\n".join(see),
        ok=f"${4 * n}",
        monitor=monitor_at,
        active=active_at,
        peer="who",
        index=index_at,
        epoch=call_at,
        expected="four",
    )
    args = cast_all(
        _semantic,
        (words, tl.int64),
        (stride, tl.int64),
        (skip, tl.int32),
        (absent, tl.int32),
        (monitor, tl.int64),
        (active, tl.int32),
        (index, tl.int32),
        (call, tl.uint64),
    )
    outputs = "=&r," * (4 * n + 1) + "l,l,r,r,l,r,r,l,~{memory}"
    kinds = (tl.int32,) * (4 * n + 1)
    return core.inline_asm_elementwise(asm, outputs, args, kinds, is_pure=False, pack=1, _semantic=_semantic)


_poll_words_of_all.bounded = True


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


@triton.jit
def wait_flagged(words, flag, mask, monitor, peer):
    require_ptr64("wait_flagged", "monitor", monitor)
    place = tl.arange(0, words.shape[0])
    found = _poll_flagged(words, flag, monitor, mask.to(tl.int32), peer, place)
    acquired()
    return found


@core.extern
def store_flagged(words, first, second, third, flag, mask, _semantic=None):
    data = [(part, tl.int32) for part in (first, second, third, flag)]
    args = cast_all(_semantic, (words, tl.int64), *data, (mask, tl.int32))
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
    require_ptr64("wait_words", "monitor", monitor)
    place = tl.arange(0, words.shape[0])
    found = _poll_words(words, absent, monitor, mask.to(tl.int32), peer, place, call)
    acquired()
    return found


@triton.jit
def wait_words_of_all(words, stride, count: tl.constexpr, skip, absent, mask, monitor, call):
    require_ptr64("wait_words_of_all", "monitor", monitor)
    place = tl.arange(0, words.shape[0])
    found = _poll_words_of_all(words, stride, count, skip, absent, monitor, mask.to(tl.int32), place, call)
    acquired()
    return found


@core.extern
def load_words(words, mask, _semantic=None):
    return core.inline_asm_elementwise(
        "{ .reg .pred active; setp.ne.b32 active, $5, 0; "
        "mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; "
        "@active ld.global.v4.b32 {$0, $1, $2, $3}, [$4]; }",
        "=&r,=&r,=&r,=&r,l,r,~{memory}",
        cast_all(_semantic, (words, tl.int64), (mask, tl.int32)),
        (tl.int32,) * 4,
        is_pure=False,
        pack=1,
        _semantic=_semantic,
    )


@core.extern
def store_words(words, first, second, third, fourth, mask, _semantic=None):
    data = [(part, tl.int32) for part in (first, second, third, fourth)]
    core.inline_asm_elementwise(
        "{ .reg .pred active; setp.ne.b32 active, $6, 0; "
        "@active st.relaxed.sys.global.v4.b32 [$1], {$2, $3, $4, $5}; mov.b32 $0, 0; }",
        "=r,l,r,r,r,r,r,~{memory}",
        cast_all(_semantic, (words, tl.int64), *data, (mask, tl.int32)),
        tl.int32,
        is_pure=False,
        pack=1,
        _semantic=_semantic,
    )
