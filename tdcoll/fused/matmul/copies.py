# SPDX-License-Identifier: Apache-2.0
"""The steps of an all-gather + matmul for which copy engines send.

Scope: that of :mod:`tdcoll.fused.matmul.kernels_gather`, for shards of at least one tile of rows.
No multiprocessor sends, so all of them multiply. In return every call begins with a hop, in which
the ranks wait until all have entered, so copy engines are for large shards.

Steps of a call, seen from rank r::

    enter: begin an even epoch, and end when all ranks have entered        (one thread block)
    side stream, behind enter, for each peer, the successor first:
        scales of the shard's rows --copy--> behind the gathered matrix in the peer's inbox
        each piece of the shard    --copy--> shard r of the peer's inbox, then enter's stamp
                                   --copy of 8 bytes--> arrived[0, piece, r] on the peer
    current stream, behind enter: multiply the own shard; the others, as the stamps of pieces come
    later work: behind both

All copies are on one stream, because one copy fills the link, and a peer then has a whole shard
early instead of a part of every shard. Rank r sends to rank r + 1 first, which multiplies that
shard first of those that it has to wait for.

:mod:`tdcoll.primitives.copies` has the order of copies and stamps, the reasons why memory may be
used again, and what happens if a rank gives up.

**Why the matmul doesn't wait forever.** It has a thread block on every multiprocessor, and these
stay there until the stamps of all peers have come. So nothing that leads to a stamp may need a
multiprocessor of this rank, or come behind such a matmul on a peer.

- The stamp of a peer comes behind copies that wait only for the peer's ``enter``. That kernel waits
  for ``enter`` of all ranks, which is ahead of the matmul on the stream of each rank. When a matmul
  runs, all ranks have therefore entered, and the copies of all can begin.
- Copies to another GPU are made by copy engines. Copies inside a GPU may be made by a kernel of the
  driver's, in graphs. There is none in a call: the own shard is multiplied where it lies.
- The host queues the copies before the matmul. If CUDA brings both streams to the GPU through one
  hardware queue, the queue keeps that order, so no copy comes behind the matmul of its own call.
- All kernels of a call are loaded before the rank enters its first call of the kind.
- Contexts with ``max_blocks``, whose launches run beside others, don't take this algorithm.

A CUDA graph has no order between copies and matmul, only that both are behind ``enter``. If the
driver put the matmul first on every rank, the copies would be behind kernels that wait for them.
And if ranks share a GPU, a copy may need one of its multiprocessors. In both cases the call has two
launches: the first multiplies the own shard, beside the copies, and waits for nothing; the second
begins when this rank's copies are done, and multiplies the others. Then no copy of any rank can
wait for a matmul. The peers see no difference, so some ranks may replay a graph and others not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tdcoll.calls.context import CollectiveContext
from tdcoll.calls.copies import Copy, CopyEngines
from tdcoll.calls.launch_spec import device_table, successors
from tdcoll.calls.steps import Step
from tdcoll.job.lifecycle import may_share_gpus


class ShardCopies:
    """The copies of this rank's shard, and of the scales of its rows, to all peers.

    Args:
        nbytes: Of a shard.
        piece: Bytes of a piece.
        rows: Of a shard.
        scale: Name of the tensor that has a scale for each row; None without scales.
    """

    def __init__(
        self,
        ctx: CollectiveContext,
        operation: str,
        engines: CopyEngines,
        *,
        nbytes: int,
        piece: int,
        rows: int,
        scale: str | None,
    ) -> None:
        key = ("copies", "one side stream")
        self._side_stream = device_table(ctx, operation, key, ctx.job.heap.side_stream)
        self._engines = engines
        self._peers = successors(ctx.topology)
        own_shard = ctx.rank * nbytes
        self._pieces = [
            Copy(begin, own_shard + begin, min(piece, nbytes - begin))
            for begin in range(0, nbytes, piece)
        ]
        self._scale = scale
        self._scales = Copy(0, ctx.world_size * nbytes + 4 * rows * ctx.rank, 4 * rows)

    def fork(self, stream: int) -> None:
        """Let the copies wait for what ``stream`` has so far."""
        self._side_stream.fork(stream)

    def join(self, stream: int) -> None:
        """Let later work on ``stream`` wait for the copies."""
        self._side_stream.join(stream)

    def queue(self, frame: Mapping[str, Any]) -> None:
        """Queue the copies of a call."""
        engines = self._engines
        stream = self._side_stream.handle
        source = frame["x"].data_ptr()
        for peer in self._peers:
            landing = engines.inbox + engines.deltas[peer]
            if self._scale is not None:
                scales = frame[self._scale].data_ptr()
                engines.queue(stream, scales, landing, self._scales, self._scales.nbytes)
            for number, piece in enumerate(self._pieces):
                engines.queue(stream, source, landing, piece, piece.nbytes)
                # Behind the piece, so that it arrives after the piece.
                engines.queue_stamp(stream, peer, 0, number)


class CopiedShardsStep:
    """Queues the copies of a call and its matmul, behind ``enter``; see the module.

    However the step ends, later work on the current stream comes after the copies that it has
    queued, which read the caller's memory.

    Args:
        whole: The launch that multiplies all shards.
        own, others: The launches that multiply the own shard, and all others.
    """

    def __init__(
        self, ctx: CollectiveContext, copies: ShardCopies, whole: Step, own: Step, others: Step
    ) -> None:
        self._ctx = ctx
        self._copies = copies
        self._whole = whole
        self._own = own
        self._others = others

    @property
    def prepared(self) -> bool:
        return all(step.prepared for step in (self._whole, self._own, self._others))

    def prepare(self) -> None:
        for step in (self._whole, self._own, self._others):
            step.prepare()

    def __call__(self, stream: int, frame: Mapping[str, Any]) -> None:
        copies = self._copies
        copies.fork(stream)
        try:
            copies.queue(frame)
            if self._ctx.capturing or may_share_gpus():
                self._own(stream, frame)
                copies.join(stream)
                self._others(stream, frame)
            else:
                self._whole(stream, frame)
                copies.join(stream)
        except BaseException:
            copies.join(stream)  # Again, because an interrupt may have left it out.
            raise
