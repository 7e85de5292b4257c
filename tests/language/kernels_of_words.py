# SPDX-License-Identifier: Apache-2.0
"""Kernels for the tests of words: single ones on other PEs, waits for them, and barriers of a
grid."""

import triton.language as tl

import tdcoll.language as tdl
from tdcoll.language.jit import jit


@jit
def values(words, floats, out, out_floats, arrived, monitor):
    """Every PE puts one value of each type to its successor, and gets it back from there."""
    me = tdl.my_pe()
    peer = (me + 1) % tdl.n_pes()
    if tdl.tid(0) == 0:
        tdl.p(words, (me + 1).to(tl.int64) * 10_000_000_000, peer)
        tdl.p(floats, me + 0.25, peer)
        tdl.fence()
        tdl.signal_op(arrived, 1, tdl.SIGNAL_SET, peer)
    tdl.wait_signal(arrived, tdl.CMP_GE, 1, monitor, me, 0)
    if tdl.tid(0) == 0:
        tdl.quiet()
        tl.store(out, tdl.g(words, peer))
        tl.store(out_floats, tdl.g(floats, peer))


@jit
def atomics(narrow, wide, old, arrived, monitor, ROUNDS: tl.constexpr):
    """All PEs change the words of PE 0; each keeps what it was told was there before."""
    me = tdl.my_pe()
    if tdl.tid(0) == 0:
        for i in range(ROUNDS):
            tl.store(old + i, tdl.atomic_fetch_add(narrow, 1, 0).to(tl.int64))
            tdl.atomic_add(wide, 1 << 33, 0)
        # A lock, taken once by each.
        while tdl.atomic_compare_swap(narrow + 1, 0, me + 1, 0) != 0:
            pass
        tl.store(old + ROUNDS, tdl.g(narrow + 2, 0).to(tl.int64))
        tdl.p(narrow + 2, me + 1, 0)
        tdl.quiet()
        tdl.atomic_set(narrow + 1, 0, 0)
        tl.store(old + ROUNDS + 1, tdl.atomic_swap(wide + 1, me + 1, 0))
        tdl.quiet()
        tdl.barrier_all()
        tl.store(old + ROUNDS + 2, tdl.atomic_fetch(wide, 0))


@jit
def put_then_count(buffer, counter, out, monitor, FENCE: tl.constexpr):
    """PE 1 puts and then counts on PE 0, which reads what was put when the count is there."""
    if tdl.my_pe() == 1:
        if tdl.tid(0) == 0:
            tdl.putmem_nbi(buffer, buffer, 64, 0)
            if FENCE:
                tdl.fence()
            tdl.atomic_add(counter, 1, 0)
    else:
        tdl.wait_word(counter, tdl.CMP_GE, 1, monitor, 1, 0)
        index = tl.arange(0, 16)
        tl.store(out + index, tl.load(buffer + index))


@jit
def count_by_threads(counter, turns, ALL: tl.constexpr):
    if ALL:
        tdl.atom_add(counter, 1)
    elif tdl.tid(0) < 5:
        tdl.atom_add(counter, 2, "sys", "release")
        tdl.atom_cas(turns + tdl.tid(0), 0, tdl.tid(0) + 1, "sys", "acq_rel")
        tdl.atom_cas(turns + tdl.tid(0), 0, 100)


@jit
def wait_here_and_there(narrow, wide, ok, monitor, SEND: tl.constexpr):
    """Wait for a negative number on this PE, and for a word that only the peer's own memory has."""
    me = tdl.my_pe()
    peer = (me + 1) % tdl.n_pes()
    if SEND:
        if tdl.tid(0) == 0:
            tdl.p(narrow, -5, peer)
            tdl.st_release(wide, 1 << 40, "sys")
    tl.store(ok, tdl.wait_word(narrow, tdl.CMP_LT, -4, monitor, peer, 7))
    tl.store(
        ok + 1, tdl.wait_word(tdl.remote_ptr(wide, peer), tdl.CMP_EQ, 1 << 40, monitor, peer, 8)
    )


@jit
def ask(signals, out, TIMES: tl.constexpr):
    """PE 0 asks until PE 1 has answered; it keeps the last answer, and what was put before it."""
    if tdl.my_pe() == 1:
        tdl.putmem_signal_block(signals + 1, signals + 1, 8, signals, 3, tdl.SIGNAL_SET, 0)
    else:
        tl.store(out, tdl.test_signal(signals, tdl.CMP_GE, 4))
        while tdl.test_signal(signals, tdl.CMP_GE, 3) == 0:
            pass
        tl.store(out + 1, tl.load(signals + 1))


@jit
def rounds(
    cells, sums, counter, monitor, ROUNDS: tl.constexpr, BARRIER: tl.constexpr, BLOCK: tl.constexpr
):
    """Every program writes its cell and then sums all of them, in several rounds."""
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    index = tl.arange(0, BLOCK)
    for i in range(ROUNDS):
        tl.store(cells + i * BLOCK + program, program + i + 1)
        if BARRIER:
            if tdl.grid_barrier(counter, monitor) != 0:
                row = tl.load(cells + i * BLOCK + index, mask=index < programs, other=0)
                tl.store(sums + i * BLOCK + program, tl.sum(row))
        else:
            row = tl.load(cells + i * BLOCK + index, mask=index < programs, other=0)
            tl.store(sums + i * BLOCK + program, tl.sum(row))


@jit
def move_words(source, dest, n, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    first, second, third, fourth = tdl.load_words(source + 4 * index, index < n)
    tdl.store_words(dest + 4 * index, fourth, third, second, first, index < BLOCK)


@jit
def part_of_flagged(words, out, ok, monitor, BLOCK: tl.constexpr):
    """Use only the first part of the data that come with a flag."""
    index = tl.arange(0, BLOCK)
    first, _, _, arrived = tdl.wait_flagged(words + 2 * index, 1, index < BLOCK, monitor, 0)
    tl.store(out + index, first)
    tl.store(ok + index, arrived)
