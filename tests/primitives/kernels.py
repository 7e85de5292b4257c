# SPDX-License-Identifier: Apache-2.0
"""Kernels that use what no collective of tdcoll uses yet: each is the smallest that needs it.

Order of programs, everywhere: those that send come before those that wait, and those that wait for another program of
this rank after it, so any number of resident blocks makes progress.
"""

import triton.language as tl

import tdcoll.language as tdl
from tdcoll.language.jit import jit
from tdcoll.primitives import fp8, stores
from tdcoll.primitives.group import row, segment, start
from tdcoll.primitives.lamport import carry, clear, receive, send
from tdcoll.primitives.lamport import start as lamport_start
from tdcoll.primitives.tiles import arrive, publish, wait_tile


@jit
def all_reduce_of_words(source: tl.int64, out: tl.int64, g, lamport, count: tl.int32, BLOCK: tl.constexpr):
    """``[count] fp32`` -> their sums in rank order, in one crossing. Programs: one for each ``BLOCK`` words.

    Rank r's data goes to every other rank, in words that announce themselves.
    """
    word = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = carry(word, 4 * count)
    bits = source.to(tl.pointer_type(tl.int32)) + 4 * word
    first = tl.load(bits, mask=4 * word < count, other=0)
    second = tl.load(bits + 1, mask=4 * word + 1 < count, other=0)
    third = tl.load(bits + 2, mask=4 * word + 2 < count, other=0)
    fourth = tl.load(bits + 3, mask=4 * word + 3 < count, other=0)
    call, alive = lamport_start(g, lamport)
    if alive == 0:
        return
    for step in range(1, g.world):
        delta = tl.load(g.deltas + (g.rank + step) % g.world)
        send(g, lamport, g.rank, delta, word, first, second, third, fourth, call, mask)
    clear(g, lamport, call, 4 * count, BLOCK)
    fp32: tl.constexpr = tl.float32
    sum0 = tl.zeros([BLOCK], fp32)
    sum1, sum2, sum3 = sum0, sum0, sum0
    complete = tl.full([BLOCK], 1, tl.int32)
    for origin in range(g.world):
        a, b, c, d, arrived = receive(g, lamport, origin, word, call, mask & (origin != g.rank))
        own = origin == g.rank
        complete = complete & arrived
        sum0 += tl.where(own, first, a).to(fp32, bitcast=True)
        sum1 += tl.where(own, second, b).to(fp32, bitcast=True)
        sum2 += tl.where(own, third, c).to(fp32, bitcast=True)
        sum3 += tl.where(own, fourth, d).to(fp32, bitcast=True)
    to = out.to(tl.pointer_type(fp32)) + 4 * word
    there = complete != 0
    tl.store(to, sum0 + 0.0, mask=there & (4 * word < count))
    tl.store(to + 1, sum1 + 0.0, mask=there & (4 * word + 1 < count))
    tl.store(to + 2, sum2 + 0.0, mask=there & (4 * word + 2 < count))
    tl.store(to + 3, sum3 + 0.0, mask=there & (4 * word + 3 < count))


@jit
def sum_by_tiles(
    source: tl.int64, scratch: tl.int64, out: tl.int64, window, g, tiles, n_tiles: tl.int32, parts: tl.int32,
    count: tl.int32, BLOCK: tl.constexpr,
):  # fmt: skip
    """``[n_tiles, parts, count] int32`` -> ``[2, n_tiles, count]``: sums over parts, of this rank and the one before.

    Programs: ``n_tiles * parts`` that contribute, tile by tile, then ``n_tiles`` that hand out. A contributor stores
    its part to ``scratch``, ``[n_tiles, parts + 1, count]``, and to the next rank. The last one of a tile sums what is
    in ``scratch``, publishes that, and signals to the next rank that all parts are there.
    """
    epoch, alive = start(g)
    if alive == 0:
        return
    index = tl.arange(0, BLOCK)
    mask = index < count
    int32: tl.constexpr = tl.pointer_type(tl.int32)
    program = tl.program_id(0)
    after = (g.rank + 1) % g.world
    before = (g.rank + g.world - 1) % g.world
    size = tl.cast(count, tl.int64) * 4
    if program < n_tiles * parts:
        tile = program // parts
        kept = scratch + tile * (parts + 1) * size
        part = program % parts
        values = tl.load((source + program * size).to(int32) + index, mask=mask)
        tl.store((kept + part * size).to(int32) + index, values, mask=mask)
        delta = tl.load(g.deltas + after)
        theirs = segment(window, g, epoch, g.rank) + program * size + delta
        tl.store(theirs.to(int32) + index, values, mask=mask)
        if arrive(tiles, tile, parts) != 0:
            total = tl.zeros([BLOCK], tl.int32)
            for i in range(parts):
                total += tl.load((kept + i * size).to(int32) + index, mask=mask)
            tl.store((kept + parts * size).to(int32) + index, total, mask=mask)
            publish(tiles, tile, epoch)
            stores.release(row(g, epoch, tile) + g.rank, delta, epoch)
    else:
        tile = program - n_tiles * parts
        if wait_tile(g, tiles, tile, epoch) != 0:
            tdl.copy_block(out + tile * size, scratch + (tile * (parts + 1) + parts) * size, size)
        signal = row(g, epoch, tile) + before
        if tdl.wait_signal(signal, tdl.CMP_GE, epoch, g.monitor, before, tile * g.world + before) != 0:
            came = segment(window, g, epoch, before) + tile * parts * size
            total = tl.zeros([BLOCK], tl.int32)
            for i in range(parts):
                total += tl.load((came + i * size).to(int32) + index, mask=mask)
            tl.store((out + (n_tiles + tile) * size).to(int32) + index, total, mask=mask)


@jit
def look_back(out: tl.int64, g, tiles):
    """Publish tile 0, and beside that wait for it as of the call before: ``-> [1] int32``. Programs: 2."""
    epoch, alive = start(g)
    if alive == 0:
        return
    if tl.program_id(0) == 0:
        publish(tiles, 0, epoch)
    else:
        tl.store(out.to(tl.pointer_type(tl.int32)), wait_tile(g, tiles, 0, epoch - 1))


@jit
def wait_for_nothing(g, tiles):
    """Wait for tile 3, which nobody publishes."""
    epoch, alive = start(g)
    if alive != 0:
        wait_tile(g, tiles, 3, epoch)


@jit
def decode_all(codes, out, DTYPE: tl.constexpr):
    """``[256] uint8 -> [256] fp32``."""
    at = tl.arange(0, 256)
    tl.store(out + at, fp8.decode(tl.load(codes + at), DTYPE))


@jit
def encode_all(values, out, count, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    """``[count] fp32 -> [count] uint8``, by one program for each BLOCK numbers."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, fp8.encode(tl.load(values + at, mask=at < count), DTYPE), mask=at < count)
