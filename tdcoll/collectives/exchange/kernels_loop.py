# SPDX-License-Identifier: Apache-2.0
"""All-gather and all-to-all inside one node by direct stores, with any number of thread blocks.

Scope: as ``kernels_direct``, for launches that leave most of the GPU to others. There a thread
block has one chunk of one peer; here each thread block does everything for its chunks, and takes
one after the other.

Data flow and signals are those of ``kernels_direct``. Thread block b of B sends chunks b, b + B, b
+ 2 B, ... to every peer, and receives those chunks of every peer ``LAG`` turns later, when they
have most likely arrived::

    turn t:   send chunk b + t B to every other rank, with a signal each;   then receive chunk b + (t - LAG) B of each

By default each thread block has one chunk, and the turns between are empty.

Order of thread blocks: a chunk is sent by the thread block of the same index that receives it on
the other ranks, at an earlier turn. Sending waits only if peers write to the caller's buffer.
Thread block 0 then tells all peers that this rank has entered before it waits, and every thread
block waits for that signal of each peer. No thread block waits for one of a higher index, so any
number of resident blocks makes progress.
"""

import triton.language as tl

import tdcoll.language as tdl
from tdcoll.language.jit import jit
from tdcoll.primitives import stores
from tdcoll.primitives.group import chunk_bytes, in_stream_order, row, segment, start

LAG = tl.constexpr(2)
"""Turns from sending a chunk to receiving the same one."""


@jit
def exchange_loop(
    source: tl.int64, out: tl.int64, inbox, g, source_stride: tl.int64, out_stride: tl.int64, nbytes: tl.int64,
    chunk: tl.int64, chunks: tl.int32, ONE_SEGMENT: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """``[nbytes] or [world, nbytes] -> [world, nbytes]`` inside one node. Any number of thread
    blocks.

    Args: those of ``exchange_direct``, and
        chunks: number of chunks of a segment.
        ONE_SEGMENT: all ranks get the same segment, so a chunk is read once.
        WORDS: 32-bit words of a tile of such a chunk.
    """
    in_stream_order()
    blocks = tl.num_programs(0)
    epoch, alive = start(g)
    if alive == 0:
        return
    allowed = tl.cast(1, tl.int32)
    if inbox.slots == 1:
        if tl.program_id(0) == 0:
            stores.release_to_all(g, g.entered + g.rank, epoch)
        for step in tl.range(1, g.world):
            allowed &= stores.may_write(g, inbox, (g.rank + step) % g.world, epoch)
    if allowed == 0:
        return
    own = source + tl.cast(g.rank, tl.int64) * source_stride
    kept = out + tl.cast(g.rank, tl.int64) * out_stride
    for sent in tl.range(tl.program_id(0), chunks + LAG * blocks, blocks, disable_licm=True):
        if sent < chunks:
            offset = tl.cast(sent, tl.int64) * chunk
            size = chunk_bytes(nbytes, chunk, sent)
            mine = segment(inbox, g, epoch, g.rank) + offset
            signal = row(g, epoch, sent) + g.rank
            if ONE_SEGMENT:
                stores.push_to_all(
                    g, inbox, mine, kept + offset, source + offset, size, signal, epoch, WORDS
                )
            else:
                for step in tl.range(1, g.world):
                    to = (g.rank + step) % g.world
                    given = source + tl.cast(to, tl.int64) * source_stride + offset
                    stores.push(
                        mine,
                        given,
                        size,
                        tl.load(inbox.deltas + to),
                        signal,
                        tl.load(g.deltas + to),
                        epoch,
                    )
                if inbox.slots == 2:
                    tdl.copy_block(kept + offset, own + offset, size)
        came = sent - LAG * blocks
        if came >= 0:
            offset = tl.cast(came, tl.int64) * chunk
            size = chunk_bytes(nbytes, chunk, came)
            for step in tl.range(1, g.world):
                src_rank = (g.rank - step + g.world) % g.world
                signal = row(g, epoch, came) + src_rank
                if (
                    tdl.wait_signal(
                        signal, tdl.CMP_GE, epoch, g.monitor, src_rank, came * g.world + src_rank
                    )
                    != 0
                ):
                    if inbox.slots == 2:
                        target = out + tl.cast(src_rank, tl.int64) * out_stride + offset
                        tdl.copy_block(target, segment(inbox, g, epoch, src_rank) + offset, size)
