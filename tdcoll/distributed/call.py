# SPDX-License-Identifier: Apache-2.0
"""A call of ``torch.distributed``: its tensors, and the copies that stand for them.

Kernels, gloo and NCCL take a tensor for contiguous memory that begins with its first element. A
tensor with strides, a view that negates or conjugates, and memory that a call both reads and writes
therefore travel as copies (:func:`fit`), and results are written back (:func:`write`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from tdcoll.calls.operation import PreparedCall
from tdcoll.distributed.methods import ALL_GATHER, ALL_REDUCE_SEVERAL, Method


class Call:
    """A call of ``torch.distributed``.

    Attributes:
        outs, inputs: tensors that are written and read. For a coalesced collective each is a call
            of its own, for one with a list each is a rank's part.
        op: tdcoll's name of the operation, or another name; None if nothing is reduced.
        method: the collective.
        opts: its options; None for messages.
        prepared: repeats calls like this one, after a dense call of one tensor.
    """

    __slots__ = ("device", "inputs", "method", "op", "opts", "outs", "prepared")

    def __init__(
        self,
        outs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        op: str | None = None,
        *,
        method: Method = ALL_REDUCE_SEVERAL,
        opts: Any = None,
        device: torch.device | None = None,
    ) -> None:
        self.outs = outs
        self.inputs = inputs
        self.op = op
        self.method = method
        self.opts = opts
        self.prepared: PreparedCall | None = None
        if device is None:
            first = next(iter([*inputs, *outs]), None)
            device = torch.device("cpu") if first is None else first.device
        self.device = device

    @property
    def listed(self) -> bool:
        """Whether it is an all-gather into a list, which has one input and an output for each
        rank."""
        return self.method is ALL_GATHER

    @property
    def root(self) -> int:
        """The group rank that a call with a root has; 0 for others."""
        return int(getattr(self.opts, "rootRank", 0))

    @property
    def touched(self) -> list[torch.Tensor]:
        """Return all tensors that the call reads or writes."""
        return [*self.outs, *self.inputs]

    @property
    def result(self) -> list[Any]:
        """Return the value of the call's work and future, which has the form that NCCL's has."""
        return [list(self.outs)] if self.listed else list(self.outs)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself, or the one behind a functional collective's result, waited for.

    PyTorch's dispatcher does the same for its own backends, but tdcoll's calls don't pass it.

    Raises:
        NotImplementedError: the tensor wraps others and has no memory itself, as a DTensor.
    """
    if type(tensor) is torch.Tensor:
        return tensor
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    if isinstance(tensor, AsyncCollectiveTensor):
        return plain(tensor.trigger_wait())
    if has_no_values(tensor):
        return tensor
    if tensor.layout == torch.strided and tensor.nbytes and not tensor.data_ptr():
        raise NotImplementedError(
            f"tensor must have memory of its own; got {type(tensor).__name__}, which wraps other tensors. Pass one of "
            "those, for example DTensor.to_local()"
        )
    return tensor


def has_no_values(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is on the meta device, or a fake one, so that no call has anything to
    do for it."""
    fake: Any = getattr(sys.modules.get("torch._subclasses.fake_tensor"), "FakeTensor", ())
    return tensor.device.type == "meta" or isinstance(tensor, fake)


def write(out: torch.Tensor, values: torch.Tensor) -> None:
    """Copy ``values`` into ``out`` as a collective writes its result: autograd neither records nor
    counts it.

    A kernel stores through addresses, which autograd does not see; gloo and NCCL do the same. A
    copy that replaces such a store must not be seen either, because it would give ``out`` a
    history, and be refused if ``out`` is a parameter.
    """
    # because only there a tensor that was made in that mode may be written to
    with torch.inference_mode():
        out.data.copy_(values)
    # it may have been made for another stream, where its memory is given away when it is dropped
    if values.is_cuda:
        values.record_stream(torch.cuda.current_stream(values.device))


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's values are contiguous memory. Tensors that aren't dense count as
    such."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return True
    conjugate = tensor.is_complex() and tensor.is_conj()  # which takes longer to ask
    return tensor.is_contiguous() and not tensor.is_neg() and not conjugate


@torch.no_grad()
def contiguous(tensor: torch.Tensor, filled: bool) -> torch.Tensor:
    """Return the tensor if it is contiguous, otherwise a contiguous one of its shape, with its
    values if ``filled``."""
    if is_plain(tensor):
        return tensor
    if filled:
        return tensor.resolve_conj().resolve_neg().contiguous()
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
