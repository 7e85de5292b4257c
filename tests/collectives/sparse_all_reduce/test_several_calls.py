# SPDX-License-Identifier: Apache-2.0
"""Several sparse all-reduces: on one context, and in two groups at once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import tdcoll
from tdcoll.testing import World

from .cases import HUGE, Options, Outcome, call, check, some_part
from .reference import Rows

SERIES = [  # rows of the table, shape, dtype, operation, algorithm, copy
    (50, (3,), torch.float32, "sum", "owner", True),
    (HUGE, (5,), torch.float16, "max", "gather", True),
    (7, (), torch.int64, "prod", "owner", False),
    (1000, (2, 2), torch.float32, "mean", "owner", True),
    (7, (1,), torch.float64, "min", "auto", True),
    (50, (0,), torch.float32, "sum", "owner", True),
    (HUGE, (3,), torch.int32, "sum", "owner", True),
    (33, (8,), torch.bfloat16, "sum", "gather", False),
    (50, (3,), torch.float32, "sum", "owner", False),
]


@pytest.mark.parametrize("layout", [[3], [2, 1]], ids=str)
def test_different_calls_on_one_context(layout: list[int]) -> None:
    """Results stay as they are, whatever is called after, unless they are said to be views."""
    series = [
        (
            [some_part(9 * i + rank, (5, 0, 3)[(rank + i) % 3], min(n, 12), shape, dtype) for rank in range(3)],
            n,
            options,
        )
        for i, (n, shape, dtype, *options) in enumerate(SERIES)
    ]

    def host(pe: int) -> list[list[Outcome]]:
        found, kept = [], []
        with tdcoll.SparseContext(max_rows_per_rank=5, max_row_bytes=16) as ctx:
            for parts, num_rows, (op, algorithm, copy) in series:
                got = call(parts[pe], num_rows, ctx, Options(op, algorithm, copy))
                now = Outcome(Rows(*map(torch.clone, got)), ctx.last_algorithm, ctx.topology.nodes)
                found.append(now)
                kept.append(replace(now, rows=got) if copy else now)
            ctx.check()
        return [found, kept]

    for lists in World(3, ranks_per_node=layout, seed=1, weak=True).run(host):
        for found in lists:
            for got, (parts, _, (op, _, _)) in zip(found, series, strict=True):
                check(got, parts, op)
