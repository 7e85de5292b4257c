# SPDX-License-Identifier: Apache-2.0
"""From a plan to launches: which kernel, how many programs, and the arguments, which are bound by their names."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from tdcoll import capture
from tdcoll.collectives._host.launch import Launch
from tdcoll.collectives._host.plan import LAMPORT_WORD_BYTES, Facts, Plan
from tdcoll.context import CollectiveContext
from tdcoll.primitives.group import Window
from tdcoll.primitives.puts import Routes
from tdcoll.primitives.reduce import OPERATIONS, accumulator, triton_dtype
from tdcoll.runtime.topology import Topology

__all__ = ["Algorithm", "Launches", "Planned", "arithmetic", "local_peers", "make_routes", "of_words"]
__all__ += ["on_device", "outside_of_graphs", "programs_of_words", "successors", "tiles"]


@dataclass(frozen=True)
class Planned:
    """A kind of call, and what was decided about it.

    Attributes:
        ctx: the context.
        facts: of the call; ``nbytes`` is what one launch moves of each segment.
        plan: how.
        options: what else the kernel depends on, such as dtype and operation.
        stride: bytes from one segment of the caller's tensor to the next.
        width: bytes of data in a word, where it goes by words that need no signal, which land in memory of their own;
            else 0.
        deltas: int64 ``[world]``: from an address in the caller's memory, where peers reach it, to the same on each.
    """

    ctx: CollectiveContext
    facts: Facts
    plan: Plan
    options: Any
    stride: int
    width: int
    deltas: torch.Tensor

    @property
    def in_buffer(self) -> bool:
        """True where peers write to the caller's buffer."""
        return self.facts.in_place and not self.width

    @property
    def window(self) -> Window:
        """Where peers write to: the caller's buffer, or the context's inbox."""
        ctx = self.ctx
        if self.in_buffer:
            return Window(0, self.facts.nbytes, self.deltas, tl.constexpr(1))
        return Window(ctx.staging.data_ptr(), ctx.capacity, ctx.device_group.deltas, tl.constexpr(2))

    @property
    def early(self) -> bool:
        """True where the launch may begin before the one ahead has ended.

        A call in place of many bytes is slower if it does. On 2 H200s it takes 18.0 us and not 16.9 at 4 MB per rank,
        and 202 us and not 190 at 64 MB.
        """
        return self.ctx.early and not (self.in_buffer and self.facts.nbytes > 2 << 20)

    @property
    def words(self) -> Window:
        """The context's flagged words."""
        flagged = self.ctx.flagged
        return Window(flagged.data_ptr(), 16 * flagged.shape[2], self.ctx.device_group.deltas, tl.constexpr(2))

    def values(self) -> dict[str, Any]:
        """Arguments that kernels of any collective may have, by the names of their parameters."""
        plan, facts = self.plan, self.facts
        return {
            "window": self.window,
            "words": self.words,
            "g": self.ctx.device_group,
            "nbytes": facts.nbytes,
            "source_stride": self.stride,
            "chunk": plan.chunk,
            "channels": plan.channels,
            "blocks": plan.channels,
            "straight": self.deltas,
        }


@dataclass(frozen=True)
class Algorithm:
    """How an algorithm is launched.

    Attributes:
        kernel: made by :func:`tdcoll.jit`. Its parameters begin with ``source`` and ``out``, addresses; the others say
            by their names what they take.
        programs: of its grid.
        values: arguments, beyond those that kernels of any collective may have, by name.
    """

    kernel: Callable[[Planned], Any]
    programs: Callable[[Planned], int]
    values: Callable[[Planned], Mapping[str, Any]] = lambda call: {}


def arithmetic(call: Planned) -> dict[str, Any]:
    """The constants of a reduction's kernel. Options of such a call are its dtype and its operation."""
    dtype, op = call.options
    return {"DTYPE": triton_dtype(dtype), "ACC": accumulator(dtype), "OP": OPERATIONS[op]}


def tiles(call: Planned) -> dict[str, Any]:
    """Return the constants of a reduction by chunks: those of :func:`arithmetic`, ``COUNT`` and ``WAITED``.

    A thread has 16 bytes of a tile. Of elements of one byte it has 4: with 8, of each of 8 ranks, it would run out of
    registers.
    """
    size = call.options[0].itemsize
    per_thread = 16 // size if size > 1 else 4
    waited = triton.next_power_of_2(call.ctx.world_size)
    return {**arithmetic(call), "COUNT": 32 * call.plan.num_warps * per_thread, "WAITED": waited}


def of_words(call: Planned) -> dict[str, Any]:
    """Return what kernels that reduce words take (:mod:`tdcoll.primitives.words`)."""
    announced = call.width == LAMPORT_WORD_BYTES
    inbox, block = call.ctx.device_lamport if announced else call.words, call.plan.chunk // call.width
    looped = programs_of_words(call) < call.plan.channels
    return {**arithmetic(call), "inbox": inbox, "LAMPORT": announced, "BLOCK": block, "LOOPED": looped}


def programs_of_words(call: Planned) -> int:
    """Programs of such a kernel: one for each block of words, or as many as the context allows."""
    return min(call.plan.channels, call.ctx.max_programs - 1)


def on_device(ctx: CollectiveContext, operation: str, key: Hashable, make: Callable[[], Any]) -> Any:
    """Return what ``make`` copies to the device, once for as long as the context lives."""
    if key not in ctx.tables:
        outside_of_graphs(ctx, operation)
        ctx.tables[key] = make()
    return ctx.tables[key]


def outside_of_graphs(ctx: CollectiveContext, operation: str) -> None:
    """Refuse to compile a kernel or to copy to the device while a CUDA graph is captured."""
    capture.refuse(
        ctx.device, operation,
        "the first call of a kind on a context prepares what a CUDA graph cannot capture; make one such call, of about "
        "the same size, on every rank before capturing",
    )  # fmt: skip


def local_peers(topology: Topology) -> list[int]:
    """The other ranks of this node, the successor first, so that no rank is everybody's first target."""
    mates = topology.members[topology.node]
    return [mates[(topology.place + i) % len(mates)] for i in range(1, len(mates))]


def successors(topology: Topology) -> list[int]:
    """All other ranks, likewise."""
    return [(topology.rank + i) % topology.world_size for i in range(1, topology.world_size)]


def make_routes(ctx: CollectiveContext, local: list[int], remote: list[int], more: Sequence[int] = ()) -> Routes:
    """:class:`Routes` to group ranks, on the device, with ``more`` numbers after them."""
    pes = ctx.topology.pes
    entries = [*local, *(pes[rank] for rank in local), *remote, *(pes[rank] for rank in remote), *more]
    return Routes(torch.tensor(entries or [0], dtype=torch.int32, device=ctx.device), len(local), len(remote))


class Launches:
    """The launches of one kind of call: one, or one for each epoch of a larger call."""

    group = None
    """A process group that does it instead: none."""

    def __init__(self, operation: str, algorithm: Algorithm, calls: list[Planned]) -> None:
        self._context, self._operation, self.plan = calls[0].ctx, operation, calls[0].plan
        in_buffer = calls[0].in_buffer
        changing = ("source", "out", "window.base") if in_buffer else ("source", "out")
        self.kernel = kernel = algorithm.kernel(calls[0])
        launches: dict[Planned, Launch] = {}
        constants: set[tuple[str, Any]] = set()
        for call in dict.fromkeys(calls):
            known = {**call.values(), **algorithm.values(call)}
            arguments = {name: known[name] for name in kernel.arg_names if name in known}
            constants.update((name, value) for name, value in arguments.items() if name.isupper())
            launches[call] = Launch(
                kernel,
                algorithm.programs(call),
                arguments,
                changing,
                num_warps=call.plan.num_warps,
                early=call.early,
            )
        self._launches = list(launches.values())
        options = frozenset((call.plan.num_warps, call.early) for call in calls)
        self._variant = (operation, kernel.__name__, frozenset(constants), options, in_buffer)
        first, offsets = launches[calls[0]], [(launches[call], i) for i, call in enumerate(calls)]
        room = calls[0].facts.nbytes

        def run_all(stream: int, source: int, out: int) -> None:
            for launch, epoch in offsets:
                launch(stream, source + epoch * room, out + epoch * room)

        self.run: Callable[[int, int, int], None] = first.__call__ if len(calls) == 1 else run_all
        """Launches, given the handle of the stream and addresses of source and result."""
        if in_buffer:
            self.run = lambda stream, source, out: first(stream, source, 0, out)

    def __call__(self, tensor: torch.Tensor, out: torch.Tensor) -> None:
        """Make the call."""
        self.at(tensor.data_ptr(), out.data_ptr())

    def at(self, source: int, out: int) -> None:
        """Make the call, given addresses: of what this rank brings, and of the result or the buffer of both."""
        self.run(self._context.current_stream(), source, out)

    def prepare(self) -> None:
        """Compile and load the kernel, before the call begins: what fails here leaves the context as it was.

        Raises:
            ContextError: a CUDA graph is being captured, and the context has made no call of this kind yet.
        """
        if all(launch.prepared for launch in self._launches):
            return
        if self._variant not in self._context.tables:
            outside_of_graphs(self._context, self._operation)
        for launch in self._launches:
            launch.prepare()
        self._context.tables[self._variant] = True
