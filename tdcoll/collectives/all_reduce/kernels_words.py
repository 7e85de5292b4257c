# SPDX-License-Identifier: Apache-2.0
"""All-reduce of small messages inside one node by the Lamport protocol or LL: one-shot, or
two-shot.

Scope: one node whose ranks can store to each other's memory; dtypes of at most 4 bytes.
Floating-point types use the Lamport protocol (:mod:`tdcoll.primitives.lamport`), if the context has
memory for it; all others use LL (:mod:`tdcoll.primitives.ll`), which sends a third more words.
(Elements of 8 bytes use ``kernels_direct``, because they would lie across LL words, and some of
their values contain the sentinel.)

**One-shot.** Every rank sends all data to all others, and sums everything: one hop, ``world - 1``
times the data. ::

    source --words--> inbox[slot, r] on every other rank
    inbox[slot, 0], ..., source, ..., inbox[slot, world - 1] --sum in rank order--> out

**Two-shot.** The data is cut into a part for each rank, which sums it and sends the sum on: two
hops, ``2 * (world - 1) / world`` times the data. A part is a whole number of words, and parts at
the end may be empty. ::

    source[p] --words--> first half of inbox[slot, r] on rank p, for every other rank p
    first halves of inbox[slot, 0], ..., source[r], ..., inbox[slot, world - 1] --sum in rank order--> out[r]
    out[r] --words--> second half of inbox[slot, r] on every other rank
    second half of inbox[slot, p] --> out[p]

The second half cannot be the first again, because a peer may send its sum while its first words are
still read here.

Signal map: there are no signals. Words of ``inbox[slot, s]`` on rank r are written by rank s, and
polled by the program of rank r that has the number of the one which sent them.

Ordering and reuse of a slot: those of the protocols' modules. A rank that is done with a call has
heard from every peer, because each program sends at least its first word to all ranks in the last
step.

Order of thread blocks: program i takes the blocks of words i, i + programs, ... one after the
other. It sends a block before it waits for it, and waits for programs i of other ranks only, which
do the same in the same order. Any number of resident blocks therefore makes progress, and any
number of thread blocks, if it is the same on all ranks.

In place: ``out`` may be ``source``. Each program stores to the words that it has loaded before, and
to no others.

Bits: those of every other algorithm, on every rank, because sums are in rank order, in the
accumulator's type, rounded once; in two steps the rounded sum travels. With the Lamport protocol a
sender replaces -0.0 by +0.0, which changes no result, because none is -0.0
(:mod:`tdcoll.primitives.reduce`).
"""

import triton.language as tl

from tdcoll.language.jit import jit
from tdcoll.primitives import lamport, words
from tdcoll.primitives.group import in_stream_order


@jit
def all_reduce_one_shot(
    source: tl.int64, out: tl.int64, inbox, g, nbytes: tl.int64, blocks: tl.int32,
    placement, extra, DTYPE: tl.constexpr, ACC: tl.constexpr, OP: tl.constexpr,
    EPILOGUE: tl.constexpr, LAMPORT: tl.constexpr, BLOCK: tl.constexpr, PERSISTENT: tl.constexpr,
):  # fmt: skip
    """``[nbytes] -> [nbytes]`` inside one node. Thread blocks: ``blocks``, or with ``PERSISTENT``
    any number up to that.

    Args (addresses are integers, so that all ranks share one compilation):
        source: any memory of this GPU, of any alignment that ``DTYPE`` allows.
        out: the result, likewise; may be ``source``.
        inbox: :class:`~tdcoll.primitives.lamport.Lamport`, or for LL
            :class:`~tdcoll.primitives.group.Inbox`.
        g: :class:`~tdcoll.primitives.group.Group`.
        nbytes: of a rank's data.
        blocks: of ``BLOCK`` words, which hold all data; at least one.
        placement, extra, EPILOGUE: see :mod:`tdcoll.primitives.epilogue`; None without an epilogue.
        DTYPE, ACC, OP: of elements and of the accumulator; of
            :data:`tdcoll.primitives.reduce.OPERATIONS`.
        LAMPORT: use the Lamport protocol, with 16 bytes in a word; otherwise LL, with 12.
        BLOCK: words of a block.
        PERSISTENT: thread blocks take several blocks each.
    """
    in_stream_order()
    size = tl.cast(nbytes, tl.int32)
    deltas = words.deltas_of(g)
    word = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mine = words.load(source, word, size, LAMPORT)
    call, alive = words.start(g, inbox, LAMPORT)
    if alive == 0:
        return
    mine = words.repair(source, word, size, mine, LAMPORT)
    mask = words.carry(word, size, LAMPORT)
    words.send_to_all(g, inbox, deltas, word, mine, call, mask, LAMPORT)
    if LAMPORT:
        lamport.clear(g, inbox, call, size, BLOCK)
    _one_shot_sum(
        out, inbox, g, size, word, mine, call, mask, (EPILOGUE, placement, extra),
        DTYPE, ACC, OP, LAMPORT,
    )  # fmt: skip
    if PERSISTENT:
        for block in tl.range(tl.program_id(0) + tl.num_programs(0), blocks, tl.num_programs(0)):
            word = block * BLOCK + tl.arange(0, BLOCK)
            mine = words.load(source, word, size, LAMPORT)
            mine = words.repair(source, word, size, mine, LAMPORT)
            mask = words.carry(word, size, LAMPORT)
            words.send_to_all(g, inbox, deltas, word, mine, call, mask, LAMPORT)
            _one_shot_sum(
                out, inbox, g, size, word, mine, call, mask, (EPILOGUE, placement, extra),
                DTYPE, ACC, OP, LAMPORT,
            )  # fmt: skip


@jit
def _one_shot_sum(
    out, inbox, g, size, word, mine, call, mask, epilogue,
    DTYPE: tl.constexpr, ACC: tl.constexpr, OP: tl.constexpr, LAMPORT: tl.constexpr,
):  # fmt: skip
    """Reduce a block of all ranks' words to ``out``."""
    parts, summed = words.receive(g, inbox, word, mine, call, mask, LAMPORT)
    place = (out, word, size, summed)
    result = words.reduce(parts, g.world, place, epilogue, DTYPE, ACC, OP, LAMPORT)
    words.store(out, word, size, result, summed, LAMPORT)


@jit
def _sum_and_hand_on(
    out, inbox, g, deltas, place, part, size, mine, call, mask, epilogue,
    DTYPE: tl.constexpr, ACC: tl.constexpr, OP: tl.constexpr, LAMPORT: tl.constexpr,
):  # fmt: skip
    """Reduce a block of this rank's part from all ranks, send the sum to all, and store all sums to
    ``out``."""
    parts, summed = words.receive(g, inbox, place, mine, call, mask, LAMPORT)
    own = (out, g.rank * part + place, size, summed)
    result = words.reduce(parts, g.world, own, epilogue, DTYPE, ACC, OP, LAMPORT)
    words.send_to_all(g, inbox, deltas, part + place, result, call, summed, LAMPORT)
    words.store(out, g.rank * part + place, size, result, summed, LAMPORT)
    sums, came = words.receive(g, inbox, part + place, result, call, mask, LAMPORT)
    for r in tl.static_range(g.world):
        words.store(out, r * part + place, size, sums[r], came & (r != g.rank), LAMPORT)


@jit
def all_reduce_two_shot(
    source: tl.int64, out: tl.int64, inbox, g, nbytes: tl.int64, blocks: tl.int32,
    placement, extra, DTYPE: tl.constexpr, ACC: tl.constexpr, OP: tl.constexpr,
    EPILOGUE: tl.constexpr, LAMPORT: tl.constexpr, BLOCK: tl.constexpr, PERSISTENT: tl.constexpr,
):  # fmt: skip
    """``[nbytes] -> [nbytes]`` inside one node. Thread blocks: ``blocks``, or with ``PERSISTENT``
    any number up to that.

    Args: those of :func:`all_reduce_one_shot`, except
        inbox: its segments hold the words of two parts.
        blocks: of ``BLOCK`` words, which hold all words of a part; at least one.
    """
    in_stream_order()
    size = tl.cast(nbytes, tl.int32)
    width: tl.constexpr = 16 if LAMPORT else 12
    part = tl.maximum(tl.cdiv(tl.cdiv(size, width), g.world), 1)  # words
    most = tl.cast(width * part, tl.int64)  # bytes of a part, one after the other
    deltas = words.deltas_of(g)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = place < part
    shares = words.load_shares(source, most, nbytes, most, place, g, LAMPORT)
    call, alive = words.start(g, inbox, LAMPORT)
    if alive == 0:
        return
    mine = words.send_shares(
        source, most, nbytes, most, place, shares, g, inbox, deltas, call, mask, LAMPORT
    )
    if LAMPORT:
        lamport.clear(g, inbox, call, 2 * 16 * part, BLOCK)
    _sum_and_hand_on(
        out, inbox, g, deltas, place, part, size, mine, call, mask, (EPILOGUE, placement, extra),
        DTYPE, ACC, OP, LAMPORT,
    )  # fmt: skip
    if PERSISTENT:
        for block in tl.range(tl.program_id(0) + tl.num_programs(0), blocks, tl.num_programs(0)):
            place = block * BLOCK + tl.arange(0, BLOCK)
            mask = place < part
            shares = words.load_shares(source, most, nbytes, most, place, g, LAMPORT)
            mine = words.send_shares(
                source, most, nbytes, most, place, shares, g, inbox, deltas, call, mask, LAMPORT
            )
            _sum_and_hand_on(
                out, inbox, g, deltas, place, part, size, mine, call, mask,
                (EPILOGUE, placement, extra), DTYPE, ACC, OP, LAMPORT,
            )  # fmt: skip
