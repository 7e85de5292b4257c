# SPDX-License-Identifier: Apache-2.0
"""Makes the tensors of a call fit for a receiver that takes each for contiguous memory of its
own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from tdcoll.base.limits import COLLECTIVES
from tdcoll.calls.collective import spec_of
from tdcoll.calls.tensors import overlap
from tdcoll.distributed.call import Call, contiguous, is_plain, write
from tdcoll.distributed.methods import (
    ALL_TO_ALL,
    GATHER,
    REDUCE_SCATTER,
    SCATTER,
)


class Fitted(NamedTuple):
    """Tensors that a receiver takes in place of a call's.

    Attributes:
        outs, inputs: the call's own tensors, or copies.
        copies: for each copy that is written, the call's tensor and the copy.
    """

    outs: list[torch.Tensor]
    inputs: list[torch.Tensor]
    copies: list[tuple[torch.Tensor, torch.Tensor]]

    def write_back(self) -> None:
        """Copy the results into the call's tensors, when the call is complete."""
        for asked, made in self.copies:
            write(asked, made)


def fit(call: Call, rank: int, world: int) -> Fitted:
    """Return contiguous tensors with the values of a call's, none of which is read where another is
    written.

    Args:
        rank, world: of this process in the group, and the number of ranks.
    """
    method = call.method
    filled = method.in_place or not method.fills
    outs = [contiguous(out, filled) for out in call.outs]
    copies = [
        (asked, made) for asked, made in zip(call.outs, outs, strict=True) if asked is not made
    ]
    if method.in_place:
        return Fitted(outs, outs, copies)
    inputs = []
    for place, given in enumerate(call.inputs):
        tensor = contiguous(given, True)
        written = (
            outs[place : place + 1] if method.kind in COLLECTIVES and not call.listed else outs
        )
        if tensor is given and any(_clash(call, tensor, out, rank, world) for out in written):
            tensor = tensor.detach().clone()
        inputs.append(tensor)
    return Fitted(outs, inputs, copies)


def _clash(call: Call, tensor: torch.Tensor, out: torch.Tensor, rank: int, world: int) -> bool:
    """Return whether writing ``out`` may change what the call still reads of ``tensor``."""
    if tensor.layout is not torch.strided or out.layout is not torch.strided:
        return False
    if call.method.kind in COLLECTIVES and not call.listed:
        spec = spec_of(call.method.kind)
        allowed = spec.may_overlap_at(spec.segment_bytes(tensor.nbytes, world), rank)
    else:  # a rank's own part may be where it belongs
        allowed = 0 if call.method is not ALL_TO_ALL and tensor.nbytes == out.nbytes else None
    return overlap(tensor.data_ptr(), tensor.nbytes, out.data_ptr(), out.nbytes, allowed)


# ---------------------------------------------------------------------- arguments


def refuse_shared_elements(call: Call) -> None:
    """Raise ``ValueError`` if elements of a tensor that the call writes have the same address."""
    for out in call.outs:
        if not is_plain(out) and _shares_elements(out):
            raise ValueError(
                f"{call.method.name}: a tensor that the call writes must have an address for each element; got shape "
                f"{list(out.shape)} with strides {out.stride()}. Pass a contiguous tensor"
            )


def _shares_elements(tensor: torch.Tensor) -> bool:
    """Return whether two elements of a dense tensor have the same address."""
    if not tensor.numel():
        return False
    dimensions = sorted(
        (step, size) for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1
    )
    reach = 0  # of the dimensions so far, in elements
    for step, size in dimensions:
        if step == 0:
            return True
        if step <= reach:
            break
        reach += step * (size - 1)
    else:
        return False
    offsets = torch.zeros(1, dtype=torch.int64)  # such strides are rare: count addresses
    for step, size in dimensions:
        offsets = (offsets[:, None] + step * torch.arange(size)).flatten()
    return offsets.unique().numel() < offsets.numel()


def check_sizes(call: Call, rank: int, world: int) -> None:
    """Raise ``ValueError`` unless the dtypes, devices and sizes of a call's tensors fit each other,
    on this rank."""
    method = call.method
    name = call.method.kind or call.method.name
    outs = call.outs
    inputs = call.inputs
    if call.listed or (method is GATHER and outs):
        _check_list(name, outs, "input", inputs[0], rank, world, alike=method is GATHER)
    elif method in (SCATTER, REDUCE_SCATTER) and inputs:
        _check_list(name, inputs, "output", outs[0], rank, world, alike=method is SCATTER)
    elif method is ALL_TO_ALL:
        for what, tensors in (("output", outs), ("input", inputs)):
            if len(tensors) != world:
                raise ValueError(
                    f"{name}: the list of {what}s must have {world} tensors; got {len(tensors)}"
                )
            for tensor in tensors:
                _same_kind(f"{name}: {what}", tensor, inputs[0], call.device, tensor.numel())
    elif method.kind in COLLECTIVES and not any(method.sizes):
        _check_segments(call, world)


def _check_segments(call: Call, world: int) -> None:
    """Raise unless each output has as many elements as the segments of a dense collective's input
    make."""
    name = str(call.method.kind)
    spec = spec_of(str(call.method.kind))
    for out, tensor in zip(call.outs, call.inputs, strict=True):
        if not (spec.scatters or spec.gathers):
            _same_kind(f"{name}: tensor", tensor, call.inputs[0], call.device, tensor.numel())
        elif spec.gathers:
            elements = tensor.numel() if spec.scatters else world * tensor.numel()
            _same_kind(f"{name}: output", out, tensor, call.device, elements)
        else:
            _same_kind(f"{name}: input", tensor, out, call.device, world * out.numel())
        if spec.scatters and tensor.numel() % world:
            raise ValueError(
                f"{name}: input must have {world} parts of one size; got {tensor.numel()} elements"
            )


def _check_list(
    name: str,
    pieces: Sequence[torch.Tensor],
    what: str,
    tensor: torch.Tensor,
    rank: int,
    world: int,
    *,
    alike: bool,
) -> None:
    """Raise unless a list has a piece for each rank, and this rank's (all, if ``alike``) is as
    large as ``tensor``."""
    if len(pieces) != world:
        raise ValueError(
            f"{name}: the list must have {world} tensors, one per rank; got {len(pieces)}"
        )
    for place, piece in enumerate(pieces):
        if kind_of(piece) != kind_of(tensor):
            raise ValueError(
                f"{name}: all tensors must be of one dtype and device; the {what} is {tensor.dtype} on "
                f"{tensor.device}, and place {place} of the list {piece.dtype} on {piece.device}"
            )
        if (alike or place == rank) and piece.numel() != tensor.numel():
            raise ValueError(
                f"{name}: the {what} ({tensor.numel()} elements) must be as large as place {place} of the list "
                f"({piece.numel()})"
            )


def kind_of(tensor: torch.Tensor) -> tuple[torch.dtype, torch.device]:
    return tensor.dtype, tensor.device


def _same_kind(
    name: str, tensor: torch.Tensor, other: torch.Tensor, device: torch.device, elements: int
) -> None:
    """Raise unless ``tensor`` is of the dtype of ``other``, on ``device``, and has so many
    elements."""
    if kind_of(tensor) != (other.dtype, device) or tensor.numel() != elements:
        raise ValueError(
            f"{name} must be {other.dtype} of {elements} elements on {device}; got {tensor.dtype} of {tensor.numel()} "
            f"on {tensor.device}"
        )
