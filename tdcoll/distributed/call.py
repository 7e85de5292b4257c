# SPDX-License-Identifier: Apache-2.0
"""A call of ``torch.distributed``: its tensors, and the copies that stand for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tdcoll.calls.operation import PreparedCall


class Call:
    """A call of ``torch.distributed``.

    Attributes:
        outs, inputs: one tensor for each part of the call; for the user each part is a separate call.
        op: tdcoll's name of the operation, or another name; None if nothing is reduced.
        listed: an all-gather into a list. Then there is one input, and ``outs`` has a tensor for each rank.
        prepared: repeats calls like this one, after a dense call of one tensor.
    """

    __slots__ = ("device", "inputs", "listed", "op", "outs", "prepared")

    def __init__(
        self,
        outs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        op: str | None = None,
        *,
        listed: bool = False,
        device: torch.device | None = None,
    ) -> None:
        self.outs, self.inputs, self.op, self.listed = outs, inputs, op, listed
        self.prepared: PreparedCall | None = None
        self.device = device if device is not None else inputs[0].device if inputs else torch.device("cpu")

    @property
    def touched(self) -> list[torch.Tensor]:
        """Return all tensors that the call reads or writes."""
        return [*self.outs, *self.inputs]


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
    if tensor.layout == torch.strided and tensor.device.type != "meta" and tensor.nbytes and not tensor.data_ptr():
        raise NotImplementedError(
            f"tensor must have memory of its own; got {type(tensor).__name__}, which wraps other tensors. Pass one of "
            "those, for example DTensor.to_local()"
        )
    return tensor


def write(out: torch.Tensor, values: torch.Tensor) -> None:
    """Copy ``values`` into ``out`` as a collective writes its result: autograd neither records nor counts it.

    A kernel stores through addresses, which autograd does not see; gloo and NCCL do the same. A copy that replaces such
    a store must not be seen either, because it would give ``out`` a history, and be refused if ``out`` is a parameter.
    """
    with torch.inference_mode():  # because only there a tensor that was made in that mode may be written to
        out.data.copy_(values)


def plain_memory(call: Call) -> Call:
    """Return a call whose dense tensors are contiguous memory: the call itself, or one of copies where needed."""
    if all(map(is_plain, call.touched)):
        return call
    in_place = bool(call.outs) and call.outs[0] is call.inputs[0]
    outs = [contiguous(out, in_place) for out in call.outs]
    inputs = outs if in_place else [contiguous(tensor, True) for tensor in call.inputs]
    return Call(outs, inputs, call.op, listed=call.listed, device=call.device)


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's values are contiguous memory. Tensors that aren't dense count as such."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return True
    conjugate = tensor.is_complex() and tensor.is_conj()  # which takes longer to ask
    return tensor.is_contiguous() and not tensor.is_neg() and not conjugate


@torch.no_grad()
def contiguous(tensor: torch.Tensor, filled: bool) -> torch.Tensor:
    """Return the tensor if it is contiguous, otherwise a contiguous one of its shape, with its values if ``filled``."""
    if is_plain(tensor):
        return tensor
    if filled:
        return tensor.resolve_conj().resolve_neg().contiguous()
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
