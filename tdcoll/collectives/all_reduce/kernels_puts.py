# SPDX-License-Identifier: Apache-2.0
"""All-reduce over any nodes, in two steps: every rank sums one part and sends it to all others.

Scope: that of :mod:`tdcoll.collectives.reduce_scatter.kernels_puts`. Parts cross between nodes by
themselves.

Data flow, seen from rank r. Parts and chunks are those of ``kernels_direct``. A segment of the
inbox has three pieces: the *inbox* and the *second inbox*, for the rank whose segment it is to
fill, and between them the *outbox*, from which this rank puts::

    source[p] --stores--> inbox of inbox[slot, r] on rank p, then a release of the chunk's signal    p can be stored to
    source[p] --> outbox of own inbox[slot, p] --nbi put+signal--> inbox of inbox[slot, r] on p             all others
    inboxes and source[r] --sum in rank order inside each node--> node sums --sum in node order--> out[r]
         --> second inbox of own inbox[slot, r], and by stores on every rank that can be stored to; a release each
    second inbox of own inbox[slot, r] --nbi put+signal--> the same on all others
    second inbox of inbox[slot, p] --> out[p], for every other rank p

Ordering: that of :mod:`tdcoll.primitives.stores` and of
:func:`tdcoll.primitives.puts.put_from_outbox`; waits acquire. The own second inbox, which the puts
of sums read, may be reused for the same reason as the outbox.

Signal map, progress of thread blocks, calls in place: as in ``kernels_direct``; but all thread
blocks that put source come first. A putter has copied ``source[p]`` to the outbox before rank p can
have summed it.
"""

import triton.language as tl

import tdcoll.language as tdl
from tdcoll.collectives.all_reduce.kernels_direct import sum_chunk
from tdcoll.language.jit import jit
from tdcoll.primitives import puts, stores
from tdcoll.primitives.group import chunk_bytes, row, segment, start


@jit
def _send_sum(landing, size, g, routes, signal, epoch):
    """Put the sum at ``landing``, which local ranks have already, to the same address on the remote
    ones."""
    stores.release_to(g, routes.ranks, routes.n_local, signal, epoch)
    pes = routes.ranks + 2 * routes.n_local + routes.n_remote
    for i in tl.range(0, routes.n_remote):
        tdl.putmem_signal_nbi_block(
            landing, landing, size, signal, epoch, tdl.SIGNAL_SET, tl.load(pes + i)
        )


@jit
def all_reduce_puts(
    source: tl.int64, out: tl.int64, inbox, g, routes, nodes, nbytes: tl.int64, part: tl.int64, outbox: tl.int64,
    second: tl.int64, chunk: tl.int64, chunks: tl.int32, placement, extra, DTYPE: tl.constexpr,
    ACC: tl.constexpr, OP: tl.constexpr, EPILOGUE: tl.constexpr, TILE: tl.constexpr,
    WORLD_POW2: tl.constexpr,
):  # fmt: skip
    """``[nbytes] -> [nbytes]`` on any nodes.

    Thread blocks for each chunk: n_remote that put; then n_local that store, one that sums,
    ``world - 1`` that copy.

    Args: those of ``all_reduce_direct``, and
        routes: :class:`~tdcoll.primitives.puts.Routes` to all other ranks; the local ones are
            peer-accessible.
        nodes: :class:`~tdcoll.primitives.group.Nodes`.
        outbox: where that piece of a segment begins, in bytes: a multiple of 16, at least ``part``.
        second: the same of the second inbox: at least ``outbox + part``.
    """
    chunk_index, given = puts.task(routes, chunks, routes.n_local + g.world)
    epoch, alive = start(g)
    if alive == 0:
        return
    offset = tl.cast(chunk_index, tl.int64) * chunk
    arrived = row(g, epoch, chunk_index)
    summed = row(g, epoch, chunks + chunk_index)
    if given < routes.n_local:
        entry = routes.ranks + given
        if given < 0:
            entry = routes.ranks + 2 * routes.n_local + routes.n_remote + given
        to = tl.load(entry)
        size = chunk_bytes(chunk_bytes(nbytes, part, to), chunk, chunk_index)
        piece = source + tl.cast(to, tl.int64) * part + offset
        if given < 0:
            pe = tl.load(entry + routes.n_remote)
            puts.put_from_outbox(
                to, pe, piece, inbox, g, outbox, offset, size, arrived + g.rank, epoch
            )
        else:
            mine = segment(inbox, g, epoch, g.rank) + offset
            to_delta = tl.load(inbox.deltas + to)
            stores.push(
                mine, piece, size, to_delta, arrived + g.rank, tl.load(g.deltas + to), epoch
            )
    elif given == routes.n_local:
        if (
            tdl.wait_signals(arrived, g.world, g.rank, tdl.CMP_GE, epoch, g.monitor, WORLD_POW2)
            != 0
        ):
            at = tl.cast(g.rank, tl.int64) * part
            size = chunk_bytes(chunk_bytes(nbytes, part, g.rank), chunk, chunk_index)
            landing = segment(inbox, g, epoch, g.rank) + second + offset
            aligned = (source | out | size) % 16 == 0
            sum_chunk(
                source + at, out + at, landing, inbox.deltas, inbox, g, routes, nodes, epoch, offset, size, aligned,
                (EPILOGUE, placement, extra), DTYPE, ACC, OP, TILE,
            )  # fmt: skip
            _send_sum(landing, size, g, routes, summed + g.rank, epoch)
    else:
        origin = (g.rank + given - routes.n_local) % g.world
        index = (chunks + chunk_index) * g.world + origin
        if tdl.wait_signal(summed + origin, tdl.CMP_GE, epoch, g.monitor, origin, index) != 0:
            at = tl.cast(origin, tl.int64) * part
            size = chunk_bytes(chunk_bytes(nbytes, part, origin), chunk, chunk_index)
            theirs = segment(inbox, g, epoch, origin) + second + offset
            tdl.copy_block(out + at + offset, theirs, size)
