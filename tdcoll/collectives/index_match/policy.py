# SPDX-License-Identifier: Apache-2.0
"""The kind of directory to build: a pure function of numbers that are the same on every rank.

Both kinds give the same answers, so ranks may choose differently, but take as long as the slowest
of them.
"""

from __future__ import annotations

HEADER_WORDS = 4
"""Words of a list before its first id."""

MAX_ENTRIES_BYTES = 128 << 20
"""A directory is a bitmap if its entries take no more. A build goes over it about twice, in less
than 0.1 ms on a GPU with 3 TB/s, and it stays allocated as long as its owner."""


def bitmap_words(num_rows: int) -> int:
    """Words of one row of a bitmap's entries: one for 32 ids, at least 1."""
    return max(1, -(-num_rows // 32))


def searches(num_rows: int, world: int) -> bool:
    """Return whether a directory of ``world`` lists, and their union, of ids in [0, num_rows) is
    searched."""
    return 8 * (world + 1) * bitmap_words(num_rows) > MAX_ENTRIES_BYTES
