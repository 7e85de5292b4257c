# SPDX-License-Identifier: Apache-2.0
"""``nvshmem.core``: the calls of the host that such programs make, on tdcoll's symmetric heap."""

from __future__ import annotations

import math
from enum import IntEnum
from typing import Any

import torch

import tdcoll
from tdcoll import arguments
from tdcoll.compat.triton_dist.nvshmem_bindings import my_pe, n_pes
from tdcoll.runtime.heap import ALIGNMENT

__all__ = ["Teams", "barrier", "finalize", "free_tensor", "get_peer_tensor", "my_pe", "n_pes", "tensor"]


class Teams(IntEnum):
    """NVSHMEM's predefined teams."""

    TEAM_WORLD = 0
    TEAM_SHARED = 1
    TEAM_NODE = 2


def finalize() -> None:
    """Leave the job, as :func:`tdcoll.finalize` does. Collective."""
    tdcoll.finalize()


def tensor(shape: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """``-> [*shape]`` symmetric tensor, as :func:`tdcoll.empty` makes it. Collective.

    It is a view of whole cells of the heap. NVSHMEM pads its allocations as well, and some programs put signals behind
    the end of a tensor of one element. (Triton-distributed's tutorial 03 does.)
    """
    extents = arguments.extents("shape", shape)
    arguments.instance("dtype", dtype, torch.dtype, "a torch.dtype")
    elements, in_a_cell = math.prod(extents), ALIGNMENT // dtype.itemsize
    return tdcoll.empty(-(-elements // in_a_cell) * in_a_cell, dtype)[:elements].view(extents)


def free_tensor(tensor: torch.Tensor) -> None:
    """Give back what :func:`tensor` made. Collective."""
    tdcoll.free(tensor)


def get_peer_tensor(tensor: torch.Tensor, peer: int) -> torch.Tensor:
    """``-> [*tensor.shape]``: what stands on ``peer``, as :func:`tdcoll.peer_tensor` gives it."""
    return tdcoll.peer_tensor(tensor, peer)


def barrier(team: int, stream: Any = None) -> None:
    """Let a stream wait for all PEs: :func:`tdcoll.barrier_on_stream`.

    Args:
        team: ``Teams.TEAM_WORLD``.
        stream: PyTorch's, a wrapper of one, or any object with ``__cuda_stream__``. None: the current stream.

    Raises:
        TypeError: ``stream`` is none of these.
        ValueError: another team than the world.
    """
    if team != Teams.TEAM_WORLD:
        raise ValueError(
            f"team must be Teams.TEAM_WORLD: tdcoll has barriers on streams of all ranks only; got {team!r}"
        )
    tdcoll.barrier_on_stream(_pytorchs(stream))


def _pytorchs(stream: Any) -> Any:
    """Return a stream as PyTorch's."""
    given = getattr(stream, "pt_stream", stream)
    if given is None or isinstance(given, torch.cuda.Stream):
        return given
    if not hasattr(given, "__cuda_stream__"):
        raise TypeError(
            f"stream must be torch.cuda.Stream, an object with __cuda_stream__, or None; got {type(given).__name__}"
        )
    _, handle = given.__cuda_stream__()
    return torch.cuda.ExternalStream(handle)
