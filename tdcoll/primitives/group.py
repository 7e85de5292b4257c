# SPDX-License-Identifier: Apache-2.0
"""A context as kernels see it: the ranks, the number of this call, the signals, and the memory that
peers write to.

Every launch of a protocol calls :func:`start` once in each of its programs, which returns the epoch
and counts it. The epoch selects one of two *slots* of signals and memory, which
:mod:`tdcoll.calls.context` says when to reuse.

Signals are named by their role. ``arrived[slot, chunk, r]`` is set to the epoch by the rank that
delivers chunk ``chunk_index`` of rank r here, and polled here. ``entered[r]`` is set to the epoch
by rank r when it has begun a call in which peers write to memory of the caller's, and polled here
before that memory of rank r is written. ``expired_epochs[r]`` is set by rank r, once and for all,
if it gives up while copies are queued, and checked here when what they may overwrite has been read;
see :mod:`tdcoll.primitives.stores`.
"""

from collections.abc import Iterable
from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch
import triton.language as tl

import tdcoll.language as tdl
from tdcoll.base.limits import MAX_BLOCKS
from tdcoll.language import INTERPRETED
from tdcoll.language.jit import jit
from tdcoll.runtime.topology import Topology

EPOCH_SHIFT = tl.constexpr(MAX_BLOCKS.bit_length() - 1)
"""The control word holds the number of finished epochs above this bit, and the progress of the next
one below it."""
_EPOCH = tl.constexpr(1 << EPOCH_SHIFT.value)


class Group(NamedTuple):
    """The ranks of a context, seen from one of them: ``ctx.device_group``.

    Attributes:
        arrived: int64 ``[2, chunks, world]``, symmetric.
        entered: int64 ``[world]``, symmetric.
        expired_epochs: int64 ``[world]``, symmetric: 0, or ``EXPIRED`` plus the epoch in which that
            rank gave up.
        control: int64 ``[1]``: the epoch.
        monitor: int64 ``[4]``: deadline of waits.
        deltas: int64 ``[world]``: from an address in the context's memory to the same on each
            peer-accessible rank.
        rank: group rank.
        chunks, world: sizes of ``arrived``.
    """

    arrived: Any
    entered: Any
    expired_epochs: Any
    control: Any
    monitor: Any
    deltas: Any
    rank: tl.int32
    chunks: tl.constexpr
    world: tl.constexpr


class Inbox(NamedTuple):
    """Symmetric memory of every rank that its peers write to: rank r fills its segment ``[slot,
    r]``.

    Attributes:
        base: its address here.
        stride: bytes from the segment of one rank to that of the next.
        deltas: int64 ``[world]``: from an address in it to the same on each peer-accessible rank.
        slots: 2 of the context's own memory; 1 of a buffer of the caller's, ``[r]``, which peers
            may write to only when its owner has entered the call.
    """

    base: tl.int64
    stride: tl.int64
    deltas: Any
    slots: tl.constexpr


class Nodes(NamedTuple):
    """The PEs and nodes of a group's ranks; made by :func:`nodes_of`.

    Attributes:
        pes: int32 ``[world]``: PE of each rank.
        of: int32 ``[world]``: node of each rank.
        begins, ranks: int32 ``[n_nodes + 1]``, ``[world]``: the ranks of node n are
            ``ranks[begins[n]:begins[n + 1]]``.
        node: this rank's.
        n_nodes: how many.
        world: ranks; not a constant as in the group, because unrolled loops over ranks would take
            twice the registers.
    """

    pes: Any
    of: Any
    begins: Any
    ranks: Any
    node: tl.int32
    n_nodes: tl.int32
    world: tl.int32


def nodes_of(topology: Topology, device: torch.device) -> Nodes:
    """Return a group's :class:`Nodes`, on the device."""

    def table(values: Iterable[int]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=device)

    sizes = (len(members) for members in topology.members)
    return Nodes(
        table(topology.pes),
        table(topology.nodes),
        table(accumulate(sizes, initial=0)),
        table(chain.from_iterable(topology.members)),
        topology.node,
        topology.n_nodes,
        topology.world_size,
    )


if INTERPRETED:

    @jit
    def in_stream_order():
        """Nothing: in the simulator a launch begins when the one before it on its PE has ended."""

else:
    from tdcoll.language.ptx import stream_order as in_stream_order
in_stream_order.__doc__ = """Wait until all earlier launches on the stream have ended.

The first statement of a kernel that may use programmatic dependent launch (PDL): its blocks then start while the last
ones of the launch before still run, and wait here until that is over and its stores are visible. Then they let the next
launch begin likewise. Protocols are the same with it and without, because no access to memory comes before.
:mod:`tdcoll.calls.kernel_launch` lists the kernels, and explains why none waits forever.
"""


@jit
def this_program():
    """Return ``(program, programs)``: this program's number and the number of all, over all
    dimensions of the grid."""
    programs = tl.num_programs(0) * tl.num_programs(1) * tl.num_programs(2)
    program = tl.program_id(0) + tl.num_programs(0) * (
        tl.program_id(1) + tl.num_programs(1) * tl.program_id(2)
    )
    return program, programs


@jit
def still_alive(monitor):
    """Return 1 until a wait of the context has expired; then 0, and the program must do nothing
    that peers may notice.

    A barrier of the block, whose threads all get the same answer.
    """
    return tdl.block_and(tdl.ld(monitor + tdl.MONITOR_ABORTED, "gpu", "relaxed") == 0)


if INTERPRETED:  # by functions of Triton alone, because index matching needs no job

    @jit
    def signal_done(word):
        tl.debug_barrier()
        tl.atomic_add(word, 1, sem="release", scope="gpu")

    @jit
    def wait_until_done(word, programs):
        while tl.atomic_add(word, 0, sem="acquire", scope="gpu") < programs:
            pass

    @jit
    def leaves_last(word, programs):
        tl.debug_barrier()
        return tl.atomic_add(word, 1, sem="acq_rel", scope="gpu") == programs - 1

else:

    @jit
    def signal_done(word):
        tdl.syncthreads()
        tl.atomic_add(word, 1, sem="release", scope="gpu")

    @jit
    def wait_until_done(word, programs):
        while tdl.block_and(tdl.ld(word, "gpu", "acquire") >= programs) == 0:
            pass

    @jit
    def leaves_last(word, programs):
        tdl.syncthreads()
        return tl.atomic_add(word, 1, sem="acq_rel", scope="gpu") == programs - 1


signal_done.__doc__ = """This program has done its part of a phase of the launch: what it has stored
is seen by those that :func:`wait_until_done` lets go on. ``word``: int32, 0 before the launch; one
for each phase."""
wait_until_done.__doc__ = """Return when so many programs of this launch have done their part of the phase that ``word``
counts.

They must have lower numbers than those that wait. Blocks come onto the GPU in the order of their numbers, so those that
others wait for are there first, and any number of resident blocks makes progress. Nothing here waits for another rank,
so there is no deadline.
"""
leaves_last.__doc__ = """Return whether all others of so many programs have been here. What they did before, such
as reading the words of other phases, is over then. ``word`` as for :func:`signal_done`."""


@jit
def begin_epoch(control, monitor):
    """Return ``(epoch, alive)``: this call, counted from 1. Every program of the launch calls it
    exactly once.

    Every program adds its share of one epoch to the control word after it has read it, so the next
    launch on the stream finds the next epoch. A barrier is needed, because all threads read the
    word, and one adds. Nothing waits for the addition.

    Args:
        control: int64 ``[1]`` of zeros, of this rank, for this kernel alone.
        monitor: a :class:`tdcoll.WaitMonitor`, or its ``words``.

    Returns:
        The epoch, int64, and 1, or 0 if a wait of this monitor has expired. The program must then
        do nothing that peers may notice: if a rank gave up on a peer and continued to send, it
        would overwrite data that a late peer has yet to read.
    """
    program, programs = this_program()
    word = tdl.ld(control, "gpu", "relaxed")
    alive = still_alive(monitor)
    share = _EPOCH // programs
    if program == programs - 1:
        share = _EPOCH - share * (programs - 1)
    tl.atomic_add(control, share.to(tl.int64), sem="relaxed", scope="gpu")
    return (word >> EPOCH_SHIFT) + 1, alive


@jit
def begin_even_epoch(control, monitor):
    """Return ``(epoch, alive)`` as :func:`begin_epoch` does, for a launch of one program: the next
    even epoch.

    Signals and memory of even epochs always lie in the first slot, which is why copies can be
    captured with their addresses. An odd epoch is left out if it would have been the next one; the
    same on all ranks.
    """
    word = tdl.ld(control, "gpu", "relaxed")
    alive = still_alive(monitor)
    epoch = (word >> EPOCH_SHIFT) + 1
    epoch += epoch % 2
    tl.store(control, epoch << EPOCH_SHIFT)
    return epoch, alive


@jit
def this_epoch(control):
    """Return the epoch that an earlier launch of the same call has begun."""
    return tdl.ld(control, "gpu", "relaxed") >> EPOCH_SHIFT


@jit
def start(g):
    """:func:`begin_epoch` of a :class:`Group`."""
    return begin_epoch(g.control, g.monitor)


@jit
def slot(epoch):
    """Return which of the two slots a call uses."""
    return epoch % 2


@jit
def row(g, epoch, chunk_index):
    """``-> [world]``: return the signals of all ranks' chunks ``chunk_index`` in this call."""
    return g.arrived + (slot(epoch) * g.chunks + chunk_index) * g.world


@jit
def segment(inbox, g, epoch, origin):
    """Return the address, on this rank, of rank ``origin``'s segment of an inbox in this call."""
    at = inbox.base
    if inbox.slots == 2:
        at += slot(epoch) * g.world * inbox.stride
    return at + tl.cast(origin, tl.int64) * inbox.stride


@jit
def chunk_bytes(nbytes, chunk, chunk_index):
    """Return the bytes of chunk ``chunk_index`` when ``nbytes`` are cut into pieces of ``chunk``: 0
    past the end."""
    left = tl.maximum(tl.cast(nbytes, tl.int64) - tl.cast(chunk_index, tl.int64) * chunk, 0)
    return tl.minimum(left, tl.cast(chunk, tl.int64))
