# SPDX-License-Identifier: Apache-2.0
"""Values of one rank: rows of one id are summed, and put where other ranks, or this one, read them.

::

    rows of this rank --combine--> stage[place in lists[rank]], or for gather behind the ids of lists[rank]
    rows of which there are more than PIECE --sum_pieces--> partial --sum_partial--> the same places

The launches have no epoch. Each reads what the launches before it have written; who reads ``stage`` on other ranks
waits for a signal that this rank sends in a later launch. Once a wait of the context has expired, ``stage`` stays as it
is: replays of a graph may follow, while a peer that is only late still reads the rows of the call before.
"""

import triton.language as tl

from tdcoll.collectives.index_match import kernels as match
from tdcoll.collectives.sparse_all_reduce.kernels_lists import ANY_ALIGNMENT, HEADER, LONG, STAGED, work_list
from tdcoll.language.jit import jit
from tdcoll.primitives.group import in_stream_order, still_alive

__all__ = ["PIECE", "combine", "end_of_ids", "rows_of", "sum_partial", "sum_pieces"]

PIECE = tl.constexpr(128)
"""Rows of one id that one program sums; with more of them the work is divided."""


@jit
def rows_of(address, like, ALIGNED: tl.constexpr = False):
    """``address`` as a pointer to elements of the type that ``like`` points to. ``ALIGNED``: a multiple of 16."""
    rows = tl.cast(address, tl.int64).to(tl.pointer_type(like.dtype.element_ty))
    if ALIGNED:
        rows = tl.multiple_of(rows, 16)
    return rows


@jit
def end_of_ids(index, q):
    """Address after the ids of the list of rank ``q``, where its rows begin if they go with it."""
    ids = tl.cast(match.list_of(index, q) + HEADER, tl.int64)
    return (ids + 8 * match.list_size(index, q) + 15) // 16 * 16


@jit
def _target(index, memory, g, like, BEHIND: tl.constexpr, ALIGNED: tl.constexpr):
    """``[..., row_elements]``: where this rank's rows go, its ``stage`` or, if ``BEHIND``, the place after its ids."""
    place = memory.stage
    if BEHIND:
        place = end_of_ids(index, g.rank)
    return rows_of(place, like, ALIGNED)


@jit(do_not_specialize_on_alignment=ANY_ALIGNMENT)
def combine(
    source, order, begins, index, memory, g, row_elements,
    ALL: tl.constexpr, BEHIND: tl.constexpr, REPEATED: tl.constexpr, ACC: tl.constexpr, ALIGNED: tl.constexpr,
    DEEP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Rows of ``source``, those with one id summed, ``->`` :func:`_target`.

    Any number of programs. ``ALL``: every row of this rank's list, else those of the work list STAGED. A sum takes
    ``DEEP`` rows at a time, in an order that depends on nothing but their number and, beyond :data:`PIECE`, the number
    of rows before them. Rows of which there are more than :data:`PIECE` go to the work list LONG.

    Args:
        source: ``[n, row_elements]``.
        order: int64 ``[n]``: which row of ``source`` is the i-th in the order of ids. With ``REPEATED`` only.
        begins: int64: where in ``order`` each id begins. With ``REPEATED`` only.
    """
    in_stream_order()
    if still_alive(g.monitor) == 0:
        return
    count = tl.load(memory.counters + STAGED).to(tl.int64)
    if ALL:
        count = match.list_size(index, g.rank).to(tl.int64)
    to = _target(index, memory, g, source, BEHIND, ALIGNED)
    for k in tl.range(tl.program_id(0), count, tl.num_programs(0)):
        row = tl.cast(k, tl.int64)
        if not ALL:
            row = tl.load(work_list(memory, index, STAGED) + k).to(tl.int64)
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
                item = tl.atomic_add(memory.counters + LONG, 1, sem="relaxed", scope="gpu")
                tl.store(work_list(memory, index, LONG) + item, row.to(tl.int32))


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


@jit(do_not_specialize_on_alignment=ANY_ALIGNMENT)
def sum_pieces(
    source, order, begins, partial, index, memory, row_elements,
    ACC: tl.constexpr, DEEP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Rows of the work list LONG, piece by piece, ``-> partial [slots, row_elements]`` in the type of sums.

    Programs: any number of rows at a time, times any number of pieces.
    """
    in_stream_order()
    count = tl.load(memory.counters + LONG)
    for k in tl.range(tl.program_id(0), count, tl.num_programs(0)):
        row = tl.load(work_list(memory, index, LONG) + k).to(tl.int64)
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


@jit(do_not_specialize_on_alignment=ANY_ALIGNMENT)
def sum_partial(
    like, begins, partial, index, memory, g, row_elements,
    BEHIND: tl.constexpr, ACC: tl.constexpr, ALIGNED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Sum what :func:`sum_pieces` has left, in order ``->`` where :func:`combine` puts rows. Any programs."""
    in_stream_order()
    if still_alive(g.monitor) == 0:
        return
    to = _target(index, memory, g, like, BEHIND, ALIGNED)
    count = tl.load(memory.counters + LONG)
    for k in tl.range(tl.program_id(0), count, tl.num_programs(0)):
        row = tl.load(work_list(memory, index, LONG) + k).to(tl.int64)
        begin = tl.load(begins + row)
        end = tl.load(begins + row + 1)
        for column in tl.range(0, row_elements, WIDE):
            columns = column + tl.arange(0, WIDE)
            sum = tl.zeros([WIDE], ACC)
            for piece in tl.range(begin // PIECE, (end - 1) // PIECE + 1):
                part = partial + _slot(piece, begin) * row_elements
                sum += tl.load(part + columns, mask=columns < row_elements, other=0)
            tl.store(to + row * row_elements + columns, sum.to(like.dtype.element_ty), mask=columns < row_elements)
