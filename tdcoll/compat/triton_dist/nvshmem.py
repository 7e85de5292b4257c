# SPDX-License-Identifier: Apache-2.0
"""``nvshmem.core``, on tdcoll's symmetric heap; if NVSHMEM is not installed, also
``nvshmem.bindings.nvshmem``."""

from __future__ import annotations

import math
from typing import Any

import torch

from tdcoll import runtime
from tdcoll.base import arguments
from tdcoll.calls.streams import peer_tensor as get_peer_tensor
from tdcoll.job.lifecycle import finalize
from tdcoll.job.memory import empty
from tdcoll.job.memory import free as free_tensor
from tdcoll.runtime.heap import ALIGNMENT

__all__ = ["finalize", "free_tensor", "get_peer_tensor", "my_pe", "n_pes", "tensor"]

__path__: list[str] = []  # it is also ``nvshmem`` and ``nvshmem.bindings``, which are packages


def my_pe() -> int:
    """Return this PE, which is the global rank."""
    return runtime.current().rank


def n_pes() -> int:
    """Return the number of PEs of the job."""
    return runtime.current().world_size


def tensor(shape: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """``-> [*shape]`` symmetric tensor, as :func:`tdcoll.empty` makes it. Collective.

    It is a view of whole cells of the heap, because NVSHMEM pads its allocations as well, and some
    programs put signals behind the end of a tensor of one element, for example Triton-distributed's
    tutorial 03.
    """
    sizes = arguments.shape("shape", shape)
    arguments.instance("dtype", dtype, torch.dtype, "a torch.dtype")
    elements = math.prod(sizes)
    in_a_cell = ALIGNMENT // dtype.itemsize
    return empty(-(-elements // in_a_cell) * in_a_cell, dtype)[:elements].view(sizes)
