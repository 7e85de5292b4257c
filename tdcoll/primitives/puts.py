# SPDX-License-Identifier: Apache-2.0
"""Data and signals by NVSHMEM: ranks of any node. Between nodes, only from symmetric memory.

Each chunk has its own signal, because a put with a signal orders its own bytes before that signal
and nothing else.
"""

from typing import Any, NamedTuple

import triton.language as tl

import tdcoll.language as tdl
from tdcoll.language.jit import jit
from tdcoll.primitives.group import segment
from tdcoll.primitives.stores import may_write


class Routes(NamedTuple):
    """The ranks that a rank sends to, inside its node and elsewhere. Every rank starts with its
    successor.

    Attributes:
        ranks: int32: ``n_local`` group ranks of this node, then their PEs, and ``n_remote`` of
            other nodes, likewise.
        n_local, n_remote: how many.
    """

    ranks: Any
    n_local: tl.int32
    n_remote: tl.int32


@jit
def signal_entered(g, routes, epoch):
    """Let every rank of ``routes`` write to this rank's buffer: this rank has begun call
    ``epoch``."""
    for i in tl.range(0, routes.n_local, disable_licm=True):
        tdl.signal_block(
            g.entered + g.rank, epoch, tdl.SIGNAL_SET, tl.load(routes.ranks + routes.n_local + i)
        )
    pes = routes.ranks + 2 * routes.n_local + routes.n_remote
    for i in tl.range(0, routes.n_remote, disable_licm=True):
        tdl.signal_block(g.entered + g.rank, epoch, tdl.SIGNAL_SET, tl.load(pes + i))


@jit
def task(routes, chunks, per_chunk):
    """Return ``(chunk_index, given)``: the chunk of this thread block, and its task there.

    First come all that put to a remote rank, whose ``given`` is negative: it counts the remote
    ranks from the last. Then chunk by chunk ``per_chunk`` others, of which the first ``n_local``
    store to the local ranks.
    """
    putters = routes.n_remote * chunks
    inside = tl.maximum(tl.program_id(0) - putters, 0)
    chunk_index = inside // per_chunk
    given = inside % per_chunk
    if tl.program_id(0) < putters:
        chunk_index = tl.program_id(0) // routes.n_remote
        given = tl.program_id(0) % routes.n_remote - routes.n_remote
    return chunk_index, given


@jit
def push(target, source, nbytes, signal, value, pe):
    """Put ``nbytes`` at ``source`` to ``pe``'s copy of ``target``; then its copy of ``signal``
    becomes ``value``."""
    tdl.putmem_signal_block(target, source, nbytes, signal, value, tdl.SIGNAL_SET, pe)


@jit
def put_from_outbox(to, pe, source, inbox, g, outbox, offset, size, signal, epoch):
    """Put a chunk at ``source`` to rank ``to``, which is ``pe``; nothing waits for it.

    It is copied first to the outbox of this rank's segment for that rank, at byte ``outbox``,
    because puts need symmetric memory. The put orders the chunk before its own signal. It reads the
    outbox after the launch has ended, and nothing waits for that: this rank writes there next in
    epoch e + 2, when it is done with e + 1, for which it has heard from every peer. By then each
    peer had started e + 1, and was therefore done with e and had received the puts to it. A call of
    another kind may write the whole segment in e + 2, too.
    """
    copied = segment(inbox, g, epoch, to) + outbox + offset
    tdl.copy_block(copied, source, size)
    tdl.syncthreads()
    landing = segment(inbox, g, epoch, g.rank) + offset
    tdl.putmem_signal_nbi_block(landing, copied, size, signal, epoch, tdl.SIGNAL_SET, pe)


@jit
def push_remote(i, routes, g, inbox, copied, source, nbytes, signal, epoch):
    """Put a chunk to the remote ranks of ``routes``, from symmetric memory.

    With two slots the chunk is first copied to ``copied``, this rank's own segment, and put from
    there to all of them; nothing waits for the puts, because that segment is written next two
    epochs later. If the chunk is in the caller's buffer, it is put to the i-th of them when that
    rank has entered the call, and is complete when this returns, because the caller may overwrite
    it when the call is over.
    """
    elsewhere = routes.ranks + 2 * routes.n_local
    if inbox.slots == 1:
        peer = tl.load(elsewhere + i)
        pe = tl.load(elsewhere + routes.n_remote + i)
        if may_write(g, inbox, peer, epoch) != 0:
            tdl.putmem_signal_nbi_block(copied, copied, nbytes, signal, epoch, tdl.SIGNAL_SET, pe)
            tdl.quiet()
    else:
        tdl.copy_block(copied, source, nbytes)
        tdl.syncthreads()
        for k in tl.range(0, routes.n_remote, disable_licm=True):
            pe = tl.load(elsewhere + routes.n_remote + k)
            tdl.putmem_signal_nbi_block(copied, copied, nbytes, signal, epoch, tdl.SIGNAL_SET, pe)
