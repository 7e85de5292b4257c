# SPDX-License-Identifier: Apache-2.0
"""Calls whose data is moved by copy engines: the copies that the host queues, as steps of a call.

:mod:`tdcoll.primitives.copies` has the protocol and the kernels between the copies. A call consists
of *hops*. In each hop a rank sends something to every peer, and waits until the data of every peer
has arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch
import triton

from tdcoll.base.limits import SHARED_REGISTERS
from tdcoll.calls.kernel_launch import KernelLaunch
from tdcoll.calls.launch_spec import LaunchSpec, device_table, successors, tiles
from tdcoll.calls.plan import Facts, Landing, shares_gpu
from tdcoll.calls.steps import Step, StepSequence, WithPlaces
from tdcoll.primitives import copies as kernels
from tdcoll.runtime.heap import SideStream


def kernel(facts: Facts) -> Any:
    """Return the kernel that begins every call by copies."""
    return kernels.enter


def lands_in_result(facts: Facts) -> bool:
    """Return whether peers write into the result of an exchange rather than into the inbox."""
    return facts.landing is not Landing.INBOX


class Memory(Enum):
    """Memory that a copy reads or writes."""

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
    """What is sent to all peers, and what is done with what they have sent.

    Attributes:
        sends: For each peer, the copy from this rank's ``source`` to the peer's ``destination``.
        source: This rank's memory that is sent.
        destination: The peers' memory that is written.
        local_copy: From the tensor to the result of this rank, while the copies run; None if there
            is none.
        reduce: Launch that reduces what has arrived, given the addresses of tensor and result.
        copy_out: From the inbox to the result, when the data of all peers has arrived.
    """

    sends: Mapping[int, Copy]
    source: Memory = Memory.TENSOR
    destination: Memory = Memory.INBOX
    local_copy: Copy | None = None
    reduce: KernelLaunch | None = None
    copy_out: Sequence[Copy] = ()


class _CopyEngines:
    """Streams and words that the copies of a context share, and addresses of its memory.

    Attributes:
        epoch_word: int64 ``[1]`` on the device: what is copied behind the data, as its signal.
        side_streams: For each peer, the stream of the copies to it.
    """

    def __init__(self, spec: LaunchSpec) -> None:
        ctx = spec.ctx
        heap = ctx.job.heap
        self.queue_copy: Callable[..., None] = heap.stream_copy
        self.inbox = ctx.inbox.data_ptr()
        self.own_signals = ctx.signals.data_ptr() + 8 * ctx.rank
        self.world_size = ctx.world_size
        self.deltas = [heap.peer_base(pe) - heap.base for pe in ctx.topology.pes]

        def new_epoch_word() -> torch.Tensor:
            return torch.zeros(1, dtype=torch.int64, device=ctx.device)

        def new_side_streams() -> dict[int, SideStream]:
            return {peer: heap.side_stream() for peer in successors(ctx.topology)}

        self.epoch_word = device_table(ctx, spec.operation, ("copies", "stamp"), new_epoch_word)
        self.side_streams = device_table(
            ctx, spec.operation, ("copies", "side streams"), new_side_streams
        )

    def address(self, memory: Memory, source: int, result: int) -> int:
        """Return where this rank's memory begins, given the addresses of a call."""
        if memory is Memory.INBOX:
            return self.inbox
        return source if memory is Memory.TENSOR else result

    def join(self, stream: int) -> None:
        """Let later work on a stream wait for all copies so far."""
        for side_stream in self.side_streams.values():
            side_stream.join(stream)


class _HostCopies:
    """A step of copies, which have no kernels of tdcoll's."""

    prepared = True

    def prepare(self) -> None:
        """Copy engines need no preparation."""


class SendStep(_HostCopies):
    """Queues the copies of a hop to all peers, each on a stream that forks from the current one.

    Whatever stands before it in the call is the producer of the data.

    Args:
        number: Of the hop in the call.
        chunk: The most bytes of one copy.
    """

    def __init__(self, engines: _CopyEngines, number: int, hop: Hop, chunk: int) -> None:
        self._engines = engines
        self._number = number
        self._hop = hop
        self._chunk = chunk

    def __call__(self, stream: int, source: int, *rest: int) -> None:
        engines = self._engines
        hop = self._hop
        result = rest[-1]
        own = engines.address(hop.source, source, result)
        landing = engines.address(hop.destination, source, result)
        signal = engines.own_signals + 8 * self._number * engines.world_size
        for peer, side_stream in engines.side_streams.items():
            side_stream.fork(stream)
            delta = engines.deltas[peer]
            self._queue(side_stream.handle, own, landing + delta, hop.sends[peer])
            # Behind the data, so that it arrives after the data.
            engines.queue_copy(
                side_stream.handle, signal + delta, engines.epoch_word.data_ptr(), 8
            )

    def _queue(self, stream: int, source: int, destination: int, copy: Copy) -> None:
        """Queue the copies of one segment, each of at most a chunk."""
        source += copy.source_offset
        destination += copy.destination_offset
        for begin in range(0, copy.nbytes, self._chunk):
            nbytes = min(self._chunk, copy.nbytes - begin)
            self._engines.queue_copy(stream, destination + begin, source + begin, nbytes)


class LocalCopyStep(_HostCopies):
    """Queues copies from this rank's ``source`` to its result on the current stream."""

    def __init__(self, engines: _CopyEngines, source: Memory, copies: Sequence[Copy]) -> None:
        self._engines = engines
        self._source = source
        self._copies = [copy for copy in copies if copy.nbytes]

    def __call__(self, stream: int, source: int, *rest: int) -> None:
        result = rest[-1]
        begin = self._engines.address(self._source, source, result)
        for copy in self._copies:
            own = begin + copy.source_offset
            destination = result + copy.destination_offset
            if own != destination:
                self._engines.queue_copy(stream, destination, own, copy.nbytes)


class JoinStep(_HostCopies):
    """Lets the current stream wait for this rank's copies."""

    def __init__(self, engines: _CopyEngines) -> None:
        self._engines = engines

    def __call__(self, stream: int, *frame: int) -> None:
        self._engines.join(stream)


class CopySequence(StepSequence):
    """The steps of a call by copies.

    Attributes:
        variant: What the compiled kernels depend on.
    """

    def __init__(self, spec: LaunchSpec, *hops: Hop) -> None:
        ctx = spec.ctx
        engines = _CopyEngines(spec)
        self._engines = engines
        group = {"g": ctx.device_group, "WAITED": triton.next_power_of_2(ctx.world_size)}
        steps: list[Step] = [_signal_kernel(kernels.enter, {**group, "stamp": engines.epoch_word})]
        for number, hop in enumerate(hops):
            is_last = hop is hops[-1]
            reads_inbox = bool(hop.copy_out) or hop.reduce is not None
            steps.append(SendStep(engines, number, hop, spec.plan.chunk))
            if hop.local_copy is not None:
                steps.append(LocalCopyStep(engines, Memory.TENSOR, [hop.local_copy]))
            # Before the kernel, because a graph may put the kernel ahead of this rank's copies, for
            # which the peers' kernels wait.
            steps.append(JoinStep(engines))
            ends = {"hop": number, "LAST": is_last, "LOOKS": is_last and not reads_inbox}
            steps.append(_signal_kernel(kernels.hear, {**group, **ends}))
            if hop.reduce is not None:
                steps.append(hop.reduce)
            if hop.copy_out:
                steps.append(LocalCopyStep(engines, Memory.INBOX, hop.copy_out))
        looks = bool(hops[-1].copy_out)
        if looks:
            steps.append(_signal_kernel(kernels.look, group))
        super().__init__(steps)
        self.variant = ("copies", len(hops), looks, spec.options, spec.plan.num_warps)


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
    in_result = lands_in_result(spec.facts)
    landing_stride = spec.segment_stride if in_result else ctx.capacity
    sends = {
        peer: Copy(peer * source_stride, ctx.rank * landing_stride, nbytes) for peer in peers
    }
    local_copy = None
    if not spec.lands_in_caller_buffer:  # where this rank's segment lies already
        own_place = ctx.rank * spec.segment_stride
        local_copy = Copy(ctx.rank * source_stride, own_place, nbytes)
    copy_out: list[Copy] = []
    if not in_result:
        copy_out = [
            Copy(peer * ctx.capacity, peer * spec.segment_stride, nbytes)
            for peer in reversed(peers)
        ]
    destination = Memory.RESULT if in_result else Memory.INBOX
    hop = Hop(sends, destination=destination, local_copy=local_copy, copy_out=copy_out)
    return CopySequence(spec, hop)


def sums(spec: LaunchSpec, stride: int, sizes: Sequence[int], whole: bool) -> Hop:
    """Return the hop that brings each rank its part of all tensors, and sums them.

    Args:
        stride: Bytes from the part of one rank to the part of the next.
        sizes: Bytes of each rank's part.
        whole: Whether a part has the same place in the result as in the tensor. Otherwise the
            result is this rank's part.
    """
    ctx = spec.ctx
    values = {
        **tiles(spec),
        "inbox": spec.inbox,
        "g": ctx.device_group,
        "WHOLE": whole,
        "nbytes": sizes[ctx.rank],
        "at": ctx.rank * stride,
    }
    reduce = KernelLaunch(
        kernels.sum_copies,
        spec.plan.blocks,
        values,
        ("source", "out"),
        num_warps=spec.plan.num_warps,
        maxnreg=SHARED_REGISTERS if shares_gpu(spec.facts) else None,
    )
    own_segment = ctx.rank * ctx.capacity
    sends = {
        peer: Copy(peer * stride, own_segment, sizes[peer]) for peer in successors(ctx.topology)
    }
    return Hop(sends, reduce=reduce)
