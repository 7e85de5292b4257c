# SPDX-License-Identifier: Apache-2.0
"""Kernels of a few lines that the simulator is tested with: one function of the language, or one rule of launches."""

import triton
import triton.language as tl

import tdcoll.language as tdl
from tdcoll.language.jit import jit


@jit
def else_of_threads(out):
    if tdl.tid(0) < 3:
        tl.atomic_add(out, 1)
    else:
        tl.atomic_add(out + 1, 1)
    if not (tdl.tid(0) < 3 or tdl.tid(0) > 5):
        tl.atomic_add(out + 2, 1)


@jit
def count_by_every_thread(signals):
    tdl.signal_op(signals, 1, tdl.SIGNAL_ADD, 0)


@jit
def count_by_one_thread(signals):
    if tdl.tid(0) == 0:
        tdl.signal_op(signals, 1, tdl.SIGNAL_ADD, 0)


@jit
def tid_as_value(out):
    tl.store(out + tdl.tid(0), 1)


@jit
def barrier(HOW: tl.constexpr):
    if HOW == "barrier_all":
        tdl.barrier_all_block()
    else:
        tdl.sync_all_block()


@jit
def add_up(total, flag, WORLD: tl.constexpr):
    """Every PE adds to PE 0's word; an integer to the next PE with int_p."""
    rank = tdl.my_pe()
    tdl.signal_block(total, rank + 1, tdl.SIGNAL_ADD, 0)
    tdl.int_p(flag, rank + 100, (rank + 1) % WORLD)
    tdl.quiet()


@jit
def wait_once(signal, value, monitor, result):
    tl.store(result, tdl.wait_signal(signal, tdl.CMP_GE, value, monitor, 7, 9))


@jit
def wait_by_token(signal, value, monitor, data, result):
    token = tdl.wait_token(signal, tdl.CMP_GE, value, monitor, 7, 9)
    tl.store(result, tdl.consume_token(tl.load(tdl.consume_token(data, token)), token))
    tl.store(result + 1, token.to(tl.int64))


@triton.jit
def of_triton(out, word, monitor, HOW: tl.constexpr):
    """Launched as it is: NVSHMEM would be missing on a GPU."""
    if HOW == "my_pe":
        tl.store(out, tdl.my_pe())
    elif HOW == "remote_ptr":
        tl.store(tdl.remote_ptr(word, 0), 1)
    elif HOW == "signal_block":
        tdl.signal_block(word, 1, tdl.SIGNAL_SET, 0)
    elif HOW == "a helper":
        put(word, word, 8, 0)
    else:  # needs none
        tdl.syncthreads()
        tdl.wait_signal(word, tdl.CMP_GE, 0, monitor, 0, 0)
        tdl.st(word, 7, "sys")
        tl.store(out, tdl.ld(word, "sys").to(tl.int32))


@jit
def calls_of_triton(out, word, monitor, HOW: tl.constexpr):
    of_triton(out, word, monitor, HOW)


@jit
def see_grid(out, x, y):
    i, j, k = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    tl.store(out + i + x * (j + y * k), tl.num_programs(0) * 100 + tl.num_programs(1) * 10 + tl.num_programs(2))


@jit
def _square(value):
    return value * value


@jit
def nested(out, n, FLAG: tl.constexpr):
    for i in range(n):
        tl.store(out + i, _square(i))
    if FLAG:
        tl.store(out, 7)


@jit
def fails(out, PE: tl.constexpr):
    if tdl.my_pe() == PE:
        if tl.program_id(0) == 1:
            tdl.signal_block(out, 1, 77, 0)


@jit
def put(dest, source, nbytes, pe):
    tdl.putmem_block(dest, source, nbytes, pe)


@jit
def put_signal(dest, source, nbytes, signal, pe):
    tdl.putmem_signal_block(dest, source, nbytes, signal, 1, tdl.SIGNAL_SET, pe)


@jit
def store_to(pointer, pe):
    tl.store(tdl.remote_ptr(pointer, pe), 5)


@jit
def launch_flag(flag, out):
    """One program per launch waits for another through ordinary memory."""
    if tl.program_id(0) == 0:
        while tl.load(flag) == 0:
            pass
        tl.store(out, 1)
    else:
        tl.atomic_add(flag, 1)


CALL = None
"""What ``call`` calls."""


@jit
def call(pointer):
    CALL(pointer)


@jit
def unsigned(signals, monitor, out):
    """Word 0 is 2**64 - 1."""
    tl.store(out, tdl.signal_wait_until(signals, tdl.CMP_GT, 5).to(tl.int64, bitcast=True))
    tl.store(out + 1, tdl.wait_signals(signals, 1, -1, tdl.CMP_EQ, -1, monitor, 1))


@jit
def store_and_read_back(pointer, out, pe):
    remote = tdl.remote_ptr(pointer, pe)
    tdl.st(remote, 5, "sys")
    tdl.st(remote + 1, 6, "sys")
    tl.store(out, tl.load(remote))
    tl.store(out + 1, tdl.ld(remote + 1, "sys"))


@jit
def add_to_0(word):
    tdl.signal_block(word, 1, tdl.SIGNAL_ADD, 0)
    tl.atomic_add(tdl.remote_ptr(word, 0), 1)


@jit
def wait_for_ever(signal):
    tdl.signal_wait_until(signal, tdl.CMP_GE, 1)


@jit
def spin_for_ever(signal):
    while tl.load(signal, volatile=True) == 0:
        pass


@jit
def times_100000(out, n):
    tl.store(out, n * 100000)
    tl.device_assert(n <= 5, "at most five")


@jit
def flagged_but_every_third(words, flag, monitor, out):
    """PE 0 sends PE 1 eight words of 128 bits without 1, 4 and 7; PE 1: ``-> [4, 8]`` data, and whether it came."""
    place = tl.arange(0, 8)
    if tdl.my_pe() == 0:
        theirs = tdl.remote_ptr(words, 1) + 2 * place
        tdl.store_flagged(theirs, place + 10, place - 10, place * place, flag, place % 3 != 1)
    else:
        first, second, third, arrived = tdl.wait_flagged(words + 2 * place, flag, place != 7, monitor, 0)
        tl.store(out + place, first)
        tl.store(out + 8 + place, second)
        tl.store(out + 16 + place, third)
        tl.store(out + 24 + place, arrived)


@jit
def call_two(pointer, other):
    CALL(pointer, other)


@jit
def _of_two(first, second):
    return first + second


@jit
def caller(out):
    tl.store(out, _of_two(1))


@jit
def calls_a_caller(out):
    caller(out)
