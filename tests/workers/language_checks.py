# SPDX-License-Identifier: Apache-2.0
"""NVSHMEM's functions of the device language do what its documentation says, on every rank of a
job.

They move bytes, signal, order, complete and meet. ``stores_and_waits_checks.py`` and
``words_checks.py`` have the rest.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
import triton.language as tl
from harness import check, device, expect, neighbour, rank, scaled, symmetric, world

import tdcoll
import tdcoll.language as tdl
from tdcoll.spec.functions import FUNCTIONS

NBYTES = 1003  # no multiple of anything


@tdcoll.jit
def who_am_i(out):
    tl.store(out, tdl.my_pe())
    tl.store(out + 1, tdl.n_pes())
    tl.store(out + 2, tdl.ntid(0))
    if tdl.tid(0) == 3:  # a put, since Triton makes a scalar store in the first thread only
        tdl.int_p(out + 3, tdl.tid(0) + 10 * tdl.tid(1) + 100 * tdl.tid(2), tdl.my_pe())


@tdcoll.jit
def put(dest, source, nbytes, pe, FORM: tl.constexpr):
    if FORM == 0:
        if tdl.tid(0) == 0:
            tdl.putmem(dest, source, nbytes, pe)
            tdl.quiet()
    if FORM == 1:
        if tdl.tid(0) < 32:
            tdl.putmem_warp(dest, source, nbytes, pe)
            tdl.quiet()
    if FORM == 2:
        tdl.putmem_block(dest, source, nbytes, pe)
    if FORM == 3:
        if tdl.tid(0) == 0:
            tdl.putmem_nbi(dest, source, nbytes, pe)
            tdl.quiet()
    if FORM == 4:
        if tdl.tid(0) < 32:
            tdl.putmem_nbi_warp(dest, source, nbytes, pe)
            tdl.quiet()
    if FORM == 5:
        tdl.putmem_nbi_block(dest, source, nbytes, pe)
    tdl.syncthreads()
    tdl.barrier_all_block()


@tdcoll.jit
def get(dest, source, nbytes, pe, FORM: tl.constexpr):
    tdl.sync_all_block()
    if FORM == 0:
        if tdl.tid(0) == 0:
            tdl.getmem(dest, source, nbytes, pe)
    if FORM == 1:
        if tdl.tid(0) < 32:
            tdl.getmem_warp(dest, source, nbytes, pe)
    if FORM == 2:
        tdl.getmem_block(dest, source, nbytes, pe)
    if FORM == 3:
        if tdl.tid(0) == 0:
            tdl.getmem_nbi(dest, source, nbytes, pe)
    if FORM == 4:
        if tdl.tid(0) < 32:
            tdl.getmem_nbi_warp(dest, source, nbytes, pe)
    if FORM == 5:
        tdl.getmem_nbi_block(dest, source, nbytes, pe)
    tdl.quiet()
    tdl.syncthreads()
    tdl.sync_all_block()


@tdcoll.jit
def put_signal(dest, source, nbytes, signal, value, pe, monitor, ok, seen, FORM: tl.constexpr):
    if FORM == 0:
        if tdl.tid(0) == 0:
            tdl.putmem_signal(dest, source, nbytes, signal, value, tdl.SIGNAL_SET, pe)
    if FORM == 1:
        if tdl.tid(0) < 32:
            tdl.putmem_signal_warp(dest, source, nbytes, signal, value, tdl.SIGNAL_SET, pe)
    if FORM == 2:
        tdl.putmem_signal_block(dest, source, nbytes, signal, value, tdl.SIGNAL_SET, pe)
    if FORM == 3:
        if tdl.tid(0) == 0:
            tdl.putmem_signal_nbi(dest, source, nbytes, signal, value, tdl.NVSHMEM_SIGNAL_SET, pe)
    if FORM == 4:
        if tdl.tid(0) < 32:
            tdl.putmem_signal_nbi_warp(dest, source, nbytes, signal, value, tdl.SIGNAL_SET, pe)
    if FORM == 5:
        tdl.putmem_signal_nbi_block(dest, source, nbytes, signal, value, tdl.SIGNAL_ADD, pe)
    tl.store(ok, tdl.wait_signal(signal, tdl.CMP_EQ, value, monitor, pe, 0))
    tl.store(seen, tdl.signal_wait_until(signal, tdl.NVSHMEM_CMP_GE, value).to(tl.int64))


@tdcoll.jit
def signals_to_all(signals, monitor, ok, n, STEP: tl.constexpr, BLOCK: tl.constexpr):
    me = tdl.my_pe()
    for i in range(n):
        if STEP == 0:
            if tdl.tid(0) == 0:
                tdl.signal_op(signals + me, 5, tdl.SIGNAL_SET, i)
        if STEP == 1:
            tdl.signal_block(signals + me, 2, tdl.SIGNAL_ADD, i)
    if STEP == 0:
        tl.store(ok, tdl.wait_signals(signals, n, -1, tdl.CMP_EQ, 5, monitor, BLOCK))
        if tdl.tid(0) == 0:
            tdl.barrier_all()
    else:
        tl.store(ok, tdl.wait_signals(signals, n, me, tdl.CMP_GT, 6, monitor, BLOCK))
        if tdl.tid(0) < 32:
            tdl.sync_all_warp()
            tdl.barrier_all_warp()


@tdcoll.jit
def data_fence_signal(dest, source, nbytes, number, signal, pe, monitor, ok):
    if tdl.tid(0) == 0:
        tdl.putmem_nbi(dest, source, nbytes, pe)
        tdl.int_p(number, -77_000, pe)
        tdl.fence()
        tdl.signal_op(signal, 1, tdl.SIGNAL_SET, pe)
    # for synccheck: PTX lets a warp come to the barrier of a wait in parts, and it does not
    tdl.syncthreads()
    tl.store(ok, tdl.wait_signal(signal, tdl.CMP_NE, 0, monitor, pe, 0))
    if tdl.tid(0) == 0:
        tdl.sync_all()


@tdcoll.jit
def put_by_another(dest, source, nbytes, done, signal, value, pe, monitor, ok, STEP: tl.constexpr):
    """Program 0 puts; program 1 knows that it has, and meets all ranks or tells the receiver. It
    has put nothing.

    STEP 3 only puts, and STEP 4 only meets: two launches.
    """
    if STEP >= 3:
        if STEP == 3:
            tdl.putmem_nbi_block(dest, source, nbytes, pe)
        else:
            tdl.barrier_all_block()
    else:
        if tl.program_id(0) == 0:
            tdl.putmem_nbi_block(dest, source, nbytes, pe)
            tdl.syncthreads()
            tl.atomic_add(done, 1, sem="release", scope="gpu")
        else:
            while tdl.ld_acquire(done, "gpu") != value:
                pass
            if STEP == 0:
                tdl.barrier_all_block()
            else:
                if STEP == 1:
                    tdl.signal_block(signal, value, tdl.SIGNAL_SET, pe)
                else:
                    if tdl.tid(0) == 0:
                        tdl.quiet()
                        tdl.signal_op(signal, value, tdl.SIGNAL_SET, pe)
                tl.store(ok, tdl.wait_signal(signal, tdl.CMP_GE, value, monitor, pe, 0))


def bytes_of(owner: int, salt: int) -> torch.Tensor:
    index = torch.arange(NBYTES, device=device())
    return ((index * 3 + owner * 17 + salt * 101) % 253).to(torch.uint8)


def block(n: int) -> int:
    return 1 << max(0, (n - 1).bit_length())


@check
def identity() -> None:
    out = symmetric(4, torch.int32)
    who_am_i[(1,)](out, num_warps=4)
    expect(out.tolist() == [rank(), world(), 128, 3], str(out.tolist()))


@check
def puts_and_gets(forms: Iterable[int] = range(6)) -> None:
    source, dest = symmetric(NBYTES, torch.uint8), symmetric(NBYTES, torch.uint8)
    before = (rank() - 1) % world()
    for form in forms:
        source.copy_(bytes_of(rank(), form))
        put[(1,)](dest, source, NBYTES, neighbour(), form)
        expect(torch.equal(dest, bytes_of(before, form)), f"put form {form}")
        dest.zero_()
        get[(1,)](dest, source, NBYTES, neighbour(), form)
        expect(torch.equal(dest, bytes_of(neighbour(), form)), f"get form {form}")
        dest.zero_()
        tdcoll.barrier()


@check
def puts_with_signals(forms: Iterable[int] = range(6)) -> None:
    source, dest = symmetric(NBYTES, torch.uint8), symmetric((6, NBYTES), torch.uint8)
    signals = symmetric(6, torch.int64)
    monitor = tdcoll.WaitMonitor()
    ok = torch.zeros(1, dtype=torch.int32, device=device())
    seen = torch.zeros(1, dtype=torch.int64, device=device())
    big = (1 << 62) + 12345  # a 64-bit value
    for form in forms:
        source.copy_(bytes_of(rank(), form))
        tdcoll.barrier()
        put_signal[(1,)](
            dest[form],
            source,
            NBYTES,
            signals[form:],
            big + form,
            neighbour(),
            monitor.words,
            ok,
            seen,
            form,
        )
        expect(
            int(ok) == 1 and int(seen) == big + form, f"form {form}: ok {int(ok)}, seen {int(seen)}"
        )
        expect(torch.equal(dest[form], bytes_of((rank() - 1) % world(), form)), f"form {form}")
    monitor.check()


@check
def signals_and_barriers() -> None:
    signals = symmetric(world(), torch.int64)
    monitor = tdcoll.WaitMonitor()
    ok = torch.zeros(1, dtype=torch.int32, device=device())
    tdcoll.barrier()
    for step, value in ((0, 5), (1, 7)):
        signals_to_all[(1,)](signals, monitor.words, ok, world(), step, block(world()))
        expect(int(ok) == 1, f"step {step}")
        expect(signals.tolist() == [value] * world(), f"step {step}: {signals.tolist()}")
        tdcoll.barrier()


@check
def fence_orders() -> None:
    source, dest = symmetric(NBYTES, torch.uint8), symmetric(NBYTES, torch.uint8)
    number, signal = symmetric(1, torch.int32), symmetric(1, torch.int64)
    source.copy_(bytes_of(rank(), 9))
    monitor = tdcoll.WaitMonitor()
    ok = torch.zeros(1, dtype=torch.int32, device=device())
    tdcoll.barrier()
    data_fence_signal[(1,)](dest, source, NBYTES, number, signal, neighbour(), monitor.words, ok)
    expect(int(ok) == 1 and int(number) == -77_000, f"ok {int(ok)}, number {int(number)}")
    expect(torch.equal(dest, bytes_of((rank() - 1) % world(), 9)), "data")


@check
def order_and_completion_are_the_pes() -> None:
    """fence, quiet and barrier_all are for what any program of the PE has put, and what an earlier
    kernel has."""
    nbytes = scaled(8 << 20, 5000)
    source, dest = symmetric(nbytes, torch.uint8), symmetric(nbytes, torch.uint8)
    signal, monitor = symmetric(1, torch.int64), tdcoll.WaitMonitor()
    done = torch.zeros(1, dtype=torch.int64, device=device())
    ok = torch.ones(1, dtype=torch.int32, device=device())
    before = (rank() - 1) % world()
    for turn in range(1, scaled(30, 2, shared_gpus=4) + 1):
        for step in range(4):
            number = 4 * turn + step
            source.fill_((rank() * 17 + number) % 251)
            dest.fill_(255)
            done.fill_(number - 1)
            tdcoll.barrier()
            arguments = (dest, source, nbytes, done, signal, number, neighbour(), monitor.words, ok)
            for part in (3, 4) if step == 3 else (step,):
                put_by_another[(1 if step == 3 else 2,)](*arguments, part)
            stale = int((dest != (before * 17 + number) % 251).sum())
            monitor.check()
            expect(
                int(ok) == 1 and stale == 0,
                f"turn {turn}, step {step}: {stale} of {nbytes} bytes are not there",
            )


@check
def all_functions_are_checked() -> None:
    here = Path(__file__)
    files = (
        here,
        here.with_name("stores_and_waits_checks.py"),
        here.parent.parent / "language/kernels_of_words.py",
        # operators_checks.py runs its kernel.
        here.parents[2] / "tdcoll/fused/matmul/kernels_scatter.py",
    )
    source = "".join(file.read_text() for file in files)
    unused = [name for name in FUNCTIONS if f"tdl.{name}(" not in source]
    expect(not unused, f"no check calls {unused}")
