# SPDX-License-Identifier: Apache-2.0
"""Data and signals by stores: ranks of one node, whose memory this GPU can address.

A peer's copy of a symmetric address is that address plus the peer's *delta*. The order of data and signal is PTX's: the
stores of a block come before its barrier, and that comes before the release at system scope by one of its threads; who
acquires the signal sees the data. Nothing of NVSHMEM's device code is needed.
"""

import triton.language as tl

import tdcoll.language as tdl
from tdcoll.language.jit import jit

__all__ = ["may_write", "push", "release", "release_to", "release_to_all", "say_entered"]


@jit
def release(signal, delta, value):
    """The peer's copy of ``signal`` becomes ``value``, after all that the block has stored before."""
    tdl.syncthreads()
    theirs = (tl.cast(signal, tl.int64) + delta).to(tl.pointer_type(tl.int64))
    if tdl.tid(0) == 0:
        tdl.st_release(theirs, value, "sys")


@jit
def release_to_all(g, signal, value):
    """The copy of ``signal`` of every other rank becomes ``value``, after all that the block has stored before."""
    tdl.syncthreads()
    for step in range(1, g.world):
        theirs = tl.cast(signal, tl.int64) + tl.load(g.deltas + (g.rank + step) % g.world)
        if tdl.tid(0) == 0:
            tdl.st_release(theirs.to(tl.pointer_type(tl.int64)), value, "sys")


@jit
def release_to(g, ranks, count, signal, value):
    """The copies of ``signal`` of the first ``count`` of ``ranks`` become ``value``, after all that the block has
    stored before."""
    tdl.syncthreads()
    for i in tl.range(0, count):
        theirs = tl.cast(signal, tl.int64) + tl.load(g.deltas + tl.load(ranks + i))
        if tdl.tid(0) == 0:
            tdl.st_release(theirs.to(tl.pointer_type(tl.int64)), value, "sys")


@jit
def push(target, source, nbytes, delta, signal, signal_delta, value):
    """``nbytes`` at ``source`` to the peer's copy of ``target``; then its copy of ``signal`` becomes ``value``."""
    tdl.copy_block(target + delta, source, nbytes)
    release(signal, signal_delta, value)


@jit
def say_entered(g, peer_delta, epoch):
    """Let a peer write to this rank's buffer: this rank has begun call ``epoch``."""
    release(g.entered + g.rank, peer_delta, epoch)


@jit
def may_write(g, window, peer, epoch):
    """1 when rank ``peer`` lets its segments be written in this call; 0 if it did not say so in time.

    A window of two slots may always be written, see :mod:`tdcoll.context`; one of the caller's only after its owner has
    entered the call.
    """
    allowed = tl.cast(1, tl.int32)
    if window.slots == 1:
        allowed = tdl.wait_signal(g.entered + peer, tdl.CMP_GE, epoch, g.monitor, peer, peer)
    return allowed
