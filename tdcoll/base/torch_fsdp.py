# SPDX-License-Identifier: Apache-2.0
"""Internals of FSDP2 that tdcoll needs, because its public interface neither lists what a model
communicates nor takes a collective for each parameter group. A test checks that they exist."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


class ParameterGroup:
    """Parameters that FSDP2 gathers together, and whose gradients it reduces together.

    Attributes:
        name: Of the first module that has them, in the model.
    """

    def __init__(self, name: str, group: Any) -> None:
        self.name = name
        self._group = group

    @property
    def is_sharded(self) -> bool:
        """Whether the parameters are sharded over several ranks, rather than replicated."""
        info = self._group.mesh_info
        return bool(getattr(info, "shard_mesh_size", 1) > 1)

    @property
    def device(self) -> torch.device:
        """The device of the gathered parameters."""
        found: torch.device = self._group.device
        return found

    @property
    def gather_group(self) -> dist.ProcessGroup:
        """The group of the next all-gather, which depends on how the parameters are sharded now."""
        found: dist.ProcessGroup = self._group._all_gather_process_group
        return found

    @property
    def gather_groups(self) -> list[dist.ProcessGroup]:
        """The groups of all all-gathers: there are two if ``reshard_after_forward`` is a number."""
        group = self._group
        found = [group.mesh_info.shard_process_group]
        if group._use_post_forward_mesh and group.post_forward_mesh_info.shard_mesh_size > 1:
            found.append(group.post_forward_mesh_info.shard_process_group)
        return found

    @property
    def scatter_group(self) -> dist.ProcessGroup:
        """The group of reduce-scatters."""
        found: dist.ProcessGroup = self._group._reduce_scatter_process_group
        return found

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the result of an all-gather."""
        sizes = [
            parameter.padded_sharded_param_size.numel()
            * _gathered_dtype(policy, parameter).itemsize
            for policy, parameter in self._parameters()
        ]
        return sum(sizes) * int(self._group.mesh_info.shard_mesh_size)

    @property
    def scattered_bytes(self) -> int:
        """Bytes of the largest result of a reduce-scatter, in which all parameters have
        gradients."""
        sizes = [
            parameter.padded_sharded_param_size.numel() * _reduced_dtype(policy, parameter).itemsize
            for policy, parameter in self._parameters()
            if parameter.sharded_param.requires_grad
        ]
        return sum(sizes)

    def _parameters(self) -> Iterator[tuple[Any, Any]]:
        """Return the policy of mixed precision and the record of each parameter."""
        for parameter in self._group.fsdp_params:
            # PyTorch 2.15 has a policy for each parameter, and earlier versions one for the group.
            yield getattr(parameter, "mp_policy", None) or self._group.mp_policy, parameter

    @property
    def has_own_collectives(self) -> bool:
        """Whether the collectives are FSDP2's own, on memory of PyTorch's allocator."""
        gather, scatter = default_collectives()
        group = self._group
        return type(group._all_gather_comm) is type(gather) and type(
            group._reduce_scatter_comm
        ) is type(scatter)

    @property
    def collectives(self) -> tuple[Any, Any]:
        """The objects that FSDP2 calls for an all-gather and for a reduce-scatter."""
        return self._group._all_gather_comm, self._group._reduce_scatter_comm

    @collectives.setter
    def collectives(self, pair: tuple[Any, Any]) -> None:
        self._group._all_gather_comm, self._group._reduce_scatter_comm = pair


def _gathered_dtype(policy: Any, parameter: Any) -> torch.dtype:
    own: torch.dtype = parameter.sharded_param.dtype
    if policy.param_dtype is None or not own.is_floating_point:
        return own
    wanted: torch.dtype = policy.param_dtype
    return wanted


def _reduced_dtype(policy: Any, parameter: Any) -> torch.dtype:
    found: torch.dtype | None = policy.reduce_dtype
    if found is None:
        # From PyTorch 2.15 on, gradients are reduced in the dtype in which they are kept.
        found = getattr(parameter, "sharded_grad_dtype", None)
    return _gathered_dtype(policy, parameter) if found is None else found


def default_collectives() -> tuple[Any, Any]:
    """Return an all-gather and a reduce-scatter of FSDP2's own."""
    # It takes long to import.
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

    return collectives.DefaultAllGather(), collectives.DefaultReduceScatter()


def states_of(model: nn.Module) -> dict[Any, str]:
    """Return FSDP2's states of a model with the name of the first module that has each."""
    from torch.distributed.fsdp import FSDPModule

    found: dict[Any, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            found.setdefault(module._get_fsdp_state(), name.removeprefix("_orig_mod."))
    return found


def groups_of_state(state: Any) -> list[Any]:
    """Return the parameter groups of a state: one at most before PyTorch 2.13."""
    several = getattr(state, "_fsdp_param_groups", None)
    if several is not None:
        return list(several)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def parameter_groups(model: nn.Module) -> list[ParameterGroup]:
    """Return the parameter groups of a model that are sharded, in the order of its modules."""
    found = [
        ParameterGroup(name or "(root)", group)
        for state, name in states_of(model).items()
        for group in groups_of_state(state)
    ]
    return [group for group in found if group.is_sharded]


def results_at_a_time(model: nn.Module) -> int:
    """Return how many results of all-gathers FSDP2 holds at a time.

    It holds one when it copies parameters out of it, and those that it has prefetched: one module
    ahead, or more if ``set_modules_to_forward_prefetch`` or its counterpart for the backward pass
    was called.
    """
    prefetched = [1]
    for state in states_of(model):
        prefetched.append(len(groups_of_state(state)))
        for targets in (state._states_to_forward_prefetch, state._states_to_backward_prefetch):
            prefetched.append(sum(len(groups_of_state(target)) for target in targets))
    return 1 + max(prefetched)
