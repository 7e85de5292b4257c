# SPDX-License-Identifier: Apache-2.0
"""All-to-all over any nodes: every rank sends its segment for rank p to rank p.

Scope: ranks on several nodes, any number on each; also one node whose ranks can't store to each other's memory. Every
segment crosses between nodes by itself, which is the lower bound. (To collect a node's segments for a rail
first would make fewer and larger puts, at the price of two more hops inside the nodes.)

Data flow, seen from rank r, whose ``source`` has a segment of ``nbytes`` bytes for each rank, cut into chunks. A
segment of the inbox has two halves: the *inbox*, for the rank whose segment it is to fill, and the *outbox*, from
which this rank puts::

    source[p] --stores--> inbox of inbox[slot, r] on rank p, then a release of the chunk's signal    p can be stored to
    source[p] --> outbox of own inbox[slot, p] --nbi put+signal--> inbox of inbox[slot, r] on p             all others
    inbox of inbox[slot, s] --copy--> out[s], for every other rank s, once its signal is there;  source[r] --> out[r]

Signal map: ``arrived[slot, chunk, s]`` on rank r is set to the epoch by rank s, and polled by the thread block that
copies that chunk out.

Ordering: that of :mod:`tdcoll.primitives.stores` and of :func:`tdcoll.primitives.puts.put_from_outbox`, which has the
reason why the outbox may be reused; the receiver acquires the signal.

Order of thread blocks: first all that put; then chunk by chunk those that store, and those that receive. A sender
doesn't wait. Any number of resident blocks makes progress, because a receiver waits for a sender of its chunk, which
comes before the receivers of that chunk on every rank.
"""

import triton.language as tl

from tdcoll.collectives.exchange.kernels_direct import receive_chunk
from tdcoll.language.jit import jit
from tdcoll.primitives import puts, stores
from tdcoll.primitives.group import chunk_bytes, row, segment, start


@jit
def all_to_all_puts(
    source: tl.int64, out: tl.int64, inbox, g, routes, source_stride: tl.int64, out_stride: tl.int64,
    nbytes: tl.int64, outbox: tl.int64, chunk: tl.int64, chunks: tl.int32,
):  # fmt: skip
    """``[world, nbytes] -> [world, nbytes]`` on any nodes.

    Thread blocks: ``chunks`` times n_remote that put, then ``chunks`` times (n_local that store, ``world`` that
    receive).

    Args: those of ``exchange_direct``, and
        inbox: its segments have at least ``outbox + nbytes`` bytes.
        routes: :class:`~tdcoll.primitives.puts.Routes` to all other ranks; the local ones are peer-accessible.
        outbox: where the second half of a segment begins, in bytes: a multiple of 16, and at least ``nbytes``.
        chunks: number of chunks.
    """
    chunk_index, given = puts.task(routes, chunks, routes.n_local + g.world)
    epoch, alive = start(g)
    if alive == 0:
        return
    offset = tl.cast(chunk_index, tl.int64) * chunk
    size = chunk_bytes(nbytes, chunk, chunk_index)
    signal = row(g, epoch, chunk_index) + g.rank
    if given < 0:
        remote = routes.ranks + 2 * routes.n_local + routes.n_remote + given
        to = tl.load(remote)
        part = source + tl.cast(to, tl.int64) * source_stride + offset
        pe = tl.load(remote + routes.n_remote)
        puts.put_from_outbox(to, pe, part, inbox, g, outbox, offset, size, signal, epoch)
    elif given < routes.n_local:
        to = tl.load(routes.ranks + given)
        part = source + tl.cast(to, tl.int64) * source_stride + offset
        mine = segment(inbox, g, epoch, g.rank) + offset
        stores.push(mine, part, size, tl.load(inbox.deltas + to), signal, tl.load(g.deltas + to), epoch)
    else:
        own = source + tl.cast(g.rank, tl.int64) * source_stride
        frm = (g.rank + given - routes.n_local) % g.world
        receive_chunk(frm, chunk_index, own, out, out_stride, inbox, g, offset, size, epoch)
