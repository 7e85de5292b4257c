# SPDX-License-Identifier: Apache-2.0
"""Directories: both kinds say what plain Python says, stay in bounds, and notice what is wrong with
the lists."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiers import slow_tier

from tdcoll.collectives.index_match import kernels
from tdcoll.collectives.index_match.op import Directory

from .cases import (
    METHODS,
    SIGNATURE,
    answers,
    build,
    check_valid,
    cleared_and_built,
    directory_of,
    in_world,
    pack,
    places,
    small_blocks,
)

both = pytest.mark.parametrize("method", METHODS)


@pytest.fixture(autouse=True)
def _blocks_are_small() -> Iterator[None]:
    with small_blocks():
        yield


@st.composite
def some_lists(draw: st.DrawFn) -> tuple[list[list[int]], int]:
    world = draw(st.integers(1, 8))
    num_rows = draw(st.sampled_from([1, 2, 31, 32, 33, 64, 100, 300, 1000]))
    ids = st.sets(st.integers(0, num_rows - 1), max_size=25)
    lists = [sorted(draw(ids)) for _ in range(world)]
    return lists, num_rows


# ---------------------------------------------------------------------- valid lists


@both
@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(case=some_lists(), capacity=st.integers(0, 9), room=st.integers(1, 60))
def test_any_lists(
    method: str, case: tuple[list[list[int]], int], capacity: int, room: int
) -> None:
    lists, num_rows = case
    capacity += max(1, *map(len, lists))
    in_world(lambda: check_valid(method, lists, num_rows, capacity=capacity))
    in_world(lambda: check_valid(method, lists, num_rows, capacity=capacity, max_union=room))


LISTS = {
    "all empty": ([[], [], []], 100),
    "one rank, nothing": ([[]], 1),
    "some empty": ([[], [5, 7], [], [7, 99]], 100),
    "identical": ([[1, 31, 32, 63, 64, 96]] * 5, 97),
    "one row, owned by all": ([[42]] * 8, 43),
    "one row in all": ([[0]] * 3, 1),
    "first and last row": ([[0, 999], [999], [0]], 1000),
    "every row": ([list(range(70))] * 2, 70),
    "all bits of words": ([list(range(32, 64)), list(range(31, 65))], 96),
    "disjoint": ([list(range(q, 90, 3)) for q in range(3)], 90),
    "nested": ([list(range(0, 96, 2 * q + 1)) for q in range(6)], 96),
    "no rows": ([[], []], 0),
}


@both
@pytest.mark.parametrize("name", LISTS)
def test_special_lists(method: str, name: str) -> None:
    lists, num_rows = LISTS[name]
    in_world(lambda: check_valid(method, lists, num_rows))


@pytest.mark.parametrize("method", ["bitmap", slow_tier("search")])
def test_seventy_ranks(method: str) -> None:
    random.seed(2)
    lists = [sorted(random.sample(range(300), q % 4)) for q in range(70)]
    union = sorted(set().union(*lists))
    with small_blocks(64):
        got = in_world(lambda: build(method, lists, 300, union[::10]))
    assert got.union == union
    assert got.found == [places(ids, union[::10]) for ids in lists]
    assert got.in_union == list(range(0, len(union), 10))


@pytest.mark.parametrize("num_rows", [1 << 40, 1 << 61])
def test_huge_index_spaces_are_searched(num_rows: int) -> None:
    random.seed(3)
    common = [0, num_rows // 2, num_rows - 1]
    lists = [sorted({*common, *(random.randrange(num_rows) for _ in range(20))}) for _ in range(3)]
    in_world(lambda: check_valid("search", lists, num_rows))


@both
def test_no_int32_overflows(method: str) -> None:
    lists, num_rows = [[0, 31, 32, 63, 5_000], [31, 4_999], [1, 63]], 5_001
    with small_blocks(64):
        in_world(lambda: check_valid(method, lists, num_rows), check_overflow=True)


def test_the_methods_write_the_same_bits() -> None:
    lists = [[3, 8, 90], [8, 9], [], [0, 3, 91]]
    first, second = in_world(
        lambda: [build(method, lists, 92, range(92), max_union=5) for method in METHODS]
    )
    assert first == second
    assert len(first.union) == 5


# ---------------------------------------------------------------------- one directory, many builds


@both
def test_nothing_is_left_of_the_build_before(method: str) -> None:
    directory = directory_of(method, 2, 20, 500, 40)

    def builds() -> None:
        for lists in ([list(range(0, 400, 20)), [399, 499]], [[], []], [[5], [5, 6]]):
            got = answers(directory, pack(lists, 20), range(0, 500, 3))
            assert got.union == sorted({*lists[0], *lists[1]})
            assert got.found == [places(ids, range(0, 500, 3)) for ids in lists]

    in_world(builds)


def test_one_directory_serves_tables_of_several_sizes() -> None:
    """By both methods, in the same memory where that is large enough."""
    directory = Directory(2, 8, 16, torch.device("cpu"))
    pointers: dict[bool, list[int]] = {False: [], True: []}

    def builds() -> None:
        for num_rows in (1000, 64, 1 << 40, 33, 1000, 1 << 50, 1):
            directory.prepare(num_rows)
            assert directory.search is (num_rows > 1 << 30)
            pointers[directory.search].append(directory.entries.data_ptr())
            lists = [[0], sorted({0, num_rows // 3, num_rows - 1})]
            cleared_and_built(directory, pack(lists, 8))
            union = directory.union[: int(directory.status[kernels.UNION.value])]
            assert union.tolist() == sorted({*lists[0], *lists[1]})
            assert int(directory.status[kernels.BAD_RANGE.value]) == 0

    in_world(builds)
    assert all(len(set(found)) == 1 for found in pointers.values()), (
        "a smaller or equal table needs no new memory"
    )


def test_memory_of_captured_graphs_is_kept() -> None:
    directory = directory_of("bitmap", 2, 8, 64, 16)
    before = directory.entries.data_ptr()
    directory._captured = True
    directory.prepare(10_000)
    assert before in [tensor.data_ptr() for tensor in directory._in_graphs]


# ---------------------------------------------------------------------- lists that are not as they should be


@both
def test_a_count_beyond_the_capacity(method: str) -> None:
    full = [[2, 4, 6, 8], [1, 4], [4, 5, 7, 8]]
    got = in_world(
        lambda: build(method, full, 10, range(-1, 12), capacity=4, counts=[1 << 40, 2, 5])
    )
    assert got.union == [1, 2, 4, 5, 6, 7, 8]
    assert got.status[kernels.MAX_ROWS.value] == 1 << 40
    assert got.status[kernels.TOTAL.value] == (1 << 40) + 7
    assert got.flags() == (0, 0, 0)
    assert got.found[0] == [-1, -1, -1, 0, -1, 1, -1, 2, -1, 3, -1, -1, -1]


@both
def test_a_negative_count_is_none(method: str) -> None:
    got = in_world(lambda: build(method, [[], [3]], 10, range(10), capacity=2, counts=[-5, 1]))
    assert got.union == [3]
    assert got.status[kernels.TOTAL.value] == 1
    assert set(got.found[0]) == {-1}


@both
@pytest.mark.parametrize("bad", [-1, -(1 << 62), 10, 31, 32, 1 << 31, 1 << 40, (1 << 63) - 1])
def test_an_id_out_of_range(method: str, bad: int) -> None:
    lists = [[1, 2], sorted([3, bad]), [3, 9]]
    got = in_world(lambda: build(method, lists, 10, [*range(10), bad]))
    assert got.flags() == (2, 0, 0)
    assert got.union == [1, 2, 3, 9], "ids out of range belong to nothing"
    assert got.in_union[:10] == [-1, 0, 1, 2, -1, -1, -1, -1, -1, 3]


@both
@pytest.mark.parametrize(
    "bad", [[5, 3, 20], [3, 3, 5], [40, 39, 38], [7, 200, 7], [5] * 30, [7, 40] * 15]
)
def test_a_list_that_is_not_sorted_and_unique(method: str, bad: list[int]) -> None:
    got = in_world(lambda: build(method, [[1, 2], [3], bad, [2]], 201, range(201)))
    assert got.flags() == (0, 3, 0)
    assert all(-1 <= place < len(bad) for place in got.found[2])
    assert all(-1 <= place < 4 * max(2, len(bad)) for place in got.in_union)
    assert all(0 <= x < 201 for x in got.union)


@both
def test_the_last_bad_rank_is_named(method: str) -> None:
    lists = [[10], [2, 1], [99], [4, 4], [0]]
    got = in_world(
        lambda: build(method, lists, 10, signatures=[SIGNATURE, 0, SIGNATURE, SIGNATURE, 1])
    )
    assert got.flags() == (3, 4, 5)


@both
@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    lists=st.lists(
        st.lists(st.integers(-3, 70) | st.integers(-(1 << 63), (1 << 63) - 1), max_size=20),
        min_size=1,
    ),
    counts=st.integers(-(1 << 63), (1 << 63) - 1),
    room=st.integers(1, 9),
)
def test_garbage_stays_in_bounds(
    method: str, lists: list[list[int]], counts: int, room: int
) -> None:
    lists = lists[:5]
    asked = sorted({x for ids in lists for x in ids} | {0, 1})[:40]
    said = [counts, *map(len, lists[1:])]
    got = in_world(
        lambda: build(method, lists, 64, asked, capacity=12, counts=said, max_union=room)
    )
    assert len(got.union) <= room
    assert all(0 <= x < 64 for x in got.union)
    assert all(-1 <= place < 12 for found in got.found for place in found)
    assert all(-1 <= place < room for place in got.in_union)
