# SPDX-License-Identifier: Apache-2.0
"""All-reduce over nodes by rails: sums inside each node, node sums between them, results inside
again.

Scope: several nodes with the same number of ranks each, which can store to each other inside a
node. A rail is the ranks that have the same place on their nodes. Each part crosses between two
nodes once, as a sum over a whole node; by ``kernels_puts`` it crosses once for every rank. The node
sums travel in the accumulator's type, for the same bits.

Data flow, seen from rank r, the k-th of its node. The data is cut into a part of ``part`` bytes for
each place, the last ones perhaps shorter or empty, and each part into ``chunks`` chunks. A segment
of the inbox has two pieces. The first holds a part in the accumulator's type::

    source[j] --stores--> first piece of inbox[slot, r] on the j-th rank of the node, for all j but k; a release
    first pieces of the node's ranks, source[k] --sum in rank order--> first piece of own inbox[slot, r]
                                    --nbi put+signal--> first piece of inbox[slot, r] on the other ranks of the rail
    first pieces of the rail's ranks --sum in node order--> out[k], and by stores --> second piece of inbox[slot, r] on
                                    the other ranks of the node; a release each
    second piece of inbox[slot, j-th rank] --> out[j], for all j but k

Signal map: ``arrived[slot, chunk, s]`` on rank r is set to the epoch by rank s: of the node, when
its chunk for rank r is there; of the rail, when its node's sum is. ``arrived[slot, chunks + chunk,
s]`` is set by rank s of the node when the result is there. The first are polled by those that sum
the chunk, the second by those that copy it out.

Ordering: that of ``kernels_puts``. Reuse of a slot: a rank that has the results of epoch e from all
ranks of its node knows that all ranks have started e, because each of these has heard from its
rail, and each of a rail from its node.

Order of thread blocks: chunk by chunk; in a chunk those that send inside the node, the one that
sums, and those that copy out. The one that sums waits for senders of its chunk; then it puts before
it waits for those that sum this chunk on its rail. Any number of resident blocks makes progress,
because each waits only for thread blocks that come before its own number on every rank, or for
those of its own number when they have put.

In place: as in ``kernels_direct``.
"""

import triton.language as tl

import tdcoll.language as tdl
from tdcoll.language.jit import jit
from tdcoll.primitives import elements, stores
from tdcoll.primitives.epilogue import result_of
from tdcoll.primitives.group import chunk_bytes, row, segment, start
from tdcoll.primitives.reduce import accumulate
from tdcoll.primitives.sums import sum_of_node


@jit
def _sum_node(
    own, inbox, g, nodes, epoch, offset, partial, size,
    DTYPE: tl.constexpr, ACC: tl.constexpr, OP: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Sum the chunk at ``offset`` of all ranks of this node to ``partial``, in the accumulator's
    type."""
    count = elements.count(size, DTYPE, ALIGNED)
    for begin in tl.range(0, count, TILE):
        index = begin + tl.arange(0, TILE)
        mask = index < count
        sum = sum_of_node(
            nodes.node, own, inbox, g, nodes, epoch, offset, index, mask, DTYPE, ACC, OP, ALIGNED
        )
        tl.store(elements.pointer(partial, ACC, True) + index, sum, mask=mask)


@jit
def _sum_rail(
    out, landing, inbox, g, routes, nodes, place, epoch, offset, partial_offset, size, epilogue,
    DTYPE: tl.constexpr, ACC: tl.constexpr, OP: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Sum the nodes' sums at ``partial_offset`` to ``out``, and to ``landing`` on the other ranks
    of this node."""
    count = elements.count(size, DTYPE, ALIGNED)
    for begin in tl.range(0, count, TILE):
        index = begin + tl.arange(0, TILE)
        mask = index < count
        total = tl.zeros([TILE], ACC)
        for node in tl.range(0, nodes.n_nodes):
            r = tl.load(nodes.ranks + tl.load(nodes.begins + node) + place)
            at = segment(inbox, g, epoch, r) + partial_offset
            sum = tl.load(elements.pointer(at, ACC, True) + index, mask=mask, other=0)
            total = accumulate(total, sum, node == 0, OP)
        result = result_of(total, g.world, out + offset, index, mask, epilogue, DTYPE, OP)
        for i in tl.range(0, routes.n_local):
            delta = tl.load(inbox.deltas + tl.load(routes.ranks + i))
            tl.store(elements.pointer(landing + delta, DTYPE, ALIGNED) + index, result, mask=mask)
        tl.store(elements.pointer(out + offset, DTYPE, ALIGNED) + index, result, mask=mask)


@jit
def _wait_for(ranks, count, signals, first_index, g, epoch):
    """Return 1 when all of ``count`` ranks have set their signals; 0 if one did not in time."""
    came = tl.cast(1, tl.int32)
    for i in tl.range(0, count):
        r = tl.load(ranks + i)
        came = came & tdl.wait_signal(signals + r, tdl.CMP_GE, epoch, g.monitor, r, first_index + r)
    return came


@jit
def all_reduce_nodes(
    source: tl.int64, out: tl.int64, inbox, g, routes, nodes, place: tl.int32, nbytes: tl.int64, part: tl.int64,
    second: tl.int64, chunk: tl.int64, chunks: tl.int32, placement, extra, DTYPE: tl.constexpr,
    ACC: tl.constexpr, OP: tl.constexpr, EPILOGUE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """``[nbytes] -> [nbytes]`` on nodes of as many ranks each.

    Thread blocks: for each chunk n_local that send, one that sums, and n_local that copy out.

    Args: those of ``all_reduce_direct``, and
        routes: :class:`~tdcoll.primitives.puts.Routes` to the other ranks of the node and, remote
            ones, of the rail.
        nodes: :class:`~tdcoll.primitives.group.Nodes`.
        place: of this rank on its node.
        part: bytes of a part for a place, a multiple of 16.
        second: at least ``part``, times the size of an accumulator's element over that of
            ``DTYPE``.
    """
    wider: tl.constexpr = ACC.primitive_bitwidth // DTYPE.primitive_bitwidth
    per_chunk = 2 * routes.n_local + 1
    chunk_index = tl.program_id(0) // per_chunk
    given = tl.program_id(0) % per_chunk
    epoch, alive = start(g)
    if alive == 0:
        return
    offset = tl.cast(chunk_index, tl.int64) * chunk
    arrived = row(g, epoch, chunk_index)
    done = row(g, epoch, chunks + chunk_index)
    index = chunk_index * g.world
    mates = tl.load(nodes.begins + nodes.node)
    if given < routes.n_local:
        to_place = (place + 1 + given) % (routes.n_local + 1)
        to = tl.load(nodes.ranks + mates + to_place)
        at = tl.cast(to_place, tl.int64) * part
        size = chunk_bytes(chunk_bytes(nbytes, part, to_place), chunk, chunk_index)
        mine = segment(inbox, g, epoch, g.rank) + offset
        to_delta = tl.load(inbox.deltas + to)
        to_signal_delta = tl.load(g.deltas + to)
        stores.push(
            mine, source + at + offset, size, to_delta, arrived + g.rank, to_signal_delta, epoch
        )
    elif given == routes.n_local:
        at = tl.cast(place, tl.int64) * part
        size = chunk_bytes(chunk_bytes(nbytes, part, place), chunk, chunk_index)
        mine = segment(inbox, g, epoch, g.rank)
        partial = mine + wider * offset
        landing = mine + second + offset
        aligned = (source | out | size) % 16 == 0
        if _wait_for(routes.ranks, routes.n_local, arrived, index, g, epoch) != 0:
            if aligned:
                _sum_node(
                    source + at,
                    inbox,
                    g,
                    nodes,
                    epoch,
                    offset,
                    partial,
                    size,
                    DTYPE,
                    ACC,
                    OP,
                    True,
                    TILE,
                )
            else:
                _sum_node(
                    source + at,
                    inbox,
                    g,
                    nodes,
                    epoch,
                    offset,
                    partial,
                    size,
                    DTYPE,
                    ACC,
                    OP,
                    False,
                    TILE,
                )
            tdl.syncthreads()
            rail = routes.ranks + 2 * routes.n_local
            for i in tl.range(0, routes.n_remote):
                pe = tl.load(rail + routes.n_remote + i)
                signal = arrived + g.rank
                tdl.putmem_signal_nbi_block(
                    partial, partial, wider * size, signal, epoch, tdl.SIGNAL_SET, pe
                )
            if _wait_for(rail, routes.n_remote, arrived, index, g, epoch) != 0:
                if aligned:
                    _sum_rail(
                        out + at, landing, inbox, g, routes, nodes, place, epoch, offset, wider * offset, size,
                        (EPILOGUE, placement, extra), DTYPE, ACC, OP, True, TILE,
                    )  # fmt: skip
                else:
                    _sum_rail(
                        out + at, landing, inbox, g, routes, nodes, place, epoch, offset, wider * offset, size,
                        (EPILOGUE, placement, extra), DTYPE, ACC, OP, False, TILE,
                    )  # fmt: skip
                stores.release_to(g, routes.ranks, routes.n_local, done + g.rank, epoch)
    else:
        from_place = (place + given - routes.n_local) % (routes.n_local + 1)
        origin = tl.load(nodes.ranks + mates + from_place)
        where = (chunks + chunk_index) * g.world + origin
        if tdl.wait_signal(done + origin, tdl.CMP_GE, epoch, g.monitor, origin, where) != 0:
            at = tl.cast(from_place, tl.int64) * part
            size = chunk_bytes(chunk_bytes(nbytes, part, from_place), chunk, chunk_index)
            theirs = segment(inbox, g, epoch, origin) + second + offset
            tdl.copy_block(out + at + offset, theirs, size)
