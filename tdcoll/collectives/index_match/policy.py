# SPDX-License-Identifier: Apache-2.0
"""Which kind of directory to build: a pure function of numbers that are the same on every rank.

The ranks need not choose alike for the results to be right (both kinds give the same answers), but they take as long
as the slowest of them.
"""

from __future__ import annotations

__all__ = ["MAX_ENTRIES_BYTES", "METHODS", "bitmap_words", "choose_method", "entries_bytes", "estimate_us"]

METHODS = ("auto", "bitmap", "search")

MAX_ENTRIES_BYTES = 256 << 20
"""``"auto"`` does not take a bitmap that needs more: it stays allocated as long as its owner."""

# An H200, roughly. Only where the two methods cross matters, and there they are close to each other.
_BYTES_PER_US = 3e6  # written and read again at once, hence mostly in L2
_ATOMICS_PER_US = 1e5
_LOADS_PER_US = 1.5e6  # of bisections by threads that look for neighbouring ids
_LATENCY_US = 0.15  # of one such load, when the next one waits for it


def bitmap_words(num_rows: int) -> int:
    """Words of one row of a bitmap's entries: one for 32 ids, at least 1."""
    return max(1, -(-num_rows // 32))


def entries_bytes(num_rows: int, world: int) -> int:
    """Bytes of a bitmap's entries: one row per rank and one for the union."""
    return 8 * (world + 1) * bitmap_words(num_rows)


def estimate_us(method: str, num_rows: int, world: int, rows_per_rank: int) -> float:
    """Microseconds to build a directory and to look every id of the union up in every list, launches not counted."""
    ids = world * rows_per_rank
    union = min(ids, num_rows)
    if method == "bitmap":
        row = 8 * bitmap_words(num_rows)
        passes = 2 * world + 3  # clear, unite: W rows each; the union's row is written twice and read once
        return passes * row / _BYTES_PER_US + ids / _ATOMICS_PER_US + world * union / _LOADS_PER_US
    steps = max(1, rows_per_rank.bit_length())
    bisections = ids * (world - 1) / 2 + 2 * union * world  # who leads; the leaders' places; looking up
    return bisections * steps / _LOADS_PER_US + 3 * world * steps * _LATENCY_US


def choose_method(num_rows: int, world: int, rows_per_rank: int) -> str:
    """``"bitmap"`` or ``"search"``, whichever should take less time; never a bitmap above ``MAX_ENTRIES_BYTES``.

    Args:
        num_rows: ids are in [0, num_rows).
        world: number of lists.
        rows_per_rank: ids per list, at most or typically.
    """
    if entries_bytes(num_rows, world) > MAX_ENTRIES_BYTES:
        return "search"
    numbers = num_rows, world, rows_per_rank
    return "bitmap" if estimate_us("bitmap", *numbers) <= estimate_us("search", *numbers) else "search"
