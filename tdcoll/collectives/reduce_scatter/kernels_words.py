# SPDX-License-Identifier: Apache-2.0
"""Reduce-scatter inside one node by the Lamport protocol or LL: one hop.

Scope, protocols, signal map, bits and progress are those of one-shot in
:mod:`tdcoll.collectives.all_reduce.kernels_words`. Data flow, seen from rank r::

    source[p] --words--> inbox[slot, r] on rank p, for every other rank p
    inbox[slot, 0], ..., source[r], ..., inbox[slot, world - 1] --sum in rank order--> out

When a rank is done with a call, it has heard from all, because each rank sends at least one word to
every other.

In place: ``out`` may be ``source[r]``, because a program stores only to words that it has loaded
before.
"""

import triton.language as tl

from tdcoll.language.jit import jit
from tdcoll.primitives import lamport, words
from tdcoll.primitives.group import in_stream_order


@jit
def reduce_scatter_words(
    source: tl.int64, out: tl.int64, source_stride: tl.int64, inbox, g, nbytes: tl.int64, blocks: tl.int32,
    placement, extra, DTYPE: tl.constexpr, ACC: tl.constexpr, OP: tl.constexpr,
    EPILOGUE: tl.constexpr, LAMPORT: tl.constexpr, BLOCK: tl.constexpr, PERSISTENT: tl.constexpr,
):  # fmt: skip
    """``[world, nbytes] -> [nbytes]`` inside one node. Thread blocks: ``blocks``, or with
    ``PERSISTENT`` any number up to that.

    Args: those of ``reduce_scatter_direct``, except
        inbox: of the words: :class:`~tdcoll.primitives.lamport.Lamport`, or
            :class:`~tdcoll.primitives.group.Inbox`.
        blocks: of ``BLOCK`` words, which hold all words of a part; at least one.
        LAMPORT: use the Lamport protocol, with 16 bytes in a word; otherwise LL, with 12.
        BLOCK: words of a block.
        PERSISTENT: thread blocks take several blocks each.
    """
    in_stream_order()
    total = g.world * source_stride
    deltas = words.deltas_of(g)
    word = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    shares = words.load_shares(source, source_stride, total, nbytes, word, g, LAMPORT)
    call, alive = words.start(g, inbox, LAMPORT)
    if alive == 0:
        return
    mask = words.carry(word, tl.cast(nbytes, tl.int32), LAMPORT)
    mine = words.send_shares(
        source, source_stride, total, nbytes, word, shares, g, inbox, deltas, call, mask, LAMPORT
    )  # fmt: skip
    if LAMPORT:
        lamport.clear(g, inbox, call, nbytes, BLOCK)
    _sum(
        out, inbox, g, nbytes, word, mine, call, mask, (EPILOGUE, placement, extra),
        DTYPE, ACC, OP, LAMPORT,
    )  # fmt: skip
    if PERSISTENT:
        for block in tl.range(tl.program_id(0) + tl.num_programs(0), blocks, tl.num_programs(0)):
            word = block * BLOCK + tl.arange(0, BLOCK)
            shares = words.load_shares(source, source_stride, total, nbytes, word, g, LAMPORT)
            mask = words.carry(word, tl.cast(nbytes, tl.int32), LAMPORT)
            mine = words.send_shares(
                source, source_stride, total, nbytes, word, shares, g, inbox, deltas, call, mask, LAMPORT
            )  # fmt: skip
            _sum(
                out, inbox, g, nbytes, word, mine, call, mask, (EPILOGUE, placement, extra),
                DTYPE, ACC, OP, LAMPORT,
            )  # fmt: skip


@jit
def _sum(
    out, inbox, g, nbytes, word, mine, call, mask, epilogue,
    DTYPE: tl.constexpr, ACC: tl.constexpr, OP: tl.constexpr, LAMPORT: tl.constexpr,
):  # fmt: skip
    """Reduce a block of all ranks' words to ``out``."""
    parts, summed = words.receive(g, inbox, word, mine, call, mask, LAMPORT)
    size = tl.cast(nbytes, tl.int32)
    place = (out, word, size, summed)
    result = words.reduce(parts, g.world, place, epilogue, DTYPE, ACC, OP, LAMPORT)
    words.store(out, word, size, result, summed, LAMPORT)
