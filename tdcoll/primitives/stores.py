# SPDX-License-Identifier: Apache-2.0
"""Data and signals by stores: ranks of one node, whose memory this GPU can address.

A peer's copy of a symmetric address is that address plus the peer's *delta*. The order of data and
signal is PTX's: the stores of a block come before its barrier, and that comes before the release at
system scope by one of its threads; a reader that acquires the signal sees the data. NVSHMEM's
device code is not needed.

**A peer that gives up while its copies are queued.** Calls by copy engines
(:mod:`tdcoll.primitives.copies`) can't hold back copies behind a wait that has expired. They may
overwrite an inbox that a late peer still reads. Therefore:

- The rank that gives up calls :func:`signal_expired` before its launch ends; once, because it enters
  no later call.
- A reader calls :func:`no_peer_expired` after its loads. If a peer has given up, the reader counts as
  expired as well, because its numbers may be wrong, and the next call or check on its host raises,
  naming that peer.

Why a reader that sees nothing has read the right bytes: the word reaches the peers before the
launch ends, because a release at system scope follows it, and the copies run only after the launch.
A reader whose load took a new byte took it after that, and looks at the word later still. On the
reader's side the order is: a thread stores results of its loads, and therefore has their values;
then comes a barrier, and the acquire loads of the words. One step is an assumption about the
machine rather than a promise of PTX, whose model says nothing of a weak load that races with a
store: a load whose value is known is not performed later, and the acquire load doesn't take an
older view of memory.
"""

import triton.language as tl

import tdcoll.language as tdl
from tdcoll.language.jit import jit
from tdcoll.primitives import elements


@jit
def release(signal, delta, value):
    """Set the peer's copy of ``signal`` to ``value``, after all earlier stores of the block."""
    tdl.syncthreads()
    theirs = (tl.cast(signal, tl.int64) + delta).to(tl.pointer_type(tl.int64))
    if tdl.tid(0) == 0:
        tdl.st_release(theirs, value, "sys")


@jit
def release_to_all(g, signal, value):
    """Set every other rank's copy of ``signal`` to ``value``, after all earlier stores of the
    block."""
    tdl.syncthreads()
    for step in range(1, g.world):
        theirs = tl.cast(signal, tl.int64) + tl.load(g.deltas + (g.rank + step) % g.world)
        if tdl.tid(0) == 0:
            tdl.st_release(theirs.to(tl.pointer_type(tl.int64)), value, "sys")


@jit
def release_to(g, ranks, count, signal, value):
    """Set the copies of ``signal`` of the first ``count`` of ``ranks`` to ``value``, after all
    earlier stores."""
    tdl.syncthreads()
    for i in tl.range(0, count):
        theirs = tl.cast(signal, tl.int64) + tl.load(g.deltas + tl.load(ranks + i))
        if tdl.tid(0) == 0:
            tdl.st_release(theirs.to(tl.pointer_type(tl.int64)), value, "sys")


@jit
def push(target, source, nbytes, delta, signal, signal_delta, value):
    """Store ``nbytes`` at ``source`` to the peer's copy of ``target``; then set its copy of
    ``signal`` to ``value``."""
    tdl.copy_block(target + delta, source, nbytes)
    release(signal, signal_delta, value)


@jit
def push_to_all(g, inbox, target, own, source, nbytes, signal, value, WORDS: tl.constexpr):
    """Store ``nbytes`` at ``source`` to every other rank's copy of ``target``, in an inbox of two
    slots also to this rank's ``own``, reading them once; then set the others' copies of ``signal``
    to ``value``.

    Args:
        WORDS: 32-bit words of a tile, a power of two.
    """
    if (target | own | source | nbytes) % 16 == 0:
        count = elements.count(nbytes, tl.int32, True)
        for begin in tl.range(0, count, WORDS):
            index = begin + tl.arange(0, WORDS)
            mask = index < count
            words = tl.load(elements.pointer(source, tl.int32, True) + index, mask=mask)
            for step in tl.static_range(1, g.world):
                delta = tl.load(inbox.deltas + (g.rank + step) % g.world)
                tl.store(elements.pointer(target + delta, tl.int32, True) + index, words, mask=mask)
            if inbox.slots == 2:
                tl.store(elements.pointer(own, tl.int32, True) + index, words, mask=mask)
    else:
        for step in tl.range(1, g.world):
            tdl.copy_block(
                target + tl.load(inbox.deltas + (g.rank + step) % g.world), source, nbytes
            )
        if inbox.slots == 2:
            tdl.copy_block(own, source, nbytes)
    release_to_all(g, signal, value)


@jit
def signal_entered(g, peer_delta, epoch):
    """Let a peer write to this rank's buffer: this rank has begun call ``epoch``."""
    release(g.entered + g.rank, peer_delta, epoch)


@jit
def may_write(g, inbox, peer, epoch):
    """Return 1 when rank ``peer`` lets its segments be written in this call; 0 if it did not in
    time.

    An inbox of two slots may always be written; a buffer of the caller's only when its owner has
    entered the call.
    """
    allowed = tl.cast(1, tl.int32)
    if inbox.slots == 1:
        allowed = tdl.wait_signal(g.entered + peer, tdl.CMP_GE, epoch, g.monitor, peer, peer)
    return allowed


@jit
def signal_expired(g, epoch):
    """Tell all peers that this rank has timed out in call ``epoch``, and that its queued copies run
    all the same.

    A rank tells once, because peers may have left when the next launch runs.
    """
    mine = g.expired_epochs + g.rank
    if tdl.block_and(tdl.ld(mine, "gpu", "relaxed") == 0) != 0:
        release_to_all(g, mine, epoch + tdl.EXPIRED)
        if tdl.tid(0) == 0:
            tdl.st_release(mine, epoch + tdl.EXPIRED, "sys")  # when the peers have it


@jit
def no_peer_expired(g, WORLD_POW2: tl.constexpr):
    """Return 1 if no peer had given up when the block's earlier loads were done; otherwise 0, and
    the monitor has the peer.

    If one has given up, the wait runs until the deadline, because the peer won't take that back.

    Args:
        WORLD_POW2: a power of two of at least ``world``.
    """
    tdl.syncthreads()
    return tdl.wait_signals(
        g.expired_epochs, g.world, g.rank, tdl.CMP_LT, tdl.EXPIRED, g.monitor, WORLD_POW2
    )
