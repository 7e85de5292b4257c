# SPDX-License-Identifier: Apache-2.0
"""The places of a group's ranks: group rank -> PE, node, place inside the node. Pure, no GPU, no
torch.

Three numberings are kept apart everywhere:

- *global rank* = *PE*: the rank in the job's default process group. NVSHMEM's functions take it.
- *group rank*: the index in the group's list of ranks. Users, results and messages speak of it.
- *node*: an index from 0, in the order in which nodes first appear in the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Topology:
    """The ranks of one group, seen from one of them.

    Attributes:
        rank: this process's group rank.
        pes: PE (global rank) of each group rank.
        nodes: node index of each group rank, numbered from 0 by first appearance.
    """

    rank: int
    pes: tuple[int, ...]
    nodes: tuple[int, ...]

    @classmethod
    def of(cls, rank: int, pes: Sequence[int], node_ids: Sequence[object]) -> Topology:
        """Return the topology of ``pes``, whose i-th member runs on the node named ``node_ids[i]``
        (any hashable)."""
        numbers: dict[object, int] = {}
        nodes = tuple(numbers.setdefault(node, len(numbers)) for node in node_ids)
        return cls(rank, tuple(pes), nodes)

    @property
    def world_size(self) -> int:
        """Number of ranks of the group."""
        return len(self.pes)

    @property
    def n_nodes(self) -> int:
        """Number of nodes that the group touches."""
        return max(self.nodes) + 1

    @cached_property
    def members(self) -> tuple[tuple[int, ...], ...]:
        """Group ranks on each node, ascending, as ``members[node][place]``."""
        return tuple(
            tuple(rank for rank, node in enumerate(self.nodes) if node == wanted)
            for wanted in range(self.n_nodes)
        )

    @property
    def ranks_per_node(self) -> int | None:
        """Ranks on every node, or None if nodes differ."""
        sizes = {len(ranks) for ranks in self.members}
        return sizes.pop() if len(sizes) == 1 else None

    @property
    def node(self) -> int:
        """The node of this rank."""
        return self.nodes[self.rank]

    @property
    def place(self) -> int:
        """The index of this rank among its node's ranks, which is its rail."""
        return self.members[self.node].index(self.rank)

    def describe(self) -> str:
        """One line for messages: "6 rank(s) on 2 node(s) (4 + 2)"."""
        sizes = (
            f" ({' + '.join(str(len(ranks)) for ranks in self.members)})"
            if self.n_nodes > 1
            else ""
        )
        return f"{self.world_size} rank(s) on {self.n_nodes} node(s){sizes}"


def emulated_node(local_rank: int, local_world_size: int, n_nodes: int) -> int:
    """Return the node of a local rank when one host emulates ``n_nodes`` nodes: contiguous,
    near-equal blocks."""
    if not 1 <= n_nodes <= local_world_size:
        raise ValueError(
            f"emulate_nodes must be between 1 and the {local_world_size} rank(s) of this host, got {n_nodes}"
        )
    return local_rank * n_nodes // local_world_size


def nodes_of(n_pes: int, ranks_per_node: int | Sequence[int] | None) -> tuple[int, ...]:
    """Return the node of each PE."""
    if ranks_per_node is None:
        return (0,) * n_pes
    if isinstance(ranks_per_node, int):
        if ranks_per_node < 1:
            raise ValueError(f"ranks_per_node must be at least 1, got {ranks_per_node}")
        return tuple(pe // ranks_per_node for pe in range(n_pes))
    if sum(ranks_per_node) != n_pes or min(ranks_per_node) < 1:
        raise ValueError(
            f"ranks_per_node must be positive and add up to {n_pes}, got {list(ranks_per_node)}"
        )
    return tuple(node for node, ranks in enumerate(ranks_per_node) for _ in range(ranks))
