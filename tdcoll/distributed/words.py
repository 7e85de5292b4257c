# SPDX-License-Identifier: Apache-2.0
"""Describe, for people, which backend handles the calls of a process group."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from tdcoll import arguments
from tdcoll.distributed.backend import TdcollProcessGroup

__all__ = ["explain"]


def explain(group: Any = None) -> str:
    """Return what serves which calls of a process group, and why; with the number of calls so far. Text, for people.

    Args:
        group: a process group; None for the default one.

    Raises:
        TypeError: ``group`` is no process group.
        ValueError: there is no default group, or this process is not in ``group``.
    """
    group = dist.group.WORLD if group is None else group
    if group is None:
        raise ValueError("explain needs a process group: call torch.distributed.init_process_group first")
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("explain needs a process group that this process is in")
    arguments.instance("group", group, dist.ProcessGroup, "a process group or None")
    if isinstance(group, TdcollProcessGroup):
        return group.describe()
    return f"process group {group.group_name}: backend {dist.get_backend(group)}; tdcoll serves none of its calls"
