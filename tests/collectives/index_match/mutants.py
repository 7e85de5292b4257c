# SPDX-License-Identifier: Apache-2.0
"""The kernels of index matching with one rule less: what must be noticed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from kernel_mutants import AnyChange, Argument, Call, Change, Mutant

from tdcoll.testing import World

from .cases import (
    build,
    check_count_beyond_the_capacity,
    check_not_sorted_and_unique,
    check_out_of_range,
    check_valid,
    small_blocks,
)


@dataclass(frozen=True)
class Matches:
    """A check of a directory, as the one rank of a job."""

    check: Callable[[], None]

    def __call__(self, world: World) -> None:
        with small_blocks():
            world.run(lambda pe: self.check())


def _mutant(
    name: str, change: AnyChange, check: Callable[[], None], expect: str = "AssertionError", **world: Any
) -> Mutant:
    return Mutant(f"index match: {name}", (change,), expect, Matches(check), {"n_pes": 1, **world}, seeds=1)


def _lists(method: str, max_union: int | None = None) -> None:
    dice = random.Random(4)
    lists = [sorted(dice.sample(range(300), 30)) for _ in range(3)]
    check_valid(method, lists, 300, max_union=max_union)


def _counts() -> None:
    build("search", [[1, 2], [1, 3]], 10, [1], capacity=2, counts=[4, 2])
    check_count_beyond_the_capacity("search")


BITMAP, SEARCH = partial(_lists, "bitmap"), partial(_lists, "search")
MARK, NUMBER, LOOK_UP, LEADERS, NUMBER_LEADERS = (
    f"index_match.kernels.{name}" for name in ("mark", "number", "_look_up", "find_leaders", "number_leaders")
)
FIRST = "first = (i == 0) | ((before >> 5) != (x >> 5))"

MUTANTS = (
    _mutant("every id carries its place", Change(MARK, FIRST, "first = i >= 0"), BITMAP),
    _mutant("only the list's first id carries its place", Change(MARK, FIRST, "first = i == 0"), BITMAP),
    _mutant(
        "bits are stored, not added", Call(MARK, "tl.atomic_or", "tl.store({0}, {1}, mask=valid)"), BITMAP
    ),
    _mutant(
        "the union's prefix sum is inclusive",
        Change(NUMBER, "offset + tl.cumsum(count, axis=0) - count", "offset + tl.cumsum(count, axis=0)"), BITMAP,
    ),
    _mutant("earlier blocks are not counted", Call(NUMBER, "_sum_before", "block * 0"), BITMAP),
    _mutant(
        "an id's own bit counts as below it",
        Change(LOOK_UP, "tl.cast(1, tl.int64) << bit", "(tl.cast(1, tl.int64) << bit) * 2"), BITMAP,
    ),
    _mutant(
        "places are not compared with the capacity",
        Change(LOOK_UP, "(((entry >> bit) & 1) != 0) & (place < limit)", "((entry >> bit) & 1) != 0"),
        partial(check_not_sorted_and_unique, "bitmap", [7, 40] * 15),
    ),
    _mutant(
        "ids out of range are marked",
        Call(MARK, "tl.atomic_or", "tl.atomic_or({0}, {1}, mask=i < n, sem='relaxed')"),
        partial(check_out_of_range, "bitmap", 32),
    ),
    _mutant(
        "the leaders' prefix sum is inclusive",
        Argument(LEADERS, "tl.store", "tl.cumsum(leads, axis=0) - leads", "tl.cumsum(leads, axis=0)"), SEARCH,
    ),
    _mutant(
        "a list's last block has no end",
        Change(
            LEADERS, "tl.store(row + i, tl.cumsum(leads, axis=0) - leads, mask=i <= n)",
            "tl.store(row + i, tl.cumsum(leads, axis=0) - leads, mask=i < n)",
        ),
        SEARCH,
    ),
    _mutant("every list leads", Change(LEADERS, "tl.where(find(x, p, index) >= 0, 0, leads)", "leads + 0"), SEARCH),
    _mutant("earlier blocks of leaders are not counted", Call(NUMBER_LEADERS, "_sum_before", "block * 0"), SEARCH),
    _mutant("the bisection stops early", Change("index_match.kernels.find_sorted", "left > 1", "left > 2"), SEARCH),
    _mutant(
        "the union is written beyond its room",
        Change("index_match.kernels.place_leaders", "leads & (place < index.max_union)", "leads"), partial(SEARCH, 5),
    ),
    _mutant(
        "counts are believed",
        Change(
            "index_match.kernels.list_size",
            "tl.minimum(tl.maximum(count, 0), tl.cast(index.capacity, tl.int64)).to(tl.int32)", "count.to(tl.int32)",
        ),
        _counts,
    ),
    _mutant(
        "status is not cleared",
        Change(
            "index_match.kernels.wipe",
            "tl.store(status + tl.arange(0, STATUS_WORDS), tl.zeros([STATUS_WORDS], tl.int64))", "pass",
        ),
        SEARCH,
    ),
    _mutant(
        "an int32 overflows",
        Change(MARK, "i.to(tl.int64) << 32", "(i * 0x7FFFFFFF).to(tl.int64) << 1"),
        lambda: check_valid("bitmap", [[1, 40, 80]], 100), "overflow", check_overflow=True,
    ),
)  # fmt: skip
