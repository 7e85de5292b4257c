# SPDX-License-Identifier: Apache-2.0
"""Protocols that the simulator is tested with: right ones, and ones with a single protection left out.

``gather`` is a 1D all-gather: program ``p`` of rank ``r`` pushes r's segment to rank p; program ``r`` itself
waits for everybody. ``HOW`` says how data and signal are sent.
"""

import triton.language as tl

import tdcoll.language as tdl
from tdcoll.language.jit import jit


@jit
def gather(buffer, signals, nbytes, epoch, monitor, WORLD: tl.constexpr, HOW: tl.constexpr, COMPARE: tl.constexpr):
    rank = tdl.my_pe()
    peer = tl.program_id(0)
    mine = buffer + rank * nbytes
    signal = signals + rank
    if peer == rank:
        tdl.wait_signals(signals, WORLD, rank, COMPARE, epoch, monitor, WORLD)
    elif HOW == "put_signal":
        tdl.putmem_signal_block(mine, mine, nbytes, signal, epoch, tdl.SIGNAL_SET, peer)
    elif HOW == "put_signal_nbi":
        tdl.putmem_signal_nbi_block(mine, mine, nbytes, signal, epoch, tdl.SIGNAL_SET, peer)
    elif HOW == "put_signal_nbi, quiet":
        tdl.putmem_signal_nbi_block(mine, mine, nbytes, signal, epoch, tdl.SIGNAL_SET, peer)
        tdl.quiet()
    elif HOW == "put, fence, signal":
        tdl.putmem_nbi_block(mine, mine, nbytes, peer)
        tdl.syncthreads()
        if tdl.tid(0) == 0:
            tdl.fence()
            tdl.signal_op(signal, epoch, tdl.SIGNAL_SET, peer)
        tdl.quiet()
    elif HOW == "put, signal by the block":
        tdl.putmem_nbi_block(mine, mine, nbytes, peer)
        tdl.signal_block(signal, epoch, tdl.SIGNAL_SET, peer)
        tdl.quiet()
    elif HOW == "put, quiet, store":
        tdl.putmem_nbi_block(mine, mine, nbytes, peer)
        tdl.quiet()
        tl.store(tdl.remote_ptr(signal, peer), epoch)
    elif HOW == "put, signal":  # no fence
        tdl.putmem_nbi_block(mine, mine, nbytes, peer)
        tdl.syncthreads()
        if tdl.tid(0) == 0:
            tdl.signal_op(signal, epoch, tdl.SIGNAL_SET, peer)
        tdl.quiet()
    elif HOW == "blocking put, signal":  # no fence: blocking is not delivered
        tdl.putmem_block(mine, mine, nbytes, peer)
        tdl.syncthreads()
        if tdl.tid(0) == 0:
            tdl.signal_op(signal, epoch, tdl.SIGNAL_SET, peer)
    elif HOW == "signal, put":  # the wrong way round
        tdl.signal_block(signal, epoch, tdl.SIGNAL_SET, peer)
        tdl.fence()
        tdl.putmem_block(mine, mine, nbytes, peer)
    elif HOW == "put, release":  # a release orders stores, not puts
        tdl.putmem_block(mine, mine, nbytes, peer)
        tdl.st_release(tdl.remote_ptr(signal, peer), epoch, "sys")
    elif HOW == "copy, release":
        tdl.copy_block(tdl.remote_ptr(mine, peer), mine, nbytes)
        tdl.syncthreads()
        tdl.st_release(tdl.remote_ptr(signal, peer), epoch, "sys")
    elif HOW == "copy, signal by the block":
        tdl.copy_block(tdl.remote_ptr(mine, peer), mine, nbytes)
        tdl.signal_block(signal, epoch, tdl.SIGNAL_SET, peer)
    elif HOW == "copy, signal by a thread":  # without the fence that signal_block has
        tdl.copy_block(tdl.remote_ptr(mine, peer), mine, nbytes)
        tdl.syncthreads()
        if tdl.tid(0) == 0:
            tdl.signal_op(signal, epoch, tdl.SIGNAL_SET, peer)
    elif HOW == "copy, release on this GPU":
        tdl.copy_block(tdl.remote_ptr(mine, peer), mine, nbytes)
        tdl.syncthreads()
        tdl.st_release(tdl.remote_ptr(signal, peer), epoch, "gpu")
    elif HOW == "copy, relaxed":
        tdl.copy_block(tdl.remote_ptr(mine, peer), mine, nbytes)
        tdl.syncthreads()
        tdl.st(tdl.remote_ptr(signal, peer), epoch, "sys")
    elif HOW == "store, atomic release":
        index = tl.arange(0, 16)
        tl.store(tdl.remote_ptr(mine, peer) + index, tl.load(mine + index))
        tl.atomic_xchg(tdl.remote_ptr(signal, peer), epoch.to(tl.int64), sem="release", scope="sys")
    elif HOW == "store, atomic relaxed":
        index = tl.arange(0, 16)
        tl.store(tdl.remote_ptr(mine, peer) + index, tl.load(mine + index))
        tl.atomic_xchg(tdl.remote_ptr(signal, peer), epoch.to(tl.int64), sem="relaxed", scope="sys")
    elif HOW == "store, fence, signal by a thread":
        index = tl.arange(0, 16)
        tl.store(tdl.remote_ptr(mine, peer) + index, tl.load(mine + index))
        tdl.fence()
        if tdl.tid(0) == 0:
            tdl.signal_op(signal, epoch, tdl.SIGNAL_SET, peer)
    elif HOW == "store, signal by a thread":
        index = tl.arange(0, 16)
        tl.store(tdl.remote_ptr(mine, peer) + index, tl.load(mine + index))
        tdl.syncthreads()
        if tdl.tid(0) == 0:
            tdl.signal_op(signal, epoch, tdl.SIGNAL_SET, peer)
    elif HOW == "relaxed words, signal by a thread":
        words = mine.to(tl.pointer_type(tl.int64))
        theirs = tdl.remote_ptr(words, peer)
        tdl.st(theirs, tl.load(words), "sys")
        tdl.st(theirs + 1, tl.load(words + 1), "sys")
        if tdl.tid(0) == 0:
            tdl.signal_op(signal, epoch, tdl.SIGNAL_SET, peer)
    elif HOW == "half stored, half put with a signal":  # which says nothing of the other half
        index = tl.arange(0, 8)
        tl.store(tdl.remote_ptr(mine, peer) + index, tl.load(mine + index))
        tdl.putmem_signal_block(mine + 8, mine + 8, 8, signal, epoch, tdl.SIGNAL_SET, peer)
    elif HOW == "PE 2 forgets PE 0":
        if (rank != 2) | (peer != 0):
            tdl.putmem_signal_block(mine, mine, nbytes, signal, epoch, tdl.SIGNAL_SET, peer)


@jit
def broadcast(buffer, arrived, taken, nbytes, call, monitor, WORLD: tl.constexpr, ACK: tl.constexpr):
    """Rank 0 puts its bytes into a slot of each rank; with ``ACK``, only after all have read that slot's last bytes.

    ``taken`` has one word per rank, on rank 0: how many calls that rank has begun, having read all but the last.
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
            tdl.signal_op(taken + rank, 1, tdl.SIGNAL_ADD, 0)  # a SET could be overtaken by the one of the next call
        tdl.wait_signal(arrived, tdl.CMP_GE, call, monitor, 0, 0)


@jit
def gather_spinning(buffer, signals, nbytes, epoch, WORLD: tl.constexpr, FORGET: tl.constexpr):
    """Do as ``gather``, with a hand-written polling loop in place of the wait."""
    rank = tdl.my_pe()
    peer = tl.program_id(0)
    mine = buffer + rank * nbytes
    if peer != rank:
        if (rank != 2) | (peer != 0) | (FORGET == 0):
            tdl.putmem_signal_block(mine, mine, nbytes, signals + rank, epoch, tdl.SIGNAL_SET, peer)
    else:
        for i in range(WORLD):
            if i != rank:
                while tl.load(signals + i, volatile=True) < epoch:
                    pass


@jit
def gather_waiting_first(buffer, signals, nbytes, epoch, monitor, WORLD: tl.constexpr):
    """The waiting program comes first in the grid: wrong where not all programs fit on the GPU."""
    rank = tdl.my_pe()
    peer = (rank + tl.program_id(0)) % WORLD
    mine = buffer + rank * nbytes
    if peer != rank:
        tdl.putmem_signal_block(mine, mine, nbytes, signals + rank, epoch, tdl.SIGNAL_SET, peer)
    else:
        tdl.wait_signals(signals, WORLD, rank, tdl.CMP_GE, epoch, monitor, WORLD)


@jit
def gather_waiting_last(buffer, signals, nbytes, epoch, monitor, WORLD: tl.constexpr):
    """The waiting program comes last: right with any number of resident programs."""
    rank = tdl.my_pe()
    peer = (rank + 1 + tl.program_id(0)) % WORLD
    mine = buffer + rank * nbytes
    if peer != rank:
        tdl.putmem_signal_block(mine, mine, nbytes, signals + rank, epoch, tdl.SIGNAL_SET, peer)
    else:
        tdl.wait_signals(signals, WORLD, rank, tdl.CMP_GE, epoch, monitor, WORLD)


@jit
def gather_by_threads(buffer, signals, nbytes, epoch, WORLD: tl.constexpr, FORM: tl.constexpr):
    """Gather as Triton-distributed's kernels do: threads wait for one signal each."""
    rank = tdl.my_pe()
    peer = tl.program_id(0)
    mine = buffer + rank * nbytes
    if peer != rank:
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
        tdl.syncthreads()
    elif FORM == "for":
        for i in range(tdl.tid(0), WORLD, tdl.ntid(0)):
            if i != rank:
                tdl.signal_wait_until(signals + i, tdl.CMP_EQ, epoch)


@jit
def pull(buffer, mine, nbytes, HOW: tl.constexpr):
    """Each rank gets every other's segment; whoever put it there has called a barrier."""
    peer = tl.program_id(0)
    source = mine
    dest = buffer + peer * nbytes
    if HOW == "get":
        tdl.getmem_block(dest, source, nbytes, peer)
    elif HOW == "get_nbi":  # not there yet when the kernel ends
        tdl.getmem_nbi_block(dest, source, nbytes, peer)
    else:
        tdl.getmem_nbi_block(dest, source, nbytes, peer)
        tdl.quiet()


@jit
def put_then_barrier(dest, source, nbytes, WORLD: tl.constexpr, HOW: tl.constexpr):
    """Put to the next rank; ``sync_all`` does not complete the put, ``barrier_all`` does."""
    rank = tdl.my_pe()
    tdl.putmem_nbi_block(dest, source, nbytes, (rank + 1) % WORLD)
    if HOW == "barrier_all":
        tdl.barrier_all_block()
    else:
        tdl.sync_all_block()


@jit
def put_by_another_program(dest, source, nbytes, done, flag, WORLD: tl.constexpr, HOW: tl.constexpr):
    """Program 0 puts into the next PE's memory. Program 1 knows that it has, and tells that PE or meets all."""
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
        elif HOW == "quiet":
            tdl.quiet()
            tl.store(tdl.remote_ptr(flag, following), 1)
            while tdl.ld_acquire(flag, "sys") == 0:
                pass
        else:
            if HOW == "fence":
                tdl.fence()
            tdl.signal_op(flag, 1, tdl.SIGNAL_SET, following)
            tdl.signal_wait_until(flag, tdl.CMP_EQ, 1)


@jit
def flagged(words, flag, monitor, torn, WHOLE: tl.constexpr):
    """PE 0 sends PE 1 words of 128 bits, whole or in two halves, the flag first; PE 1 counts those that came torn."""
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
def pull_stored(mine, source, out, signals, epoch, monitor, WORLD: tl.constexpr, HOW: tl.constexpr, GET: tl.constexpr):
    """Each rank stores 8 words to its own memory, tells the others, and reads theirs: ``out[rank]``, 8 words each."""
    rank = tdl.my_pe()
    index = tl.arange(0, 8)
    told = signals + epoch * WORLD
    if HOW == "copy, signal by the block":
        tdl.copy_block(mine, source, 64)
    else:
        tl.store(mine + index, tl.load(source + index))
    tdl.syncthreads()
    if HOW == "fence, signal by a thread":
        tdl.fence()
    elif HOW == "quiet, signal by a thread":
        tdl.quiet()
    for step in range(1, WORLD):
        peer = (rank + step) % WORLD
        if HOW == "release":
            tdl.st_release(tdl.remote_ptr(told + rank, peer), 1, "sys")
        elif HOW == "release on this GPU":
            tdl.st_release(tdl.remote_ptr(told + rank, peer), 1, "gpu")
        elif HOW == "relaxed":
            tdl.st(tdl.remote_ptr(told + rank, peer), 1, "sys")
        elif (HOW == "signal by the block") | (HOW == "copy, signal by the block"):
            tdl.signal_block(told + rank, 1, tdl.SIGNAL_SET, peer)
        elif HOW == "put with a signal":
            tdl.putmem_signal_block(mine + 8, mine + 8, 8, told + rank, 1, tdl.SIGNAL_SET, peer)
        elif tdl.tid(0) == 0:
            tdl.signal_op(told + rank, 1, tdl.SIGNAL_SET, peer)
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
    """PE 0 stores 1 to 4 to its word and adds 4; PE 1 looks at it: ``out``, 16 values, every fourth by an atomic."""
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
def clear_and_tell(box, told, answered, monitor, HOW: tl.constexpr, REPLY: tl.constexpr):
    """PE 0 clears two words of its own and tells PE 1, which fills them by REPLY, and answers."""
    index = tl.arange(0, 2)
    seven = tl.full([2], 7, tl.int64)
    if tdl.my_pe() == 0:
        tl.store(box + index, tl.zeros([2], tl.int64))
        if HOW == "fence":
            tdl.fence()
        elif HOW == "quiet":
            tdl.quiet()
        if HOW == "release":
            tdl.st_release(tdl.remote_ptr(told, 1), 1, "sys")
        elif HOW == "release on this GPU":
            tdl.st_release(tdl.remote_ptr(told, 1), 1, "gpu")
        elif HOW == "signal by the block":
            tdl.signal_block(told, 1, tdl.SIGNAL_SET, 1)
        elif HOW == "put with a signal":
            tdl.putmem_signal_block(box + 2, box + 2, 8, told, 1, tdl.SIGNAL_SET, 1)
        elif HOW == "signal by a thread":
            tdl.signal_op(told, 1, tdl.SIGNAL_SET, 1)
        else:
            tdl.st(tdl.remote_ptr(told, 1), 1, "sys")
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
            tdl.putmem_block(box, box, 16, 0)
        elif tdl.tid(0) == 0:
            tdl.signal_op(box, 7, tdl.SIGNAL_ADD, 0)
            tdl.signal_op(box + 1, 7, tdl.SIGNAL_SET, 0)
        tdl.signal_block(answered, 1, tdl.SIGNAL_SET, 0)


@jit
def last_one_tells(mine, counter, signal, out, monitor, PUSH: tl.constexpr, COUNT: tl.constexpr, HOW: tl.constexpr):
    """Each of PE 0's programs stores a word, in its own memory or to PE 1, and counts; the last signals to PE 1, which
    reads the words into ``out`` and answers; until then the launch goes on."""
    place = tl.program_id(0)
    n = tl.num_programs(0)
    if tdl.my_pe() == 0:
        tl.store((tdl.remote_ptr(mine, 1) if PUSH else mine) + place, 7)
        if tl.atomic_add(counter, 1, sem=COUNT, scope="gpu") == n - 1:
            if HOW == "fence":
                tdl.fence()
            elif HOW == "quiet":
                tdl.quiet()
            if HOW == "release":
                tdl.st_release(tdl.remote_ptr(signal, 1), 1, "sys")
            elif HOW == "signal by the block":
                tdl.signal_block(signal, 1, tdl.SIGNAL_SET, 1)
            else:
                tdl.signal_op(signal, 1, tdl.SIGNAL_SET, 1)
        tdl.wait_signal(signal + 1, tdl.CMP_EQ, 1, monitor, 1, 1)
    elif place == 0:
        tdl.wait_signal(signal, tdl.CMP_EQ, 1, monitor, 0, 0)
        index = tl.arange(0, 4)
        tl.store(out + index, tl.load((mine if PUSH else tdl.remote_ptr(mine, 0)) + index))
        tdl.signal_op(signal + 1, 1, tdl.SIGNAL_SET, 0)
