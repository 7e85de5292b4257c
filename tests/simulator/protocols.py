# SPDX-License-Identifier: Apache-2.0
"""Protocols that the simulator is tested with: right ones, and ones with a single protection left
out."""

from typing import NamedTuple

import triton.language as tl

import tdcoll.language as tdl
from tdcoll.language.jit import jit


class Steps(NamedTuple):
    """What a program does to send data, and to notify the peer. A step of no name is left out.

    Attributes:
        data: how the data is sent or stored.
        order: what orders the data before the notification.
        notify: how the peer is notified; ``put_signal`` sends the data as well.
        end: what the program does at last.
        count: the order of the atomic by which a program says to others that it has stored.
    """

    data: str = ""
    order: str = ""
    notify: str = ""
    end: str = ""
    count: str = ""

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.count, *self[:4])))


@jit
def order(HOW: tl.constexpr):
    """Order what the program sends before and after."""
    tdl.syncthreads()
    if HOW == "fence":
        tdl.fence()
    elif HOW == "quiet":
        tdl.quiet()
    elif HOW == "wait":
        tdl.wait_descriptor_stores()


@jit
def notify(signal, value, peer, HOW: tl.constexpr):
    """The peer's copy of ``signal`` becomes ``value``."""
    tdl.syncthreads()
    theirs = tdl.remote_ptr(signal, peer)
    if HOW == "store":
        tl.store(theirs, value)
    elif HOW == "release":
        tdl.st_release(theirs, value, "sys")
    elif HOW == "gpu release":
        tdl.st_release(theirs, value, "gpu")
    elif HOW == "relaxed":
        tdl.st(theirs, value, "sys")
    elif HOW == "atomic release":
        tl.atomic_xchg(theirs, tl.cast(value, tl.int64), sem="release", scope="sys")
    elif HOW == "atomic relaxed":
        tl.atomic_xchg(theirs, tl.cast(value, tl.int64), sem="relaxed", scope="sys")
    elif HOW == "signal_block":
        tdl.signal_block(signal, value, tdl.SIGNAL_SET, peer)
    elif HOW == "put_signal":
        tdl.putmem_signal_block(signal, signal, 0, signal, value, tdl.SIGNAL_SET, peer)
    elif HOW == "signal":
        if tdl.tid(0) == 0:
            tdl.signal_op(signal, value, tdl.SIGNAL_SET, peer)


@jit
def add_by_one_thread(signals):
    if tdl.tid(0) == 0:
        tdl.signal_op(signals, 1, tdl.SIGNAL_ADD, 0)


@jit
def gather(
    buffer,
    signals,
    nbytes,
    epoch,
    monitor,
    WORLD: tl.constexpr,
    STEPS: tl.constexpr,
    COMPARE: tl.constexpr,
):
    """A 1D all-gather: program p of rank r pushes r's segment to rank p; program r itself waits for
    everybody.

    ``STEPS``: of the program that pushes (:class:`Steps`).
    """
    rank, peer = tdl.my_pe(), tl.program_id(0)
    mine, signal, index = buffer + rank * nbytes, signals + rank, tl.arange(0, 16)
    if peer == rank:
        tdl.wait_signals(signals, WORLD, rank, COMPARE, epoch, monitor, WORLD)
    elif (rank != 2) | (peer != 0) | (STEPS.data != "PE 2 forgets PE 0"):
        if STEPS.order == "signal first":
            tdl.signal_block(signal, epoch, tdl.SIGNAL_SET, peer)
            tdl.fence()
        if STEPS.data == "put":
            tdl.putmem_block(mine, mine, nbytes, peer)
        elif STEPS.data == "nbi put":
            tdl.putmem_nbi_block(mine, mine, nbytes, peer)
        elif STEPS.data == "copy":
            tdl.copy_block(tdl.remote_ptr(mine, peer), mine, nbytes)
        elif STEPS.data == "store":
            tl.store(tdl.remote_ptr(mine, peer) + index, tl.load(mine + index))
        elif STEPS.data == "descriptor":
            theirs = tl.make_tensor_descriptor(
                tdl.remote_ptr(mine, peer), [16], [tl.constexpr(1)], [16]
            )
            theirs.store([0], tl.load(mine + index))
        elif STEPS.data == "words":
            words = mine.to(tl.pointer_type(tl.int64))
            tdl.st(tdl.remote_ptr(words, peer), tl.load(words), "sys")
            tdl.st(tdl.remote_ptr(words + 1, peer), tl.load(words + 1), "sys")
        elif STEPS.data == "half a store":  # the put says nothing of it
            tl.store(tdl.remote_ptr(mine, peer) + index, tl.load(mine + index), mask=index < 8)
            mine, nbytes = mine + 8, 8
        order(STEPS.order)
        if STEPS.notify == "put_signal":
            tdl.putmem_signal_block(mine, mine, nbytes, signal, epoch, tdl.SIGNAL_SET, peer)
        elif STEPS.notify == "put_signal_nbi":
            tdl.putmem_signal_nbi_block(mine, mine, nbytes, signal, epoch, tdl.SIGNAL_SET, peer)
        else:
            notify(signal, epoch, peer, STEPS.notify)
        order(STEPS.end)


@jit
def gather_in_order(
    buffer, signals, nbytes, epoch, monitor, WORLD: tl.constexpr, WAITS: tl.constexpr
):
    """Gather where program number ``WAITS`` of the grid waits; if it is not the last, it needs all
    others beside it."""
    rank = tdl.my_pe()
    peer = (rank - WAITS + WORLD + tl.program_id(0)) % WORLD
    mine = buffer + rank * nbytes
    if peer != rank:
        tdl.putmem_signal_block(mine, mine, nbytes, signals + rank, epoch, tdl.SIGNAL_SET, peer)
    else:
        tdl.wait_signals(signals, WORLD, rank, tdl.CMP_GE, epoch, monitor, WORLD)


@jit
def gather_by_threads(
    buffer, signals, nbytes, epoch, WORLD: tl.constexpr, FORM: tl.constexpr, FORGET: tl.constexpr
):
    """Gather as Triton-distributed's kernels do, where threads wait for one signal each, or with
    polling loops."""
    rank, peer = tdl.my_pe(), tl.program_id(0)
    mine = buffer + rank * nbytes
    if peer != rank:
        if (rank != 2) | (peer != 0) | (FORGET == 0):
            tdl.putmem_signal_block(mine, mine, nbytes, signals + rank, epoch, tdl.SIGNAL_SET, peer)
    elif FORM == "if":
        if tdl.tid(0) < WORLD and tdl.tid(0) != rank:
            tdl.signal_wait_until(signals + tdl.tid(0), tdl.CMP_EQ, epoch)
        tdl.syncthreads()
    elif FORM == "name":
        t = tdl.tid(0)
        if t < WORLD:
            if t != rank:
                tdl.signal_wait_until(signals + t, tdl.CMP_EQ, epoch)
    elif FORM == "spin":
        for i in range(WORLD):
            if i != rank:
                while tl.load(signals + i, volatile=True) < epoch:
                    pass


@jit
def broadcast(
    buffer, arrived, taken, nbytes, call, monitor, WORLD: tl.constexpr, ACK: tl.constexpr
):
    """Rank 0 puts its bytes into a slot of each rank; with ``ACK``, only after all have read that
    slot's last bytes.

    ``taken`` has one word per rank, on rank 0: how many calls that rank has begun, having read all
    but the last.
    """
    rank = tdl.my_pe()
    if rank == 0:
        if ACK:
            tdl.wait_signals(taken, WORLD, 0, tdl.CMP_GE, call - 1, monitor, WORLD)
        for peer in range(1, WORLD):
            tdl.putmem_signal_block(buffer, buffer, nbytes, arrived, call, tdl.SIGNAL_SET, peer)
        tdl.quiet()
    else:
        if ACK and tdl.tid(0) == 0:
            # a SET could be overtaken by the one of the next call
            tdl.signal_op(taken + rank, 1, tdl.SIGNAL_ADD, 0)
        tdl.wait_signal(arrived, tdl.CMP_GE, call, monitor, 0, 0)


@jit
def put_by_another_program(
    dest, source, nbytes, done, flag, WORLD: tl.constexpr, HOW: tl.constexpr
):
    """Program 0 puts into the next PE's memory. Program 1 knows that it has, and tells that PE or
    meets all."""
    rank = tdl.my_pe()
    following = (rank + 1) % WORLD
    if tl.program_id(0) == 0:
        tdl.putmem_nbi_block(dest, source, nbytes, following)
        tdl.syncthreads()
        tl.atomic_add(done, 1, sem="release")
    else:
        while tdl.ld_acquire(done) == 0:
            pass
        if HOW == "barrier_all":
            tdl.barrier_all_block()
        elif HOW == "sync_all":
            tdl.sync_all_block()
        else:
            order(HOW)
            notify(flag, 1, following, "store" if HOW == "quiet" else "signal")
            tdl.signal_wait_until(flag, tdl.CMP_EQ, 1)


@jit
def flagged(words, flag, monitor, torn, WHOLE: tl.constexpr):
    """PE 0 sends PE 1 words of 128 bits, whole or in two halves, the flag first; PE 1 counts those
    that came torn."""
    place = tl.arange(0, 2)
    mask = place < 2
    if tdl.my_pe() == 0:
        theirs = tdl.remote_ptr(words, 1) + 2 * place
        if WHOLE:
            tdl.store_flagged(theirs, place + flag, place - flag, place ^ flag, flag, mask)
        else:
            data = (place ^ flag).to(tl.int64)
            tl.store(theirs + 1, data | (tl.cast(flag, tl.int64) << 32))
            low, high = (place + flag).to(tl.int64), (place - flag).to(tl.int64)
            tl.store(theirs, (low & 0xFFFFFFFF) | (high << 32))
    else:
        first, second, third, _ = tdl.wait_flagged(words + 2 * place, flag, mask, monitor, 0)
        right = (first == place + flag) & (second == place - flag) & (third == place ^ flag)
        tl.store(torn, tl.sum((right == 0).to(tl.int32)))


@jit
def pull_stored(
    mine,
    source,
    out,
    told,
    monitor,
    WORLD: tl.constexpr,
    STEPS: tl.constexpr,
    GET: tl.constexpr,
):
    """Each rank stores 8 words to its own memory, notifies the others, and reads theirs.

    ``out[rank]``: 8 words each.
    """
    rank, index = tdl.my_pe(), tl.arange(0, 8)
    if STEPS.data == "copy":
        tdl.copy_block(mine, source, 64)
    else:
        tl.store(mine + index, tl.load(source + index))
    order(STEPS.order)
    for step in range(1, WORLD):
        peer = (rank + step) % WORLD
        notify(told + rank, 1, peer, STEPS.notify)
    for step in range(1, WORLD):
        peer = (rank + step) % WORLD
        tdl.wait_signal(told + peer, tdl.CMP_GE, 1, monitor, peer, peer)
        if GET:
            tdl.getmem_block(out + 8 * peer, mine, 64, peer)
        else:
            tl.store(out + 8 * peer + index, tl.load(tdl.remote_ptr(mine, peer) + index))
    tl.store(out + 8 * rank + index, tl.load(mine + index))  # it sees its own stores


@jit
def count_up_and_watch(word, out):
    """PE 0 stores 1 to 4 to its word and adds 4; PE 1 looks at it: ``out``, 16 values, every fourth
    by an atomic."""
    if tdl.my_pe() == 0:
        for value in range(1, 5):
            tl.store(word, value)
        tl.atomic_add(word, 4, sem="relaxed", scope="sys")
    else:
        theirs = tdl.remote_ptr(word, 0)
        for look in range(16):
            if look % 4 == 3:
                tl.store(out + look, tl.atomic_add(theirs, 0, sem="relaxed", scope="sys"))
            else:
                tl.store(out + look, tl.load(theirs))


@jit
def clear_and_notify(box, told, answered, monitor, STEPS: tl.constexpr, REPLY: tl.constexpr):
    """PE 0 clears two words of its own and notifies PE 1, which fills them by REPLY, and
    answers."""
    index = tl.arange(0, 2)
    seven = tl.full([2], 7, tl.int64)
    if tdl.my_pe() == 0:
        tl.store(box + index, tl.zeros([2], tl.int64))
        order(STEPS.order)
        notify(told, 1, 1, STEPS.notify)
        tdl.wait_signal(answered, tdl.CMP_EQ, 1, monitor, 1, 1)
    else:
        tdl.wait_signal(told, tdl.CMP_EQ, 1, monitor, 0, 0)
        theirs = tdl.remote_ptr(box, 0)
        if REPLY == "store":
            tl.store(theirs + index, seven)
        elif REPLY == "atomic":
            tl.atomic_add(theirs + index, seven, sem="relaxed", scope="sys")
        elif REPLY == "put":
            tl.store(box + index, seven)
            tdl.syncthreads()
            tdl.putmem_block(box, box, 16, 0)
        elif tdl.tid(0) == 0:
            tdl.signal_op(box, 7, tdl.SIGNAL_ADD, 0)
            tdl.signal_op(box + 1, 7, tdl.SIGNAL_SET, 0)
        tdl.signal_block(answered, 1, tdl.SIGNAL_SET, 0)


@jit
def last_one_notifies(
    mine,
    counter,
    signal,
    out,
    monitor,
    PUSH: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Each of PE 0's programs stores a word, in its own memory or to PE 1, and counts; the last
    signals to PE 1, which reads the words into ``out`` and answers; until then the launch goes
    on."""
    place, index = tl.program_id(0), tl.arange(0, 4)
    if tdl.my_pe() == 0:
        tl.store((tdl.remote_ptr(mine, 1) if PUSH else mine) + place, 7)
        tdl.syncthreads()
        if tl.atomic_add(counter, 1, sem=STEPS.count, scope="gpu") == tl.num_programs(0) - 1:
            order(STEPS.order)
            notify(signal, 1, 1, STEPS.notify)
        tdl.wait_signal(signal + 1, tdl.CMP_EQ, 1, monitor, 1, 1)
    elif place == 0:
        tdl.wait_signal(signal, tdl.CMP_EQ, 1, monitor, 0, 0)
        tl.store(out + index, tl.load((mine if PUSH else tdl.remote_ptr(mine, 0)) + index))
        tdl.signal_op(signal + 1, 1, tdl.SIGNAL_SET, 0)
