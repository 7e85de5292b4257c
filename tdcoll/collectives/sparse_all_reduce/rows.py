# SPDX-License-Identifier: Apache-2.0
"""The rows of one rank in a sparse all-reduce, checked: those of one tensor, and of all tensors of a call."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch

from tdcoll.base import arguments
from tdcoll.primitives.reduce import ACCUMULATORS

__all__ = ["DTYPES", "Joined", "Rows", "rows_of_pair", "rows_of_tensor"]

DTYPES = tuple(dtype for dtype in ACCUMULATORS if dtype.itemsize > 1)
"""Dtypes of rows that can be reduced."""


@dataclass(frozen=True)
class Rows:
    """One tensor of one rank's part of a call, checked.

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


@dataclass(frozen=True)
class Joined:
    """One rank's part of a call: tensors of one dtype, whose tables follow each other in one space of ids.

    Attributes:
        parts: the tensors, in the order that all ranks give them in; at least one.

    Raises:
        ValueError: they have too many rows together.
    """

    parts: tuple[Rows, ...]

    def __post_init__(self) -> None:
        if self.n >= 1 << 31:
            raise ValueError(f"a rank must bring fewer than 2**31 rows, got {self.n}")
        if self.num_rows >= 1 << 62:
            raise ValueError(f"num_rows must be below 2**62, of all tables together; got {self.num_rows}")

    @property
    def single(self) -> bool:
        return len(self.parts) == 1

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].values.dtype

    @cached_property
    def tables(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """The number of rows and the shape of a row of each table, which are the same on all ranks."""
        return tuple((part.num_rows, part.shape) for part in self.parts)

    @cached_property
    def firsts(self) -> tuple[int, ...]:
        """Id of the first row of each table, and the number of all rows."""
        return tuple(accumulate((part.num_rows for part in self.parts), initial=0))

    @cached_property
    def begins(self) -> tuple[int, ...]:
        """Where the entries of each tensor begin among those of all, and how many there are."""
        return tuple(accumulate((part.indices.shape[0] for part in self.parts), initial=0))

    @property
    def num_rows(self) -> int:
        return self.firsts[-1]

    @property
    def n(self) -> int:
        return self.begins[-1]

    @cached_property
    def coalesced(self) -> bool:
        return all(part.coalesced for part in self.parts)

    @cached_property
    def elements(self) -> int:
        """Elements of the widest row, the distance from one row to the next where they are reduced."""
        return max(part.elements for part in self.parts)

    @property
    def row_bytes(self) -> int:
        return self.elements * self.dtype.itemsize

    @cached_property
    def aligned(self) -> int:
        """Elements in 16 bytes if all rows begin at a multiple of them, else 1."""
        begins = all(part.values.data_ptr() % 16 == 0 and part.row_bytes % 16 == 0 for part in self.parts)
        return 16 // self.dtype.itemsize if begins else 1


def rows_of_tensor(tensor: Any, device: torch.device, name: str = "tensor") -> Rows:
    arguments.tensor(name, tensor)
    if tensor.layout != torch.sparse_coo:
        raise ValueError(
            f"{name} must have the layout torch.sparse_coo, got {tensor.layout}. tdcoll.all_reduce takes dense tensors"
        )
    if tensor.sparse_dim() != 1:
        raise ValueError(
            f"{name} must have one sparse dimension, the rows; got {tensor.sparse_dim()} of shape {list(tensor.shape)}"
        )
    # The parts of a tensor that is not coalesced can be had by these names only.
    indices, values = tensor.detach()._indices()[0], tensor.detach()._values()
    return _flat_rows(name, indices, values, tensor.shape[0], tensor.is_coalesced(), device)


def rows_of_pair(
    indices: Any, values: Any, num_rows: Any, coalesced: bool, device: torch.device, place: str = ""
) -> Rows:
    """``place``: behind the names of the arguments if they are lists, such as ``[2]``."""
    for name, given in (("indices", indices), ("values", values)):
        name += place
        arguments.tensor(name, given)
        if given.layout != torch.strided:
            raise ValueError(f"{name} must be a dense tensor, got the layout {given.layout}")
    arguments.whole(f"num_rows{place}", num_rows, 0)
    if indices.dtype != torch.int64 or indices.dim() != 1 or indices.device != device:
        raise ValueError(
            f"indices{place} must be int64 of one dimension on {device}; got {indices.dtype} of shape "
            f"{list(indices.shape)} on {indices.device}"
        )
    if values.dim() < 1 or values.shape[0] != indices.shape[0]:
        raise ValueError(
            f"values{place} must have a row for each of the {indices.shape[0]} indices; got shape {list(values.shape)}"
        )
    return _flat_rows(f"values{place}", indices.detach(), values.detach(), num_rows, bool(coalesced), device)


def _flat_rows(
    name: str, indices: torch.Tensor, values: torch.Tensor, num_rows: int, coalesced: bool, device: torch.device
) -> Rows:
    """Rows whose values are of the argument ``name``."""
    if values.dtype not in DTYPES:
        allowed = ", ".join(map(str, DTYPES))
        raise TypeError(f"{name} must have one of the dtypes {allowed}; got {values.dtype}")
    if values.device != device:
        raise ValueError(f"{name} must be on {device}, where the context is; got {values.device}")
    shape = tuple(values.shape[1:])
    values = values.contiguous().resolve_neg()  # kernels read the bytes
    flat = values.view(values.shape[0], values.shape[1:].numel())
    return Rows(indices.contiguous(), flat, num_rows, shape, coalesced)
