# SPDX-License-Identifier: Apache-2.0
"""From a plan to launches: arguments, which are bound by their names, and the epochs of a call."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import triton
import triton.language as tl

from tdcoll.base import arguments, capture
from tdcoll.base.arguments import byte_text
from tdcoll.base.limits import SHARED_REGISTERS
from tdcoll.base.ranges import ranged
from tdcoll.calls.context import CollectiveContext
from tdcoll.calls.explain import explain_call
from tdcoll.calls.launch import Launch
from tdcoll.calls.plan import LAMPORT_WORD_BYTES, LL_WORD_BYTES, Facts, Plan, Words, per_chunk, shares_gpu
from tdcoll.calls.pool import Prospect
from tdcoll.calls.spec import Algorithm, Collective
from tdcoll.calls.tuning import Section
from tdcoll.primitives.group import Inbox
from tdcoll.primitives.puts import Routes
from tdcoll.primitives.reduce import OPERATIONS, accumulator, triton_dtype
from tdcoll.runtime.topology import Topology

_Made = TypeVar("_Made")

_log = logging.getLogger("tdcoll")


@dataclass(frozen=True)
class Planned:
    """A kind of call, and what was decided about it.

    Attributes:
        operation: its name, for errors.
        facts: of the call; ``nbytes`` is what one launch moves of each segment.
        options: what else the kernel depends on, such as dtype and operation.
        stride: bytes from one segment of the caller's tensor to the next.
        width: bytes of data per word if the call uses LL or Lamport words, which land in memory of their own; else 0.
    """

    operation: str
    ctx: CollectiveContext
    facts: Facts
    plan: Plan
    options: Any
    stride: int
    width: int

    @property
    def in_buffer(self) -> bool:
        """True where peers write to the caller's buffer."""
        return self.facts.in_place and not self.width

    @property
    def inbox(self) -> Inbox:
        """Where peers write to: the caller's buffer, or the context's inbox."""
        ctx = self.ctx
        if self.in_buffer:
            return Inbox(0, self.facts.nbytes, ctx.device_group.deltas, tl.constexpr(1))
        return Inbox(ctx.inbox.data_ptr(), ctx.capacity, ctx.device_group.deltas, tl.constexpr(2))

    @property
    def words(self) -> Inbox:
        """The context's flagged words."""
        flagged = self.ctx.flagged
        return Inbox(flagged.data_ptr(), 16 * flagged.shape[2], self.ctx.device_group.deltas, tl.constexpr(2))

    def values(self) -> dict[str, Any]:
        """Arguments that kernels of any collective may have, by the names of their parameters."""
        plan, facts = self.plan, self.facts
        return {
            "inbox": self.inbox,
            "words": self.words,
            "g": self.ctx.device_group,
            "nbytes": facts.nbytes,
            "source_stride": self.stride,
            "out_stride": self.stride,
            "chunk": plan.chunk,
            "chunks": plan.chunks,
            "blocks": plan.chunks,
            "out_deltas": self.ctx.device_group.deltas,
        }


def arithmetic(call: Planned) -> dict[str, Any]:
    """The constants of a reduction's kernel. Options of such a call are its dtype and its operation."""
    dtype, op = call.options
    return {"DTYPE": triton_dtype(dtype), "ACC": accumulator(dtype), "OP": OPERATIONS[op]}


def tiles(call: Planned) -> dict[str, Any]:
    """Return the constants of a reduction by chunks: those of :func:`arithmetic`, ``COUNT`` and ``WAITED``.

    A thread has 16 bytes of a tile, or 4 if elements have one byte: with 8 from each of 8 ranks, it would run out of
    registers. Where few thread blocks do all the work, it has up to 64, if there are few ranks.
    """
    size = call.options[0].itemsize
    per_thread = 16 // size if size > 1 else 4
    if call.plan.algorithm in ("loop", "ce") and size > 1:  # few threads, which need more bytes on the way
        per_thread *= max(1, 8 // max(2, triton.next_power_of_2(call.ctx.world_size)))
    waited = triton.next_power_of_2(call.ctx.world_size)
    return {**arithmetic(call), "COUNT": 32 * call.plan.num_warps * per_thread, "WAITED": waited}


def of_words(call: Planned) -> dict[str, Any]:
    """Return what kernels that reduce words take (:mod:`tdcoll.primitives.words`)."""
    announced = call.width == LAMPORT_WORD_BYTES
    inbox, block = call.ctx.device_lamport if announced else call.words, call.plan.chunk // call.width
    looped = call.plan.blocks < call.plan.chunks
    return {**arithmetic(call), "inbox": inbox, "LAMPORT": announced, "BLOCK": block, "LOOPED": looped}


def by_words(words: Words, kernel: Callable[[Facts], Any]) -> Algorithm:
    """Return the algorithm of a reduction by words."""
    return Algorithm(
        words.name,
        supports=words.supports,
        cut=words.cut,
        kernel=kernel,
        blocks=per_chunk,
        values=of_words,
        words=(LAMPORT_WORD_BYTES, LL_WORD_BYTES),
        payload=words.payload,
        epoch=words.epoch,
    )


def on_device(ctx: CollectiveContext, operation: str, key: Hashable, make: Callable[[], _Made]) -> _Made:
    """Return what ``make`` copies to the device, once for as long as the context lives."""
    if key not in ctx.tables:
        outside_of_graphs(ctx, operation)
        ctx.tables[key] = make()
    made: _Made = ctx.tables[key]
    return made


def outside_of_graphs(ctx: CollectiveContext, operation: str) -> None:
    """Refuse to compile a kernel or to copy to the device while a CUDA graph is captured."""
    capture.refuse(
        ctx.device, operation,
        "the first call of a kind on a context prepares what a CUDA graph cannot capture; make one such call, of about "
        "the same size, on every rank before capturing",
    )  # fmt: skip


def local_peers(topology: Topology) -> list[int]:
    """The other ranks of this node, the successor first, so that no rank is the first target of all."""
    mates = topology.members[topology.node]
    return [mates[(topology.place + i) % len(mates)] for i in range(1, len(mates))]


def successors(topology: Topology) -> list[int]:
    """All other ranks, likewise."""
    return [(topology.rank + i) % topology.world_size for i in range(1, topology.world_size)]


def make_routes(ctx: CollectiveContext, local: list[int], remote: list[int]) -> Routes:
    """:class:`Routes` to group ranks, on the device."""
    pes = ctx.topology.pes
    entries = [*local, *(pes[rank] for rank in local), *remote, *(pes[rank] for rank in remote)]
    return Routes(torch.tensor(entries or [0], dtype=torch.int32, device=ctx.device), len(local), len(remote))


def rail_routes(ctx: CollectiveContext, operation: str) -> Routes:
    """Return the :class:`Routes` to the other ranks of this node, and to those of its rail on other nodes."""
    topology = ctx.topology
    nodes = [topology.members[(topology.node + i) % topology.n_nodes] for i in range(1, topology.n_nodes)]
    rail = [members[topology.place] for members in nodes]
    return on_device(ctx, operation, "rails", lambda: make_routes(ctx, local_peers(topology), rail))


def routes_beside_stores(ctx: CollectiveContext, operation: str) -> Routes:
    """Return the :class:`Routes` to all other ranks: as local ones to those that can be stored to."""

    def make() -> Routes:
        local = local_peers(ctx.topology) if ctx.stores else []
        return make_routes(ctx, local, [rank for rank in successors(ctx.topology) if rank not in local])

    return on_device(ctx, operation, "routes beside stores", make)


class Launches:
    """The launches of one kind of call, prepared: one, or one for each epoch of a larger call.

    Attributes:
        counts: epochs and Lamport calls of a call, and whether the epochs are even: see
            :class:`~tdcoll.base.call_log.Made`.
        run: launches, given the handle of a stream and the addresses of source and result, or, if peers write to the
            caller's buffer, of source, nothing and the buffer.
    """

    def __init__(self, algorithm: Algorithm, calls: list[Planned]) -> None:
        first = calls[0]
        self._context, self.plan = first.ctx, first.plan
        self._operation = operation = first.operation
        self.in_buffer = in_buffer = first.in_buffer
        lamport = sum(call.width == LAMPORT_WORD_BYTES for call in calls)
        self.counts = len(calls) - lamport, lamport, algorithm.copies is not None
        changing = ("source", "out", "inbox.base") if in_buffer else ("source", "out")
        self.kernel = kernel = algorithm.kernel(first.facts)
        launches: dict[Planned, Any] = {}
        variant: set[Any] = set()
        registers = SHARED_REGISTERS if shares_gpu(first.facts) else None
        for call in dict.fromkeys(calls):
            if algorithm.copies is not None:
                launches[call] = copies = algorithm.copies(call)
                variant.add(copies.variant)
                continue
            known = {**call.values(), **algorithm.values(call)}
            given = {name: known[name] for name in kernel.arg_names if name in known}
            warps, early = call.plan.num_warps, call.ctx.early and algorithm.early(call.facts)
            options: dict[str, Any] = {"num_warps": warps, "early": early, "maxnreg": registers}
            launches[call] = Launch(kernel, call.plan.blocks, given, changing, **options)
            variant.update((name, value) for name, value in given.items() if name.isupper())
            variant.add((warps, early))
        self._launches = list(launches.values())
        self._variant = (operation, kernel.__name__, frozenset(variant), in_buffer)
        in_order = [launches[call] for call in calls]
        only, room = in_order[0], first.facts.nbytes

        def in_epochs(stream: int, source: int, out: int) -> None:
            for epoch, launch in enumerate(in_order):
                launch(stream, source + epoch * room, out + epoch * room)

        form = f"{operation}{'_' if first.facts.in_place else ''}"
        size = byte_text(sum(call.facts.nbytes for call in calls))
        run = in_epochs if len(calls) > 1 else only.__call__
        self.run: Callable[..., None] = ranged(f"tdcoll.{form}[{first.plan.algorithm}, {size}]", run)
        prepare(self._context, operation, self._variant, self._launches)  # what fails leaves the context as it was

    def wait_for_loads(self) -> None:
        """Wait until all ranks have loaded the kernels, see :meth:`CollectiveContext.wait_for_loads`."""
        self._context.wait_for_loads(self._operation, self._variant)

    def __call__(self, source: int, out: int) -> None:
        """Make the call on the current stream, given the addresses of tensor and result, or of segment and buffer."""
        self.wait_for_loads()
        self.run(self._context.current_stream(), *((source, 0, out) if self.in_buffer else (source, out)))


def facts_of(ctx: CollectiveContext | Prospect, nbytes: int, dtype: torch.dtype | None = None, **more: Any) -> Facts:
    """Return the facts of a call on a context, of ``nbytes`` per segment; with its dtype if elements are reduced."""
    announced = dtype is not None and dtype.is_floating_point and dtype.itemsize <= 4
    return Facts(
        nbytes,
        ctx.topology,
        capacity=ctx.capacity,
        ll_bytes=ctx.ll_bytes,
        stores=ctx.stores,
        puts=ctx.job.heap.puts,
        lamport_bytes=ctx.lamport_bytes if announced else 0,
        itemsize=1 if dtype is None else dtype.itemsize,
        chunks=ctx.chunks,
        max_blocks=ctx.max_blocks,
        simulated=ctx.job.simulated,
        **more,
    )


def launches_of(
    spec: Collective,
    ctx: CollectiveContext,
    nbytes: int,
    algorithm: Any = "auto",
    *,
    options: Any = None,
    in_place: bool = False,
    symmetric: bool = False,
) -> Launches:
    """Return what launches such calls, prepared. It is made once.

    Args:
        algorithm: a name, not checked yet; or a plan, see :meth:`~.spec.Collective.decide`.

    Raises:
        TypeError, ValueError: ``algorithm`` is not one that such a call can have.
        ContextError: the context is far too small; or a CUDA graph is being captured, before such a call was made.
    """
    if not isinstance(algorithm, (str, Plan)):
        arguments.instance("algorithm", algorithm, (str, Plan), "a str")
    key: tuple[Hashable, ...] = (spec.name, nbytes, algorithm, options, in_place, symmetric)

    def make() -> Launches:
        facts = facts_of(ctx, nbytes, options and options[0], in_place=in_place, symmetric=symmetric)
        if ctx.rank == 0 and _log.isEnabledFor(logging.DEBUG):
            sections = sections_of(spec, ctx)
            _log.debug("%s", explain_call(spec, facts, algorithm, sections, ctx.tuning.name).line)
        plan = spec.decide_call(facts, algorithm, sections_of(spec, ctx))[0].plan
        return launches_by(spec, ctx, facts, plan, options)

    return ctx.once(key, make)


def is_prepared(spec: Collective, ctx: CollectiveContext, nbytes: int, options: Hashable) -> bool:
    """Return whether :func:`launches_of` has made the launches of such calls, by ``"auto"`` in ordinary memory."""
    return (spec.name, nbytes, "auto", options, False, False) in ctx.known


def launches_by(
    spec: Collective, ctx: CollectiveContext, facts: Facts, plan: Plan, options: Hashable = None
) -> Launches:
    """Return what launches calls by a plan that was made for these facts, prepared."""
    algorithm, calls = spec.algorithm(plan.algorithm), list[Planned]()
    for nbytes in spec.epochs(facts, plan.algorithm):
        part = replace(facts, nbytes=nbytes)
        if calls and nbytes != calls[0].facts.nbytes:  # the last, which may be shorter
            plan = spec.choose(part, plan.algorithm, sections_of(spec, ctx))
        width = algorithm.payload(part).width if algorithm.words else 0
        calls.append(Planned(spec.name, ctx, part, plan, options, facts.nbytes, width))
    return Launches(algorithm, calls)


def sections_of(spec: Collective, ctx: CollectiveContext) -> tuple[Section, ...]:
    """Return the sections of the context's tuning table for a collective."""
    return ctx.once((spec.name, "sections"), lambda: spec.sections(ctx.tuning.sections, ctx.tuning.name))


def prepare(ctx: CollectiveContext, operation: str, variant: Hashable, launches: Iterable[Any]) -> None:
    """Compile and load the kernels of a call; ``ContextError`` if there are any to load while a graph is captured."""
    for launch in launches:
        if not launch.prepared:
            if variant not in ctx.tables:
                outside_of_graphs(ctx, operation)
            launch.prepare()
    ctx.tables[variant] = True
