# SPDX-License-Identifier: Apache-2.0
"""The rows of one rank in a sparse all-reduce, checked: those of one tensor, and of all tensors of
a call.

A call has dozens of tensors, and a PyTorch operation takes the host microseconds. This module
therefore makes two for each COO tensor, which give its indices and values, and as few attributes of
tensors as possible are asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch

from tdcoll.base import arguments
from tdcoll.primitives.reduce import ACCUMULATORS

DTYPES = tuple(dtype for dtype in ACCUMULATORS if dtype.itemsize > 1)
"""Dtypes of rows that can be reduced."""


class Rows(NamedTuple):
    """One tensor of one rank's part of a call, checked.

    Attributes:
        indices: int64, ``[n]`` or ``[1, n]``, contiguous.
        values: ``[n, *shape]``, contiguous.
        table: the number of rows of the table, and the shape of a row.
        coalesced: indices are ascending and different.
    """

    indices: torch.Tensor
    values: torch.Tensor
    table: tuple[int, torch.Size]
    coalesced: bool


class JoinedRows:
    """One rank's part of a call: tensors of one dtype, whose tables follow each other in one space
    of ids.

    Attributes:
        order, parts: the places, and the tensors, in the same order on all ranks. Shapes of rows
            follow each other.
        tables: of each tensor, see :class:`Rows`.
        n: entries of all tensors; ``begins``: where those of each begin, and ``n``.
        ids, values: addresses of each tensor's indices and values.
        coalesced: all tensors are.

    Raises:
        ValueError: they have too many rows together.
    """

    def __init__(self, given: Sequence[Rows], order: tuple[int, ...]) -> None:
        self.order = order
        self.single = len(order) == 1
        self.parts = parts = [given[place] for place in order]
        self.dtype = parts[0].values.dtype
        self.tables = tuple([part.table for part in parts])
        self.begins = list(accumulate([part.indices.shape[-1] for part in parts], initial=0))
        self.n = self.begins[-1]
        self.coalesced = all(part.coalesced for part in parts)
        self.ids = [part.indices.data_ptr() for part in parts]
        self.values = [part.values.data_ptr() for part in parts]
        if self.n >= 1 << 31:
            raise ValueError(f"a rank must bring fewer than 2**31 rows, got {self.n}")
        num_rows = sum([rows for rows, _ in self.tables])
        if num_rows >= 1 << 62:
            raise ValueError(
                f"num_rows must be below 2**62, of all tables together; got {num_rows}"
            )


def joined(given: Sequence[Rows]) -> list[JoinedRows]:
    """The calls of several tensors: for each dtype those of it, in the order in which dtypes and
    shapes appear."""
    kinds: dict[torch.dtype, dict[torch.Size, list[int]]] = {}
    for place, part in enumerate(given):
        kinds.setdefault(part.values.dtype, {}).setdefault(part.table[1], []).append(place)
    return [JoinedRows(given, tuple(chain(*shapes.values()))) for shapes in kinds.values()]


def rows_of_tensor(tensor: Any, device: torch.device, name: str = "tensor") -> Rows:
    if not isinstance(tensor, torch.Tensor):
        arguments.tensor(name, tensor)
    if tensor.layout is not torch.sparse_coo:
        raise ValueError(
            f"{name} must have the layout torch.sparse_coo, got {tensor.layout}. tdcoll.all_reduce takes dense tensors"
        )
    # The parts of a tensor that is not coalesced can be had by these names only.
    indices = tensor._indices()
    values = tensor._values()
    dims = indices.shape[0]
    if dims != 1:
        raise ValueError(
            f"{name} must have one sparse dimension, the rows; got {dims} of shape {list(tensor.shape)}"
        )
    return _checked(name, indices, values, tensor.shape[0], tensor.is_coalesced(), device)


def rows_of_pair(
    indices: Any, values: Any, num_rows: Any, coalesced: bool, device: torch.device, place: str = ""
) -> Rows:
    """``place``: behind the names of the arguments if they are lists, such as ``[2]``."""
    for name, given in (("indices", indices), ("values", values)):
        name += place
        arguments.tensor(name, given)
        if given.layout is not torch.strided:
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
    return _checked(f"values{place}", indices, values, num_rows, bool(coalesced), device)


def _checked(
    name: str,
    indices: torch.Tensor,
    values: torch.Tensor,
    num_rows: int,
    coalesced: bool,
    device: torch.device,
) -> Rows:
    """Rows whose values are of the argument ``name``."""
    if values.dtype not in DTYPES:
        allowed = ", ".join(map(str, DTYPES))
        raise TypeError(f"{name} must have one of the dtypes {allowed}; got {values.dtype}")
    if values.device != device:
        raise ValueError(f"{name} must be on {device}, where the context is; got {values.device}")
    if not values.is_contiguous() or values.is_neg():  # kernels read the bytes
        values = values.detach().contiguous().resolve_neg()
    if not indices.is_contiguous():
        indices = indices.contiguous()
    return Rows(indices, values, (num_rows, values.shape[1:]), coalesced)
