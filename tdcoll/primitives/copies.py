# SPDX-License-Identifier: Apache-2.0
"""Calls whose data is moved by copy engines, inside one node: what runs on multiprocessors before
and after the copies.

Scope: one node whose ranks can address each other's memory; large messages, and calls beside
compute, because the copies take no multiprocessor. The host issues the copies
(:mod:`tdcoll.calls.copies`). The kernels here have one thread block and only send and await
signals, except :func:`sum_copies`, which reduces with any number.

Data flow of a call, seen from rank r. Its *hops* are pushed or pulled::

    enter: begin the epoch; entered --> every other rank; wait until all have entered; write the epoch to stamps[0]
    one stream for each other rank p, when enter has ended:
        pushed: data for p --copy engine--> inbox[0, r] of rank p
        pulled: data of p, in the caller's symmetric memory --copy engine--> the same place of rank r's
        then stamps[hop] --copy of 8 bytes--> arrived[0, hop, r] on rank p
    wait_arrivals: wait until the stamps of all other ranks are here;  pulled: has a peer given up?
    pushed: copies or a sum take the data out of the inbox
    check_peers_alive: has a peer given up?

A hop is pulled if the data has to land in the caller's memory, and pushed otherwise. A copy thus
writes to memory of its own rank, or to an inbox, whose readers look who has given up. An all-reduce
has two hops: parts, which are pushed, and after their sum the sums. If these are pulled, the sum's
last thread block does for them what ``enter`` does for the first hop.

Signal map: ``entered[s]`` on rank r is set to the epoch by rank s, and polled by ``enter``.
``arrived[0, hop, s]`` is written by the copy of rank s's stamp, and polled by ``wait_arrivals``.
``expired_epochs[s]`` is set by ``enter`` or ``wait_arrivals`` of rank s. If the sums are pulled,
``arrived[0, 1, s]`` is set twice: to the epoch by ``sum_copies`` of rank s when its sum is there,
which is polled by ``sum_copies``, and then to one more by the stamp. (The next call in this slot
has an even epoch, which is larger.)

A stamp says that the data which was copied before it is good. Each hop has its own, and the kernel
that makes that hop's data good writes it: ``enter`` for the caller's data, when all ranks have
entered; ``sum_copies`` for the sums, when all of its thread blocks have summed, and none of them
has given up, been ended by the host, or found a peer that has given up. Copies that are queued run
in any case, and then carry the stamp of an earlier call. A pulled hop's stamp says that rank r has
taken the data of rank p, which may be overwritten when all stamps have come.

Ordering: a copy on a stream begins when the one before it has ended, so the stamp arrives after the
data, also as seen from the GPU that is written to. That is an assumption, which
``tests/workers/copies_checks.py`` tests.

Why addresses are fixed: a captured copy has the addresses with which it was captured, and the epoch
is only known on the device. Calls by copies therefore take even epochs only
(:func:`~tdcoll.primitives.group.begin_even_epoch`), so there is one buffer, the first slot, and the
value that is sent is read from memory when the copy runs.

Why memory may be used again. The inbox: a rank writes to a peer only when that peer has entered the
same call, so all earlier work on the peer's stream is over, and with it whatever read the inbox.
The source of a push: later work on the rank's stream comes after the copies. The source of a pull:
``wait_arrivals`` ends when all peers have taken the data. An odd epoch that is left out has no
signals and no data. A stamp is written again by the next call, which comes after this call's copies
on the stream.

A rank that gives up, or whose host ends its waits: queued copies, also those of later calls, can't
be held back.

- Pushed data goes to inboxes. If ``enter`` finds that a wait has expired, or its own expires, it
  tells its peers before it ends, hence before the copies run, and leaves the stamp as it is. Peers
  then wait in vain for this epoch and time out as well. One that still takes data of the call
  before out of its inbox finds in ``check_peers_alive`` that it may have been overwritten: see
  :mod:`tdcoll.primitives.stores`. A rank that gives up between two hops need not tell: its second
  push is to memory that the peer, which has entered this call, reads only when the stamp has come.
- Pulled data goes to memory of the rank itself. But work behind the call may then overwrite what
  a late peer still pulls, which has this rank's stamp already. ``wait_arrivals`` of a pulled hop
  therefore tells when it gives up, and looks when this rank's own pulls are over.

``wait_arrivals`` and ``check_peers_alive`` need not ask whether a wait has expired before: they
send no good news, and a wait of theirs ends at once if one has.

A host that is interrupted launches ``wait_arrivals`` of a pulled hop all the same, so that no work
comes before it (:mod:`tdcoll.calls.copies`). Kernels of other algorithms, which may have used the
inbox in the epoch before, don't look who has given up: ``check()`` of the context does it for them.

If contexts share a hardware queue (``CUDA_DEVICE_MAX_CONNECTIONS``, 8 by default; a call has a
stream for each peer), work that waits behind an event holds up whatever is behind it in the queue,
also on other streams. All ranks must then make the calls of these contexts in one order.

Order of thread blocks: ``enter`` sends before it waits, and waits only for ``enter`` on other
ranks. ``wait_arrivals`` waits for copies, which need no thread block. The thread block of
``sum_copies`` that waits is the last of its launch that has anything to do, and those that it waits
for wait for nothing before they signal. No kernel here waits for another one of the same rank.
"""

import triton.language as tl

import tdcoll.language as tdl
from tdcoll.language.jit import jit
from tdcoll.primitives import stores
from tdcoll.primitives.group import begin_even_epoch, leaves_last, row, still_alive, this_epoch
from tdcoll.primitives.sums import reduce_chunk


@jit
def enter(g, stamps, summed, WORLD_POW2: tl.constexpr):
    """Begin a call, and end when every rank has entered it. One thread block.

    Args:
        g: :class:`~tdcoll.primitives.group.Group`.
        stamps: int64 ``[2]``, for each hop what is copied to the peers behind its data, or the
            value of an earlier call if the data is not good.
        summed: int32 ``[1]``: thread blocks of :func:`sum_copies` that have done their part of this
            call.
        WORLD_POW2: a power of two of at least ``world``.
    """
    epoch, entered = begin_even_epoch(g.control, g.monitor)
    tl.store(summed, 0)
    if entered != 0:
        stores.release_to_all(g, g.entered + g.rank, epoch)
        entered = tdl.wait_signals(
            g.entered, g.world, g.rank, tdl.CMP_GE, epoch, g.monitor, WORLD_POW2
        )
    if entered != 0:
        tl.store(stamps, epoch)
    else:
        stores.signal_expired(g, epoch)


@jit
def wait_arrivals(g, hop: tl.int32, PULLED: tl.constexpr, WORLD_POW2: tl.constexpr):
    """Wait until the stamp of every other rank is here. One thread block.

    Args:
        hop: of the call, 0 or 1.
        PULLED: the hop is. Find out whether a peer has given up, because what it offered may have
            been overwritten before it was pulled; and tell the peers if this rank gives up, which
            may yet pull what it offers.
    """
    epoch = this_epoch(g.control)
    stamp = epoch
    if PULLED:
        stamp += hop
    heard = tdl.wait_signals(
        row(g, epoch, hop), g.world, g.rank, tdl.CMP_GE, stamp, g.monitor, WORLD_POW2
    )
    if PULLED:
        if heard != 0:
            heard = stores.no_peer_expired(g, WORLD_POW2)
        if heard == 0:
            stores.signal_expired(g, epoch)


@jit
def check_peers_alive(g, WORLD_POW2: tl.constexpr):
    """Find out whether a peer has given up, when the inbox has been read. One thread block."""
    stores.no_peer_expired(g, WORLD_POW2)


@jit
def sum_copies(
    source: tl.int64, out: tl.int64, inbox, g, stamps, summed, nbytes: tl.int64, at: tl.int64,
    placement, extra,
    DTYPE: tl.constexpr, ACC: tl.constexpr, OP: tl.constexpr, TILE: tl.constexpr, WORLD_POW2: tl.constexpr,
    EPILOGUE: tl.constexpr, WHOLE: tl.constexpr, PULLED: tl.constexpr,
):  # fmt: skip
    """Sum what all ranks have sent to this one, in rank order: ``nbytes`` bytes. Any number of
    thread blocks.

    The last thread block that is done with its part writes the second hop's stamp. One that gives
    up is not counted, so there is no last one then.

    Args:
        source: this rank's tensor, whose part begins ``at`` bytes behind it.
        out: the result.
        inbox: :class:`~tdcoll.primitives.group.Inbox` of two slots.
        stamps, summed: as for :func:`enter`, which has set ``summed`` to 0.
        placement, extra, EPILOGUE: see :mod:`tdcoll.primitives.epilogue`; None without an epilogue.
        WHOLE: the part of the result begins ``at`` bytes behind ``out``, too.
        PULLED: the peers pull the sum. The last thread block tells them that it is there, and waits
            for theirs.
        DTYPE, ACC, OP, TILE, WORLD_POW2: as for ``reduce_scatter_direct``.
    """
    if still_alive(g.monitor) != 0:
        own = source + at
        to = out + at if WHOLE else out
        aligned = (own | to | nbytes) % 16 == 0
        epoch = this_epoch(g.control)
        worker, workers = tl.program_id(0), tl.num_programs(0)
        reduce_chunk(
            worker,
            workers,
            own,
            to,
            0,
            nbytes,
            inbox,
            g,
            None,
            epoch,
            aligned,
            (EPILOGUE, placement, extra),
            DTYPE,
            ACC,
            OP,
            TILE,
        )
        if stores.no_peer_expired(g, WORLD_POW2) != 0:
            if leaves_last(summed, workers):
                if PULLED:
                    sums = row(g, epoch, 1)
                    stores.release_to_all(g, sums + g.rank, epoch)
                    if (
                        tdl.wait_signals(
                            sums, g.world, g.rank, tdl.CMP_GE, epoch, g.monitor, WORLD_POW2
                        )
                        != 0
                    ):
                        tl.store(stamps + 1, epoch + 1)
                else:
                    tl.store(stamps + 1, epoch)
