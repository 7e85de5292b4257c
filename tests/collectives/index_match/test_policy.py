# SPDX-License-Identifier: Apache-2.0
"""Which kind of directory is built: a table, and what must hold for any numbers."""

from __future__ import annotations

import ast
import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tdcoll.collectives.index_match import policy
from tdcoll.collectives.index_match.policy import (
    MAX_ENTRIES_BYTES,
    bitmap_words,
    choose_method,
    entries_bytes,
    estimate_us,
)

M = 1_000_000


@pytest.mark.parametrize(
    ("num_rows", "world", "rows_per_rank", "method"),
    [
        (5 * M, 8, 50_000, "bitmap"),  # the size that DESIGN aims at
        (5 * M, 64, 50_000, "bitmap"),
        (50_000, 8, 5_000, "bitmap"),  # a vocabulary
        (50_000, 8, 10, "bitmap"),
        (1, 1, 1, "bitmap"),
        (0, 1, 1, "bitmap"),
        (32 * M, 8, 100_000, "bitmap"),
        (100 * M, 8, 100, "search"),  # few ids: hardly anything to look at but the bitmap
        (5 * M, 64, 10, "bitmap"),  # one list after the other takes its time, too
        (20 * M, 64, 10, "search"),
        (200 * M, 8, 50_000, "search"),  # 450 MB of bitmap
        (1 << 40, 8, 50_000, "search"),
        (1 << 61, 2, 1, "search"),
    ],
)
def test_method(num_rows: int, world: int, rows_per_rank: int, method: str) -> None:
    assert choose_method(num_rows, world, rows_per_rank) == method


@pytest.mark.parametrize(("num_rows", "words"), [(0, 1), (1, 1), (32, 1), (33, 2), (5 * M, 156_250)])
def test_words(num_rows: int, words: int) -> None:
    assert bitmap_words(num_rows) == words
    assert entries_bytes(num_rows, 8) == 72 * words


numbers = st.tuples(st.integers(0, 1 << 42), st.integers(1, 1024), st.integers(1, 1 << 22))


@given(numbers)
def test_no_large_bitmaps(case: tuple[int, int, int]) -> None:
    num_rows, world, _ = case
    if entries_bytes(num_rows, world) > MAX_ENTRIES_BYTES:
        assert choose_method(*case) == "search"


@given(numbers, st.integers(1, 8))
def test_more_rows_never_favour_the_bitmap(case: tuple[int, int, int], factor: int) -> None:
    num_rows, world, rows_per_rank = case
    ids = world * rows_per_rank  # from where on the union is no longer limited by the rows
    num_rows = max(num_rows, ids)
    if choose_method(num_rows, world, rows_per_rank) == "search":
        assert choose_method(num_rows * factor, world, rows_per_rank) == "search"


@given(numbers)
def test_estimates_are_times(case: tuple[int, int, int]) -> None:
    assert all(estimate_us(method, *case) > 0 for method in ("bitmap", "search"))


def test_policy_imports_nothing_of_the_gpu() -> None:
    tree = ast.parse(inspect.getsource(policy))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    assert imported == {"__future__"}
