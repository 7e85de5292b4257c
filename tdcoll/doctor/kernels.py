# SPDX-License-Identifier: Apache-2.0
"""Kernels of the functional test: the least that shows that data and signals cross every link, in order.

- :func:`to_all`: every PE puts its block, with a signal, to every PE::

      boxes[s] on PE d  <-  source on PE s        signals[s] on PE d: s writes 1, d polls

- :func:`ring`: a token goes round as often as asked, started by PE 0; every PE forwards it when it has it, as a put
  with a signal that counts the laps. So one hop ends before the next begins, and time by hops is the latency of one::

      box on PE me + 1  <-  source on PE me       signal on PE me + 1: me writes the lap, me + 1 polls

A signal belongs to the put that brings it, so no fence is needed. Signals of different laps are not ordered by
themselves, but the signal of a lap leaves only after that of the lap before has gone all the way round. All waits are
bounded; after one that has expired nothing more is sent.
"""

from __future__ import annotations

import triton.language as tl

import tdcoll
import tdcoll.language as tdl


@tdcoll.jit
def to_all(boxes, source, signals, monitor, nbytes):
    """boxes ``[world, nbytes]`` and signals ``[world]``, all 0 before, symmetric. One program."""
    me = tdl.my_pe()
    world = tdl.n_pes()
    target = boxes + me.to(tl.int64) * nbytes
    for distance in tl.range(0, world):
        tdl.putmem_signal_block(target, source, nbytes, signals + me, 1, tdl.SIGNAL_SET, (me + distance) % world)
    alive = tl.cast(1, tl.int32)
    for distance in tl.range(0, world):
        peer = (me + distance) % world
        if alive != 0:
            alive = tdl.wait_signal(signals + peer, tdl.CMP_GE, 1, monitor, peer, peer)


@tdcoll.jit
def ring(box, source, signal, monitor, nbytes, first, laps):
    """box ``[nbytes]`` and signal ``[1]``, which is ``first`` before, symmetric. One program."""
    me = tdl.my_pe()
    world = tdl.n_pes()
    successor = (me + 1) % world
    predecessor = (me + world - 1) % world
    alive = tl.cast(1, tl.int32)
    for lap in tl.range(0, laps):
        value = first + lap + 1
        if me != 0:
            if alive != 0:
                alive = tdl.wait_signal(signal, tdl.CMP_GE, value, monitor, predecessor, 0)
        if alive != 0:
            tdl.putmem_signal_block(box, source, nbytes, signal, value, tdl.SIGNAL_SET, successor)
        if me == 0:
            if alive != 0:
                alive = tdl.wait_signal(signal, tdl.CMP_GE, value, monitor, predecessor, 0)
