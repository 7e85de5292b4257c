# SPDX-License-Identifier: Apache-2.0
"""The device language compiled by stock Triton: words of 128 bits, and waits for those that say
when they are there."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import core

from tdcoll.language.ptx import acquired, asm, require_ptr64
from tdcoll.language.waits import _is_block, _polling, _report

__all__ = [
    "load_words",
    "store_flagged",
    "store_words",
    "wait_flagged",
    "wait_words",
    "wait_words_of_all",
]


@core.extern
def _poll_flagged(words, flag, monitor, active, peer, index, _semantic=None):
    """Per element: (data, data, data, 1) once the word's last 32 bits are ``flag``; (any, 0) after
    the deadline.

    The load is volatile, which PTX orders as it does a relaxed one of the system. A relaxed one
    whose data are not all used is divided by ptxas into loads of the parts that are, and the flag
    may then be newer than the data.
    """
    prepare = ".reg .b128 wide;\n.reg .b64 low, high, wanted;\ncvt.u64.u32 wanted, $flag;\n"
    look = "ld.volatile.global.b128 wide, [$words];\nmov.b128 {low, high}, wide;\nmov.b64 {$0, $1}, low;\n"
    text = _polling(
        prepare=prepare + "mov.b32 $0, 0;\nmov.b32 $1, 0;\nmov.b32 $2, 0;",
        look=look + "mov.b64 {$2, flag}, high;\nsetp.eq.b32 done, flag, $flag;",
        see="cvt.u64.u32 word, flag;",
        ok="$3",
        expected="wanted",
        place="%tid.x" if _is_block(peer) else "%ctaid.x",
    )
    operands = {"words": (words, tl.int64), "flag": (flag, tl.int32), "active": (active, tl.int32)}
    return asm(_semantic, text, (tl.int32,) * 4, **operands, **_report(monitor, peer, index))


@core.extern
def _poll_words(words, absent, monitor, active, peer, index, call, _semantic=None):
    """Per element: (data, data, data, data, 1) once no part of the word is ``absent``; (any, 0)
    after the deadline."""
    parts = ("$0", "$1", "$2", "$3")
    look = (
        "ld.relaxed.sys.global.v4.b32 {$0, $1, $2, $3}, [$words];\nsetp.ne.b32 done, $0, $absent;\n"
    )
    count = "setp.ne.b32 again, {}, $absent;\nselp.u64 now, 1, 0, again;\nadd.u64 word, word, now;"
    text = _polling(
        prepare=".reg .b64 four;\nmov.b64 four, 4;\n"
        + "\n".join(f"mov.b32 {part}, 0;" for part in parts),
        look=look
        + "\n".join(f"setp.ne.and.b32 done, {part}, $absent, done;" for part in parts[1:]),
        see="mov.b64 word, 0;\n" + "\n".join(map(count.format, parts)),
        ok="$4",
        epoch="$call",
        expected="four",
        place="%tid.x" if _is_block(peer) else "%ctaid.x",
    )
    operands = {
        "words": (words, tl.int64),
        "absent": (absent, tl.int32),
        "active": (active, tl.int32),
    }
    return asm(
        _semantic,
        text,
        (tl.int32,) * 5,
        **operands,
        **_report(monitor, peer, index),
        call=(call, tl.uint64),
    )


@core.extern
def _poll_words_of_all(
    words, stride, count, skip, absent, monitor, active, index, call, _semantic=None
):
    """Per element: ``count`` times (data, data, data, data), and 1 once no part of the words is
    ``absent``, 0 after the deadline. All loads are under way at the same time; that of ``skip`` is
    one of its successor's word."""
    n = core._unwrap_if_constexpr(count)
    if not isinstance(n, int) or n < 2:
        raise ValueError(f"wait_words_of_all: count must be a constant of at least 2, got {n!r}")
    parts = [[f"${4 * rank + part}" for part in range(4)] for rank in range(n)]
    prepare = [
        f".reg .b64 place<{n}>, four, there;",
        f".reg .b32 differ<{4 * n}>, who;",
        ".reg .pred own;",
        "mov.b64 four, 4;",
        "mov.b32 who, 0;",
        *(f"mov.b32 {part}, 0;" for rank in parts for part in rank),
        *(f"mad.lo.s64 place{rank}, $stride, {rank}, $words;" for rank in range(n)),
    ]
    for rank in range(n):
        prepare += [
            f"setp.eq.s32 own, $skip, {rank};",
            f"@own mov.b64 place{rank}, place{(rank + 1) % n};",
        ]
    look = [
        f"ld.relaxed.sys.global.v4.b32 {{{', '.join(parts[rank])}}}, [place{rank}];"
        for rank in range(n)
    ]
    look += [
        f"xor.b32 differ{4 * r + p}, {parts[r][p]}, $absent;" for r in range(n) for p in range(4)
    ]
    width = 1
    while width < 4 * n:  # the least of all is 0 if a part is absent
        pairs = range(0, 4 * n - width, 2 * width)
        look += [f"min.u32 differ{i}, differ{i}, differ{i + width};" for i in pairs]
        width *= 2
    look.append("setp.ne.u32 done, differ0, 0;")
    see = ["mov.b64 word, 0;"]
    whose = []
    for rank in reversed(range(n)):
        whose.append(f"setp.eq.b32 again, {parts[rank][0]}, $absent;")
        whose += [f"setp.eq.or.b32 again, {part}, $absent, again;" for part in parts[rank][1:]]
        whose += [
            f"setp.ne.and.s32 again, $skip, {rank}, again;",
            f"selp.b32 who, {rank}, who, again;",
        ]
        see.append("mov.b64 there, 0;")
        for part in parts[rank]:
            see += [
                f"setp.ne.b32 again, {part}, $absent;",
                "selp.u64 now, 1, 0, again;",
                "add.u64 there, there, now;",
            ]
        see += ["setp.ne.u64 again, there, 4;", f"setp.ne.and.s32 again, $skip, {rank}, again;"]
        see += ["selp.b64 word, there, word, again;", f"selp.b32 who, {rank}, who, again;"]
    pieces = {"prepare": prepare, "look": look, "whose": whose, "see": see}
    joined = {name: "\n".join(lines) for name, lines in pieces.items()}
    text = _polling(**joined, ok=f"${4 * n}", peer="who", place="0", epoch="$call", expected="four")
    operands = {"words": (words, tl.int64), "stride": (stride, tl.int64), "skip": (skip, tl.int32)}
    operands |= {
        "absent": (absent, tl.int32),
        "active": (active, tl.int32),
        "call": (call, tl.uint64),
    }
    operands |= {"monitor": (monitor, tl.int64), "index": (index, tl.int32)}
    return asm(_semantic, text, (tl.int32,) * (4 * n + 1), **operands)


_poll_flagged.bounded = _poll_words.bounded = _poll_words_of_all.bounded = True


@triton.jit
def wait_flagged(words, flag, mask, monitor, peer=-1):
    require_ptr64("wait_flagged", "monitor", monitor)
    place = tl.arange(0, words.shape[0])
    found = _poll_flagged(words, flag, monitor, mask.to(tl.int32), peer, place)
    acquired()
    return found


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
    found = _poll_words_of_all(
        words, stride, count, skip, absent, monitor, mask.to(tl.int32), place, call
    )
    acquired()
    return found


def _parts(first, second, third, fourth, words, mask):
    """Return the operands of a store of words."""
    parts = {"first": first, "second": second, "third": third, "fourth": fourth, "mask": mask}
    return {"words": (words, tl.int64), **{name: (part, tl.int32) for name, part in parts.items()}}


@core.extern
def store_flagged(words, first, second, third, flag, mask, _semantic=None):
    asm(
        _semantic,
        "{ .reg .pred active; .reg .b64 low, high; .reg .b128 wide; setp.ne.b32 active, $mask, 0; "
        "mov.b64 low, {$first, $second}; mov.b64 high, {$third, $fourth}; mov.b128 wide, {low, high}; "
        "@active st.relaxed.sys.global.b128 [$words], wide; mov.b32 $0, 0; }",
        **_parts(first, second, third, flag, words, mask),
    )


@core.extern
def store_words(words, first, second, third, fourth, mask, _semantic=None):
    asm(
        _semantic,
        "{ .reg .pred active; setp.ne.b32 active, $mask, 0; "
        "@active st.relaxed.sys.global.v4.b32 [$words], {$first, $second, $third, $fourth}; mov.b32 $0, 0; }",
        **_parts(first, second, third, fourth, words, mask),
    )


@core.extern
def load_words(words, mask, _semantic=None):
    return asm(
        _semantic,
        "{ .reg .pred active; setp.ne.b32 active, $mask, 0; "
        "mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; "
        "@active ld.global.v4.b32 {$0, $1, $2, $3}, [$words]; }",
        (tl.int32,) * 4,
        words=(words, tl.int64),
        mask=(mask, tl.int32),
    )
