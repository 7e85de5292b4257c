# SPDX-License-Identifier: Apache-2.0
"""A process group's description for people: :func:`explain`."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tdcoll.base import arguments
from tdcoll.distributed.backend import TdcollProcessGroup


def explain(group: Any = None) -> str:
    """Return a text for people: the backend of each kind of call of a process group, the reasons,
    and numbers of calls.

    >>> torch.distributed.init_process_group("tdcoll")
    >>> print(tdcoll.distributed.explain())

    Args:
        group: a process group, or a ``DeviceMesh`` of one dimension; the default group if None.

    Raises:
        TypeError: ``group`` is neither.
        ValueError: there is no default group, or this process is not in ``group``.
    """
    group = dist.group.WORLD if group is None else group
    if isinstance(group, DeviceMesh):
        group = group.get_group()  # which says what to do if there are several dimensions
    if group is None or group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            "explain needs a process group of this process, made by torch.distributed.init_process_group"
        )
    arguments.instance("group", group, dist.ProcessGroup, "a process group, a DeviceMesh or None")
    if isinstance(group, TdcollProcessGroup):
        heading = f"process group {group.group_name}: backend tdcoll, rank {group.rank()} of {group.size()}"
        return "\n".join([heading, *group.dispatcher.describe()])
    return f"process group {group.group_name}: backend {dist.get_backend(group)}; tdcoll handles none of its calls"
