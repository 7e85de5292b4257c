# SPDX-License-Identifier: Apache-2.0
"""Stores to peers' memory and waits for what arrives, by the device language, on every rank of a
job.

Through pointers, as words of LL and Lamport, by copies; waits that loads stay behind, and that end;
and the truth of pointers.
"""

from __future__ import annotations

import torch
import triton.language as tl
from harness import (
    check,
    device,
    expect,
    expect_raises,
    neighbour,
    rank,
    scaled,
    shared,
    symmetric,
    world,
)

import tdcoll
import tdcoll.language as tdl
from tdcoll import runtime


@tdcoll.jit
def sum_of_late_parts(
    parts,
    sent,
    total,
    signals,
    value,
    pe,
    pause,
    monitor,
    ok,
    PARTS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Program 0 sends 16 x 16 parts, late; program 1 adds them in a loop that Triton pipelines.
    STEP 1: with tokens."""
    if tl.program_id(0) == 0:
        for i in range(PARTS):
            for _ in range(pause):
                tdl.ld(signals, "gpu", "relaxed")
            tdl.putmem_signal_block(
                parts + i * 256, sent + i * 256, 512, signals + i, value, tdl.SIGNAL_SET, pe
            )
    else:
        row = tl.arange(0, 16)
        place = row[:, None] * 16 + row[None, :]
        one = (row[:, None] == row[None, :]).to(tl.float16)
        added = tl.zeros((16, 16), tl.float32)
        alive = tl.cast(1, tl.int32)
        for i in range(PARTS):
            if STEP == 1:
                token = tdl.wait_token(signals + i, tdl.CMP_GE, value, monitor, pe, i)
                part = tl.load(tdl.consume_token(parts, token) + i * 256 + place)
            else:
                token = tdl.wait_signal(signals + i, tdl.CMP_GE, value, monitor, pe, i)
                part = tl.load(parts + i * 256 + place)
            alive = alive & token
            added = tl.dot(part, one, added)
        tl.store(total + place, added)
        tl.store(ok, alive)


@tdcoll.jit
def store_through_pointer(data, flag, pe, out, SEMANTIC: tl.constexpr):
    """Direct stores to a peer, a release at system scope, and an acquire by the reader."""
    offsets = tl.arange(0, 64)
    tl.store(tdl.remote_ptr(data, pe) + offsets, offsets + 1000 * tdl.my_pe())
    tdl.syncthreads()
    if SEMANTIC == 0:
        tdl.st_release(tdl.remote_ptr(flag, pe), 1, "sys")
        while tdl.ld_acquire(flag, "sys") == 0:
            pass
    else:
        tdl.st(tdl.remote_ptr(flag, pe), 2, "sys", "release")
        while tdl.ld(flag, "sys", "acquire") != 2:
            pass
    tdl.syncthreads()
    tl.store(out + offsets, tl.load(data + offsets))


@tdcoll.jit
def flagged_words(words, stamp, pe, monitor, out, ok):
    """Data and flag in one word, to a peer and from the one before."""
    offsets = tl.arange(0, 64)
    mask = offsets < 50
    data = offsets - 7 + 1000 * tdl.my_pe()
    tdl.store_flagged(tdl.remote_ptr(words, pe) + 2 * offsets, data, data + 1, -data, stamp, mask)
    first, second, third, arrived = tdl.wait_flagged(words + 2 * offsets, stamp, mask, monitor, pe)
    tl.store(out + offsets, first, mask=mask)
    tl.store(out + 64 + offsets, second, mask=mask)
    tl.store(out + 128 + offsets, third, mask=mask)
    tl.store(ok, tdl.block_and(tl.min(arrived) == 1))


@tdcoll.jit
def words_that_announce_themselves(words, absent, pe, monitor, out, ok, whole):
    """Four parts of data in a word, to a peer and from the one before; words from ``whole`` on have
    no last part."""
    offsets = tl.arange(0, 64)
    mask = offsets < 50
    data = offsets - 7 + 1000 * tdl.my_pe()
    tdl.store_words(
        tdl.remote_ptr(words, pe) + 2 * offsets,
        data,
        data + 1,
        data + 2,
        tl.where(offsets < whole, -data, absent),
        mask,
    )
    here = words + 2 * offsets
    first, _, _, _, arrived = tdl.wait_words(here, absent, mask, monitor, pe, 1)
    # rank 1, which is left out, lies there too
    both = tdl.wait_words_of_all(here, 0, 2, 1, absent, mask, monitor, 1)
    _, _, third, fourth = tdl.load_words(here, mask)
    arrived = arrived & both[8]
    tl.store(out + offsets, first, mask=mask)
    tl.store(out + 64 + offsets, both[1], mask=mask)
    tl.store(out + 128 + offsets, third, mask=mask)
    tl.store(out + 192 + offsets, fourth, mask=mask)
    tl.store(ok, tdl.block_and(tl.min(arrived) == 1))


@tdcoll.jit(do_not_specialize=["rounds"])
def words_in_one_piece(words, rounds, pe, monitor, torn):
    """As many rounds as fast as they go: a word has data of its own flag only, or it was not stored
    in one piece."""
    offsets = tl.arange(0, 256)
    mask = offsets < 256
    count = tl.zeros_like(offsets)
    for turn in range(1, rounds + 1):
        sent = tdl.remote_ptr(words, pe) + 2 * (offsets + 256 * (turn % 2))
        landed = words + 2 * (offsets + 256 * (turn % 2))
        tdl.store_flagged(sent, offsets + turn, offsets ^ turn, offsets - turn, turn, mask)
        first, second, third, _ = tdl.wait_flagged(landed, turn, mask, monitor, pe)
        right = (first == offsets + turn) & (second == offsets ^ turn) & (third == offsets - turn)
        count += (right == 0).to(tl.int32)
    tl.store(torn, tl.sum(count))


@tdcoll.jit
def copies(dst, src, nbytes):
    tdl.copy_block(dst, src, nbytes)


@tdcoll.jit
def truth_of_pointers(src, out, value):
    if src and value != 3:
        tl.store(out, 1)
    if value == 3 or src:
        tl.store(out + 1, 1)
    if not src:
        tl.store(out + 2, 1)


@tdcoll.jit
def never(signals, monitor, ok, n, BLOCK: tl.constexpr):
    tl.store(ok, tdl.wait_signals(signals, n, -1, tdl.CMP_GE, 9, monitor, BLOCK))
    tl.store(ok + 1, tdl.wait_signal(signals, tdl.CMP_GE, 9, monitor, 0, 0))


@check
def loads_stay_behind_waits() -> None:
    """In a loop that Triton pipelines, with parts that come late: a load above its wait reads
    zeros."""
    parts, sent = symmetric((8, 256), torch.float16), symmetric((8, 256), torch.float16)
    signals, monitor = symmetric(8, torch.int64), tdcoll.WaitMonitor()
    ok = torch.zeros(1, dtype=torch.int32, device=device())
    total = torch.zeros(256, dtype=torch.float32, device=device())
    index = torch.arange(8 * 256, device=device()).view(8, 256)
    before = (rank() - 1) % world()
    for turn in range(1, scaled(20, 1, shared_gpus=2) + 1):
        for step in (0, 1):
            number = 2 * turn + step
            sent.copy_((index * 7 + rank() * 31 + number) % 61)
            parts.zero_()
            tdcoll.barrier()
            for stages in (1, 2, 3, 4):
                sum_of_late_parts[(2,)](
                    *(
                        parts,
                        sent,
                        total,
                        signals,
                        4 * number + stages,
                        neighbour(),
                        scaled(2000, 2),
                    ),
                    *(monitor.words, ok, 8, step),
                    num_stages=stages,
                )
                monitor.check()
                wanted = ((index * 7 + before * 31 + number) % 61).sum(0).float()
                expect(
                    int(ok) == 1 and torch.equal(total, wanted),
                    f"tokens: {step}, {stages} stages: {total[:8]}",
                )
                tdcoll.barrier()
                parts.zero_()
                tdcoll.barrier()


@check
def stores_through_pointers() -> str | None:
    if tdcoll.topology().n_nodes > 1:
        return "pointers reach one node"
    data, flags = symmetric((2, 64), torch.int32), symmetric(2, torch.int32)
    tdcoll.barrier()
    for semantic in (0, 1):
        out = torch.zeros(64, dtype=torch.int32, device=device())
        store_through_pointer[(1,)](data[semantic], flags[semantic:], neighbour(), out, semantic)
        wanted = torch.arange(64, device=device(), dtype=torch.int32) + 1000 * (
            (rank() - 1) % world()
        )
        expect(torch.equal(out, wanted), f"semantic {semantic}: {out.tolist()[:4]}")
    return None


@check
def words_with_flags() -> str | None:
    if tdcoll.topology().n_nodes > 1:
        return "pointers reach one node"
    words = symmetric(1024, torch.int64)
    monitor = tdcoll.WaitMonitor(timeout_s=30 if shared() else 5)
    ok = torch.zeros(1, dtype=torch.int32, device=device())
    wanted = (
        torch.arange(50, device=device(), dtype=torch.int32) - 7 + 1000 * ((rank() - 1) % world())
    )
    for flag in (1, 2, (1 << 31) - 1):
        out = torch.zeros((3, 64), dtype=torch.int32, device=device())
        flagged_words[(1,)](words, flag, neighbour(), monitor.words, out, ok)
        received = all(
            torch.equal(*pair)
            for pair in zip(out[:, :50], (wanted, wanted + 1, -wanted), strict=True)
        )
        expect(int(ok) == 1 and received, f"flag {flag}: {out[:, :4].tolist()}")
        expect(not bool(out[:, 50:].any()), "masked words were written")
        tdcoll.barrier()
    monitor.check()
    words.zero_()
    tdcoll.barrier()
    torn = torch.ones(1, dtype=torch.int32, device=device())
    partner = world() - 1 - rank()  # each other's, so neither is more than one round ahead
    words_in_one_piece[(1,)](
        words, scaled(20_000, 3, shared_gpus=200), partner, monitor.words, torn
    )
    monitor.check()
    expect(int(torn) == 0, f"{int(torn)} words came in pieces")
    tdcoll.barrier()
    return None


@check
def words_without_flags() -> None:
    """Words that announce themselves: all of them, and all but one whose last part never comes."""
    if tdcoll.topology().n_nodes != 1:
        return
    absent = -(1 << 31)
    words = symmetric((64, 4), torch.int32)
    wanted = (
        torch.arange(50, device=device(), dtype=torch.int32) - 7 + 1000 * ((rank() - 1) % world())
    )
    for missing in (False, True):
        # a peer may still compile the kernel
        monitor = tdcoll.WaitMonitor(timeout_s=0.5 if missing else 30)
        words.fill_(absent)
        tdcoll.barrier()
        out, ok = (torch.zeros(count, dtype=torch.int32, device=device()) for count in (256, 1))
        words_that_announce_themselves[(1,)](
            words.view(torch.int64),
            absent,
            neighbour(),
            monitor.words,
            out,
            ok,
            49 if missing else 50,
        )
        parts = (wanted, wanted + 1, wanted + 2, -wanted)
        received = all(
            torch.equal(*pair)
            for pair in zip(out.view(4, 64)[:, :49], (p[:49] for p in parts), strict=True)
        )
        expect(
            int(ok) == (not missing) and received,
            f"missing {missing}: {out.view(4, 64)[:, :4].tolist()}",
        )
        tdcoll.barrier()
    error = expect_raises(tdcoll.CollectiveTimeout, monitor.check)
    assert isinstance(error, tdcoll.CollectiveTimeout)
    told = (error.signal, error.epoch, error.expected, error.seen)
    expect(told == (49, 1, 4, 3), f"signal, epoch, expected, seen: {told}")
    runtime.current().failed = False  # nothing else is broken
    tdcoll.barrier()


@check
def block_copies() -> None:
    source = (torch.arange(40_000, device=device()) % 251).to(torch.uint8)
    for nbytes in (0, 1, 16, 100, 4096, 16384 * 2 + 16, 33_333):
        for shift_to, shift_from in ((0, 0), (1, 0), (0, 3), (4, 8), (16, 16)):
            room = torch.full((40_100,), 255, dtype=torch.uint8, device=device())
            copies[(1,)](room[shift_to:], source[shift_from:], nbytes)
            wanted = torch.full_like(room, 255)
            wanted[shift_to : shift_to + nbytes] = source[shift_from : shift_from + nbytes]
            expect(torch.equal(room, wanted), f"{nbytes} bytes, shifts {shift_to}, {shift_from}")


@check
def pointers_are_true_unless_null() -> None:
    """A tensor without elements has a null pointer."""
    for elements, value, wanted in (
        (4, 2, [1, 1, 0]),
        (4, 3, [0, 1, 0]),
        (0, 2, [0, 0, 1]),
        (0, 3, [0, 1, 1]),
    ):
        out = torch.zeros(3, dtype=torch.int32, device=device())
        truth_of_pointers[(1,)](
            torch.zeros(elements, dtype=torch.uint8, device=device()), out, value
        )
        expect(out.tolist() == wanted, f"{elements} elements, {value}: {out.tolist()}")


@check
def waits_end() -> None:
    """A wait that nobody satisfies: 0 within the deadline, a record, and every later wait at
    once."""
    signals = symmetric(4, torch.int64)
    signals.copy_(torch.tensor([9, 9, 4, 0]))
    monitor = tdcoll.WaitMonitor(timeout_s=0.5)
    ok = torch.ones(2, dtype=torch.int32, device=device())
    never[(1,)](signals, monitor.words, ok, 4, 4)
    expect(ok.tolist() == [0, 1], str(ok.tolist()))
    error = expect_raises(tdcoll.CollectiveTimeout, monitor.check, "0.5 s")
    told = error.peer, error.signal, error.expected, error.seen  # type: ignore[attr-defined]
    expect(told in ((2, 2, 9, 4), (3, 3, 9, 0)), str(error))
    runtime.current().failed = False  # nothing else is broken
