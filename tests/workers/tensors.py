# SPDX-License-Identifier: Apache-2.0
"""Tensors that check scripts make and compare."""

from __future__ import annotations

import torch
from harness import device


def given(seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """``[*shape]``, made alike on all ranks: values of many magnitudes, whose sum shows its
    order."""
    source = torch.Generator().manual_seed(seed)
    values = torch.randn(*shape, generator=source) * 2.0 ** torch.randint(
        -3, 4, shape, generator=source
    )
    return values.to(dtype).to(device())


def same_bits(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Return whether two tensors have the same shape and bits."""
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[got.element_size()]
    return got.shape == wanted.shape and torch.equal(got.cpu().view(kind), wanted.cpu().view(kind))
