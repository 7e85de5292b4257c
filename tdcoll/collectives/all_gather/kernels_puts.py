# SPDX-License-Identifier: Apache-2.0
"""All-gather kernels that push, in one dimension and in two.

Data flow, seen from rank r with a segment of ``nbytes`` bytes, cut into ``chunks`` chunks of
``chunk`` bytes::

    1D   source --put+signal--> inbox[slot, r] on every rank of this node
         source --> own inbox --nbi put+signal--> inbox[slot, r] on every rank of other nodes
    2D   source --stores--> inbox[slot, r] on every rank of this node, then a release of the chunk's signal
         source --> own inbox --nbi put+signal--> inbox[slot, r] on r's *rail* (same place, other nodes)
         inbox[slot, s] --stores--> the same on every rank of this node, for each s on r's rail, and a release
    both inbox[slot, s] --copy--> out[s], for every rank s, as soon as its signal is there

In 2D a segment crosses between nodes once per node pair. It needs nodes of one size, whose ranks
can store to peers.

Signal map: ``arrived[slot, chunk, s]`` on rank r is set to the epoch by the rank that delivers that
chunk of rank s: s itself, or in 2D the rank of r's node on s's rail. It is polled by those that
copy the chunk out or forward it.

Ordering: put_signal orders a chunk's bytes before its own signal, a release the block's stores
before it, and nothing else is needed, because each chunk has its own signal and a forwarder has
acquired it. Puts between nodes are nbi and need no quiet, because their source is this rank's own
inbox segment, which is written next two epochs later, when the receiver has confirmed by starting
the next call (see :mod:`tdcoll.calls.context`).

Order of thread blocks: first all that put to other nodes; then chunk by chunk those that put it
inside the node, those that forward it, and those that receive it. The chunks of a large message are
therefore copied out while later ones are on their way. Any number of resident blocks makes
progress, because a GPU starts thread blocks in grid order and none waits for one that comes after
it, on any rank.

In place (an inbox of one slot): the caller's symmetric buffer is the inbox, on both sides, and
nothing is copied. Before the first write to rank p, a sender waits for ``entered[p] >= epoch``; one
more thread block, the first of the grid, tells the others. The nbi puts are completed (quiet)
before the launch ends, because the caller may then overwrite its segment. One thread block per
chunk waits for its signals of all ranks. Signals alternate between the slots here too, because a
signal word must not be set again before the rank that polls it is done with the epoch.

Counted (``COUNTED``, in place only): segments have a capacity of ``nbytes`` bytes and carry as many
as the 64-bit integer at the beginning of each counts. Chunks are cut at the same places for any
count; those past it are signalled and empty. The count of another segment arrives with chunk 0, for
whose signal a 2D forwarder waits first.
"""

import triton.language as tl

import tdcoll.language as tdl
from tdcoll.collectives.exchange.kernels_direct import receive_chunk, used_bytes
from tdcoll.language.jit import jit
from tdcoll.primitives import puts, stores
from tdcoll.primitives.group import chunk_bytes, row, segment, start


@jit
def _n_senders(routes, inbox):
    """Return the senders per chunk to other nodes: one that copies the chunk, or in place one per
    rank."""
    if inbox.slots == 1:
        n_senders = routes.n_remote
    else:
        n_senders = (routes.n_remote > 0).to(tl.int32)
    return n_senders


@jit
def _task(chunks, n_senders, n_pushes, inbox, g):
    """Return ``(program, chunk_index, given)``: the chunk of this thread block, and its task.

    ``program`` counts from -1, which in place is the announcer. ``given`` is negative if the thread
    block sends to other nodes; then come ``n_pushes`` that put inside this node; then receivers.
    """
    program = tl.program_id(0)
    per_chunk = n_pushes
    if inbox.slots == 1:
        program -= 1
        per_chunk += 1
    else:
        per_chunk += g.world
    inside = program - n_senders * chunks
    if inside < 0:
        chunk_index = program % chunks
        given = program // chunks - n_senders
    else:
        chunk_index = inside // per_chunk
        given = inside % per_chunk
    return program, chunk_index, given


@jit
def _receive(
    i, chunk_index, source, out, out_stride, inbox, g, nbytes, chunk, epoch, BLOCK: tl.constexpr
):
    """Copy out the chunk of the i-th rank after this one, or, if in place, wait for that chunk of
    all ranks."""
    signals = row(g, epoch, chunk_index)
    if inbox.slots == 1:
        tdl.wait_signals(signals, g.world, g.rank, tdl.CMP_GE, epoch, g.monitor, BLOCK)
    else:
        src_rank = (g.rank + i) % g.world
        offset = tl.cast(chunk_index, tl.int64) * chunk
        size = chunk_bytes(nbytes, chunk, chunk_index)
        receive_chunk(src_rank, chunk_index, source, out, out_stride, inbox, g, offset, size, epoch)


@jit
def all_gather_1d(
    source: tl.int64, out: tl.int64, inbox, g, routes, out_stride: tl.int64, nbytes: tl.int64, chunk: tl.int64,
    chunks: tl.int32, BLOCK: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """``[nbytes] -> [world * nbytes]``: every rank puts its segment to every other.

    Thread blocks: ``chunks`` times one remote sender if n_remote > 0, then ``chunks`` times
    (n_local pushes, world receivers); in place an announcer first, n_remote remote senders per
    chunk, and one receiver per chunk.

    Args: those of ``exchange_direct``, and
        routes: :class:`~tdcoll.primitives.puts.Routes` to all other ranks.
        chunks: number of chunks.
        BLOCK: a power of two of at least ``world``.
    """
    n_senders = _n_senders(routes, inbox)
    program, chunk_index, given = _task(chunks, n_senders, routes.n_local, inbox, g)
    # Read before the epoch is: both take their time.
    mate = tl.minimum(tl.maximum(given, 0), tl.maximum(routes.n_local - 1, 0))
    peer = tl.load(routes.ranks + mate)
    pe = tl.load(routes.ranks + routes.n_local + mate)
    epoch, alive = start(g)
    if alive == 0:
        return
    if program < 0:
        puts.signal_entered(g, routes, epoch)
    else:
        size = chunk_bytes(used_bytes(source, nbytes, COUNTED), chunk, chunk_index)
        offset = tl.cast(chunk_index, tl.int64) * chunk
        if given < routes.n_local:
            mine = segment(inbox, g, epoch, g.rank) + offset
            signal = row(g, epoch, chunk_index) + g.rank
            if given >= 0:
                if stores.may_write(g, inbox, peer, epoch) != 0:
                    puts.push(mine, source + offset, size, signal, epoch, pe)
            else:
                i = given + n_senders
                puts.push_remote(i, routes, g, inbox, mine, source + offset, size, signal, epoch)
        else:
            _receive(
                given - routes.n_local,
                chunk_index,
                source,
                out,
                out_stride,
                inbox,
                g,
                nbytes,
                chunk,
                epoch,
                BLOCK,
            )


@jit
def all_gather_2d(
    source: tl.int64, out: tl.int64, inbox, g, routes, out_stride: tl.int64, nbytes: tl.int64, chunk: tl.int64,
    chunks: tl.int32, BLOCK: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """``[nbytes] -> [world * nbytes]``: between nodes along rails, then forwarded inside each node.

    Thread blocks: ``chunks`` times one rail sender if n_remote > 0, then ``chunks`` times (n_local
    pushes, n_remote
    * n_local forwarders, world receivers); in place an announcer first, n_remote rail senders per
    chunk, and one receiver per chunk. Every node has ``n_local + 1`` ranks.

    Args: those of :func:`all_gather_1d`, except
        routes: names as remote ranks only this rank's rail: one per other node.
    """
    n_senders = _n_senders(routes, inbox)
    n_local = routes.n_local
    n_forwards = routes.n_remote * n_local
    program, chunk_index, given = _task(chunks, n_senders, n_local + n_forwards, inbox, g)
    # Read before the epoch is: both take their time.
    mate = tl.maximum(given, 0) % tl.maximum(n_local, 1)
    peer = tl.load(routes.ranks + mate)
    epoch, alive = start(g)
    if alive == 0:
        return
    if program < 0:
        puts.signal_entered(g, routes, epoch)
    else:
        size = chunk_bytes(used_bytes(source, nbytes, COUNTED), chunk, chunk_index)
        offset = tl.cast(chunk_index, tl.int64) * chunk
        signals = row(g, epoch, chunk_index)
        if given < 0:
            mine = segment(inbox, g, epoch, g.rank) + offset
            i = given + n_senders
            puts.push_remote(
                i, routes, g, inbox, mine, source + offset, size, signals + g.rank, epoch
            )
        elif given < n_local + n_forwards:
            # Its own segment, and those of its rail, as they arrive.
            origin = g.rank
            held = source + offset
            arrived = tl.cast(1, tl.int32)
            if given >= n_local:
                origin = tl.load(routes.ranks + 2 * n_local + given // n_local - 1)
                landed = segment(inbox, g, epoch, origin)
                held = landed + offset
                if COUNTED:
                    first = row(g, epoch, 0) + origin
                    arrived = tdl.wait_signal(first, tdl.CMP_GE, epoch, g.monitor, origin, origin)
                if arrived != 0:
                    index = chunk_index * g.world + origin
                    arrived = tdl.wait_signal(
                        signals + origin, tdl.CMP_GE, epoch, g.monitor, origin, index
                    )
                if arrived != 0:
                    size = chunk_bytes(used_bytes(landed, nbytes, COUNTED), chunk, chunk_index)
            if arrived != 0:
                target = segment(inbox, g, epoch, origin) + offset
                if stores.may_write(g, inbox, peer, epoch) != 0:
                    delta, signal_delta = tl.load(inbox.deltas + peer), tl.load(g.deltas + peer)
                    stores.push(target, held, size, delta, signals + origin, signal_delta, epoch)
        else:
            i = given - n_local - n_forwards
            _receive(i, chunk_index, source, out, out_stride, inbox, g, nbytes, chunk, epoch, BLOCK)
