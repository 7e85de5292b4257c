# SPDX-License-Identifier: Apache-2.0
"""Tensors of calls: what kernels can take, where they lie in the symmetric heap, and whether two
overlap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from tdcoll.base import arguments
from tdcoll.base.errors import NotSymmetricError

if TYPE_CHECKING:
    from tdcoll.calls.context import CollectiveContext

_STRIDED = torch.strided

_KERNEL_DTYPES = (
    torch.bool,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
)
"""Dtypes whose numbers kernels can load."""


def usable(tensor: torch.Tensor, device: torch.device) -> bool:
    """Return whether kernels on ``device`` can take the bytes of a tensor as they are."""
    return (
        tensor.device == device
        and tensor.layout is _STRIDED
        and tensor.is_contiguous()
        and not (tensor.is_neg() or tensor.is_conj())
        and (tensor.data_ptr() != 0 or tensor.numel() == 0)
    )


def check_tensor(name: str, tensor: Any, device: torch.device) -> None:
    """Raise unless ``tensor`` is one that kernels on ``device`` can take."""
    arguments.tensor(name, tensor)
    if tensor.is_nested:  # and has no shape
        raise ValueError(f"{name} must be an ordinary tensor; got a nested one")
    if usable(tensor, device):
        return
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device}, where the context is; got {tensor.device}")
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError(
            f"{name} must hold its values as they are; call resolve_conj() and resolve_neg() first"
        )
    # A subclass that wraps other tensors, as DTensor does, has no memory of its own.
    if tensor.layout is _STRIDED and tensor.is_contiguous():
        raise TypeError(
            f"{name} must be a tensor with memory of its own; got {type(tensor).__name__}. Pass "
            "what it holds, such as to_local() of a DTensor or wait() of an AsyncCollectiveTensor"
        )
    if tensor.layout is not _STRIDED:
        raise ValueError(
            f"{name} must be a dense tensor; got shape {list(tensor.shape)} in {tensor.layout}. "
            "For torch.sparse_coo there is tdcoll.sparse_all_reduce"
        )
    raise ValueError(
        f"{name} must be contiguous; got shape {list(tensor.shape)} with strides "
        f"{tensor.stride()}. Pass {name}.contiguous()"
    )


def check_readable(name: str, tensor: Any, device: torch.device) -> None:
    """Raise unless ``tensor`` is one that code of the caller's in a kernel on ``device`` can
    read."""
    check_tensor(name, tensor, device)
    if tensor.dtype not in _KERNEL_DTYPES:
        raise TypeError(
            f"{name} must be of a dtype that Triton has; got {tensor.dtype}. Pass its bytes or "
            "numbers, such as torch.view_as_real() of a complex tensor"
        )


def check_fits(
    name: str,
    tensor: Any,
    device: torch.device,
    dtypes: Sequence[torch.dtype],
    shapes: Sequence[Sequence[int]],
) -> None:
    """Raise unless kernels on ``device`` can take ``tensor``, and it has one of the dtypes and
    shapes."""
    check_tensor(name, tensor, device)
    sizes = [list(shape) for shape in shapes]
    if tensor.dtype in dtypes and list(tensor.shape) in sizes:
        return
    allowed_dtypes = " or ".join(dict.fromkeys(map(str, dtypes)))
    allowed_shapes = " or ".join(dict.fromkeys(map(str, sizes)))
    raise ValueError(
        f"{name} must be {allowed_dtypes} of shape {allowed_shapes}; got {tensor.dtype} of "
        f"{list(tensor.shape)}"
    )


def check_symmetric(name: str, tensor: torch.Tensor, ctx: CollectiveContext) -> None:
    """Raise unless the peers of a context can access a tensor. The caller vouches that all ranks
    pass the same one."""
    if not tensor.nbytes:
        return
    owners = ctx.job.arena.owners_around(ctx.job.offset_of(tensor, name), tensor.nbytes)
    if owners is not None and set(ctx.topology.pes) <= set(owners):
        return
    found = "is not allocated" if owners is None else f"belongs to ranks {list(owners)}"
    raise NotSymmetricError(
        f"{name} must be made by tdcoll.empty() over all ranks of the context's group, and not "
        f"freed; it {found}"
    )


def heap_offset(tensor: Any, ctx: CollectiveContext) -> int | str:
    """Return the offset of a tensor in the symmetric heap, for ranks to compare; 0 if it has no
    address."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not _STRIDED or not tensor.nbytes:
        return 0
    offset = tensor.data_ptr() - ctx.job.heap.base
    return offset if 0 <= offset < ctx.job.heap.nbytes else "in other memory"


def strided_bytes(tensor: Any) -> int:
    """Return the bytes of a tensor; 0 if it is no tensor, or has no strides."""
    if isinstance(tensor, torch.Tensor) and tensor.layout == _STRIDED:
        return tensor.nbytes
    return 0


def overlap(source: int, source_bytes: int, out: int, out_bytes: int, allowed: int | None) -> bool:
    """Return whether a tensor and a result overlap, given the address and the bytes of each.

    Args:
        allowed: The result may begin this many bytes behind the tensor. None: no overlap is
            allowed.
    """
    if out >= source + source_bytes or source >= out + out_bytes:
        return False
    return out - source != allowed


def tensors_overlap(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two contiguous tensors share memory."""
    return overlap(first.data_ptr(), first.nbytes, second.data_ptr(), second.nbytes, None)
