# SPDX-License-Identifier: Apache-2.0
"""Functions with the signatures of ``torch.distributed`` share this: their contexts and their ``Work``."""

from __future__ import annotations

from typing import Any

import torch

from tdcoll import runtime
from tdcoll.collectives._host.pool import Pool
from tdcoll.context import CollectiveContext
from tdcoll.work import CompletedWork, StreamWork, backend_errors

__all__ = ["pooled", "work_of"]


def work_of(ctx: CollectiveContext, result: torch.Tensor) -> torch.distributed.Work:
    """The ``Work`` of the call that was made last on this context, on the current stream, and writes ``result``.

    Raises:
        BackendTimeout: a wait of the call expired, and the simulator, where calls are made at once, has said so.
    """
    check = ctx.monitor.raise_if_expired
    if ctx.device.type == "cpu":
        with backend_errors:
            check()
        return CompletedWork([result])
    return StreamWork([result], torch.cuda.current_stream(ctx.device), blocks=False, check=check)


def pooled(operation: str, group: runtime.Group, nbytes: int, lamport_bytes: int | None = 0) -> CollectiveContext:
    """tdcoll's own context for an operation of a group, with room for ``nbytes`` per rank. Collective when it is made
    or grows.

    Raises:
        ContextError: it has to be made, and a CUDA graph is being captured.
        HeapExhaustedError: the heap has no room. On all ranks.
    """
    owner = runtime.current()
    ranks = owner.ranks_of(group)
    key = (operation, ranks)
    pool: Any = owner.contexts.get(key)
    if pool is None:
        pool = owner.contexts[key] = Pool(owner, ranks, operation, lamport_bytes=lamport_bytes)
    pool.prepare(nbytes)
    context: CollectiveContext = pool.context
    return context
