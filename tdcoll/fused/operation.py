# SPDX-License-Identifier: Apache-2.0
"""The base of fused operations: :class:`FusedOperation`, a collective with work before or behind
it."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Hashable, Sequence
from typing import Any, ClassVar

import torch

from tdcoll.base import arguments
from tdcoll.calls.collective import check_dense_context
from tdcoll.calls.context import CollectiveContext
from tdcoll.calls.explain import Explanation
from tdcoll.calls.implicit import implicit_context
from tdcoll.calls.operation import Operation, Request
from tdcoll.calls.spec import Collective
from tdcoll.calls.tensors import check_tensor, strided_bytes

_log = logging.getLogger("tdcoll")


class FusedOperation(Operation):
    """An operation on a context for dense calls, which has no derivative itself.

    Attributes:
        collective: The collective whose context serves the calls.
        names: The names of the request's tensors.
        local_options: Options that may differ between ranks.
    """

    collective: Collective
    names: ClassVar[tuple[str, ...]]
    local_options: ClassVar[tuple[str, ...]] = ()

    def key(self, tensors: tuple[Any, ...], options: Any, ctx: Any) -> Hashable:
        # Types belong to the key because True == 1.
        shapes = [(tensor.shape, tensor.dtype) for tensor in tensors]
        return (self.name, options, *map(type, options), *shapes)

    def check_early(self, request: Request) -> None:
        arguments.tensor(self.names[0], request.tensors[0])

    def own_context(self, request: Request) -> CollectiveContext:
        return implicit_context(self.collective, request.tensors[0], request.group, self.name)

    def check_context(self, ctx: Any) -> None:
        check_dense_context(ctx)

    def agreement(self, request: Request, ctx: Any) -> dict[str, Any]:
        first = request.tensors[0]
        is_nested = getattr(first, "is_nested", False)
        facts = {
            "bytes": strided_bytes(first),
            "dtype": getattr(first, "dtype", None),
            "shape": "nested" if is_nested else str(tuple(getattr(first, "shape", ()))),
            "tensors": len(request.tensors),
        }
        for name, value in request.options._asdict().items():
            if name not in self.local_options:
                facts[name] = value
        return facts

    def check_no_gradient(self, request: Request, names: Sequence[str] | None = None) -> None:
        """Raise if a tensor requires grad: the operator of ``torch.ops`` has the derivative.

        Args:
            names: Of the request's tensors; None: :attr:`names`.
        """
        if not torch.is_grad_enabled():
            return
        for name, tensor in zip(names or self.names, request.tensors, strict=False):
            if tensor.requires_grad:
                raise ValueError(
                    f"{name} must not require grad, since the call has no derivative; use the "
                    f"operator torch.ops.tdcoll.{self.name}, which has one, pass {name}.detach(), "
                    "or make the call under torch.no_grad()"
                )

    @abstractmethod
    def explain(self, request: Request, ctx: Any) -> Explanation:
        """Explain the call, from the facts and the plan with which it is made."""

    def log_plan(self, request: Request, ctx: Any) -> None:
        """Log how such calls are made, on rank 0."""
        if ctx.rank == 0 and _log.isEnabledFor(logging.DEBUG):
            _log.debug("%s", self.explain(request, ctx).line)


def check_scale(name: str, scale: Any, device: torch.device, counts: Sequence[int]) -> None:
    """Raise unless kernels on ``device`` can take ``scale``, and it has one of these numbers of
    elements of fp32."""
    check_tensor(name, scale, device)
    if scale.dtype is torch.float32 and scale.numel() in counts:
        return
    allowed = " or ".join(dict.fromkeys(map(str, counts)))
    noun = "element" if allowed == "1" else "elements"
    raise ValueError(
        f"{name} must be torch.float32 of {allowed} {noun}; got {scale.dtype} of shape "
        f"{list(scale.shape)}"
    )


def requires_gradient(*tensors: torch.Tensor) -> bool:
    """Return whether autograd would record an operation on these tensors."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy if its address is no multiple of 16."""
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()
