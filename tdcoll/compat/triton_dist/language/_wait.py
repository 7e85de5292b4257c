# SPDX-License-Identifier: Apache-2.0
"""``dl.wait``, which waits until words have a value. It has no deadline: its arguments leave no room for a monitor."""

import triton
import triton.language as tl
from triton.language import core

from tdcoll.language import INTERPRETED, ld

__all__ = ["wait"]

if INTERPRETED:

    @triton.jit
    def _until_equal(words, count, value, scope: tl.constexpr, semantic: tl.constexpr):
        for i in range(count):
            while ld(words + i, scope, semantic) != value:
                pass

else:
    from tdcoll.language.ptx import acquired, integer_pointee

    @core.extern
    def _until_equal(words, count, value, scope, semantic, _semantic=None, _generator=None):
        pointee, constraint = integer_pointee("dl.wait", words)
        bits = pointee.primitive_bitwidth
        order, where = (core._unwrap_if_constexpr(one) for one in (semantic, scope))
        if order not in ("acquire", "relaxed") or where not in ("cta", "gpu", "sys"):
            raise ValueError(
                f"dl.wait: expected a scope of cta, gpu or sys and a semantic of acquire or relaxed, got {where!r} and "
                f"{order!r}"
            )
        hopper = int("".join(filter(str.isdigit, _semantic.builder.options.arch))) >= 90
        # Each lane of a warp polls the words that fall to it; what descriptors load goes through the async proxy.
        asm = f"""{{
.reg .pred more, differs;
.reg .b32 lane;
.reg .b64 at;
.reg .b{bits} seen;
mov.u32 lane, %laneid;
NEXT:
setp.lt.s32 more, lane, $2;
@!more bra DONE;
mad.wide.s32 at, lane, {bits // 8}, $1;
AGAIN:
ld.{order}.{where}.global.b{bits} seen, [at];
setp.ne.b{bits} differs, seen, $3;
@differs bra AGAIN;
add.s32 lane, lane, 32;
bra NEXT;
DONE:
bar.warp.sync 0xffffffff;
{"fence.proxy.async.global;" if hopper else ""}
mov.u32 $0, 0;
}}"""
        arguments = [
            core.cast(words, tl.int64, _semantic=_semantic),
            core.cast(_semantic.to_tensor(count), tl.int32, _semantic=_semantic),
            core.cast(_semantic.to_tensor(value), pointee, _semantic=_semantic),
        ]
        core.inline_asm_elementwise(
            asm,
            f"=r,l,r,{constraint},~{{memory}}",
            arguments,
            tl.int32,
            is_pure=False,
            pack=1,
            _semantic=_semantic,
        )
        acquired(_semantic=_semantic, _generator=_generator)


@triton.jit
def wait(barrierPtrs, numBarriers, scope: tl.constexpr, semantic: tl.constexpr, waitValue=1):
    """Return a token, once each of ``numBarriers`` words from ``barrierPtrs`` on is ``waitValue``.

    The words have 32 or 64 bits, and are of this rank or, through ``symm_at``, of a peer. The wait is unbounded on a
    GPU; on the simulator a job's deadline ends it.
    """
    _until_equal(barrierPtrs, numBarriers, waitValue, scope, semantic)
    return tl.cast(0, tl.int32)
