# SPDX-License-Identifier: Apache-2.0
"""Other libraries' dense collectives, to compare with: of NCCL, torch's symmetric memory, and NVSHMEM.

Each baseline is made by a function of a :class:`Stock` of buffers, the device, and a function for the call of
`torch.distributed`. If the baseline cannot run, that function raises the reason. All of them are collective.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import tdcoll
from tdcoll.tools.bench.data import Buffers
from tdcoll.tools.bench.engine import Subject, nothing


class Stock:
    """Buffers for the calls of one size, which subjects may share. ``new`` makes them, with or without ``allocate``."""

    def __init__(self, new: Callable[..., Buffers]) -> None:
        self.new = new
        self._held: list[torch.Tensor] = []

    @cached_property
    def plain(self) -> Buffers:
        """Ordinary memory."""
        return self.new()

    @cached_property
    def in_heap(self) -> Buffers:
        """tdcoll's symmetric memory. The first use is collective."""

        def allocate(nbytes: int) -> torch.Tensor:
            self._held.append(tdcoll.empty((nbytes,), torch.uint8))
            return self._held[-1]

        return self.new(allocate=allocate)

    def close(self) -> None:
        """Free the buffers in tdcoll's heap. Collective."""
        while self._held:
            tdcoll.free(self._held.pop())


ByTorch = Callable[..., Subject]
"""``(buffers, close=..., group=...)``: makes the subject of torch.distributed's call, by default on all ranks."""

Make = Callable[[Stock, torch.device, ByTorch], Subject]


class Peer(NamedTuple):
    """A function that makes a baseline's subject, and its collective, with sums only; None if it does every one."""

    make: Make
    of: str | None = None


def subject_of(
    buffers: Buffers, call: Callable[[int], Any], close: Callable[[], object] = nothing, in_place: bool = False
) -> Subject:
    """Return a subject whose calls have inputs, and mostly results, of these buffers.

    Args:
        in_place: calls take their input from their result, where it is put before every launch, untimed.
    """

    def before(numbers: Sequence[int]) -> None:
        buffers.advance()
        for number in numbers if in_place else ():
            buffers.own(number).copy_(buffers.inputs[number])

    calls = buffers.sets - 1, buffers.sets
    return Subject(call, buffers.errors, buffers.sets, buffers.fill, before, calls, close=close)


def require_nccl(device: torch.device) -> Any:
    """Return the default group's NCCL backend; raise ``RuntimeError`` if there is none."""
    if device.type != "cuda":
        raise RuntimeError("needs GPUs")
    backend: Any = dist.group.WORLD._get_backend(device)  # type: ignore[union-attr]
    if not dist.is_nccl_available() or not isinstance(backend, dist.ProcessGroupNCCL):
        raise RuntimeError(f"the default process group uses {type(backend).__name__} for GPUs, not NCCL")
    return backend


def _nccl(stock: Stock, device: torch.device, by_torch: ByTorch) -> Subject:
    require_nccl(device)
    return by_torch(stock.plain)


def _nccl_symmetric(stock: Stock, device: torch.device, by_torch: ByTorch, group: Any = None) -> Subject:
    """Return the call of `torch.distributed` on buffers that NCCL allocated and registered as symmetric windows."""
    backend = require_nccl(device) if group is None else group._get_backend(device)
    given = {} if group is None else {"group": group}
    dist.all_reduce(torch.zeros(1, device=device), **given)  # windows are registered with a communicator that exists
    pool = torch.cuda.MemPool(backend.mem_allocator)

    def allocate(nbytes: int) -> torch.Tensor:
        with torch.cuda.use_mem_pool(pool):
            return torch.empty(nbytes, dtype=torch.uint8, device=device)

    buffers = stock.new(allocate=allocate)
    torch.cuda.synchronize()
    backend.register_mem_pool(pool, symm=True)

    def close() -> None:
        torch.cuda.synchronize()
        backend.deregister_mem_pool(pool)
        if group is not None:
            dist.destroy_process_group(group)

    return by_torch(buffers, close, **given)


def _nccl_zero_cta(stock: Stock, device: torch.device, by_torch: ByTorch) -> Subject:
    """Return the same of a group whose policy is to use copy engines where NCCL has such collectives (2.28)."""
    require_nccl(device)
    options = dist.ProcessGroupNCCL.Options()
    name = next((name for name in ("cta_policy", "ctaPolicy") if hasattr(options.config, name)), None)
    if name is None:
        raise RuntimeError("this PyTorch's options of NCCL have no policy for thread blocks")
    setattr(options.config, name, 2)  # NCCL_CTA_POLICY_ZERO
    return _nccl_symmetric(stock, device, by_torch, dist.new_group(backend="nccl", pg_options=options))


Bind = Callable[[Any, str, Buffers], Callable[[int], torch.Tensor]]
"""``(torch's module, the group's name, buffers in symmetric memory)``: makes the call by its number."""


def _on_symmetric(bind: Bind, in_place: bool = False) -> Make:
    """Return a function that makes a baseline of torch's symmetric memory, whose calls may be in place."""

    def make(stock: Stock, device: torch.device, _: ByTorch) -> Subject:
        require_nccl(device)
        symmetric: Any = importlib.import_module("torch.distributed._symmetric_memory")
        group = dist.group.WORLD

        def allocate(nbytes: int) -> torch.Tensor:
            made: torch.Tensor = symmetric.empty(nbytes, dtype=torch.uint8, device=device)
            symmetric.rendezvous(made, group)
            return made

        buffers = stock.new(allocate=allocate)
        call = bind(symmetric, str(group.group_name), buffers)  # type: ignore[union-attr]
        return subject_of(buffers, call, in_place=in_place)

    return make


def _operator(operator: str, arguments: Callable[[str, Buffers, int], tuple[Any, ...]]) -> Bind:
    """Bind an operator of torch's to arguments made from ``(the group's name, buffers, number)``."""

    def bind(_: Any, name: str, buffers: Buffers) -> Callable[[int], torch.Tensor]:
        function = getattr(torch.ops.symm_mem, operator)
        given = [arguments(name, buffers, i) for i in range(buffers.sets)]
        return lambda i: function(*given[i])

    return bind


_ONE_SHOT = _operator("one_shot_all_reduce_out", lambda name, b, i: (b.inputs[i], "sum", name, b.results[i]))
_TWO_SHOT = _operator("two_shot_all_reduce_", lambda name, b, i: (b.results[i], "sum", name))
"""In place, because the operator with a separate result also writes to its input, and then copies."""
_REDUCE_SCATTER = _operator("reduce_scatter_out", lambda name, b, i: (b.inputs[i], name, False, b.results[i]))


def _cat(symmetric: Any, name: str, buffers: Buffers) -> Callable[[int], torch.Tensor]:
    """Use one kernel of torch's own pieces: barrier, `torch.cat` of all ranks' symmetric inputs, barrier."""
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

    return call


def _fcollect(stock: Stock, device: torch.device, _: ByTorch) -> Subject:
    """NVSHMEM's own all-gather, ``nvshmem.core.fcollect``, on the current stream.

    The binding that it calls is called here without the look-ups of its Python, between symmetric addresses, in the
    widest type that divides the size. ``NVSHMEM_FCOLLECT_ALGO`` and its thresholds are the user's.
    """
    if device.type != "cuda":
        raise RuntimeError("needs GPUs")
    import nvshmem.bindings.nvshmem as bindings

    buffers = stock.in_heap
    nbytes = buffers.inputs[0].nbytes
    width = next(width for width in (8, 4, 2, 1) if nbytes % width == 0)
    function = getattr(bindings, f"int{8 * width}_fcollect_on_stream")
    team, count = int(bindings.Team_id.TEAM_WORLD), nbytes // width
    addresses = [(r.data_ptr(), i.data_ptr()) for r, i in zip(buffers.results, buffers.inputs, strict=True)]

    def call(i: int) -> torch.Tensor:
        result, given = addresses[i]
        function(team, result, given, count, torch.cuda.current_stream().cuda_stream)
        return buffers.results[i]

    return subject_of(buffers, call)


PEERS = {
    "nccl": Peer(_nccl),
    "nccl-symmetric": Peer(_nccl_symmetric),
    "nccl-zero-cta": Peer(_nccl_zero_cta),
    "torch-symm-cat": Peer(_on_symmetric(_cat), "all_gather"),
    "fcollect": Peer(_fcollect, "all_gather"),
    "torch-one-shot": Peer(_on_symmetric(_ONE_SHOT), "all_reduce"),
    "torch-two-shot": Peer(_on_symmetric(_TWO_SHOT, in_place=True), "all_reduce"),
    "torch-reduce-scatter": Peer(_on_symmetric(_REDUCE_SCATTER), "reduce_scatter"),
}
"""By name."""
