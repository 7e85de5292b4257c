# SPDX-License-Identifier: Apache-2.0
"""Matmul + reduce-scatter in one kernel: a finished tile goes to its owner, which adds it.

Scope: 1 to 8 ranks of one node that can store to each other's memory; operands and shapes as in
:mod:`tdcoll.fused.matmul.product`. Every rank has ``x [world * rows, depth]`` and a weight of its
own, whose product is a *part* of the result; rank r gets the sum of rows ``r * rows`` to ``(r + 1)
* rows`` of all ranks' parts. On several nodes, or without stores to peers, a matmul and a
reduce-scatter do the same.

Data flow, seen from rank r. The result of a rank is cut into ``tiles`` tiles::

    x[rows of p] @ weight = part, rounded --descriptor store--> inbox[r, tile] on rank p, for every other rank p
    inbox[0, tile], ..., own part, rounded, ..., inbox[world - 1, tile] --sum in rank order, fp32--> epilogue --> out

One descriptor for each peer suffices, whatever the number of columns, because a tile in the inbox
is a matrix ``[tile.rows, tile.columns]`` without gaps, whole even at the edges of the result.

Bits: the result is that of ``torch.mm`` on every rank and a sum in rank order, rounded once,
because parts are rounded to the result's type before they are added, also the own one.

Signal map: ``arrived[slot, tile, s]`` on rank r is set to the epoch by rank s when its part of that
tile is here, and polled by the thread block that adds the tile. Every rank adds at least one tile,
and waits there for all other ranks.

Ordering: descriptor stores are asynchronous. A thread block therefore *defers* a signal: it
computes the next tile while the store is on its way, then waits until its stores are complete,
synchronizes its threads, and releases the signal at system scope. The receiver acquires the signals
of a tile and ends the wait with the proxy fence, because it then loads through a descriptor.

Reuse of slots: :mod:`tdcoll.calls.context`. A peer writes to this slot again two epochs later, when
it has heard from this rank in the epoch between. This rank began that one when it had added all
tiles of this one.

Order of tiles: a thread block computes a tile for every other rank, the successor first, and
``lag`` such rounds later the own tile of that number. The link carries tiles during the whole
launch, and a part has the time of ``lag`` rounds to arrive before it is needed. If ``lag`` is at
least the number of rounds, own tiles come last.

Order of thread blocks: own tile i waits for the tiles i of other ranks. Each of these is sent by
the thread block that adds tile i, or by one of a lower index (:func:`_work`). Before a thread block
sends the tiles of a round, it only waits for own tiles of earlier rounds, and it releases its
deferred signal before each wait. By induction over rounds and indices, every wait ends with any
number of resident thread blocks.

If a wait expires, the tile isn't stored. The rest of the launch sends what peers of this epoch wait
for, and every later wait returns at once.
"""

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
from tdcoll.primitives import stores
from tdcoll.primitives.group import in_stream_order, row, segment, start
from tdcoll.primitives.reduce import PROD, SUM, accumulate, rounded


@jit
def _work(turn, lag, tiles, world):
    """Return ``(any, tile, distance)``: what this program does in a turn, if anything. It computes
    a tile for the rank at this distance, which is itself if the distance is ``world``.

    ``world`` turns are a round: one for each distance. Own tiles come ``lag`` rounds late. Of the
    ``tiles`` tiles of each rank, whole rounds are dealt out first: tile i to program ``i %
    programs``, for all ranks alike. The ``rest`` tiles of the last round would leave most programs
    without work. There, programs form groups of ``rest``, which take different distances in turn;
    own tiles go to the last group, because the thread blocks of other ranks that compute the same
    tile for this rank may be of any group, and must not have a higher index.
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    whole_rounds = tiles // programs
    rest = tiles % programs
    groups = tl.minimum(programs // tl.maximum(rest, 1), world)
    step = turn % world
    round = turn // world
    group = step % groups
    if step == world - 1:
        round -= lag
        group = groups - 1
    any = (round >= 0) & (round < whole_rounds)
    tile = round * programs + program
    if round == whole_rounds:
        any = (rest > 0) & (program // tl.maximum(rest, 1) == group)
        tile = round * programs + program % tl.maximum(rest, 1)
    return any, tile, step + 1


@jit
def _release(deferred, epoch):
    """Set a peer's signal, at address ``deferred``, when the tile that it announces is there; 0:
    none."""
    if deferred != 0:
        tdl.wait_descriptor_stores()
        stores.release(deferred, 0, epoch)


@jit
def _sum(
    part,
    parts,
    tiles,
    number,
    column,
    g,
    tile,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Return the sum of all ranks' parts of tile ``number`` in rank order, fp32: of ``COLUMNS``
    columns from ``column`` on, of which ``part`` is the own one."""
    sums = tl.zeros((tile.rows, COLUMNS), tl.float32)
    own = part.to(tl.float32)
    # One loop over the others, into which the own part is put: it has one layout, and nothing is
    # loaded in vain.
    for other in tl.range(0, g.world - 1, num_stages=STAGES):
        origin = other + (other >= g.rank).to(tl.int32)
        theirs = parts.load([(origin * tiles + number) * tile.rows, column])
        sums = tl.where(other == g.rank, accumulate(sums, own, False, SUM), sums)
        sums = accumulate(sums, theirs.to(tl.float32), False, SUM)
    return tl.where(g.rank == g.world - 1, accumulate(sums, own, False, SUM), sums)


@jit
def _add(
    part,
    parts,
    out,
    tiles,
    number,
    row_of_tile,
    column,
    weight,
    shape,
    width,
    extra,
    g,
    tile,
    OUT: tl.constexpr,
    EPILOGUE: tl.constexpr,
    ALIGNED: tl.constexpr,
    SLICES: tl.constexpr,
    SLICE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Add all ranks' parts of tile ``number`` and store the result: slice ``SLICE`` of ``SLICES``
    of its columns."""
    count: tl.constexpr = tile.columns // SLICES
    first: tl.constexpr = SLICE * count
    sums = _sum(part, parts, tiles, number, first, g, tile, count, STAGES)
    rows, columns, inside = indices(
        row_of_tile, column + first, shape.rows, width, tile.rows, count
    )
    made = EPILOGUE(with_bias(sums, weight, columns, width, OUT), rows, columns, inside, extra)
    # PROD, because what an epilogue returns may be -0.0, as a product may be.
    store(out, rounded(made, OUT, PROD), rows, columns, inside, width, OUT, ALIGNED)


@jit
def _halves(block):
    """``[m, n] -> [m, n / 2], [m, n / 2]``: the left and the right half."""
    rows: tl.constexpr = block.shape[0]
    columns: tl.constexpr = block.shape[1]
    return tl.split(tl.permute(tl.reshape(block, (rows, 2, columns // 2)), (0, 2, 1)))


@jit
def matmul_reduce_scatter(
    source: tl.int64,
    out: tl.int64,
    inbox,
    g,
    weight,
    scales,
    shape,
    lag: tl.int32,
    extra,
    tile,
    DTYPE: tl.constexpr,
    OUT: tl.constexpr,
    PRECISION: tl.constexpr,
    EPILOGUE: tl.constexpr,
    ALIGNED: tl.constexpr,
    SLICES: tl.constexpr,
    STAGES: tl.constexpr,
    WORLD_POW2: tl.constexpr,
):
    """``[world * rows, depth], [depth, columns] -> [rows, columns]``. Any number of thread blocks.

    Args:
        source: address of this rank's ``x``, ``[world * rows, depth]``; a multiple of 16, rows of a
            multiple of 16 bytes.
        out: address of the result.
        inbox: :class:`~tdcoll.primitives.group.Inbox` of two slots, for ``tiles`` tiles of the
            result's type per rank.
        g: :class:`~tdcoll.primitives.group.Group`, with at least ``tiles`` chunks.
        weight, scales, shape, tile: tuples of :mod:`tdcoll.fused.matmul.product`. The bias is added
            to the sum; pass the same one on all ranks, or zeros on others than the owner of the
            rows.
        lag: rounds from sending a tile to adding the own one, at least 0. If it is large, own tiles
            come last.
        extra: of the epilogue; a tuple or None.
        DTYPE, OUT: types of the operands and of the result, in which parts travel.
        PRECISION: of fp32 operands, ``"ieee"`` or ``"tf32"``.
        EPILOGUE: function of :mod:`tdcoll.primitives.epilogue`, called for sums.
        ALIGNED: ``out`` and the bytes of its rows are multiples of 16.
        SLICES: 1 or 2: slices of columns in which a tile is added, because half a tile needs fewer
            registers.
        STAGES: parts of other ranks that are loaded ahead while one is added.
        WORLD_POW2: a power of two of at least ``world``.
    """
    in_stream_order()
    row_tiles = tl.cdiv(shape.rows, tile.rows)
    column_tiles = tl.cdiv(shape.columns, tile.columns)
    tiles = row_tiles * column_tiles
    all_tile_rows = g.world * tiles * tile.rows
    width = width_of(shape, OUT, ALIGNED)
    # Read before the epoch is: both take their time.
    deltas = ()
    for hop in tl.static_range(1, g.world):
        deltas += (tl.load(inbox.deltas + (g.rank + hop) % g.world),)  # type: ignore[assignment]
    epoch, alive = start(g)
    if alive == 0:
        return
    inbox_base = segment(inbox, g, epoch, 0)
    weights = weight_matrix(weight, shape, tile, DTYPE)
    x = matrix(source, g.world * shape.rows, shape.depth, DTYPE, tile.rows, tile.depth)
    parts = matrix(inbox_base, all_tile_rows, tile.columns, OUT, tile.rows, tile.columns // SLICES)
    peers = ()
    for hop in tl.static_range(1, g.world):
        theirs = inbox_base + deltas[hop - 1]
        peers += (  # type: ignore[assignment]
            matrix(theirs, all_tile_rows, tile.columns, OUT, tile.rows, tile.columns),
        )
    late = tl.minimum(lag, tiles // tl.num_programs(0) + 1)
    turns = (tiles // tl.num_programs(0) + 1 + late) * g.world
    deferred = tl.cast(0, tl.int64)  # address of a peer's signal whose tile is on its way; 0: none
    for turn in tl.range(0, turns):
        any, number, distance = _work(turn, late, tiles, g.world)
        if any:
            owner = (g.rank + distance) % g.world
            row_of_tile, column = place(number, row_tiles, column_tiles, tile)
            row_of_x = owner * shape.rows + row_of_tile
            product_of = product(
                x, weights, row_of_x, column, shape, weight, tile, DTYPE, PRECISION
            )
            if scales.used:
                end_row = (owner + 1) * shape.rows
                product_of = descaled(
                    product_of, scales.x, scales.x_step, scales, row_of_x, column, end_row, shape, tile
                )  # fmt: skip
            part = product_of.to(OUT)
            _release(deferred, epoch)
            deferred = tl.cast(0, tl.int64)
            if distance < g.world:
                for step in tl.static_range(1, g.world):
                    if distance == step:
                        peers[step - 1].store([(g.rank * tiles + number) * tile.rows, 0], part)
                signal = row(g, epoch, number) + g.rank
                deferred = tl.cast(signal, tl.int64) + tl.load(g.deltas + owner)
            else:
                signals = row(g, epoch, number)
                if (
                    tdl.wait_signals(
                        signals, g.world, g.rank, tdl.CMP_GE, epoch, g.monitor, WORLD_POW2
                    )
                    != 0
                ):
                    if SLICES == 2:
                        left, right = _halves(part)
                        _add(
                            left, parts, out, tiles, number, row_of_tile, column, weight, shape, width, extra, g, tile,
                            OUT, EPILOGUE, ALIGNED, 2, 0, STAGES,
                        )  # fmt: skip
                        _add(
                            right, parts, out, tiles, number, row_of_tile, column, weight, shape, width, extra, g,
                            tile, OUT, EPILOGUE, ALIGNED, 2, 1, STAGES,
                        )  # fmt: skip
                    else:
                        _add(
                            part, parts, out, tiles, number, row_of_tile, column, weight, shape, width, extra, g, tile,
                            OUT, EPILOGUE, ALIGNED, 1, 0, STAGES,
                        )  # fmt: skip
    _release(deferred, epoch)
