# SPDX-License-Identifier: Apache-2.0
"""CollectiveContext: what the calls of one process group on one stream share.

A context owns symmetric memory (:attr:`.sizes.ContextSizes.areas`): the signals that
:class:`~tdcoll.primitives.group.Group` describes; an ``inbox`` of two *slots*, in each of which
rank r's data lands in ``inbox[slot, r]``; two slots of ``flagged`` words for LL, and an inbox of
three for the Lamport protocol.

``docs/architecture.md`` has the rules (*Why slots may be reused*). These are the arguments.

**Why the slots may be reused.** A call completes on a rank only when it has a signal of the epoch
from every peer. A peer sends it from inside the same call; so when epoch e is complete here, every
peer has *started* e, and the stream order on that peer says that its call e-1, and whatever read
the result of e-1 there, is over. Call e+1 writes slot (e+1) mod 2 = (e-1) mod 2. With one slot, a
fast rank would write e+1 over data of e that a slow one still copies out.

**Why waits compare with >=.** A peer can be one epoch ahead of us, not two: for e+2 it needs our
signal of e+1. Slots alternate, so a signal word goes from e to e+2 only when we are done with e. If
a change ever breaks that argument, "at least" does not hang, and a wait for equality, once
overtaken, never ends.

**Why signals alternate too.** Puts of different epochs are not ordered among each other: the signal
of e+1 may arrive before the bytes of e. In one row, "at least e" would take it for the signal of e.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import triton.language as tl

from tdcoll import runtime
from tdcoll.base import arguments
from tdcoll.base.call_log import CallLog
from tdcoll.base.errors import HeapExhaustedError
from tdcoll.base.limits import MAX_BLOCKS, MAX_CHUNKS, MOST_CHUNKS
from tdcoll.calls.budget import StreamOrder, least_blocks
from tdcoll.calls.checks import CallChecks, Debug, compare, exchangeable
from tdcoll.calls.monitor import WaitMonitor
from tdcoll.calls.sizes import Area, context_sizes
from tdcoll.calls.tuning import Table, source
from tdcoll.job.memory import barrier
from tdcoll.primitives.group import Group
from tdcoll.primitives.lamport import SENTINEL, Lamport
from tdcoll.runtime.control import require_equal
from tdcoll.runtime.topology import Topology

if TYPE_CHECKING:
    from typing_extensions import Self


def _group_name(group: runtime.Group, topology: Topology) -> str | None:
    """Return torch's name of the given process group, or of the default group if it has these
    ranks, otherwise None."""
    dist = torch.distributed
    group = runtime.group_of(group)
    if not dist.is_available() or not dist.is_initialized():
        return None
    if not isinstance(group, dist.ProcessGroup):
        if topology.pes != tuple(range(dist.get_world_size())):
            return None
        group = dist.group.WORLD
    return str(group.group_name)


class CollectiveContext(CallChecks):
    """Symmetric slots, signals and the epoch for the collectives of one group.

    >>> with tdcoll.CollectiveContext() as ctx:
    ...     y = tdcoll.all_reduce(x, ctx=ctx)
    ...     ctx.check()  # raise here if a wait has expired, rather than at the next call

    Collective over the group to make and to close; a context manager. Several may be alive at once,
    over the same or different ranks. After a wait has expired (:class:`~tdcoll.CollectiveTimeout`)
    the context refuses every call, and launches that are queued already do nothing. A ``with``
    block that is left by an exception does not close it, since the other ranks may be elsewhere: it
    refuses calls, and can still be closed.

    Calls of a context come one after the other. It follows the caller: if a call is made on another
    stream than the last one, it waits there for the last one, eagerly and inside one capture of a
    CUDA graph. No event leads into a capture or out of it, and the host doesn't see replays. You
    therefore order the replays of a graph and other calls on the same context, for example by
    making them on one stream.

    The sizes (``max_bytes_per_rank`` to ``lamport_bytes``) are for experts; the defaults serve
    calls of any size.

    Args:
        group: a ProcessGroup, a one-dimensional DeviceMesh, a sequence of global ranks, or None for
            all ranks.
        max_bytes_per_rank: the most that one rank sends to another in one epoch, in bytes; a larger
            call takes several epochs. Takes ``2 * world_size * max_bytes_per_rank`` bytes of the
            symmetric heap. Default: 16 MiB, but with two slots for all ranks no more than an eighth
            of the heap: 12 MiB of 384 with 2 ranks, 3 with 8.
        chunks: the most chunks that one rank's data is cut into, 2 to 4096. Each takes 16 bytes of
            symmetric heap per rank of the group. A large message is copied out while it arrives,
            the better the more chunks it has.
        flagged_bytes: the most of one rank's data that flagged words (LL) carry, in bytes; takes
            ``8/3 * world_size`` times as much of the symmetric heap, in one node. Default:
            ``max_bytes_per_rank``, but no more than 1 MiB / (ranks - 1).
        lamport_bytes: the most of one rank's data that words which announce themselves carry, in
            bytes; takes ``3 * world_size`` times as much of the symmetric heap, unless ranks of a
            node cannot store to each other. Default in one node: ``max_bytes_per_rank``, but no
            more than 32 MiB / ranks and a quarter of the heap; or a sixteenth of that where the
            heap has no room for so much. Default on several nodes: 0.
        max_blocks: the most thread blocks that one launch on the context has. Kernels of several
            contexts that are in flight together wait for peers, so their thread blocks must fit on
            the GPU at once. At least ``2 * world_size + 2``. Default: as many as a launch may have,
            for contexts that have the GPU to themselves.
        timeout_s: deadline of waits, seconds. Default: the job's, of ``initialize`` or
            ``init_process_group``.
        debug: check on every call that the ranks agree on its arguments, at the cost of a host-side
            exchange; or, if it is ``"first"``, on the first call with such arguments. Default:
            ``TDCOLL_DEBUG``, which is 0, 1 or ``first``; if it is not set, True in the simulator
            and False on GPUs.
        tuning: a :class:`~tdcoll.Table`, or the path of its file. Default: file ``TDCOLL_TUNING``,
            else tdcoll's own.

    Raises:
        TypeError, ValueError: an argument is not as described, this process is not in the group, or
            the file of the tuning table is not one, here or on another rank.
        HeapExhaustedError: the symmetric heap is too small.
        RankMismatchError: ranks pass different arguments. (Deadlines may differ.)
    """

    dense: ClassVar[bool] = True
    """Whether it is for dense collectives."""

    def __init__(
        self,
        group: runtime.Group = None,
        *,
        max_bytes_per_rank: int | None = None,
        chunks: int = MAX_CHUNKS,
        flagged_bytes: int | None = None,
        lamport_bytes: int | None = None,
        max_blocks: int | None = None,
        timeout_s: float | None = None,
        debug: Debug | None = None,
        tuning: Any = None,
        _call: Mapping[str, Any] | None = None,
        _order: StreamOrder | None = None,
    ) -> None:
        self._given_sizes: dict[str, Any] = {
            "max_bytes_per_rank": max_bytes_per_rank,
            "chunks": chunks,
            "flagged_bytes": flagged_bytes,
            "lamport_bytes": lamport_bytes,
        }
        arguments.whole("chunks", chunks, 2, MOST_CHUNKS)
        for name, nbytes in self._given_sizes.items():
            if nbytes is not None:
                arguments.whole(name, nbytes, 0)
        if max_blocks is not None:
            arguments.whole("max_blocks", max_blocks, 1, MAX_BLOCKS)
        if debug is not None and debug != "first":
            arguments.instance("debug", debug, bool, 'a bool, "first" or None')
        job = runtime.current()
        topology = job.topology(group)
        least = least_blocks(topology.world_size)
        if max_blocks is not None and max_blocks < least:
            raise ValueError(
                f"max_blocks must be at least {least}, as many as one chunk takes on {topology.describe()}; got "
                f"{max_blocks}"
            )
        monitor = WaitMonitor(timeout_s=timeout_s, rank=topology.rank)
        monitor.calls = CallLog(topology.pes, _group_name(group, topology))
        super().__init__(job, topology, monitor, debug, _order)
        sizes = context_sizes(topology, job.heap.nbytes, **self._given_sizes)
        self.max_bytes_per_rank = sizes.max_bytes_per_rank
        """The most that one rank sends to another in one epoch, in bytes."""
        self.chunks = chunks
        if max_blocks is not None:
            self.max_blocks = max_blocks
        self.allow_pdl = max_blocks is None
        """Whether a launch may begin before the launch ahead of it has ended
        (:mod:`tdcoll.calls.kernel_launch`)."""
        self.stores: bool
        """Whether the ranks of each node can store to each other's memory."""
        self.ll_bytes: int
        """The most of one rank's data that flagged words carry, in bytes; -1 where there are none:
        on several nodes, or where ranks cannot store to each other."""
        self.lamport_bytes: int
        """The most of one rank's data that words which announce themselves carry, in bytes; 0 where
        there are none."""
        self.device_lamport: Lamport | None = None
        """The inbox of such words as kernels see it; None where there is none."""
        self.device_group: Group
        """The context as kernels see it."""
        self.tables: dict[Hashable, Any] = {}
        """Device tensors that launches and captured graphs refer to, for as long as the context
        lives."""
        self._group = topology.pes
        self._closed = False
        self._symmetric: list[torch.Tensor] = []
        try:
            self._make(tuning, _call)
        except Exception:
            self.undo_creation()
            raise

    def _make(self, tuning: Any, call: Mapping[str, Any] | None) -> None:
        """Agree with the other ranks, and take memory. Collective.

        Args:
            call: the arguments, by name, that must be the same on all ranks in the call for which
                tdcoll makes the context, its ``operation`` among them; None if the caller makes it.
        """
        owner = self.job
        asked = self._given_sizes
        table = Table(())
        problem = None
        try:
            table = source.read(tuning)
        except Exception as error:  # of any kind, because the other ranks wait for it
            problem = error
        mates = [self._group[rank] for rank in self.topology.members[self.topology.node]]
        accessible = all(owner.heap.peer_base(pe) != 0 for pe in mates)
        names = source.architectures(self.device)
        mine = exchangeable(call or {}), accessible, names
        purpose = (
            "arguments of CollectiveContext"
            if call is None
            else f"{call['operation']}, which needs a context"
        )
        answers = owner.exchange(self._group, purpose, mine)
        if call is not None:
            require_equal(
                [theirs for theirs, _, _ in answers], self._group, f"{call['operation']} arguments"
            )
        same = {
            **asked,
            "max_bytes_per_rank": self.max_bytes_per_rank,
            "max_blocks": self.max_blocks,
            "debug": self.debug,
            "tuning table": table.digest,
        }
        compare(owner, self._group, "CollectiveContext", same, problem)
        # nothing was measured on GPUs of several kinds
        alike = all(theirs == names for _, _, theirs in answers)
        self.tuning = table.of(
            names if alike else (), self.topology.ranks_per_node, self.topology.n_nodes
        )
        self.stores = all(theirs for _, theirs, _ in answers)
        sizes = context_sizes(self.topology, owner.heap.nbytes, stores=self.stores, **asked)
        self.capacity = sizes.capacity
        self.ll_bytes = sizes.ll_bytes
        self.inbox, *zeroed = map(self._allocate, sizes.areas[:5])
        for area in zeroed:
            area.zero_()
        self.signals, self.ready, self.expired_epochs, self.flagged = zeroed
        if self.stores and self.topology.n_nodes == 1:  # where calls can have copy engines
            self.monitor.expired_epochs = self.expired_epochs
        self.control = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.device_group = self._device_group()
        if sizes.lamport_bytes:
            try:
                self.device_lamport = self._device_lamport(sizes.areas[5])
            except HeapExhaustedError:  # on all ranks
                fewer = context_sizes(
                    self.topology, owner.heap.nbytes, stores=self.stores, free=0, **asked
                )
                if fewer == sizes:
                    raise
                sizes = fewer
                self.device_lamport = self._device_lamport(sizes.areas[5])
        self.lamport_bytes = sizes.lamport_bytes
        barrier(self._group)  # no rank may signal or send before the memory of all is ready
        owner.kept_alive[id(self)] = self

    def undo_creation(self) -> None:
        """Give back what the context has taken, on this rank alone: where it could not be made, for
        whatever reason.

        No rank uses the memory: what all ranks do last is to wait for each other, and this one has
        not come so far.
        """
        self._closed = True
        self._refusal = "the context could not be made"
        for tensor in self._symmetric:
            self.job.undo_allocation(tensor)
        self._symmetric.clear()
        self.job.kept_alive.pop(id(self), None)
        self.job.kept_alive.pop(id(self.monitor), None)

    def _device_group(self) -> Group:
        heap = self.job.heap
        deltas = [heap.peer_base(pe) - heap.base for pe in self.topology.pes]
        return Group(
            arrived=self.signals,
            entered=self.ready,
            expired_epochs=self.expired_epochs,
            control=self.control,
            monitor=self.monitor.words,
            deltas=torch.tensor(deltas, dtype=torch.int64, device=self.device),
            rank=self.rank,
            chunks=tl.constexpr(self.chunks),
            world=tl.constexpr(self.world_size),
        )

    def _device_lamport(self, area: Area) -> Lamport:
        inbox = self._allocate(area)
        inbox.fill_(SENTINEL.value)
        return Lamport(
            base=inbox.data_ptr(),
            stride=inbox[0, 0].nbytes,
            control=torch.zeros(1, dtype=torch.int64, device=self.device),
            written=torch.zeros(3, dtype=torch.int64, device=self.device),
        )

    def _allocate(self, area: Area) -> torch.Tensor:
        tensor = self.job.allocate(area.shape, area.dtype, group=self._group, name=area.name)
        self._symmetric.append(tensor)
        return tensor

    # ------------------------------------------------------------------ facts

    @property
    def closed(self) -> bool:
        """True after :meth:`close`."""
        return self._closed

    def __repr__(self) -> str:
        state = "failed or left by an exception" if self._refusal else "open"
        state = "closed" if self._closed else "failed" if self.monitor.expired else state
        return f"<{type(self).__name__} rank {self.rank}, {self.topology.describe()}, {self._sizes()}, {state}>"

    def _sizes(self) -> str:
        return f"{self.max_bytes_per_rank} bytes per rank"

    # ------------------------------------------------------------------ life

    def close(self) -> None:
        """Free the symmetric memory. Collective; waits for the stream. A second call does nothing.

        After an expired wait it is local, because a peer may be gone, and the memory stays taken.

        Raises:
            CollectiveTimeout: a wait has expired, which hasn't been reported yet.
        """
        if self._closed:
            return
        self._closed = True
        self._refusal = "the context is closed; make a new one"
        if self.job.closed:
            return
        if self._cuda and self.captured:
            torch.cuda.synchronize(self.device)  # replays may be anywhere
        elif self._cuda:
            self.order.stream.synchronize()
        if self.monitor.expired and not self.monitor.reported:
            self.monitor.raise_if_expired()
        if self.job.failed:
            return
        with self.job.during(f"{type(self).__name__}.close"):
            for tensor in reversed(self._symmetric):
                self.job.release(tensor)
        self._symmetric.clear()
        self.tables.clear()
        self.job.kept_alive.pop(id(self))
        self.job.kept_alive.pop(id(self.monitor))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        elif (
            self._refusal is None
        ):  # the other ranks may not be leaving too: closing would wait for them
            self._refusal = "its with block was left by an exception; close() it, on all ranks, to free its memory"
