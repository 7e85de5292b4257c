# SPDX-License-Identifier: Apache-2.0
"""All-gather inside one node by direct stores: no call into NVSHMEM between the data and its signal.

Data flow, seen from rank r with a segment of ``nbytes`` bytes, cut into ``channels`` chunks of ``chunk`` bytes::

    source --stores--> staging[slot, r] on every other rank, chunk by chunk; then a release of the chunk's signal
    staging[slot, s] --copy--> out[s], for every other rank s, as soon as its signal is there;  source --> out[r]

What 1D does with ``putmem_signal_block``, with the same memory and signals: ``signals[slot, channel, s]`` on rank r is
set to the epoch by rank s, and polled by the program that copies that chunk out. The address of a peer's copy of a
symmetric address is that address plus ``deltas[peer]``.

Ordering: the block's stores of a chunk come before its barrier, and that before the release at system scope by one of
its threads; the receiver acquires the signal. Nothing else is relied on. Reuse of a slot is what
:mod:`tdcoll.context` says.

Order of programs: chunk by chunk, so that those of a large message are copied out while later ones are on their way.
Program i of a channel sends to the i-th successor and then waits for the i-th predecessor, whose program i sends to it;
so any number of resident blocks makes progress.

In place (``IN_PLACE``): the symmetric buffer takes the role of staging, and nothing is copied. The program of channel 0
first tells the rank that it waits for that this rank has entered the call (``ready``), and every program writes to a
rank only when that rank has told so.
"""

import triton.language as tl

import tdcoll.language as tdl
from tdcoll.collectives.protocol import begin_epoch, chunk_bytes, release
from tdcoll.language.jit import jit

__all__ = ["all_gather_direct"]


@jit(do_not_specialize=["source", "out", "staging", "nbytes", "chunk", "capacity", "rank", "channels"])
def all_gather_direct(
    source, out, staging, signals, ready, control, monitor, deltas, nbytes, chunk, capacity, rank, channels,
    WORLD: tl.constexpr, SLOT_SIGNALS: tl.constexpr, IN_PLACE: tl.constexpr,
):  # fmt: skip
    """``[nbytes] -> [WORLD * nbytes]`` inside one node. Programs: ``WORLD * channels``.

    Args: those of ``all_gather_1d`` (addresses are integers, so that one compilation serves all dtypes), and
        deltas: int64 ``[WORLD]``: from an address in this rank's symmetric memory to the same in each rank's.
    """
    channel = tl.program_id(0) // WORLD
    step = tl.program_id(0) % WORLD
    to = (rank + step) % WORLD
    frm = (rank - step + WORLD) % WORLD
    to_delta = tl.load(deltas + to)
    frm_delta = tl.load(deltas + frm)
    epoch, alive = begin_epoch(control, monitor)
    if alive == 0:
        return
    size = chunk_bytes(nbytes, chunk, channel)
    offset = tl.cast(channel, tl.int64) * chunk
    mine = tl.cast(source, tl.int64) + offset
    target = tl.cast(out, tl.int64) + offset
    landing = tl.cast(staging, tl.int64) + offset
    if not IN_PLACE:
        landing += (epoch % 2) * WORLD * capacity
    if step == 0:
        if not IN_PLACE:
            tdl.copy_block(target + tl.cast(rank, tl.int64) * nbytes, mine, size)
    else:
        row = signals + (epoch % 2) * SLOT_SIGNALS + channel * WORLD
        allowed = tl.cast(1, tl.int32)
        if IN_PLACE:
            if channel == 0:
                release(ready + rank, frm_delta, epoch)
            allowed = tdl.wait_signal(ready + to, tdl.CMP_GE, epoch, monitor, to, to)
        if allowed != 0:
            tdl.copy_block(landing + tl.cast(rank, tl.int64) * capacity + to_delta, mine, size)
            release(row + rank, to_delta, epoch)
            arrived = tdl.wait_signal(row + frm, tdl.CMP_GE, epoch, monitor, frm, channel * WORLD + frm)
            if not IN_PLACE:
                if arrived != 0:
                    theirs = landing + tl.cast(frm, tl.int64) * capacity
                    tdl.copy_block(target + tl.cast(frm, tl.int64) * nbytes, theirs, size)
