# SPDX-License-Identifier: Apache-2.0
"""Describe, for people, which backend handles the calls of a process group."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from tdcoll.base import arguments
from tdcoll.distributed.backend import TdcollProcessGroup
from tdcoll.distributed.dispatch import Dispatcher
from tdcoll.distributed.options import KINDS

__all__ = ["explain"]


def explain(group: Any = None) -> str:
    """Return a text for people: the backend of each kind of call of a process group, the reasons, and numbers of calls.

    >>> torch.distributed.init_process_group("tdcoll")
    >>> print(tdcoll.distributed.explain())

    Args:
        group: a process group; the default one if None.

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
        heading = f"process group {group.group_name}: backend tdcoll, rank {group.rank()} of {group.size()}"
        return "\n".join([heading, *_lines(group.dispatcher)])
    return f"process group {group.group_name}: backend {dist.get_backend(group)}; tdcoll handles none of its calls"


def _lines(dispatcher: Dispatcher) -> Iterator[str]:
    """Yield the backend of each kind of call, the reasons, and the calls so far."""
    job = dispatcher.job
    if job is not None:
        where = "simulator" if job.simulated else str(dispatcher.device)
        yield f"  ranks: {job.topology(dispatcher.ranks).describe()}, symmetric memory: {where}"
    yield f"  fallback backend: {dispatcher.fallback}"
    for kind in KINDS:
        by, why = dispatcher.handled_by(kind)
        yield f"  {kind}: {by}; {why}"
    yield "  everything else: fallback backend"
    for (kind, by, why), count in dispatcher.counts.items():
        yield f"  calls so far: {count} {kind} by {by}" + (f" ({why})" if why else "")
