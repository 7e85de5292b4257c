# SPDX-License-Identifier: Apache-2.0
"""The symmetric memory of a context: one place for allocating it and for reporting its size in
advance."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from tdcoll.base import limits
from tdcoll.runtime.heap import Arena
from tdcoll.runtime.topology import Topology


@dataclass(frozen=True)
class Area:
    """A symmetric tensor of a context."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def heap_bytes(self) -> int:
        """Bytes that it takes of the symmetric heap of each rank, padding included."""
        elements = torch.Size(self.shape).numel()
        return Arena.padded(elements * self.dtype.itemsize) if elements else 0


@dataclass(frozen=True)
class ContextSizes:
    """The sizes of a :class:`~tdcoll.CollectiveContext`, with all defaults resolved.

    Attributes:
        max_bytes_per_rank, chunks, ll_bytes, lamport_bytes: of the context.
        more: what kinds of contexts have beyond that.
    """

    world_size: int
    max_bytes_per_rank: int
    chunks: int
    ll_bytes: int
    lamport_bytes: int
    more: tuple[Area, ...] = ()

    @property
    def capacity(self) -> int:
        """Bytes of a slot of the inbox for one rank: a multiple of 16."""
        return max(16, -(-self.max_bytes_per_rank // 16) * 16)

    @property
    def areas(self) -> tuple[Area, ...]:
        """All symmetric tensors, in the order of their allocation; :mod:`tdcoll.calls.context`
        describes them."""
        world = self.world_size
        # A call of no bytes sends one word.
        words = 0 if self.ll_bytes < 0 else max(1, -(-self.ll_bytes // 12))
        return (
            Area("inbox", (2, world, self.capacity), torch.uint8),
            Area("signals", (2, self.chunks, world), torch.int64),
            Area("ready", (world,), torch.int64),
            Area("expired_epochs", (world,), torch.int64),
            Area("flagged", (2, world, words, 2), torch.int64),
            Area("lamport", (3, world, -(-self.lamport_bytes // 16) * 4), torch.int32),
            *self.more,
        )

    @property
    def heap_bytes(self) -> int:
        """Bytes that the context takes of the symmetric heap of each rank."""
        return sum(area.heap_bytes for area in self.areas)


def context_sizes(
    topology: Topology,
    heap_bytes: int,
    *,
    stores: bool = True,
    max_bytes_per_rank: int | None = None,
    chunks: int = limits.MAX_CHUNKS,
    flagged_bytes: int | None = None,
    lamport_bytes: int | None = None,
    free: int | None = None,
) -> ContextSizes:
    """Return the sizes of a context.

    Args:
        stores: whether the ranks of each node can store to each other's memory.
        max_bytes_per_rank, chunks, flagged_bytes, lamport_bytes: as for
            :class:`~tdcoll.CollectiveContext`.
        free: of the heap. If the usual ``lamport_bytes`` don't fit, there are fewer. None: enough.
    """
    world = topology.world_size
    nodes = topology.n_nodes
    if max_bytes_per_rank is None:
        max_bytes_per_rank = limits.inbox_bytes(world, heap_bytes)
    usual = min(max_bytes_per_rank, limits.lamport_bytes(world, nodes), heap_bytes // (12 * world))
    lamport = (usual if lamport_bytes is None else lamport_bytes) if stores else 0
    ll_bytes = -1
    if stores and nodes == 1:
        usual = min(max_bytes_per_rank, limits.flagged_bytes(world))
        ll_bytes = usual if flagged_bytes is None else flagged_bytes
    sizes = ContextSizes(world, max_bytes_per_rank, chunks, ll_bytes, lamport)
    if free is not None and free < sizes.heap_bytes and lamport_bytes is None and lamport >= 16:
        sizes = replace(sizes, lamport_bytes=lamport // 16)
    return sizes
