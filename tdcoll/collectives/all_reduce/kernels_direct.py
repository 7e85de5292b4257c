# SPDX-License-Identifier: Apache-2.0
"""All-reduce inside one node by stores, in two steps without a barrier between them.

Scope: one node whose ranks can store to each other's memory; any dtype that can be reduced;
messages that are bound by bandwidth. Every rank sends and receives ``2 * (world - 1) / world``
times the data, which is the lower bound. Each chunk is summed and sent on when its parts are there.
NVSHMEM's device code is not needed.

Data flow, seen from rank r. The data is cut into a part of ``part`` bytes for each rank, the last
ones perhaps shorter or empty, and each part into ``chunks`` chunks. A segment of the inbox has two
halves::

    source[p] --stores--> first half of inbox[slot, r] on rank p, for every other rank p; then the chunk's signal
    first halves of inbox[slot, 0], ..., source[r], ... --sum in rank order--> out[r], and by the same stores
                                --> second half of inbox[slot, r] on every other rank; then the chunk's second signal
    second half of inbox[slot, p] --> out[p], for every other rank p

Signal map: ``arrived[slot, chunk, s]`` on rank r is set to the epoch by rank s when its chunk for
rank r is there, and polled by the thread block that sums the chunk. ``arrived[slot, chunks + chunk,
s]`` is set by rank s when its sum is there, and polled by the thread block that copies it out.

Ordering: that of :mod:`tdcoll.primitives.stores`. Reuse of a slot follows from
:mod:`tdcoll.calls.context`: when a rank has the second signals of epoch e from all ranks, all have
started e.

Order of thread blocks: chunk by chunk; in a chunk first those that send, then the one that sums,
then those that copy out. A sender doesn't wait. Any number of resident blocks makes progress,
because each waits only for thread blocks that come before its own number on every rank.

In place: ``out`` may be ``source``. ``out[r]`` is written by the thread block that has read
``source[r]``. ``out[p]`` is written when the sum of that chunk has come back from rank p, so its
sender here had read it.

Without a copy (``ZERO_COPY``): ``out`` is symmetric, and the second step stores sums into it on
every rank. Nothing is copied out, and a segment has the first half only. ::

    first halves of inbox[slot, 0], ..., source[r], ... --sum in rank order--> out[r] here, and by the same stores
                                --> out[r] on every other rank; then the chunk's second signal

No rank has to announce that peers may write to it, because a chunk is summed when all ranks have
sent their parts of it, so all have begun the call, and their earlier work, which may have used
``out``, is over. The last thread block of a chunk waits for all second signals, and thereby
acquires the stores of other ranks.

Bits: those of every other algorithm, see ``kernels_words``.
"""

import triton.language as tl

import tdcoll.language as tdl
from tdcoll.language.jit import jit
from tdcoll.primitives import elements, stores
from tdcoll.primitives.epilogue import result_of
from tdcoll.primitives.group import chunk_bytes, in_stream_order, row, segment, start
from tdcoll.primitives.sums import sum_of_ranks


@jit
def _sum_tiles(
    own, out, landing, landing_deltas, inbox, g, routes, nodes, epoch, offset, size, epilogue,
    DTYPE: tl.constexpr, ACC: tl.constexpr, OP: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    count = elements.count(size, DTYPE, ALIGNED)
    for begin in tl.range(0, count, TILE):
        index = begin + tl.arange(0, TILE)
        mask = index < count
        sum = sum_of_ranks(
            own, inbox, g, nodes, epoch, offset, index, mask, DTYPE, ACC, OP, ALIGNED
        )
        result = result_of(sum, g.world, out + offset, index, mask, epilogue, DTYPE, OP)
        if routes is None:
            for step in tl.static_range(1, g.world):
                delta = tl.load(landing_deltas + (g.rank + step) % g.world)
                tl.store(
                    elements.pointer(landing + delta, DTYPE, ALIGNED) + index, result, mask=mask
                )
        else:
            for i in tl.range(0, routes.n_local):
                delta = tl.load(landing_deltas + tl.load(routes.ranks + i))
                tl.store(
                    elements.pointer(landing + delta, DTYPE, ALIGNED) + index, result, mask=mask
                )
            tl.store(elements.pointer(landing, DTYPE, ALIGNED) + index, result, mask=mask)
        tl.store(elements.pointer(out + offset, DTYPE, ALIGNED) + index, result, mask=mask)


@jit
def sum_chunk(
    own, out, landing, landing_deltas, inbox, g, routes, nodes, epoch, offset, size, aligned,
    epilogue,
    DTYPE: tl.constexpr, ACC: tl.constexpr, OP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Sum this rank's chunk at ``offset`` of all ranks to ``out``, and to ``landing`` on every
    other rank.

    With ``routes``, ``landing`` is also written here, and only on its local ranks elsewhere.
    ``aligned``: all addresses and sizes are multiples of 16. ``epilogue``: see
    :mod:`tdcoll.primitives.epilogue`.
    """
    if aligned:
        _sum_tiles(
            own, out, landing, landing_deltas, inbox, g, routes, nodes, epoch, offset, size,
            epilogue, DTYPE, ACC, OP, True, TILE,
        )  # fmt: skip
    else:
        _sum_tiles(
            own, out, landing, landing_deltas, inbox, g, routes, nodes, epoch, offset, size,
            epilogue, DTYPE, ACC, OP, False, TILE,
        )  # fmt: skip


@jit
def all_reduce_direct(
    source: tl.int64, out: tl.int64, inbox, g, nbytes: tl.int64, part: tl.int64, second: tl.int64, chunk: tl.int64,
    chunks: tl.int32, out_deltas, placement, extra, DTYPE: tl.constexpr, ACC: tl.constexpr,
    OP: tl.constexpr, EPILOGUE: tl.constexpr, TILE: tl.constexpr, WORLD_POW2: tl.constexpr,
    ZERO_COPY: tl.constexpr,
):  # fmt: skip
    """``[nbytes] -> [nbytes]`` inside one node. Thread blocks for each chunk: ``2 * world - 1``;
    without a copy ``world + 1``.

    Args (addresses are integers, so that all ranks share one compilation):
        source: any memory of this GPU, of any alignment that ``DTYPE`` allows.
        out: the result, likewise; may be ``source``. Without a copy: symmetric, at the same offset
            on all ranks.
        inbox: :class:`~tdcoll.primitives.group.Inbox` of segments of ``second + part`` bytes,
            without a copy ``part``.
        g: :class:`~tdcoll.primitives.group.Group`, with signals for at least ``2 * chunks`` chunks.
        nbytes: of a rank's data in this epoch.
        part: bytes of a rank's part, a multiple of 16.
        second: where the second half of a segment, if there is one, begins: a multiple of 16, at
            least ``part``.
        chunk: bytes of a chunk, a multiple of 16.
        chunks: number of chunks of a part.
        out_deltas: int64 ``[world]``: from an address in ``out`` to the same on each rank, if
            kernels store sums there.
        placement, extra, EPILOGUE: see :mod:`tdcoll.primitives.epilogue`; None without an epilogue.
        DTYPE, ACC, OP: of elements and of the accumulator; of
            :data:`tdcoll.primitives.reduce.OPERATIONS`.
        TILE: elements of a tile.
        WORLD_POW2: a power of two of at least ``world``.
        ZERO_COPY: sums are stored into ``out`` of all ranks.
    """
    in_stream_order()
    others = g.world - 1
    per_chunk: tl.constexpr = g.world + 1 if ZERO_COPY else 2 * g.world - 1
    chunk_index = tl.program_id(0) // per_chunk
    given = tl.program_id(0) % per_chunk
    step = given + 1
    if given > others:
        step = given - others
    peer = (g.rank + step) % g.world  # of a sender, whom it sends to
    if given > others:
        # who sends to this rank when the others begin with their successors
        peer = (g.rank - step + g.world) % g.world
    # Read before the epoch is: both take their time.
    peer_delta = tl.load(inbox.deltas + peer)
    peer_signal_delta = tl.load(g.deltas + peer)
    epoch, alive = start(g)
    if alive == 0:
        return
    offset = tl.cast(chunk_index, tl.int64) * chunk
    arrived = row(g, epoch, chunk_index)
    summed = row(g, epoch, chunks + chunk_index)
    if given < others:
        at = tl.cast(peer, tl.int64) * part
        size = chunk_bytes(chunk_bytes(nbytes, part, peer), chunk, chunk_index)
        mine = segment(inbox, g, epoch, g.rank) + offset
        stores.push(
            mine, source + at + offset, size, peer_delta, arrived + g.rank, peer_signal_delta, epoch
        )
    elif given == others:
        if (
            tdl.wait_signals(arrived, g.world, g.rank, tdl.CMP_GE, epoch, g.monitor, WORLD_POW2)
            != 0
        ):
            at = tl.cast(g.rank, tl.int64) * part
            size = chunk_bytes(chunk_bytes(nbytes, part, g.rank), chunk, chunk_index)
            landing = (
                out + at + offset
                if ZERO_COPY
                else segment(inbox, g, epoch, g.rank) + second + offset
            )
            to = out_deltas if ZERO_COPY else inbox.deltas
            own = source + at
            aligned = (source | out | size) % 16 == 0
            sum_chunk(
                own,
                out + at,
                landing,
                to,
                inbox,
                g,
                None,
                None,
                epoch,
                offset,
                size,
                aligned,
                (EPILOGUE, placement, extra),
                DTYPE,
                ACC,
                OP,
                TILE,
            )
            stores.release_to_all(g, summed + g.rank, epoch)
    elif ZERO_COPY:
        tdl.wait_signals(summed, g.world, g.rank, tdl.CMP_GE, epoch, g.monitor, WORLD_POW2)
    elif (
        tdl.wait_signal(
            summed + peer,
            tdl.CMP_GE,
            epoch,
            g.monitor,
            peer,
            (chunks + chunk_index) * g.world + peer,
        )
        != 0
    ):
        at = tl.cast(peer, tl.int64) * part
        size = chunk_bytes(chunk_bytes(nbytes, part, peer), chunk, chunk_index)
        theirs = segment(inbox, g, epoch, peer) + second + offset
        tdl.copy_block(out + at + offset, theirs, size)
