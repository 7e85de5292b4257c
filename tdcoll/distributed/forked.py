# SPDX-License-Identifier: Apache-2.0
"""Process groups in a forked child, which has a rank's connections and none of its threads.

A call there would send over the rank's connections, write into its memory, or wait for a thread
that isn't there. When a process is forked, the class of each of its groups is therefore replaced in
the child. Every method that communicates raises an error, for Python and for C++, and calls in a
rank cost nothing.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any

from torch._C._distributed_c10d import ProcessGroup

from tdcoll import runtime
from tdcoll.base.errors import NotInitializedError

_LOCAL = frozenset(
    (
        *(
            "BackendType",
            "CUSTOM",
            "GLOO",
            "MPI",
            "NCCL",
            "UCC",
            "UNDEFINED",
            "XCCL",
            "boxed",
            "unbox",
        ),
        *(
            "rank",
            "size",
            "name",
            "group_name",
            "group_desc",
            "get_group_store",
            "bound_device_id",
            "set_timeout",
        ),
        *("abort", "shutdown"),
    )
)
"""Members of ``ProcessGroup`` that don't communicate, besides those with an underscore. The last
two are replaced."""

_UNDERSCORED = ("_allgather_base", "_reduce_scatter_base", "_start_coalescing", "_end_coalescing")

_groups: weakref.WeakSet[Any] = weakref.WeakSet()


def replaced_in_children(kind: type) -> type:
    """Let each group of a class refuse calls in forked children. Return the class."""
    members: dict[str, Any] = {"shutdown": _forget, "abort": _forget}
    for name in dir(ProcessGroup):
        if name in _UNDERSCORED or not (name.startswith("_") or name in _LOCAL):
            members[name] = _refusing(name)
    of_child = type(f"{kind.__name__}OfParent", (kind,), members)

    def in_child() -> None:
        for group in _groups:
            if type(group) is kind:
                group.__class__ = of_child

    os.register_at_fork(after_in_child=in_child)
    return kind


def watch(group: Any) -> None:
    """Have a group's class replaced in children that are forked from now on."""
    _groups.add(group)


def _refusing(name: str) -> Callable[..., Any]:
    def refuse(self: Any, *args: Any, **named: Any) -> Any:
        raise NotInitializedError(
            f"{name}: this process was forked from rank {self.rank()} of process group {self.group_name}, and shares "
            "that rank's connections. Make the call in the rank; docs/distributed.md#forked-children says what a child "
            "may do"
        )

    return refuse


def _forget(self: Any) -> None:
    """Leave the job, if the backend has joined it, as a rank does when its group ends. Local."""
    job = runtime.inherited()
    if job is not None and job.of_backend and self.dispatcher._ends(job):
        runtime.install(None)
