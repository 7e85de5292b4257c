# SPDX-License-Identifier: Apache-2.0
"""Describe, for people, which backend handles the calls of a process group."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from tdcoll import arguments
from tdcoll.distributed.backend import TdcollProcessGroup
from tdcoll.distributed.dispatch import Dispatcher
from tdcoll.distributed.options import KINDS, HANDLES

__all__ = ["explain"]


def explain(group: Any = None) -> str:
    """Return what handles which calls of a process group, and why; with the number of calls so far. Text, for people.

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
        heading = f"process group {group.group_name}: backend tdcoll, rank {group.rank()} of {group.size()}"
        return "\n".join([heading, *_lines(group.dispatcher)])
    return f"process group {group.group_name}: backend {dist.get_backend(group)}; tdcoll handles none of its calls"


def _lines(dispatcher: Dispatcher) -> Iterator[str]:
    """Yield what handles which calls, and why; calls so far."""
    agreed, job = dispatcher.agreed, dispatcher.job
    if job is not None:
        where = "simulator" if job.simulated else str(dispatcher.device)
        yield f"  ranks: {job.topology(dispatcher.ranks).describe()}, symmetric memory: {where}"
    yield f"  fallback backend: {dispatcher.fallback}"
    for kind in KINDS:
        if kind in agreed.kinds:
            yield f"  {kind}: tdcoll; {dispatcher.handlers[kind].describe()}"
        else:
            configured = dispatcher.options.handles or os.environ.get(HANDLES)
            yield f"  {kind}: fallback backend; {agreed.reason or f'configured kinds: {configured}'}"
    yield "  everything else: fallback backend"
    for (kind, by, why), count in dispatcher.counts.items():
        yield f"  calls so far: {count} {kind} by {by}" + (f" ({why})" if why else "")
