# SPDX-License-Identifier: Apache-2.0
"""Rules for the tensors of a call. The fast path asks them; the slow one asks the same, and says what is wrong."""

from __future__ import annotations

from typing import Any

import torch

from tdcoll import arguments
from tdcoll.context import CollectiveContext

__all__ = ["check_context", "check_tensor", "lies_elsewhere_in", "strided_bytes", "usable"]

_STRIDED = torch.strided


def check_context(ctx: Any) -> None:
    """Raise unless ``ctx`` is a context."""
    if not isinstance(ctx, CollectiveContext):
        arguments.instance("ctx", ctx, CollectiveContext, "a tdcoll.CollectiveContext")


def usable(tensor: torch.Tensor, device: torch.device) -> bool:
    """Return whether kernels on ``device`` can take the bytes of a tensor as they are."""
    return (
        tensor.device == device
        and tensor.layout is _STRIDED
        and tensor.is_contiguous()
        and not (tensor.is_neg() or tensor.is_conj())
    )


def _problem(tensor: torch.Tensor, device: torch.device) -> str:
    """Return why a tensor is not :func:`usable`."""
    if tensor.device != device:
        return f"must be on {device}, where the context is; got {tensor.device}"
    if tensor.is_conj() or tensor.is_neg():
        return "must hold its values as they are; call resolve_conj() and resolve_neg() first"
    if tensor.layout is not torch.strided:
        return f"must be contiguous; got shape {list(tensor.shape)} in {tensor.layout}"
    return f"must be contiguous; got shape {list(tensor.shape)} with strides {tensor.stride()}"


def check_tensor(name: str, tensor: Any, device: torch.device) -> None:
    """Raise unless ``tensor`` is one that kernels on ``device`` can take."""
    arguments.tensor(name, tensor)
    if tensor.is_nested:  # and has no shape
        raise ValueError(f"{name} must be an ordinary tensor; got a nested one")
    if not usable(tensor, device):
        raise ValueError(f"{name} {_problem(tensor, device)}")


def strided_bytes(tensor: Any) -> int:
    """Bytes of a tensor; 0 of what is none, or has no strides."""
    return tensor.nbytes if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided else 0


def lies_elsewhere_in(begin: int, nbytes: int, first: int, total: int, own: int) -> bool:
    """Return whether ``nbytes`` bytes at ``begin`` overlap ``total`` bytes at ``first``, other than as the segment that
    begins ``own`` bytes into them."""
    return nbytes > 0 and first < begin + nbytes and begin < first + total and begin != first + own
