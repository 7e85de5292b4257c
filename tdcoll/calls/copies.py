# SPDX-License-Identifier: Apache-2.0
"""Calls whose data is moved by copy engines: the copies that the host issues, between the kernels of the protocol.

:mod:`tdcoll.primitives.copies` has the protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton

from tdcoll.base.limits import SHARED_REGISTERS
from tdcoll.calls.launch import Launch
from tdcoll.calls.launches import Planned, on_device, successors, tiles
from tdcoll.calls.plan import Facts, shares_gpu
from tdcoll.primitives import copies as kernels
from tdcoll.runtime.heap import SideStream


def kernel(facts: Facts) -> Any:
    """Return the kernel that begins every call by copies."""
    return kernels.enter


class Copy(NamedTuple):
    """``nbytes`` bytes, from ``begin`` bytes behind one address to ``at`` bytes behind another."""

    begin: int
    at: int
    nbytes: int


class Hop(NamedTuple):
    """The copies for all peers, and what is done when the stamps of all peers have arrived.

    Attributes:
        copies: by peer: a push from the tensor to the peer's inbox.
        of_result: pushes come from the result instead.
        pulled: they are pulls instead, from the peer's result to this rank's, which is symmetric.
        kept: from the tensor to the result of this rank, meanwhile.
        sum: launch that reduces what has arrived, given tensor and result.
        taken: from the inbox to the result, when all has arrived.
    """

    copies: Mapping[int, Copy]
    of_result: bool = False
    pulled: bool = False
    kept: Copy = Copy(0, 0, 0)
    sum: Launch | None = None
    taken: Sequence[Copy] = ()


def _once(call: Planned, key: str, make: Callable[[], Any]) -> Any:
    return on_device(call.ctx, call.operation, ("copies", key), make)


def _words(call: Planned) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the context's ``stamps`` and ``summed``, see :func:`tdcoll.primitives.copies.enter`."""
    device = call.ctx.device
    stamps = _once(call, "stamps", lambda: torch.zeros(2, dtype=torch.int64, device=device))
    return stamps, _once(call, "summed", lambda: torch.zeros(1, dtype=torch.int32, device=device))


class Copies:
    """A call by copies, in the place of a :class:`~.launch.Launch`. For one thread at a time."""

    def __init__(self, call: Planned, *hops: Hop) -> None:
        ctx, heap, self._call, self._hops = call.ctx, call.ctx.job.heap, call, hops
        self._deltas = [heap.peer_base(pe) - heap.base for pe in ctx.topology.pes]
        self._stamps, summed = _words(call)
        self._side_streams: dict[int, SideStream] = _once(
            call, "side streams", lambda: {peer: heap.side_stream() for peer in successors(ctx.topology)}
        )
        self._inbox, self._signals = ctx.inbox.data_ptr(), ctx.signals.data_ptr() + 8 * ctx.rank
        group, last = {"g": ctx.device_group, "WAITED": triton.next_power_of_2(ctx.world_size)}, hops[-1]
        words = {"stamps": self._stamps, "summed": summed}
        self._enter = Launch(kernels.enter, 1, {**group, **words}, (), num_warps=1)
        self._hear = []
        for number, hop in enumerate(hops):
            values = {**group, "hop": number, "PULLED": hop.pulled}
            self._hear.append(Launch(kernels.hear, 1, values, (), num_warps=1))
        self._look = Launch(kernels.look, 1, group, (), num_warps=1) if last.taken else None
        launches = [self._enter, *self._hear, *(hop.sum for hop in hops), self._look]
        self._launches = [launch for launch in launches if launch is not None]
        self.variant = ("copies", tuple(hop.pulled for hop in hops), call.options, call.plan.num_warps)

    @property
    def prepared(self) -> bool:
        """True once all kernels are compiled and loaded."""
        return all(launch.prepared for launch in self._launches)

    def prepare(self) -> None:
        """Compile and load the kernels."""
        for launch in self._launches:
            launch.prepare()

    def __call__(self, stream: int, source: int, *rest: int) -> None:
        """Make the call on the stream of this handle, the current one. The last address is that of the result.

        However the call ends, later work on the stream comes after the copies that it has queued, which read the
        caller's memory, and after those of peers that may pull from there: the caller may write to it and free it.
        """
        result, copy = rest[-1], self._call.ctx.job.heap.stream_copy
        self._enter(stream)
        for number, hop in enumerate(self._hops):
            forked: list[SideStream] = []
            try:
                self._send(number, hop, stream, source, result, forked)
                kept = hop.kept
                if kept.nbytes and source + kept.begin != result + kept.at:
                    copy(stream, result + kept.at, source + kept.begin, kept.nbytes)
                # Before the kernel, which graphs may put ahead of the copies that the peers' kernels wait for.
                _join(forked, stream)
                self._hear[number](stream)
            except BaseException:
                _join(forked, stream)  # again, for those that an interrupt may have left out
                if hop.pulled and forked:
                    self._hear[number](stream)
                raise
            if hop.sum is not None:
                hop.sum(stream, source, result)
            for part in hop.taken:
                if part.nbytes:
                    copy(stream, result + part.at, self._inbox + part.begin, part.nbytes)
        if self._look is not None:
            self._look(stream)

    def _send(
        self, number: int, hop: Hop, stream: int, source: int, result: int, forked: list[SideStream]
    ) -> None:  # fmt: skip
        """Queue the copies for all peers, each on a stream of its own, which is added to ``forked``."""
        ctx, chunk, stamp = self._call.ctx, self._call.plan.chunk, self._stamps.data_ptr() + 8 * number
        signal = self._signals + 8 * number * ctx.world_size
        for peer, side_stream in self._side_streams.items():
            side_stream.fork(stream)
            forked.append(side_stream)
            part, delta = hop.copies[peer], self._deltas[peer]
            begin = result if hop.of_result else source
            landing = self._inbox + delta
            if hop.pulled:
                begin = result + delta
                landing = result
            moved = Copy(begin + part.begin, landing + part.at, part.nbytes)
            _queue(ctx.job.heap.stream_copy, side_stream.handle, moved, chunk, signal + delta, stamp)


def _join(side_streams: Sequence[SideStream], stream: int) -> None:
    """Let later work on ``stream`` wait for what is queued on the others."""
    for side_stream in side_streams:
        side_stream.join(stream)


def _queue(copy: Callable[..., None], stream: int, moved: Copy, chunk: int, signal: int, stamp: int) -> None:
    """Queue copies of at most ``chunk`` bytes each, and behind them that of the stamp."""
    for at in range(0, moved.nbytes, chunk):
        copy(stream, moved.at + at, moved.begin + at, min(chunk, moved.nbytes - at))
    copy(stream, signal, stamp, 8)


def exchange(call: Planned, source_stride: int) -> Copies:
    """Every rank's segment for each rank goes to its place in that rank's result: all-gather and all-to-all.

    Args:
        source_stride: bytes from the segment for one rank to that for the next; 0 if there is one for all.
    """
    ctx, nbytes, room = call.ctx, call.facts.nbytes, call.ctx.capacity
    peers = successors(ctx.topology)
    if call.in_buffer:  # where each rank's own segment lies already
        return Copies(call, Hop(_in_place(peers, call.stride, dict.fromkeys(peers, nbytes)), pulled=True))
    pushes = {peer: Copy(peer * source_stride, ctx.rank * room, nbytes) for peer in peers}
    kept = Copy(ctx.rank * source_stride, ctx.rank * call.stride, nbytes)
    taken = [Copy(peer * room, peer * call.stride, nbytes) for peer in reversed(peers)]
    return Copies(call, Hop(pushes, kept=kept, taken=taken))


def sums(call: Planned, stride: int, sizes: Sequence[int], whole: bool, pulled: bool = False) -> Hop:
    """Return the hop that brings each rank its part of all tensors, and sums them.

    Args:
        stride: bytes from the part of one rank to that of the next.
        whole: a part has the same place in the result as in the tensor; otherwise the result is this rank's part.
        pulled: peers then pull the sum.
    """
    ctx, plan = call.ctx, call.plan
    stamps, summed = _words(call)
    values = {**tiles(call), "inbox": call.inbox, "g": ctx.device_group, "WHOLE": whole, "PULLED": pulled}
    values |= {"stamps": stamps, "summed": summed, "nbytes": sizes[ctx.rank], "at": ctx.rank * stride}
    most = SHARED_REGISTERS if shares_gpu(call.facts) else None
    sum = Launch(kernels.sum_copies, plan.blocks, values, ("source", "out"), num_warps=plan.num_warps, maxnreg=most)
    at = ctx.rank * ctx.capacity
    return Hop({peer: Copy(peer * stride, at, sizes[peer]) for peer in successors(ctx.topology)}, sum=sum)


def gathered(call: Planned, stride: int, sizes: Sequence[int], second: int, pulled: bool) -> Hop:
    """Return the hop that brings each rank the sums of all others.

    Args:
        stride, sizes: of the parts, as for :func:`sums`.
        second: where sums that are pushed begin in a segment of the inbox, in bytes.
    """
    ctx = call.ctx
    peers, mine = successors(ctx.topology), ctx.rank * stride
    if pulled:
        return Hop(_in_place(peers, stride, dict(enumerate(sizes))), pulled=True)
    push = Copy(mine, ctx.rank * ctx.capacity + second, sizes[ctx.rank])
    taken = [Copy(peer * ctx.capacity + second, peer * stride, sizes[peer]) for peer in peers]
    return Hop(dict.fromkeys(peers, push), of_result=True, taken=taken)


def _in_place(peers: Sequence[int], stride: int, sizes: Mapping[int, int]) -> dict[int, Copy]:
    """Return the pulls of each peer's segment from its place there to the same place here."""
    return {peer: Copy(peer * stride, peer * stride, sizes[peer]) for peer in peers}
