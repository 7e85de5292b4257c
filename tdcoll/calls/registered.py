# SPDX-License-Identifier: Apache-2.0
"""Memory of the caller's, in the symmetric heap, that peers load from or store to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tdcoll.base.errors import NotSymmetricError
from tdcoll.calls.context import CollectiveContext

__all__ = ["Registered", "check_symmetric", "place_of"]


def place_of(tensor: Any, ctx: CollectiveContext) -> int | str:
    """Return where a strided tensor begins in the symmetric heap, for ranks to compare; 0 if it has no address."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided or not tensor.nbytes:
        return 0
    offset = tensor.data_ptr() - ctx.job.heap.base
    return offset if 0 <= offset < ctx.job.heap.nbytes else "in other memory"


class Registered:
    """The tensors for which calls of one kind need not make :func:`check_symmetric` again: those at the addresses where
    it passed, until memory is released.

    Args:
        place: which of a call's tensors peers access.
    """

    __slots__ = ("_addresses", "_context", "_place", "_releases")

    def __init__(self, ctx: CollectiveContext, place: int) -> None:
        self._context, self._place, self._releases = ctx, place, ctx.job.arena.releases
        self._addresses: set[int] = set()

    def add(self, tensors: Sequence[torch.Tensor]) -> None:
        """Take note that the tensor of a call has passed."""
        releases = self._context.job.arena.releases
        if self._releases != releases:
            self._releases = releases
            self._addresses.clear()
        self._addresses.add(tensors[self._place].data_ptr())

    def holds(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether the tensor of a call would pass again."""
        address = tensors[self._place].data_ptr()
        return address in self._addresses and self._releases == self._context.job.arena.releases


def check_symmetric(name: str, tensor: torch.Tensor, ctx: CollectiveContext) -> None:
    """Raise unless peers can access a tensor; the ranks promise to pass the same one.

    Args:
        name: the tensor's name, for errors.

    Raises:
        NotSymmetricError: it isn't in the symmetric heap, or belongs to other ranks than the context's.
    """
    if not tensor.nbytes:
        return
    owners = ctx.job.arena.owners_around(ctx.job.offset_of(tensor, name), tensor.nbytes)
    if owners is None or not set(ctx.topology.pes) <= set(owners):
        raise NotSymmetricError(
            f"{name} must be made by tdcoll.empty() over all ranks of the context's group, and not freed; it "
            + ("is not allocated" if owners is None else f"belongs to ranks {list(owners)}")
        )
