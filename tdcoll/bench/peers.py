# SPDX-License-Identifier: Apache-2.0
"""Other libraries' all-gathers, to compare with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tdcoll.bench.data import Buffers
from tdcoll.bench.subjects import Subject

__all__ = ["PEERS", "MakeBuffers"]

MakeBuffers = Callable[[Callable[[int], torch.Tensor] | None], Buffers]
"""Buffers from an allocator of bytes, or from None: ordinary ones, which subjects may share."""


def _backend(device: torch.device) -> Any:
    """The default group's NCCL backend.

    Raises:
        RuntimeError: there is none.
    """
    if device.type != "cuda":
        raise RuntimeError("needs GPUs")
    if not dist.is_nccl_available():
        raise RuntimeError("this PyTorch has no NCCL")
    backend: Any = dist.group.WORLD._get_backend(device)  # type: ignore[union-attr]
    if not isinstance(backend, dist.ProcessGroupNCCL):
        raise RuntimeError(f"the default process group uses {type(backend).__name__} for GPUs, not NCCL")
    return backend


def _gather(buffers: Buffers) -> Callable[[int], object]:
    return lambda i: dist.all_gather_into_tensor(buffers.results[i], buffers.inputs[i])


def _nccl(make_buffers: MakeBuffers, device: torch.device) -> Subject:
    """``torch.distributed.all_gather_into_tensor``."""
    _backend(device)
    buffers = make_buffers(None)
    return Subject("nccl", True, buffers, _gather(buffers))


def _nccl_symmetric(make_buffers: MakeBuffers, device: torch.device) -> Subject:
    """The same on buffers that NCCL allocated and registered as symmetric windows."""
    backend = _backend(device)
    if not hasattr(backend, "register_mem_pool"):
        raise RuntimeError("this PyTorch cannot register memory with NCCL")
    dist.all_reduce(torch.zeros(1, device=device))  # windows are registered with a communicator that exists
    pool = torch.cuda.MemPool(backend.mem_allocator)

    def allocate(nbytes: int) -> torch.Tensor:
        with torch.cuda.use_mem_pool(pool):
            return torch.empty(nbytes, dtype=torch.uint8, device=device)

    buffers = make_buffers(allocate)
    torch.cuda.synchronize()
    backend.register_mem_pool(pool, symm=True)

    def close() -> None:
        torch.cuda.synchronize()
        backend.deregister_mem_pool(pool)

    return Subject("nccl-symmetric", True, buffers, _gather(buffers), close)


PEERS: dict[str, Callable[[MakeBuffers, torch.device], Subject]] = {
    "nccl": _nccl,
    "nccl-symmetric": _nccl_symmetric,
}
"""Makes each peer's subject; raises what keeps it from running. Collective."""
