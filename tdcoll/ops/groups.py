# SPDX-License-Identifier: Apache-2.0
"""Groups as strings, because operators of PyTorch's take no objects."""

from __future__ import annotations

import torch.distributed as dist

from tdcoll import runtime
from tdcoll.base import arguments
from tdcoll.runtime.topology import Topology


def group_name(group: runtime.Group = None) -> str:
    """Return the string that names a group in calls of the operators.

    Args:
        group: None: all ranks. For a ProcessGroup, PyTorch's name. For global ranks, these with a
            comma after each.

    Raises:
        NotInitializedError: (of ranks) before ``tdcoll.initialize()``.
        TypeError, ValueError: it is none of these, or this process is not a member.
    """
    if group is None:
        return ""
    if isinstance(group, dist.ProcessGroup):
        return str(group.group_name)
    return ",".join(map(str, runtime.current().ranks_of(group))) + ","


def named_group(name: str) -> runtime.Group:
    """Return the group of a name."""
    arguments.instance("group", name, str, "a str, see tdcoll.ops.group_name")
    if not name:
        return None
    ranks = name.rstrip(",").split(",")
    if name.endswith(",") and all(rank.isdecimal() for rank in ranks):
        return [int(rank) for rank in ranks]
    try:
        found: dist.ProcessGroup = dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
        return found
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"group must be what tdcoll.ops.group_name returns; got {name!r}: {error}"
        ) from None


def world_of(name: str) -> int:
    """Return the number of ranks of a named group."""
    return len(runtime.current().ranks_of(named_group(name)))


def topology_of(name: str) -> Topology:
    """Return the topology of a named group."""
    job = runtime.current()
    return job.topology(job.ranks_of(named_group(name)))
