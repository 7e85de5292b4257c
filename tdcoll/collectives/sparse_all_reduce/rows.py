# SPDX-License-Identifier: Apache-2.0
"""The rows of one rank in a sparse all-reduce, checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tdcoll import arguments
from tdcoll.primitives.reduce import ACCUMULATORS

__all__ = ["DTYPES", "Rows", "rows_of_pair", "rows_of_tensor"]

DTYPES = tuple(dtype for dtype in ACCUMULATORS if dtype.itemsize > 1)
"""Dtypes of rows that can be reduced."""


@dataclass(frozen=True)
class Rows:
    """One rank's part of a call, checked.

    Attributes:
        indices: int64 ``[n]``, contiguous.
        values: ``[n, elements]``, contiguous.
        num_rows: of the table.
        shape: of a row.
        coalesced: indices are ascending and different.
    """

    indices: torch.Tensor
    values: torch.Tensor
    num_rows: int
    shape: tuple[int, ...]
    coalesced: bool

    @property
    def elements(self) -> int:
        return self.values.shape[1]

    @property
    def row_bytes(self) -> int:
        return self.elements * self.values.dtype.itemsize


def rows_of_tensor(tensor: Any, device: torch.device) -> Rows:
    arguments.tensor("tensor", tensor)
    if tensor.layout != torch.sparse_coo:
        raise ValueError(f"tensor must have the layout torch.sparse_coo, got {tensor.layout}")
    if tensor.sparse_dim() != 1:
        raise ValueError(
            f"tensor must have one sparse dimension, the rows; got {tensor.sparse_dim()} of shape {list(tensor.shape)}"
        )
    # The parts of a tensor that is not coalesced can be had by these names only.
    indices, values = tensor.detach()._indices()[0], tensor.detach()._values()
    return _flat_rows("tensor", indices, values, tensor.shape[0], tensor.is_coalesced(), device)


def rows_of_pair(indices: Any, values: Any, num_rows: Any, coalesced: bool, device: torch.device) -> Rows:
    for name, given in (("indices", indices), ("values", values)):
        arguments.tensor(name, given)
        if given.layout != torch.strided:
            raise ValueError(f"{name} must be a dense tensor, got the layout {given.layout}")
    arguments.whole("num_rows", num_rows, 0)
    if indices.dtype != torch.int64 or indices.dim() != 1 or indices.device != device:
        raise ValueError(
            f"indices must be int64 of one dimension on {device}; got {indices.dtype} of shape "
            f"{list(indices.shape)} on {indices.device}"
        )
    if values.dim() < 1 or values.shape[0] != indices.shape[0]:
        raise ValueError(
            f"values must have a row for each of the {indices.shape[0]} indices; got shape {list(values.shape)}"
        )
    return _flat_rows("values", indices.detach(), values.detach(), num_rows, bool(coalesced), device)


def _flat_rows(
    name: str, indices: torch.Tensor, values: torch.Tensor, num_rows: int, coalesced: bool, device: torch.device
) -> Rows:
    """Rows whose values are of the argument ``name``."""
    if values.dtype not in DTYPES:
        allowed = ", ".join(map(str, DTYPES))
        raise TypeError(f"{name} must have one of the dtypes {allowed}; got {values.dtype}")
    if values.device != device:
        raise ValueError(f"{name} must be on {device}, where the context is; got {values.device}")
    if indices.shape[0] >= 1 << 31:
        raise ValueError(f"a rank must bring fewer than 2**31 rows, got {indices.shape[0]}")
    shape = tuple(values.shape[1:])
    values = values.contiguous().resolve_neg()  # kernels read the bytes
    flat = values.view(values.shape[0], values.shape[1:].numel())
    return Rows(indices.contiguous(), flat, num_rows, shape, coalesced)
