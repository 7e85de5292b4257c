# SPDX-License-Identifier: Apache-2.0
"""Reduce-scatter inside one node by direct stores, with any number of thread blocks.

Scope, data flow, signals and bits are those of ``kernels_direct``; the loop is that of
:mod:`tdcoll.collectives.exchange.kernels_loop`. Each thread block sends its chunks to every rank,
and sums the same chunks of all ranks some turns later. It waits for thread blocks of its own index
only, which have sent the chunk at an earlier turn, so any number of resident blocks makes progress.
"""

import triton.language as tl

import tdcoll.language as tdl
from tdcoll.collectives.exchange.kernels_loop import LAG
from tdcoll.language.jit import jit
from tdcoll.primitives import stores
from tdcoll.primitives.group import chunk_bytes, in_stream_order, row, segment, start
from tdcoll.primitives.sums import reduce_chunk


@jit
def reduce_scatter_loop(
    source: tl.int64, out: tl.int64, source_stride: tl.int64, inbox, g, nbytes: tl.int64, chunk: tl.int64,
    chunks: tl.int32, placement, extra, DTYPE: tl.constexpr, ACC: tl.constexpr, OP: tl.constexpr,
    EPILOGUE: tl.constexpr, TILE: tl.constexpr, WORLD_POW2: tl.constexpr,
):  # fmt: skip
    """``[world, nbytes] -> [nbytes]`` inside one node. Any number of thread blocks.

    Args: those of ``reduce_scatter_direct``, but for ``reducers``, and
        chunks: number of chunks of a part.
    """
    in_stream_order()
    blocks = tl.num_programs(0)
    epoch, alive = start(g)
    if alive == 0:
        return
    own = source + tl.cast(g.rank, tl.int64) * source_stride
    for sent in tl.range(tl.program_id(0), chunks + LAG * blocks, blocks, disable_licm=True):
        if sent < chunks:
            offset = tl.cast(sent, tl.int64) * chunk
            size = chunk_bytes(nbytes, chunk, sent)
            for step in tl.range(1, g.world):
                to = (g.rank + step) % g.world
                part = source + tl.cast(to, tl.int64) * source_stride + offset
                mine = segment(inbox, g, epoch, g.rank) + offset
                signal = row(g, epoch, sent) + g.rank
                stores.push(
                    mine,
                    part,
                    size,
                    tl.load(inbox.deltas + to),
                    signal,
                    tl.load(g.deltas + to),
                    epoch,
                )
        came = sent - LAG * blocks
        if came >= 0:
            arrived = row(g, epoch, came)
            if (
                tdl.wait_signals(arrived, g.world, g.rank, tdl.CMP_GE, epoch, g.monitor, WORLD_POW2)
                != 0
            ):
                offset = tl.cast(came, tl.int64) * chunk
                size = chunk_bytes(nbytes, chunk, came)
                aligned = (source | source_stride | out | nbytes) % 16 == 0
                reduce_chunk(
                    0,
                    1,
                    own,
                    out,
                    offset,
                    size,
                    inbox,
                    g,
                    None,
                    epoch,
                    aligned,
                    (EPILOGUE, placement, extra),
                    DTYPE,
                    ACC,
                    OP,
                    TILE,
                )
