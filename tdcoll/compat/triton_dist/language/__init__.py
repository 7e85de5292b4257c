# SPDX-License-Identifier: Apache-2.0
"""``triton_dist.language``: its compiler's additions to Triton, as functions of stock Triton."""

import triton
import triton.language as tl
from triton.language import core

import tdcoll.language as tdl
from tdcoll.language import INTERPRETED
from tdcoll.language import SIGNAL_ADD as _ADD
from tdcoll.language import SIGNAL_SET as _SET

__all__ = ["consume_token", "notify", "num_ranks", "rank", "symm_at", "wait"]

# Defaults: triton 3.6 makes no compile-time value of a text.
_DEFAULT_OP = tl.constexpr("set")
_DEFAULT_SCOPE = tl.constexpr("inter_node")


@triton.jit
def rank(axis: tl.constexpr = -1):
    """Return this PE, which is the global rank. ``axis`` must be -1."""
    tl.static_assert(axis == -1, "axis must be -1: tdcoll has one axis of ranks")
    return tdl.my_pe()


@triton.jit
def num_ranks(axis: tl.constexpr = -1):
    """Return the number of ranks of the job. ``axis`` must be -1."""
    tl.static_assert(axis == -1, "axis must be -1: tdcoll has one axis of ranks")
    return tdl.n_pes()


@triton.jit
def symm_at(ptr, rank):
    """Return the pointer to the same place on another rank of this node."""
    return tdl.remote_ptr(ptr, rank)


if INTERPRETED:

    @triton.jit
    def _until_equal(words, count, value, scope: tl.constexpr, semantic: tl.constexpr):
        for i in range(count):
            while tdl.ld(words + i, scope, semantic) != value:
                pass

else:
    from tdcoll.language.ptx import acquired, asm
    from tdcoll.spec.checks import choice, integer_pointee

    @core.extern
    def _until_equal(words, count, value, scope, semantic, _semantic=None, _generator=None):
        kind = integer_pointee("dl.wait", words)
        where = choice("dl.wait: scope", scope, ("cta", "gpu", "sys"))
        order = choice("dl.wait: semantic", semantic, ("acquire", "relaxed"))
        hopper = int("".join(filter(str.isdigit, _semantic.builder.options.arch))) >= 90
        bits = kind.primitive_bitwidth
        # Each lane of a warp polls its own words; loads of descriptors go through the async proxy.
        text = f"""{{
.reg .pred more, differs;
.reg .b32 lane;
.reg .b64 at;
.reg .b{bits} seen;
mov.u32 lane, %laneid;
NEXT:
setp.lt.s32 more, lane, $count;
@!more bra DONE;
mad.wide.s32 at, lane, {bits // 8}, $words;
AGAIN:
ld.{order}.{where}.global.b{bits} seen, [at];
setp.ne.b{bits} differs, seen, $value;
@differs bra AGAIN;
add.s32 lane, lane, 32;
bra NEXT;
DONE:
bar.warp.sync 0xffffffff;
{"fence.proxy.async.global;" if hopper else ""}
mov.u32 $0, 0;
}}"""
        asm(_semantic, text, words=(words, tl.int64), count=(count, tl.int32), value=(value, kind))
        acquired(_semantic=_semantic, _generator=_generator)


@triton.jit
def wait(barrierPtrs, numBarriers, scope: tl.constexpr, semantic: tl.constexpr, waitValue=1):
    """Return a token, once each of ``numBarriers`` words from ``barrierPtrs`` on is ``waitValue``.

    The words have 32 or 64 bits, and are of this rank or, through ``symm_at``, of a peer. The lanes
    of each warp wait, and the warp goes on together. Loads that follow in the program stay behind
    the wait, because stock Triton does not pipeline a loop that has one. It has no deadline on a
    GPU; on the simulator it has the job's.
    """
    _until_equal(barrierPtrs, numBarriers, waitValue, scope, semantic)
    return tl.cast(0, tl.int32)


@triton.jit
def consume_token(value, token):
    """Return ``value`` unchanged: loads through it are already behind the :func:`wait` that gave
    ``token``."""
    return value


@triton.jit
def notify(
    ptr,
    rank,
    signal=1,
    sig_op: tl.constexpr = _DEFAULT_OP,
    comm_scope: tl.constexpr = _DEFAULT_SCOPE,
):
    """Set a 64-bit signal of ``rank``, or add to it, after the earlier stores of this thread.

    It has no barrier of the block before it, as in Triton-distributed: if you need one, call
    ``__syncthreads()``.

    ``comm_scope``: ``gpu``, this rank's own signal, for its other programs; ``intra_node``, by a
    store to the peer's memory; ``inter_node``, by NVSHMEM after its fence, which reaches every
    rank.
    """
    if sig_op != "set":
        tl.static_assert(sig_op == "add", "sig_op must be 'set' or 'add'")
    if comm_scope == "inter_node":
        if tdl.tid(0) == 0:
            # NVSHMEM's signal orders nothing before it, not even stores to a peer's memory
            tdl.fence()
            if sig_op == "set":
                tdl.signal_op(ptr, signal, _SET, rank)
            else:
                tdl.signal_op(ptr, signal, _ADD, rank)
    elif comm_scope == "intra_node":
        theirs = tdl.remote_ptr(ptr, rank)
        if tdl.tid(0) == 0:
            if sig_op == "set":
                tdl.st_release(theirs, signal, "sys")
            else:
                tdl.atom_add(theirs, signal, "sys", "release")
    else:
        tl.static_assert(
            comm_scope == "gpu", "comm_scope must be 'gpu', 'intra_node' or 'inter_node'"
        )
        if tdl.tid(0) == 0:
            if sig_op == "set":
                tdl.st_release(ptr, signal, "gpu")
            else:
                tdl.atom_add(ptr, signal, "gpu", "release")
