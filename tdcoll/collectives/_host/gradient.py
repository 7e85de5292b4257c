# SPDX-License-Identifier: Apache-2.0
"""Gradients of results that a collective has made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["attach", "linear"]


class _Attached(torch.autograd.Function):
    """The node of the autograd graph for a result that has been computed.

    The collective is not called in here, because in the simulator's ``World`` the ranks of a process take turns during
    a call, and would see this rank's grad mode.
    """

    @staticmethod
    def forward(
        node: Any, tensor: torch.Tensor, made: torch.Tensor, derivative: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        node.mark_dirty(made)  # `made` itself is returned, no view of it
        node.shape, node.derivative = tensor.shape, derivative
        return made

    @staticmethod
    def backward(node: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return node.derivative(grad.resolve_conj().resolve_neg().contiguous()).view(node.shape), None, None


def attach(
    tensor: torch.Tensor, made: torch.Tensor, derivative: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Return ``made``, which now has a gradient.

    Args:
        tensor: what ``made`` was computed from; requires grad.
        made: a new tensor, without a gradient.
        derivative: ``contiguous gradient of made -> gradient of tensor``, of as many elements.
    """
    result: torch.Tensor = _Attached.apply(tensor, made, derivative)
    return result


def linear(name: str, op: Any) -> str:
    """Return ``op`` if the reduction ``tdcoll.name`` has a derivative for it.

    Raises:
        ValueError: the reduction has none.
    """
    if op not in ("sum", "mean"):
        raise ValueError(
            f"op must be 'sum' or 'mean' where a gradient goes back through tdcoll.{name}; got {op!r}. Pass "
            "tensor.detach(), or make the call under torch.no_grad(), if no gradient is wanted"
        )
    return str(op)
