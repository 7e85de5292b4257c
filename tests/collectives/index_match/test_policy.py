# SPDX-License-Identifier: Apache-2.0
"""The kind of directory that is built."""

from __future__ import annotations

import pytest

from tdcoll.collectives.index_match.policy import bitmap_words, searches

M = 1_000_000


@pytest.mark.parametrize(
    ("num_rows", "world", "method"),
    [
        (0, 1, "bitmap"),
        (1, 1, "bitmap"),
        (50_000, 8, "bitmap"),  # a vocabulary
        (5 * M, 8, "bitmap"),  # what docs/performance.md measures
        (5 * M, 64, "bitmap"),
        (32 * M, 8, "bitmap"),
        (20 * M, 64, "search"),
        (100 * M, 8, "search"),  # 225 MB of bitmap
        (1 << 40, 8, "search"),
        (1 << 61, 2, "search"),
    ],
)
def test_method(num_rows: int, world: int, method: str) -> None:
    assert searches(num_rows, world) == (method == "search")


@pytest.mark.parametrize(
    ("num_rows", "words"), [(0, 1), (1, 1), (32, 1), (33, 2), (5 * M, 156_250)]
)
def test_words(num_rows: int, words: int) -> None:
    assert bitmap_words(num_rows) == words
