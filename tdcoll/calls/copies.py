# SPDX-License-Identifier: Apache-2.0
"""Calls whose data is moved by copy engines: the copies that the host queues, as steps of a call.

:mod:`tdcoll.primitives.copies` has the protocol and the kernels between the copies. A call consists
of *hops*. In each hop a rank pushes something to every peer, or pulls something from every peer,
and waits until every peer's stamp has arrived.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch
import triton

from tdcoll.base.limits import SHARED_REGISTERS
from tdcoll.calls.context import CollectiveContext
from tdcoll.calls.kernel_launch import KernelLaunch
from tdcoll.calls.launch_spec import LaunchSpec, device_table, successors, tiles
from tdcoll.calls.plan import Facts, shares_gpu
from tdcoll.calls.steps import Step, StepSequence, WithPlaces
from tdcoll.primitives import copies as kernels
from tdcoll.runtime.heap import SideStream


def kernel(facts: Facts) -> Any:
    """Return the kernel that begins every call by copies."""
    return kernels.enter


class LocalMemory(Enum):
    """Memory of this rank that a copy reads."""

    TENSOR = "tensor"
    RESULT = "result"
    INBOX = "inbox"


class Copy(NamedTuple):
    """A copy between two places.

    Attributes:
        source_offset: Where it begins in the memory that it reads, in bytes.
        destination_offset: Where it begins in the memory that it writes, in bytes.
        nbytes: How much it copies.
    """

    source_offset: int
    destination_offset: int
    nbytes: int


@dataclass(frozen=True)
class Hop:
    """The copies for all peers, and what is done when the stamps of all peers have arrived.

    Attributes:
        copies: For each peer, a push from this rank's ``source`` to the peer's inbox.
        source: This rank's memory that is pushed.
        pulled: The copies are pulls from the peer's result to this rank's, which is symmetric.
        local_copy: From the tensor to the result of this rank, while the copies run; None if there
            is none.
        reduce: Launch that reduces what has arrived, given the addresses of tensor and result.
        copy_out: From the inbox to the result, when the data of all peers has arrived.
    """

    copies: Mapping[int, Copy]
    source: LocalMemory = LocalMemory.TENSOR
    pulled: bool = False
    local_copy: Copy | None = None
    reduce: KernelLaunch | None = None
    copy_out: Sequence[Copy] = ()


class CopyEngines:
    """Words that the copies of a context share, and addresses of its memory.

    Args:
        operation: The call's name, for errors.

    Attributes:
        stamps, summed: On the device, see :func:`tdcoll.primitives.copies.enter`.
        deltas: For each peer, how far its heap is from this rank's, in bytes.
    """

    def __init__(self, ctx: CollectiveContext, operation: str) -> None:
        heap = ctx.job.heap
        self.stamps, self.summed = _stamp_words(ctx, operation)
        self.inbox = ctx.inbox.data_ptr()
        self.deltas = [heap.peer_base(pe) - heap.base for pe in ctx.topology.pes]
        self._queue_copy = heap.stream_copy
        self._own_signals = ctx.signals.data_ptr() + 8 * ctx.rank
        self._world_size = ctx.world_size

    def address(self, memory: LocalMemory, source: int, result: int) -> int:
        """Return where this rank's memory begins, given the addresses of a call."""
        if memory is LocalMemory.INBOX:
            return self.inbox
        return source if memory is LocalMemory.TENSOR else result

    def queue(self, stream: int, source: int, destination: int, copy: Copy, chunk: int) -> None:
        """Queue a copy as copies of at most ``chunk`` bytes."""
        source += copy.source_offset
        destination += copy.destination_offset
        for begin in range(0, copy.nbytes, chunk):
            nbytes = min(chunk, copy.nbytes - begin)
            self._queue_copy(stream, destination + begin, source + begin, nbytes)

    def queue_stamp(self, stream: int, peer: int, hop: int, piece: int = 0) -> None:
        """Queue a copy of this rank's stamp of a hop to a peer, behind what the stream has.

        Args:
            piece: Of the hop's data. Only calls of one hop have several, with a signal for each.
        """
        signal = self._own_signals + 8 * (hop + piece) * self._world_size + self.deltas[peer]
        self._queue_copy(stream, signal, self.stamps.data_ptr() + 8 * hop, 8)


def _side_streams(ctx: CollectiveContext, operation: str) -> dict[int, SideStream]:
    """Return a stream for each peer, for the copies to it or from it."""

    def new_side_streams() -> dict[int, SideStream]:
        return {peer: ctx.job.heap.side_stream() for peer in successors(ctx.topology)}

    return device_table(ctx, operation, ("copies", "side streams"), new_side_streams)


def _stamp_words(ctx: CollectiveContext, operation: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the context's ``stamps`` and ``summed``; see
    :func:`tdcoll.primitives.copies.enter`."""

    def new_stamps() -> torch.Tensor:
        return torch.zeros(2, dtype=torch.int64, device=ctx.device)

    def new_summed() -> torch.Tensor:
        return torch.zeros(1, dtype=torch.int32, device=ctx.device)

    stamps = device_table(ctx, operation, ("copies", "stamps"), new_stamps)
    summed = device_table(ctx, operation, ("copies", "summed"), new_summed)
    return stamps, summed


class _HostCopies:
    """A step of copies, which have no kernels of tdcoll's."""

    prepared = True

    def prepare(self) -> None:
        """Copy engines need no preparation."""


class LocalCopyStep(_HostCopies):
    """Queues copies from this rank's ``source`` to its result on the current stream."""

    def __init__(self, engines: CopyEngines, source: LocalMemory, copies: Sequence[Copy]) -> None:
        self._engines = engines
        self._source = source
        self._copies = [copy for copy in copies if copy.nbytes]

    def __call__(self, stream: int, source: int, *rest: int) -> None:
        result = rest[-1]
        begin = self._engines.address(self._source, source, result)
        for copy in self._copies:
            if begin + copy.source_offset != result + copy.destination_offset:
                self._engines.queue(stream, begin, result, copy, copy.nbytes)


class HopStep:
    """Queues the copies of a hop to or from all peers, and launches the kernel that waits for
    stamps.

    Each peer's copies are on a stream that forks from the current one. The step before the
    step in the call is the producer of the data.

    However the step ends, later work on the current stream comes after the copies that it has
    queued, which read the caller's memory, and after those of peers that may pull from there. So
    the caller may write to its memory and free it.

    Args:
        side_streams: For each peer, the stream of the copies to it or from it.
        number: Of the hop in the call.
        hear: Launch of :func:`tdcoll.primitives.copies.wait_arrivals`.
        chunk: The most bytes of one copy.
    """

    def __init__(
        self,
        engines: CopyEngines,
        side_streams: Mapping[int, SideStream],
        number: int,
        hop: Hop,
        hear: Step,
        chunk: int,
    ) -> None:
        self._engines = engines
        self._side_streams = side_streams
        self._number = number
        self._hop = hop
        self._hear = hear
        self._chunk = chunk
        local_copies = [] if hop.local_copy is None else [hop.local_copy]
        self._local_copy = LocalCopyStep(engines, LocalMemory.TENSOR, local_copies)

    @property
    def prepared(self) -> bool:
        return self._hear.prepared

    def prepare(self) -> None:
        self._hear.prepare()

    def __call__(self, stream: int, *frame: int) -> None:
        forked: list[SideStream] = []
        try:
            self._queue(stream, forked, frame[0], frame[-1])
            self._local_copy(stream, *frame)
            # Before the kernel, because a graph may put the kernel ahead of this rank's copies, for
            # which the peers' kernels wait.
            _join(forked, stream)
            self._hear(stream)
        except BaseException:
            _join(forked, stream)  # Again, for those that an interrupt may have left out.
            if self._hop.pulled and forked:
                self._hear(stream)
            raise

    def _queue(self, stream: int, forked: list[SideStream], source: int, result: int) -> None:
        """Queue the copies for all peers; add each stream to ``forked`` once it has forked."""
        engines = self._engines
        hop = self._hop
        for peer, side_stream in self._side_streams.items():
            side_stream.fork(stream)
            forked.append(side_stream)
            delta = engines.deltas[peer]
            begin = engines.address(hop.source, source, result)
            landing = engines.inbox + delta
            if hop.pulled:
                begin = result + delta
                landing = result
            engines.queue(side_stream.handle, begin, landing, hop.copies[peer], self._chunk)
            # Behind the data, so that it arrives after the data.
            engines.queue_stamp(side_stream.handle, peer, self._number)


def _join(side_streams: Sequence[SideStream], stream: int) -> None:
    """Let later work on ``stream`` wait for what the other streams have."""
    for side_stream in side_streams:
        side_stream.join(stream)


class CopySequence(StepSequence):
    """The steps of a call by copies.

    Attributes:
        variant: All that the compiled kernels depend on.
    """

    def __init__(self, spec: LaunchSpec, *hops: Hop) -> None:
        ctx = spec.ctx
        engines = CopyEngines(ctx, spec.operation)
        side_streams = _side_streams(ctx, spec.operation)
        group = {"g": ctx.device_group, "WORLD_POW2": triton.next_power_of_2(ctx.world_size)}
        steps: list[Step] = [enter_step(ctx, engines)]
        for number, hop in enumerate(hops):
            hear = _signal_kernel(
                kernels.wait_arrivals, {**group, "hop": number, "PULLED": hop.pulled}
            )
            steps.append(HopStep(engines, side_streams, number, hop, hear, spec.plan.chunk))
            if hop.reduce is not None:
                steps.append(hop.reduce)
            if hop.copy_out:
                steps.append(LocalCopyStep(engines, LocalMemory.INBOX, hop.copy_out))
        if hops[-1].copy_out:
            steps.append(_signal_kernel(kernels.check_peers_alive, group))
        if spec.options.epilogue is not None:  # whose arguments only the sum takes
            sums = [hop.reduce for hop in hops]
            steps = [step if step in sums else WithPlaces(step, (0, 1)) for step in steps]
        super().__init__(steps)
        pulled = tuple(hop.pulled for hop in hops)
        self.variant = ("copies", pulled, spec.options.compiled_form, spec.plan.num_warps)


def enter_step(ctx: CollectiveContext, engines: CopyEngines) -> Step:
    """Return the step that begins every call by copies, which takes nothing of the frame."""
    arguments = {
        "g": ctx.device_group,
        "stamps": engines.stamps,
        "summed": engines.summed,
        "WORLD_POW2": triton.next_power_of_2(ctx.world_size),
    }
    return _signal_kernel(kernels.enter, arguments)


def _signal_kernel(kernel: Any, arguments: Mapping[str, Any]) -> Step:
    """Return the launch of a kernel of one thread block, which takes nothing of the frame."""
    return WithPlaces(KernelLaunch(kernel, 1, arguments, (), num_warps=1), ())


# ---------------------------------------------------------------------- hops of collectives


def exchange(spec: LaunchSpec, source_stride: int) -> CopySequence:
    """Bring every rank's segment for each rank to its place in that rank's result.

    Args:
        source_stride: Bytes from the segment for one rank to that for the next; 0 if there is one
            segment for all.
    """
    ctx = spec.ctx
    nbytes = spec.facts.nbytes
    peers = successors(ctx.topology)
    if spec.lands_in_caller_buffer:  # where each rank's own segment lies already
        pulls = _in_place(peers, spec.segment_stride, dict.fromkeys(peers, nbytes))
        return CopySequence(spec, Hop(pulls, pulled=True))
    own_segment = ctx.rank * ctx.capacity
    pushes = {peer: Copy(peer * source_stride, own_segment, nbytes) for peer in peers}
    own_place = ctx.rank * spec.segment_stride
    local_copy = Copy(ctx.rank * source_stride, own_place, nbytes)
    copy_out = [
        Copy(peer * ctx.capacity, peer * spec.segment_stride, nbytes) for peer in reversed(peers)
    ]
    return CopySequence(spec, Hop(pushes, local_copy=local_copy, copy_out=copy_out))


def sums(
    spec: LaunchSpec, stride: int, sizes: Sequence[int], whole: bool, pulled: bool = False
) -> Hop:
    """Return the hop that brings each rank its part of all tensors, and sums them.

    Args:
        stride: Bytes from the part of one rank to the part of the next.
        sizes: Bytes of each rank's part.
        whole: Whether a part has the same place in the result as in the tensor. Otherwise the
            result is this rank's part.
        pulled: Whether peers then pull the sum.
    """
    ctx = spec.ctx
    stamps, summed = _stamp_words(ctx, spec.operation)
    values = {
        **tiles(spec),
        **spec.options.epilogue_arguments,
        "inbox": spec.inbox,
        "g": ctx.device_group,
        "WHOLE": whole,
        "PULLED": pulled,
        "stamps": stamps,
        "summed": summed,
        "nbytes": sizes[ctx.rank],
        "at": ctx.rank * stride,
    }
    reduce = KernelLaunch(
        kernels.sum_copies,
        spec.plan.blocks,
        values,
        spec.options.changing,
        num_warps=spec.plan.num_warps,
        maxnreg=SHARED_REGISTERS if shares_gpu(spec.facts) else None,
    )
    own_segment = ctx.rank * ctx.capacity
    pushes = {
        peer: Copy(peer * stride, own_segment, sizes[peer]) for peer in successors(ctx.topology)
    }
    return Hop(pushes, reduce=reduce)


def gathered(spec: LaunchSpec, stride: int, sizes: Sequence[int], second: int, pulled: bool) -> Hop:
    """Return the hop that brings each rank the sums of all others.

    Args:
        stride, sizes: Of the parts, as for :func:`sums`.
        second: Where sums that are pushed begin in a segment of the inbox, in bytes.
        pulled: Whether peers pull them.
    """
    ctx = spec.ctx
    peers = successors(ctx.topology)
    if pulled:
        return Hop(_in_place(peers, stride, dict(enumerate(sizes))), pulled=True)
    push = Copy(ctx.rank * stride, ctx.rank * ctx.capacity + second, sizes[ctx.rank])
    copy_out = [Copy(peer * ctx.capacity + second, peer * stride, sizes[peer]) for peer in peers]
    return Hop(dict.fromkeys(peers, push), source=LocalMemory.RESULT, copy_out=copy_out)


def _in_place(peers: Sequence[int], stride: int, sizes: Mapping[int, int]) -> dict[int, Copy]:
    """Return the pulls of each peer's segment from its place there to the same place here."""
    return {peer: Copy(peer * stride, peer * stride, sizes[peer]) for peer in peers}
