# SPDX-License-Identifier: Apache-2.0
"""Lists of ids: this rank's own, those of all ranks, and who reduces which row. Ranks of any number
of nodes.

::

    own ids --place_ids, if they are few; PyTorch, if they are many--> own ids, sorted
    own ids, sorted --count_first, write_list--> lists[rank], each once, with a header that says how many
    own ids, sorted and different --copy_list--> lists[rank]
    lists of all ranks --plan--> work lists: what this rank does with each of its rows

These are phases of *pack* and *prepare*, see ``kernels_values``. No result depends on the order of
a work list.

*Who reduces a row*: one of the ranks of the node that have it, picked by a hash of its id, which
all ranks compute alike. The hash, and not the range that an id is in, spreads the rows: a
vocabulary sorted by frequency has all of its frequent rows in one range.
"""

from typing import Any, NamedTuple

import triton.language as tl

from tdcoll.collectives.index_match import kernels as match
from tdcoll.language.jit import jit

HEADER = match.HEADER

SINGLE, CONTESTED, STAGED, LONG = (tl.constexpr(i) for i in range(4))
"""Work lists: rows that this rank alone has (in its node) and reduces; others that it reduces;
those to combine; and of these the ones that are too many times there for one program."""

LISTS = tl.constexpr(4)

STORED, COUNTERS = tl.constexpr(7), tl.constexpr(8)
"""Counters that are 0 once a list is written: entries of the work lists, behind them programs that
have done their part of each phase of ``kernels_values.prepare`` or ``combine_all``, and at
:data:`STORED` those of *reduce*."""

PACKED = COUNTERS
"""Place behind them of four more (one unused), in which phases of ``kernels_values.pack`` meet; it
leaves them at 0."""

ANY_ALIGNMENT = ["unsorted", "ids", "order", "begins"]
"""Parameters that may be the caller's indices, at any address. So may rows, but there alignment
pays."""


class RowMemory(NamedTuple):
    """Where rows lie that are reduced, and what is to be done with this rank's.

    Attributes:
        stage, out: addresses of this rank's ``stage`` and ``out``; plus ``g.deltas[q]``, those of
            rank q of this node.
        work: int32 ``[LISTS, capacity]``: the work lists.
        counters: int32 ``[COUNTERS + 4]``: their lengths, and progress.
        lists_made: int64 ``[1]``: how often this rank has made its list, which is the same on all
            ranks.
        targets: int32 ``[capacity]``: place in the union of each row of this rank's list.
    """

    stage: tl.int64
    out: tl.int64
    work: Any
    counters: Any
    lists_made: Any
    targets: Any


@jit
def work_list(memory, index, kind):
    """The work list ``kind``: int32 ``[capacity]``, rows of this rank's list."""
    return memory.work + tl.cast(kind, tl.int64) * index.capacity


# ---------------------------------------------------------------------- pack


@jit
def numbered(signature, number):
    """Return the signature of the lists of this call, given that of its kind, of 32 bits, and the
    lists' number.

    Ranks that look for lists at different places may find those of an earlier call there, which
    have another number. It is counted on the device, because a replay of a graph makes lists, and a
    capture makes none.
    """
    return (number << 32) | signature


@jit
def _write_header(index, memory, g, count, signature, row_bytes):
    """Header of this rank's list: bytes used, ids, signature. Empties the work lists.

    ``row_bytes``: of the rows that follow the ids; 0 if none do.
    """
    own = match.list_of(index, g.rank)
    number = tl.atomic_add(memory.lists_made, 1, sem="relaxed", scope="gpu") + 1
    kept = tl.minimum(count, tl.cast(index.capacity, tl.int64))
    ids_bytes = 8 * (HEADER + kept)
    tl.store(own, (ids_bytes + 15) // 16 * 16 + kept * row_bytes)
    tl.store(own + 1, count)
    tl.store(own + 2, numbered(signature, number))
    tl.store(own + 3, tl.cast(0, tl.int64))
    tl.store(memory.counters + tl.arange(0, COUNTERS), tl.zeros([COUNTERS], tl.int32))


@jit
def place_ids(block, unsorted, ids, order, n, BLOCK: tl.constexpr):
    """``unsorted [n] -> ids [n]``, sorted, and ``order [n]``: where each comes from. Equal ids keep
    their order.

    The place of an id is the number of those that come before it. One program per ``BLOCK`` ids
    compares each with all: for up to a thousand this is faster than to launch a better sort.
    """
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    mine = tl.load(unsorted + at, mask=inside, other=0).to(tl.int64)
    before = tl.zeros([BLOCK, BLOCK], tl.int32)
    for begin in tl.range(0, n, BLOCK):
        others = begin + tl.arange(0, BLOCK)
        theirs = tl.load(unsorted + others, mask=others < n, other=0).to(tl.int64)[None, :]
        comes_before = (theirs < mine[:, None]) | (
            (theirs == mine[:, None]) & (others[None, :] < at[:, None])
        )
        before += (comes_before & (others < n)[None, :]).to(tl.int32)
    place = tl.sum(before, axis=1)
    tl.store(ids + place, mine, mask=inside)
    tl.store(order + place, at.to(tl.int64), mask=inside)


@jit
def _is_first(ids, at, n):
    """Return which of the sorted ``ids[at]`` differ from the one before, and the ids."""
    inside = at < n
    here = tl.load(ids + at, mask=inside, other=0)
    before = tl.load(ids + at - 1, mask=inside & (at > 0), other=0)
    return inside & ((at == 0) | (here != before)), here


@jit
def count_first(block, ids, totals, n, BLOCK: tl.constexpr):
    """``ids [n]`` sorted ``-> totals [blocks]``: distinct ids whose first occurrence is in the
    block."""
    at = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
    first, _ = _is_first(ids, at, n)
    tl.store(totals + block, tl.sum(first.to(tl.int32), axis=0))


@jit
def write_list(
    block, blocks, ids, totals, begins, index, memory, g, n, signature, row_bytes, BLOCK: tl.constexpr
):  # fmt: skip
    """``ids [n]`` sorted ``->`` this rank's list: each once, with the header; ``begins[k]``: where
    the k-th begins in ``ids``.

    ``begins`` has room for ``n + 1``; the last one used is ``n``. One program per ``BLOCK`` ids, at
    least one.
    """
    at = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
    first, here = _is_first(ids, at, n)
    before = tl.cast(0, tl.int64)
    for other in tl.range(0, block, BLOCK):
        others = other + tl.arange(0, BLOCK)
        before += tl.sum(
            tl.load(totals + others, mask=others < block, other=0).to(tl.int64), axis=0
        )
    number = before + tl.cumsum(first.to(tl.int64), axis=0) - 1
    tl.store(begins + number, at, mask=first)
    tl.store(
        match.list_of(index, g.rank) + HEADER + number, here, mask=first & (number < index.capacity)
    )
    if block == blocks - 1:
        count = before + tl.sum(first.to(tl.int64), axis=0)
        tl.store(begins + count, tl.cast(n, tl.int64))
        _write_header(index, memory, g, count, signature, row_bytes)


@jit
def copy_list(block, ids, index, memory, g, n, signature, row_bytes, BLOCK: tl.constexpr):
    """``ids [n]``, sorted, each once, ``->`` this rank's list, with the header. Thread blocks as
    for :func:`write_list`."""
    at = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < tl.minimum(tl.cast(n, tl.int64), tl.cast(index.capacity, tl.int64))
    tl.store(
        match.list_of(index, g.rank) + HEADER + at,
        tl.load(ids + at, mask=inside, other=0),
        mask=inside,
    )
    if block == 0:
        _write_header(index, memory, g, tl.cast(n, tl.int64), signature, row_bytes)


# ---------------------------------------------------------------------- plan


@jit
def _choose(ids, count, FACTOR: tl.constexpr):
    """A number in ``0..count - 1`` for each id: Knuth's multiplicative hash of all bits of the id,
    folded to 31."""
    key = (ids ^ (ids >> 31)) & 0x7FFFFFFF
    key ^= key >> 15
    mixed = ((key * FACTOR) >> 16) & 0xFFFF
    return ((mixed * count) >> 16).to(tl.int32)


@jit
def pick(ids, count):
    """Return which of ``count`` ranks works on each row."""
    return _choose(ids, count, 2654435761)


@jit
def turn(ids, n_nodes):
    """Return which node comes first in the order of nodes of each row."""
    return _choose(ids, n_nodes, 2246822519)


@jit
def owner_in(ids, node, index, nodes):
    """``(the rank of ``node`` that reduces each row, how many ranks there have it)``; -1 and 0
    where none does."""
    first = tl.load(nodes.begins + node)
    last = tl.load(nodes.begins + node + 1)
    have = (ids - ids).to(tl.int32)
    for m in tl.range(first, last):
        have += (match.find(ids, tl.load(nodes.ranks + m), index) >= 0).to(tl.int32)
    picked = pick(ids, have)
    seen = have - have
    owner = seen - 1
    for m in tl.range(first, last):
        mate = tl.load(nodes.ranks + m)
        has = match.find(ids, mate, index) >= 0
        owner = tl.where(has & (seen == picked), mate, owner)
        seen += has.to(tl.int32)
    return owner, have


@jit
def _append(memory, index, kind, rows, wanted):
    """Add ``rows`` where ``wanted`` to the work list ``kind``."""
    number = wanted.to(tl.int32)
    begin = tl.atomic_add(
        memory.counters + kind, tl.sum(number, axis=0), sem="relaxed", scope="gpu"
    )
    at = begin + tl.cumsum(number, axis=0) - 1
    tl.store(work_list(memory, index, kind) + at, rows.to(tl.int32), mask=wanted)


@jit
def valid(index):
    """Return whether the lists of all ranks are fit to be used: all ranks find the same, since they
    have the same."""
    status = index.status
    fits = (tl.load(status + match.UNION) <= index.max_union) & (
        tl.load(status + match.MAX_ROWS) <= index.capacity
    )
    bad = (
        tl.load(status + match.BAD_RANGE)
        | tl.load(status + match.BAD_ORDER)
        | tl.load(status + match.BAD_SIGNATURE)
    )
    return fits & (bad == 0)


@jit
def plan(program, begins, index, memory, nodes, g, REPEATED: tl.constexpr, BLOCK: tl.constexpr):
    """Sort this rank's rows into work lists, and find their places in the union. One program per
    ``BLOCK`` rows.

    The work lists stay empty, and nothing moves, if the lists of ids are not valid (see
    :func:`valid`).

    Args:
        begins: as :func:`write_list` leaves it. With ``REPEATED`` only: rows may be there several
            times.
    """
    rows = tl.cast(program, tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < match.list_size(index, g.rank)
    if valid(index):
        ids = tl.load(match.list_of(index, g.rank) + HEADER + rows, mask=inside, other=0)
        owner, have = owner_in(ids, nodes.node, index, nodes)
        tl.store(memory.targets + rows, match.find_in_union(ids, index), mask=inside)
        mine = inside & (owner == g.rank)
        staged = inside & (owner != g.rank)
        if REPEATED:
            begin = tl.load(begins + rows, mask=inside, other=0)
            end = tl.load(begins + rows + 1, mask=inside, other=0)
            staged = staged | (inside & (end - begin > 1))
        _append(memory, index, SINGLE, rows, mine & (have == 1))
        _append(memory, index, CONTESTED, rows, mine & (have > 1))
        _append(memory, index, STAGED, rows, staged)
