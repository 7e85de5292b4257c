# SPDX-License-Identifier: Apache-2.0
"""Residual and RMSNorm of an all-reduce's result, on plain tensors.

The results are the kernels' to the bit. The sum before is that of
:func:`~tdcoll.collectives.reduce_scatter.reference.reduce_parts`.
"""

from __future__ import annotations

import torch

from tdcoll.simulator.floats import fused_multiply_add


def _tree(values: torch.Tensor) -> torch.Tensor:
    """``[rows, n] -> [rows]``: neighbours are added, then neighbours of these."""
    while values.shape[1] > 1:
        if values.shape[1] % 2:
            values = torch.nn.functional.pad(values, (0, 1))
        values = values[:, 0::2] + values[:, 1::2]
    return values[:, 0]


def _fma(values: torch.Tensor, squares: torch.Tensor) -> torch.Tensor:
    """``values * values + squares``, rounded once."""
    factor = values.numpy()
    return torch.from_numpy(fused_multiply_add(factor, factor, squares.numpy()))


def norm_reference(
    reduced: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    scale: torch.Tensor | str | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return ``(normalized, new residual, scale)`` of ``[rows, hidden]``.

    Args:
        scale: if None, the result has the dtype of the rows; if ``"row"``, fp8 with a scale for
            each row; or the scale.
    """
    new = (reduced.float() + residual.float()).to(reduced.dtype)
    rows, hidden = new.shape
    width = 16 // new.element_size()
    in_words = new.float().reshape(rows, hidden // width, 4, width // 4)
    squares = in_words[:, :, 0] * in_words[:, :, 0]
    for part in (1, 2, 3):
        squares = _fma(in_words[:, :, part], squares)
    words = squares[:, :, 0] + squares[:, :, 1] if width == 8 else squares[:, :, 0]
    mean = _tree(words) / torch.tensor(float(hidden))
    # In fp64, because PyTorch's square root of fp32 is not always rounded correctly.
    root = (mean + torch.tensor(eps, dtype=torch.float32)).double().sqrt().float()
    factor = (1.0 / root)[:, None]
    value = (new.float() * factor) * weight.float()
    if scale is None:
        return value.to(new.dtype), new, None
    if isinstance(scale, str):
        largest = (new.float() * weight.float()).abs().amax(1, keepdim=True)
        scale = (largest * factor).clamp_min(2.0**-100) / 448.0
    small = value * (1.0 / scale)
    return small.clamp(-448, 448).to(torch.float8_e4m3fn), new, scale
