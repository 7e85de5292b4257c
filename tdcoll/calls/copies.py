# SPDX-License-Identifier: Apache-2.0
"""Calls whose data is moved by copy engines: the copies that the host issues, between the kernels of the protocol.

:mod:`tdcoll.primitives.copies` has the protocol.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton

from tdcoll.calls.launch import Launch
from tdcoll.calls.launches import Planned, on_device, successors
from tdcoll.calls.plan import Facts
from tdcoll.primitives import copies as kernels
from tdcoll.runtime.heap import SideStream

__all__ = ["Copies", "Copy", "kernel", "lands_in_result"]


def kernel(facts: Facts) -> Any:
    """Return the kernel that begins every call by copies."""
    return kernels.enter


def lands_in_result(facts: Facts) -> bool:
    """Return whether peers write into the result of an exchange rather than into the inbox."""
    return facts.in_place or facts.symmetric


class Copy(NamedTuple):
    """``nbytes`` bytes, from ``begin`` bytes behind one address to ``at`` bytes behind another."""

    begin: int
    at: int
    nbytes: int


class Copies:
    """A call by copies, in the place of a :class:`~.launch.Launch`: every rank's segment for each rank goes to its
    place in that rank's result, as in all-gather and all-to-all. For one thread at a time.

    Args:
        call: the call; chunks of its plan are the largest copies.
        source_stride: bytes from the segment for one rank to that for the next; 0 if there is one for all.

    Attributes:
        variant: names what is compiled.
    """

    def __init__(self, call: Planned, source_stride: int) -> None:
        ctx, heap, self._call = call.ctx, call.ctx.job.heap, call
        in_heap = [heap.peer_base(pe) - heap.base for pe in ctx.topology.pes]
        self._deltas = self._result_deltas = in_heap
        if call.deltas is not ctx.device_group.deltas:
            self._result_deltas = self._once(("deltas on the host", id(call.deltas)), call.deltas.tolist)
        self._stamp = self._once("stamp", lambda: torch.zeros(1, dtype=torch.int64, device=ctx.device))
        self._side_streams: dict[int, SideStream] = self._once(
            "side streams", lambda: {peer: heap.side_stream() for peer in successors(ctx.topology)}
        )
        self._inbox, self._signal = ctx.inbox.data_ptr(), ctx.signals.data_ptr() + 8 * ctx.rank
        nbytes, room, self._direct = call.facts.nbytes, ctx.capacity, lands_in_result(call.facts)
        peers, at = list(self._side_streams), ctx.rank * (call.stride if self._direct else room)
        self._sent = {peer: Copy(peer * source_stride, at, nbytes) for peer in peers}
        self._kept = Copy(ctx.rank * source_stride, ctx.rank * call.stride, 0 if call.in_buffer else nbytes)
        self._taken = [Copy(peer * room, peer * call.stride, nbytes) for peer in reversed(peers) if not self._direct]
        group = {"g": ctx.device_group, "WAITED": triton.next_power_of_2(ctx.world_size)}
        self._enter = Launch(kernels.enter, 1, {**group, "stamp": self._stamp}, (), num_warps=1)
        self._hear = Launch(kernels.hear, 1, {**group, "LOOKS": not self._taken}, (), num_warps=1)
        self._look = Launch(kernels.look, 1, group, (), num_warps=1) if self._taken else None
        self._launches = [launch for launch in (self._enter, self._hear, self._look) if launch is not None]
        self.variant = ("copies", self._look is None)

    def _once(self, key: Any, make: Any) -> Any:
        return on_device(self._call.ctx, self._call.operation, ("copies", key), make)

    @property
    def prepared(self) -> bool:
        """True once all kernels are compiled and loaded."""
        return all(launch.prepared for launch in self._launches)

    def prepare(self) -> None:
        """Compile and load the kernels."""
        for launch in self._launches:
            launch.prepare()

    def __call__(self, stream: int, source: int, *rest: int) -> None:
        """Make the call on the stream of this handle, which is the current one.

        Args:
            source, rest: addresses, of which the last is that of the result.
        """
        result, copy, kept = rest[-1], self._call.ctx.job.heap.stream_copy, self._kept
        self._enter(stream)
        self._send(stream, source, result)
        if kept.nbytes and source + kept.begin != result + kept.at:
            copy(stream, result + kept.at, source + kept.begin, kept.nbytes)
        # First, because graphs may put the kernel ahead of this rank's copies, for which the peers' kernels wait.
        for side_stream in self._side_streams.values():
            side_stream.join(stream)
        self._hear(stream)
        for part in self._taken:
            if part.nbytes:
                copy(stream, result + part.at, self._inbox + part.begin, part.nbytes)
        if self._look is not None:
            self._look(stream)

    def _send(self, stream: int, source: int, result: int) -> None:
        """Queue the copies to all peers, each on a stream of its own."""
        ctx, chunk, stamp = self._call.ctx, self._call.plan.chunk, self._stamp.data_ptr()
        for peer, side_stream in self._side_streams.items():
            side_stream.fork(stream)
            part = self._sent[peer]
            landing = result + self._result_deltas[peer] if self._direct else self._inbox + self._deltas[peer]
            moved = Copy(source + part.begin, landing + part.at, part.nbytes)
            _queue(ctx.job.heap.stream_copy, side_stream.handle, moved, chunk, self._signal + self._deltas[peer], stamp)


def _queue(copy: Callable[..., None], stream: int, moved: Copy, chunk: int, signal: int, stamp: int) -> None:
    """Queue copies of at most ``chunk`` bytes each, and behind them that of the stamp."""
    for at in range(0, moved.nbytes, chunk):
        copy(stream, moved.at + at, moved.begin + at, min(chunk, moved.nbytes - at))
    copy(stream, signal, stamp, 8)
