# SPDX-License-Identifier: Apache-2.0
"""The tables of one call: how the rows of several tensors become rows of one.

Each table takes the ids that follow those of the table before it, so one list of ids, one exchange,
one directory and one reduction serve all of them. Rows of different widths lie in ``stage`` and
``out`` at one distance, that of the widest, and only their own elements move::

    tensors of this rank, where they are --join--> ids of all tables, in the order of the tables; sources
    union --last phase of the directory--> where each table begins in it, behind a copy of the status

A single tensor needs neither, and constants in the tuple :class:`Tables` remove the look-ups. An id
that its table doesn't have becomes -1, which no directory accepts. It can't become a row of the
next table.
"""

from typing import Any, NamedTuple

import triton.language as tl

from tdcoll.collectives.index_match.kernels import find_sorted
from tdcoll.language.jit import jit
from tdcoll.primitives.group import in_stream_order

MOST_GIVEN = 64
"""Tensors that one launch of :func:`join` takes: their addresses are parameters, of which a kernel
may have 4 KB."""


class Tables(NamedTuple):
    """The tables of a call. None of the tensors is read if there is one table.

    Attributes:
        firsts: int64 ``[count + 1]``: id of the first row of each table, and the number of all
            rows.
        widths: int32 ``[count]``: elements of a row of each.
        sources: int64 ``[count]``: address at which entry 0 of the call would be if all entries
            were the table's.
        count: how many tables there are.
        single: whether there is one.
        aligned: elements in 16 bytes if all rows that this rank brings begin at a multiple of them,
            else 1.
    """

    firsts: Any
    widths: Any
    sources: Any
    count: tl.int32
    single: tl.constexpr
    aligned: tl.constexpr


def _tuple_of(count: int) -> Any:
    fields = [f"{name}{i}" for name in ("ids", "values", "begin") for i in range(count)]
    return NamedTuple(f"Given{count}", [(field, tl.int64) for field in [*fields, "end"]])


_GIVEN = {count: _tuple_of(count) for count in range(1, MOST_GIVEN + 1)}


def given(ids: list[int], values: list[int], begins: list[int]) -> Any:
    """Return tensors for :func:`join`: addresses of ids and values, and where each begins among all
    entries of the call, with the end of the last."""
    return _GIVEN[len(ids)](*ids, *values, *begins)


# ---------------------------------------------------------------------- device functions


@jit
def rows_of(address, like, ALIGNED: tl.constexpr = False):
    """``address`` as a pointer to elements of the type that ``like`` points to. ``ALIGNED``: a
    multiple of 16."""
    rows = tl.cast(address, tl.int64).to(tl.pointer_type(like.dtype.element_ty))
    if ALIGNED:
        rows = tl.multiple_of(rows, 16)
    return rows


@jit
def _table_of(ids, tables):
    """Table of each id; any table if none has it."""
    table, _ = find_sorted(ids, tables.firsts, tables.count)
    return table


@jit
def local(ids, tables):
    """Each id as a row of its own table."""
    if not tables.single:
        ids = ids - tl.load(tables.firsts + _table_of(ids, tables))
    return ids


@jit
def source_of(source, ids, tables, row_elements):
    """``(begin, width)`` of the tables of ``ids``: entry i of what this rank brings begins at
    ``begin + i * width``.

    Blocks like ``ids``, or numbers if that is one or if there is one table. The width is 0 if no
    table has the id.

    Args:
        source: the values if there is one table, otherwise any pointer of their type.
    """
    begin = source
    width = row_elements
    if not tables.single:
        table = _table_of(ids, tables)
        there = (ids >= 0) & (ids < tl.load(tables.firsts + tables.count))
        width = tl.multiple_of(tl.load(tables.widths + table, mask=there, other=0), tables.aligned)
        begin = rows_of(tl.load(tables.sources + table), source, tables.aligned > 1)
    return begin, width


@jit
def within(columns, width, tables):
    """``[WIDE], width of source_of -> [ROWS or 1, WIDE]``: the columns that rows have."""
    if tables.single:
        inside = (columns < width)[None, :]
    else:
        inside = columns[None, :] < width[:, None]
    return inside


# ---------------------------------------------------------------------- launch


@jit
def join(
    given,
    tables,
    joined,
    first: tl.int32,
    ITEM: tl.constexpr,
    TENSORS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Ids of ``TENSORS`` tables from table ``first`` on ``-> joined``, each with the first row of
    its table added, and where their values are ``-> tables.sources``. Thread blocks: any number,
    times ``TENSORS``.

    Args:
        given: made by :func:`given`.
        joined: the ids of all entries of the call, int64, or int32 if all rows fit. Others are -1
            in both.
        ITEM: bytes of an element.
    """
    in_stream_order()
    mine = tl.program_id(1)
    ids, values, begin, end = given[0], given[TENSORS], given[2 * TENSORS], given[2 * TENSORS + 1]
    for i in tl.static_range(1, TENSORS):
        ids = tl.where(mine == i, given[i], ids)
        values = tl.where(mine == i, given[TENSORS + i], values)
        begin = tl.where(mine == i, given[2 * TENSORS + i], begin)
        end = tl.where(mine == i, given[2 * TENSORS + i + 1], end)
    table = first + mine
    begins_at = tl.load(tables.firsts + table)
    n_rows = tl.load(tables.firsts + table + 1) - begins_at
    if tl.program_id(0) == 0:
        width = tl.load(tables.widths + table).to(tl.int64)
        tl.store(tables.sources + table, values - begin * width * ITEM)
    source = ids.to(tl.pointer_type(tl.int64))
    for k in tl.range(tl.program_id(0) * BLOCK, end - begin, tl.num_programs(0) * BLOCK):
        at = tl.cast(k, tl.int64) + tl.arange(0, BLOCK)
        inside = at < end - begin
        row = tl.load(source + at, mask=inside, other=0)
        there = (row >= 0) & (row < n_rows)
        tl.store(joined + begin + at, tl.where(there, begins_at + row, -1), mask=inside)
