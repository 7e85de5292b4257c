# SPDX-License-Identifier: Apache-2.0
"""Reduce-scatter over any nodes, in one step: every rank sends its part for rank p to rank p.

Scope: ranks on several nodes, any number on each; also one node whose ranks cannot store to each
other's memory. Every part crosses between nodes by itself. (To sum inside a node first would send
fewer bytes between nodes, in two steps.)

Data flow, seen from rank r, whose ``source`` has a part of ``nbytes`` bytes for each rank, cut into
``chunks`` chunks. A segment of the inbox has two halves: the *inbox*, for the rank whose segment it
is to fill, and the *outbox*, from which this rank puts::

    source[p] --stores--> inbox of inbox[slot, r] on rank p, then a release of the chunk's signal    p can be stored to
    source[p] --> outbox of own inbox[slot, p] --nbi put+signal--> inbox of inbox[slot, r] on p             all others
    inboxes and source[r] --sum in rank order inside each node--> node sums --sum in node order--> out

Signal map: ``arrived[slot, chunk, s]`` on rank r is set to the epoch by rank s, and polled by the
thread blocks that reduce that chunk.

Ordering: that of :mod:`tdcoll.primitives.stores` and of
:func:`tdcoll.primitives.puts.put_from_outbox`, which has the reason why the outbox may be reused;
the reducer acquires the signals.

Order of thread blocks: first all that put; then chunk by chunk those that store, and those that
reduce. A sender doesn't wait. Any number of resident blocks makes progress, because a reducer waits
for senders of its chunk, which on every rank come before the reducers of that chunk. In place: as
in ``kernels_direct``.
"""

import triton.language as tl

import tdcoll.language as tdl
from tdcoll.language.jit import jit
from tdcoll.primitives import puts, stores
from tdcoll.primitives.group import chunk_bytes, row, segment, start
from tdcoll.primitives.sums import reduce_chunk


@jit
def reduce_scatter_puts(
    source: tl.int64, out: tl.int64, source_stride: tl.int64, inbox, g, routes, nodes, nbytes: tl.int64,
    outbox: tl.int64, chunk: tl.int64, chunks: tl.int32, reducers: tl.int32, placement, extra,
    DTYPE: tl.constexpr, ACC: tl.constexpr, OP: tl.constexpr, EPILOGUE: tl.constexpr,
    TILE: tl.constexpr, WORLD_POW2: tl.constexpr,
):  # fmt: skip
    """``[world, nbytes] -> [nbytes]`` on any nodes.

    Thread blocks: ``chunks`` times n_remote that put, then ``chunks`` times (n_local that store,
    ``reducers``).

    Args: those of ``reduce_scatter_direct``, and
        inbox: its segments have at least ``outbox + nbytes`` bytes.
        routes: :class:`~tdcoll.primitives.puts.Routes` to all other ranks; the local ones are
            peer-accessible.
        nodes: :class:`~tdcoll.primitives.group.Nodes`.
        outbox: where the second half of a segment begins, in bytes: a multiple of 16, and at least
            ``nbytes``.
        chunks: number of chunks.
    """
    chunk_index, given = puts.task(routes, chunks, routes.n_local + reducers)
    epoch, alive = start(g)
    if alive == 0:
        return
    offset = tl.cast(chunk_index, tl.int64) * chunk
    size = chunk_bytes(nbytes, chunk, chunk_index)
    signals = row(g, epoch, chunk_index)
    if given < 0:
        remote = routes.ranks + 2 * routes.n_local + routes.n_remote + given
        to = tl.load(remote)
        pe = tl.load(remote + routes.n_remote)
        part = source + tl.cast(to, tl.int64) * source_stride + offset
        puts.put_from_outbox(to, pe, part, inbox, g, outbox, offset, size, signals + g.rank, epoch)
    elif given < routes.n_local:
        to = tl.load(routes.ranks + given)
        mine = segment(inbox, g, epoch, g.rank) + offset
        part = source + tl.cast(to, tl.int64) * source_stride + offset
        to_delta = tl.load(inbox.deltas + to)
        stores.push(mine, part, size, to_delta, signals + g.rank, tl.load(g.deltas + to), epoch)
    elif tdl.wait_signals(signals, g.world, g.rank, tdl.CMP_GE, epoch, g.monitor, WORLD_POW2) != 0:
        own = source + tl.cast(g.rank, tl.int64) * source_stride
        worker = given - routes.n_local
        aligned = (source | source_stride | out | nbytes) % 16 == 0
        reduce_chunk(
            worker,
            reducers,
            own,
            out,
            offset,
            size,
            inbox,
            g,
            nodes,
            epoch,
            aligned,
            (EPILOGUE, placement, extra),
            DTYPE,
            ACC,
            OP,
            TILE,
        )
