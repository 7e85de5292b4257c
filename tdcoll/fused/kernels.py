# SPDX-License-Identifier: Apache-2.0
"""All-reduce, residual and RMSNorm of rows in one kernel, inside one node, by the Lamport protocol.

Scope: one node whose ranks can store to each other's memory; fp16, bf16 and fp32; rows of whole
16-byte words, all addresses multiples of 16; calls that fit into the context's Lamport memory. All
other calls use an all-reduce and then :func:`norm_rows`, with the same bits.

A row of W words is cut into PIECES of BLOCK words, a power of two, one for each thread block:
several if rows are few.

**One-shot** (few rows). Every rank sends all rows to all others and does all the work: one hop. ::

    x --words--> inbox[slot, r] on every other rank
    inbox[slot, 0], ..., x, ..., inbox[slot, world - 1] --sum in rank order--> + residual --> new residual, out

**Two-shot** (many rows, at least one for each rank). Row i * world + o is owned by rank o: its
i-th. ::

    rows of o   --words--> first part of inbox[slot, r] on rank o, for every other rank o
    first parts of all ranks, own x --sum in rank order--> + residual --> own rows of the new residual
    own rows    --words--> second part of inbox[slot, r] on every other rank, with a word of measures for each piece
    second part of inbox[slot, o], and its measures --> rows of o: new residual, out

The second part begins after as many words as the first has for ``ceil(rows / world)`` rows, the
measures after as many again. Measures are the piece's sum of squares and, for a scale per row, its
largest value. They are never the sentinel, because neither is negative. The residual must be the
same on all ranks, because only the owner's is read.

Rows of several pieces. Whoever stores a piece needs the measures of all pieces of its row, and no
thread block may wait for a later one of its launch. A piece that is reduced here therefore has two
thread blocks: the first sends, reduces and *publishes* the measures; the second, behind the first
thread blocks of all pieces of its row, reduces the same words again, waits for the measures, and
stores. Measures of one GPU are LL words (:mod:`tdcoll.primitives.ll`) in the rank's own segment of
the inbox, which no peer writes to. Their flag is the number of the call (:func:`_flag`).

Signal map: there are no signals. Words of ``inbox[slot, s]`` on rank r are written by rank s and
polled by r; those of ``inbox[slot, r]`` are published and polled by r's own thread blocks.

Ordering and reuse of a slot: those of :mod:`tdcoll.primitives.lamport`. A rank that is done with a
call has heard from every peer: of every row in one-shot, and of the rows that it owns in two-shot.

Order of thread blocks. One-shot, by rows: a row's first thread blocks send before they wait for
those of the same number elsewhere; its second ones wait for the first ones, which come before on
every rank. Two-shot: those that reduce own rows come first. They send before they wait for the same
thread blocks elsewhere, and the others wait for what these have sent or published. Any number of
resident blocks therefore makes progress.

In place: ``new`` may be ``residual``, because a piece is stored after all thread blocks that read
its residual have read it: by the only one, or by the second, when all measures have come.

Bits: those of an all-reduce, rounded, and of :mod:`tdcoll.fused.kernels_rows`, in all three
kernels, whatever the number of rows, PIECES, BLOCK, warps or the algorithm.
"""

import triton.language as tl

import tdcoll.language as tdl
from tdcoll.fused.kernels_rows import add, load_weight, measure, store_row, tree
from tdcoll.language.jit import jit
from tdcoll.primitives import lamport, words
from tdcoll.primitives.group import in_stream_order
from tdcoll.primitives.reduce import SUM


@jit
def _flag(call):
    """Return the flag of a call's measures: never the sentinel, because it has 31 bits. It comes
    again in another slot."""
    return (call & 0x7FFFFFFF).to(tl.int32)


@jit
def _new(g, inbox, word, mine, residual, call, mask, DTYPE: tl.constexpr):
    """Return ``(words of the new residual, mask)``, from ``mine``, the words of all others, and the
    residual."""
    parts, mask = words.receive(g, inbox, word, mine, call, mask, True)
    place = (0, word, 0, mask)  # which only epilogues use, and the norm has none
    summed = words.reduce(parts, g.world, place, (None, None, None), DTYPE, tl.float32, SUM, True)
    return add(summed, residual, DTYPE), mask


@jit
def _as_words(total, largest, BLOCK: tl.constexpr):
    """Return measures as a block of words; only the first counts."""
    nothing = tl.zeros([BLOCK], tl.int32)
    return (
        nothing + total.to(tl.int32, bitcast=True),
        nothing + largest.to(tl.int32, bitcast=True),
        nothing,
        nothing,
    )


@jit
def _publish(g, inbox, index, total, largest, call, BLOCK: tl.constexpr):
    """Store the measures of piece ``index`` for other thread blocks of this GPU."""
    lane = tl.arange(0, BLOCK)
    at = lamport.segment(g, inbox, call, g.rank) + 16 * tl.cast(index + lane, tl.int64)
    measures = _as_words(total, largest, BLOCK)
    tdl.store_flagged(at, measures[0], measures[1], measures[2], _flag(call), lane == 0)


@jit
def _together(totals, largests, arrived):
    """Return ``(total, largest)`` of a row, from the measures of its pieces as int32."""
    here = arrived != 0
    totals = tl.where(here, totals, 0).to(tl.float32, bitcast=True)
    largests = tl.where(here, largests, 0).to(tl.float32, bitcast=True)
    return tree(totals), tl.max(largests, 0)


@jit
def _published(g, inbox, index, call, PIECES: tl.constexpr, ROOM: tl.constexpr):
    """Return ``(total, largest)`` of the row whose pieces begin at ``index``, when all are
    published."""
    piece = tl.arange(0, ROOM)
    at = lamport.segment(g, inbox, call, g.rank) + 16 * tl.cast(index + piece, tl.int64)
    mask = piece < PIECES
    totals, largests, _, arrived = tdl.wait_flagged(at, _flag(call), mask, g.monitor, g.rank)
    return _together(totals, largests, arrived * mask.to(tl.int32))


@jit
def _store(
    made, out, scale, row, word, new, weights, total, largest, eps, mask,
    HIDDEN: tl.constexpr, DTYPE: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Store words of a row of the new residual to ``made``, and normalized by the row's measures to
    ``out``."""
    at = (
        made
        + tl.cast(row, tl.int64) * (HIDDEN * DTYPE.primitive_bitwidth // 8)
        + 16 * tl.cast(word, tl.int64)
    )
    tdl.store_words(at, new[0], new[1], new[2], new[3], mask)
    store_row(out, scale, row, word, new, weights, total, largest, eps, mask, HIDDEN, DTYPE, SCALE)


@jit
def norm_rows_one_shot(
    x: tl.int64, residual: tl.int64, weight: tl.int64, new: tl.int64, out: tl.int64, scale: tl.int64, inbox, g,
    rows: tl.int32, eps: tl.int32, HIDDEN: tl.constexpr, DTYPE: tl.constexpr, WEIGHT: tl.constexpr,
    SCALE: tl.constexpr, PIECES: tl.constexpr, ROOM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``[rows, HIDDEN] -> [rows, HIDDEN]``, twice. Thread blocks: one for each row, or two for each
    of several pieces.

    Args (addresses are integers, so that all ranks share one compilation):
        x, residual: the rows to reduce, and those to add to the sum.
        weight: ``[HIDDEN]``.
        new, out: the new residual, and the normalized one. ``new`` may be ``residual``.
        scale: fp32 of :data:`~tdcoll.fused.kernels_rows.GIVEN` or ``PER_ROW`` scales.
        inbox: :class:`~tdcoll.primitives.lamport.Lamport`, whose segments hold all words.
        g: :class:`~tdcoll.primitives.group.Group`.
        eps: the bits of an fp32.
        DTYPE, WEIGHT: of the elements and of the weights.
        SCALE: of :data:`~tdcoll.fused.kernels_rows.NONE`, ``GIVEN`` and ``PER_ROW``; with a scale
            ``out`` is fp8.
        PIECES, ROOM: of a row, and a power of two of at least as many.
        BLOCK: words of a piece, a power of two.
    """
    in_stream_order()
    width: tl.constexpr = HIDDEN * DTYPE.primitive_bitwidth // 128  # words of a row
    program = tl.program_id(0)
    row = program
    piece = program * 0
    stores = program >= 0
    sends = stores
    if PIECES > 1:
        row = program // (2 * PIECES)
        piece = program % PIECES
        stores = program % (2 * PIECES) >= PIECES
        sends = program % (2 * PIECES) < PIECES
    word = piece * BLOCK + tl.arange(0, BLOCK)
    inside = word < width
    at = tl.cast(row, tl.int64) * (16 * width)
    # Read before the number of the call is: all take their time.
    deltas = words.deltas_of(g)
    mine = lamport.load(x + at, word, 16 * width)
    old = lamport.load(residual + at, word, 16 * width)
    weights = load_weight(weight, word, HIDDEN, DTYPE, WEIGHT)
    call, alive = lamport.start(g, inbox)
    if alive == 0:
        return
    place = row * width + word
    if sends:
        words.send_to_all(g, inbox, deltas, place, mine, call, inside, True)
    lamport.clear(g, inbox, call, 16 * width * tl.cast(rows, tl.int64), BLOCK)
    made, mask = _new(g, inbox, place, mine, old, call, inside, DTYPE)
    if PIECES == 1:
        total, largest = measure(made, weights, DTYPE, SCALE)
        _store(
            new,
            out,
            scale,
            row,
            word,
            made,
            weights,
            total,
            largest,
            eps,
            mask,
            HIDDEN,
            DTYPE,
            SCALE,
        )
    elif stores:
        total, largest = _published(g, inbox, row * PIECES, call, PIECES, ROOM)
        _store(
            new,
            out,
            scale,
            row,
            word,
            made,
            weights,
            total,
            largest,
            eps,
            mask,
            HIDDEN,
            DTYPE,
            SCALE,
        )
    else:
        total, largest = measure(made, weights, DTYPE, SCALE)
        _publish(g, inbox, row * PIECES + piece, total, largest, call, BLOCK)


@jit
def norm_rows_two_shot(
    x: tl.int64, residual: tl.int64, weight: tl.int64, new: tl.int64, out: tl.int64, scale: tl.int64, inbox, g,
    rows: tl.int32, eps: tl.int32, HIDDEN: tl.constexpr, DTYPE: tl.constexpr, WEIGHT: tl.constexpr,
    SCALE: tl.constexpr, PIECES: tl.constexpr, ROOM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``[rows, HIDDEN] -> [rows, HIDDEN]``, twice, on at least two ranks, of at least as many rows.

    Thread blocks: ``PIECES`` for each of ``ceil(rows / world)`` rows that a rank may own, which
    reduce; then ``PIECES`` for each of these rows of every rank, which store. With one piece for
    each row the first ones also store the rank's own rows, and the others are for rows of other
    ranks only.

    Args: those of :func:`norm_rows_one_shot`; segments hold two parts of the words, and a word for
    each piece of one.
    """
    in_stream_order()
    width: tl.constexpr = HIDDEN * DTYPE.primitive_bitwidth // 128  # words of a row
    owners: tl.constexpr = g.world if PIECES > 1 else g.world - 1
    each = tl.cdiv(rows, g.world)
    reducing = each * PIECES
    measures = 2 * each * width
    nbytes = 16 * (tl.cast(measures, tl.int64) + reducing)
    program = tl.program_id(0)
    reduces = program < reducing
    piece = program % PIECES
    word = piece * BLOCK + tl.arange(0, BLOCK)
    inside = word < width
    # The owners of the rows, in the order in which they send to this rank, itself last.
    turn = (program - reducing) // PIECES
    step = turn % owners + 1
    i = turn // owners
    if reduces:
        step = program * 0
        i = program // PIECES
    owner = (g.rank + step) % g.world
    row = i * g.world + owner
    there = inside & (row < rows)
    place = i * width + word
    at = tl.cast(row, tl.int64) * (16 * width)
    own = tl.where((row < rows) & (owner == g.rank), 16 * width, 0)
    # All is loaded before the number of the call is known, and before anything is sent, because
    # loads do not pass stores.
    deltas = words.deltas_of(g)
    mine = lamport.load(x + at, word, own)
    old = lamport.load(residual + at, word, own)
    weights = load_weight(weight, word, HIDDEN, DTYPE, WEIGHT)
    shares = ()
    for s in tl.static_range(1, g.world):
        theirs = i * g.world + (g.rank + s) % g.world
        size = tl.where(reduces & (theirs < rows), 16 * width, 0)
        shares += (lamport.load(x + tl.cast(theirs, tl.int64) * (16 * width), word, size),)  # type: ignore[assignment]
    call, alive = lamport.start(g, inbox)
    if alive == 0:
        return
    if reduces:
        for s in tl.static_range(1, g.world):
            theirs = i * g.world + (g.rank + s) % g.world
            words.send(
                g, inbox, deltas[s - 1], place, shares[s - 1], call, inside & (theirs < rows), True
            )
    lamport.clear(g, inbox, call, nbytes, BLOCK)
    if owner == g.rank:
        made, mask = _new(g, inbox, place, mine, old, call, there, DTYPE)
        if reduces:
            words.send_to_all(g, inbox, deltas, each * width + place, made, call, mask, True)
            total, largest = measure(made, weights, DTYPE, SCALE)
            lane = tl.arange(0, BLOCK)
            measured = _as_words(total, largest, BLOCK)
            only = (lane == 0) & (row < rows)
            words.send_to_all(
                g, inbox, deltas, measures + i * PIECES + piece + lane, measured, call, only, True
            )
            if PIECES > 1:
                _publish(g, inbox, i * PIECES + piece, total, largest, call, BLOCK)
            elif row < rows:
                _store(
                    new,
                    out,
                    scale,
                    row,
                    word,
                    made,
                    weights,
                    total,
                    largest,
                    eps,
                    mask,
                    HIDDEN,
                    DTYPE,
                    SCALE,
                )
        elif row < rows:
            total, largest = _published(g, inbox, i * PIECES, call, PIECES, ROOM)
            _store(
                new,
                out,
                scale,
                row,
                word,
                made,
                weights,
                total,
                largest,
                eps,
                mask,
                HIDDEN,
                DTYPE,
                SCALE,
            )
    elif row < rows:
        first, second, third, fourth, arrived = lamport.receive(
            g, inbox, owner, each * width + place, call, there
        )
        mask = there & (arrived != 0)
        index = tl.arange(0, ROOM)
        known = index < PIECES
        totals, largests, _, _, came = lamport.receive(
            g, inbox, owner, measures + i * PIECES + index, call, known
        )
        total, largest = _together(totals, largests, came * known.to(tl.int32))
        made = (first, second, third, fourth)
        _store(
            new,
            out,
            scale,
            row,
            word,
            made,
            weights,
            total,
            largest,
            eps,
            mask,
            HIDDEN,
            DTYPE,
            SCALE,
        )


@jit
def norm_rows(
    x: tl.int64, residual: tl.int64, weight: tl.int64, new: tl.int64, out: tl.int64, scale: tl.int64, eps: tl.int32,
    HIDDEN: tl.constexpr, DTYPE: tl.constexpr, WEIGHT: tl.constexpr, SCALE: tl.constexpr, PIECES: tl.constexpr,
    ROOM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``[rows, HIDDEN] -> [rows, HIDDEN]``, twice: the norm after an all-reduce. Thread blocks: one
    for each row.

    Args: those of :func:`norm_rows_one_shot`; ``x`` is reduced already.
    """
    in_stream_order()
    width: tl.constexpr = HIDDEN * DTYPE.primitive_bitwidth // 128  # words of a row
    row = tl.program_id(0)
    at = tl.cast(row, tl.int64) * (16 * width)
    pieces = tl.arange(0, ROOM)
    totals = tl.zeros([ROOM], tl.float32)
    largests = tl.zeros([ROOM], tl.float32)
    for piece in tl.static_range(PIECES):
        word = piece * BLOCK + tl.arange(0, BLOCK)
        reduced = lamport.load(x + at, word, 16 * width)
        old = lamport.load(residual + at, word, 16 * width)
        made = add(reduced, old, DTYPE)
        tdl.store_words(
            new + at + 16 * tl.cast(word, tl.int64),
            made[0],
            made[1],
            made[2],
            made[3],
            word < width,
        )
        total, largest = measure(
            made, load_weight(weight, word, HIDDEN, DTYPE, WEIGHT), DTYPE, SCALE
        )
        totals = tl.where(pieces == piece, total, totals)
        largests = tl.where(pieces == piece, largest, largests)
    total = tree(totals)
    largest = tl.max(largests, 0)
    tdl.syncthreads()  # because another thread may have stored these words
    for piece in tl.static_range(PIECES):
        word = piece * BLOCK + tl.arange(0, BLOCK)
        made = lamport.load(new + at, word, 16 * width)
        weights = load_weight(weight, word, HIDDEN, DTYPE, WEIGHT)
        store_row(
            out,
            scale,
            row,
            word,
            made,
            weights,
            total,
            largest,
            eps,
            word < width,
            HIDDEN,
            DTYPE,
            SCALE,
        )
