# SPDX-License-Identifier: Apache-2.0
"""Clipping by the norm of all gradients, if some of them are sparse, or DTensors of several
meshes."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import utils

from tdcoll.base import arguments


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Clip gradients by their norm, as ``torch.nn.utils.clip_grad_norm_`` does, even if some of
    them are sparse.

    torch's function refuses sparse gradients, such as those of ``nn.Embedding(sparse=True)``,
    before PyTorch 2.14. Later it refuses those without rows for some orders, and ignores missing
    rows for negative orders. It refuses DTensors beside other tensors or DTensors of another mesh.
    This function takes all of them together, and treats a sparse gradient as the dense tensor that
    it represents: if a row occurs twice, it is summed before it counts, and missing rows are zero.
    A sparse gradient that is not coalesced is coalesced in place, and on a GPU the host waits for
    that. Gradients that tdcoll has reduced are coalesced. Otherwise the host waits only when it
    waits in torch's function, which does all the arithmetic.

    Collective only if some gradients are DTensors, whose norm is that of all their parts. Other
    gradients must be the same on all ranks, because then their norm is. As with torch's function,
    each rank needs a part of every DTensor for ``inf``. Call it after all of them are reduced, and
    with a ``GradScaler`` after ``scaler.unscale_(optimizer)``.

    >>> table = torch.nn.Embedding(4, 2, sparse=True)
    >>> table(torch.tensor([1])).sum().backward()
    >>> norm = tdcoll.distributed.clip_grad_norm_(table.parameters(), 1.0)

    Args:
        parameters: a tensor, or several, whose ``grad`` is scaled in place; those without one are
            left out.
        max_norm: the largest norm that the gradients keep.
        norm_type: the order of the norm, ``float("inf")`` for the maximum.
        error_if_nonfinite: raise if the norm is NaN or infinite. The host waits for the norm then.
        foreach: whether to use torch's foreach functions. If None, use them if the device has them.

    Returns:
        ``[]``: the norm of all gradients together, before they were scaled.

    Raises:
        TypeError: ``parameters`` is not as described.
        RuntimeError: (``error_if_nonfinite``) the norm is not finite; no gradient is scaled.
            (``foreach=True``) the device has no foreach functions.
    """
    if not isinstance(parameters, torch.Tensor):
        arguments.instance("parameters", parameters, Iterable, "a torch.Tensor or several")
        parameters = list(parameters) or parameters  # torch warns of a generator that is used up
        for i, parameter in enumerate(parameters):
            arguments.tensor(f"parameters[{i}]", parameter)
    given = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    grads = [parameter.grad for parameter in given if parameter.grad is not None]
    # it takes long to import
    kind: Any = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    meshes = {grad.device_mesh if isinstance(grad, kind) else None for grad in grads}
    if len(meshes) <= 1 and not any(grad.is_sparse for grad in grads):
        return utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
    # torch takes DTensors of one mesh, or other tensors, but not both.
    counted: dict[Any, list[torch.Tensor]] = {}
    scaled: dict[Any, list[torch.Tensor]] = {}
    for grad in grads:
        mesh = grad.device_mesh if isinstance(grad, kind) else None
        values = _values(grad) if grad.is_sparse else grad
        scaled.setdefault(mesh, []).append(values)
        fewer = values.numel() < grad.numel()
        counted.setdefault(mesh, []).append(
            _with_a_zero(values, float(norm_type)) if fewer else values
        )
    norms = []
    for mesh, part in counted.items():
        norm: Any = utils.get_total_norm(
            part, norm_type, error_if_nonfinite and len(counted) == 1, foreach
        )
        norms.append(norm if mesh is None else norm.full_tensor())
    if len(norms) > 1:
        together = [sum(norms)] if norm_type == 0 else norms
        norms = [
            utils.get_total_norm(
                together, 1.0 if norm_type == 0 else norm_type, error_if_nonfinite, foreach
            )
        ]
    for mesh, part in scaled.items():
        norm = norms[0] if mesh is None else _everywhere(norms[0], mesh)
        utils.clip_grads_with_norm_(_holders(part), max_norm, norm, foreach)
    total: torch.Tensor = norms[0]
    return total


def _everywhere(norm: torch.Tensor, mesh: Any) -> Any:
    """Return a norm, which all ranks have, as a DTensor."""
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(norm, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _holders(grads: Iterable[torch.Tensor]) -> Any:
    """Return objects that have the only attribute that torch reads."""
    return [SimpleNamespace(grad=grad) for grad in grads]


def _values(grad: torch.Tensor) -> torch.Tensor:
    """Return the rows ``[n, ...]`` of a sparse tensor, each once, in its own memory."""
    if not grad.is_coalesced():
        grad.data = grad.coalesce()  # all its holders see it clipped
    return grad._values()


def _with_a_zero(values: torch.Tensor, norm_type: float) -> torch.Tensor:
    """Return values with the norm, of any order, of a tensor that has these rows and others that
    are zero."""
    if values.numel() and norm_type >= 0:  # a zero changes nothing
        return values
    return torch.cat([values.flatten(), values.new_zeros(1)])
