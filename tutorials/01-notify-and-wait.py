# SPDX-License-Identifier: Apache-2.0
"""
Notify and wait
===============

A GPU can write into another GPU's memory, and it can tell the other one that it has. This tutorial does the
second first: a signal between neighbours, then a small queue built on it. You will learn

* what symmetric memory and signals are,
* why data needs a signal of its own, and why waits compare with "at least",
* how a receiver keeps a sender from overwriting what it has not read yet,
* what happens when the other side never answers.

Run it with

    bash launch.sh tutorials/01-notify-and-wait.py

which starts one process per GPU, or four simulated ones on a machine without GPUs.
"""

# %%
# Ranks, PEs and symmetric memory
# -------------------------------
#
# A job has `n_pes()` processes, one per GPU; NVSHMEM calls each of them a *PE*, and PE and global rank are
# the same number. A *symmetric* tensor has a copy on every PE at the same place of its heap. So a kernel
# names memory of another PE by the address of its own copy and the PE: "the same thing, over there".
#
# `tdl` is what a kernel may say beyond Triton itself. `tdcoll.jit` is `triton.jit` that knows about it.

import argparse
import os

import torch
import triton.language as tl

import tdcoll
import tdcoll.language as tdl

# %%
# A signal
# --------
#
# A *signal* is one 64-bit word of symmetric memory. Here every PE sets the word of its successor to 1 and
# then waits for its own, which its predecessor sets. NVSHMEM's call for that is `signal_op`; each thread that
# executes it updates the word once. A Triton program is a block of threads, and `signal_block` does it once
# for all of them.
#
# `wait_signal` holds the whole program until the word is at least 1. It has a deadline, which is why it takes
# a `monitor`, and it takes two numbers that only serve the error message: who should have signalled, and
# which signal.


@tdcoll.jit
def hello(signals, monitor):
    me = tdl.my_pe()
    world = tdl.n_pes()
    tdl.signal_block(signals, 1, tdl.SIGNAL_SET, (me + 1) % world)
    tdl.wait_signal(signals, tdl.CMP_GE, 1, monitor, (me + world - 1) % world, 0)


# %%
# A queue
# -------
#
# Now the successor gets *items* of WORDS numbers each, through a ring of SLOTS slots in its symmetric memory.
# Program 0 of every launch produces, program 1 consumes, so both run on every PE at the same time: the two
# wait for each other (on different PEs), and a grid that small is always resident as a whole.
#
# The producer computes an item in `outbox` and sends it with `putmem_signal_block`: copy these bytes to that
# PE, then update that signal there. Four rules are at work.
#
# 1. *Data before signal.* A put says nothing about when its bytes arrive. The signal of a put+signal is the
#    promise: who has seen it sees these bytes. It promises nothing about other puts, even earlier ones.
#    Therefore each slot has a signal of its own, `arrived[slot]`. With one counter for all slots, item 2's
#    signal could be seen before item 1's bytes; a `fence()` between the puts would be needed.
#
# 2. *At least, not equal.* `arrived[slot]` is set to the number of the item, counted from 1, and grows for
#    ever; so do the credits below. A wait for "equal to n" never ends when the word has moved on before it
#    looks, as the credits do whenever the consumer is quicker. A wait for "at least n" is right whenever it
#    looks. And counters that only grow need no reset between launches; a reset is a race.
#
# 3. *Credits.* The producer may fill a slot again only when the consumer has read it. The consumer adds 1 to
#    the producer's `credits` for every item it has read, and item number i (from 0) needs i + 1 - SLOTS of
#    them. Adding is the right operation here: two signals may arrive in either order, so *setting* a count
#    could make it go back, while sums do not care. (`arrived[slot]` may be set, because the next signal for
#    that slot waits for a credit in between.)
#
# 4. *The source.* `putmem_signal_block` returns when `outbox` may be written again. Its sibling
#    `putmem_signal_nbi_block` ("non-blocking, implicit") returns at once, and the source must stay as it is
#    until `quiet()`, or until the receiver has answered. With one outbox for all items that would be a bug.
#
# All threads of the block call a `_block` function together. `syncthreads()` comes before the put because
# each thread stored a part of the item and the put may read any of it. `signal_block` begins with such a
# barrier itself, so the credit goes out after all threads have read the slot.
#
# A wait that has given up returns 0. Nothing may be read or sent then; the rest of the loop is skipped.


@tdcoll.jit
def produce(slots, outbox, arrived, credits, monitor, begin, count, WORDS: tl.constexpr, SLOTS: tl.constexpr):
    me = tdl.my_pe()
    successor = (me + 1) % tdl.n_pes()
    word = tl.arange(0, WORDS)
    alive = tl.cast(1, tl.int32)
    for i in range(begin, begin + count):
        if alive != 0:
            # A signal is unsigned: -1 would be a very large number of credits.
            needed = tl.maximum(i + 1 - SLOTS, 0)
            alive = tdl.wait_signal(credits, tdl.CMP_GE, needed, monitor, successor, SLOTS)
        if alive != 0:
            tl.store(outbox + word, me * 1000000 + i * 1000 + word)
            tdl.syncthreads()
            slot = i % SLOTS
            target = slots + slot * WORDS
            tdl.putmem_signal_block(target, outbox, WORDS * 8, arrived + slot, i + 1, tdl.SIGNAL_SET, successor)


@tdcoll.jit
def consume(slots, received, arrived, credits, monitor, begin, count, WORDS: tl.constexpr, SLOTS: tl.constexpr):
    world = tdl.n_pes()
    predecessor = (tdl.my_pe() + world - 1) % world
    word = tl.arange(0, WORDS)
    alive = tl.cast(1, tl.int32)
    for i in range(begin, begin + count):
        slot = i % SLOTS
        if alive != 0:
            alive = tdl.wait_signal(arrived + slot, tdl.CMP_GE, i + 1, monitor, predecessor, slot)
        if alive != 0:
            tl.store(received + i * WORDS + word, tl.load(slots + slot * WORDS + word))
            tdl.signal_block(credits, 1, tdl.SIGNAL_ADD, predecessor)


@tdcoll.jit
def queue(
    slots, outbox, received, arrived, credits, monitor, begin, count, WORDS: tl.constexpr, SLOTS: tl.constexpr
):  # fmt: skip
    if tl.program_id(0) == 0:
        produce(slots, outbox, arrived, credits, monitor, begin, count, WORDS, SLOTS)
    else:
        consume(slots, received, arrived, credits, monitor, begin, count, WORDS, SLOTS)


# %%
# A wait for nobody
# -----------------
#
# What if the peer has crashed, or does not take part? A GPU that spins for ever can hardly be stopped from
# outside, so a wait in a kernel should have an end. Here no one ever sends the signal:


@tdcoll.jit
def wait_for_nobody(signal, monitor):
    tdl.wait_signal(signal, tdl.CMP_GE, 1, monitor, tdl.my_pe(), 0)


# %%
# The host's part
# ---------------
#
# `tdcoll.empty` gives symmetric memory, uninitialised. All ranks must have zeroed their signals before
# anybody sends one: `tdcoll.zeros` gives zeros, and returns when all ranks have them.

WORDS, SLOTS, ITEMS = 256, 4, 24


class Queue:
    """The symmetric memory of the queue, and where this rank collects what it gets."""

    def __init__(self):
        self.slots = tdcoll.empty((SLOTS, WORDS), torch.int64)
        self.outbox = tdcoll.empty(WORDS, torch.int64)
        # SLOTS times `arrived`, then `credits`, then one word for hello and one for nobody.
        self.signals = tdcoll.zeros(SLOTS + 3, torch.int64)
        self.received = torch.zeros((ITEMS, WORDS), dtype=torch.int64, device=tdcoll.device())
        self.arrived, self.credits, self.hello, self.nobody = self.signals.split([SLOTS, 1, 1, 1])

    def run(self, monitor, begin, count):
        queue[(2,)](
            self.slots, self.outbox, self.received, self.arrived, self.credits, monitor.words,
            begin, count, WORDS=WORDS, SLOTS=SLOTS,
        )  # fmt: skip


# %%
# Each number says who made it, in which item and where in it, so that whatever goes astray shows.


def check_received(received, sender):
    """Raise if ``received [ITEMS, WORDS]`` is not exactly what rank ``sender`` produced."""
    item = torch.arange(ITEMS, device=received.device)[:, None]
    word = torch.arange(WORDS, device=received.device)
    wrong = (received != sender * 1000000 + item * 1000 + word).nonzero()
    if len(wrong):
        i, w = wrong[0].tolist()
        raise AssertionError(f"{len(wrong)} wrong words from rank {sender}; item {i}, word {w} is {received[i, w]}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--die", type=int, metavar="RANK", help="this rank leaves in the middle of the queue")
    options = parser.parse_args()

    tdcoll.initialize()
    topology = tdcoll.topology()
    rank, world = topology.rank, topology.world_size
    ring = Queue()

    def say(text):
        tdcoll.barrier()  # so that it is true of all ranks: one that failed is not here
        if rank == 0:
            print(text, flush=True)

    # The monitor holds the deadline, 30 s if nothing else is said (`launch.sh --timeout`). If a wait expires,
    # the kernel leaves a record in memory that the host can read. `check()` waits for the current stream and
    # raises what the record says.
    monitor = tdcoll.WaitMonitor()
    hello[(1,)](ring.hello, monitor.words)
    monitor.check()
    say(f"hello: each of {world} rank(s) was signalled by its predecessor")

    # Two launches on the same queue: the counters go on where they were.
    half = ITEMS // 2
    ring.run(monitor, 0, half)
    if rank == options.die:
        os._exit(1)
    ring.run(monitor, half, ITEMS - half)
    monitor.check()
    check_received(ring.received, (rank - 1) % world)
    say(f"queue: {ITEMS} items of {WORDS * 8} bytes through {SLOTS} slots arrived exactly as they were sent")

    # An impatient monitor, so that you need not wait 30 s. `check()` would raise `CollectiveTimeout`, after which
    # tdcoll takes the job for lost. `expired` only looks and does not wait, so the kernel has to be over;
    # `tdcoll.barrier()` waits for this rank's GPU, and then for the other ranks.
    impatient = tdcoll.WaitMonitor(timeout_s=0.2)
    wait_for_nobody[(1,)](ring.nobody, impatient.words)
    tdcoll.barrier()
    if not impatient.expired:
        raise AssertionError("a wait for a signal that nobody sends came to an end without expiring")
    say("deadline: a wait for a signal that nobody sends ended after 0.2 s, and the host knows")

    tdcoll.finalize()


# %%
# To see the real thing, let rank 1 leave in the middle:
#
#     bash launch.sh --timeout 2 --monitor-interval 10 tutorials/01-notify-and-wait.py --die 1
#
# The ranks that wait for it, or for one that waits, raise `CollectiveTimeout`, which says who waited for whom,
# for which signal, what value it had to reach and what it was; a rank whose own queue is done says which ranks
# did not come to the next barrier. (torchrun ends all processes as soon as it notices that one has died; the long
# interval lets the others speak first. What it then calls the root cause is whoever ended first with an error.)
#
# What goes wrong when one of the four rules is broken depends on timing, and on a quiet machine it is often
# nothing. The simulator can be made to try unkind timings on purpose: see docs/simulator.md.

if __name__ == "__main__":
    main()
