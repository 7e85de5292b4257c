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

__all__ = ["Copies", "Copy", "kernel"]


def kernel(facts: Facts) -> Any:
    """Return the kernel that begins every call by copies."""
    return kernels.enter


class Copy(NamedTuple):
    """``nbytes`` bytes, from ``begin`` bytes behind one address to ``at`` bytes behind another."""

    begin: int
    at: int
    nbytes: int


class Copies:
    """An all-gather by copies, in the place of a :class:`~.launch.Launch`. For one thread at a time.

    Args:
        call: the call; chunks of its plan are the largest copies.

    Attributes:
        variant: names what is compiled.
    """

    def __init__(self, call: Planned) -> None:
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
        self._nbytes, room, stride = call.facts.nbytes, ctx.capacity, call.stride
        self._at, self._kept_at = ctx.rank * (stride if call.in_buffer else room), ctx.rank * stride
        peers = [] if call.in_buffer else reversed(self._side_streams)
        self._taken = [Copy(peer * room, peer * stride, self._nbytes) for peer in peers]
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
        result, copy, nbytes = rest[-1], self._call.ctx.job.heap.stream_copy, self._nbytes
        self._enter(stream)
        self._send(stream, source, result)
        if nbytes and source != result + self._kept_at:
            copy(stream, result + self._kept_at, source, nbytes)
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
            in_buffer = result + self._result_deltas[peer]
            landing = in_buffer if self._call.in_buffer else self._inbox + self._deltas[peer]
            moved = Copy(source, landing + self._at, self._nbytes)
            _queue(ctx.job.heap.stream_copy, side_stream.handle, moved, chunk, self._signal + self._deltas[peer], stamp)


def _queue(copy: Callable[..., None], stream: int, moved: Copy, chunk: int, signal: int, stamp: int) -> None:
    """Queue copies of at most ``chunk`` bytes each, and behind them that of the stamp."""
    for at in range(0, moved.nbytes, chunk):
        copy(stream, moved.at + at, moved.begin + at, min(chunk, moved.nbytes - at))
    copy(stream, signal, stamp, 8)
