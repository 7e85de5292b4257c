# SPDX-License-Identifier: Apache-2.0
"""The epilogue of the suite's calls, and what it has to give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .data import values

BEYOND = 3
"""Elements of a residual's row beyond the columns of the result, which no result may have."""

UNREAD = 1 << 20
"""Number of the call of :func:`.data.values` from which residuals come."""


class Residual(NamedTuple):
    """What :func:`less_twice` takes from.

    Attributes:
        base: the residual, ``[rows, stride]``.
        stride: elements of its rows.
    """

    base: Any
    stride: tl.int64


@triton.jit
def less_twice(sums, rows, columns, inside, extra):
    """An epilogue: a residual less twice the sum, which may be -0.0."""
    at = extra.base + rows * extra.stride + columns
    return tl.load(at, mask=inside, other=0).to(sums.dtype) - 2 * sums


def residual_of(
    owner: int, call: int, shape: tuple[int, ...], dtype: torch.dtype, offset: int
) -> torch.Tensor:
    """``[rows, columns + BEYOND]``, which begins ``offset`` elements behind an aligned address.
    Every third number is a zero, of floating-point types -0.0."""
    columns = shape[-1]
    rows = torch.Size(shape[:-1]).numel()
    size = rows * (columns + BEYOND)
    if dtype.is_floating_point and dtype.itemsize == 1:  # which kernels load as whole numbers
        dtype = torch.bfloat16
    room = torch.empty(offset + size, dtype=dtype)
    room[offset:] = values(owner, UNREAD + call, size, dtype)
    room[offset::3] = -0.0 if dtype.is_floating_point else 0
    return room[offset:].view(rows, columns + BEYOND)


def expected(residual: torch.Tensor, columns: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """:func:`less_twice` of sums of all elements, in the accumulator's type, on a CPU or a GPU."""

    def finished(total: torch.Tensor) -> torch.Tensor:
        taken = residual[:, :columns].reshape(-1).to(total.dtype)
        return taken - 2 * total

    return finished
