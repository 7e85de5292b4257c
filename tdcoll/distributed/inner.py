# SPDX-License-Identifier: Apache-2.0
"""The inner group: gloo for CPU tensors, NCCL (gloo where ranks share GPUs) for CUDA tensors, and what is added."""

from __future__ import annotations

import copy
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, ProcessGroup

from tdcoll.runtime.store import ask

__all__ = ["add_backends", "beside", "exchange_parts", "gather_into", "scatter_from", "sparse_sum_by_gather"]


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
    share_gpus: bool = False,
) -> dict[str, str]:
    """Make gloo and, where there are GPUs, NCCL, and register them with ``groups``. Collective.

    Args:
        groups: ProcessGroups that get the same backends.
        store, rank, size, timeout: of the group.
        name, ranks: of the group; ``ranks`` is empty for the default group.
        nccl: ``ProcessGroupNCCL.Options`` or None.
        split: whether NCCL may split the default group's communicator, as ``new_group`` does.
        share_gpus: ranks may share GPUs, which NCCL refuses: gloo serves CUDA tensors too.

    Returns:
        The backend's name for each type of device.

    Raises:
        RuntimeError: PyTorch was built without gloo.
    """
    if not dist.is_gloo_available():
        raise RuntimeError('backend "tdcoll" needs gloo for CPU tensors, which this PyTorch was built without')
    kinds = ProcessGroup.BackendType
    gloo = _gloo(dist.PrefixStore("gloo/", store), rank, size, timeout, name, ranks)
    made = {"cpu": (kinds.GLOO, gloo)}
    if torch.cuda.is_available():
        made["cuda"] = made["cpu"]
        if dist.is_nccl_available() and not share_gpus:
            made["cuda"] = kinds.NCCL, _nccl(store, rank, size, timeout, name, ranks, nccl, split)
    default = made.get("cuda", made["cpu"])[0]
    for group in groups:
        group._set_default_backend(default)
        for device, (kind, backend) in made.items():
            group._register_backend(torch.device(device), kind, backend)
    return {device: "nccl" if kind == kinds.NCCL else "gloo" for device, (kind, _) in made.items()}


def _gloo(store: Any, rank: int, size: int, timeout: timedelta, name: str, ranks: list[int]) -> Any:
    def connect() -> Any:
        return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)

    whom = "the group's other ranks, or the store, to connect gloo"
    gloo = ask(connect, rank, "backend tdcoll", timeout.total_seconds(), whom)
    gloo.options.global_ranks_in_group = ranks
    gloo.options.group_name = name
    gloo._set_sequence_number_for_group()
    return gloo


def beside(kind: str, store: Any, rank: int, size: int, timeout: timedelta, name: str, ranks: list[int]) -> Any:
    """Make another inner group, of gloo alone, for the calls of one kind. Collective.

    The store is reached by another connection, since a wait on one keeps other threads from using it.
    """
    store = store.clone() if hasattr(store, "clone") else store
    group: Any = ProcessGroup(store, rank, size)
    gloo = _gloo(dist.PrefixStore(f"gloo for {kind}/", store), rank, size, timeout, name, ranks)
    group._set_default_backend(ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, gloo)
    return group


def _nccl(
    store: Any, rank: int, size: int, timeout: timedelta, name: str, ranks: list[int], given: Any, split: bool
) -> Any:
    """As ``torch.distributed`` makes it, splitting the default group's communicator where torch does."""
    c10d = dist.distributed_c10d
    options = copy.deepcopy(given) if given is not None else dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
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


_GATHER = "all_gather_single" if hasattr(ProcessGroup, "all_gather_single") else "_allgather_base"
_EXCHANGE = "all_to_all_single" if hasattr(ProcessGroup, "all_to_all_single") else "alltoall_base"
_SCATTER = "reduce_scatter_single" if hasattr(ProcessGroup, "reduce_scatter_single") else "_reduce_scatter_base"


def gather_into(group: Any, out: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Any:
    """``group``'s all-gather into one tensor, under the name that this PyTorch has for it. Its work."""
    return getattr(group, _GATHER)(out, tensor, AllgatherOptions() if opts is None else opts)


def scatter_from(group: Any, out: torch.Tensor, tensor: torch.Tensor, opts: Any) -> Any:
    """Start ``group``'s reduce-scatter of one tensor, under the name that this PyTorch has for it. Return its work."""
    return getattr(group, _SCATTER)(out, tensor, opts)


def exchange_parts(group: Any, out: torch.Tensor, tensor: torch.Tensor, out_splits: Any, splits: Any, opts: Any) -> Any:
    """Start ``group``'s all-to-all of one tensor, under the name that this PyTorch has for it. Return its work."""
    return getattr(group, _EXCHANGE)(out, tensor, out_splits, splits, opts)


def sparse_sum_by_gather(group: Any, tensor: torch.Tensor, op: str) -> torch.Tensor:
    """The sum or mean of a COO tensor by all-gathers of dense ones, for a group that has none of sparse tensors.

    All indices and all values go to all ranks, padded to the most that a rank has; each adds up for itself. Waits for
    the number of rows on the host.
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
