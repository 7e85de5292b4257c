# SPDX-License-Identifier: Apache-2.0
"""The symmetric memory that the communication of an FSDP2 model takes, before any is allocated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn

from tdcoll import runtime
from tdcoll.base import arguments
from tdcoll.base.arguments import byte_text
from tdcoll.base.torch_fsdp import ParameterGroup, parameter_groups, results_at_a_time, states_of
from tdcoll.calls.sharded import gather_sizes, scatter_sizes
from tdcoll.runtime.topology import Topology


@dataclass(frozen=True)
class GroupPlan:
    """The communication among one set of ranks.

    Attributes:
        ranks: Global ranks, in the order of their group.
        modules: How many parameter groups communicate there.
        gathered_bytes: Bytes of the largest result of an all-gather.
        scattered_bytes: Bytes of the largest result of a reduce-scatter; 0 if there is none.
        buffers: Results of all-gathers that are held at a time.
        nodes: Nodes that the ranks are on.
    """

    ranks: tuple[int, ...]
    modules: int
    gathered_bytes: int
    scattered_bytes: int
    buffers: int
    nodes: int

    @property
    def heap_bytes(self) -> int:
        """Bytes that it takes of each rank's symmetric heap."""
        world = len(self.ranks)
        nodes = [rank * self.nodes // world for rank in range(world)]
        topology = Topology.of(0, range(world), nodes)
        total = gather_sizes(topology, self.gathered_bytes, self.buffers).heap_bytes
        if self.scattered_bytes:
            total += scatter_sizes(topology, self.scattered_bytes).heap_bytes
        return total

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes as :func:`tdcoll.memory_plan` takes them."""
        return {
            "gathered_bytes": self.gathered_bytes,
            "scattered_bytes": self.scattered_bytes,
            "buffers": self.buffers,
        }


@dataclass(frozen=True)
class FsdpPlan:
    """The share that a model's communication takes of each rank's symmetric heap, which ``str()``
    says.

    Attributes:
        groups: One entry for each set of ranks; none if every mesh has one rank.
    """

    groups: tuple[GroupPlan, ...]

    @property
    def heap_bytes(self) -> int:
        """Bytes that it takes of each rank's symmetric heap."""
        return sum(group.heap_bytes for group in self.groups)

    def __str__(self) -> str:
        lines = [f"FSDP2 takes {byte_text(self.heap_bytes)} of the symmetric heap"]
        for group in self.groups:
            lines.append(
                f"{group.modules} module(s) over ranks {list(group.ranks)}: {group.buffers} "
                f"buffers of {byte_text(group.gathered_bytes)}, gradients of "
                f"{byte_text(group.scattered_bytes)} per rank, {byte_text(group.heap_bytes)} in all"
            )
        return "\n".join(lines)


def plan(model: nn.Module, *, buffers: int | None = None) -> FsdpPlan:
    """Return the symmetric memory that :func:`tdcoll.distributed.fsdp.use` will take. Local.

    It needs no job of tdcoll's, so you can compute the size of the heap before you join. If
    there is none, the ranks are assumed to be on one node.

    >>> tdcoll.initialize(heap_bytes=fsdp.plan(model).heap_bytes + (64 << 20))  # doctest: +SKIP

    Args:
        model: One to which ``fully_shard`` was applied, or whose modules it was applied to.
        buffers: As for :func:`tdcoll.distributed.fsdp.use`.

    Raises:
        TypeError, ValueError: An argument is not as described.
    """
    groups = check_model(model)
    if buffers is None:
        buffers = results_at_a_time(model)
    arguments.whole("buffers", buffers, 2)
    return plan_of(groups, buffers)


def check_model(model: Any) -> list[ParameterGroup]:
    """Return the parameter groups of a model that are sharded over several ranks.

    Raises:
        TypeError: It is no module.
        ValueError: FSDP2 has sharded none of its modules.
    """
    arguments.instance("model", model, nn.Module, "a torch.nn.Module")
    if not states_of(model):
        raise ValueError(
            f"model must be one that torch.distributed.fsdp.fully_shard was applied to, or has "
            f"modules that it was applied to; got {type(model).__name__} without any"
        )
    return parameter_groups(model)


def plan_of(groups: Sequence[ParameterGroup], buffers: int) -> FsdpPlan:
    """Return the plan for the communication of these parameter groups."""
    gathered: dict[tuple[int, ...], list[int]] = {}
    scattered: dict[tuple[int, ...], list[int]] = {}
    for group in groups:
        for process_group in group.gather_groups:
            ranks = tuple(dist.get_process_group_ranks(process_group))
            gathered.setdefault(ranks, []).append(group.gathered_bytes)
        ranks = tuple(dist.get_process_group_ranks(group.scatter_group))
        scattered.setdefault(ranks, []).append(group.scattered_bytes)
    job = runtime.current_or_none()
    plans = []
    for ranks, sizes in gathered.items():
        nodes = 1 if job is None else job.topology(ranks).n_nodes
        largest = max(scattered.get(ranks, [0]))
        plans.append(GroupPlan(ranks, len(sizes), max(sizes), largest, buffers, nodes))
    return FsdpPlan(tuple(plans))
