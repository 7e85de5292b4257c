# SPDX-License-Identifier: Apache-2.0
"""The contexts for the calls of sharded training (FSDP2): their sizes, and the choice of an
algorithm.

The numbers are data, see :data:`GATHER` and :data:`SCATTER`. Everything is a pure function of facts
that are the same on all ranks.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from tdcoll.calls.sizes import Area, ContextSizes, context_sizes
from tdcoll.runtime.topology import Topology

BUFFERS = 2
"""Buffers for gathered parameters. FSDP2 copies parameters out of one while the next is
gathered."""


@dataclass(frozen=True)
class CallPolicy:
    """How one kind of call is made.

    Attributes:
        inbox_bytes: The most ``max_bytes_per_rank`` of its context. Larger calls whose data lands
            in the inbox take several epochs.
        lamport_bytes: The most bytes of one rank's data that Lamport words carry.
        blocks: Thread blocks of its context, at most; 0 for as few as a context works with.
        copies_from: Bytes that a rank sends to each other rank from which copy engines move the
            data, inside a node.
    """

    inbox_bytes: int
    lamport_bytes: int
    blocks: int
    copies_from: int

    def algorithm(self, nbytes: int, topology: Topology, stores: bool) -> str:
        """Return the algorithm of a call of ``nbytes`` per segment: ``"ce"``, or ``"auto"``, which
        the context decides.

        Args:
            stores: Whether the ranks can store to each other's memory.
        """
        if nbytes >= self.copies_from and topology.n_nodes == 1 and stores:
            return "ce"
        return "auto"


GATHER = CallPolicy(inbox_bytes=256 << 10, lamport_bytes=0, blocks=0, copies_from=512 << 10)
"""All-gathers. Because large ones land in the caller's buffer, the inbox is only for small ones.
They need few thread blocks, because copy engines move the data."""

SCATTER = CallPolicy(inbox_bytes=32 << 20, lamport_bytes=64 << 10, blocks=32, copies_from=512 << 10)
"""Reduce-scatters. On 2 H200s a copy engine moves 376 GB/s by copies of 32 MiB and 355 by copies of
16, and an inbox has two slots of that for each rank. The thread blocks sum what copy engines have
brought."""


def gather_sizes(topology: Topology, gathered_bytes: int, buffers: int) -> ContextSizes:
    """Return the sizes of the context for all-gathers, with the buffers that they gather into.

    Args:
        gathered_bytes: Of the largest result of an all-gather.
        buffers: How many results there may be at a time.
    """
    largest = -(-gathered_bytes // topology.world_size)
    sizes = _context(topology, GATHER, largest)
    rings = Area("buffers", (buffers, padded(gathered_bytes)), torch.uint8)
    return dataclasses.replace(sizes, more=(rings,))


def scatter_sizes(topology: Topology, scattered_bytes: int) -> ContextSizes:
    """Return the sizes of the context for reduce-scatters.

    Args:
        scattered_bytes: Of the largest result of a reduce-scatter.
    """
    return _context(topology, SCATTER, scattered_inbox(scattered_bytes, topology.n_nodes))


def scattered_inbox(scattered_bytes: int, nodes: int) -> int:
    """Return the inbox that reduce-scatters of ``scattered_bytes`` per rank use, in bytes per
    rank: between nodes twice as much, because they put from half of it."""
    return scattered_bytes * (2 if nodes > 1 else 1)


def _context(topology: Topology, policy: CallPolicy, nbytes: int) -> ContextSizes:
    # None of these sizes depends on that of the heap.
    return context_sizes(topology, 0, **context_arguments(policy, nbytes))


def context_arguments(policy: CallPolicy, nbytes: int) -> dict[str, Any]:
    """Return the sizes with which a :class:`~tdcoll.CollectiveContext` for calls of ``nbytes`` per
    rank is made, by the names of its arguments."""
    inbox = max(16, min(nbytes, policy.inbox_bytes))
    return {
        "max_bytes_per_rank": inbox,
        "flagged_bytes": min(inbox, GATHER.inbox_bytes),
        "lamport_bytes": min(inbox, policy.lamport_bytes),
    }


def padded(nbytes: int) -> int:
    """Return the bytes from one buffer to the next: a multiple of 512, so that every buffer is
    aligned."""
    return -(-nbytes // 512) * 512
