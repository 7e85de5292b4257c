# SPDX-License-Identifier: Apache-2.0
"""All-reduce inside one node by stores in two steps, with any number of thread blocks.

Scope, data flow, signals and bits are those of ``kernels_direct``; the loop is that of
:mod:`tdcoll.collectives.exchange.kernels_loop`. Thread block b of B takes chunk c = b + t B of
every part at turn t::

    turn t:   send chunk c of each part to its rank;   sum chunk c - LAG B of the own part, and send the sum to all;
              copy the sums of chunk c - 2 LAG B out (without a copy: wait for them)

Order of thread blocks: a thread block waits for thread blocks of its own index only: the sum for
what they sent ``LAG`` turns earlier, the last step for what they summed then. Any number of
resident blocks therefore makes progress.

In place: as in ``kernels_direct``; each chunk of ``source[p]`` is sent by the thread block that
later overwrites it.
"""

import triton.language as tl

import tdcoll.language as tdl
from tdcoll.collectives.all_reduce.kernels_direct import sum_chunk
from tdcoll.collectives.exchange.kernels_loop import LAG
from tdcoll.language.jit import jit
from tdcoll.primitives import stores
from tdcoll.primitives.group import chunk_bytes, in_stream_order, row, segment, start


@jit
def all_reduce_loop(
    source: tl.int64, out: tl.int64, inbox, g, nbytes: tl.int64, part: tl.int64, second: tl.int64, chunk: tl.int64,
    chunks: tl.int32, out_deltas, placement, extra, DTYPE: tl.constexpr, ACC: tl.constexpr,
    OP: tl.constexpr, EPILOGUE: tl.constexpr, TILE: tl.constexpr, WORLD_POW2: tl.constexpr,
    ZERO_COPY: tl.constexpr,
):  # fmt: skip
    """``[nbytes] -> [nbytes]`` inside one node. Any number of thread blocks. Args: those of
    ``all_reduce_direct``."""
    in_stream_order()
    blocks = tl.num_programs(0)
    epoch, alive = start(g)
    if alive == 0:
        return
    at = tl.cast(g.rank, tl.int64) * part
    own = source + at
    to_deltas = out_deltas if ZERO_COPY else inbox.deltas
    for sent in tl.range(tl.program_id(0), chunks + 2 * LAG * blocks, blocks, disable_licm=True):
        if sent < chunks:
            offset = tl.cast(sent, tl.int64) * chunk
            signal = row(g, epoch, sent) + g.rank
            for step in tl.range(1, g.world):
                to = (g.rank + step) % g.world
                begin = tl.cast(to, tl.int64) * part
                size = chunk_bytes(chunk_bytes(nbytes, part, to), chunk, sent)
                mine = segment(inbox, g, epoch, g.rank) + offset
                given = source + begin + offset
                stores.push(
                    mine,
                    given,
                    size,
                    tl.load(inbox.deltas + to),
                    signal,
                    tl.load(g.deltas + to),
                    epoch,
                )
        summed = sent - LAG * blocks
        if (summed >= 0) & (summed < chunks):
            arrived = row(g, epoch, summed)
            if (
                tdl.wait_signals(arrived, g.world, g.rank, tdl.CMP_GE, epoch, g.monitor, WORLD_POW2)
                != 0
            ):
                offset = tl.cast(summed, tl.int64) * chunk
                size = chunk_bytes(chunk_bytes(nbytes, part, g.rank), chunk, summed)
                copied = segment(inbox, g, epoch, g.rank) + second + offset
                landing = out + at + offset if ZERO_COPY else copied
                aligned = (source | out | size) % 16 == 0
                sum_chunk(
                    own, out + at, landing, to_deltas, inbox, g, None, None, epoch, offset, size, aligned,
                    (EPILOGUE, placement, extra), DTYPE, ACC, OP, TILE,
                )  # fmt: skip
                stores.release_to_all(g, row(g, epoch, chunks + summed) + g.rank, epoch)
        came = sent - 2 * LAG * blocks
        if came >= 0:
            sums = row(g, epoch, chunks + came)
            if ZERO_COPY:
                tdl.wait_signals(sums, g.world, g.rank, tdl.CMP_GE, epoch, g.monitor, WORLD_POW2)
            else:
                offset = tl.cast(came, tl.int64) * chunk
                for step in tl.range(1, g.world):
                    src_rank = (g.rank - step + g.world) % g.world
                    index = (chunks + came) * g.world + src_rank
                    if (
                        tdl.wait_signal(
                            sums + src_rank, tdl.CMP_GE, epoch, g.monitor, src_rank, index
                        )
                        != 0
                    ):
                        begin = tl.cast(src_rank, tl.int64) * part
                        size = chunk_bytes(chunk_bytes(nbytes, part, src_rank), chunk, came)
                        theirs = segment(inbox, g, epoch, src_rank) + second + offset
                        tdl.copy_block(out + begin + offset, theirs, size)
