# SPDX-License-Identifier: Apache-2.0
"""The fallback backend of a group: gloo for CPU tensors, NCCL (gloo where ranks share GPUs) for CUDA tensors.

It makes the calls that tdcoll doesn't handle, on contiguous memory.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroup

from tdcoll.base.limits import COLLECTIVES
from tdcoll.distributed.call import Call, plain_memory, write
from tdcoll.distributed.work import completed
from tdcoll.job import lifecycle
from tdcoll.runtime.store import ask

Start = Callable[[Any, Sequence[torch.Tensor], Sequence[torch.Tensor]], Any]
"""``start(group, outs, inputs)`` starts a call of contiguous tensors on a process group. Returns its work."""

_OF_BACKENDS = dict(
    zip(COLLECTIVES, ("_allgather_base", "allreduce", "_reduce_scatter_base", "alltoall_base"), strict=True)
)
"""The method of a backend that makes the calls of one tensor of a kind."""


class Fallback:
    """The fallback backend of one group."""

    def __init__(self, group: Any, names: dict[str, str]) -> None:
        self.group, self._names = group, names

    def name(self, device: torch.device) -> str:
        """Return the name of the backend for a device's tensors."""
        return self._names.get(device.type, device.type)

    def __str__(self) -> str:
        return " and ".join(f"{name} ({device})" for device, name in self._names.items())

    def single(self, kind: str, device: torch.device) -> Any:
        """Return ``call(out, input, options)``, of contiguous tensors, without the cost of PyTorch's dispatcher."""
        backend = self.group._get_backend(device)
        method = getattr(backend, _OF_BACKENDS[kind])
        if kind == "all_reduce":
            return lambda out, _, opts: method([out], opts)
        if kind == "all_to_all":
            return lambda out, tensor, opts: method(out, tensor, [], [], opts)
        return method

    def make(self, call: Call, start: Start) -> Any:
        """Make a call and return its work.

        gloo and NCCL take a tensor for contiguous memory that begins with its first element. If it has strides, they
        get a copy of it, and the caller waits as for a synchronous call, because the result has to be copied back.
        """
        taken = plain_memory(call)
        work = start(self.group, taken.outs, taken.inputs)
        if taken is call:
            return work
        if work is not None:  # NCCL has none for a synchronous call
            work.wait()
        for made, asked in zip(taken.outs, call.outs, strict=True):
            if made is not asked:
                write(asked, made)
        return completed(call.outs)


def add_backends(
    groups: tuple[Any, ...],
    store: Any,
    rank: int,
    size: int,
    timeout: timedelta,
    name: str,
    ranks: list[int],
    nccl: Any,
    split: bool,
) -> dict[str, str]:
    """Make gloo and, where there are GPUs, NCCL, and register them with ``groups``. Collective.

    Args:
        name, ranks: of the group; ``ranks`` is empty for the default group.
        split: whether NCCL may split the default group's communicator, as ``new_group`` does.

    Returns:
        The backend's name for each type of device.
    """
    if not dist.is_gloo_available():
        raise RuntimeError('backend "tdcoll" needs gloo for CPU tensors, which this PyTorch was built without')
    kinds = ProcessGroup.BackendType

    def connect() -> Any:
        return dist.ProcessGroupGloo(dist.PrefixStore("gloo/", store), rank, size, timeout=timeout)

    whom = "the group's other ranks, or the store, to connect gloo"
    gloo = ask(connect, rank, "backend tdcoll", timeout.total_seconds(), whom)
    gloo.options.global_ranks_in_group = ranks
    gloo.options.group_name = name
    gloo._set_sequence_number_for_group()
    made = {"cpu": (kinds.GLOO, gloo)}
    if torch.cuda.is_available():
        made["cuda"] = made["cpu"]
        if dist.is_nccl_available() and not lifecycle.may_share_gpus():  # NCCL refuses ranks that share one
            made["cuda"] = kinds.NCCL, _nccl(store, rank, size, timeout, name, ranks, nccl, split)
    default = made.get("cuda", made["cpu"])[0]
    for group in groups:
        group._set_default_backend(default)
        for device, (kind, backend) in made.items():
            group._register_backend(torch.device(device), kind, backend)
    return {device: "nccl" if kind == kinds.NCCL else "gloo" for device, (kind, _) in made.items()}


def _nccl(
    store: Any, rank: int, size: int, timeout: timedelta, name: str, ranks: list[int], given: Any, split: bool
) -> Any:
    """Make NCCL as ``torch.distributed`` does, splitting the default group's communicator if torch does."""
    c10d = dist.distributed_c10d
    options = copy.deepcopy(given) if given is not None else dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    if getattr(given, "split_from", None) is not None:  # split_group passes the options of another group
        options.split_from = None
    # Ranks outside of a new group split the default group's communicator if it is bound to a device: so must we.
    if split and ranks and dist.is_initialized() and c10d._get_default_group().bound_device_id:
        if source := c10d._get_split_source(c10d._get_default_group()):
            options.split_from = source
            options.split_color = c10d._process_group_color(ranks)
    options.global_ranks_in_group = ranks
    options.group_name = name
    backend = dist.ProcessGroupNCCL(dist.PrefixStore("nccl/", store), rank, size, options)
    backend._set_sequence_number_for_group()
    return backend


def _method(*names: str) -> Any:
    """Return ``ProcessGroup``'s method, whose name differs between versions of PyTorch, to be called with a group."""
    return next(filter(None, (getattr(ProcessGroup, name, None) for name in names)))


gather_into = _method("all_gather_single", "_allgather_base")
gather_several = _method("all_gather_single_coalesced", "allgather_into_tensor_coalesced")
scatter_from = _method("reduce_scatter_single", "_reduce_scatter_base")
scatter_several = _method("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")
exchange_parts = _method("all_to_all_single", "alltoall_base")


def sparse_sum_by_gather(group: Any, tensor: torch.Tensor, op: str) -> torch.Tensor:
    """Return the sum or mean of a COO tensor by dense all-gathers, if a group has none of sparse tensors.

    Every rank gets all indices and values, padded to the longest, and sums them. The host waits for the number of rows.
    """
    world = group.size()
    tensor = tensor.detach().coalesce()
    indices, values = tensor.indices(), tensor.values()
    counts = torch.empty(world, dtype=torch.int64, device=values.device)
    gather_into(group, counts, counts.new_full((1,), indices.shape[1])).wait()
    number = [int(count) for count in counts.tolist()]
    most = max(number)
    own_indices = indices.new_zeros((indices.shape[0], most))
    own_indices[:, : indices.shape[1]] = indices
    own_values = values.new_zeros((most, *values.shape[1:]))
    own_values[: values.shape[0]] = values / world if op == "mean" else values
    all_indices = indices.new_empty((world * indices.shape[0], most))
    all_values = values.new_empty((world * most, *values.shape[1:]))
    gather_into(group, all_indices, own_indices).wait()
    gather_into(group, all_values, own_values).wait()
    per_rank = zip(all_indices.chunk(world), all_values.chunk(world), number, strict=True)
    pieces = [(i[:, :n], v[:n]) for i, v, n in per_rank]
    gathered = torch.sparse_coo_tensor(
        torch.cat([i for i, _ in pieces], 1), torch.cat([v for _, v in pieces]), tensor.shape, check_invariants=False
    )
    return gathered.coalesce()
