# SPDX-License-Identifier: Apache-2.0
"""
Notify and wait
===============

A GPU can write into the memory of another GPU and tell it that something has arrived. This tutorial starts with
the telling, a signal between neighbours, and then builds a small queue on it. You will learn

* what symmetric memory and signals are,
* four rules that keep the queue correct, and how it fails if you break one of them,
* what happens when the other side never answers.

Run it with the following command, or :doc:`from an installed wheel <index>`::

    bash launch.sh tutorials/01-notify-and-wait.py

which starts one process per GPU, or four simulated ones on a machine without GPUs. To leave out a rule and watch the
simulator catch it (`--help` lists the rules)::

    bash launch.sh --simulate --nproc 1 tutorials/01-notify-and-wait.py --break own-signal
"""

# %%
# Ranks, PEs and symmetric memory
# -------------------------------
#
# A job has `n_pes()` processes, one per GPU. NVSHMEM calls each of them a *PE*, and the number of a PE is its global
# rank. A *symmetric* tensor exists on every PE, at the same offset in that PE's heap. A kernel can therefore name
# memory on another PE by the address of its own copy and the number of the PE.
#
# `tdl` adds communication functions to Triton, and `tdcoll.jit` is `triton.jit` for kernels that use them.

import argparse
import os

import helpers
import torch
import triton.language as tl
from helpers import say

import tdcoll
import tdcoll.language as tdl

# %%
# A signal
# --------
#
# A *signal* is a 64-bit word of symmetric memory. Here every PE sets the word of its successor to 1 and then waits
# until its predecessor has set its own.
#
# NVSHMEM's function for this is `signal_op`, which updates the word once for each thread that calls it. Triton code
# runs on all threads of a block, so we use `signal_block`, which updates it once for the block.
#
# `wait_signal` holds the block until the word is at least 1. The wait has a deadline, which is kept by `monitor`. The
# last two arguments appear only in the error message: the PE that should have signalled, and the number of the signal.


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
# Now each PE sends *items* of WORDS numbers to its successor, through a ring of SLOTS slots in the successor's
# symmetric memory. This is the life of item i; time runs downwards::
#
#     producer on PE p                                consumer on PE p + 1
#     ----------------                                --------------------
#     wait until credits >= i + 1 - SLOTS
#     store the item to outbox
#     put outbox  ----------- data ---------------->  slots[i % SLOTS]
#                 ----------- then its signal ----->  arrived[i % SLOTS] = i + 1
#     go on with item i + 1                           wait until arrived[i % SLOTS] >= i + 1
#         ...                                         read the slot
#     credits += 1  <-------- signal ---------------  say that the slot is free
#
# A run of the simulator with two slots looks like this, with items counted from 1:
#
# .. image:: /figures/credits.svg
#    :alt: A queue with two slots: item 3 waits for the credit of item 1
#
# Every PE runs both sides at once: block 0 of the launch produces and block 1 consumes. The two never wait for each
# other on the same PE, and a grid of two blocks always fits on the GPU, so both are running whenever a peer waits for
# one of them.
#
# `putmem_signal_block` copies bytes to another PE and then updates a signal there. The queue is correct because of
# four rules. Each has a name for `--break`, and a parameter of the kernel that breaks it.
#
# 1. **own-signal: each slot has a signal of its own.** A put doesn't say when its bytes arrive. Its signal does: once
#    you see the signal, you see the bytes of *that* put, but not necessarily those of other puts, even earlier ones.
#    With one signal for all slots, the signal of item 2 could arrive before the bytes of item 1. (Another remedy is a
#    `fence()` between the puts.)
#
# 2. **at-least: waits compare with "at least".** The words count up for ever: `arrived[slot]` is set to the number of
#    the item, counted from 1, and `credits` grows with every item that is read. If the producer waited for "equal to
#    n" and the consumer was quicker, the word would already be past n when the producer looks, and the wait would
#    never end. Counting up has a second advantage: no word is reset between launches, which would be a race.
#
# 3. **credits: the producer fills a slot only after the consumer has read it.** The consumer adds 1 to the producer's
#    `credits` for every item that it has read. Item i (from 0) may go out if item i - SLOTS, which had the same slot,
#    was read, so it needs i + 1 - SLOTS credits.
#
# 4. **source: the outbox stays as it is until the put has read it.** `putmem_signal_block` returns when you may write
#    to `outbox` again. `putmem_signal_nbi_block` (non-blocking, implicit) returns at once, and you may not touch the
#    source until `quiet()` or until the receiver has answered.
#
# All threads of a block call a `_block` function together. The put may read any part of the item, and each thread has
# stored only its own part, so `syncthreads()` comes between the two. `signal_block` begins with such a barrier
# itself, so the credit goes out after all threads have read the slot.
#
# A wait that expires returns 0. The rest of the loop is then skipped, because it has no valid item to read or send.


@tdcoll.jit
def queue(
    slots, outbox, received, arrived, credits, monitor, begin, count,
    WORDS: tl.constexpr, SLOTS: tl.constexpr,
    SIGNALS: tl.constexpr, AT_LEAST: tl.constexpr, AHEAD: tl.constexpr, BLOCKING: tl.constexpr,
):  # fmt: skip
    me = tdl.my_pe()
    world = tdl.n_pes()
    word = tl.arange(0, WORDS)
    alive = tl.cast(1, tl.int32)
    COMPARE: tl.constexpr = tdl.CMP_GE if AT_LEAST else tdl.CMP_EQ
    if tl.program_id(0) == 0:  # the producer
        successor = (me + 1) % world
        for i in range(begin, begin + count):
            slot = slots + (i % SLOTS) * WORDS
            signal = arrived + i % SIGNALS
            if alive != 0:
                needed = tl.maximum(
                    i + 1 - AHEAD, 0
                )  # signals are unsigned: -1 would be a very large number
                alive = tdl.wait_signal(credits, COMPARE, needed, monitor, successor, SLOTS)
            if alive != 0:
                tl.store(outbox + word, me * 1000000 + i * 1000 + word)
                tdl.syncthreads()
                if BLOCKING:
                    tdl.putmem_signal_block(
                        slot, outbox, WORDS * 8, signal, i + 1, tdl.SIGNAL_SET, successor
                    )
                else:
                    tdl.putmem_signal_nbi_block(
                        slot, outbox, WORDS * 8, signal, i + 1, tdl.SIGNAL_SET, successor
                    )
    else:  # the consumer
        predecessor = (me + world - 1) % world
        for i in range(begin, begin + count):
            slot = slots + (i % SLOTS) * WORDS
            signal = arrived + i % SIGNALS
            if alive != 0:
                alive = tdl.wait_signal(signal, tdl.CMP_GE, i + 1, monitor, predecessor, i % SLOTS)
            if alive != 0:
                tl.store(received + i * WORDS + word, tl.load(slot + word))
                tdl.signal_block(credits, 1, tdl.SIGNAL_ADD, predecessor)


# %%
# A wait that never ends
# ----------------------
#
# A peer may have crashed, or may not take part at all. A kernel that then spins for ever can hardly be stopped from
# outside, so every wait in a kernel should have a deadline. No PE sends the signal that this kernel waits for:


@tdcoll.jit
def wait_in_vain(signal, monitor):
    tdl.wait_signal(signal, tdl.CMP_GE, 1, monitor, tdl.my_pe(), 0)


# %%
# The host's part
# ---------------
#
# `tdcoll.empty` allocates symmetric memory without initializing it. Signals have to be zero on a PE before any peer
# updates them. `tdcoll.zeros` makes sure of that, because it returns only when all ranks have their zeros.

WORDS, SLOTS, ITEMS = 256, 4, 24
KEPT = {"SIGNALS": SLOTS, "AT_LEAST": True, "AHEAD": SLOTS, "BLOCKING": True}
RULES = {
    "own-signal": ("each slot has a signal of its own", {"SIGNALS": 1}),
    "at-least": ("the wait for credits compares with 'at least'", {"AT_LEAST": False}),
    "credits": (
        "the producer fills a slot only after the consumer has read it",
        {"AHEAD": SLOTS + 1},
    ),
    "source": ("the outbox stays as it is until the put has read it", {"BLOCKING": False}),
}


class Queue:
    """The symmetric memory of the queue, and the tensor that collects what this rank receives."""

    def __init__(self, changes=()):
        self.constants = {"WORDS": WORDS, "SLOTS": SLOTS, **KEPT, **dict(changes)}
        self.slots = tdcoll.empty((SLOTS, WORDS), torch.int64, name="slots")
        self.outbox = tdcoll.empty(WORDS, torch.int64, name="outbox")
        self.arrived = tdcoll.zeros(SLOTS, torch.int64, name="arrived")
        self.credits = tdcoll.zeros(1, torch.int64, name="credits")
        self.hello = tdcoll.zeros(1, torch.int64, name="hello")
        self.never = tdcoll.zeros(1, torch.int64, name="never")  # no PE signals it
        self.received = torch.zeros((ITEMS, WORDS), dtype=torch.int64, device=tdcoll.device())

    def run(self, monitor, begin, count):
        queue[(2,)](
            self.slots, self.outbox, self.received, self.arrived, self.credits, monitor, begin, count,
            **self.constants,
        )  # fmt: skip


# %%
# Each number says which rank made it, for which item, and where in the item it stands. A wrong one therefore tells you
# what went astray.


def check_received(received, sender):
    """Raise if `received [ITEMS, WORDS]` is not exactly what rank `sender` produced."""
    item = torch.arange(ITEMS, device=received.device)[:, None]
    word = torch.arange(WORDS, device=received.device)
    wrong = (received != sender * 1000000 + item * 1000 + word).nonzero()
    if len(wrong):
        i, w = wrong[0].tolist()
        raise AssertionError(
            f"{len(wrong)} wrong words from rank {sender}; item {i}, word {w} is {received[i, w]}"
        )


# %%
# Breaking a rule
# ---------------
#
# On a quiet machine a queue that breaks a rule usually works, because the unlucky timing is rare. The simulator makes
# it common. A `World` runs all PEs in this process, and its seed decides who goes on when and which message arrives
# first. `--break` tries seed after seed until one fails. The same seed fails again in the same way, and `--seed`
# replays it. docs/simulator.md says how to test a kernel of your own like this.


def case(changes=()):
    """Return a case for `tdcoll.testing.explore`: the queue in two launches, on every PE."""

    def in_world(world):
        def host(pe):
            ring, monitor = Queue(changes), tdcoll.WaitMonitor()
            ring.run(monitor, 0, 9)
            ring.run(monitor, 9, ITEMS - 9)
            monitor.check()
            check_received(ring.received, (pe - 1) % world.n_pes)

        world.run(host)

    return in_world


# %%
# The whole program
# -----------------


def main(arguments=None):
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--die", type=int, metavar="RANK", help="this rank leaves in the middle of the queue"
    )
    options = helpers.parse(parser, arguments, RULES, case, n_pes=3)

    tdcoll.initialize()
    topology = tdcoll.topology()
    rank, world = topology.rank, topology.world_size
    ring = Queue()

    # The monitor holds the deadline, 30 s by default (`launch.sh --timeout`). If a wait expires, the kernel leaves a
    # record in memory that the host can read. `check()` waits for the current stream and raises what the record says.
    monitor = tdcoll.WaitMonitor()
    hello[(1,)](ring.hello, monitor)
    monitor.check()
    say(f"hello: each of {world} rank(s) was signalled by its predecessor")

    # Two launches on the same queue: the counters simply go on.
    half = ITEMS // 2
    ring.run(monitor, 0, half)
    if rank == options.die:
        os._exit(1)
    ring.run(monitor, half, ITEMS - half)
    monitor.check()
    check_received(ring.received, (rank - 1) % world)
    say(
        f"queue: {ITEMS} items of {WORDS * 8} bytes through {SLOTS} slots arrived exactly as they were sent"
    )

    # This monitor is impatient, to save you 30 s. `check()` would raise `CollectiveTimeout`, after which tdcoll
    # considers the job lost. `expired` only looks, and doesn't wait for the kernel, so `tdcoll.barrier()` does: it
    # waits for this rank's GPU and then for the other ranks.
    impatient = tdcoll.WaitMonitor(timeout_s=0.2)
    wait_in_vain[(1,)](ring.never, impatient)
    tdcoll.barrier()
    if not impatient.expired:
        raise AssertionError("a wait for a signal that no rank sends ended without expiring")
    say("deadline: a wait for a signal that no rank sends ended after 0.2 s, and the host knows")

    tdcoll.finalize()


# %%
# To see a peer die, let rank 1 leave in the middle::
#
#     bash launch.sh --timeout 2 --monitor-interval 60 tutorials/01-notify-and-wait.py --die 1
#
# The ranks that wait for it, directly or through others, raise `CollectiveTimeout`, which names the rank that waited,
# the peer, the signal, the value it should have reached and the value it had. A rank that has finished its own queue
# names the ranks that are missing at the next barrier. torchrun normally ends all processes as soon as one has died;
# the long interval gives the others time to report first, and the command ends only when it is over. Don't trust what
# torchrun calls the root cause: it is simply the first process that ended with an error.

if __name__ == "__main__":
    main()
