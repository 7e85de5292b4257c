# SPDX-License-Identifier: Apache-2.0
""":func:`tdcoll.memory_plan`: the symmetric memory that a job will take, before there is one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tdcoll.base import arguments, environment
from tdcoll.base.arguments import byte_text
from tdcoll.base.limits import COLLECTIVES
from tdcoll.calls.collective import spec_of
from tdcoll.calls.implicit import sizes_for
from tdcoll.calls.sharded import BUFFERS, gather_sizes, scatter_sizes
from tdcoll.calls.sizes import ContextSizes, context_sizes
from tdcoll.collectives.sparse_all_reduce.context import sparse_sizes
from tdcoll.fused.policy import NAME as FUSED
from tdcoll.runtime.topology import Topology

_SPARSE_ARGUMENTS = ("max_rows_per_rank", "max_row_bytes", "max_union_rows")
_SHARDED_ARGUMENTS = ("gathered_bytes", "scattered_bytes", "buffers")
_ARGUMENTS = ("max_bytes_per_rank", "chunks", "flagged_bytes", "lamport_bytes")


@dataclass(frozen=True)
class ContextMemory:
    """The share that one context takes of each rank's symmetric heap, in bytes, padding included.

    Attributes:
        name: of the context.
        inbox: where data lands, two slots.
        signals: of chunks, and a few words besides.
        ll: words of the LL protocol.
        lamport: words of the Lamport protocol.
        rows: lists, results and stage of a sparse all-reduce.
        buffers: parameters that FSDP2 gathers.
    """

    name: str
    inbox: int
    signals: int
    ll: int
    lamport: int
    rows: int
    buffers: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.inbox + self.signals + self.ll + self.lamport + self.rows + self.buffers


@dataclass(frozen=True)
class MemoryPlan:
    """The share that a job takes of each rank's symmetric heap. ``str()`` is a table.

    Attributes:
        world_size, nodes: of the job.
        heap_bytes: of the symmetric heap of each rank.
        contexts: in the order of their making.
    """

    world_size: int
    nodes: int
    heap_bytes: int
    contexts: tuple[ContextMemory, ...]

    @property
    def total(self) -> int:
        """Bytes that all contexts take together."""
        return sum(context.total for context in self.contexts)

    @property
    def fits(self) -> bool:
        """Whether the heap has room for them."""
        return self.total <= self.heap_bytes

    def __str__(self) -> str:
        rows = [["context", "inbox", "signals", "LL", "Lamport", "rows", "buffers", "total"]]
        rows += [
            [c.name, *map(byte_text, (*list(vars(c).values())[1:], c.total))] for c in self.contexts
        ]
        rows.append(["total", *[""] * (len(rows[0]) - 2), byte_text(self.total)])
        first, *widths = (max(map(len, column)) for column in zip(*rows, strict=True))
        lines = [f"symmetric memory of each of {self.world_size} ranks on {self.nodes} node(s)"]
        lines += [
            "  ".join([name.ljust(first), *map(str.rjust, parts, widths)]) for name, *parts in rows
        ]
        fits = "fits into" if self.fits else "does not fit into"
        return "\n".join([*lines, f"{fits} a heap of {byte_text(self.heap_bytes)}"])


def memory_plan(
    contexts: Mapping[str, int | str | Mapping[str, int]],
    *,
    world_size: int,
    nodes: int = 1,
    heap_bytes: int | str | None = None,
) -> MemoryPlan:
    """Say how much symmetric memory a job will take on each rank, by context, without a job.

    The formulas are those of the allocation. The ranks of each node are assumed to store to each
    other's memory.

    >>> plan = tdcoll.memory_plan({"all_reduce": "64M", "all_gather": "1M"}, world_size=8, heap_bytes="384M")
    >>> print(plan.total, plan.fits)
    149131264 True

    Args:
        contexts: for each context its name, and either

            - the bytes of the largest tensor, if the name is that of a dense collective or
              ``"all_reduce_rms_norm"`` and the context is the one that tdcoll makes by itself when
              the first call comes;
            - the sizes that :class:`~tdcoll.CollectiveContext` is made with:
              ``max_bytes_per_rank``, ``chunks``, ``flagged_bytes``, ``lamport_bytes``; those that
              are left out have their defaults;
            - those of :class:`~tdcoll.SparseContext`: ``max_rows_per_rank``, ``max_row_bytes``,
              ``max_union_rows``;
            - or those of :func:`tdcoll.distributed.fsdp.use`: ``gathered_bytes``, of the parameters
              of the largest module, and ``scattered_bytes``, of its largest gradient on a rank;
              and ``buffers``, 2 if it is left out.
        world_size: ranks of the job, all of them in every context. For subgroups, such as those of
            a 2 x 2 mesh, make a plan for each group of a rank with its size, and add the totals.
        nodes: that the ranks are on, in blocks of (nearly) the same size.
        heap_bytes: of the symmetric heap of a rank. Default: ``NVSHMEM_SYMMETRIC_SIZE``, else
            tdcoll's default on GPUs.

    Raises:
        TypeError, ValueError: an argument is not as described.
    """
    arguments.whole("world_size", world_size, 1)
    arguments.whole("nodes", nodes, 1, world_size)
    arguments.instance("contexts", contexts, Mapping, "a dict of names and sizes")
    heap = (
        environment.heap_bytes(False)
        if heap_bytes is None
        else arguments.byte_count("heap_bytes", heap_bytes)
    )
    topology = Topology.of(
        0, range(world_size), [rank * nodes // world_size for rank in range(world_size)]
    )
    made = []
    used = 0
    for name, limits in contexts.items():
        for part, sizes in _sizes(name, limits, topology, heap, heap - used).items():
            used += sizes.heap_bytes
            made.append(_memory_of(part, sizes))
    return MemoryPlan(world_size, nodes, heap, tuple(made))


def _memory_of(name: str, sizes: ContextSizes) -> ContextMemory:
    parts = {"inbox": 0, "signals": 0, "flagged": 0, "lamport": 0, "sparse": 0, "buffers": 0}
    for area in sizes.areas:
        parts[area.name if area.name in parts else "signals"] += area.heap_bytes
    return ContextMemory(name, *parts.values())


def _sizes(
    name: str, limits: Any, topology: Topology, heap: int, free: int
) -> dict[str, ContextSizes]:
    """Return the sizes of the contexts of one entry, by their names."""
    if isinstance(limits, Mapping) and "gathered_bytes" in limits:
        return _sharded_sizes(name, limits, topology)
    return {name: _context_sizes(name, limits, topology, heap, free)}


def _sharded_sizes(
    name: str, limits: Mapping[str, int], topology: Topology
) -> dict[str, ContextSizes]:
    """Return the sizes of the contexts of an FSDP2 model."""
    _check_limits(name, limits, _SHARDED_ARGUMENTS)
    buffers = arguments.whole(f"contexts[{name!r}]['buffers']", limits.get("buffers", BUFFERS), 2)
    made = {f"{name}: all-gathers": gather_sizes(topology, limits["gathered_bytes"], buffers)}
    if limits.get("scattered_bytes"):
        made[f"{name}: reduce-scatters"] = scatter_sizes(topology, limits["scattered_bytes"])
    return made


def _check_limits(name: str, limits: Mapping[str, int], allowed: tuple[str, ...]) -> None:
    for argument, value in limits.items():
        if argument not in allowed:
            raise ValueError(
                f"contexts[{name!r}] must have no sizes but {', '.join(allowed)}; got {argument!r}"
            )
        arguments.whole(f"contexts[{name!r}][{argument!r}]", value, 0)


def _context_sizes(
    name: str, limits: Any, topology: Topology, heap: int, free: int
) -> ContextSizes:
    """Return the sizes of one context."""
    if not isinstance(limits, Mapping):
        if name not in (*COLLECTIVES, FUSED):
            raise ValueError(
                f"contexts[{name!r}] must be a dict of sizes (of sparse rows {', '.join(_SPARSE_ARGUMENTS)}; of FSDP2 "
                f"{', '.join(_SHARDED_ARGUMENTS)}), unless "
                f"the name is one of {', '.join(COLLECTIVES)}, {FUSED}; got {limits!r}"
            )
        nbytes = arguments.byte_count(f"contexts[{name!r}]", limits)
        spec = spec_of("all_reduce" if name == FUSED else name)
        world = topology.world_size
        return sizes_for(
            spec, spec.inbox(spec.segment_bytes(nbytes, world), world, heap), topology, heap, free
        )
    sparse = "max_rows_per_rank" in limits
    _check_limits(name, limits, _SPARSE_ARGUMENTS if sparse else _ARGUMENTS)
    if sparse:
        if "max_row_bytes" not in limits:
            raise ValueError(f"contexts[{name!r}] must have max_row_bytes with max_rows_per_rank")
        return sparse_sizes(topology, heap, **limits)
    return context_sizes(topology, heap, free=free, **limits)
