# SPDX-License-Identifier: Apache-2.0
"""Kernels that use what no collective of tdcoll uses yet: each is the smallest that needs it.

Order of programs: those that send come before those that wait, so any number of resident blocks makes progress.
"""

import triton.language as tl

from tdcoll.language.jit import jit
from tdcoll.primitives import fp8
from tdcoll.primitives.lamport import carry, clear, receive, send
from tdcoll.primitives.lamport import start as lamport_start


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
        send(g, lamport, g.rank, delta, word, (first, second, third, fourth), call, mask)
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
def decode_all(codes, out, DTYPE: tl.constexpr):
    """``[256] uint8 -> [256] fp32``."""
    at = tl.arange(0, 256)
    tl.store(out + at, fp8.decode(tl.load(codes + at), DTYPE))


@jit
def encode_all(values, out, count, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    """``[count] fp32 -> [count] uint8``, by one program for each BLOCK numbers."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, fp8.encode(tl.load(values + at, mask=at < count), DTYPE), mask=at < count)
