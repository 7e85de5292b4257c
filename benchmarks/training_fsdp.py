# SPDX-License-Identifier: Apache-2.0
"""Steps of FSDP2 models whose communication runs beside matmuls, on memory of three kinds.

``benchmarks/training.py`` lets them take turns: FSDP2 over NCCL; the same with buffers in symmetric
memory of NCCL, where PyTorch has that (``set_symm_mem_for_comm``); and backend ``tdcoll`` with
:func:`tdcoll.distributed.fsdp.use`. Parameters are bfloat16, on the CPU float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tdcoll.distributed import fsdp

Step = Callable[[], torch.Tensor]
"""Makes one step; returns the loss."""

Group = dist.ProcessGroup | None
"""None for a step without communication."""

HEAP_BYTES = "2G"
"""Symmetric heap of a rank: ``fsdp.plan`` of the largest workload, and room for others."""

in_use: list[fsdp.FsdpCommunication] = []
"""The communication of the models that were made."""


def device() -> torch.device:
    """Return this rank's device."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def faster(model: nn.Module, small: bool) -> Any:
    """Compile a model; a small one without Inductor, which needs a C++ compiler on a CPU."""
    return torch.compile(model, backend="aot_eager" if small else "inductor")


class Mlp(nn.Module):
    """Two matmuls and what comes between."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(torch.nn.functional.gelu(self.up(x)))
        return x + y


@dataclass(frozen=True)
class BesideMatmuls:
    """A model of MLPs.

    Attributes:
        width: Of the rows, in elements; four times as much inside an MLP.
        layers: MLPs, each of which is sharded by itself.
        tokens: Rows of a rank's batch.
        compiled: Whether the model is.
    """

    width: int
    layers: int
    tokens: int
    compiled: bool = False

    def __call__(self, group: Group, small: bool, nccl_memory: bool = False) -> Step:
        """Make the step over a group.

        Args:
            small: For the simulator.
            nccl_memory: Whether FSDP2's buffers are in symmetric memory of NCCL.
        """
        from torch.distributed.fsdp import fully_shard

        width = 16 if small else self.width
        dtype = torch.float32 if small else torch.bfloat16
        torch.manual_seed(1)
        with torch.device(device()):
            made = (Mlp(width).to(dtype) for _ in range(2 if small else self.layers))
            model = nn.Sequential(*made)
        if group is not None:
            mesh = DeviceMesh.from_group(group, device().type)
            for layer in model:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
            if nccl_memory:
                layers: Any = model
                for layer in layers:
                    layer.set_symm_mem_for_comm()
            elif dist.get_backend(group) == "tdcoll":
                in_use.append(fsdp.use(model))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=True)
        torch.manual_seed(2 + dist.get_rank())
        batch = torch.randn(4 if small else self.tokens, width, device=device(), dtype=dtype)
        call = faster(model, small) if self.compiled else model

        def step() -> torch.Tensor:
            optimizer.zero_grad(set_to_none=True)
            loss = call(batch).float().square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step


WORKLOADS = {
    f"fsdp-symmetric-{width}x{layers}-{tokens}{'-compiled' * compiled}": BesideMatmuls(
        width, layers, tokens, compiled
    )
    for width, layers, tokens in ((4096, 8, 8192), (4096, 8, 2048), (2048, 12, 4096))
    for compiled in (False, True)
}


def has_nccl_memory() -> bool:
    """Return whether this PyTorch lets FSDP2 gather into symmetric memory of NCCL, and this machine
    has NCCL."""
    from torch.distributed.fsdp import FSDPModule

    return torch.cuda.is_available() and hasattr(FSDPModule, "set_symm_mem_for_comm")


def close() -> None:
    """Free the symmetric memory of the models that were made. Collective."""
    for communication in in_use:
        communication.close()
    in_use.clear()
