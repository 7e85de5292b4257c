# SPDX-License-Identifier: Apache-2.0
"""All-gather + matmul in one kernel: own rows first, rows of other ranks when they have arrived.

Scope: 1 to 8 ranks of one node that can store to each other's memory; operands and shapes as in
:mod:`tdcoll.fused.matmul.product`. Each rank has a shard of ``rows`` rows and a weight of its own,
and gets the product of all ranks' rows with that weight. On several nodes, or without stores to
peers, an all-gather and a matmul do the same. If there are few rows, a gather in one hop and cuBLAS
are faster, because cuBLAS splits the depth.

Data flow, seen from rank r. The inbox of a call is the gathered matrix ``[world * rows, depth]``,
shard after shard::

    source, in pieces of ``piece`` bytes --stores--> shard r of the inbox on every other rank, then a release each
    source   @ weight --> rows of shard r of out                                   (no wait)
    shard s of the inbox @ weight --> rows of shard s of out, tile by tile         (when its pieces are here)

With fp8 operands the scales of the rows travel with the rows. They lie behind the gathered matrix,
fp32 ``[world * rows]``; a piece brings the scales of the rows that begin in it.

Who sends: the first ``pushers`` thread blocks of the grid send pieces and leave; the next ones
multiply; the last ``keepers`` copy the gathered matrix out of the inbox, if the caller wants it.
Few pushers are enough, because few fill a link. Most of the GPU multiplies while the shard is on
its way, and a pusher's multiprocessor is free for the thread block that comes after it. With
``COPIED`` copy engines send instead (:mod:`tdcoll.primitives.copies`, whose ``enter`` has begun the
epoch), with a stamp behind each piece, and there are no pushers. Such a call may have two launches,
of which the first multiplies only this rank's own shard (``shards``;
:mod:`tdcoll.fused.matmul.copies` has the reason).

``WHOLE``: tiles span several shards, because shards have fewer rows than a tile. The own shard then
goes through the inbox, too, and every tile waits for all shards that it has rows of.

Signal map: ``arrived[slot, piece, s]`` on rank r is set to the epoch by rank s when that piece of
its shard is here. It is polled by the thread blocks whose tile has rows of the piece, and by
keepers. Rank r sets its own if it also sends to itself (``SELF``). A call hears from every peer,
because every piece belongs to some tile.

Ordering: that of :mod:`tdcoll.primitives.stores`. The receiver acquires the signals and ends the
wait with the proxy fence, because it then loads through descriptors. The loads of a tile stay
behind its wait, because they belong to a loop of their own that begins after it.

Reuse of slots: :mod:`tdcoll.calls.context`. A launch ends when all tiles are computed, hence when
it has read all that peers have sent for its epoch. A peer writes to this slot again two epochs
later, when it has heard from this rank in the epoch between. If the inbox is a symmetric buffer of
the caller's (one slot), thread block 0 first tells all peers that this rank has entered, and
pushers write to a peer only when that has. With ``COPIED`` addresses are fixed and epochs even;
``enter`` has waited until all peers have entered.

If a wait expires, the tile isn't stored. The launch ends, because the monitor makes every later
wait return at once. With ``COPIED`` a thread block looks at its end whether a peer has given up,
whose copies may have overwritten what was read.

Order of thread blocks: pushers wait at most for thread block 0 of a peer (one slot). All others
wait for pushers or copy engines of peers. Any number of resident thread blocks makes progress,
because none waits for one of a higher index.
"""

from typing import NamedTuple

import triton.language as tl

import tdcoll.language as tdl
from tdcoll.fused.matmul.product import (
    descaled,
    indices,
    matrix,
    place,
    product,
    store,
    weight_matrix,
    width_of,
    with_bias,
)
from tdcoll.language.jit import jit
from tdcoll.primitives import elements, stores
from tdcoll.primitives.group import (
    chunk_bytes,
    in_stream_order,
    row,
    segment,
    start,
    still_alive,
    this_epoch,
)


class Shards(NamedTuple):
    """The shards that a launch multiplies, in the order of the launch: 0 is this rank's own.

    Attributes:
        begin: the first.
        end: behind the last, at most ``world``.
    """

    begin: tl.int32
    end: tl.int32


@jit
def _copy(target, source, nbytes, WORDS: tl.constexpr):
    """Copy a multiple of 16 bytes between multiples of 16, ``WORDS`` 32-bit words at a time."""
    count = elements.count(nbytes, tl.int32, True)
    for begin in tl.range(0, count, WORDS):
        index = begin + tl.arange(0, WORDS)
        words = tl.load(elements.pointer(source, tl.int32, True) + index, mask=index < count)
        tl.store(elements.pointer(target, tl.int32, True) + index, words, mask=index < count)


@jit
def _copy_scales(target, source, step, first, end, WORDS: tl.constexpr):
    """Copy the scales of rows ``first`` to ``end`` of a shard to fp32 ``[rows]`` at ``target``."""
    from_first = source.to(tl.pointer_type(tl.float32))
    to_first = target.to(tl.pointer_type(tl.float32))
    for begin in tl.range(first, end, WORDS):
        index = begin + tl.arange(0, WORDS)
        scales = tl.load(from_first + index * step, mask=index < end)
        tl.store(to_first + index, scales, mask=index < end)


@jit
def _push(
    pusher,
    pushers,
    source,
    inbox,
    g,
    epoch,
    scales,
    shape,
    piece,
    pieces,
    row_bytes,
    SELF: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Send this pusher's pieces: those for the successor first, because it needs them first."""
    nbytes = shape.rows * row_bytes
    inbox_base = segment(inbox, g, epoch, 0)
    shard = inbox_base + g.rank * nbytes
    shard_scales = inbox_base + g.world * nbytes + tl.cast(g.rank, tl.int64) * shape.rows * 4
    receivers = g.world - 1
    if SELF:
        receivers = g.world
    for item in tl.range(pusher, receivers * pieces, pushers):
        number = item % pieces
        to = (g.rank + 1 + item // pieces) % g.world
        delta = tl.load(inbox.deltas + to)
        signal_delta = tl.load(g.deltas + to)
        allowed = tl.cast(1, tl.int32)
        if to != g.rank:
            allowed = stores.may_write(g, inbox, to, epoch)
        if allowed != 0:
            offset = tl.cast(number, tl.int64) * piece
            size = chunk_bytes(nbytes, piece, number)
            _copy(shard + delta + offset, source + offset, size, WORDS)
            if scales.used:
                first = tl.cdiv(offset, row_bytes)
                end = tl.cdiv(offset + size, row_bytes)
                _copy_scales(shard_scales + delta, scales.x, scales.x_step, first, end, WORDS)
            stores.release(row(g, epoch, number) + g.rank, signal_delta, epoch)


@jit
def _wait_for_rows(first, end, g, epoch, shape, piece, row_bytes, WORLD_POW2: tl.constexpr):
    """Return 1 when rows ``first`` to ``end`` of the gathered matrix are here; 0 if they did not
    come in time."""
    came = tl.cast(1, tl.int32)
    for origin in tl.range(first // shape.rows, (end - 1) // shape.rows + 1):
        first_row = tl.maximum(first - origin * shape.rows, 0)
        end_row = tl.minimum(end - origin * shape.rows, shape.rows)
        begin = (first_row * row_bytes // piece).to(tl.int32)
        count = ((end_row * row_bytes - 1) // piece).to(tl.int32) + 1 - begin
        signals = row(g, epoch, begin) + origin
        came &= tdl.wait_signals(
            signals, count, -1, tdl.CMP_GE, epoch, g.monitor, WORLD_POW2, origin, begin, g.world
        )  # fmt: skip
    return came


@jit
def _multiply(
    worker,
    workers,
    source,
    out,
    inbox,
    g,
    epoch,
    weight,
    scales,
    shape,
    piece,
    row_bytes,
    shards,
    extra,
    tile,
    DTYPE: tl.constexpr,
    OUT: tl.constexpr,
    PRECISION: tl.constexpr,
    EPILOGUE: tl.constexpr,
    ALIGNED: tl.constexpr,
    WHOLE: tl.constexpr,
    WORLD_POW2: tl.constexpr,
):
    """Compute this worker's tiles: shard by shard, the own one first, then the predecessor's and so
    on."""
    width = width_of(shape, OUT, ALIGNED)
    weights = weight_matrix(weight, shape, tile, DTYPE)
    inbox_base = segment(inbox, g, epoch, 0)
    all_rows = g.world * shape.rows
    part_rows = all_rows if WHOLE else shape.rows
    parts = 1 if WHOLE else g.world
    row_tiles = tl.cdiv(part_rows, tile.rows)
    column_tiles = tl.cdiv(shape.columns, tile.columns)
    tiles = row_tiles * column_tiles
    first_part = 0
    if shards is not None:
        first_part = shards.begin
        parts = shards.end
    for part in tl.range(first_part, parts):
        # Tiles go round the workers across all shards.
        first_tile = (worker + workers - part * tiles % workers) % workers
        if first_tile < tiles:
            first_row = tl.cast(0, tl.int32)
            if not WHOLE:
                first_row = (g.rank + g.world - part) % g.world * shape.rows
            own = part == 0
            if WHOLE:
                own = part < 0  # the own shard comes through the inbox as the others do
            base = inbox_base + first_row * row_bytes
            x_scale = inbox_base + all_rows * row_bytes + tl.cast(first_row, tl.int64) * 4
            x_step = tl.cast(1, tl.int32)
            if own:
                base = source
                x_scale = scales.x
                x_step = scales.x_step
            x = matrix(base, part_rows, shape.depth, DTYPE, tile.rows, tile.depth)
            for index in tl.range(first_tile, tiles, workers):
                row_of_part, column = place(index, row_tiles, column_tiles, tile)
                arrived = tl.cast(1, tl.int32)
                if not own:
                    end = tl.minimum(row_of_part + tile.rows, part_rows)
                    arrived = _wait_for_rows(
                        first_row + row_of_part, first_row + end, g, epoch, shape, piece, row_bytes, WORLD_POW2
                    )  # fmt: skip
                sums = product(
                    x, weights, row_of_part, column, shape, weight, tile, DTYPE, PRECISION
                )
                if scales.used:
                    sums = descaled(
                        sums, x_scale, x_step, scales, row_of_part, column, part_rows, shape, tile
                    )
                row_of_out = first_row + row_of_part
                end_row = first_row + part_rows
                if arrived == 0:  # store nothing
                    end_row = tl.cast(0, tl.int32)
                rows, columns, inside = indices(
                    row_of_out, column, end_row, width, tile.rows, tile.columns
                )
                made = EPILOGUE(
                    with_bias(sums, weight, columns, width, OUT), rows, columns, inside, extra
                )
                store(out, made.to(OUT), rows, columns, inside, width, OUT, ALIGNED)


@jit
def _keep(
    keeper, keepers, source, gathered, inbox, g, epoch, shape, piece, pieces, row_bytes, WORDS: tl.constexpr
):  # fmt: skip
    """Copy this keeper's pieces to ``gathered``: those of the own shard, then those of others as
    they arrive."""
    nbytes = shape.rows * row_bytes
    inbox_base = segment(inbox, g, epoch, 0)
    for item in tl.range(keeper, g.world * pieces, keepers):
        number = item % pieces
        origin = (g.rank + g.world - item // pieces) % g.world
        offset = tl.cast(number, tl.int64) * piece
        size = chunk_bytes(nbytes, piece, number)
        target = gathered + origin * nbytes + offset
        if origin == g.rank:
            _copy(target, source + offset, size, WORDS)
        else:
            signal = row(g, epoch, number) + origin
            if tdl.wait_signal(signal, tdl.CMP_GE, epoch, g.monitor, origin, number) != 0:
                _copy(target, inbox_base + origin * nbytes + offset, size, WORDS)


@jit
def all_gather_matmul(
    source: tl.int64,
    out: tl.int64,
    gathered: tl.int64,
    inbox,
    g,
    weight,
    scales,
    shape,
    piece: tl.int64,
    pieces: tl.int32,
    pushers: tl.int32,
    keepers: tl.int32,
    shards,
    extra,
    tile,
    DTYPE: tl.constexpr,
    OUT: tl.constexpr,
    PRECISION: tl.constexpr,
    EPILOGUE: tl.constexpr,
    ALIGNED: tl.constexpr,
    WHOLE: tl.constexpr,
    SELF: tl.constexpr,
    COPIED: tl.constexpr,
    WORLD_POW2: tl.constexpr,
    WORDS: tl.constexpr,
):
    """``[rows, depth], [depth, columns] -> [world * rows, columns]``. Thread blocks: pushers, any
    number, keepers.

    Args:
        source: address of this rank's shard, ``[rows, depth]``; a multiple of 16, rows of a
            multiple of 16 bytes.
        out: address of the result.
        gathered: address for the gathered matrix ``[world * rows, depth]``; only used if there are
            keepers.
        inbox: :class:`~tdcoll.primitives.group.Inbox` of at least ``rows * depth`` elements per
            rank, and with scales 4 bytes more per row. With one slot, a symmetric buffer that
            begins with the gathered matrix.
        g: :class:`~tdcoll.primitives.group.Group`.
        weight, scales, shape, tile: tuples of :mod:`tdcoll.fused.matmul.product`.
        piece: bytes of a piece of a shard, a multiple of 16.
        pieces: number of pieces of a shard, at most ``g.chunks``.
        pushers: thread blocks that send; 0 with ``COPIED``, or if there is nothing to send.
        keepers: thread blocks that copy to ``gathered``; 0 if it is not wanted.
        shards: :class:`Shards` with ``COPIED``, otherwise None for all. Keepers copy all shards.
        extra: of the epilogue; a tuple or None.
        DTYPE, OUT: types of the operands and of the result.
        PRECISION: of fp32 operands, ``"ieee"`` or ``"tf32"``.
        EPILOGUE: function of :mod:`tdcoll.primitives.epilogue`.
        ALIGNED: ``out`` and the bytes of its rows are multiples of 16.
        WHOLE: tiles span several shards. It needs ``SELF``.
        SELF: this rank's shard goes to its own inbox, too.
        COPIED: copy engines send.
        WORLD_POW2: a power of two of at least ``world``, and of the pieces that the rows of a tile
            may touch in one shard.
        WORDS: 32-bit words that a pusher or keeper copies at a time, a power of two.
    """
    in_stream_order()
    tl.static_assert(
        SELF or not WHOLE, "tiles that span several shards find the own one in the inbox"
    )
    if COPIED:
        epoch = this_epoch(g.control)
        alive = still_alive(g.monitor)
    else:
        epoch, alive = start(g)
    if alive == 0:
        return
    row_bytes = tl.cast(shape.depth, tl.int64) * (DTYPE.primitive_bitwidth // 8)
    program = tl.program_id(0)
    workers = tl.num_programs(0) - pushers - keepers
    if inbox.slots == 1 and not COPIED:
        if program == 0:
            stores.release_to_all(g, g.entered + g.rank, epoch)
    if program < pushers:
        _push(
            program,
            pushers,
            source,
            inbox,
            g,
            epoch,
            scales,
            shape,
            piece,
            pieces,
            row_bytes,
            SELF,
            WORDS,
        )
    elif program < pushers + workers:
        _multiply(
            program - pushers, workers, source, out, inbox, g, epoch, weight, scales, shape, piece, row_bytes, shards,
            extra, tile, DTYPE, OUT, PRECISION, EPILOGUE, ALIGNED, WHOLE, WORLD_POW2,
        )  # fmt: skip
    else:
        keeper = program - pushers - workers
        _keep(
            keeper,
            keepers,
            source,
            gathered,
            inbox,
            g,
            epoch,
            shape,
            piece,
            pieces,
            row_bytes,
            WORDS,
        )
    if COPIED:
        stores.no_peer_expired(g, WORLD_POW2)
