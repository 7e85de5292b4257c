# SPDX-License-Identifier: Apache-2.0
"""Few rows, and results of fixed size. No other rank takes part, and no launch has an epoch.

::

    lists of all ranks, each followed by its rows --merge: sum in rank order--> out[union position]
    union, status --pad--> indices, count; zeros past the end of the union

The exchange of the lists has brought the rows with them, so every rank reduces all of them itself: no rank waits for
another once more.
"""

import triton.language as tl

import tdcoll.language as tdl
from tdcoll.collectives.index_match import kernels as match
from tdcoll.collectives.index_match.kernels import find
from tdcoll.collectives.sparse_all_reduce.kernels_lists import valid
from tdcoll.collectives.sparse_all_reduce.kernels_values import end_of_ids, rows_of
from tdcoll.language.jit import jit
from tdcoll.primitives.group import in_stream_order
from tdcoll.primitives.reduce import accumulate, rounded, share

__all__ = ["merge", "pad"]


@jit
def merge(
    out, index, g, row_elements,
    OP: tl.constexpr, ACC: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Every list is followed by its rows, and each rank sums all of them: ``-> out [union, row_elements]``.

    Finds where each id of the union is in every list and moves the values in the same pass. Any number of programs.
    """
    in_stream_order()
    if valid(index):
        size = tl.load(index.status + match.UNION)
        for k in tl.range(tl.program_id(0) * ROWS, size, tl.num_programs(0) * ROWS):
            at = tl.cast(k, tl.int64) + tl.arange(0, ROWS)
            inside = at < size
            ids = tl.load(index.union + at, mask=inside, other=0)
            for column in tl.range(0, row_elements, WIDE):
                columns = column + tl.arange(0, WIDE)
                within = (columns < row_elements)[None, :]
                sum = tl.zeros([ROWS, WIDE], ACC)
                seen = tl.zeros([ROWS], tl.int32)
                for q in tl.range(0, g.world):
                    position = find(ids, q, index).to(tl.int64)
                    has = inside & (position >= 0)
                    theirs = rows_of(end_of_ids(index, q), out, ALIGNED)
                    offsets = position[:, None] * row_elements + columns[None, :]
                    tile = tl.load(theirs + offsets, mask=has[:, None] & within, other=0)
                    both = accumulate(sum, share(tile, g.world, ACC, OP), (seen == 0)[:, None], OP)
                    sum = tl.where(has[:, None], both, sum)
                    seen += has.to(tl.int32)
                tl.store(
                    out + at[:, None] * row_elements + columns[None, :],
                    rounded(sum, out.dtype.element_ty, OP),
                    mask=inside[:, None] & within,
                )


@jit
def pad(
    indices, values, count, index, remembered, g, num_rows: tl.int64, row_elements,
    ROWS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The form of fixed size: ``indices [max_union]`` and ``count [1]`` from the union, zeros past its end in both.

    ``values [max_union, row_elements]`` has the rows of the union already. Lists that are not valid count 0 rows, and
    the first such status, with ``num_rows``, is kept in ``remembered``. So do rows that a wait which has expired has
    kept from coming.
    """
    in_stream_order()
    size = tl.load(index.status + match.UNION)
    fit = valid(index)
    if (fit == 0) | (tl.load(g.monitor + tdl.MONITOR_ABORTED) != 0):
        size = tl.cast(0, tl.int64)
    if tl.program_id(0) == 0:
        tl.store(count, size)
        if (fit == 0) & (tl.load(remembered + match.STATUS_WORDS) == 0):
            word = tl.arange(0, match.STATUS_WORDS)
            tl.store(remembered + word, tl.load(index.status + word))
            tl.store(remembered + match.STATUS_WORDS, tl.cast(num_rows, tl.int64) + 1)
    for k in tl.range(tl.program_id(0) * ROWS, index.max_union, tl.num_programs(0) * ROWS):
        at = tl.cast(k, tl.int64) + tl.arange(0, ROWS)
        ids = tl.load(index.union + at, mask=at < size, other=0)
        tl.store(indices + at, ids, mask=at < index.max_union)
        empty = (at >= size) & (at < index.max_union)
        for column in tl.range(0, row_elements, WIDE):
            columns = column + tl.arange(0, WIDE)
            tl.store(
                values + at[:, None] * row_elements + columns[None, :],
                tl.zeros([ROWS, WIDE], values.dtype.element_ty),
                mask=empty[:, None] & (columns < row_elements)[None, :],
            )
