# SPDX-License-Identifier: Apache-2.0
"""One epoch of a dense call, decided: :class:`LaunchSpec`, from which its steps are made.

The functions here return arguments of kernels by the names of their parameters, for the ``values``
of an :class:`~tdcoll.calls.spec.Algorithm`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import triton
import triton.language as tl

from tdcoll.base import capture
from tdcoll.base.limits import SHARED_REGISTERS
from tdcoll.calls.context import CollectiveContext
from tdcoll.calls.epilogues import NO_EPILOGUE, Epilogue
from tdcoll.calls.kernel_launch import KernelLaunch
from tdcoll.calls.plan import Facts, Landing, Plan, shares_gpu
from tdcoll.calls.spec import Algorithm
from tdcoll.calls.steps import Step
from tdcoll.calls.words import LAMPORT_WORD_BYTES, LL_WORD_BYTES, Words, per_chunk
from tdcoll.primitives.group import Inbox
from tdcoll.primitives.puts import Routes
from tdcoll.primitives.reduce import OPERATIONS, accumulator, triton_dtype
from tdcoll.runtime.topology import Topology

_Table = TypeVar("_Table")


class KernelOptions(NamedTuple):
    """The options of the kernels of a dense call, beside its facts.

    Attributes:
        dtype: Of the elements that are reduced; None if bytes are moved as they are.
        op: The reduction, one of :data:`~tdcoll.primitives.reduce.OPERATIONS`; None without one.
        device_counted: Each segment begins with the number of bytes that it uses, itself included.
        root: The group rank whose data goes to all, of a collective that is rooted.
        epilogue: Of a reduction; None without one.
    """

    dtype: torch.dtype | None = None
    op: str | None = None
    device_counted: bool = False
    root: int = 0
    epilogue: Epilogue | None = None

    @property
    def compiled_form(self) -> Hashable:
        """Everything that compiled kernels depend on, the same on all ranks."""
        if self.epilogue is None:
            return self
        return self._replace(epilogue=None), self.epilogue.compiled_form

    @property
    def epilogue_arguments(self) -> dict[str, Any]:
        """The arguments of a reduction's kernel that its epilogue needs, by name."""
        return NO_EPILOGUE if self.epilogue is None else self.epilogue.arguments

    @property
    def changing(self) -> tuple[str, ...]:
        """The arguments that each launch of a reduction's kernel brings."""
        more = () if self.epilogue is None else self.epilogue.changing
        return ("source", "out", *more)


NO_OPTIONS = KernelOptions()


@dataclass(frozen=True)
class LaunchSpec:
    """One epoch of a kind of call, and what was decided about it.

    Attributes:
        operation: The collective's name, for errors.
        facts: Of the call; ``nbytes`` is what this epoch moves of each segment.
        segment_stride: Bytes from one segment of the caller's tensor to the next.
        word_bytes: Bytes of data per word if the call uses LL or Lamport words, which land in
            memory of their own; else 0.
    """

    operation: str
    ctx: CollectiveContext
    facts: Facts
    plan: Plan
    options: KernelOptions
    segment_stride: int
    word_bytes: int

    @property
    def lands_in_caller_buffer(self) -> bool:
        """Whether peers write to the caller's buffer. Words never land there."""
        return self.facts.landing is Landing.CALLER_BUFFER and not self.word_bytes

    @property
    def inbox(self) -> Inbox:
        """The memory that peers write to: the caller's buffer, or the context's inbox."""
        ctx = self.ctx
        deltas = ctx.device_group.deltas
        if self.lands_in_caller_buffer:
            return Inbox(0, self.facts.nbytes, deltas, tl.constexpr(1))
        return Inbox(ctx.inbox.data_ptr(), ctx.capacity, deltas, tl.constexpr(2))

    @property
    def flagged_words(self) -> Inbox:
        """The context's LL words."""
        flagged = self.ctx.flagged
        deltas = self.ctx.device_group.deltas
        return Inbox(flagged.data_ptr(), 16 * flagged.shape[2], deltas, tl.constexpr(2))

    def values(self) -> dict[str, Any]:
        """Return arguments that kernels of any collective may have."""
        return {
            "inbox": self.inbox,
            "words": self.flagged_words,
            "g": self.ctx.device_group,
            "nbytes": self.facts.nbytes,
            "source_stride": self.segment_stride,
            "out_stride": self.segment_stride,
            "chunk": self.plan.chunk,
            "chunks": self.plan.chunks,
            "blocks": self.plan.chunks,
            "root": self.options.root,
            "out_deltas": self.ctx.device_group.deltas,
            **self.options.epilogue_arguments,
        }


def epoch_step(algorithm: Algorithm, spec: LaunchSpec) -> tuple[Step, set[Hashable]]:
    """Return the step of one epoch, and whatever its compiled kernels depend on."""
    if algorithm.copies is not None:
        copies = algorithm.copies(spec)
        return copies, {copies.variant}
    kernel = algorithm.kernel(spec.facts)
    values = {**spec.values(), **algorithm.values(spec)}
    arguments: dict[str, Any] = {}
    variant: set[Hashable] = set()
    for name in kernel.arg_names:
        if name in values:
            arguments[name] = values[name]
            if name.isupper():  # a constant
                variant.add((name, values[name]))
    changing = list(spec.options.changing)
    if spec.lands_in_caller_buffer:
        changing.append("inbox.base")
    allow_pdl = spec.ctx.allow_pdl and algorithm.allow_pdl(spec.facts)
    variant.add((kernel.__name__, spec.plan.num_warps, allow_pdl))
    if spec.options.epilogue is not None:
        variant.add(spec.options.epilogue.compiled_form)
    launch = KernelLaunch(
        kernel,
        spec.plan.blocks,
        arguments,
        changing,
        num_warps=spec.plan.num_warps,
        allow_pdl=allow_pdl,
        maxnreg=SHARED_REGISTERS if shares_gpu(spec.facts) else None,
    )
    return launch, variant


# ---------------------------------------------------------------------- values of reductions


def arithmetic(spec: LaunchSpec) -> dict[str, Any]:
    """Return the constants of a reduction's kernel."""
    dtype = spec.options.dtype
    op = spec.options.op
    assert dtype is not None
    assert op is not None
    return {"DTYPE": triton_dtype(dtype), "ACC": accumulator(dtype), "OP": OPERATIONS[op]}


def tiles(spec: LaunchSpec) -> dict[str, Any]:
    """Return the constants of a reduction by chunks: :func:`arithmetic`, ``TILE`` and
    ``WORLD_POW2``.

    A thread has 16 bytes of a tile, or 4 if elements have one byte: with 8 from each of 8 ranks, it
    would run out of registers. Where few thread blocks do all the work, a thread has up to 64
    bytes, because it needs more of them on the way, if there are few ranks; not with an epilogue,
    which needs registers of its own.
    """
    dtype = spec.options.dtype
    assert dtype is not None
    world = spec.ctx.world_size
    per_thread = 16 // dtype.itemsize if dtype.itemsize > 1 else 4
    few_blocks = spec.plan.algorithm in ("loop", "ce")
    if few_blocks and dtype.itemsize > 1 and spec.options.epilogue is None:
        per_thread *= max(1, 8 // max(2, triton.next_power_of_2(world)))
    return {
        **arithmetic(spec),
        "TILE": 32 * spec.plan.num_warps * per_thread,
        "WORLD_POW2": triton.next_power_of_2(world),
    }


def _values_of_words(spec: LaunchSpec) -> dict[str, Any]:
    """Return what kernels that reduce words take (:mod:`tdcoll.primitives.words`)."""
    by_lamport = spec.word_bytes == LAMPORT_WORD_BYTES
    return {
        **arithmetic(spec),
        "inbox": spec.ctx.device_lamport if by_lamport else spec.flagged_words,
        "LAMPORT": by_lamport,
        "BLOCK": spec.plan.chunk // spec.word_bytes,
        "PERSISTENT": spec.plan.blocks < spec.plan.chunks,
    }


def by_words(words: Words, kernel: Callable[[Facts], Any]) -> Algorithm:
    """Return the algorithm of a reduction by words."""
    return Algorithm(
        words.name,
        supports=words.supports,
        cut=words.cut,
        kernel=kernel,
        blocks=per_chunk,
        values=_values_of_words,
        words=(LAMPORT_WORD_BYTES, LL_WORD_BYTES),
        payload=words.payload,
        epoch=words.epoch,
    )


# ---------------------------------------------------------------------- tables on the device


def refuse_capture(ctx: CollectiveContext, operation: str) -> None:
    """Refuse to compile a kernel or to copy to the device while a CUDA graph is captured."""
    capture.refuse(
        ctx.device,
        operation,
        "the first call of a kind on a context prepares what a CUDA graph cannot capture; make one "
        "such call, of about the same size, on every rank before capturing",
    )


def device_table(
    ctx: CollectiveContext, operation: str, key: Hashable, make: Callable[[], _Table]
) -> _Table:
    """Return what ``make`` copies to the device, once for as long as the context lives."""
    if key not in ctx.tables:
        refuse_capture(ctx, operation)
        ctx.tables[key] = make()
    table: _Table = ctx.tables[key]
    return table


def local_peers(topology: Topology) -> list[int]:
    """Return the other ranks of this node, the successor first: no rank is everybody's first
    target."""
    mates = topology.members[topology.node]
    return [mates[(topology.place + i) % len(mates)] for i in range(1, len(mates))]


def successors(topology: Topology) -> list[int]:
    """Return all other ranks, the successor first."""
    return [(topology.rank + i) % topology.world_size for i in range(1, topology.world_size)]


def make_routes(ctx: CollectiveContext, local: list[int], remote: list[int]) -> Routes:
    """Return :class:`Routes` to group ranks, on the device."""
    pes = ctx.topology.pes
    entries = [*local, *(pes[rank] for rank in local), *remote, *(pes[rank] for rank in remote)]
    table = torch.tensor(entries or [0], dtype=torch.int32, device=ctx.device)
    return Routes(table, len(local), len(remote))


def rail_routes(ctx: CollectiveContext, operation: str) -> Routes:
    """Return :class:`Routes` to the other ranks of this node, and of its rail on other nodes."""

    def make() -> Routes:
        topology = ctx.topology
        other_nodes = [(topology.node + i) % topology.n_nodes for i in range(1, topology.n_nodes)]
        rail = [topology.members[node][topology.place] for node in other_nodes]
        return make_routes(ctx, local_peers(topology), rail)

    return device_table(ctx, operation, "rails", make)


def routes_beside_stores(ctx: CollectiveContext, operation: str) -> Routes:
    """Return :class:`Routes` to all other ranks; those that can be stored to are the local ones."""

    def make() -> Routes:
        local = local_peers(ctx.topology) if ctx.stores else []
        remote = [rank for rank in successors(ctx.topology) if rank not in local]
        return make_routes(ctx, local, remote)

    return device_table(ctx, operation, "routes beside stores", make)
