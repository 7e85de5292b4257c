# SPDX-License-Identifier: Apache-2.0
"""Device-side pieces that every collective on a context uses."""

import triton.language as tl

import tdcoll.language as tdl
from tdcoll.context import MAX_PROGRAMS
from tdcoll.language.jit import jit

__all__ = ["EPOCH_SHIFT", "begin_epoch", "chunk_bytes", "release"]

EPOCH_SHIFT = tl.constexpr(MAX_PROGRAMS.bit_length() - 1)
"""The control word holds the number of finished epochs above this bit, and how far the next one is below it."""
_EPOCH = tl.constexpr(1 << EPOCH_SHIFT.value)


@jit
def begin_epoch(control, monitor):
    """``(epoch, alive)``: this call, counted from 1. Every program of the launch calls it exactly once.

    ``control`` points to the context's control word. Every program adds its share of one epoch after it has read the
    word, so the epoch goes up when the last one has read it; the next launch on the stream starts after this one ends.
    The barrier makes that true of every thread: all read the word, and one adds. Nobody waits for the addition.

    ``alive`` is 0 once a wait of the context has expired: the program must then do nothing. A rank that gave up on a
    peer and went on sending would write the next calls' data over what a peer that is only late has yet to read.
    """
    programs = tl.num_programs(0) * tl.num_programs(1) * tl.num_programs(2)
    program = tl.program_id(0) + tl.num_programs(0) * (tl.program_id(1) + tl.num_programs(1) * tl.program_id(2))
    word = tdl.ld(control, "gpu", "relaxed")
    aborted = tdl.ld(monitor + tdl.MONITOR_ABORTED, "gpu", "relaxed")
    alive = tdl.block_and(aborted == 0)
    share = _EPOCH // programs
    if program == programs - 1:
        share = _EPOCH - share * (programs - 1)
    tl.atomic_add(control, share.to(tl.int64), sem="relaxed", scope="gpu")
    return (word >> EPOCH_SHIFT) + 1, alive


@jit
def chunk_bytes(nbytes, chunk, channel):
    """Bytes of chunk ``channel`` when ``nbytes`` are cut into pieces of ``chunk``: 0 past the end."""
    left = tl.maximum(tl.cast(nbytes, tl.int64) - tl.cast(channel, tl.int64) * chunk, 0)
    return tl.minimum(left, tl.cast(chunk, tl.int64))


@jit
def release(signal, delta, epoch):
    """The peer's copy of ``signal`` becomes ``epoch``, after all that the block has stored before."""
    tdl.syncthreads()
    theirs = (tl.cast(signal, tl.int64) + delta).to(tl.pointer_type(tl.int64))
    if tdl.tid(0) == 0:
        tdl.st_release(theirs, epoch, "sys")
