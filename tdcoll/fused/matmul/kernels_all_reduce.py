# SPDX-License-Identifier: Apache-2.0
"""Matmul + all-reduce in one kernel for few rows (decoding), by the Lamport protocol: data without
signals.

Scope: 1 to 8 ranks of one node that can store to each other's memory; operands and shapes as in
:mod:`tdcoll.fused.matmul.product`; results in fp32, fp16 or bf16 that fit into the context's
Lamport memory. Every rank has ``x [rows, depth]`` and a weight of its own, whose product is a
*part* of the result, and gets the sum of all parts. If there are many rows, a matmul +
reduce-scatter and an all-gather send fewer bytes beside the matmul.

Every rank computes all tiles of its part. A tile leaves the registers as 128-bit *words*, without a
detour through memory, and the receiver polls the words themselves
(:mod:`tdcoll.primitives.lamport`): one hop of about 2 us.

**One-shot.** Every rank sends all words to all others and sums everything: one hop, ``world - 1``
times the data. ::

    part, rounded --words--> inbox[slot, r] on every other rank
    inbox[slot, 0], ..., own part, ..., inbox[slot, world - 1] --sum in rank order--> epilogue --> out

**Two-shot** (``TWO_SHOT``). The words of a tile are cut into a share for each rank, which sums it
and sends the sum on: two hops, ``2 * (world - 1) / world`` times the data. If there are 2 ranks,
both send the same. With 4 or 8, two-shot wins from about 64 KB on. ::

    share p of a tile --words--> first half of inbox[slot, r] on rank p, for every rank p, also r itself
    first halves of inbox[slot, 0], ..., inbox[slot, world - 1] --sum in rank order--> epilogue --> share r of out
    share r of out --words--> second half of inbox[slot, r] on every other rank --> share r of their out

The own part waits in the own segment of the inbox, which is never polled, because a thread block
may have several tiles, and its registers hold one.

Place of a word: words are numbered within a tile, row by row. A segment has ``stride`` words for
each tile: of as many rows as the result or the tile has, whichever are fewer. In two-shot calls
each half has ``share`` words for each tile. Words beyond the last row or column are neither sent
nor awaited.

Signal map: there are no signals. Words of ``inbox[slot, s]`` on rank r are written by rank s, and
polled by the thread block of rank r that has the number of the one which sent them.

Ordering and reuse of slots: those of :mod:`tdcoll.primitives.lamport`. The own words are stored and
loaded by the same thread block, with a barrier between. A launch hears from every peer, because
every tile has a word of every rank, and in two-shot calls a sum from every rank that has a share.

Bits: parts are rounded to the result's type before they are added, also the own one; sums are in
rank order, in fp32, rounded once. A part of -0.0 may travel as +0.0, which changes no sum.

Order of thread blocks: program i computes tiles i, i + programs, ... and sends their words. Then it
sums the words of all of its tiles, and then it takes over the sums of other ranks. It waits for
programs i of other ranks only, for what these do in an earlier phase. Any number of resident thread
blocks makes progress. Any number of thread blocks works, if it is the same on all ranks.

If a wait expires, nothing is stored where words are missing, and nothing is sent on.
"""

import triton.language as tl

import tdcoll.language as tdl
from tdcoll.fused.matmul.product import descaled, matrix, place, product, weight_matrix
from tdcoll.language.jit import jit
from tdcoll.primitives import lamport, words
from tdcoll.primitives.elements import element, placed
from tdcoll.primitives.group import in_stream_order
from tdcoll.primitives.reduce import PROD, SUM, accumulate, rounded


@jit
def _pairs(block):
    """``[n, 2 m] -> [n, m], [n, m]``: columns 0, 2, 4, ... and columns 1, 3, 5, ..."""
    rows: tl.constexpr = block.shape[0]
    columns: tl.constexpr = block.shape[1]
    return tl.split(tl.reshape(block, (rows, columns // 2, 2)))


@jit
def words_of(tile):
    """Return the words of a tile, row by row: a tuple of four int32 blocks of one dimension.

    Elements have 16 or 32 bits. The tile changes its layout once, through shared memory.
    """
    elements: tl.constexpr = tile.shape[0] * tile.shape[1]
    if tile.dtype.primitive_bitwidth == 32:
        numbers = tl.reshape(tile.to(tl.int32, bitcast=True), (elements // 4, 4))
    else:
        halves = tl.reshape(tile.to(tl.int16, bitcast=True), (elements // 8, 8))
        low, high = _pairs(halves)
        numbers = (low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16)
    even, odd = _pairs(numbers)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@jit
def _positions(word, row, column, shape, PER_ROW: tl.constexpr, OUT: tl.constexpr):
    """Return ``(rows, columns, inside)`` of the first elements of words of the tile at ``(row,
    column)``."""
    rows = row + word // PER_ROW
    columns = column + word % PER_ROW * (128 // OUT.primitive_bitwidth)
    return rows, columns, (rows < shape.rows) & (columns < shape.columns)


@jit
def _sum(
    found, rows, columns, weight, shape, extra, world, OUT: tl.constexpr, EPILOGUE: tl.constexpr
):
    """Return the words of the result: the sums of all ranks' words ``found``, with the bias, after
    the epilogue."""
    made = ()
    for part in tl.static_range(4):
        word = tl.zeros_like(found[0][part])
        for place_in_part in tl.static_range(32 // OUT.primitive_bitwidth):
            sums = tl.zeros(word.shape, tl.float32)
            for origin in tl.static_range(world):
                sums = accumulate(
                    sums, element(found[origin][part], place_in_part, OUT, tl.float32), False, SUM
                )
            column = columns + part * (32 // OUT.primitive_bitwidth) + place_in_part
            inside = (rows < shape.rows) & (column < shape.columns)
            if weight.biased:
                bias = tl.cast(weight.bias, tl.int64).to(tl.pointer_type(OUT)) + column
                sums += tl.load(bias, mask=inside, other=0.0).to(tl.float32)
            value = EPILOGUE(sums, rows.to(tl.int64), column.to(tl.int64), inside, extra)
            # PROD, because what an epilogue returns may be -0.0, as a product may be.
            word |= placed(rounded(value, OUT, PROD), place_in_part)
        made += (word,)  # type: ignore[assignment]
    return made


@jit
def _store(out, made, rows, columns, mask, shape, OUT: tl.constexpr, ALIGNED: tl.constexpr):
    """Store words of the result, where ``mask`` is true, to the matrix ``[rows, columns]`` at
    address ``out``."""
    bits: tl.constexpr = OUT.primitive_bitwidth
    first = rows.to(tl.int64) * shape.columns + columns
    if ALIGNED:
        tdl.store_words(out + first * (bits // 8), made[0], made[1], made[2], made[3], mask)
    else:
        kind: tl.constexpr = tl.int32 if bits == 32 else tl.int16
        numbers = out.to(tl.pointer_type(kind))
        for part in tl.static_range(4):
            for place_in_part in tl.static_range(32 // bits):
                offset = part * (32 // bits) + place_in_part
                number = (made[part] >> (bits * place_in_part)).to(kind)
                tl.store(
                    numbers + first + offset, number, mask=mask & (columns + offset < shape.columns)
                )


@jit
def matmul_all_reduce(
    source: tl.int64,
    out: tl.int64,
    inbox,
    g,
    weight,
    scales,
    shape,
    extra,
    tile,
    DTYPE: tl.constexpr,
    OUT: tl.constexpr,
    PRECISION: tl.constexpr,
    EPILOGUE: tl.constexpr,
    ALIGNED: tl.constexpr,
    TWO_SHOT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``[rows, depth], [depth, columns] -> [rows, columns]`` on every rank. Any number of thread
    blocks.

    Args:
        source: address of this rank's ``x``; a multiple of 16, rows of a multiple of 16 bytes.
        out: address of the result.
        inbox: :class:`~tdcoll.primitives.lamport.Lamport`, whose segments hold ``stride`` words for
            each tile, or twice ``share`` for two-shot calls; see the module.
        g: :class:`~tdcoll.primitives.group.Group`.
        weight, scales, shape, tile: tuples of :mod:`tdcoll.fused.matmul.product`; ``shape.rows``
            are all rows. The bias is added to the sum, and is the same on all ranks.
        extra: of the epilogue; a tuple or None. If the call is two-shot, one rank computes what all
            get.
        DTYPE, OUT: types of the operands and of the result, in which parts travel: fp32, fp16 or
            bf16.
        PRECISION: of fp32 operands, ``"ieee"`` or ``"tf32"``.
        EPILOGUE: function of :mod:`tdcoll.primitives.epilogue`.
        ALIGNED: ``out`` and the bytes of its rows are multiples of 16.
        TWO_SHOT: send each word to the rank that sums it. The result has at least ``tile.columns``
            columns, and the ``stride`` words of a tile give every rank a share: ``(world - 1) *
            ceil(stride / world) < stride``.
        BLOCK: words that are summed at a time, a power of two.
    """
    in_stream_order()
    per_row: tl.constexpr = tile.columns * OUT.primitive_bitwidth // 128
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    deltas = words.deltas_of(g)
    call, alive = lamport.start(g, inbox)
    if alive == 0:
        return
    row_tiles = tl.cdiv(shape.rows, tile.rows)
    column_tiles = tl.cdiv(shape.columns, tile.columns)
    tiles = row_tiles * column_tiles
    stride = tl.minimum(shape.rows, tile.rows) * per_row
    share = tl.cdiv(stride, g.world)
    length = stride
    written = tiles * stride
    if TWO_SHOT:
        length = share
        written = 2 * tiles * share
    x = matrix(source, shape.rows, shape.depth, DTYPE, tile.rows, tile.depth)
    weights = weight_matrix(weight, shape, tile, DTYPE)
    for number in tl.range(program, tiles, programs):
        row, column = place(number, row_tiles, column_tiles, tile)
        sums = product(x, weights, row, column, shape, weight, tile, DTYPE, PRECISION)
        if scales.used:
            sums = descaled(
                sums, scales.x, scales.x_step, scales, row, column, shape.rows, shape, tile
            )
        part = words_of(sums.to(OUT))
        word = tl.arange(0, tile.rows * per_row)
        _, _, inside = _positions(word, row, column, shape, per_row, OUT)
        if TWO_SHOT:
            summing = tl.load(g.deltas + word // share, mask=inside, other=0)
            lamport.send(
                g, inbox, g.rank, summing, number * share + word % share, part, call, inside
            )
        else:
            here = tl.cast(0, tl.int64)
            lamport.send(g, inbox, g.rank, here, number * stride + word, part, call, inside)
            words.send_to_all(g, inbox, deltas, number * stride + word, part, call, inside, True)
    lamport.clear(g, inbox, call, 16 * tl.cast(written, tl.int64), BLOCK)
    tdl.syncthreads()  # because other threads have stored the own words
    own_segment = lamport.segment(g, inbox, call, g.rank)
    for number in tl.range(program, tiles, programs):
        row, column = place(number, row_tiles, column_tiles, tile)
        for begin in tl.range(0, length, BLOCK):
            within = begin + tl.arange(0, BLOCK)
            word = within
            if TWO_SHOT:
                word = g.rank * share + within
            rows, columns, inside = _positions(word, row, column, shape, per_row, OUT)
            inside = inside & (within < length) & (word < stride)
            spot = number * length + within
            mine = tdl.load_words(own_segment + 16 * tl.cast(spot, tl.int64), inside)
            found, arrived = words.receive(g, inbox, spot, mine, call, inside, True)
            made = _sum(found, rows, columns, weight, shape, extra, g.world, OUT, EPILOGUE)
            if TWO_SHOT:
                words.send_to_all(g, inbox, deltas, tiles * share + spot, made, call, arrived, True)
            _store(out, made, rows, columns, arrived, shape, OUT, ALIGNED)
    if TWO_SHOT:
        for number in tl.range(program, tiles, programs):
            row, column = place(number, row_tiles, column_tiles, tile)
            for distance in tl.range(1, g.world):
                origin = (g.rank + distance) % g.world
                for begin in tl.range(0, length, BLOCK):
                    within = begin + tl.arange(0, BLOCK)
                    word = origin * share + within
                    rows, columns, inside = _positions(word, row, column, shape, per_row, OUT)
                    inside = inside & (within < length) & (word < stride)
                    spot = (tiles + number) * share + within
                    first, second, third, fourth, came = lamport.receive(
                        g, inbox, origin, spot, call, inside
                    )
                    made = (first, second, third, fourth)
                    _store(out, made, rows, columns, inside & (came != 0), shape, OUT, ALIGNED)
