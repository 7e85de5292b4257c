# SPDX-License-Identifier: Apache-2.0
"""The kind of directory to build: a pure function of numbers that are the same on every rank.

The ranks need not choose alike for the results to be right (both kinds give the same answers), but they take as long
as the slowest of them.
"""

from __future__ import annotations

__all__ = ["HEADER_WORDS", "MAX_ENTRIES_BYTES", "METHODS", "bitmap_words", "choose_method", "entries_bytes"]

METHODS = ("auto", "bitmap", "search")

HEADER_WORDS = 4
"""Words of a list before its first id."""

MAX_ENTRIES_BYTES = 128 << 20
"""``"auto"`` takes a bitmap up to here. A build goes over it about twice, in less than 0.1 ms on a GPU with 3 TB/s, and
it stays allocated as long as its owner."""


def bitmap_words(num_rows: int) -> int:
    """Words of one row of a bitmap's entries: one for 32 ids, at least 1."""
    return max(1, -(-num_rows // 32))


def entries_bytes(num_rows: int, world: int) -> int:
    """Bytes of a bitmap's entries: one row per rank and one for the union."""
    return 8 * (world + 1) * bitmap_words(num_rows)


def choose_method(num_rows: int, world: int) -> str:
    """``"bitmap"`` where its entries take at most :data:`MAX_ENTRIES_BYTES`, else ``"search"``.

    Args:
        num_rows: ids are in [0, num_rows).
        world: number of lists.
    """
    return "bitmap" if entries_bytes(num_rows, world) <= MAX_ENTRIES_BYTES else "search"
