# SPDX-License-Identifier: Apache-2.0
"""The device language compiled by stock Triton: words of 128 bits, and waits for those that say when they are there."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import core

from tdcoll.language.ptx import acquired, cast_all, require_ptr64
from tdcoll.language.waits import _polling

__all__ = ["load_words", "store_flagged", "store_words", "wait_flagged", "wait_words", "wait_words_of_all"]


@core.extern
def _poll_flagged(words, flag, monitor, active, peer, index, _semantic=None):
    """Per element: (data, data, data, 1) once the word's last 32 bits are ``flag``; (any, 0) after the deadline.

    The load is volatile, which PTX orders as it does a relaxed one of the system. A relaxed one whose data are not all
    used is divided by ptxas into loads of the parts that are, and the flag may then be newer than the data.
    """
    prepare = (
        ".reg .b128 wide;\n.reg .b64 low, high, wanted;\ncvt.u64.u32 wanted, $5;\n"
        "mov.b32 $0, 0;\nmov.b32 $1, 0;\nmov.b32 $2, 0;"
    )
    look = (
        "ld.volatile.global.b128 wide, [$4];\nmov.b128 {low, high}, wide;\n"
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
