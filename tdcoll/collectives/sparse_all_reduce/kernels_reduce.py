# SPDX-License-Identifier: Apache-2.0
"""Reduction of rows inside one node, by loads and stores: nothing of NVSHMEM's device code.

Data flow, seen from rank r, for the rows that r reduces
(:mod:`~tdcoll.collectives.sparse_all_reduce.kernels_lists`)::

    own row, stage[place of the id] of every other rank that has it --sum in rank order--> out[union position] of all

Signal map, of one launch and one epoch; see :mod:`tdcoll.primitives.group`:

- ``arrived[slot, 0, p] >= epoch`` on r is set by rank p when it has begun the launch, hence done
  all that it launched before, which the signal releases at system scope. The first programs of the
  grid send it, and do nothing else. It is polled before any ``stage`` is read: everybody has
  combined.
- ``arrived[slot, 1, p] >= epoch`` on r is set by rank p when all programs of its launch have stored
  what they reduce. It is polled before the launch ends, on every rank, whatever that has to reduce:
  ``out`` is complete here.

The meeting. Every program adds 1 to ``counters[STORED]`` when it has no more to store. The one that
finds all others there, whichever it is, signals all peers and waits for theirs:

- *Data before signal.* The stores into peers' ``out`` are ordinary ones. A barrier of the block and
  the addition, a release at system scope, come behind them. The last addition acquires all others,
  and the signals release at system scope what it has seen, so who acquires rank p's signal sees the
  stores of all of p's programs.
- *Nobody waits for a later program*, on any rank. The one that waits is the last of its launch that
  has anything to do, so a GPU that holds one thread block has a place for it. The peers' signals
  depend on programs that wait for nothing but the first signals, which the first programs of each
  rank send.
- *Memory*: once a rank has heard from all, nobody reads its ``stage`` or writes its ``out`` any
  more in this call. *pack* of the next call zeroes the counter: every call has one launch of
  *reduce*, and it has ended by then.
- *Expired waits*: a program that has given up is not counted, nor is one that begins after that. No
  program is then the last, and the rank neither signals nor waits: some of its rows are missing.

Rows that no other rank has come before contested ones, so the others have that time to combine
theirs.
"""

import triton.language as tl

import tdcoll.language as tdl
from tdcoll.collectives.index_match.kernels import find, list_of
from tdcoll.collectives.sparse_all_reduce import kernels_lists as lists
from tdcoll.collectives.sparse_all_reduce.kernels_tables import rows_of, source_of, within
from tdcoll.language.jit import jit
from tdcoll.primitives import stores
from tdcoll.primitives.group import in_stream_order, row, start, this_epoch
from tdcoll.primitives.reduce import accumulate, rounded, share


@jit
def _own_rows(work, items, inside, index, memory, g, order, begins, REPEATED: tl.constexpr):
    """``(ids, at, places, direct)`` of the ``items`` of a work list: where they are in the union,
    and in ``source`` where ``direct``, in ``stage`` where combined."""
    rows = tl.load(work + items, mask=inside, other=0).to(tl.int64)
    ids = tl.load(list_of(index, g.rank) + lists.HEADER + rows, mask=inside, other=0)
    at = tl.load(memory.targets + rows, mask=inside, other=0).to(tl.int64)
    places = rows
    direct = inside
    if REPEATED:
        begin = tl.load(begins + rows, mask=inside, other=0)
        end = tl.load(begins + rows + 1, mask=inside, other=0)
        direct = inside & (end - begin == 1)
        places = tl.where(direct, tl.load(order + begin, mask=inside, other=0), rows)
    return ids, at, places, direct


@jit
def _load_own(
    places, inside, direct, columns, there, begin, width, stage, row_elements, REPEATED: tl.constexpr
):  # fmt: skip
    """``-> [ROWS, WIDE]``: rows at ``places``, see :func:`_own_rows`.

    ``there``: the columns that they have; ``begin, width``: of ``source_of``.
    """
    rows = begin + places * width
    tile = tl.load(rows[:, None] + columns[None, :], mask=direct[:, None] & there, other=0)
    if REPEATED:
        offsets = places[:, None] * row_elements + columns[None, :]
        combined = tl.load(stage + offsets, mask=(inside & (direct == 0))[:, None] & there, other=0)
        tile = tl.where(direct[:, None], tile, combined)
    return tile


@jit
def _store_everywhere(
    tile, at, mask, columns, memory, g, like, row_elements, ALIGNED: tl.constexpr
):
    """Rows ``at`` of every rank's ``out``, this one's first, so that no rank is everybody's first
    target."""
    for i in tl.range(0, g.world):
        out = rows_of(memory.out + tl.load(g.deltas + (g.rank + i) % g.world), like, ALIGNED)
        tl.store(out + at[:, None] * row_elements + columns[None, :], tile, mask=mask)


@jit
def _announce(i, begun, g, epoch):
    """Tell the rank that comes ``i + 1`` after this one that this rank has begun the launch."""
    delta = tl.load(g.deltas + (g.rank + 1 + i) % g.world)
    stores.release(begun + g.rank, delta, epoch)


@jit
def _meet(memory, g, WORLD_POW2: tl.constexpr):
    """All ranks have stored what they reduce, when the last program of this launch returns. All
    call it in the end."""
    tdl.syncthreads()
    before = tl.atomic_add(memory.counters + lists.STORED, 1, sem="acq_rel", scope="sys")
    if before == tl.num_programs(0) - 1:
        # which all programs have counted by now; kept in registers, it is spilled
        epoch = this_epoch(g.control)
        stored = row(g, epoch, 1)
        stores.release_to_all(g, stored + g.rank, epoch)
        tdl.wait_signals(stored, g.world, g.rank, tdl.CMP_GE, epoch, g.monitor, WORLD_POW2)


@jit(do_not_specialize_on_alignment=lists.ANY_ALIGNMENT)
def reduce(
    source, order, begins, index, memory, tables, g, row_elements,
    REPEATED: tl.constexpr, OP: tl.constexpr, ACC: tl.constexpr, ALIGNED: tl.constexpr,
    ROWS: tl.constexpr, WIDE: tl.constexpr, WORLD_POW2: tl.constexpr,
):  # fmt: skip
    """The rows that this rank reduces ``-> out[union position]`` of every rank, and a meeting of
    the ranks.

    Thread blocks: ``world - 1`` that announce, and any number that work. ``source``, ``order`` and
    ``begins`` are as in ``kernels_values.combine``. ``WORLD_POW2`` is a power of two of at least
    ``world``.
    """
    in_stream_order()
    program = tl.program_id(0)
    epoch, alive = start(g)
    if alive == 0:
        return
    begun = row(g, epoch, 0)
    if program < g.world - 1:
        _announce(program, begun, g, epoch)
    else:
        worker = program - (g.world - 1)
        workers = tl.num_programs(0) - (g.world - 1)
        single = lists.work_list(memory, index, lists.SINGLE)
        contested = lists.work_list(memory, index, lists.CONTESTED)
        stage = rows_of(memory.stage, source, ALIGNED)
        n_single = tl.load(memory.counters + lists.SINGLE)
        for k in tl.range(worker * ROWS, n_single, workers * ROWS):
            items = k + tl.arange(0, ROWS)
            inside = items < n_single
            ids, at, places, direct = _own_rows(
                single, items, inside, index, memory, g, order, begins, REPEATED
            )
            begin, width = source_of(source, ids, tables, row_elements)
            for column in tl.range(0, row_elements, WIDE):
                columns = column + tl.arange(0, WIDE)
                there = within(columns, width, tables)
                tile = _load_own(
                    places, inside, direct, columns, there, begin, width, stage, row_elements, REPEATED
                )  # fmt: skip
                alone = accumulate(
                    tl.zeros([ROWS, WIDE], ACC), share(tile, g.world, ACC, OP), True, OP
                )
                tile = rounded(alone, source.dtype.element_ty, OP)
                _store_everywhere(
                    tile,
                    at,
                    inside[:, None] & there,
                    columns,
                    memory,
                    g,
                    source,
                    row_elements,
                    ALIGNED,
                )
        n_contested = tl.load(memory.counters + lists.CONTESTED)
        if worker * ROWS < n_contested:
            if (
                tdl.wait_signals(begun, g.world, g.rank, tdl.CMP_GE, epoch, g.monitor, WORLD_POW2)
                == 0
            ):
                return
            for k in tl.range(worker * ROWS, n_contested, workers * ROWS):
                items = k + tl.arange(0, ROWS)
                inside = items < n_contested
                ids, at, places, direct = _own_rows(
                    contested, items, inside, index, memory, g, order, begins, REPEATED
                )  # fmt: skip
                begin, width = source_of(source, ids, tables, row_elements)
                for column in tl.range(0, row_elements, WIDE):
                    columns = column + tl.arange(0, WIDE)
                    there = within(columns, width, tables)
                    sum = tl.zeros([ROWS, WIDE], ACC)
                    seen = tl.zeros([ROWS], tl.int32)
                    for q in tl.range(0, g.world):
                        if q == g.rank:
                            has = inside
                            tile = _load_own(
                                places, inside, direct, columns, there, begin, width, stage, row_elements, REPEATED
                            )  # fmt: skip
                        else:
                            position = find(ids, q, index)
                            has = inside & (position >= 0)
                            theirs = rows_of(memory.stage + tl.load(g.deltas + q), source, ALIGNED)
                            offsets = (
                                position.to(tl.int64)[:, None] * row_elements + columns[None, :]
                            )
                            tile = tl.load(theirs + offsets, mask=has[:, None] & there, other=0)
                        both = accumulate(
                            sum, share(tile, g.world, ACC, OP), (seen == 0)[:, None], OP
                        )
                        sum = tl.where(has[:, None], both, sum)
                        seen += has.to(tl.int32)
                    result = rounded(sum, source.dtype.element_ty, OP)
                    mask = inside[:, None] & there
                    _store_everywhere(
                        result, at, mask, columns, memory, g, source, row_elements, ALIGNED
                    )
    _meet(memory, g, WORLD_POW2)
