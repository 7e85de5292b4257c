# SPDX-License-Identifier: Apache-2.0
"""Kernels as a user might write them first, each with one fault that ``FAULT`` puts in, or without
any."""

import triton.language as tl

import tdcoll.language as tdl
from tdcoll.language.jit import jit


@jit
def hand_over(box, out, flag, monitor, FAULT: tl.constexpr):
    """PE 0 stores to PE 1's box and tells it; PE 1 reads the box."""
    index = tl.arange(0, 32)
    if tdl.my_pe() == 0:
        tl.store(tdl.remote_ptr(box, 1) + index, index)
        if FAULT != "no barrier":
            tdl.syncthreads()
        if tdl.tid(0) == 0:
            if FAULT == "gpu release":
                tdl.st_release(tdl.remote_ptr(flag, 1), 1, "gpu")
            elif FAULT == "relaxed store":
                tdl.st(tdl.remote_ptr(flag, 1), 1, "sys")
            else:
                tdl.st_release(tdl.remote_ptr(flag, 1), 1, "sys")
    else:
        if FAULT == "relaxed load":
            while tdl.ld(flag, "sys", "relaxed") == 0:
                pass
        elif FAULT == "gpu acquire":
            while tdl.ld(flag, "gpu", "acquire") == 0:
                pass
        elif FAULT == "one thread waits":
            if tdl.tid(0) == 0:
                while tdl.ld(flag, "sys", "acquire") == 0:
                    pass
        elif FAULT != "no wait":
            tdl.wait_signal(flag, tdl.CMP_GE, 1, monitor, 0, 0)
        tl.store(out + index, tl.load(box + index))


@jit
def put_and_tell(box, out, source, flag, monitor, FAULT: tl.constexpr):
    """PE 0 puts bytes into PE 1's box, and tells it by another message."""
    index = tl.arange(0, 32)
    if tdl.my_pe() == 0:
        tl.store(source + index, index)
        if FAULT != "put of what is being stored":
            tdl.syncthreads()
        tdl.putmem_nbi_block(box, source, 256, 1)
        tdl.syncthreads()
        if tdl.tid(0) == 0:
            if FAULT != "no fence":
                tdl.fence()
            tdl.signal_op(flag, 1, tdl.SIGNAL_SET, 1)
        if FAULT == "source written early":
            tl.store(source + index, index)
        tdl.quiet()
    else:
        tdl.wait_signal(flag, tdl.CMP_GE, 1, monitor, 0, 0)
        tl.store(out + index, tl.load(box + index))


@jit
def ring(inbox, out, mine, arrived, monitor, WORLD: tl.constexpr, SLOTS: tl.constexpr):
    """Pieces of 32 words go around; each step has a slot of ``inbox`` if there are enough."""
    rank = tdl.my_pe()
    index = tl.arange(0, 32)
    source = mine
    for step in range(WORLD - 1):
        landing = inbox + step % SLOTS * 32
        signal = arrived + step
        tdl.putmem_signal_block(landing, source, 256, signal, 1, tdl.SIGNAL_SET, (rank + 1) % WORLD)
        tdl.wait_signal(signal, tdl.CMP_GE, 1, monitor, (rank + WORLD - 1) % WORLD, step)
        tl.store(out + step * 32 + index, tl.load(landing + index))
        tdl.syncthreads()
        source = out + step * 32


@jit
def announce(words, out, monitor, call, FAULT: tl.constexpr):
    """PE 0 stores words that have a flag in PE 1's memory, which has them for each call, or once for
    all."""
    place = tl.arange(0, 4)
    mask = place < 4
    at = words if FAULT == "one slot" else words + 8 * (call % 2)
    if tdl.my_pe() == 0:
        theirs = tdl.remote_ptr(at, 1) + 2 * place
        tdl.store_flagged(theirs, place, place, place, call, mask)
        tdl.wait_signal(out, tdl.CMP_GE, call - 1, monitor, 1, 0)
    else:
        tdl.wait_flagged(at + 2 * place, call, mask, monitor, 0)
        tdl.signal_block(out, call, tdl.SIGNAL_SET, 0)
