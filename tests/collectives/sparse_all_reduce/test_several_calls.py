# SPDX-License-Identifier: Apache-2.0
"""Several sparse all-reduces: on one context, on two in turns, in two groups at once, on one that grows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import tdcoll
from tdcoll.testing import World

from .cases import HUGE, Options, Outcome, call, check, context, some_part
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


def test_two_contexts_in_turns() -> None:
    small_parts = [some_part(rank, 4, 6, (2,), torch.float32) for rank in range(3)]
    large_parts = [some_part(7 + rank, 12, HUGE, (5,), torch.int64) for rank in range(3)]

    def host(pe: int) -> list[tuple[Outcome, Outcome]]:
        found = []
        with context(small_parts) as first, context(large_parts, spare=3) as second:
            for _ in range(3):
                view = call(small_parts[pe], 6, first, Options(copy=False))
                other = call(large_parts[pe], HUGE, second, Options("max"))
                nodes = first.topology.nodes
                found.append((Outcome(Rows(*map(torch.clone, view)), "owner", nodes), Outcome(other, "owner", nodes)))
        return found

    for found in World(3, seed=2, weak=True).run(host):
        for one, other in found:
            check(one, small_parts, "sum")
            check(other, large_parts, "max")


@pytest.mark.parametrize("layout", [[5], [2, 3]], ids=str)
def test_two_groups_at_the_same_time(layout: list[int]) -> None:
    groups = [[4, 1], [0, 3, 2]]
    parts = [some_part(rank, 3 + rank, 9, (2,), torch.float32) for rank in range(5)]

    def host(pe: int) -> Outcome:
        group = next(group for group in groups if pe in group)
        with tdcoll.SparseContext(group, max_rows_per_rank=9, max_row_bytes=8) as ctx:
            for _ in range(2):
                got = call(parts[pe], 9, ctx)
            return Outcome(got, "owner", ctx.topology.nodes)

    found = World(5, ranks_per_node=layout, seed=3, weak=True).run(host)
    for group in groups:
        for pe in group:
            check(found[pe], [parts[member] for member in group], "sum")


def test_the_context_of_the_library_grows() -> None:
    """A first call that fits, one with more rows and one with larger rows."""
    calls = [(20, (2,)), (400, (2,)), (3, (9,))]
    series = [[some_part(5 * n + rank, n, HUGE, shape, torch.float32) for rank in range(2)] for n, shape in calls]

    def host(pe: int) -> list[Outcome]:
        found = []
        for parts in series:
            got = call(parts[pe], HUGE, None, Options(algorithm="owner", form="coo"))
            found.append(Outcome(Rows(got.indices, got.values), "owner", (0, 0)))
        return found

    for found in World(2, seed=4, weak=True).run(host):
        for got, parts in zip(found, series, strict=True):
            check(got, parts, "sum")
