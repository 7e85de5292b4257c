# SPDX-License-Identifier: Apache-2.0
"""Index matching: which of W sorted lists hold an id, and at which place. Kernels and device
functions.

Input: ``lists``, int64, W lists of ``stride`` words each. Words of list q: 0 = bytes used, 1 =
number of ids n_q, 2 = signature, 3 = 0, then from word ``HEADER`` on n_q ids, strictly ascending.
Only the first ``capacity`` ids of a list are looked at. The *union* is the ascending list of the
ids that any list holds; it has U ids.

Two kinds of directory answer the same questions (:func:`find`, :func:`find_in_union`)::

    bitmap   entries[q, w]    one 64-bit word per 32 ids: which of the ids 32w .. 32w+31 list q holds (low half), and
                              the place in list q of the first of them (high half). Row W: the union, likewise.
                              Place of an id = high half + number of bits below its own: one load, whatever n is.
    search   leaders[q, i]    ids among the first i of list q that no earlier list holds: an exclusive prefix sum.
                              Place of an id in the union = sum over p of leaders[p, ids of list p below it].
                              Lists, and the union, are searched by bisection: log2(n) loads.

Two launches of the caller's on one stream: one calls :func:`clear`, the other :func:`build`.
Programs of a phase of *build* wait until all of the phase before are done, which have lower numbers
(:func:`tdcoll.primitives.group.wait_until_done`), and nothing else orders them. Later programs of
that launch may use the directory after :func:`wait_until_built`::

    bitmap   clear -> flag -> union -> assign_ids                           -> place_firsts, if wanted
    search   clear -> find_leaders -> assign_leader_ids -> place_leaders    -> place_firsts, if wanted

    clear              zeroes status, progress, and entries[0 .. W-1] or, for search, union
    flag               one 64-bit atomic or per id: its bit, with its place in the high half if it is first in the word.
                       Ids of one word may come from different programs, in any order: no two of them set the same bit.
    union              bits of row W = or over the W rows; ids per block of words -> totals
    assign_ids         high halves of row W = exclusive prefix sum of the words' ids; union; U -> status
    find_leaders       leaders within a block of ids (bisection of all earlier lists) -> totals
    assign_leader_ids  adds the totals of earlier blocks; U += leaders of the list
    place_leaders      union[place of each leader] = its id
    place_firsts       copies status, and finds how many ids of the union are below each of some: places[...]

A bitmap is built by a few passes over its W + 1 rows and one atomic for each id. A search takes W
log2(n) loads for each id, and no memory that depends on the number of rows. See
:mod:`tdcoll.collectives.index_match.policy`.

Even if the lists are invalid (ids out of range, unsorted, repeated, counts beyond the capacity),
nothing here reads or writes out of bounds, places are below ``capacity`` or ``max_union``, and the
``BAD_*`` words of status record the faults. No order of operations matters: ranks that have the
same lists get the same bits.
"""

from typing import Any, NamedTuple

import triton.language as tl

from tdcoll.collectives.index_match.policy import HEADER_WORDS
from tdcoll.language.jit import jit
from tdcoll.primitives.group import signal_done, wait_until_done

# Words of a list's header.
LIST_COUNT = tl.constexpr(1)  # number of ids, which may be more than there is room for
LIST_SIGNATURE = tl.constexpr(2)  # what the ranks must agree on
HEADER = tl.constexpr(HEADER_WORDS)

# Words of status.
UNION = tl.constexpr(0)  # U, also where it is more than max_union
MAX_ROWS = tl.constexpr(1)  # the largest count of the headers
BAD_RANGE = tl.constexpr(2)  # 1 + the last rank that has an id outside of [0, num_rows); 0: none
BAD_ORDER = tl.constexpr(3)  # 1 + the last rank whose ids are not strictly ascending; 0: none
BAD_SIGNATURE = tl.constexpr(4)  # 1 + the last rank whose signature is not ours; 0: none
TOTAL = tl.constexpr(5)  # sum of the headers' counts
STATUS_WORDS = tl.constexpr(8)

PHASES = tl.constexpr(4)
"""Words of progress: programs that have done their part of each phase."""

_BITS = tl.constexpr(0xFFFFFFFF)
_ODD = tl.constexpr(0x5555555555555555)
_PAIRS = tl.constexpr(0x3333333333333333)
_NIBBLES = tl.constexpr(0x0F0F0F0F0F0F0F0F)
_ONES = tl.constexpr(0x0101010101010101)


class Index(NamedTuple):
    """A directory as kernels see it: the lists, and where each of their ids is.

    Attributes:
        lists: int64 ``[world, stride]``: header and ids of each list. Words behind the ids are
            ignored.
        entries: int64 ``[world + 1, words]`` of a bitmap; not read by a search.
        union: int64 ``[max_union]``: the different ids, ascending.
        status: int64 ``[STATUS_WORDS]``: how many there are, and what is wrong with the lists.
        leaders: int32 ``[world, capacity + 1]``, of a search only.
        totals: int32; of a bitmap one for each block of words, of a search for each block of ids of
            each list.
        progress: int32 ``[PHASES]``.
        num_rows: ids are below it.
        stride: words from one list to the next.
        capacity: the most ids of a list.
        words: of a row of ``entries``.
        world: number of lists.
        max_union: the most ids of the union.
        per_list: programs of the first phase of :func:`build` for each list.
        later: programs of each of the two that follow.
        search: which kind of directory it is.
        block: words or ids that a program takes at a time. A power of two.
        summed: totals that are summed at a time. A power of two.
    """

    lists: Any
    entries: Any
    union: Any
    status: Any
    leaders: Any
    totals: Any
    progress: Any
    num_rows: tl.int64
    stride: tl.int64
    capacity: tl.int32
    words: tl.int64
    world: tl.int32
    max_union: tl.int32
    per_list: tl.int32
    later: tl.int32
    search: tl.constexpr
    block: tl.constexpr
    summed: tl.constexpr


# ---------------------------------------------------------------------- device functions


@jit
def popcount(x):
    """Number of bits set in each int64, as int32. LLVM knows this form and makes one instruction of
    it."""
    v = x.to(tl.uint64)
    v = v - ((v >> 1) & _ODD)
    v = (v & _PAIRS) + ((v >> 2) & _PAIRS)
    v = (v + (v >> 4)) & _NIBBLES
    return ((v * _ONES) >> 56).to(tl.int32)


@jit
def list_of(index, q):
    """List ``q``, which begins with its header."""
    return index.lists + tl.cast(q, tl.int64) * index.stride


@jit
def list_size(index, q):
    """Number of ids of list ``q`` that are there: its header's count, at least 0 and at most the
    capacity. int32."""
    count = tl.load(list_of(index, q) + LIST_COUNT)
    return tl.minimum(tl.maximum(count, 0), tl.cast(index.capacity, tl.int64)).to(tl.int32)


@jit
def find_sorted(x, ids, n):
    """``(p, v)``: place (int32) and value of the last of ``n`` ascending ``ids`` that is at most
    ``x``.

    p = 0 and v = ids[0] where all are greater, v = -1 where n = 0. ``x``: int64, a block or a
    scalar. About log2(n) loads one after the other, without branches; places stay inside of [0, n)
    whatever the ids are.
    """
    p = (x - x).to(tl.int32)
    left = tl.cast(n, tl.int32)
    while left > 1:
        half = left >> 1
        p = tl.where(tl.load(ids + p + half) <= x, p + half, p)
        left -= half
    v = tl.load(ids + p, mask=(p - p) < n, other=-1)
    return p, v


@jit
def _look_up(x, row, words, limit):
    """Place of ``x`` according to a row of entries, -1 where it is not there or not below
    ``limit``."""
    word = x >> 5
    entry = tl.load(row + word, mask=(x >= 0) & (word < words), other=0)
    bit = x & 31
    below = entry & ((tl.cast(1, tl.int64) << bit) - 1)
    place = (entry >> 32) + popcount(below)
    there = (((entry >> bit) & 1) != 0) & (place < limit)
    return tl.where(there, place, -1).to(tl.int32)


@jit
def find(x, q, index):
    """Place of ``x`` in list ``q``, int32; -1 where it is not there. ``x``: ids, an integer block
    of any shape, or a scalar, of any value; ``q``: a scalar; ``index``: an :class:`Index` that is
    built."""
    x = tl.cast(x, tl.int64)
    if index.search:
        n = list_size(index, q)
        p, v = find_sorted(x, list_of(index, q) + HEADER, n)
        place = tl.where((v == x) & (p < n), p, -1)
    else:
        place = _look_up(
            x, index.entries + tl.cast(q, tl.int64) * index.words, index.words, index.capacity
        )
    return place


@jit
def find_in_union(x, index):
    """Place of ``x`` in the union, int32; -1 where it is not there, or beyond ``max_union``.
    Arguments as for find."""
    x = tl.cast(x, tl.int64)
    if index.search:
        n = tl.minimum(tl.load(index.status + UNION), tl.cast(index.max_union, tl.int64)).to(
            tl.int32
        )
        p, v = find_sorted(x, index.union, n)
        place = tl.where((v == x) & (p < n), p, -1)
    else:
        place = _look_up(x, index.entries + index.world * index.words, index.words, index.max_union)
    return place


@jit
def below(ids, index):
    """How many ids of the union, of those for which there is room, are less than each of ``ids``.
    int32."""
    size = tl.minimum(tl.load(index.status + UNION), tl.cast(index.max_union, tl.int64)).to(
        tl.int32
    )
    place, found = find_sorted(ids, index.union, size)
    return place + ((found < ids) & (place < size)).to(tl.int32)


# ---------------------------------------------------------------------- both kinds


@jit
def clear(program, index, BLOCK: tl.constexpr):
    """Zero what :func:`build` wants zeroed. Thread blocks: ``Directory.clearers``, for blocks of
    ``BLOCK`` words."""
    i = tl.cast(program, tl.int64) * BLOCK + tl.arange(0, BLOCK)
    target = index.entries
    size = index.words * index.world
    if index.search:  # the union: unsorted lists leave holes in it, and what is there must be a row
        target = index.union
        size = tl.cast(index.max_union, tl.int64)
    tl.store(target + i, tl.zeros([BLOCK], tl.int64), mask=i < size)
    if program == 0:
        tl.store(index.status + tl.arange(0, STATUS_WORDS), tl.zeros([STATUS_WORDS], tl.int64))
        tl.store(index.progress + tl.arange(0, PHASES), tl.zeros([PHASES], tl.int32))


@jit
def _read_header(q, index, signature):
    """Write what status says of headers. One program per list calls it."""
    header, status = list_of(index, q), index.status
    count = tl.maximum(tl.load(header + LIST_COUNT), 0)
    tl.atomic_max(status + MAX_ROWS, count, sem="relaxed")
    tl.atomic_add(status + TOTAL, count, sem="relaxed")
    if tl.load(header + LIST_SIGNATURE) != signature:
        tl.atomic_max(status + BAD_SIGNATURE, tl.cast(q, tl.int64) + 1, sem="relaxed")


@jit
def _read_ids(q, index, i, n):
    """``(ids[i], ids[i - 1], whether ids[i] is there and in range)``; what is wrong goes to
    status."""
    ids, status = list_of(index, q) + HEADER, index.status
    inside = i < n
    x = tl.load(ids + i, mask=inside, other=0)
    before = tl.load(ids + i - 1, mask=inside & (i > 0), other=-1)
    valid = (x >= 0) & (x < index.num_rows)
    if tl.max((inside & (valid == 0)).to(tl.int32), axis=0) != 0:
        tl.atomic_max(status + BAD_RANGE, tl.cast(q, tl.int64) + 1, sem="relaxed")
    if tl.max((inside & (i > 0) & (before >= x)).to(tl.int32), axis=0) != 0:
        tl.atomic_max(status + BAD_ORDER, tl.cast(q, tl.int64) + 1, sem="relaxed")
    return x, before, inside & valid


@jit
def _sum_before(index, totals, count):
    """Sum of the first ``count`` int32 ``totals``."""
    partial = tl.zeros([index.summed], tl.int32)
    for start in tl.range(0, count, index.summed):
        i = start + tl.arange(0, index.summed)
        partial += tl.load(totals + i, mask=i < count, other=0)
    return tl.sum(partial, axis=0)


# ---------------------------------------------------------------------- bitmap


@jit
def flag(program, programs, q, index, signature):
    """Rows 0 .. W-1 of ``entries``, which are zero before. Thread blocks: any number for each list
    ``q``, int64."""
    if program == 0:
        _read_header(q, index, signature)
    n = list_size(index, q)
    row = index.entries + q * index.words
    for start in tl.range(program * index.block, n, programs * index.block):
        i = start + tl.arange(0, index.block)
        x, before, valid = _read_ids(q, index, i, n)
        first = (i == 0) | ((before >> 5) != (x >> 5))
        entry = (tl.cast(1, tl.int64) << (x & 31)) | tl.where(first, i.to(tl.int64) << 32, 0)
        tl.atomic_or(row + (x >> 5), entry, mask=valid, sem="relaxed")


@jit
def union(program, index):
    """Low halves of row W, and ``totals``: how many ids each block of words has. One program for
    each."""
    w = tl.cast(program, tl.int64) * index.block + tl.arange(0, index.block)
    inside = w < index.words
    bits = tl.zeros([index.block], tl.int64)
    for q in tl.range(0, index.world, loop_unroll_factor=4):
        bits |= tl.load(index.entries + q * index.words + w, mask=inside, other=0)
    bits &= _BITS
    tl.store(index.entries + index.world * index.words + w, bits, mask=inside)
    tl.store(index.totals + program, tl.sum(popcount(bits), axis=0))


@jit
def assign_ids(block, blocks, index):
    """High halves of row W, the union's first ``max_union`` ids, and U. Thread blocks as for
    :func:`union`."""
    offset = _sum_before(index, index.totals, block)
    w = tl.cast(block, tl.int64) * index.block + tl.arange(0, index.block)
    inside = w < index.words
    row = index.entries + index.world * index.words
    bits = tl.load(row + w, mask=inside, other=0)
    count = popcount(bits)
    place = (offset + tl.cumsum(count, axis=0) - count).to(tl.int64)
    tl.store(row + w, bits | (place << 32), mask=inside)
    here = tl.sum(count, axis=0)
    if block == blocks - 1:
        tl.store(index.status + UNION, (offset + here).to(tl.int64))
    if here > 0:
        # A thread writes the ids of its word one after the other: a warp's stores fall close
        # together.
        for bit in tl.range(0, 32):
            there = (bits >> bit) & 1
            tl.store(
                index.union + place, w * 32 + bit, mask=(there != 0) & (place < index.max_union)
            )
            place += there


# ---------------------------------------------------------------------- search


@jit
def _leaders_of(index, q):
    """``[capacity + 1]``: of list ``q``."""
    return index.leaders + tl.cast(q, tl.int64) * (tl.cast(index.capacity, tl.int64) + 1)


@jit
def find_leaders(program, programs, q, index, signature):
    """``leaders``, counted from the start of each block, and ``totals``. Thread blocks as for
    :func:`flag`."""
    if program == 0:
        _read_header(q, index, signature)
    n = list_size(index, q)
    row = _leaders_of(index, q)
    totals = index.totals + q * (index.capacity // index.block + 1)
    for block in tl.range(program, n // index.block + 1, programs):
        i = block * index.block + tl.arange(0, index.block)
        x, _before, valid = _read_ids(q, index, i, n)
        leads = valid.to(tl.int32)
        for p in tl.range(0, q):
            leads = tl.where(find(x, p, index) >= 0, 0, leads)
        tl.store(row + i, tl.cumsum(leads, axis=0) - leads, mask=i <= n)
        tl.store(totals + block, tl.sum(leads, axis=0))


@jit
def assign_leader_ids(program, programs, q, index):
    """``leaders``, counted from the start of each list, 0 .. n_q; U. Thread blocks as for
    :func:`flag`."""
    n = list_size(index, q)
    row = _leaders_of(index, q)
    totals = index.totals + q * (index.capacity // index.block + 1)
    for block in tl.range(program, n // index.block + 1, programs):
        offset = _sum_before(index, totals, block)
        i = block * index.block + tl.arange(0, index.block)
        tl.store(row + i, tl.load(row + i, mask=i <= n, other=0) + offset, mask=i <= n)
        if block == n // index.block:
            own = offset + tl.load(totals + block)
            tl.atomic_add(index.status + UNION, own.to(tl.int64), sem="relaxed")


@jit
def place_leaders(program, programs, q, index):
    """The union's first ``max_union`` ids. Thread blocks as for :func:`flag`."""
    n = list_size(index, q)
    row = _leaders_of(index, q)
    for start in tl.range(program * index.block, n, programs * index.block):
        i = start + tl.arange(0, index.block)
        inside = i < n
        x = tl.load(list_of(index, q) + HEADER + i, mask=inside, other=0)
        own = tl.load(row + i, mask=inside, other=0)
        leads = inside & (tl.load(row + i + 1, mask=inside, other=0) > own)
        place = tl.zeros([index.block], tl.int64)
        for p in tl.range(0, index.world):
            m = list_size(index, p)
            at, v = find_sorted(x, list_of(index, p) + HEADER, m)
            below = at + ((v < x) & (at < m)).to(tl.int32)
            place += tl.load(_leaders_of(index, p) + below, mask=leads, other=0)
        tl.store(index.union + place, x, mask=leads & (place < index.max_union))


# ---------------------------------------------------------------------- all phases


@jit
def place_firsts(index, firsts, count, places, FIRSTS: tl.constexpr):
    """The status, and behind it how many ids of the union are below each of ``firsts [count]``,
    ``-> places``."""
    word = tl.arange(0, STATUS_WORDS)
    tl.store(places + word, tl.load(index.status + word))
    i = tl.arange(0, FIRSTS)
    ids = tl.load(firsts + i, mask=i < count, other=0)
    tl.store(places + STATUS_WORDS + i, below(ids, index).to(tl.int64), mask=i < count)


@jit
def wait_until_built(index):
    """Return when the directory is complete. For programs behind those of :func:`build`."""
    wait_until_done(index.progress + 2, index.later)


@jit
def build(program, index, firsts, count, places, signature, FIRSTS: tl.constexpr):
    """All phases but *clear*, by the first programs of a launch: ``Directory.builders``, and one for
    *place_firsts*.

    Args:
        firsts, count, places: of :func:`place_firsts`.
        signature: what word ``LIST_SIGNATURE`` of each header must be. int64.
        FIRSTS: a power of two, at least ``count``; 0 leaves *place_firsts* out.
    """
    per_list, later = index.per_list, index.later
    first = per_list * index.world
    if program < first:
        q = (program // per_list).to(tl.int64)
        if index.search:
            find_leaders(program % per_list, per_list, q, index, signature)
        else:
            flag(program % per_list, per_list, q, index, signature)
        signal_done(index.progress)
    elif program < first + later:
        wait_until_done(index.progress, first)
        own = program - first
        if index.search:
            assign_leader_ids(own % per_list, per_list, (own // per_list).to(tl.int64), index)
        else:
            union(own, index)
        signal_done(index.progress + 1)
    elif program < first + 2 * later:
        wait_until_done(index.progress + 1, later)
        own = program - first - later
        if index.search:
            place_leaders(own % per_list, per_list, (own // per_list).to(tl.int64), index)
        else:
            assign_ids(own, later, index)
        signal_done(index.progress + 2)
    elif FIRSTS > 0:
        wait_until_built(index)
        place_firsts(index, firsts, count, places, FIRSTS)
