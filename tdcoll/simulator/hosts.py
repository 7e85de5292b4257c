# SPDX-License-Identifier: Apache-2.0
"""Accesses of hosts to symmetric memory by PyTorch, for :mod:`.races`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tdcoll.simulator.memory import Memory
from tdcoll.simulator.races import Races
from tdcoll.simulator.scheduler import Scheduler

_address_of = torch._C.TensorBase.data_ptr
"""Not the one that :class:`.interpreter.Installed` puts in its place, which takes notes."""

_WAIT_FOR_VALUES = frozenset(
    [
        torch.ops.aten._local_scalar_dense.default,
        torch.ops.aten.equal.default,
        torch.ops.aten.masked_select.default,
        torch.ops.aten.nonzero.default,
    ]
)
"""Operators for which the host waits on GPUs, because it needs a value or a number of elements."""

_OF_SHAPES_ONLY = frozenset(
    [
        "empty_like",
        "zeros_like",
        "ones_like",
        "full_like",
        "rand_like",
        "randn_like",
        "new_empty",
        "new_zeros",
        "new_ones",
        "new_full",
        "new_empty_strided",
    ]
)


class HostAccesses(TorchDispatchMode):
    """While it is entered, the operations of hosts on tensors of symmetric memory are accesses."""

    def __init__(self, memory: Memory, scheduler: Scheduler, races: Races) -> None:
        super().__init__()
        self._memory = memory
        self._scheduler = scheduler
        self._races = races

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = kwargs or {}
        task = self._scheduler.current
        if task is not None and not task.is_program:
            self._look(func, args, named)
            if func in _WAIT_FOR_VALUES:
                self._races.synchronize()
        return func(*args, **named)

    def _look(self, func: Any, args: Sequence[Any], named: Mapping[str, Any]) -> None:
        schema = func._schema
        name = schema.name.rpartition("::")[2]
        given = [
            (argument, args[place] if place < len(args) else named.get(argument.name))
            for place, argument in enumerate(schema.arguments)
        ]
        aliases = [argument.alias_info for argument, _ in given if argument.alias_info is not None]
        changes = any(alias.is_write for alias in aliases)
        if (aliases and not changes) or name in _OF_SHAPES_ONLY:
            return  # a view, which reads nothing
        for argument, value in given:
            writes = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in _tensors(value):
                self._access(tensor, name, writes=writes)

    def _access(self, tensor: torch.Tensor, name: str, *, writes: bool) -> None:
        if tensor.device.type != "cpu" or tensor.layout != torch.strided or not tensor.numel():
            return
        address = _address_of(tensor)
        if self._memory.owns(address):
            self._races.of_host(_elements(tensor, address), tensor.itemsize, name, writes=writes)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)


def _elements(tensor: torch.Tensor, address: int) -> np.ndarray[Any, Any]:
    """Return the addresses of all elements."""
    at = np.array([address], np.int64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        steps = np.arange(size, dtype=np.int64) * (stride * tensor.itemsize)
        at = (at[:, None] + steps).reshape(-1)
    return at.astype(np.uint64)
