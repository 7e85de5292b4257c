# SPDX-License-Identifier: Apache-2.0
"""FSDP2's collectives on tdcoll's kernels: the objects that FSDP2 calls, and the buffers that they
gather into.

FSDP2 asks its all-gather for memory (``allocate``), copies this rank's shard to its place there on
a *copy-in stream*, lets the *gather stream* wait for that, calls the all-gather there, and copies
the parameters out of the memory on the stream of the forward or backward pass, behind an event. It
drops the memory when it has let both of its own streams wait for that copy. It does the same with
the memory of a reduce-scatter, on one stream.

**The ring.** All-gathers of a set of ranks take the buffers of one :class:`Ring` in turn: the k-th
call uses buffer k mod n, whatever its size. A buffer is chosen by the number of calls before it,
so all ranks choose the same one, because they make the same calls in the same order. That is what
an all-gather in place needs: the buffer has the same offset on every rank. An allocation for which
no call has come (a copy failed in between) doesn't count.

**Who writes, who waits.** The copy-in writes this rank's own segment of a buffer. The call writes
the other segments: this rank's copy engines pull them, or peers store them. Either begins when the
ranks have entered the call (:mod:`tdcoll.primitives.copies`, :mod:`tdcoll.collectives.exchange`),
and a rank enters it behind its copy-in.

**Why a buffer may be used again.** Its last call was k, and call k + n comes now.

- Call k is over, because the stream that gets the buffer waits for an event behind it. Call k ends
  when this rank has pulled from all peers and all peers have pulled from this rank.
- The copy out of the buffer is over, because FSDP2 has dropped the memory. The ring sees that by a
  weak reference to its storage. FSDP2 keeps the rule of PyTorch's allocator: memory that is dropped
  may be used again, in order, on the stream that allocated it. If another stream gets the buffer,
  it waits for that stream first.
- A peer's buffer is written when that peer has entered call k + n, behind its own copy-in.

**If FSDP2 still holds the memory,** the call goes through the group, into ordinary memory, and takes
the buffer's turn. FSDP2 holds more results at a time if modules are prefetched by the user. It also
holds that of a module which it has prefetched for the backward pass in vain, because the module takes
no part in it, until that pass ends. The order of FSDP2's calls on the host decides what it holds, and
is the same on all ranks. If ranks differed nevertheless, those that use the buffer would wait
for the others until their deadline, and nothing would be overwritten.

**Reduce-scatters** need no ring: their data lands in the inbox of their context, so their input and
output are memory of PyTorch's allocator. (The output becomes the gradient, which lives on.)

**Two contexts.** An all-gather that is prefetched and a reduce-scatter may be in flight together.
Each has a context with its own thread blocks and its own order of launches, so neither waits for
the other. FSDP2 makes the calls of both in one order on all ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from tdcoll.base.errors import ContextError, NotInitializedError
from tdcoll.base.torch_fsdp import ParameterGroup, default_collectives
from tdcoll.base.torch_internals import never_compiled
from tdcoll.calls.collective import CollectiveOptions
from tdcoll.calls.collective_epilogue import run_with_epilogue
from tdcoll.calls.context import CollectiveContext
from tdcoll.calls.run import run
from tdcoll.calls.sharded import GATHER, SCATTER, CallPolicy
from tdcoll.collectives.all_gather.spec import OPERATION as ALL_GATHER
from tdcoll.collectives.reduce_scatter.spec import OPERATION as REDUCE_SCATTER
from tdcoll.collectives.reduce_scatter.spec import WITH_EPILOGUE
from tdcoll.distributed.arithmetic import PREMULTIPLIED, operation
from tdcoll.distributed.work import StreamWork, completed
from tdcoll.primitives.epilogue import Factor, times_factor
from tdcoll.primitives.reduce import OPERATIONS_OF

_log = logging.getLogger("tdcoll")

_HELD = (
    "FSDP2 holds what was gathered into all %d buffers, so some all-gathers go through the group. If "
    "you prefetch modules, pass tdcoll.distributed.fsdp.use(model, buffers=%d), or more. A module that "
    "takes no part in the backward pass has the same effect"
)


class _Buffer:
    """A buffer of a ring.

    Attributes:
        address: Of its first byte.
        storage: Weak reference to the storage that was handed out last; None before the first.
        stream: The stream that was current then; None on CPUs.
        gathered: Event behind the last call; None before the first, and on CPUs.
    """

    def __init__(self, address: int) -> None:
        self.address = address
        self.storage: Any = None
        self.stream: Any = None
        self.gathered: Any = None

    @property
    def in_use(self) -> bool:
        """Whether somebody holds the memory that was handed out."""
        return self.storage is not None and not self.storage.expired()


@never_compiled
class Ring:
    """The buffers for the all-gathers of one set of ranks, see the module.

    Args:
        ctx: The context of the all-gathers.
        buffers: ``[n, bytes]``, symmetric, uint8.
        algorithm: Of all calls; ``"auto"``: see :data:`tdcoll.calls.sharded.GATHER`.

    Attributes:
        ctx: As passed.
        calls: All-gathers made into buffers.
        turns: The same, and those that went through the group in a buffer's turn.
    """

    def __init__(self, ctx: CollectiveContext, buffers: torch.Tensor, algorithm: str) -> None:
        self.ctx = ctx
        self.calls = 0
        self.turns = 0
        self._algorithm = algorithm
        self._nbytes = buffers.shape[1]
        self._buffers = [_Buffer(buffer.data_ptr()) for buffer in buffers]
        self._side_stream: Any = None
        self._has_warned = False

    @property
    def _next(self) -> _Buffer:
        return self._buffers[self.turns % len(self._buffers)]

    def takes(self, nbytes: int) -> bool:
        """Return whether there is something to gather, and the buffers are large enough. All ranks
        agree, because FSDP2 pads shards."""
        return 0 < nbytes <= self._nbytes

    def owns(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor begins where a buffer does."""
        return any(tensor.data_ptr() == buffer.address for buffer in self._buffers)

    def skip(self) -> None:
        """Give the turn of the next buffer to a call that goes through the group."""
        self.turns += 1

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor | None:
        """``-> [numel]``: the buffer of the next call, on the current stream; None if FSDP2 still
        holds its memory.

        Raises:
            NotInitializedError: The job has ended, and its symmetric memory with it.
        """
        ctx = self.ctx
        if ctx.job.closed:
            raise NotInitializedError(f"all-gather of FSDP2: {ctx.job.why_closed}")
        buffer = self._next
        if buffer.in_use:
            if not self._has_warned:
                self._has_warned = True
                _log.warning(_HELD, len(self._buffers), len(self._buffers) + 1)
            return None
        if ctx.device.type == "cuda":
            current = torch.cuda.current_stream(ctx.device)
            if buffer.gathered is not None:
                current.wait_event(buffer.gathered)
            if buffer.stream is not None and current != buffer.stream:
                current.wait_stream(buffer.stream)
            buffer.stream = current
        # Views of one tensor share its storage, and this memory is to be dropped by itself.
        make: Any = torch._C._construct_storage_from_data_pointer
        storage = make(buffer.address, ctx.device, numel * dtype.itemsize)
        buffer.storage = StorageWeakRef(storage)
        return torch.empty(0, dtype=dtype, device=ctx.device).set_(storage, 0, (numel,), (1,))

    def gather(self, out: torch.Tensor, asynchronous: bool) -> Any:
        """Gather into the buffer of the next call, whose own segment is there; return the work.

        Raises:
            ContextError: ``out`` is not the memory that was allocated last.
            Others: As for :func:`tdcoll.all_gather_`.
        """
        buffer = self._next
        if out.data_ptr() != buffer.address:
            raise ContextError(
                f"all-gather of FSDP2: output_tensor must be the memory that was allocated last, "
                f"at {buffer.address:#x}; got a tensor at {out.data_ptr():#x}"
            )
        if not asynchronous or self.ctx.device.type != "cuda":
            self._launch(out, buffer)
            return completed([out], asynchronous=True) if asynchronous else None
        current = torch.cuda.current_stream(self.ctx.device)
        if self._side_stream is None:
            self._side_stream = torch.cuda.Stream(self.ctx.device, priority=-1)
        side_stream = self._side_stream
        side_stream.wait_stream(current)
        with torch.cuda.stream(side_stream):
            self._launch(out, buffer)
        check = self.ctx.monitor.raise_if_expired
        return StreamWork([out], side_stream, blocks=False, check=check, keep=[out])

    def _launch(self, out: torch.Tensor, buffer: _Buffer) -> None:
        algorithm = _algorithm(self._algorithm, GATHER, self.ctx, out.nbytes // self.ctx.world_size)
        options = CollectiveOptions(algorithm=algorithm, in_place=True)
        run(ALL_GATHER, (out,), options, None, self.ctx, ("output_tensor", "output_tensor"))
        self.calls += 1
        self.turns += 1
        if self.ctx.device.type == "cuda":
            if buffer.gathered is None:
                buffer.gathered = torch.cuda.Event()
            buffer.gathered.record()


@never_compiled
class Scatter:
    """Makes the reduce-scatters of one set of ranks.

    Args:
        ctx: Their context.
        algorithm: Of all calls; ``"auto"``: see :data:`tdcoll.calls.sharded.SCATTER`.

    Attributes:
        ctx: As passed.
        calls: Reduce-scatters made.
    """

    def __init__(self, ctx: CollectiveContext, algorithm: str) -> None:
        self.ctx = ctx
        self.calls = 0
        self._algorithm = algorithm

    def takes(self, dtype: torch.dtype, op: Any) -> bool:
        """Return whether there are kernels for such a reduction."""
        name = operation(op)
        if name == PREMULTIPLIED:
            return dtype in (torch.float32, torch.bfloat16)
        return name in OPERATIONS_OF.get(dtype, ())

    def reduce(self, out: torch.Tensor, tensor: torch.Tensor, op: Any) -> None:
        """Reduce-scatter ``tensor`` into ``out`` on the current stream.

        ``PREMUL_SUM`` multiplies the sum instead of its terms, in fp32, and rounds once.

        Raises:
            Those of :func:`tdcoll.reduce_scatter`.
        """
        ctx = self.ctx
        algorithm = _algorithm(self._algorithm, SCATTER, ctx, out.nbytes)
        name = operation(op)
        names = ("input_tensor", "output_tensor")
        if name == PREMULTIPLIED:
            factor = Factor(float(op.__getstate__()[1]))
            options = CollectiveOptions("sum", algorithm)
            run_with_epilogue(
                WITH_EPILOGUE, (tensor, out), options, times_factor, factor, None, ctx
            )
        else:
            options = CollectiveOptions(name, algorithm)
            run(REDUCE_SCATTER, (tensor, out), options, None, ctx, names)
        self.calls += 1


def _algorithm(wanted: str, policy: CallPolicy, ctx: CollectiveContext, nbytes: int) -> str:
    return policy.algorithm(nbytes, ctx.topology, ctx.stores) if wanted == "auto" else wanted


class Channels:
    """The rings and reduce-scatters of a model, by the ranks of their groups."""

    def __init__(self) -> None:
        self.rings: dict[tuple[int, ...], Ring] = {}
        self.scatters: dict[tuple[int, ...], Scatter] = {}
        self._ranks: dict[Any, tuple[int, ...]] = {}

    def ranks_of(self, group: dist.ProcessGroup) -> tuple[int, ...]:
        """Return the global ranks of a group."""
        found = self._ranks.get(group)
        if found is None:
            found = tuple(dist.get_process_group_ranks(group))
            self._ranks[group] = found
        return found


@never_compiled
class AllGather:
    """FSDP2's all-gather of one parameter group: the class ``AllGather`` of PyTorch by its
    methods."""

    def __init__(self, channels: Channels, group: ParameterGroup) -> None:
        self._channels = channels
        self._group = group
        self._default, _ = default_collectives()

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """``-> [*size]``: memory that the next all-gather gathers into.

        It is ordinary memory if the parameters have become larger than the buffers, or FSDP2 still
        holds what was gathered into the next one.
        """
        numel = torch.Size(size).numel()
        ring = self._channels.rings.get(self._channels.ranks_of(self._group.gather_group))
        if ring is None or not ring.takes(numel * dtype.itemsize):
            ordinary: torch.Tensor = self._default.allocate(size, dtype=dtype, device=device)
            return ordinary
        made = ring.allocate(numel, dtype)
        if made is None:
            made = self._default.allocate(size, dtype=dtype, device=device)
        return made

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        """``[n] -> [world * n]``: gather in place, because ``input_tensor`` lies in
        ``output_tensor``."""
        ring = self._channels.rings.get(self._channels.ranks_of(group))
        if ring is None or not ring.takes(output_tensor.nbytes):
            return self._default(output_tensor, input_tensor, group, async_op)
        if not ring.owns(output_tensor):
            ring.skip()
            return self._default(output_tensor, input_tensor, group, async_op)
        return ring.gather(output_tensor, async_op)


@never_compiled
class ReduceScatter:
    """FSDP2's reduce-scatter of one parameter group: the class ``ReduceScatter`` of PyTorch by its
    methods."""

    def __init__(self, channels: Channels) -> None:
        self._channels = channels
        _, self._default = default_collectives()

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """``-> [*size]``: memory of PyTorch's allocator, for the input or the output."""
        ordinary: torch.Tensor = self._default.allocate(size, dtype=dtype, device=device)
        return ordinary

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """``[world * n] -> [n]``: reduce-scatter on the current stream."""
        scatter = self._channels.scatters.get(self._channels.ranks_of(group))
        if scatter is None or not scatter.takes(input_tensor.dtype, op):
            return self._default(output_tensor, input_tensor, group, op, async_op)
        scatter.reduce(output_tensor, input_tensor, op)
        return completed([output_tensor], asynchronous=True) if async_op else None
