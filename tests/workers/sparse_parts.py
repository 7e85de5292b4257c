# SPDX-License-Identifier: Apache-2.0
"""What ranks bring to a sparse all-reduce in check scripts, and what PyTorch alone makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from harness import device, everyone, expect, rank

import tdcoll

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """What one rank brings: ``ids [n]``, ``values [n, ...]``, on the device."""

    ids: torch.Tensor
    values: torch.Tensor

    def sparse(self, num_rows: int) -> torch.Tensor:
        return torch.sparse_coo_tensor(
            self.ids[None], self.values, (num_rows, *self.values.shape[1:]), check_invariants=False
        )


def part(
    of: int,
    call: int,
    count: int,
    num_rows: int,
    shape: Shape = (4,),
    dtype: torch.dtype = torch.float32,
    most: int = 3,
) -> Part:
    """Rank ``of``'s rows in a call, the same wherever it is computed: some twice, small whole numbers as values."""
    chooser = torch.Generator().manual_seed(1000 * call + of)
    ids = torch.randint(num_rows, (count,), generator=chooser)
    values = torch.randint(-most, most + 1, (count, *shape), generator=chooser)
    return Part(ids.to(device()), values.to(device()).to(dtype))


def parts(call: int, count: int, num_rows: int, *args: Any, **more: Any) -> list[Part]:
    """Of all ranks; each brings another number of rows."""
    return [part(r, call, max(0, count - r), num_rows, *args, **more) for r in everyone()]


def reduced(every: Sequence[Part], op: str = "sum") -> tuple[torch.Tensor, torch.Tensor]:
    """``(ids [U], values [U, ...])`` in fp64 or int64 by PyTorch alone: exact for small whole numbers."""
    wide = torch.float64 if every[0].values.is_floating_point() else torch.int64
    union = torch.cat([p.ids for p in every]).unique()
    shape = every[0].values.shape[1:]
    total = torch.zeros((len(union), *shape), dtype=wide, device=device())
    seen = torch.zeros(len(union), dtype=torch.bool, device=device())
    for p in every:
        at = torch.searchsorted(union, p.ids)
        here = torch.zeros_like(total).index_add_(0, at, p.values.to(wide))
        has = torch.zeros_like(seen).index_fill_(0, at, True)
        both = {
            "max": torch.maximum(total, here), "min": torch.minimum(total, here), "prod": total * here,
        }.get(op, total + here)  # fmt: skip
        where = [has.view(-1, *[1] * len(shape)), seen.view(-1, *[1] * len(shape))]
        total = torch.where(where[0] & where[1], both, torch.where(where[0], here, total))
        seen |= has
    return union, total / len(every) if op == "mean" else total


def compare(got: torch.Tensor, every: Sequence[Part], op: str = "sum", what: str = "") -> None:
    ids, values = reduced(every, op)
    expect(got.is_coalesced(), f"{what}: not coalesced")
    compare_rows(got.indices()[0], got.values(), ids, values, what)


def compare_rows(got_ids: torch.Tensor, got: torch.Tensor, ids: torch.Tensor, values: torch.Tensor, what: str) -> None:
    expect(torch.equal(got_ids, ids), f"{what}: indices {got_ids.tolist()[:20]}, not {ids.tolist()[:20]}")
    expect(torch.equal(got, values.to(got.dtype)), f"{what}: values")


def call(ctx: tdcoll.SparseContext | None, every: Sequence[Part], num_rows: int, op: str = "sum", **more: Any) -> None:
    """One call on this rank's part, compared with PyTorch."""
    got = tdcoll.sparse_all_reduce(every[rank()].sparse(num_rows), ctx=ctx, op=op, **more)
    first = every[0].values
    compare(got, every, op, f"{op}, {list(first.shape[1:])}, {first.dtype}, {num_rows} rows, {more}")
