# SPDX-License-Identifier: Apache-2.0
"""Sparse all-reduces of any table, rows, dtype, operation, form and layout of nodes, against the
reference."""

from __future__ import annotations

import random
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiers import slow_tier

from .cases import DTYPES, FLOATS, HUGE, OPS, Options, check_all, some_values
from .cases import small_pieces as small
from .reference import Rows

quick = settings(
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
SPACES = {  # rows of the table, and an index for a random number in (0, 1]
    "one row": (1, lambda u: 0),
    "tiny": (5, lambda u: int(4.99 * u)),
    "medium": (100, lambda u: int(99.9 * u)),
    "most rows": (33, lambda u: int(32.9 * u)),
    "skewed": (1000, lambda u: int(999 * u**5)),
    "zipf": (5000, lambda u: min(4999, int(1 / u) - 1)),
    "huge": (HUGE, lambda u: int((HUGE - 1) * u)),
    "huge and shared": (HUGE, lambda u: int(9.9 * u) * (HUGE // 10) + HUGE // 10 - 1),
}


@st.composite
def cases(
    draw: st.DrawFn, layouts: list[list[int]], most: int
) -> tuple[list[int], int, list[Rows], Options, int]:
    """``(layout, num_rows, parts, options, seed)``."""
    layout = draw(st.sampled_from(layouts))
    num_rows, place = SPACES[draw(st.sampled_from(sorted(SPACES)))]
    algorithms = ["owner", "owner", "gather", "auto", *(["dense"] if num_rows < HUGE else [])]
    dtype = draw(st.sampled_from(DTYPES))
    how = Options(
        op=draw(st.sampled_from(OPS if dtype in FLOATS else [op for op in OPS if op != "mean"])),
        algorithm=draw(st.sampled_from(algorithms)),
        copy=draw(st.booleans()),
        coalesced=draw(st.booleans()),
        form=draw(st.sampled_from(["coo", "pair", "padded"])),
        spare=draw(st.sampled_from([0, 1, 7])),
    )
    if how.form == "padded" and how.algorithm in ("auto", "dense"):
        how = replace(how, algorithm="gather")
    shape = draw(st.sampled_from([(), (1,), (3,), (2, 5), (40,), (0,), (4,)]))
    counts = draw(
        st.lists(st.just(0) | st.integers(0, most), min_size=sum(layout), max_size=sum(layout))
    )
    seed = draw(st.integers(0, 1 << 16))
    dice = random.Random(seed)
    parts = []
    for rank, n in enumerate(counts):
        indices = torch.tensor([place(1 - dice.random()) for _ in range(n)], dtype=torch.int64)
        if how.coalesced:
            indices = indices.unique()
        values = some_values((indices.numel(), *shape), dtype, seed + rank)
        # so small that everything fits, save for products of many
        if dtype == torch.bfloat16 or how.op == "prod":
            values = values.clamp(-2, 2)
        parts.append(Rows(indices, values))
    return layout, num_rows, parts, how, seed


ONE_NODE = [[1], [2], [3], [4], [5], [8]]
SEVERAL = [
    [1, 1],
    [2, 1],
    [2, 2],
    [1, 3],
    [1, 1, 1],
    [2, 2, 1],
    [1, 1, 1, 1],
    [3, 1, 2],
    [2, 2, 2, 2],
]


@pytest.mark.parametrize(
    ("layouts", "most", "examples"),
    [
        pytest.param(ONE_NODE, 9, 8, id="one node"),
        slow_tier(SEVERAL, 6, 8, id="several nodes"),
        slow_tier(ONE_NODE, 30, 24, id="one node, more"),
        slow_tier(SEVERAL, 6, 24, id="several nodes, more"),
    ],
)
def test_any_case(layouts: list[list[int]], most: int, examples: int) -> None:
    tried = 0

    @settings(quick, max_examples=examples)
    @given(case=cases(layouts, most), small_pieces=st.booleans(), weak=st.booleans())
    def any_case(case: Any, small_pieces: bool, weak: bool) -> None:
        nonlocal tried
        tried += 1
        layout, num_rows, parts, how, seed = case
        with small() if small_pieces else nullcontext():
            check_all(parts, num_rows, how, layout=layout, seed=seed if weak else None, weak=weak)

    any_case()
    assert tried >= examples
