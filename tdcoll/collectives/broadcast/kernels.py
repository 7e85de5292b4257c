# SPDX-License-Identifier: Apache-2.0
"""Broadcast: the root's bytes to every rank, by LL, by stores, and by puts to other nodes.

Scope: any root, dtype and size. ``broadcast_ll``, ``broadcast_direct`` and ``broadcast_loop``, for
few thread blocks, are for one node, and ``broadcast_puts`` for any nodes. The root sends everything
itself in one hop, ``world - 1`` times ``nbytes``. Trees, rings, and a scatter followed by an
all-gather send less from the root, but need more hops, so they pay off only for large messages of
several ranks.

Data flow, seen from rank r. The root sends its ``nbytes`` bytes in chunks; every other rank sends a
*notice*, a signal without data::

    r is the root   source --stores--> inbox[slot, r] on every rank p of this node, then a release of the chunk's signal
                    source --> own inbox[slot, r] --nbi put+signal--> the same on every rank of other nodes
                    source --copy--> out
    all others      notice --> every other rank, the root included
                    inbox[slot, root] --copy--> out, as soon as the chunk's signal is there

Signal map: ``arrived[slot, chunk, root]`` on rank r is set to the epoch by the root, and polled by
the thread block that copies that chunk out. ``arrived[slot, 0, s]`` is set by each other rank s as
its notice. The thread block that receives chunk 0 polls it. With LL a notice is one word without
data, ``words[slot, s]``.

Ordering: those of :mod:`tdcoll.primitives.stores`, :mod:`tdcoll.primitives.ll` and of a put with a
signal; each chunk has its own signal. A notice orders no data.

Reuse of memory: every rank waits for the signals of all others, so a call that is complete here has
been started everywhere. A root of epoch e + 2 therefore finds that each rank has started e + 1, and
has copied out what it received in e. The same holds for the next call if that has another root, or
is another collective. Without notices the root would wait for nobody, and overwrite a slot that a
slow rank still reads. The nbi puts read the root's own inbox segment, which the root writes next in
e + 2, when all receivers have the data of e.

Order of thread blocks: ``broadcast_ll`` has the order of ``exchange_ll``: thread block i sends and
then waits for thread block i of another rank. In ``broadcast_loop`` thread block i of the root
sends the chunks that thread block i of the others receives; thread block 0 sends the notices first
and waits for those of other ranks last. The other kernels go chunk by chunk: those that send the
chunk, which wait for nothing, then the one that receives it; ``broadcast_puts`` begins with those
that put to other nodes. Any number of resident blocks makes progress.
"""

import triton.language as tl

import tdcoll.language as tdl
from tdcoll.collectives.exchange.kernels_direct import receive_chunk
from tdcoll.language.jit import jit
from tdcoll.primitives import ll, puts, stores
from tdcoll.primitives.group import chunk_bytes, in_stream_order, row, segment, start


@jit
def broadcast_ll(
    source: tl.int64, out: tl.int64, words, g, root: tl.int32, nbytes: tl.int64, blocks: tl.int32,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """``[nbytes] -> [nbytes]`` inside one node. Thread blocks: ``world * blocks``.

    Args:
        source: the root's data. Other ranks don't read it.
        out: the result, any memory of this GPU; may be ``source``.
        words, g, blocks: as for ``exchange_ll``.
        root: group rank.
    """
    in_stream_order()
    block = tl.program_id(0) % blocks
    step = tl.program_id(0) // blocks
    to = (g.rank + step) % g.world
    src_rank = (g.rank - step + g.world) % g.world
    delta = tl.load(words.deltas + to)
    size = tl.cast(nbytes, tl.int32)
    sent_bytes = tl.where(g.rank == root, size, 0)
    received_bytes = tl.where(src_rank == root, size, 0)
    index = block * BLOCK + tl.arange(0, BLOCK)
    parts = ll.load(source, index, sent_bytes)
    epoch, alive = start(g)
    if alive == 0:
        return
    parts = ll.repair(source, index, sent_bytes, parts)
    sent = ll.carry(index, sent_bytes)  # one word without data is the notice
    if step == 0:
        if out != source:
            ll.store(out, index, sent_bytes, parts, sent)
    else:
        ll.send(g, words, g.rank, delta, index, parts, epoch, sent)
        mask = ll.carry(index, received_bytes)
        first, second, third, arrived = ll.receive(g, words, src_rank, index, epoch, mask)
        ll.store(out, index, received_bytes, (first, second, third), arrived != 0)


@jit
def _store_to(to, chunk_index, source, inbox, g, root, offset, size, epoch):
    """Store a chunk of the root to rank ``to``; on other ranks send the notice with chunk 0."""
    signal = row(g, epoch, chunk_index) + g.rank
    signal_delta = tl.load(g.deltas + to)
    if g.rank == root:
        mine = segment(inbox, g, epoch, g.rank) + offset
        delta = tl.load(inbox.deltas + to)
        stores.push(mine, source + offset, size, delta, signal, signal_delta, epoch)
    elif chunk_index == 0:
        stores.release(signal, signal_delta, epoch)


@jit
def _receive(
    chunk_index, source, out, inbox, g, root, offset, size, epoch, WORLD_POW2: tl.constexpr
):
    """Copy a chunk to ``out``, on the root its own; with chunk 0 wait for all other ranks."""
    if (g.rank != root) | (out != source):
        receive_chunk(root, chunk_index, source, out, 0, inbox, g, offset, size, epoch)
    if chunk_index == 0:
        signals = row(g, epoch, 0)
        tdl.wait_signals(signals, g.world, g.rank, tdl.CMP_GE, epoch, g.monitor, WORLD_POW2)


@jit
def broadcast_direct(
    source: tl.int64, out: tl.int64, inbox, g, root: tl.int32, nbytes: tl.int64, chunk: tl.int64,
    WORLD_POW2: tl.constexpr,
):  # fmt: skip
    """``[nbytes] -> [nbytes]`` inside one node. Thread blocks: ``world`` for each chunk.

    Args: those of :func:`broadcast_ll`, and
        inbox, chunk: as for ``exchange_direct``.
        WORLD_POW2: a power of two of at least ``world``.
    """
    in_stream_order()
    chunk_index = tl.program_id(0) // g.world
    step = tl.program_id(0) % g.world + 1
    epoch, alive = start(g)
    if alive == 0:
        return
    offset = tl.cast(chunk_index, tl.int64) * chunk
    size = chunk_bytes(nbytes, chunk, chunk_index)
    if step < g.world:
        to = (g.rank + step) % g.world
        _store_to(to, chunk_index, source, inbox, g, root, offset, size, epoch)
    else:
        _receive(chunk_index, source, out, inbox, g, root, offset, size, epoch, WORLD_POW2)


@jit
def broadcast_loop(
    source: tl.int64, out: tl.int64, inbox, g, root: tl.int32, nbytes: tl.int64, chunk: tl.int64,
    chunks: tl.int32, WORDS: tl.constexpr, WORLD_POW2: tl.constexpr,
):  # fmt: skip
    """``[nbytes] -> [nbytes]`` inside one node. Any number of thread blocks.

    Args: those of :func:`broadcast_direct`, and
        chunks: number of chunks.
        WORDS: 32-bit words of a tile, which is read once and stored to all ranks.
    """
    in_stream_order()
    first = tl.program_id(0)
    epoch, alive = start(g)
    if alive == 0:
        return
    if (g.rank != root) & (first == 0):
        stores.release_to_all(g, row(g, epoch, 0) + g.rank, epoch)
    for chunk_index in tl.range(first, chunks, tl.num_programs(0), disable_licm=True):
        offset = tl.cast(chunk_index, tl.int64) * chunk
        size = chunk_bytes(nbytes, chunk, chunk_index)
        if g.rank == root:
            mine = segment(inbox, g, epoch, g.rank) + offset
            signal = row(g, epoch, chunk_index) + g.rank
            given = source + offset
            stores.push_to_all(g, inbox, mine, out + offset, given, size, signal, epoch, WORDS)
        else:
            receive_chunk(root, chunk_index, source, out, 0, inbox, g, offset, size, epoch)
    if first == 0:
        signals = row(g, epoch, 0)
        tdl.wait_signals(signals, g.world, g.rank, tdl.CMP_GE, epoch, g.monitor, WORLD_POW2)


@jit
def broadcast_puts(
    source: tl.int64, out: tl.int64, inbox, g, routes, root: tl.int32, nbytes: tl.int64,
    chunk: tl.int64, chunks: tl.int32, WORLD_POW2: tl.constexpr,
):  # fmt: skip
    """``[nbytes] -> [nbytes]`` on any nodes. Thread blocks: ``chunks`` that put if there are remote
    ranks, then ``chunks`` times (n_local that store, one receiver).

    Args: those of :func:`broadcast_direct`, and
        routes: :class:`~tdcoll.primitives.puts.Routes` to all other ranks; the local ones are
            peer-accessible.
        chunks: number of chunks.
    """
    putters = tl.where(routes.n_remote > 0, chunks, 0)
    inside = tl.program_id(0) - putters
    chunk_index = tl.program_id(0)
    if inside >= 0:
        chunk_index = inside // (routes.n_local + 1)
    task = inside % (routes.n_local + 1)
    epoch, alive = start(g)
    if alive == 0:
        return
    offset = tl.cast(chunk_index, tl.int64) * chunk
    size = chunk_bytes(nbytes, chunk, chunk_index)
    if inside < 0:
        signal = row(g, epoch, chunk_index) + g.rank
        if g.rank == root:
            mine = segment(inbox, g, epoch, g.rank) + offset
            puts.push_remote(0, routes, g, inbox, mine, source + offset, size, signal, epoch)
        elif chunk_index == 0:
            pes = routes.ranks + 2 * routes.n_local + routes.n_remote
            for i in tl.range(0, routes.n_remote, disable_licm=True):
                tdl.signal_block(signal, epoch, tdl.SIGNAL_SET, tl.load(pes + i))
    elif task < routes.n_local:
        to = tl.load(routes.ranks + task)
        _store_to(to, chunk_index, source, inbox, g, root, offset, size, epoch)
    else:
        _receive(chunk_index, source, out, inbox, g, root, offset, size, epoch, WORLD_POW2)
