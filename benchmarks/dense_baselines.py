# SPDX-License-Identifier: Apache-2.0
"""Other libraries' dense collectives, to compare with: NCCL, torch's symmetric memory, and NVSHMEM.

A baseline's workload is made by a function of :class:`SharedBuffers`, the device, and a function
that makes the workload of the call of `torch.distributed`. If the baseline can't run, the function
raises the reason. All of them are collective.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tdcoll.tools.measure.buffers import Buffers, SharedBuffers, buffer_workload
from tdcoll.tools.measure.engine import Workload

_ZERO_CTA = 2
"""NCCL_CTA_POLICY_ZERO"""

TorchWorkload = Callable[..., Workload]
"""``(buffers, close=..., group=...)``: makes the workload of torch.distributed's call."""

Make = Callable[[SharedBuffers, torch.device, TorchWorkload], Workload]


class Baseline(NamedTuple):
    """Another library's call.

    Attributes:
        make: makes the workload.
        collective: the collective, with sums only; None if the baseline has every collective.
    """

    make: Make
    collective: str | None = None


def require_gpu(device: torch.device) -> None:
    """Raise ``RuntimeError`` if this is the simulator."""
    if device.type != "cuda":
        raise RuntimeError("needs GPUs")


def require_nccl(device: torch.device) -> Any:
    """Return the default group's NCCL backend; raise ``RuntimeError`` if there is none."""
    require_gpu(device)
    backend: Any = dist.group.WORLD._get_backend(device)  # type: ignore[union-attr]
    if not dist.is_nccl_available() or not isinstance(backend, dist.ProcessGroupNCCL):
        kind = type(backend).__name__
        raise RuntimeError(f"the default process group uses {kind} for GPUs, not NCCL")
    return backend


def _nccl(shared: SharedBuffers, device: torch.device, torch_workload: TorchWorkload) -> Workload:
    require_nccl(device)
    return torch_workload(shared.plain)


def _nccl_symmetric(
    shared: SharedBuffers, device: torch.device, torch_workload: TorchWorkload, group: Any = None
) -> Workload:
    """Use buffers that NCCL allocated and registered as symmetric windows."""
    backend = require_nccl(device) if group is None else group._get_backend(device)
    # Windows are registered with a communicator that exists.
    dist.all_reduce(torch.zeros(1, device=device), group=group)
    pool = torch.cuda.MemPool(backend.mem_allocator)

    def allocate(nbytes: int) -> torch.Tensor:
        with torch.cuda.use_mem_pool(pool):
            return torch.empty(nbytes, dtype=torch.uint8, device=device)

    buffers = shared.new(allocate=allocate)
    torch.cuda.synchronize()
    backend.register_mem_pool(pool, symm=True)

    def close() -> None:
        torch.cuda.synchronize()
        backend.deregister_mem_pool(pool)
        if group is not None:
            dist.destroy_process_group(group)

    return torch_workload(buffers, close, group)


def _nccl_zero_cta(
    shared: SharedBuffers, device: torch.device, torch_workload: TorchWorkload
) -> Workload:
    """Use symmetric windows, and a group whose policy is to use copy engines.

    NCCL has such collectives from 2.28 on.
    """
    require_nccl(device)
    options = dist.ProcessGroupNCCL.Options()
    names = [name for name in ("cta_policy", "ctaPolicy") if hasattr(options.config, name)]
    if not names:
        raise RuntimeError("this PyTorch's options of NCCL have no policy for thread blocks")
    setattr(options.config, names[0], _ZERO_CTA)
    group = dist.new_group(backend="nccl", pg_options=options)
    return _nccl_symmetric(shared, device, torch_workload, group)


Bind = Callable[[Any, str, Buffers], Callable[[int], torch.Tensor]]
"""``(torch's module, the group's name, symmetric buffers)``: makes the call by its number."""


def _torch_symmetric(bind: Bind, *, in_place: bool = False) -> Make:
    """Return a function that makes a baseline of torch's symmetric memory."""

    def make(shared: SharedBuffers, device: torch.device, _: TorchWorkload) -> Workload:
        require_nccl(device)
        symmetric: Any = importlib.import_module("torch.distributed._symmetric_memory")
        group = dist.group.WORLD

        def allocate(nbytes: int) -> torch.Tensor:
            tensor: torch.Tensor = symmetric.empty(nbytes, dtype=torch.uint8, device=device)
            symmetric.rendezvous(tensor, group)
            return tensor

        buffers = shared.new(allocate=allocate)
        call = bind(symmetric, str(group.group_name), buffers)  # type: ignore[union-attr]
        return buffer_workload(buffers, call, in_place=in_place)

    return make


def _operator(name: str, arguments: Callable[[str, Buffers, int], tuple[Any, ...]]) -> Bind:
    """Bind an operator of torch's to the arguments for ``(the group's name, buffers, number)``."""

    def bind(_: Any, group: str, buffers: Buffers) -> Callable[[int], torch.Tensor]:
        function = getattr(torch.ops.symm_mem, name)
        bound = [arguments(group, buffers, i) for i in range(buffers.sets)]
        return lambda i: function(*bound[i])

    return bind


_ONE_SHOT = _operator(
    "one_shot_all_reduce_out",
    lambda group, buffers, i: (buffers.inputs[i], "sum", group, buffers.results[i]),
)
_TWO_SHOT = _operator(
    "two_shot_all_reduce_", lambda group, buffers, i: (buffers.results[i], "sum", group)
)
"""In place, because the operator with a separate result also writes to its input and copies."""
_REDUCE_SCATTER = _operator(
    "reduce_scatter_out",
    lambda group, buffers, i: (buffers.inputs[i], group, False, buffers.results[i]),
)


def _cat(symmetric: Any, _: str, buffers: Buffers) -> Callable[[int], torch.Tensor]:
    """Use torch's own pieces: barrier, `torch.cat` of all ranks' symmetric inputs, barrier."""
    handles = [symmetric.rendezvous(given, dist.group.WORLD) for given in buffers.inputs]
    inputs_of_ranks = []
    for handle, given in zip(handles, buffers.inputs, strict=True):
        ranks = range(buffers.world)
        inputs_of_ranks.append(
            [handle.get_buffer(rank, given.shape, given.dtype) for rank in ranks]
        )

    def call(i: int) -> torch.Tensor:
        handles[i].barrier(channel=0)
        torch.cat(inputs_of_ranks[i], out=buffers.results[i])
        handles[i].barrier(channel=0)
        return buffers.results[i]

    return call


def _fcollect(shared: SharedBuffers, device: torch.device, _: TorchWorkload) -> Workload:
    """NVSHMEM's own all-gather, ``nvshmem.core.fcollect``, on the current stream.

    The binding that it calls is called here without the look-ups of its Python, between symmetric
    addresses, in the widest type that divides the size. ``NVSHMEM_FCOLLECT_ALGO`` and its
    thresholds are the user's.
    """
    require_gpu(device)
    import nvshmem.bindings.nvshmem as bindings

    buffers = shared.in_heap
    nbytes = buffers.inputs[0].nbytes
    width = next(width for width in (8, 4, 2, 1) if nbytes % width == 0)
    function = getattr(bindings, f"int{8 * width}_fcollect_on_stream")
    team = int(bindings.Team_id.TEAM_WORLD)
    count = nbytes // width
    inputs = [tensor.data_ptr() for tensor in buffers.inputs]
    results = [tensor.data_ptr() for tensor in buffers.results]

    def call(i: int) -> torch.Tensor:
        stream = torch.cuda.current_stream().cuda_stream
        function(team, results[i], inputs[i], count, stream)
        return buffers.results[i]

    return buffer_workload(buffers, call)


BASELINES = {
    "nccl": Baseline(_nccl),
    "nccl-symmetric": Baseline(_nccl_symmetric),
    "nccl-zero-cta": Baseline(_nccl_zero_cta),
    "torch-symm-cat": Baseline(_torch_symmetric(_cat), "all_gather"),
    "fcollect": Baseline(_fcollect, "all_gather"),
    "torch-one-shot": Baseline(_torch_symmetric(_ONE_SHOT), "all_reduce"),
    "torch-two-shot": Baseline(_torch_symmetric(_TWO_SHOT, in_place=True), "all_reduce"),
    "torch-reduce-scatter": Baseline(_torch_symmetric(_REDUCE_SCATTER), "reduce_scatter"),
}
"""The baselines by name."""
