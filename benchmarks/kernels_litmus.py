# SPDX-License-Identifier: Apache-2.0
"""The kernels of the litmus tests: rounds of one pattern of communication, on the device.

A test has two to four *sides*, each one thread block. Side s is program s of one launch if all of
them run on one GPU; otherwise rank r runs the sides r, r + hosts and so on. All sides are on their
GPUs at once, because there are at most four. In each round every side makes its part of the
pattern, and the sides then meet (:func:`_meet`), so rounds don't overlap. Each lane of a side's
block has words of its own, so a round is as many instances of the pattern as a block has lanes.

Words hold the round in which they were written, or data that follows from it. Nothing is reset
between rounds, and a word of an earlier round is *stale*.

A function of a pattern takes ``(sides, side, turn, FAULT, BLOCK)`` and returns ``(weak, alive)``: a
block of 1 where the weak outcome was seen by this side, and 0 if a wait has expired. ``FAULT`` says
how the pattern differs from the shipped one; ``""`` if it doesn't.
"""

from typing import Any, NamedTuple

import triton.language as tl

import tdcoll.language as tdl
from tdcoll.language import INTERPRETED
from tdcoll.language.jit import jit
from tdcoll.primitives.lamport import SENTINEL

if not INTERPRETED:
    from triton.language import core

    from tdcoll.language.ptx import asm

MAX_SIDES = 4
LANES = 128 if not INTERPRETED else 8
"""Lanes of a side: as many as threads on a GPU."""

# Bytes from a side's region to its parts.
_MET = tl.constexpr(0)
_ARRIVED = tl.constexpr(8 * MAX_SIDES)
_SCRATCH = tl.constexpr(16 * MAX_SIDES)
_SEEN = tl.constexpr(32 * MAX_SIDES)  # int32 [2, MAX_SIDES, LANES]
_SOURCE = tl.constexpr(_SEEN.value + 8 * MAX_SIDES * LANES)  # int32 [4 * LANES]
_DATA = tl.constexpr(_SOURCE.value + 16 * LANES)  # int32 [4 * LANES]
REGION_BYTES = _DATA.value + 16 * LANES

_PATIENCE = tl.constexpr(1 << 22)
"""Polls of a wait without a deadline."""


class Sides(NamedTuple):
    """Where the sides of a test are.

    Attributes:
        reach: int64 ``[MAX_SIDES]``: the address of each side's region for this GPU's loads and
            stores.
        symmetric: int64 ``[MAX_SIDES]``: the address here of the region that each side's rank has
            at the same place, for puts.
        pes: int32 ``[MAX_SIDES]``: PE of each side.
        monitor: words of the waits' monitor.
        count: sides of the test.
    """

    reach: Any
    symmetric: Any
    pes: Any
    monitor: Any
    count: tl.constexpr


if INTERPRETED:

    @jit
    def _fence_sc():
        """Nothing: the simulator has no such fence, and the test isn't run there."""

else:

    @core.extern
    def _fence_sc(_semantic=None):
        asm(_semantic, "fence.sc.sys; mov.u32 $0, 0;")


@jit
def _words(sides, side, offset):
    """Return the pointer to the int32 at ``offset`` of a side's region."""
    return (tl.load(sides.reach + side) + offset).to(tl.pointer_type(tl.int32))


@jit
def _signal(sides, side, offset, writer):
    """Return the pointer to the signal of side ``writer`` at ``offset`` of a side's region."""
    return (tl.load(sides.reach + side) + offset + 8 * writer).to(tl.pointer_type(tl.int64))


@jit
def _set(signal, turn):
    """Release: set a signal, after the block's accesses. Called behind a block barrier."""
    if tdl.tid(0) == 0:
        tdl.st_release(signal, turn, "sys")


@jit
def _wait(sides, side, writer, turn):
    """Return 1 when side ``writer`` has set this side's signal in this round."""
    return tdl.wait_signal(
        _signal(sides, side, _ARRIVED, writer), tdl.CMP_GE, turn, sides.monitor, writer, writer
    )


@jit
def _wait_relaxed(signal, turn):
    """Wait by relaxed loads, which is no acquire; return 0 after :data:`_PATIENCE` polls."""
    there = tdl.block_and(tdl.ld(signal, "sys", "relaxed") >= turn)
    polls = tl.cast(0, tl.int32)
    while (there == 0) & (polls < _PATIENCE):
        there = tdl.block_and(tdl.ld(signal, "sys", "relaxed") >= turn)
        polls += 1
    return there


@jit
def _meet(sides, side, turn):
    """Wait until all sides have come so far; what each has done is then seen by all."""
    tdl.syncthreads()
    for other in tl.static_range(sides.count):
        if other != side:
            _set(_signal(sides, other, _MET, side), turn)
    mine = _signal(sides, side, _MET, 0)
    return tdl.wait_signals(mine, sides.count, side, tdl.CMP_GE, turn, sides.monitor, 4)


@jit
def _value(turn, lane, part: tl.constexpr):
    """``-> [BLOCK]``: data of a round, int32 of at least 0, so that it is never the sentinel."""
    mixed = (turn * 2654435761 + lane.to(tl.int64) * 40503 + part * 97) & 0x7FFFFFFF
    return mixed.to(tl.int32)


@jit
def _stale_parts(first, second, third, fourth, turn, lane, PARTS: tl.constexpr):
    """``-> [BLOCK]``: 1 where one of the first ``PARTS`` parts is not this round's."""
    stale = (first != _value(turn, lane, 0)) | (second != _value(turn, lane, 1))
    stale |= third != _value(turn, lane, 2)
    if PARTS == 4:
        stale |= fourth != _value(turn, lane, 3)
    return stale.to(tl.int32)


@jit
def _store_data(words, turn, lane, BLOCK: tl.constexpr):
    """Store a round's data by ordinary stores of all threads."""
    for part in tl.static_range(4):
        tl.store(words + part * BLOCK + lane, _value(turn, lane, part))


@jit
def _stale_data(words, turn, lane, BLOCK: tl.constexpr):
    """``-> [BLOCK]``: 1 where the data, by ordinary loads of all threads, is not this round's."""
    first = tl.load(words + lane)
    second = tl.load(words + BLOCK + lane)
    third = tl.load(words + 2 * BLOCK + lane)
    fourth = tl.load(words + 3 * BLOCK + lane)
    return _stale_parts(first, second, third, fourth, turn, lane, 4)


@jit
def _show(sides, side, turn, seen, lane, BLOCK: tl.constexpr):
    """Store what this side has read where side 0 finds it when the sides have met."""
    place = ((turn % 2) * 4 + side) * BLOCK
    tl.store(_words(sides, 0, _SEEN) + place + lane, seen)


@jit
def _shown(sides, side, turn, lane, BLOCK: tl.constexpr):
    """``-> [BLOCK]``: what ``side`` has read in this round; for side 0, after the meeting."""
    place = ((turn % 2) * 4 + side) * BLOCK
    return tl.load(_words(sides, 0, _SEEN) + place + lane)


# ---------------------------------------------------------------------- patterns


@jit
def flagged_words(sides, side, turn, FAULT: tl.constexpr, BLOCK: tl.constexpr):
    """LL: 128-bit words of data and flag, in both directions; weak: a flag without its data."""
    lane = tl.arange(0, BLOCK)
    here = tl.load(sides.reach + side) + _DATA + 16 * lane.to(tl.int64)
    there = tl.load(sides.reach + 1 - side) + _DATA + 16 * lane.to(tl.int64)
    flag = turn.to(tl.int32)
    first = _value(turn, lane, 0)
    second = _value(turn, lane, 1)
    third = _value(turn, lane, 2)
    if FAULT == "two 64-bit words":
        low = second.to(tl.int64) << 32 | first.to(tl.int64)
        high = tl.zeros_like(low) + flag.to(tl.int64) << 32 | third.to(tl.int64)
        halves = there.to(tl.pointer_type(tl.int64))
        tdl.st(halves + 1, high, "sys", "relaxed")
        tdl.st(halves, low, "sys", "relaxed")
    else:
        tdl.store_flagged(there, first, second, third, flag, lane < BLOCK)
    first, second, third, arrived = tdl.wait_flagged(
        here, flag, lane < BLOCK, sides.monitor, 1 - side
    )
    stale = _stale_parts(first, second, third, first, turn, lane, 3)
    return stale * arrived, tdl.block_and(tl.min(arrived))


@jit
def lamport_words(sides, side, turn, FAULT: tl.constexpr, BLOCK: tl.constexpr):
    """Words without a flag, in both directions; weak: a part that is not this round's."""
    lane = tl.arange(0, BLOCK)
    here = tl.load(sides.reach + side) + _DATA + 16 * lane.to(tl.int64)
    there = tl.load(sides.reach + 1 - side) + _DATA + 16 * lane.to(tl.int64)
    if FAULT == "one part polled":
        for part in tl.static_range(4):
            parts = there.to(tl.pointer_type(tl.int32)) + part
            tdl.st(parts, _value(turn, lane, part), "sys", "relaxed")
        words = here.to(tl.pointer_type(tl.int32))
        arrived = tl.zeros([BLOCK], tl.int32)
        there = tl.cast(0, tl.int32)
        polls = tl.cast(0, tl.int32)
        while (there == 0) & (polls < _PATIENCE):
            arrived = (tdl.ld(words, "sys", "relaxed") != SENTINEL).to(tl.int32)
            there = tdl.block_and(tl.min(arrived))
            polls += 1
        first, second, third, fourth = tdl.load_words(here, lane < BLOCK)
    else:
        tdl.store_words(
            there,
            _value(turn, lane, 0),
            _value(turn, lane, 1),
            _value(turn, lane, 2),
            _value(turn, lane, 3),
            lane < BLOCK,
        )
        first, second, third, fourth, arrived = tdl.wait_words(
            here, SENTINEL, lane < BLOCK, sides.monitor, 1 - side, turn
        )
    alive = tdl.block_and(tl.min(arrived))
    stale = _stale_parts(first, second, third, fourth, turn, lane, 4)
    if alive != 0:
        # Nobody may clear a word before its last part has come.
        alive = _meet(sides, side, 2 * turn)
        nothing = tl.full([BLOCK], SENTINEL, tl.int32)
        tdl.store_words(here, nothing, nothing, nothing, nothing, lane < BLOCK)
    return stale * arrived, alive


@jit
def message_passing(sides, side, turn, FAULT: tl.constexpr, BLOCK: tl.constexpr):
    """Data by all threads, then a signal, in both directions; weak: a signal without its data."""
    lane = tl.arange(0, BLOCK)
    other = 1 - side
    _store_data(_words(sides, other, _DATA), turn, lane, BLOCK)
    signal = _signal(sides, other, _ARRIVED, side)
    if FAULT != "no barrier":
        tdl.syncthreads()
    if FAULT == "relaxed release":
        if tdl.tid(0) == 0:
            tdl.st(signal, turn, "sys", "relaxed")
    else:
        _set(signal, turn)
    if FAULT == "relaxed acquire":
        alive = _wait_relaxed(_signal(sides, side, _ARRIVED, other), turn)
    else:
        alive = _wait(sides, side, other, turn)
    return _stale_data(_words(sides, side, _DATA), turn, lane, BLOCK) * alive, alive


@jit
def handing_on(sides, side, turn, FAULT: tl.constexpr, BLOCK: tl.constexpr):
    """Side 0 stores data to side 2 and signals side 1, which signals side 2; weak: side 2 has the
    signal without the data."""
    lane = tl.arange(0, BLOCK)
    weak = tl.zeros([BLOCK], tl.int32)
    alive = tl.cast(1, tl.int32)
    if side == 0:
        _store_data(_words(sides, 2, _DATA), turn, lane, BLOCK)
        tdl.syncthreads()
        _set(_signal(sides, 1, _ARRIVED, 0), turn)
    elif side == 1:
        alive = _wait(sides, 1, 0, turn)
        signal = _signal(sides, 2, _ARRIVED, 1)
        if FAULT == "relaxed release":
            if tdl.tid(0) == 0:
                tdl.st(signal, turn, "sys", "relaxed")
        else:
            _set(signal, turn)
    else:
        alive = _wait(sides, 2, 1, turn)
        weak = _stale_data(_words(sides, 2, _DATA), turn, lane, BLOCK) * alive
    return weak, alive


@jit
def store_buffering(sides, side, turn, FAULT: tl.constexpr, BLOCK: tl.constexpr):
    """Each side stores to the other's memory, then loads its own; weak: both loads are stale."""
    lane = tl.arange(0, BLOCK)
    tdl.st(_words(sides, 1 - side, _DATA) + lane, _value(turn, lane, 0), "sys", "relaxed")
    if FAULT == "fence.sc":
        _fence_sc()
    seen = tdl.ld(_words(sides, side, _DATA) + lane, "sys", "relaxed")
    _show(sides, side, turn, (seen != _value(turn, lane, 0)).to(tl.int32), lane, BLOCK)
    alive = _meet(sides, side, 2 * turn)
    weak = tl.zeros([BLOCK], tl.int32)
    if side == 0:
        weak = _shown(sides, 0, turn, lane, BLOCK) & _shown(sides, 1, turn, lane, BLOCK)
    return weak * alive, alive


@jit
def two_signals(sides, side, turn, FAULT: tl.constexpr, BLOCK: tl.constexpr):
    """Sides 0 and 1 each store one word, to sides 2 and 3, which both load the two words by
    acquire, their own first; weak: each saw its own word and not the other's."""
    lane = tl.arange(0, BLOCK)
    if side < 2:
        tdl.st(_words(sides, 2 + side, _DATA) + lane, _value(turn, lane, 0), "sys", "relaxed")
    else:
        own = tdl.ld(_words(sides, side, _DATA) + lane, "sys", "acquire")
        if FAULT == "fence.sc":
            _fence_sc()
        other = tdl.ld(_words(sides, 5 - side, _DATA) + lane, "sys", "acquire")
        found = (own == _value(turn, lane, 0)) & (other != _value(turn, lane, 0))
        _show(sides, side, turn, found.to(tl.int32), lane, BLOCK)
    alive = _meet(sides, side, 2 * turn)
    weak = tl.zeros([BLOCK], tl.int32)
    if side == 0:
        weak = _shown(sides, 2, turn, lane, BLOCK) & _shown(sides, 3, turn, lane, BLOCK)
    return weak * alive, alive


@jit
def put_with_signal(sides, side, turn, FAULT: tl.constexpr, BLOCK: tl.constexpr):
    """A put of NVSHMEM's with its signal, in both directions; weak: a signal without its data."""
    lane = tl.arange(0, BLOCK)
    other = 1 - side
    pe = tl.load(sides.pes + other)
    source = _words(sides, side, _SOURCE)
    _store_data(source, turn, lane, BLOCK)
    tdl.syncthreads()
    symmetric = tl.load(sides.symmetric + other)
    target = (symmetric + _DATA).to(tl.pointer_type(tl.int32))
    signal = (symmetric + _ARRIVED + 8 * side).to(tl.pointer_type(tl.int64))
    if FAULT == "signal ahead":
        if tdl.tid(0) == 0:
            tdl.signal_op(signal, turn, tdl.SIGNAL_SET, pe)
        tdl.putmem_block(target, source, 16 * BLOCK, pe)
    else:
        tdl.putmem_signal_block(target, source, 16 * BLOCK, signal, turn, tdl.SIGNAL_SET, pe)
    alive = _wait(sides, side, other, turn)
    return _stale_data(_words(sides, side, _DATA), turn, lane, BLOCK) * alive, alive


# ---------------------------------------------------------------------- rounds


@jit
def _stagger(sides, side, turn, seed):
    """Wait for up to three atomics, of which each needs the result of the one before: sides begin
    a round in another order in each."""
    word = (tl.load(sides.reach + side) + _SCRATCH).to(tl.pointer_type(tl.int64))
    delay = (((turn + seed) * 2654435761 + side * 40503) >> 13) & 3
    for _ in tl.range(0, delay):
        word += tl.atomic_max(word, 0, sem="relaxed", scope="sys") >> 62


@jit(do_not_specialize=["first", "step", "begin", "rounds", "seed"])
def play(
    sides,
    counts,
    first,
    step,
    begin,
    rounds,
    seed,
    PATTERN: tl.constexpr,
    FAULT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Play ``rounds`` rounds of a pattern. Program p is side ``first + p * step``.

    Args:
        sides: a :class:`Sides`.
        counts: int64 ``[2, MAX_SIDES]``: weak outcomes that each side saw, and the first round in
            which it saw one, 0 if none.
        begin: rounds that these sides have played before.
        PATTERN, FAULT: a pattern of this module, and how it differs from the shipped one.
        BLOCK: lanes of a side.
    """
    side = first + tl.program_id(0) * step
    total = tl.zeros([BLOCK], tl.int64)
    first_weak = tl.cast(0, tl.int64)
    alive = tl.cast(1, tl.int32)
    for i in tl.range(0, rounds):
        turn = tl.cast(begin, tl.int64) + i + 1
        if alive != 0:
            _stagger(sides, side, turn, seed)
            weak, alive = PATTERN(sides, side, turn, FAULT, BLOCK)
            total += weak
            if (first_weak == 0) & (tl.max(weak) != 0):
                first_weak = turn
            if alive != 0:
                alive = _meet(sides, side, 2 * turn + 1)
    tl.store(counts + side, tl.load(counts + side) + tl.sum(total))
    earlier = tl.load(counts + 4 + side)
    tl.store(counts + 4 + side, tl.where(earlier == 0, first_weak, earlier))


@jit
def old_words(data, stamps, wrong, n, number, monitor, COPIES: tl.constexpr, BLOCK: tl.constexpr):
    """Wait for the stamp of each copy, and count the words of its data that aren't ``number``, the
    last words first.

    Args:
        data: int64 ``[COPIES, n]``; ``stamps``: int64 ``[COPIES]``, copied behind the data.
        wrong: int64 ``[1]``; ``n``: a multiple of ``BLOCK``.
    """
    for turn in range(COPIES):
        tdl.wait_signal(stamps + turn, tdl.CMP_GE, number, monitor, 0, turn)
        for begin in range(0, n, BLOCK):
            place = n - begin - BLOCK + tl.arange(0, BLOCK)
            old = (tl.load(data + turn * n + place) != number).to(tl.int64)
            tl.store(wrong, tl.load(wrong) + tl.sum(old))
            tdl.syncthreads()
