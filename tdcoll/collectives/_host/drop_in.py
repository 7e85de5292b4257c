# SPDX-License-Identifier: Apache-2.0
"""Functions with the signatures of ``torch.distributed`` share this: their contexts, and the names of operations."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import ReduceOp

from tdcoll import arguments, runtime
from tdcoll.collectives._host.pool import Pool
from tdcoll.context import CollectiveContext
from tdcoll.primitives.reduce import OPERATIONS, OPERATIONS_OF

__all__ = ["TORCH_OPERATIONS", "pooled", "refuse_async", "torch_operation"]

TORCH_OPERATIONS = {
    ReduceOp.SUM: "sum",
    ReduceOp.AVG: "mean",
    ReduceOp.MAX: "max",
    ReduceOp.MIN: "min",
    ReduceOp.PRODUCT: "prod",
}
"""tdcoll's names of torch.distributed's operations."""


def refuse_async(async_op: Any) -> None:
    """Raise if a drop-in is asked for a ``Work``."""
    if async_op:
        raise ValueError("async_op must be False: the call only queues work on the current stream")


def torch_operation(op: Any, dtype: torch.dtype) -> str:
    """tdcoll's name of a ``torch.distributed.ReduceOp``, which there must be of ``dtype``.

    Raises:
        TypeError: it is none.
        ValueError: it is one that tdcoll has not, or not of this dtype.
    """
    arguments.instance("op", op, (ReduceOp, ReduceOp.RedOpType), "a torch.distributed.ReduceOp")
    named = OPERATIONS_OF.get(dtype, tuple(OPERATIONS))  # of other dtypes the collective says more
    for known, name in TORCH_OPERATIONS.items():
        if op == known and name in named:
            return name
    allowed = ", ".join(known.name for known, name in TORCH_OPERATIONS.items() if name in named)
    where = "" if len(named) == len(TORCH_OPERATIONS) else f" for {dtype}"
    raise ValueError(f"op must be one of {allowed}{where}; got {getattr(op, 'op', op).name}")


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
