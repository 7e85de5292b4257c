# SPDX-License-Identifier: Apache-2.0
"""Nodes for programs that read from torchrun's environment variables which ranks share one."""

from __future__ import annotations

import os

from tdcoll import arguments

__all__ = ["device_index", "emulate"]

_device: int | None = None


def emulate() -> None:
    """Let ``LOCAL_RANK`` and ``LOCAL_WORLD_SIZE`` be those of the emulated node, where nodes are emulated.

    Raises:
        ValueError: a variable is no number, or the processes of this host do not divide evenly; such programs take all
            nodes to be of one size.
    """
    global _device
    _device = _number("LOCAL_RANK", 0)
    nodes = _number("TDCOLL_EMULATE_NODES", 1)
    processes = _number("LOCAL_WORLD_SIZE", 1)
    if nodes == 1:
        return
    if processes % nodes:
        raise ValueError(
            f"TDCOLL_EMULATE_NODES must divide the {processes} processes of this host, as such programs take all nodes "
            f"to be of one size; got {nodes}"
        )
    per_node = processes // nodes
    os.environ["LOCAL_RANK"] = str(_device % per_node)
    os.environ["LOCAL_WORLD_SIZE"] = str(per_node)


def device_index() -> int:
    """Return the number of the GPU of the host that this process takes."""
    return _number("LOCAL_RANK", 0) if _device is None else _device


def _number(variable: str, least: int) -> int:
    """Return the number in a variable of the environment, which is ``least`` where the variable is not set."""
    return arguments.parse_whole(os.environ.get(variable) or str(least), variable, least)
