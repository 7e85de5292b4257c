# SPDX-License-Identifier: Apache-2.0
"""Values of one rank: rows of one id are summed, and put where other ranks, or this one, read them.

::

    rows of this rank --combine--> stage[place in lists[rank]], or for gather behind the ids of lists[rank]
    rows of which there are more than PIECE --sum_pieces--> partial --sum_partial--> the same places

These are phases of two launches, with those of ``kernels_lists``. *pack* makes this rank's list,
for gather with its rows, and clears the directory, which earlier launches on this stream no longer
use. *prepare*, for the other algorithms, builds the directory, plans (not for dense), and puts rows
into ``stage``. With few rows there are no pieces. Neither launch has an epoch. Programs of a phase
wait for all programs of the phase before, which have lower numbers, so they are running or done.
Once a wait of the context has expired, ``stage`` stays as it is: replays of a graph may follow,
while a peer that is only late still reads the rows of the call before.
"""

import triton.language as tl

from tdcoll.collectives.index_match import kernels as match
from tdcoll.collectives.sparse_all_reduce import kernels_lists as lists
from tdcoll.collectives.sparse_all_reduce.kernels_tables import rows_of, source_of
from tdcoll.language.jit import jit
from tdcoll.primitives.group import (
    in_stream_order,
    leaves_last,
    signal_done,
    still_alive,
    wait_until_done,
)

PIECE = tl.constexpr(128)
"""Rows of one id that one program sums; with more of them the work is divided."""


@jit
def end_of_ids(index, q):
    """Address after the ids of the list of rank ``q``, where its rows begin if they go with it."""
    ids = tl.cast(match.list_of(index, q) + lists.HEADER, tl.int64)
    return (ids + 8 * match.list_size(index, q) + 15) // 16 * 16


@jit
def _target(index, memory, g, like, BEHIND: tl.constexpr, ALIGNED: tl.constexpr):
    """``[..., row_elements]``: where this rank's rows go, its ``stage`` or, if ``BEHIND``, the
    place after its ids."""
    place = memory.stage
    if BEHIND:
        place = end_of_ids(index, g.rank)
    return rows_of(place, like, ALIGNED)


@jit
def _id_of(index, g, row):
    """Id of a row of this rank's list."""
    return tl.load(match.list_of(index, g.rank) + lists.HEADER + row)


@jit
def combine(
    program, programs, source, order, begins, index, memory, tables, g, row_elements,
    PLANS: tl.constexpr, BEHIND: tl.constexpr, REPEATED: tl.constexpr, ACC: tl.constexpr, ALIGNED: tl.constexpr,
    DEEP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Rows of ``source``, those with one id summed, ``->`` :func:`_target`.

    Any number of thread blocks. ``PLANS``: rows of the work list STAGED, else every row of this
    rank's list; into ``stage`` none if the lists of ids are not valid. A sum adds the rows one
    after the other, and beyond :data:`PIECE` of them the sums of that many, so its bits depend on
    the rows alone. Rows of which there are more than :data:`PIECE` go to the work list LONG.

    Args:
        source: ``[n, row_elements]``; of several tables, see ``kernels_tables.source_of``.
        order: int64 ``[n]``: which row of ``source`` is the i-th in the order of ids. With
            ``REPEATED`` only.
        begins: int64: where in ``order`` each id begins. With ``REPEATED`` only.
    """
    count = tl.load(memory.counters + lists.STAGED).to(tl.int64)
    if not PLANS:
        count = match.list_size(index, g.rank).to(tl.int64)
        if not BEHIND:
            count = tl.where(lists.valid(index), count, 0)
    if still_alive(g.monitor) == 0:
        count = tl.cast(0, tl.int64)
    to = _target(index, memory, g, source, BEHIND, ALIGNED)
    for k in tl.range(program, count, programs):
        row = tl.cast(k, tl.int64)
        if PLANS:
            row = tl.load(lists.work_list(memory, index, lists.STAGED) + k).to(tl.int64)
        begin = row
        end = row + 1
        if REPEATED:
            begin = tl.load(begins + row)
            end = tl.load(begins + row + 1)
        here, width = source_of(source, _id_of(index, g, row), tables, row_elements)
        for column in tl.range(0, width, WIDE):
            columns = column + tl.arange(0, WIDE)
            inside = columns < width
            if end - begin == 1:
                entry = begin
                if REPEATED:
                    entry = tl.load(order + begin)
                only = tl.load(here + entry * width + columns, mask=inside)
                tl.store(to + row * row_elements + columns, only, mask=inside)
            elif end - begin <= PIECE:
                sum = _sum_of(here, order, begin, end, columns, width, ACC, DEEP, WIDE)
                tl.store(
                    to + row * row_elements + columns, sum.to(source.dtype.element_ty), mask=inside
                )
        if REPEATED:
            if end - begin > PIECE:
                item = tl.atomic_add(memory.counters + lists.LONG, 1, sem="relaxed", scope="gpu")
                tl.store(lists.work_list(memory, index, lists.LONG) + item, row.to(tl.int32))


@jit
def _sum_of(
    source, order, begin, end, columns, width, ACC: tl.constexpr, DEEP: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """Sum of the rows ``order[begin:end]`` of ``source``, which are of one id, in this order;
    ``DEEP`` are loaded at a time.

    The bits don't depend on ``DEEP`` and ``WIDE``, as those of a sum over an axis of a tile would:
    these are chosen for the widest table of a call.
    """
    sum = tl.zeros([WIDE], ACC)
    inside = columns < width
    for i in tl.range(begin, end, DEEP):
        for j in tl.static_range(0, DEEP):
            there = i + j < end
            entry = tl.load(order + i + j, mask=there, other=0)
            part = tl.load(source + entry * width + columns, mask=inside & there, other=0)
            sum += part.to(ACC)
    return sum


@jit
def _slot(piece, begin):
    """Place of the sum of the ``piece``-th :data:`PIECE` rows of an id that occurs more than
    :data:`PIECE` times, and whose first row is number ``begin`` in the order of ids.

    No two have one place. Of ids that follow each other, the last piece of the first and the first
    piece of the second may fall into the same :data:`PIECE` rows of all; no other pieces do.
    """
    return 2 * (begin // PIECE + piece) + (piece > 0).to(tl.int64)


@jit
def sum_pieces(
    program, programs, at_a_time, source, order, begins, partial, index, memory, tables, g, row_elements,
    ACC: tl.constexpr, DEEP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Rows of the work list LONG, piece by piece, ``-> partial [slots, row_elements]`` in the type
    of sums.

    Thread blocks: ``at_a_time`` rows at a time, times any number of pieces.
    """
    count = tl.load(memory.counters + lists.LONG)
    for k in tl.range(program % at_a_time, count, at_a_time):
        row = tl.load(lists.work_list(memory, index, lists.LONG) + k).to(tl.int64)
        begin = tl.load(begins + row)
        end = tl.load(begins + row + 1)
        here, width = source_of(source, _id_of(index, g, row), tables, row_elements)
        for piece in tl.range(
            program // at_a_time, (end - begin + PIECE - 1) // PIECE, programs // at_a_time
        ):
            first = begin + piece * PIECE
            last = tl.minimum(end, first + PIECE)
            for column in tl.range(0, width, WIDE):
                columns = column + tl.arange(0, WIDE)
                sum = _sum_of(here, order, first, last, columns, width, ACC, DEEP, WIDE)
                place = partial + _slot(tl.cast(piece, tl.int64), begin) * row_elements
                tl.store(place + columns, sum, mask=columns < width)


@jit
def sum_partial(
    program, programs, like, begins, partial, index, memory, tables, g, row_elements,
    BEHIND: tl.constexpr, ACC: tl.constexpr, ALIGNED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Sum what :func:`sum_pieces` has left, in order ``->`` where :func:`combine` puts rows. Any
    number of thread blocks."""
    to = _target(index, memory, g, like, BEHIND, ALIGNED)
    count = tl.load(memory.counters + lists.LONG)
    if still_alive(g.monitor) == 0:
        count = tl.cast(0, tl.int32)
    for k in tl.range(program, count, programs):
        row = tl.load(lists.work_list(memory, index, lists.LONG) + k).to(tl.int64)
        begin = tl.load(begins + row)
        end = tl.load(begins + row + 1)
        _, width = source_of(like, _id_of(index, g, row), tables, row_elements)
        for column in tl.range(0, width, WIDE):
            columns = column + tl.arange(0, WIDE)
            sum = tl.zeros([WIDE], ACC)
            for piece in tl.range(0, (end - begin + PIECE - 1) // PIECE):
                part = partial + _slot(tl.cast(piece, tl.int64), begin) * row_elements
                sum += tl.load(part + columns, mask=columns < width, other=0)
            tl.store(
                to + row * row_elements + columns,
                sum.to(like.dtype.element_ty),
                mask=columns < width,
            )


@jit
def combine_all(
    program, programs, done, combiners, adders, at_a_time, source, order, begins, partial, index, memory, tables, g,
    row_elements, PLANS: tl.constexpr, BEHIND: tl.constexpr, REPEATED: tl.constexpr, PIECES: tl.constexpr,
    ACC: tl.constexpr, ALIGNED: tl.constexpr, DEEP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Three phases: :func:`combine`, and with ``PIECES`` :func:`sum_pieces` and
    :func:`sum_partial`.

    Thread blocks: ``combiners``, and with ``PIECES`` ``adders`` (``at_a_time`` times any number)
    and any number. ``done``: two counters, which are 0.
    """
    if program < combiners:
        combine(
            program, combiners, source, order, begins, index, memory, tables, g, row_elements,
            PLANS, BEHIND, REPEATED, ACC, ALIGNED, DEEP, WIDE,
        )  # fmt: skip
        if PIECES:
            signal_done(done)
    elif PIECES:
        adder = program - combiners
        if adder < adders:
            wait_until_done(done, combiners)
            sum_pieces(
                adder, adders, at_a_time, source, order, begins, partial, index, memory, tables, g, row_elements,
                ACC, DEEP, WIDE,
            )  # fmt: skip
            signal_done(done + 1)
        else:
            wait_until_done(done + 1, adders)
            sum_partial(
                adder - adders, programs - combiners - adders, source, begins, partial, index, memory, tables, g,
                row_elements, BEHIND, ACC, ALIGNED, WIDE,
            )  # fmt: skip


# ---------------------------------------------------------------------- launches


@jit
def _leave(packed, programs):
    """This program does not look at the counters any more. The last of ``programs`` leaves them at
    0."""
    if leaves_last(packed + 2, programs):
        tl.store(packed + tl.arange(0, 4), tl.zeros([4], tl.int32))


@jit(do_not_specialize_on_alignment=lists.ANY_ALIGNMENT)
def pack(
    unsorted, ids, order, totals, begins, source, partial, index, memory, tables, g, before: tl.int32, blocks: tl.int32,
    clearers: tl.int32, combiners: tl.int32, adders: tl.int32, at_a_time: tl.int32, n: tl.int32, signature: tl.int64,
    row_bytes: tl.int64, row_elements,
    SORT_BLOCK: tl.constexpr, REPEATED: tl.constexpr, BEHIND: tl.constexpr, PIECES: tl.constexpr, ACC: tl.constexpr,
    ALIGNED: tl.constexpr, DEEP: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, CLEAR: tl.constexpr,
):  # fmt: skip
    """This rank's list, with ``BEHIND`` followed by its rows, and an empty directory.

    Thread blocks, in this order:

    ============  ======================================================================================
    ``before``    with ``REPEATED``: of *place_ids* if ``SORT_BLOCK`` > 0, for so many ids each;
                  else of *count_first*, as many as ``blocks``. Otherwise none
    ``blocks``    of *write_list* (``REPEATED``) or *copy_list*, for ``BLOCK`` ids each; one with ``SORT_BLOCK``
    ``clearers``  of ``index_match.kernels.clear``
    the others    with ``BEHIND`` those of :func:`combine_all`, otherwise none
    ============  ======================================================================================

    Args:
        unsorted: the ids in any order, of which *place_ids* makes ``ids`` and ``order``. With
            ``SORT_BLOCK`` only.
        totals: int32 ``[blocks]``, from *count_first* to *write_list*.
        begins: as for :func:`combine_all`. With ``REPEATED`` only.
        partial, combiners, adders, at_a_time: as for :func:`combine_all`; with ``BEHIND`` only.
        signature: of such calls, 32 bits: what the ranks must agree on.
        row_bytes: of the rows that follow the ids; 0 without ``BEHIND``.
    """
    in_stream_order()
    program = tl.program_id(0)
    packed = memory.counters + lists.PACKED
    block = program - before
    combiner = block - blocks - clearers
    values = tl.num_programs(0) - before - blocks - clearers
    if block < 0:
        if SORT_BLOCK:
            lists.place_ids(program, unsorted, ids, order, n, SORT_BLOCK)
        elif REPEATED:
            lists.count_first(program, ids, totals, n, BLOCK)
        signal_done(packed)
    elif block < blocks:
        if REPEATED:
            wait_until_done(packed, before)
            lists.write_list(
                block, blocks, ids, totals, begins, index, memory, g, n, signature, row_bytes, BLOCK
            )
        else:
            lists.copy_list(block, ids, index, memory, g, n, signature, row_bytes, BLOCK)
        if BEHIND:
            signal_done(packed + 1)
        if REPEATED or BEHIND:
            _leave(packed, blocks + values)
    elif combiner < 0:
        match.clear(block - blocks, index, CLEAR)
    elif BEHIND:
        wait_until_done(packed + 1, blocks)
        combine_all(
            combiner, values, memory.counters + lists.LISTS, combiners, adders, at_a_time, source, order, begins,
            partial, index, memory, tables, g, row_elements, False, True, REPEATED, PIECES, ACC, ALIGNED, DEEP, WIDE,
        )  # fmt: skip
        _leave(packed, blocks + values)


@jit(do_not_specialize_on_alignment=lists.ANY_ALIGNMENT)
def prepare(
    source, order, begins, partial, index, memory, tables, counts, nodes, g, signature: tl.int64, builders: tl.int32,
    planners: tl.int32, combiners: tl.int32, adders: tl.int32, at_a_time: tl.int32, row_elements,
    PLANS: tl.constexpr, REPEATED: tl.constexpr, PIECES: tl.constexpr, ACC: tl.constexpr,
    ALIGNED: tl.constexpr, DEEP: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, FIRSTS: tl.constexpr,
):  # fmt: skip
    """The directory, the work lists, and rows in ``stage``. Thread blocks: ``builders``,
    ``planners``, those of :func:`combine_all`; or ``builders`` only, for the directory.

    Args:
        partial, combiners, adders, at_a_time: as for :func:`combine_all`.
        counts, FIRSTS: ``places`` and others of ``index_match.kernels.build``, for all tables.
        signature: as for :func:`pack`.
        builders: of the directory.
        planners: of :func:`plan`, as many as it has programs, with ``PLANS``; otherwise 0.
    """
    in_stream_order()
    program = tl.program_id(0) - builders
    planned = memory.counters + lists.LISTS
    if program < 0:
        of_lists = lists.numbered(signature, tl.load(memory.lists_made))
        match.build(
            program + builders, index, tables.firsts, tables.count + 1, counts, of_lists, FIRSTS
        )
    elif program < planners:
        if PLANS:
            match.wait_until_built(index)
            lists.plan(program, begins, index, memory, nodes, g, REPEATED, BLOCK)
            signal_done(planned)
    else:
        if program < planners + combiners:  # the others wait for these
            if PLANS:
                wait_until_done(planned, planners)
            else:
                match.wait_until_built(index)
        combine_all(
            program - planners, tl.num_programs(0) - builders - planners, planned + 1, combiners, adders, at_a_time,
            source, order, begins, partial, index, memory, tables, g, row_elements,
            PLANS, False, REPEATED, PIECES, ACC, ALIGNED, DEEP, WIDE,
        )  # fmt: skip
