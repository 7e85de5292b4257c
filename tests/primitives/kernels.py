# SPDX-License-Identifier: Apache-2.0
"""Kernels that use what no collective of tdcoll uses yet: each is the smallest that needs it.

Order of programs, everywhere: those that send come before those that wait, and those that wait for another program of
this rank after it, so any number of resident blocks makes progress.
"""

import triton.language as tl

import tdcoll.language as tdl
from tdcoll.language.jit import jit
from tdcoll.primitives import stores
from tdcoll.primitives.group import now, row, segment, start


@jit
def _push_part(source, window, g, nbytes, epoch, step):
    """Part ``to`` of the source to rank ``to``, the ``step``-th successor."""
    to = (g.rank + step) % g.world
    mine = segment(window, g, epoch, g.rank)
    signal = row(g, epoch, 0) + g.rank
    part = source + tl.cast(to, tl.int64) * nbytes
    stores.push(mine, part, nbytes, tl.load(window.deltas + to), signal, tl.load(g.deltas + to), epoch)


@jit
def _reduce_part(source, window, g, nbytes, epoch, BLOCK: tl.constexpr):
    """Sum what came for this rank, in its own place of the second phase, and push that to all others."""
    index = tl.arange(0, BLOCK)
    mask = index < nbytes // 4
    int32 = tl.pointer_type(tl.int32)
    total = tl.load((source + tl.cast(g.rank, tl.int64) * nbytes).to(int32) + index, mask=mask)
    for step in range(1, g.world):
        frm = (g.rank + step) % g.world
        if tdl.wait_signal(row(g, epoch, 0) + frm, tdl.CMP_GE, epoch, g.monitor, frm, frm) != 0:
            total += tl.load(segment(window, g, epoch, frm).to(int32) + index, mask=mask)
    sums = segment(window, g, epoch, g.rank, 1)
    tl.store(sums.to(int32) + index, total, mask=mask)
    tdl.syncthreads()
    signal = row(g, epoch, 0, 1) + g.rank
    for step in range(1, g.world):
        to = (g.rank + step) % g.world
        stores.push(sums, sums, nbytes, tl.load(window.deltas + to), signal, tl.load(g.deltas + to), epoch)
    return sums


@jit
def _hand_out(out, window, g, nbytes, epoch, step):
    """The sums of the ``step``-th predecessor."""
    frm = (g.rank - step + g.world) % g.world
    arrived = tdl.wait_signal(row(g, epoch, 0, 1) + frm, tdl.CMP_GE, epoch, g.monitor, frm, g.world + frm)
    if arrived != 0:
        tdl.copy_block(out + tl.cast(frm, tl.int64) * nbytes, segment(window, g, epoch, frm, 1), nbytes)


@jit
def all_reduce_in_two_stages(source: tl.int64, out: tl.int64, window, g, nbytes: tl.int64, BLOCK: tl.constexpr):
    """``[world * nbytes / 4] int32`` -> their sums. Programs: ``2 * world - 1``. A context of two phases.

    Phase 0: part p of every rank's source goes to rank p. Phase 1: rank p sends the sums of that part to all.
    """
    program = tl.program_id(0)
    epoch, alive = start(g)
    if alive == 0:
        return
    if program < g.world - 1:
        _push_part(source, window, g, nbytes, epoch, program + 1)
    elif program == g.world - 1:
        sums = _reduce_part(source, window, g, nbytes, epoch, BLOCK)
        tdl.copy_block(out + tl.cast(g.rank, tl.int64) * nbytes, sums, nbytes)
    else:
        _hand_out(out, window, g, nbytes, epoch, program - g.world + 1)


@jit
def push_parts(source: tl.int64, window, g, nbytes: tl.int64):
    """The first launch of an all-reduce in two stages by three launches. Programs: ``world - 1``, and at least 1."""
    epoch, alive = start(g)
    if alive == 0:
        return
    if g.world > 1:
        _push_part(source, window, g, nbytes, epoch, tl.program_id(0) + 1)


@jit
def reduce_part(source: tl.int64, out: tl.int64, window, g, nbytes: tl.int64, BLOCK: tl.constexpr):
    """The second launch. Programs: 1."""
    epoch, alive = now(g)
    if alive == 0:
        return
    sums = _reduce_part(source, window, g, nbytes, epoch, BLOCK)
    tdl.copy_block(out + tl.cast(g.rank, tl.int64) * nbytes, sums, nbytes)


@jit
def hand_out(out: tl.int64, window, g, nbytes: tl.int64):
    """The third launch. Programs: any number."""
    epoch, alive = now(g)
    if alive == 0:
        return
    step = tl.program_id(0) + 1
    while step < g.world:
        _hand_out(out, window, g, nbytes, epoch, step)
        step += tl.num_programs(0)
