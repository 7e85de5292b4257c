# SPDX-License-Identifier: Apache-2.0
"""What a sparse all-reduce has to give, by plain PyTorch on one process: the documented semantics
and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


def accumulated_in(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


class Rows(NamedTuple):
    """``indices`` int64 ``[n]`` and ``values [n, ...]``."""

    indices: torch.Tensor
    values: torch.Tensor


def coalesce(part: Rows) -> Rows:
    """Each index once, ascending: rows of one index summed, in order, and rounded to the dtype."""
    dtype = part.values.dtype
    wide = accumulated_in(dtype)
    union, place, times = part.indices.unique(return_inverse=True, return_counts=True)
    summed = torch.zeros((union.numel(), *part.values.shape[1:]), dtype=wide)
    for i, at in enumerate(place.tolist()):
        summed[at] += part.values[i].to(wide)
    summed = summed.to(dtype)
    alone = times[place] == 1
    summed[place[alone]] = part.values[alone]
    return Rows(union, summed)


def _and_one_more(sum: torch.Tensor, part: torch.Tensor, op: str) -> torch.Tensor:
    if op == "max":
        return torch.maximum(sum, part)
    if op == "min":
        return torch.minimum(sum, part)
    return sum * part if op == "prod" else sum + part


class _Running:
    """For every row of the union, what has been reduced so far, and whether anything has."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, op: str) -> None:
        self.values, self.begun, self.op = (
            torch.zeros(shape, dtype=dtype),
            torch.zeros(shape[0], dtype=torch.bool),
            op,
        )

    def add(self, has: torch.Tensor, parts: torch.Tensor) -> None:
        """One more part for the rows that ``has`` names."""
        parts = parts.to(self.values.dtype)
        first, more = has & ~self.begun, has & self.begun
        self.values[first] = parts[first]
        self.values[more] = _and_one_more(self.values[more], parts[more], self.op)
        self.begun |= has

    def round(self, dtype: torch.dtype) -> None:
        self.values = self.values.to(dtype).to(self.values.dtype)


def first_node(indices: torch.Tensor, n_nodes: int) -> torch.Tensor:
    """Which node begins with each row; the others follow in the order of their numbers."""
    key = (indices ^ (indices >> 31)) & 0x7FFFFFFF
    key ^= key >> 15
    return ((key * 2246822519 >> 16) & 0xFFFF) * n_nodes >> 16


def reduce(
    parts: Sequence[Rows], op: str = "sum", nodes: Sequence[int] | None = None, dense: bool = False
) -> Rows:
    """``parts`` of the ranks ``->`` what every rank has to get.

    Args:
        nodes: node of each rank, where it matters in which order parts are summed: every node's in
            rank order, then node after node, rounded where a partial result goes to the next one.
            None: all in rank order.
        dense: nodes in the order of their numbers for every row, and rounded once.
    """
    dtype = parts[0].values.dtype
    wide = accumulated_in(dtype)
    each = [coalesce(part) for part in parts]
    union = torch.cat([part.indices for part in each]).unique()
    shape = (union.numel(), *each[0].values.shape[1:])
    world = torch.tensor(len(parts), dtype=wide)

    def placed(part: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        at = torch.searchsorted(union, part.indices)
        has = torch.zeros(shape[0], dtype=torch.bool)
        has[at] = True
        values = torch.zeros(shape, dtype=wide)
        values[at] = part.values.to(wide)
        return has, values / world if op == "mean" else values

    nodes = [0] * len(parts) if nodes is None else nodes
    n_nodes = max(nodes) + 1
    of_node = [_Running(shape, wide, op) for _ in range(n_nodes)]
    for node, part in zip(nodes, each, strict=True):
        of_node[node].add(*placed(part))
    result, turn = _Running(shape, wide, op), first_node(union, 1 if dense else n_nodes)
    for step in range(n_nodes):
        for node, sums in enumerate(of_node):
            result.add(sums.begun & ((turn + step) % n_nodes == node), sums.values)
        if not dense:
            result.round(dtype)
    return Rows(union, result.values.to(dtype) + 0)  # -0.0 + 0 is +0.0


def bits(values: torch.Tensor) -> torch.Tensor:
    """The bits of each element as an integer, with all NaNs alike."""
    if not values.dtype.is_floating_point:
        return values
    as_int = {2: torch.int16, 4: torch.int32, 8: torch.int64}[values.dtype.itemsize]
    return torch.where(values.isnan(), torch.nan, values).to(values.dtype).contiguous().view(as_int)


def wrong_rows(got: torch.Tensor, wanted: torch.Tensor) -> int:
    """How many rows of two tensors of one shape and dtype differ in their bits."""
    assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape), (
        f"{got.dtype} {got.shape}, not {wanted.shape}"
    )
    return (
        int((bits(got) != bits(wanted)).reshape(got.shape[0], -1).any(1).sum())
        if got.numel()
        else 0
    )
