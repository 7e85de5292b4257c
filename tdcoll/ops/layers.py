# SPDX-License-Identifier: Apache-2.0
"""Linear layers of a tensor-parallel model that isn't compiled, by the operators of
:mod:`tdcoll.ops.matmuls`."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

import torch
from torch import nn

from tdcoll import runtime
from tdcoll.ops.groups import group_name

COLUMNS, ROWS = "columns", "rows"


class ParallelLinear(nn.Module):
    """One rank's part of a linear layer; made by :func:`parallelize`.

    Attributes:
        weight: ``[columns / world, depth]`` or ``[columns, depth / world]``.
        bias: Of this rank's columns, or of all if the depth is shared out; or None.
    """

    bias: torch.Tensor | None

    def __init__(
        self, linear: nn.Linear, kind: str, group: str, rank: int, world: int, keep_gathered: bool
    ) -> None:
        super().__init__()
        self._group = group
        self._keep_gathered = keep_gathered
        self._by_columns = kind == COLUMNS
        dimension = 0 if self._by_columns else 1
        size = linear.weight.shape[dimension]
        if size % world:
            raise ValueError(
                f"a layer whose {kind} are shared out must have a multiple of {world}; got weight of shape "
                f"{list(linear.weight.shape)}"
            )
        part = linear.weight.detach().chunk(world, dimension)[rank]
        self.weight = nn.Parameter(part.clone(memory_format=torch.contiguous_format))
        self.register_parameter("bias", None)
        if linear.bias is not None:
            bias = linear.bias.detach()
            self.bias = nn.Parameter(
                (bias.chunk(world)[rank] if self._by_columns else bias).clone()
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[n, ..., depth] -> [world * n, ..., columns / world]``, or the other way round."""
        made: torch.Tensor
        if self._by_columns:
            made, _ = torch.ops.tdcoll.all_gather_matmul(
                x, self.weight, self.bias, False, self._keep_gathered, self._group
            )
            return made
        made = torch.ops.tdcoll.matmul_reduce_scatter(x, self.weight, self.bias, False, self._group)
        return made


def parallelize(
    model: nn.Module,
    plan: Mapping[str, str],
    group: runtime.Group = None,
    *,
    keep_gathered: bool = True,
) -> nn.Module:
    """Share out linear layers of a model, whose activations are shared out over the first dimension
    between them.

    >>> mlp = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 16))
    >>> mlp = tdcoll.ops.parallelize(mlp, {"0": "columns", "2": "rows"})
    >>> mlp(torch.ones(4, 16)).shape
    torch.Size([4, 16])

    Args:
        model: is changed; every rank passes the same.
        plan: patterns of names, as ``"layers.*.mlp.up"``, and for each what the ranks share:
            ``"columns"`` (a layer that gathers rows and has a part of the result's columns) or
            ``"rows"`` (one that has a part of the depth and scatters the sum's rows).
        group: as for :func:`tdcoll.all_gather`; a DeviceMesh of one dimension, for example.
        keep_gathered: keep gathered rows for the backward pass, instead of gathering them again.

    Returns:
        ``model``.

    Raises:
        ValueError: a pattern fits no ``nn.Linear``, or a size isn't divisible by the number of
            ranks.
    """
    job = runtime.current()
    ranks = job.ranks_of(group)
    rank = ranks.index(job.rank)
    name_of_group = group_name(group)
    for pattern, kind in plan.items():
        if kind not in (COLUMNS, ROWS):
            raise ValueError(
                f"plan must have values {COLUMNS!r} and {ROWS!r}; got {kind!r} for {pattern!r}"
            )
        found = [name for name, module in model.named_modules() if fnmatchcase(name, pattern)]
        layers = [name for name in found if isinstance(model.get_submodule(name), nn.Linear)]
        if not layers:
            raise ValueError(f"plan: {pattern!r} fits no nn.Linear of the model")
        for name in layers:
            parent, _, last = name.rpartition(".")
            linear = model.get_submodule(name)
            assert isinstance(linear, nn.Linear)
            part = ParallelLinear(linear, kind, name_of_group, rank, len(ranks), keep_gathered)
            setattr(model.get_submodule(parent), last, part)
    return model
