# SPDX-License-Identifier: Apache-2.0
"""tdcoll's own contexts, which calls without a context take, and the ``Work`` of drop-in functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tdcoll import arguments, runtime
from tdcoll.collectives._host.checks import strided_bytes
from tdcoll.collectives._host.pool import Pool
from tdcoll.context import CollectiveContext
from tdcoll.runtime import Runtime
from tdcoll.work import CompletedWork, StreamWork, backend_errors

__all__ = ["inbox", "pooled", "pooled_for", "work_of"]

_MOST_INBOX_BYTES = 16 << 20
"""The most bytes per rank and slot of tdcoll's own context of a reduction. The context also takes no more than an
eighth of the heap in all. Larger calls are several epochs."""


def work_of(ctx: CollectiveContext, result: torch.Tensor) -> torch.distributed.Work:
    """Return the ``Work`` of the last call on this context, which is on the current stream and writes ``result``.

    Raises:
        BackendTimeout: in the simulator, where calls are made at once, a wait of the call expired.
    """
    check = ctx.monitor.raise_if_expired
    if ctx.device.type == "cpu":
        with backend_errors:
            check()
        return CompletedWork([result])
    return StreamWork([result], torch.cuda.current_stream(ctx.device), blocks=False, check=check)


def inbox(wanted: int, world: int, heap_bytes: int) -> int:
    """Return the bytes per rank of tdcoll's own context of a reduction whose calls take ``wanted`` bytes at once."""
    return min(wanted, _MOST_INBOX_BYTES, heap_bytes // (16 * world))


def pooled(operation: str, group: runtime.Group, nbytes: int) -> CollectiveContext:
    """tdcoll's own context for an operation of a group, with room for ``nbytes`` per rank. Collective when it is made
    or grows.

    Raises:
        ContextError: it has to be made, and a CUDA graph is being captured.
        HeapExhaustedError: the heap has no room. On all ranks.
    """
    owner = runtime.current()
    return _prepared(owner, operation, owner.ranks_of(group), nbytes, 0)


def pooled_for(
    operation: str, name: str, tensor: Any, group: runtime.Group, inbox_bytes: Callable[[int, int, int], int]
) -> CollectiveContext:
    """Return tdcoll's own context for a reduction of tensors such as ``tensor``, the argument ``name``.

    Collective when the context is made or grows.

    Args:
        inbox_bytes: ``(bytes of the tensor, ranks, bytes of the heap) ->`` bytes per rank of the context.

    Raises:
        NotInitializedError: before ``tdcoll.initialize()``.
        TypeError: ``tensor`` is not a tensor.
        ContextError, HeapExhaustedError: as for :func:`pooled`.
    """
    owner = runtime.current()
    arguments.tensor(name, tensor)
    ranks = owner.ranks_of(group)
    nbytes = inbox_bytes(strided_bytes(tensor), len(ranks), owner.heap.nbytes)
    return _prepared(owner, operation, ranks, nbytes, None)


def _prepared(
    owner: Runtime, operation: str, ranks: tuple[int, ...], nbytes: int, lamport_bytes: int | None
) -> CollectiveContext:
    key = (operation, ranks)
    pool: Any = owner.contexts.get(key)
    if pool is None:
        pool = owner.contexts[key] = Pool(owner, ranks, operation, lamport_bytes=lamport_bytes)
    pool.prepare(nbytes)
    context: CollectiveContext = pool.context
    return context
