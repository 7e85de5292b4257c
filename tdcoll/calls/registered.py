# SPDX-License-Identifier: Apache-2.0
"""Registered buffers: memory of the caller's that peers load from or store to, in tdcoll's heap or of PyTorch's.

A kernel finds the same place on a peer by adding that peer's *delta* to an address. All of tdcoll's heap has one table
of deltas, and each allocation of PyTorch's (``torch.distributed._symmetric_memory``: ``empty`` or a memory pool, and
``rendezvous``) has one of its own. Signals are tdcoll's in any case; PyTorch's signal pads are not used.
"""

from __future__ import annotations

from typing import Any

import torch

from tdcoll.base.errors import NotSymmetricError
from tdcoll.calls.context import CollectiveContext

__all__ = ["Registered", "deltas_to", "lies_in_heap", "place_of"]


def lies_in_heap(tensor: Any, ctx: CollectiveContext) -> bool:
    """Return whether a tensor begins in the symmetric heap of this rank."""
    return bool(0 <= tensor.data_ptr() - ctx.job.heap.base < ctx.job.heap.nbytes)


def place_of(tensor: Any, ctx: CollectiveContext) -> int | str:
    """Return where a strided tensor begins in the symmetric heap, for ranks to compare; 0 if it has no address."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided or not tensor.nbytes:
        return 0
    return tensor.data_ptr() - ctx.job.heap.base if lies_in_heap(tensor, ctx) else "in other memory"


class Registered:
    """The tensors for which calls of one kind need not make the checks of :func:`deltas_to` again.

    These are tensors in the heap, at the addresses where the checks passed, until memory is released. Each call checks
    memory of PyTorch's again, because PyTorch does not report when it releases memory.
    """

    __slots__ = ("_addresses", "_context", "_releases")

    def __init__(self, ctx: CollectiveContext) -> None:
        self._context, self._releases = ctx, ctx.job.arena.releases
        self._addresses: set[int] = set()

    def add(self, tensor: torch.Tensor) -> None:
        """Take note that the checks of a tensor in the heap have passed."""
        releases = self._context.job.arena.releases
        if self._releases != releases:
            self._releases = releases
            self._addresses.clear()
        self._addresses.add(tensor.data_ptr())

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether the checks would pass again."""
        return tensor.data_ptr() in self._addresses and self._releases == self._context.job.arena.releases


def deltas_to(name: str, tensor: torch.Tensor, ctx: CollectiveContext) -> torch.Tensor:
    """Return int64 ``[world]`` on the device: from an address in a tensor to the same place in that of each rank.

    The ranks promise to pass the same tensor. For memory of PyTorch's the first call on a context is collective if
    ``rendezvous`` was not called for its group yet; the context keeps such memory until it is closed.

    Args:
        name: the tensor's name, for errors.
        tensor: of any size; made by all ranks of its group together.

    Raises:
        NotSymmetricError: peers cannot access it, or it belongs to other ranks than the context's.
    """
    if not tensor.nbytes:
        return ctx.device_group.deltas
    if lies_in_heap(tensor, ctx):
        owners = ctx.job.arena.owners_around(ctx.job.offset_of(tensor, name), tensor.nbytes)
        if owners is None or not set(ctx.topology.pes) <= set(owners):
            raise NotSymmetricError(
                f"{name} must be made by tdcoll.empty() over all ranks of the context's group, and not freed; it "
                + ("is not allocated" if owners is None else f"belongs to ranks {list(owners)}")
            )
        return ctx.device_group.deltas
    handle = _rendezvous(name, tensor, ctx)
    bases = [int(base) for base in handle.buffer_ptrs]
    key = ("PyTorch's memory", bases[ctx.rank])
    if key not in ctx.tables:
        if not all(bases):
            raise NotSymmetricError(
                f"{name} is memory that ranks {[r for r, base in enumerate(bases) if not base]} lack"
            )
        deltas = torch.tensor([base - bases[ctx.rank] for base in bases], dtype=torch.int64, device=ctx.device)
        ctx.tables[key] = (deltas, handle)  # while the handle lives, the addresses are no other memory's
    found: torch.Tensor = ctx.tables[key][0]
    return found


def _rendezvous(name: str, tensor: torch.Tensor, ctx: CollectiveContext) -> Any:
    """Return PyTorch's handle of a tensor for the context's group."""
    foreign = f"{name} must be made by tdcoll.empty() over the context's group, or be PyTorch's symmetric memory "
    if ctx.group_name is None:
        raise NotSymmetricError(
            f"{foreign}on a context that is made with its ProcessGroup; it does not lie in the symmetric heap, and the "
            f"context was made for ranks {list(ctx.topology.pes)}"
        )
    memory = _symmetric_memory()
    try:
        handle = memory.rendezvous(tensor, ctx.group_name)
    except RuntimeError as error:
        raise NotSymmetricError(f"{foreign}of its group; PyTorch says: {error}") from error
    if handle is None:
        raise NotSymmetricError(f"{foreign}(torch.distributed._symmetric_memory.empty); it is neither")
    return handle


def _symmetric_memory() -> Any:
    from torch._C._distributed_c10d import _SymmetricMemory

    return _SymmetricMemory
