# SPDX-License-Identifier: Apache-2.0
"""Forked children: they share a rank's memory and connections, and have none of its threads."""

from __future__ import annotations

import sys
from typing import Any

from tdcoll.base.errors import TdcollError

_kept: list[Any] = []

_inherited_group: Any = None
"""In a forked child, the default process group that it was forked with."""


def never_destroy(*objects: Any) -> None:
    """Keep objects until the process is gone, beyond the end of the interpreter.

    For a forked child's objects whose destructors wait for a thread that only the parent has. A
    reference from a module is not enough, because the interpreter drops those when it ends.
    """
    import ctypes

    for found in objects:
        if found is not None:
            _kept.append(found)
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(found))


def refuse_inherited_group(operation: str) -> None:
    """Raise if the default process group is that of the rank from which this process was forked."""
    if _inherited_group is not None and _default_group() is _inherited_group:
        raise TdcollError(
            f"{operation}: this process was forked with a default process group, whose connections are those of its "
            "parent. Call torch.distributed.destroy_process_group() and make another group first"
        )


def _default_group() -> Any:
    """Return the default process group; None if there is none, or no ``torch.distributed`` yet."""
    member = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "GroupMember", None)
    return None if member is None else member.WORLD


def in_child() -> None:
    """Leave the process groups to the parent: here, destroying one or its store waits without end,
    or aborts."""
    global _inherited_group
    _inherited_group = _default_group()
    if _inherited_group is not None:
        for group, (_, store) in sys.modules[
            "torch.distributed.distributed_c10d"
        ]._world.pg_map.items():
            never_destroy(group, store)
