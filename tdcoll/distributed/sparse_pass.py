# SPDX-License-Identifier: Apache-2.0
"""The sparse gradients of one backward pass, which are reduced together: :class:`Pass`. For the
hook of DDP (:mod:`.ddp`) and the reducer without DDP (:mod:`.sparse_reducer`)."""

from __future__ import annotations

import logging
import threading
from typing import Any

import torch
import torch.distributed as dist

from tdcoll import runtime
from tdcoll.distributed.call import Call
from tdcoll.distributed.fallback import sparse_sum_by_gather
from tdcoll.distributed.handlers import GroupInfo
from tdcoll.distributed.options import Options
from tdcoll.distributed.queues import Queue, QueuedCall, TaskWork
from tdcoll.distributed.sparse import SparseAllReduce
from tdcoll.distributed.work import backend_errors, current_stream, record_streams

_log = logging.getLogger("tdcoll")

_making = threading.Lock()
"""Held by the thread that looks for the object of a group, because two of one group would need two
contexts."""


def group_of(requested: Any) -> Any:
    """Return the process group that a caller asked for: the default one if it is None."""
    group = dist.group.WORLD if requested is None else requested
    if group is None:
        raise ValueError(
            "there is no default process group; call init_process_group first, or pass a group"
        )
    return group


def sums_of(group: Any) -> SparseAllReduce:
    """Return the object that reduces a group's sparse gradients. The job keeps it."""
    owner = runtime.current()
    key = ("tdcoll.distributed", owner.ranks_of(group))
    with _making:
        found: SparseAllReduce | None = owner.contexts.get(key)
        if found is None:
            queue = Queue(owner.control.part("sparse gradients of " + "-".join(map(str, key[1]))))
            found = SparseAllReduce(GroupInfo(owner, key[1], owner.timeout_s, Options()), queue)
            if owner.device.type == "cuda":
                queue.stream = torch.cuda.Stream(owner.device)
            owner.contexts[key] = found
    return found


class Pass:
    """The sparse gradients of one model in one backward pass, which are reduced together.

    A model has dozens of tables, so this does as little as possible for each of them.

    Attributes:
        group: the process group.
        task: the call, if the queue makes it.
    """

    task: QueuedCall | None = None

    def __init__(self, group: Any) -> None:
        self.sums = sums_of(group)
        self.group = group
        self._gradients: list[torch.Tensor] = []
        self._streams: dict[int, Any] = {}
        """On a GPU: the streams of gradients."""
        self._futures: list[Any] = []
        """A future of the mean of each gradient, for DDP."""

    def add(self, gradient: torch.Tensor, stream: Any) -> None:
        """Take a sparse gradient, which is behind what ``stream`` has now."""
        self._gradients.append(gradient)
        if stream is not None:
            self._streams[stream.stream_id] = stream

    def future(self) -> Any:
        """Return a future of the mean of the gradient that was added last."""
        future: Any = torch.futures.Future()
        self._futures.append(future)
        return future

    def end(self) -> None:
        """Reduce the gradients, and set their futures.

        The futures know of no streams, which takes the host less time: the current stream is behind
        all results, and at the end of a backward pass PyTorch orders the caller's stream behind
        that one.
        """
        for future, gradient, mean in zip(
            self._futures, self._gradients, self.reduce(), strict=True
        ):
            # DDP copies a result into the gradient, unless it is the gradient itself
            gradient.data = mean
            future.set_result(gradient)

    def submit(self) -> None:
        """Let the queue's thread make the call beside the backward pass. If the process group has
        to make it, :meth:`reduce` does, since the backward pass makes other calls of the group."""
        queue = self.sums.queue
        if self.sums.why_unsupported(Call(self._gradients, self._gradients, "mean")) is None:
            events = [stream.record_event() for stream in self._streams.values()]
            if queue.stream is not None:
                # a reducer may be dropped before it waits
                record_streams(self._gradients, queue.stream)

            def make() -> list[torch.Tensor]:
                for event in events:
                    queue.stream.wait_event(event)
                return self._reduce(self._gradients)

            self.task = QueuedCall(make, queue.stream, abort=self.sums.abort)
            queue.submit(self.task)

    def reduce(self) -> list[torch.Tensor]:
        """Return the mean of each gradient. On a GPU the current stream waits for them, and the
        gradients' streams for what reads these."""
        if self.task is not None:
            stream = self.sums.queue.stream
            others = list(self._streams.values())
        else:
            self.sums.queue.drain()
            stream = stream_of(self._gradients[0])
            others = [other for other in self._streams.values() if other != stream]
            for other in others:
                stream.wait_stream(other)
        try:
            if self.task is None:
                with backend_errors:
                    return self._reduce(self._gradients)
            TaskWork(self.task).wait()
            return self.task.result
        finally:
            for other in others:
                other.wait_stream(stream)

    def _reduce(self, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the mean of each, on the current stream."""
        call = Call(gradients, gradients, "mean")
        why = self.sums.why_unsupported(call)
        if why is None:
            why = self.sums.prepare(call)
            if why is None:
                return self.sums.reduce(gradients, "mean")
        elif len(gradients) > 1:
            return self._reduce_apart(gradients)
        _log.warning("sparse gradients go through the process group: %s", why)
        return [sparse_sum_by_gather(self.group, gradient, "mean") for gradient in gradients]

    def _reduce_apart(self, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the mean of each, where the refused ones have calls of their own."""
        together: list[int] = []
        means = list(gradients)
        for place, gradient in enumerate(gradients):
            if self.sums.why_unsupported(Call([gradient], [gradient], "mean")) is None:
                together.append(place)
        if len(together) == len(gradients):  # They are refused together only.
            together = []
        if together:
            made = self._reduce([gradients[place] for place in together])
            for place, mean in zip(together, made, strict=True):
                means[place] = mean
        for place in sorted(set(range(len(gradients))) - set(together)):
            (means[place],) = self._reduce([gradients[place]])
        return means


def stream_of(tensor: torch.Tensor) -> Any:
    """Return the current stream of a tensor's GPU; None without one."""
    return current_stream(tensor.device.index) if tensor.is_cuda else None
