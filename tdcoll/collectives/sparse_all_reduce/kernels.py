# SPDX-License-Identifier: Apache-2.0
"""Sparse all-reduce kernels: every row is reduced by one of the ranks that have it.

One call, step by step; each line is one launch, on every rank, in the order of its stream. ``lists``, ``out`` and
``stage`` are symmetric memory of a :class:`~tdcoll.SparseContext`, the rest is this GPU's own::

    pack       own ids --sorted, each once--> lists[rank], with a header that says how many
    exchange   lists[rank] --counted all-gather in place--> lists[rank] on every rank                     epoch e
    directory  lists --> the union, and where each id is in each list (tdcoll.collectives.index_match)
    plan       own ids, directory --> who reduces each of my rows: work lists
    combine    rows that I have several times, or that another rank reduces: sum --> stage[position in lists[rank]]
               (two more launches if there may be more than PIECE rows of one id)
    reduce     rows that I reduce: own row, stage[...] of the others --sum in rank order--> out[union position] of all
                                                                                                          epoch e + 1
    meet       nothing moves                                                                              epoch e + 2

*Who reduces a row*: one of the ranks that have it, picked by a hash of its id, which all ranks compute alike. For c
contributors that moves c - 1 rows in and world - 1 out, which is the least that a reduction to one place and a
broadcast from it can move. The hash, and not the range that an id is in, spreads the rows: a vocabulary sorted by
frequency has all of its frequent rows in one range.

Signal map and order:

- exchange: as in :mod:`tdcoll.collectives.all_gather.kernels_puts`, in place.
- In the other launches that have an epoch, ``signals[slot, 0, p] >= epoch`` on r is set by rank p when it has begun
  that launch, hence done all that it launched before. *reduce* waits for it before it reads any ``stage``: everybody
  has combined. *meet* waits for it before it ends: everybody has reduced, so ``out`` is complete here. The signals are
  sent by programs of their own, the first of the grid, that do nothing else. Every rank waits for all of them in every
  epoch, also where it has nothing to read: only then has everybody got the signal of e when one of e + 2 is sent to
  the same word. (A signal of e that arrived after one of e + 2 would take it back.)
- Stores into peers' ``out`` are ordinary ones, made visible by the end of the launch and the signal that the next
  launch sends (``signal_block`` fences at system scope).

Why the memory may be used again: when *exchange* of the next call is complete here, every rank has begun that call, so
it is done with the results of this one (the caller's work on its stream included) and with everybody's ``stage``. The
exchange itself lets nobody write into ``lists`` of a rank that has not begun. So one ``lists``, one ``stage`` and one
``out`` are enough.

Several nodes: no address of another node can be stored to. Each node reduces its own rows first, as above but among its
ranks only; a row of several nodes then goes from node to node as a partial sum, and from the last of them to one rank
of every other node, which hands it on inside. From one node to another a row crosses at most once, and between nodes
(nodes that have it - 1) + (nodes - 1) times in all. The order of the nodes of a row is rotated by its hash, so that all
nodes are busy in each of the steps::

    reduce_nodes, step = 0 .. nodes - 1        one launch and one epoch each
        rows of which this node is number ``step`` in the rotated order, and this rank the one that reduces it:
        out[u] (what an earlier node has put there) + the node's parts --> own out[u]
        --put--> out[u] of the rank that reduces it in the next node that has it, or, on the last,
        --stores--> out[u] of this node, --put--> out[u] of one rank of every other node
    forward    that rank --stores--> out[u] of its node                                                   one epoch
    meet

A put row is complete before its program ends (quiet), and is looked at in a later launch, after the signal of that
one. ``out[u]`` of a rank is written at most twice by others in a call: by the partial sum that comes in, and by the
final one, which exists only after the partial sum has been used.

Accumulation is in fp32 for fp16 and bf16, rounded when a partial result is stored: once where a rank has a row several
times, once per node, once at the end. Every rank gets the bits of the one that reduced the row. No result is -0.0, also
of a row that only one rank has: sums begin at +0.0, and what may be -0.0 all the same (a product, a maximum of zeros of
both signs, what is rounded to zero) has 0 added to it where it is stored.
"""

import triton.language as tl

import tdcoll.language as tdl
from tdcoll.collectives.index_match import kernels as match
from tdcoll.language.jit import jit
from tdcoll.primitives.group import begin_epoch
from tdcoll.primitives.reduce import accumulate, rounded, share

__all__ = [
    "HEADER",
    "combine",
    "copy_list",
    "count_first",
    "forward",
    "meet",
    "merge",
    "pad",
    "plan",
    "reduce",
    "reduce_nodes",
    "sum_partial",
    "sum_pieces",
    "write_list",
]

HEADER = match.HEADER

SINGLE, CONTESTED, STAGED, LONG = (tl.constexpr(i) for i in range(4))
"""Work lists: rows that this rank alone has (in its node) and reduces; others that it reduces; those to combine; and of
these the ones that are too many times there for one program."""

LISTS = tl.constexpr(4)

PIECE = tl.constexpr(128)
"""Rows of one id that one program sums; with more of them the work is divided."""


_NUMBERS = (
    "n capacity signature row_bytes target stride words max_union num_rows rank world n_mates slot_signals node "
    "n_nodes step"
).split()
"""What differs from rank to rank and from call to call; one compilation serves them all."""

_USERS = ["ids", "order", "begins"]
"""What may be the caller's memory, at any address; rows are, too, and their alignment pays."""


# ---------------------------------------------------------------------- pack


@jit
def _write_header(own, count, capacity, signature, row_bytes):
    """``own``: bytes used, ids, signature. ``row_bytes``: of the rows that follow the ids; 0 if none do."""
    kept = tl.minimum(count, tl.cast(capacity, tl.int64))
    ids_bytes = 8 * (HEADER + kept)
    if row_bytes > 0:
        ids_bytes = (ids_bytes + 15) // 16 * 16
    tl.store(own, ids_bytes + kept * row_bytes)
    tl.store(own + 1, count)
    tl.store(own + 2, tl.cast(signature, tl.int64))
    tl.store(own + 3, tl.cast(0, tl.int64))


@jit
def _is_first(ids, index, n):
    """Which of the sorted ``ids[index]`` differ from the one before, and they."""
    inside = index < n
    here = tl.load(ids + index, mask=inside, other=0)
    before = tl.load(ids + index - 1, mask=inside & (index > 0), other=0)
    return inside & ((index == 0) | (here != before)), here


@jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_USERS)
def count_first(ids, totals, n, BLOCK: tl.constexpr):
    """``ids [n]`` sorted ``-> totals [blocks]``: distinct ids of each block that do not begin before it."""
    block = tl.program_id(0)
    index = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
    first, _ = _is_first(ids, index, n)
    tl.store(totals + block, tl.sum(first.to(tl.int32), axis=0))


@jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_USERS)
def write_list(ids, totals, own, begins, counters, n, capacity, signature, row_bytes, BLOCK: tl.constexpr):
    """``ids [n]`` sorted ``-> own``: each once, with the header; ``begins[k]``: where the k-th begins in ``ids``.

    ``begins`` has room for ``n + 1``; the last one used is ``n``. Zeroes the ``counters`` of the work lists. One
    program per ``BLOCK`` ids, at least one.
    """
    block = tl.program_id(0)
    index = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
    first, here = _is_first(ids, index, n)
    before = tl.cast(0, tl.int64)
    for other in tl.range(0, block, BLOCK):
        blocks = other + tl.arange(0, BLOCK)
        before += tl.sum(tl.load(totals + blocks, mask=blocks < block, other=0).to(tl.int64), axis=0)
    place = before + tl.cumsum(first.to(tl.int64), axis=0) - 1
    tl.store(begins + place, index, mask=first)
    tl.store(own + HEADER + place, here, mask=first & (place < capacity))
    if block == tl.num_programs(0) - 1:
        count = before + tl.sum(first.to(tl.int64), axis=0)
        tl.store(begins + count, tl.cast(n, tl.int64))
        _write_header(own, count, capacity, signature, row_bytes)
        _zero_counters(counters)


@jit
def _zero_counters(counters):
    for i in tl.static_range(LISTS):
        tl.store(counters + i, 0)


@jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_USERS)
def copy_list(ids, own, counters, n, capacity, signature, row_bytes, BLOCK: tl.constexpr):
    """``ids [n]``, sorted, each once, ``-> own``, with the header; zeroes ``counters``. Programs as many as blocks."""
    block = tl.program_id(0)
    index = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < tl.minimum(tl.cast(n, tl.int64), tl.cast(capacity, tl.int64))
    tl.store(own + HEADER + index, tl.load(ids + index, mask=inside, other=0), mask=inside)
    if block == 0:
        _write_header(own, tl.cast(n, tl.int64), capacity, signature, row_bytes)
        _zero_counters(counters)


# ---------------------------------------------------------------------- plan


@jit
def _choose(ids, count, FACTOR: tl.constexpr):
    """A number in ``0..count - 1`` for each id: Knuth's multiplicative hash of all bits of the id, folded to 31."""
    key = (ids ^ (ids >> 31)) & 0x7FFFFFFF
    key ^= key >> 15
    mixed = ((key * FACTOR) >> 16) & 0xFFFF
    return ((mixed * count) >> 16).to(tl.int32)


@jit
def _pick(ids, count):
    """Which of ``count`` ranks works on a row."""
    return _choose(ids, count, 2654435761)


@jit
def _turn(ids, n_nodes):
    """The node that is first in the order of nodes of each id."""
    return _choose(ids, n_nodes, 2246822519)


@jit
def _append(work, counters, kind, capacity, rows, wanted):
    """Add ``rows`` where ``wanted`` to the work list ``kind``. The order of a list is that of the programs' arrival."""
    number = wanted.to(tl.int32)
    begin = tl.atomic_add(counters + kind, tl.sum(number, axis=0), sem="relaxed", scope="gpu")
    place = begin + tl.cumsum(number, axis=0) - 1
    tl.store(work + tl.cast(kind, tl.int64) * capacity + place, rows.to(tl.int32), mask=wanted)


@jit
def _valid(status, capacity, max_union):
    """Whether the lists of all ranks are fit to be used; the same on every rank, since all have the same lists."""
    fits = (tl.load(status + match.UNION) <= max_union) & (tl.load(status + match.MAX_ROWS) <= capacity)
    bad = tl.load(status + match.BAD_RANGE) | tl.load(status + match.BAD_ORDER) | tl.load(status + match.BAD_SIGNATURE)
    return fits & (bad == 0)


@jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_USERS)
def plan(
    lists, union, entries, status, begins, targets, work, counters, mates,
    stride, capacity, words, max_union, rank, world, n_mates,
    SEARCH: tl.constexpr, REPEATED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sort this rank's rows into work lists, and find their places in the union. One program per ``BLOCK`` rows.

    Args:
        targets: int32 ``[capacity]``: place in the union of each row of this rank's list.
        work, counters: int32 ``[LISTS, capacity]`` and ``[LISTS]``: the work lists and their lengths. They stay empty,
            and nothing moves, if the lists of ids are not valid (see ``status``).
        mates: int32 ``[n_mates]``: the ranks of this node, this one included, ascending.
        REPEATED: rows may be there several times: ``begins`` says where each begins.
    """
    rows = tl.cast(tl.program_id(0), tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < match.list_size(lists, stride, rank, capacity)
    if _valid(status, capacity, max_union):
        ids = tl.load(lists + tl.cast(rank, tl.int64) * stride + HEADER + rows, mask=inside, other=0)
        have = tl.zeros([BLOCK], tl.int32)
        for m in tl.range(0, n_mates):
            have += (match.find(ids, tl.load(mates + m), lists, stride, capacity, entries, words, SEARCH) >= 0).to(
                tl.int32
            )
        pick = _pick(ids, have)
        seen = tl.zeros([BLOCK], tl.int32)
        owner = tl.zeros([BLOCK], tl.int32) - 1
        for m in tl.range(0, n_mates):
            mate = tl.load(mates + m)
            has = match.find(ids, mate, lists, stride, capacity, entries, words, SEARCH) >= 0
            owner = tl.where(has & (seen == pick), mate, owner)
            seen += has.to(tl.int32)
        target = match.find_in_union(ids, union, status, world, max_union, entries, words, SEARCH)
        tl.store(targets + rows, target.to(tl.int32), mask=inside)
        mine = inside & (owner == rank)
        staged = inside & (owner != rank)
        if REPEATED:
            begin = tl.load(begins + rows, mask=inside, other=0)
            end = tl.load(begins + rows + 1, mask=inside, other=0)
            staged = staged | (inside & (end - begin > 1))
        _append(work, counters, SINGLE, capacity, rows, mine & (have == 1))
        _append(work, counters, CONTESTED, capacity, rows, mine & (have > 1))
        _append(work, counters, STAGED, capacity, rows, staged)


# ---------------------------------------------------------------------- values


@jit
def _rows_of(address, like, ALIGNED: tl.constexpr = False):
    """``address`` as a pointer to elements of the type that ``like`` points to. ``ALIGNED``: a multiple of 16."""
    rows = tl.cast(address, tl.int64).to(tl.pointer_type(like.dtype.element_ty))
    if ALIGNED:
        rows = tl.multiple_of(rows, 16)
    return rows


@jit
def _end_of_ids(own, capacity):
    """Address after the ids of the list at address ``own``, where its rows begin if they go with it."""
    count = tl.minimum(tl.load(tl.cast(own, tl.int64).to(tl.pointer_type(tl.int64)) + 1), tl.cast(capacity, tl.int64))
    return own + (8 * (HEADER + count) + 15) // 16 * 16


@jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_USERS)
def combine(
    source, order, begins, own, target: tl.int64, work, counters, capacity, row_elements,
    ALL: tl.constexpr, REPEATED: tl.constexpr, ACC: tl.constexpr, ALIGNED: tl.constexpr, DEEP: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Rows of ``source``, those with one id summed, ``-> [..., row_elements]`` at address ``target``.

    Any number of programs. ``ALL``: every row of the list ``own``, else those of the work list STAGED. ``target`` 0:
    the place after the ids of ``own``. A sum takes ``DEEP`` rows at a time, in an order that depends on nothing but
    their number and, beyond :data:`PIECE`, the number of rows before them. Rows of which there are more than
    :data:`PIECE` go to the work list LONG.

    Args:
        source: ``[n, row_elements]``.
        order: int64 ``[n]``: which row of ``source`` is the i-th in the order of ids. With ``REPEATED`` only.
        begins: int64: where in ``order`` each id begins. With ``REPEATED`` only.
    """
    count = tl.load(counters + STAGED).to(tl.int64)
    place = tl.cast(target, tl.int64)
    if ALL:
        count = tl.minimum(tl.load(own + 1), tl.cast(capacity, tl.int64))
    if place == 0:
        place = _end_of_ids(tl.cast(own, tl.int64), capacity)
    to = _rows_of(place, source, ALIGNED)
    for k in tl.range(tl.program_id(0), count, tl.num_programs(0)):
        row = tl.cast(k, tl.int64)
        if not ALL:
            row = tl.load(work + STAGED * tl.cast(capacity, tl.int64) + k).to(tl.int64)
        begin = row
        end = row + 1
        if REPEATED:
            begin = tl.load(begins + row)
            end = tl.load(begins + row + 1)
        for column in tl.range(0, row_elements, WIDE):
            columns = column + tl.arange(0, WIDE)
            inside = columns < row_elements
            if end - begin == 1:
                here = begin
                if REPEATED:
                    here = tl.load(order + begin)
                only = tl.load(source + here * row_elements + columns, mask=inside)
                tl.store(to + row * row_elements + columns, only, mask=inside)
            elif end - begin <= PIECE:
                sum = _sum_of(source, order, begin, end, columns, row_elements, ACC, DEEP, WIDE)
                tl.store(to + row * row_elements + columns, sum.to(source.dtype.element_ty), mask=inside)
        if REPEATED:
            if end - begin > PIECE:
                item = tl.atomic_add(counters + LONG, 1, sem="relaxed", scope="gpu")
                tl.store(work + LONG * tl.cast(capacity, tl.int64) + item, row.to(tl.int32))


@jit
def _sum_of(
    source, order, begin, end, columns, row_elements, ACC: tl.constexpr, DEEP: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """Sum of the rows ``order[begin:end]`` of ``source``, ``DEEP`` at a time."""
    sum = tl.zeros([WIDE], ACC)
    for i in tl.range(begin, end, DEEP):
        parts = i + tl.arange(0, DEEP)
        here = tl.load(order + parts, mask=parts < end, other=0)
        tile = tl.load(
            source + here[:, None] * row_elements + columns[None, :],
            mask=(parts < end)[:, None] & (columns < row_elements)[None, :],
            other=0,
        )
        sum += tl.sum(tile.to(ACC), axis=0)
    return sum


@jit
def _slot(piece, begin):
    """Place of a partial sum: the rows of an id that are in the ``piece``-th :data:`PIECE` of all, in the order of ids.

    At most two ids that are there more than :data:`PIECE` times have rows in one piece, and one of them begins in it.
    """
    return 2 * piece + (begin > piece * PIECE).to(tl.int64)


@jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_USERS)
def sum_pieces(
    source, order, begins, partial, work, counters, capacity, row_elements,
    ACC: tl.constexpr, DEEP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Rows of the work list LONG, piece by piece, ``-> partial [slots, row_elements]`` in the type of sums.

    Programs: any number of rows at a time, times any number of pieces.
    """
    count = tl.load(counters + LONG)
    for k in tl.range(tl.program_id(0), count, tl.num_programs(0)):
        row = tl.load(work + LONG * tl.cast(capacity, tl.int64) + k).to(tl.int64)
        begin = tl.load(begins + row)
        end = tl.load(begins + row + 1)
        for piece in tl.range(begin // PIECE + tl.program_id(1), (end - 1) // PIECE + 1, tl.num_programs(1)):
            first = tl.maximum(begin, piece * PIECE)
            last = tl.minimum(end, (piece + 1) * PIECE)
            for column in tl.range(0, row_elements, WIDE):
                columns = column + tl.arange(0, WIDE)
                sum = _sum_of(source, order, first, last, columns, row_elements, ACC, DEEP, WIDE)
                place = partial + _slot(piece, begin) * row_elements
                tl.store(place + columns, sum, mask=columns < row_elements)


@jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_USERS)
def sum_partial(
    like, begins, partial, own, target: tl.int64, work, counters, capacity, row_elements,
    ACC: tl.constexpr, ALIGNED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """What :func:`sum_pieces` has left, in order, ``->`` the places where :func:`combine` puts rows. Any programs."""
    place = target
    if place == 0:
        place = _end_of_ids(tl.cast(own, tl.int64), capacity)
    to = _rows_of(place, like, ALIGNED)
    count = tl.load(counters + LONG)
    for k in tl.range(tl.program_id(0), count, tl.num_programs(0)):
        row = tl.load(work + LONG * tl.cast(capacity, tl.int64) + k).to(tl.int64)
        begin = tl.load(begins + row)
        end = tl.load(begins + row + 1)
        for column in tl.range(0, row_elements, WIDE):
            columns = column + tl.arange(0, WIDE)
            sum = tl.zeros([WIDE], ACC)
            for piece in tl.range(begin // PIECE, (end - 1) // PIECE + 1):
                part = partial + _slot(piece, begin) * row_elements
                sum += tl.load(part + columns, mask=columns < row_elements, other=0)
            tl.store(to + row * row_elements + columns, sum.to(like.dtype.element_ty), mask=columns < row_elements)


@jit
def _own_places(rows, inside, order, begins, REPEATED: tl.constexpr):
    """``(places, direct)`` of this rank's ``rows``: in ``source`` where ``direct``, in ``stage`` where combined."""
    places = rows
    direct = inside
    if REPEATED:
        begin = tl.load(begins + rows, mask=inside, other=0)
        end = tl.load(begins + rows + 1, mask=inside, other=0)
        direct = inside & (end - begin == 1)
        places = tl.where(direct, tl.load(order + begin, mask=inside, other=0), rows)
    return places, direct


@jit
def _load_own(places, inside, direct, columns, source, stage, row_elements, REPEATED: tl.constexpr):
    """``-> [ROWS, WIDE]``: rows at ``places``, see :func:`_own_places`."""
    within = (columns < row_elements)[None, :]
    offsets = places[:, None] * row_elements + columns[None, :]
    tile = tl.load(source + offsets, mask=direct[:, None] & within, other=0)
    if REPEATED:
        combined = tl.load(stage + offsets, mask=(inside & (direct == 0))[:, None] & within, other=0)
        tile = tl.where(direct[:, None], tile, combined)
    return tile


@jit
def _store_everywhere(tile, at, inside, columns, outs, rank, world, like, row_elements, ALIGNED: tl.constexpr):
    """Rows ``at`` of every rank's ``out``, this one's first, so that no rank is everybody's first target."""
    mask = inside[:, None] & (columns < row_elements)[None, :]
    for i in tl.range(0, world):
        out = _rows_of(tl.load(outs + (rank + i) % world), like, ALIGNED)
        tl.store(out + at[:, None] * row_elements + columns[None, :], tile, mask=mask)


@jit
def _begun(signals, slot_signals, epoch):
    """The signals that say which ranks have begun ``epoch``: those of channel 0."""
    return signals + (epoch % 2) * slot_signals


@jit
def _announce(program, begun, epoch, pes, rank, world):
    """Program ``program`` of the first ``world - 1``: tell the rank that many after this one that we have begun."""
    tdl.signal_block(begun + rank, epoch, tdl.SIGNAL_SET, tl.load(pes + (rank + 1 + program) % world))


@jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_USERS)
def reduce(
    source, order, begins, stages, outs, lists, entries, work, counters, targets, signals, control, monitor, pes,
    slot_signals, stride, capacity, words, rank, world, row_elements,
    SEARCH: tl.constexpr, REPEATED: tl.constexpr, OP: tl.constexpr, ACC: tl.constexpr, ALIGNED: tl.constexpr,
    ROWS: tl.constexpr, WIDE: tl.constexpr, WAITED: tl.constexpr,
):  # fmt: skip
    """One node: the rows that this rank reduces ``-> out[union position]`` of every rank.

    Programs: ``world - 1`` that announce, and any number that work. Rows that nobody else has come first: they need no
    rank but this one, so the others have that time to combine theirs.

    Args:
        source, order, begins, work, counters, targets: as in :func:`combine` and :func:`plan`.
        stages, outs: int64 ``[world]``: addresses of each rank's ``stage`` and ``out``.
        signals: the context's, two slots of ``slot_signals``. pes: int32 ``[world]``.
        row_elements: of a row.
        ROWS, WIDE: of a tile. WAITED: a power of two of at least ``world``.
    """
    program = tl.program_id(0)
    epoch, alive = begin_epoch(control, monitor)
    if alive == 0:
        return
    begun = _begun(signals, slot_signals, epoch)
    if program < world - 1:
        _announce(program, begun, epoch, pes, rank, world)
    else:
        worker = program - (world - 1)
        workers = tl.num_programs(0) - (world - 1)
        wide = tl.cast(capacity, tl.int64)
        stage = _rows_of(tl.load(stages + rank), source, ALIGNED)
        n_single = tl.load(counters + SINGLE)
        for k in tl.range(worker * ROWS, n_single, workers * ROWS):
            items = k + tl.arange(0, ROWS)
            inside = items < n_single
            rows = tl.load(work + items, mask=inside, other=0).to(tl.int64)
            at = tl.load(targets + rows, mask=inside, other=0).to(tl.int64)
            places, direct = _own_places(rows, inside, order, begins, REPEATED)
            for column in tl.range(0, row_elements, WIDE):
                columns = column + tl.arange(0, WIDE)
                tile = _load_own(places, inside, direct, columns, source, stage, row_elements, REPEATED)
                alone = accumulate(tl.zeros([ROWS, WIDE], ACC), share(tile, world, ACC, OP), True, OP)
                tile = rounded(alone, source.dtype.element_ty, OP)
                _store_everywhere(tile, at, inside, columns, outs, rank, world, source, row_elements, ALIGNED)
        n_contested = tl.load(counters + CONTESTED)
        if (worker == 0) | (worker * ROWS < n_contested):
            if tdl.wait_signals(begun, world, rank, tdl.CMP_GE, epoch, monitor, WAITED) != 0:
                for k in tl.range(worker * ROWS, n_contested, workers * ROWS):
                    items = k + tl.arange(0, ROWS)
                    inside = items < n_contested
                    rows = tl.load(work + wide + items, mask=inside, other=0).to(tl.int64)
                    at = tl.load(targets + rows, mask=inside, other=0).to(tl.int64)
                    ids = tl.load(lists + rank * tl.cast(stride, tl.int64) + HEADER + rows, mask=inside, other=0)
                    places, direct = _own_places(rows, inside, order, begins, REPEATED)
                    for column in tl.range(0, row_elements, WIDE):
                        columns = column + tl.arange(0, WIDE)
                        sum = tl.zeros([ROWS, WIDE], ACC)
                        seen = tl.zeros([ROWS], tl.int32)
                        for q in tl.range(0, world):
                            if q == rank:
                                has = inside
                                tile = _load_own(places, inside, direct, columns, source, stage, row_elements, REPEATED)
                            else:
                                position = match.find(ids, q, lists, stride, capacity, entries, words, SEARCH)
                                has = inside & (position >= 0)
                                theirs = _rows_of(tl.load(stages + q), source, ALIGNED)
                                offsets = position.to(tl.int64)[:, None] * row_elements + columns[None, :]
                                mask = has[:, None] & (columns < row_elements)[None, :]
                                tile = tl.load(theirs + offsets, mask=mask, other=0)
                            both = accumulate(sum, share(tile, world, ACC, OP), (seen == 0)[:, None], OP)
                            sum = tl.where(has[:, None], both, sum)
                            seen += has.to(tl.int32)
                        result = rounded(sum, source.dtype.element_ty, OP)
                        _store_everywhere(result, at, inside, columns, outs, rank, world, source, row_elements, ALIGNED)


@jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_USERS)
def meet(signals, control, monitor, pes, slot_signals, rank, world, WAITED: tl.constexpr):
    """All ranks are done with what they launched before. Programs: ``world``."""
    program = tl.program_id(0)
    epoch, alive = begin_epoch(control, monitor)
    if alive == 0:
        return
    begun = _begun(signals, slot_signals, epoch)
    if program < world - 1:
        _announce(program, begun, epoch, pes, rank, world)
    else:
        tdl.wait_signals(begun, world, rank, tdl.CMP_GE, epoch, monitor, WAITED)


# ---------------------------------------------------------------------- several nodes


@jit
def _steps_of(id, turn, step, nodes, n_nodes, world, lists, stride, capacity, entries, words, SEARCH: tl.constexpr):
    """``(earlier, following, last)`` for one id: has a node before ``step`` of its order got it; which is the first
    one after ``step`` that has (``n_nodes``: none); which is the last that has."""
    earlier = tl.cast(0, tl.int32)
    following = tl.cast(n_nodes, tl.int32)
    last = tl.cast(0, tl.int32)
    for q in tl.range(0, world):
        has = match.find(id, q, lists, stride, capacity, entries, words, SEARCH) >= 0
        number = (tl.load(nodes + q) - turn + n_nodes) % n_nodes
        earlier = tl.where(has & (number < step), 1, earlier)
        following = tl.where(has & (number > step), tl.minimum(following, number), following)
        last = tl.where(has, tl.maximum(last, number), last)
    return earlier, following, last


@jit
def _owner_in(id, node, nodes, world, lists, stride, capacity, entries, words, SEARCH: tl.constexpr):
    """The rank of ``node`` that reduces the row: as :func:`plan` picks it there."""
    have = tl.cast(0, tl.int32)
    for q in tl.range(0, world):
        has = match.find(id, q, lists, stride, capacity, entries, words, SEARCH) >= 0
        have += (has & (tl.load(nodes + q) == node)).to(tl.int32)
    pick = _pick(id, have)
    seen = tl.cast(0, tl.int32)
    owner = tl.cast(0, tl.int32)
    for q in tl.range(0, world):
        has = match.find(id, q, lists, stride, capacity, entries, words, SEARCH) >= 0
        there = has & (tl.load(nodes + q) == node)
        owner = tl.where(there & (seen == pick), q, owner)
        seen += there.to(tl.int32)
    return owner


@jit
def _entrance(id, node, node_begins, node_ranks):
    """The rank of ``node`` that takes the final row for its node when it comes from another."""
    begin = tl.load(node_begins + node)
    size = tl.load(node_begins + node + 1) - begin
    return tl.load(node_ranks + begin + _pick(id, size))


@jit
def _hand_on(out, offset, row_bytes, outs, rank, node, node_begins, node_ranks):
    """This rank's ``out[offset:offset + row_bytes]`` to all others of its node. After a block barrier."""
    begin = tl.load(node_begins + node)
    size = tl.load(node_begins + node + 1) - begin
    for i in tl.range(0, size):
        mate = tl.load(node_ranks + begin + i)
        if mate != rank:
            tdl.copy_block(tl.load(outs + mate) + offset, out + offset, row_bytes)


@jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_USERS)
def reduce_nodes(
    source, order, begins, stages, outs, lists, entries, work, counters, targets, signals, control, monitor, pes,
    nodes, node_begins, node_ranks,
    slot_signals, stride, capacity, words, rank, world, node, n_nodes, step, row_elements,
    SEARCH: tl.constexpr, REPEATED: tl.constexpr, OP: tl.constexpr, ACC: tl.constexpr, WIDE: tl.constexpr,
    WAITED: tl.constexpr,
):  # fmt: skip
    """Several nodes, one step: see the module's docstring. Arguments as for :func:`reduce`, and

    Args:
        stages, outs: addresses of the ranks of this node; of others not used.
        nodes: int32 ``[world]``: node of each rank.
        node_begins, node_ranks: int32 ``[n_nodes + 1]``, ``[world]``: ranks of each node, ascending.
    """
    program = tl.program_id(0)
    epoch, alive = begin_epoch(control, monitor)
    if alive == 0:
        return
    begun = _begun(signals, slot_signals, epoch)
    if program < world - 1:
        _announce(program, begun, epoch, pes, rank, world)
    elif tdl.wait_signals(begun, world, rank, tdl.CMP_GE, epoch, monitor, WAITED) != 0:
        worker = program - (world - 1)
        workers = tl.num_programs(0) - (world - 1)
        row_bytes = tl.cast(row_elements, tl.int64) * (source.dtype.element_ty.primitive_bitwidth // 8)
        out = tl.load(outs + rank)
        n_single = tl.load(counters + SINGLE)
        n_mine = n_single + tl.load(counters + CONTESTED)
        mates_begin = tl.load(node_begins + node)
        mates_end = tl.load(node_begins + node + 1)
        for k in tl.range(worker, n_mine, workers):
            item = tl.where(k < n_single, tl.cast(k, tl.int64), tl.cast(capacity, tl.int64) + k - n_single)
            row = tl.load(work + item).to(tl.int64)
            id = tl.load(lists + rank * tl.cast(stride, tl.int64) + HEADER + row)
            turn = _turn(id, n_nodes)
            if (node - turn + n_nodes) % n_nodes == step:
                earlier, following, _ = _steps_of(
                    id, turn, step, nodes, n_nodes, world, lists, stride, capacity, entries, words, SEARCH
                )
                at = tl.load(targets + row).to(tl.int64)
                result = _rows_of(out, source) + at * row_elements
                for column in tl.range(0, row_elements, WIDE):
                    columns = column + tl.arange(0, WIDE)
                    inside = columns < row_elements
                    sum = tl.zeros([WIDE], ACC)
                    seen = tl.cast(0, tl.int32)
                    for m in tl.range(mates_begin, mates_end):
                        q = tl.load(node_ranks + m)
                        position = match.find(id, q, lists, stride, capacity, entries, words, SEARCH).to(tl.int64)
                        if position >= 0:
                            address = _rows_of(tl.load(stages + q), source) + position * row_elements
                            if q == rank:
                                if REPEATED:
                                    begin = tl.load(begins + row)
                                    if tl.load(begins + row + 1) - begin == 1:
                                        address = source + tl.load(order + begin) * row_elements
                                else:
                                    address = source + row * row_elements
                            part = share(tl.load(address + columns, mask=inside, other=0), world, ACC, OP)
                            sum = accumulate(sum, part, seen == 0, OP)
                            seen += 1
                    if earlier != 0:
                        before = tl.load(result + columns, mask=inside, other=0).to(ACC)
                        sum = accumulate(before, sum, False, OP)
                    tl.store(result + columns, rounded(sum, source.dtype.element_ty, OP), mask=inside)
                tdl.syncthreads()
                offset = at * row_bytes
                if following < n_nodes:
                    after = _owner_in(
                        id, (turn + following) % n_nodes, nodes, world, lists, stride, capacity, entries, words, SEARCH
                    )
                    tdl.putmem_nbi_block(out + offset, out + offset, row_bytes, tl.load(pes + after))
                else:
                    for other in tl.range(1, n_nodes):
                        entrance = _entrance(id, (node + other) % n_nodes, node_begins, node_ranks)
                        tdl.putmem_nbi_block(out + offset, out + offset, row_bytes, tl.load(pes + entrance))
                    _hand_on(out, offset, row_bytes, outs, rank, node, node_begins, node_ranks)
        tdl.quiet()


# Triton 3.6 fails to coalesce the accesses of this kernel where row_elements is the constant 1, as it makes of any 1.
reduce_nodes_of_single = jit(do_not_specialize=[*_NUMBERS, "row_elements"], do_not_specialize_on_alignment=_USERS)(
    reduce_nodes.fn
)
"""The same for rows of one element."""


@jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_USERS)
def forward(
    outs, lists, union, entries, status, signals, control, monitor, pes, nodes, node_begins, node_ranks,
    slot_signals, stride, capacity, words, max_union, rank, world, node, n_nodes, row_bytes,
    SEARCH: tl.constexpr, WAITED: tl.constexpr,
):  # fmt: skip
    """Several nodes: final rows that came to this rank from another node, to the others of its own."""
    program = tl.program_id(0)
    epoch, alive = begin_epoch(control, monitor)
    if alive == 0:
        return
    begun = _begun(signals, slot_signals, epoch)
    if program < world - 1:
        _announce(program, begun, epoch, pes, rank, world)
    elif tdl.wait_signals(begun, world, rank, tdl.CMP_GE, epoch, monitor, WAITED) != 0:
        out = tl.load(outs + rank)
        size = tl.load(status + match.UNION)
        if _valid(status, capacity, max_union) == 0:
            size = tl.cast(0, tl.int64)
        for k in tl.range(program - (world - 1), size, tl.num_programs(0) - (world - 1)):
            id = tl.load(union + k)
            turn = _turn(id, n_nodes)
            _, _, last = _steps_of(id, turn, 0, nodes, n_nodes, world, lists, stride, capacity, entries, words, SEARCH)
            if ((turn + last) % n_nodes != node) & (_entrance(id, node, node_begins, node_ranks) == rank):
                _hand_on(out, tl.cast(k, tl.int64) * row_bytes, row_bytes, outs, rank, node, node_begins, node_ranks)


# ---------------------------------------------------------------------- few rows, and results


@jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_USERS)
def merge(
    out, lists, union, entries, status, stride, capacity, words, max_union, world, row_elements,
    SEARCH: tl.constexpr, OP: tl.constexpr, ACC: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Few rows: every list is followed by its rows, and each rank sums all of them: ``-> out [union, row_elements]``.

    Finds where each id of the union is in every list and moves the values in the same pass. Any number of programs.
    """
    if _valid(status, capacity, max_union):
        size = tl.load(status + match.UNION)
        for k in tl.range(tl.program_id(0) * ROWS, size, tl.num_programs(0) * ROWS):
            at = tl.cast(k, tl.int64) + tl.arange(0, ROWS)
            inside = at < size
            ids = tl.load(union + at, mask=inside, other=0)
            for column in tl.range(0, row_elements, WIDE):
                columns = column + tl.arange(0, WIDE)
                within = (columns < row_elements)[None, :]
                sum = tl.zeros([ROWS, WIDE], ACC)
                seen = tl.zeros([ROWS], tl.int32)
                for q in tl.range(0, world):
                    position = match.find(ids, q, lists, stride, capacity, entries, words, SEARCH).to(tl.int64)
                    has = inside & (position >= 0)
                    rows = _end_of_ids(tl.cast(lists, tl.int64) + 8 * tl.cast(stride, tl.int64) * q, capacity)
                    theirs = _rows_of(rows, out, ALIGNED)
                    offsets = position[:, None] * row_elements + columns[None, :]
                    tile = tl.load(theirs + offsets, mask=has[:, None] & within, other=0)
                    both = accumulate(sum, share(tile, world, ACC, OP), (seen == 0)[:, None], OP)
                    sum = tl.where(has[:, None], both, sum)
                    seen += has.to(tl.int32)
                tl.store(
                    out + at[:, None] * row_elements + columns[None, :],
                    rounded(sum, out.dtype.element_ty, OP),
                    mask=inside[:, None] & within,
                )


@jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_USERS)
def pad(
    indices, values, count, union, status, remembered, monitor, capacity, max_union, num_rows: tl.int64, row_elements,
    ROWS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The form of fixed size: ``indices [max_union]`` and ``count [1]`` from the union, zeros past its end in both.

    ``values [max_union, row_elements]`` has the rows of the union already. Lists that are not valid count 0 rows, and
    the first such status, with ``num_rows``, is kept in ``remembered``. So do rows that a wait which has expired has
    kept from coming.
    """
    size = tl.load(status + match.UNION)
    valid = _valid(status, capacity, max_union)
    if (valid == 0) | (tl.load(monitor + tdl.MONITOR_ABORTED) != 0):
        size = tl.cast(0, tl.int64)
    if tl.program_id(0) == 0:
        tl.store(count, size)
        if (valid == 0) & (tl.load(remembered + match.STATUS_WORDS) == 0):
            word = tl.arange(0, match.STATUS_WORDS)
            tl.store(remembered + word, tl.load(status + word))
            tl.store(remembered + match.STATUS_WORDS, tl.cast(num_rows, tl.int64) + 1)
    for k in tl.range(tl.program_id(0) * ROWS, max_union, tl.num_programs(0) * ROWS):
        at = tl.cast(k, tl.int64) + tl.arange(0, ROWS)
        ids = tl.load(union + at, mask=at < size, other=0)
        tl.store(indices + at, ids, mask=at < max_union)
        empty = (at >= size) & (at < max_union)
        for column in tl.range(0, row_elements, WIDE):
            columns = column + tl.arange(0, WIDE)
            tl.store(
                values + at[:, None] * row_elements + columns[None, :],
                tl.zeros([ROWS, WIDE], values.dtype.element_ty),
                mask=empty[:, None] & (columns < row_elements)[None, :],
            )
