# SPDX-License-Identifier: Apache-2.0
"""Gradients of dense collectives: the adjoint collective turns the gradient of a call's result into
the gradient of its tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tdcoll.base.torch_internals import never_compiled
from tdcoll.calls.operation import Request
from tdcoll.calls.spec import Collective
from tdcoll.primitives.reduce import operation_name
from tdcoll.runtime.topology import Topology


@never_compiled  # a backward pass may begin within a compiled function
class ResultWithGradient(torch.autograd.Function):
    """The node of the autograd graph for a result that has been computed from a tensor.

    The collective is not called in here, because in the simulator's ``World`` other ranks would see
    this rank's grad mode.

    When the backward pass comes here, ``operation.backward(request, grad)`` returns the gradient of
    the request's tensor.
    """

    @staticmethod
    def forward(
        node: Any,
        tensor: torch.Tensor,
        result: torch.Tensor,
        operation: Any,
        request: Request,
    ) -> torch.Tensor:
        node.mark_dirty(result)  # the result itself is returned, no view of it
        node.shape = tensor.shape
        node.operation = operation
        node.request = request._replace(tensors=())  # which would keep them alive
        return result

    @staticmethod
    def backward(node: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        plain = grad.resolve_conj().resolve_neg().contiguous()
        return node.operation.backward(node.request, plain).view(node.shape), None, None, None


def derivative(
    spec: Collective,
    adjoint: Collective,
    grad: torch.Tensor,
    options: Any,
    topology: Topology,
    call: Callable[[str, torch.Tensor, str | None], torch.Tensor],
) -> torch.Tensor:
    """Return the gradient of a call's tensor, given the gradient of its result.

    Args:
        adjoint: The collective that :attr:`.Collective.adjoint` of ``spec`` names.
        grad: Contiguous.
        options: Of the call: a :class:`~tdcoll.calls.collective.CollectiveOptions`.
        topology: Of the group.
        call: ``(name, gradient, op) -> result``: calls the adjoint collective of this name.

    Raises:
        ValueError: The reduction has no derivative.
    """
    op = operation_name(options.op) if spec.reduces else "sum"
    if op not in ("sum", "mean"):
        raise ValueError(
            "op must be 'sum' or 'mean' where a gradient goes back through "
            f"tdcoll.{spec.name}; got {op!r}. Pass tensor.detach(), or make the call under "
            "torch.no_grad(), if no gradient is wanted"
        )
    if not adjoint.reduces:
        share = grad / topology.world_size if op == "mean" else grad
        return call(adjoint.name, share, None)
    if grad.is_complex():
        made = torch.view_as_complex(call(adjoint.name, torch.view_as_real(grad), op))
    else:
        made = call(adjoint.name, grad, op)
    if spec.rooted and topology.rank != options.root:
        return made.zero_()
    return made
