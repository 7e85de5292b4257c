# SPDX-License-Identifier: Apache-2.0
"""Other libraries' dense collectives, to compare with.

Each is made by a function of what makes buffers, the device, and the call of ``torch.distributed``, which raises what
keeps it from running. They are collective.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist

import tdcoll
from tdcoll.bench.data import Buffers
from tdcoll.bench.engine import Subject, nothing
from tdcoll.bench.timing import pause
from tdcoll.errors import HeapExhaustedError

__all__ = [
    *("ALL_GATHERS", "FCOLLECT", "MakeBuffers", "let_nvshmem_have_nccl", "nccl", "nccl_symmetric", "require_joined"),
    *("require_nccl", "subject_of", "symmetric_buffers", "symmetric_memory"),
]

FCOLLECT = "fcollect"


class MakeBuffers(Protocol):
    """Buffers from an allocator of bytes, or from None: ordinary ones, which subjects may share."""

    def __call__(self, allocate: Callable[[int], torch.Tensor] | None, separate: bool = False) -> Buffers: ...


ByTorch = Callable[..., object]
"""``(result, given, group=None)``: the call of ``torch.distributed``."""


def subject_of(buffers: Buffers, call: Callable[[int], torch.Tensor], close: Callable[[], object] = nothing) -> Subject:
    """A subject whose calls have inputs, and mostly results, of these buffers."""
    return Subject(
        call,
        buffers.errors,
        inputs=buffers.sets,
        begin=buffers.fill,
        before=lambda numbers: buffers.advance(),
        calls=(buffers.calls - 1, buffers.calls),
        data=buffers,
        close=close,
    )


def require_nccl(device: torch.device) -> Any:
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


def torch_call(buffers: Buffers, by_torch: ByTorch, **named: Any) -> Callable[[int], torch.Tensor]:
    """The call of ``torch.distributed``."""
    inputs, results = buffers.inputs, buffers.results

    def call(i: int) -> torch.Tensor:
        by_torch(results[i], inputs[i], **named)
        return results[i]

    return call


def nccl(make_buffers: MakeBuffers, device: torch.device, by_torch: ByTorch) -> Subject:
    """The call of ``torch.distributed``."""
    require_nccl(device)
    buffers = make_buffers(None)
    return subject_of(buffers, torch_call(buffers, by_torch))


def nccl_symmetric(make_buffers: MakeBuffers, device: torch.device, by_torch: ByTorch) -> Subject:
    """The same on buffers that NCCL allocated and registered as symmetric windows."""
    backend = require_nccl(device)
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

    return subject_of(buffers, torch_call(buffers, by_torch), close)


# ---------------------------------------------------------------------- torch's symmetric memory


def require_joined(call: Callable[[int], object], stream: Any) -> None:
    """Raise unless what ``call`` does on ``stream``, a stream of its own, is waited for by the current stream.

    Else it would go on when the clock has stopped. The stream is kept busy before, so its work ends late for certain.
    """
    with torch.cuda.stream(stream):
        pause(2000.0)
    call(0)
    done = torch.cuda.Event()
    done.record()
    done.synchronize()
    if not stream.query():
        raise RuntimeError("its work goes on when the stream that it is timed on is through: it cannot be timed")


def symmetric_memory(device: torch.device) -> Any:
    """The module, where it can be used."""
    if device.type != "cuda":
        raise RuntimeError("needs GPUs")
    require_nccl(device)
    import torch.distributed._symmetric_memory as symmetric

    return symmetric


def symmetric_buffers(symmetric: Any, make_buffers: MakeBuffers, device: torch.device) -> Buffers:
    """Inputs in torch's symmetric memory: an allocation each, because handles speak of whole allocations."""

    def allocate(nbytes: int) -> torch.Tensor:
        made: torch.Tensor = symmetric.empty(nbytes, dtype=torch.uint8, device=device)
        symmetric.rendezvous(made, dist.group.WORLD)
        return made

    return make_buffers(allocate, separate=True)


def _torch_low_contention(make_buffers: MakeBuffers, device: torch.device, _: object = None) -> Subject:
    """``torch.ops.symm_mem._low_contention_all_gather``: copy engines pull from symmetric inputs, on torch's stream.

    It makes its result itself.
    """
    symmetric = symmetric_memory(device)
    buffers = symmetric_buffers(symmetric, make_buffers, device)
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]

    def call(i: int) -> torch.Tensor:
        made = torch.ops.symm_mem._low_contention_all_gather(buffers.inputs[i], group)
        return torch.ops._c10d_functional.wait_tensor(made)

    require_joined(call, symmetric._get_backend_stream())
    return subject_of(buffers, call)


def _torch_one_shot(make_buffers: MakeBuffers, device: torch.device, _: object = None) -> Subject:
    """All in one kernel, from torch's own pieces: barrier, ``torch.cat`` of all ranks' symmetric inputs, barrier.

    On the current stream.
    """
    symmetric = symmetric_memory(device)
    buffers = symmetric_buffers(symmetric, make_buffers, device)
    handles = [symmetric.rendezvous(given, dist.group.WORLD) for given in buffers.inputs]
    remote = [
        [handle.get_buffer(rank, given.shape, given.dtype) for rank in range(buffers.world)]
        for handle, given in zip(handles, buffers.inputs, strict=True)
    ]

    def call(i: int) -> torch.Tensor:
        handles[i].barrier(channel=0)
        torch.cat(remote[i], out=buffers.results[i])
        handles[i].barrier(channel=0)
        return buffers.results[i]

    return subject_of(buffers, call)


# ---------------------------------------------------------------------- NVSHMEM


def let_nvshmem_have_nccl() -> None:
    """Before ``tdcoll.initialize()``: leave NVSHMEM the NCCL that it serves ``fcollect`` with, which tdcoll turns off.

    A ``NVSHMEM_DISABLE_NCCL`` of the user's stays. Either way the variable is in the result's file.
    """
    if not os.environ.get("NVSHMEM_DISABLE_NCCL"):
        os.environ["NVSHMEM_DISABLE_NCCL"] = "0"


def _fcollect(make_buffers: MakeBuffers, device: torch.device, _: object = None) -> Subject:
    """NVSHMEM's own all-gather, ``nvshmem.core.fcollect``, on the current stream.

    By the binding that it calls (without the look-ups of its Python, which tdcoll has not either), between symmetric
    addresses, in the widest type that divides the size. ``NVSHMEM_FCOLLECT_ALGO`` and its thresholds are the user's.
    """
    if device.type != "cuda":
        raise RuntimeError("needs GPUs")
    import nvshmem.bindings.nvshmem as bindings

    held: list[torch.Tensor] = []

    def allocate(nbytes: int) -> torch.Tensor:
        held.append(tdcoll.empty(nbytes, torch.uint8))
        return held[-1]

    def close() -> None:
        torch.cuda.synchronize()
        while held:
            tdcoll.free(held.pop())

    try:
        buffers = make_buffers(allocate)
    except HeapExhaustedError:  # on all ranks alike
        close()
        raise
    nbytes = buffers.inputs[0].nbytes
    width = next(width for width in (8, 4, 2, 1) if nbytes % width == 0)
    function = getattr(bindings, f"int{8 * width}_fcollect_on_stream")
    team, count = int(bindings.Team_id.TEAM_WORLD), nbytes // width
    addresses = [(r.data_ptr(), i.data_ptr()) for r, i in zip(buffers.results, buffers.inputs, strict=True)]

    def call(i: int) -> torch.Tensor:
        result, given = addresses[i]
        function(team, result, given, count, torch.cuda.current_stream().cuda_stream)
        return buffers.results[i]

    return subject_of(buffers, call, close)


ALL_GATHERS: dict[str, Callable[..., Subject]] = {
    "nccl": nccl,
    "nccl-symmetric": nccl_symmetric,
    "torch-symm": _torch_low_contention,
    "torch-symm-cat": _torch_one_shot,
    FCOLLECT: _fcollect,
}
"""Those of the all-gather, by name."""
