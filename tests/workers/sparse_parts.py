# SPDX-License-Identifier: Apache-2.0
"""What ranks bring to a sparse all-reduce in check scripts, and calls that are compared with the
reference."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from harness import device, everyone, expect, rank

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from collectives.sparse_all_reduce.reference import Rows, reduce, wrong_rows

import tdcoll

__all__ = ["Rows", "Shape", "call", "compare", "coo", "part", "parts"]

Shape = tuple[int, ...]


def part(
    of: int,
    call: int,
    count: int,
    num_rows: int,
    shape: Shape = (4,),
    dtype: torch.dtype = torch.float32,
    most: int = 3,
) -> Rows:
    """Rank ``of``'s rows in a call, the same wherever it is computed: some twice, small whole
    numbers as values."""
    chooser = torch.Generator().manual_seed(1000 * call + of)
    ids = torch.randint(num_rows, (count,), generator=chooser)
    values = torch.randint(-most, most + 1, (count, *shape), generator=chooser)
    return Rows(ids.to(device()), values.to(device()).to(dtype))


def parts(call: int, count: int, num_rows: int, *args: Any, **more: Any) -> list[Rows]:
    """Of all ranks; each brings another number of rows."""
    return [part(r, call, max(0, count - r), num_rows, *args, **more) for r in everyone()]


def coo(rows: Rows, num_rows: int) -> torch.Tensor:
    shape = (num_rows, *rows.values.shape[1:])
    return torch.sparse_coo_tensor(rows.indices[None], rows.values, shape, check_invariants=False)


def compare(
    ids: torch.Tensor, values: torch.Tensor, every: Sequence[Rows], op: str = "sum", what: str = ""
) -> None:
    """Fail unless these rows have the bits of the reference, whose sums must be exact in any
    order."""
    wanted = reduce([Rows(*(each.cpu() for each in rows)) for rows in every], op)
    expect(
        torch.equal(ids.cpu(), wanted.indices),
        f"{what}: indices {ids.tolist()[:20]}, not {wanted.indices[:20]}",
    )
    wrong = wrong_rows(values.cpu(), wanted.values)
    expect(wrong == 0, f"{what}: {wrong} wrong rows")


def call(
    ctx: tdcoll.SparseContext | None,
    every: Sequence[Rows],
    num_rows: int,
    op: str = "sum",
    **more: Any,
) -> None:
    """One call on this rank's part, compared with the reference."""
    got = tdcoll.sparse_all_reduce(coo(every[rank()], num_rows), ctx=ctx, op=op, **more)
    values = every[0].values
    expect(got.is_coalesced(), "not coalesced")
    what = f"{op}, {list(values.shape[1:])}, {values.dtype}, {num_rows} rows, {more}"
    compare(got.indices()[0], got.values(), every, op, what)
