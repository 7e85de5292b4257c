# SPDX-License-Identifier: Apache-2.0
"""Few rows, and results of fixed size. No launch here has an epoch.

::

    lists of all ranks, each followed by its rows --merge: directory; sum in rank order--> out[union position]
    union, status --pad--> indices, count; zeros past the end of the union. Of several tables: also values, one table
                           after the other
"""

import triton.language as tl

import tdcoll.language as tdl
from tdcoll.collectives.index_match import kernels as match
from tdcoll.collectives.sparse_all_reduce.kernels_lists import numbered, valid
from tdcoll.collectives.sparse_all_reduce.kernels_tables import rows_of, source_of, within
from tdcoll.collectives.sparse_all_reduce.kernels_values import end_of_ids
from tdcoll.language.jit import jit
from tdcoll.primitives.group import in_stream_order
from tdcoll.primitives.reduce import accumulate, rounded, share


@jit
def merge(
    out, index, memory, tables, counts, g, signature: tl.int64, builders: tl.int32, row_elements,
    OP: tl.constexpr, ACC: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
    FIRSTS: tl.constexpr,
):  # fmt: skip
    """Every list is followed by its rows, and each rank sums all of them: ``-> out [union,
    row_elements]``.

    After the directory, as ``kernels_values.prepare``. Finds where each id of the union is in every
    list and moves the values in the same pass. Thread blocks: ``builders``, and any number.
    """
    in_stream_order()
    program = tl.program_id(0) - builders
    if program < 0:
        of_lists = numbered(signature, tl.load(memory.lists_made))
        match.build(
            program + builders, index, tables.firsts, tables.count + 1, counts, of_lists, FIRSTS
        )
        return
    match.wait_until_built(index)
    if valid(index):
        size = tl.load(index.status + match.UNION)
        for k in tl.range(program * ROWS, size, (tl.num_programs(0) - builders) * ROWS):
            at = tl.cast(k, tl.int64) + tl.arange(0, ROWS)
            inside = at < size
            ids = tl.load(index.union + at, mask=inside, other=0)
            _, width = source_of(out, ids, tables, row_elements)
            for column in tl.range(0, row_elements, WIDE):
                columns = column + tl.arange(0, WIDE)
                there = within(columns, width, tables)
                sum = tl.zeros([ROWS, WIDE], ACC)
                seen = tl.zeros([ROWS], tl.int32)
                for q in tl.range(0, g.world):
                    position = match.find(ids, q, index).to(tl.int64)
                    has = inside & (position >= 0)
                    theirs = rows_of(end_of_ids(index, q), out, ALIGNED)
                    offsets = position[:, None] * row_elements + columns[None, :]
                    tile = tl.load(theirs + offsets, mask=has[:, None] & there, other=0)
                    both = accumulate(sum, share(tile, g.world, ACC, OP), (seen == 0)[:, None], OP)
                    sum = tl.where(has[:, None], both, sum)
                    seen += has.to(tl.int32)
                tl.store(
                    out + at[:, None] * row_elements + columns[None, :],
                    rounded(sum, out.dtype.element_ty, OP),
                    mask=inside[:, None] & there,
                )


@jit
def pad(
    indices, values, count, out, counts, index, remembered, tables, g, num_rows: tl.int64, row_elements,
    TABLES: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The form of fixed size: ``indices [count, max_union]`` and ``count [count]`` from the union,
    zeros past the end of each table in both, and in ``values``.

    The rows of several tables are copied from ``out [union, row_elements]`` to ``values``, which
    has ``max_union`` rows of each table, at its own width. Of one table, ``values`` has the rows of
    the union already.

    Lists that are not valid count 0 rows, and the first such status, with ``num_rows``, is kept in
    ``remembered``. So do rows that a wait which has expired has kept from coming. Thread blocks:
    any number, times the tables.

    Args:
        counts: as ``index_match.kernels.place_firsts`` leaves it. With several tables only.
        TABLES: a power of two, at least the number of tables.
    """
    in_stream_order()
    table = tl.program_id(1)
    fit = valid(index)
    if (tl.program_id(0) == 0) & (table == 0) & (fit == 0):
        if tl.load(remembered + match.STATUS_WORDS) == 0:
            word = tl.arange(0, match.STATUS_WORDS)
            tl.store(remembered + word, tl.load(index.status + word))
            tl.store(remembered + match.STATUS_WORDS, tl.cast(num_rows, tl.int64) + 1)
    begin = tl.cast(0, tl.int64)
    end = tl.load(index.status + match.UNION)
    first = begin
    width = row_elements
    to = values
    if not tables.single:
        begin = tl.load(counts + match.STATUS_WORDS + table)
        end = tl.load(counts + match.STATUS_WORDS + table + 1)
        first = tl.load(tables.firsts + table)
        width = tl.load(tables.widths + table)
        others = tl.arange(0, TABLES)
        before = tl.sum(
            tl.load(tables.widths + others, mask=others < table, other=0).to(tl.int64), axis=0
        )
        to = values + index.max_union * before
    size = end - begin
    if (fit == 0) | (tl.load(g.monitor + tdl.MONITOR_ABORTED) != 0):
        size = tl.cast(0, tl.int64)
    if tl.program_id(0) == 0:
        tl.store(count + table, size)
    for k in tl.range(tl.program_id(0) * ROWS, index.max_union, tl.num_programs(0) * ROWS):
        at = tl.cast(k, tl.int64) + tl.arange(0, ROWS)
        inside = at < index.max_union
        ids = tl.load(index.union + begin + at, mask=at < size, other=first)
        tl.store(
            indices + tl.cast(table, tl.int64) * index.max_union + at, ids - first, mask=inside
        )
        for column in tl.range(0, width, WIDE):
            columns = column + tl.arange(0, WIDE)
            there = (columns < width)[None, :]
            rows = tl.zeros([ROWS, WIDE], values.dtype.element_ty)
            if tables.single:
                there = there & (inside & (at >= size))[:, None]
            else:
                source = out + (begin + at)[:, None] * row_elements + columns[None, :]
                rows = tl.load(source, mask=there & (at < size)[:, None], other=0)
                there = there & inside[:, None]
            tl.store(to + at[:, None] * width + columns[None, :], rows, mask=there)
