# SPDX-License-Identifier: Apache-2.0
"""All-to-all over any nodes: every rank sends its segment for rank p to rank p.

Scope, ways to send, signals, ordering and order of thread blocks are those of
:mod:`tdcoll.collectives.reduce_scatter.kernels_puts`, with receivers in the place of reducers.
Every segment crosses between nodes by itself, which is the lower bound. (To collect a node's
segments for a rail first would make fewer and larger puts, at the price of two more hops inside the
nodes.) ::

    source[p] --stores, or by the outbox--> inbox of inbox[slot, r] on rank p
    inbox of inbox[slot, s] --copy--> out[s], for every other rank s, once its signal is there;  source[r] --> out[r]
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

    Thread blocks: ``chunks`` times n_remote that put, then ``chunks`` times (n_local that store,
    ``world`` receivers).

    Args: those of ``exchange_direct``, and
        inbox: its segments have at least ``outbox + nbytes`` bytes.
        routes: :class:`~tdcoll.primitives.puts.Routes` to all other ranks; the local ones are
            peer-accessible.
        outbox: where the second half of a segment begins, in bytes: a multiple of 16, and at least
            ``nbytes``.
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
        stores.push(
            mine, part, size, tl.load(inbox.deltas + to), signal, tl.load(g.deltas + to), epoch
        )
    else:
        own = source + tl.cast(g.rank, tl.int64) * source_stride
        src_rank = (g.rank + given - routes.n_local) % g.world
        receive_chunk(src_rank, chunk_index, own, out, out_stride, inbox, g, offset, size, epoch)
