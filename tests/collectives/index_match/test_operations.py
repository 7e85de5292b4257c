# SPDX-License-Identifier: Apache-2.0
"""match_lists and match_indices against torch, in a World and in the bare interpreter, with the blocks of real use."""

from __future__ import annotations

import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
from hypothesis import given, settings
from hypothesis import strategies as st

from tdcoll.collectives.index_match import match_indices, match_lists

from .cases import METHODS, check_valid, in_world, small_blocks
from .on_device import check_match

both = pytest.mark.parametrize("method", METHODS)

bare = pytest.mark.skipif(
    triton.__version__.startswith("3.6") and int(np.__version__[0]) >= 2,
    reason="outside of a World, Triton 3.6's interpreter cannot run loops to run-time bounds with numpy 2",
)


def ids_of(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


# ---------------------------------------------------------------------- match_lists


@both
@settings(max_examples=20, deadline=None)
@given(
    rows=st.lists(st.sets(st.integers(0, 400), max_size=30), min_size=1, max_size=6),
    room=st.none() | st.integers(1, 50),
)
def test_match_lists(method: str, rows: list[set[int]], room: int | None) -> None:
    lists = [ids_of(*sorted(row)) for row in rows]
    with small_blocks(16):
        match = in_world(lambda: match_lists(lists, 401, method, room))
    check_match(match, lists, room or max(1, sum(map(len, rows))))


@both
def test_a_tensor_of_lists(method: str) -> None:
    lists = torch.arange(0, 60, 3).reshape(2, 10).T.contiguous().T  # not contiguous
    match = in_world(lambda: match_lists(lists, 60, method))
    check_match(match.check(), list(lists), 20)


@both
def test_several_blocks_of_real_size(method: str) -> None:
    random.seed(1)
    lists = [sorted(random.sample(range(40_001), n)) for n in (1500, 0, 1025, 511)]
    in_world(lambda: check_valid(method, lists, 40_001))
    tensors = [ids_of(*ids) for ids in lists]
    check_match(in_world(lambda: match_lists(tensors, 40_001, method)).check(), tensors, 1500 + 1025 + 511)


@bare
@both
def test_match_lists_needs_no_job(method: str) -> None:
    lists = [ids_of(0, 5, 31), ids_of(), ids_of(5, 32)]
    check_match(match_lists(lists, 33, method).check(), lists, 5)


def test_the_union_has_no_more_room_than_rows() -> None:
    match = in_world(lambda: match_lists([ids_of(0, 1), ids_of(0, 1)], 3))
    assert match.union.tolist() == [0, 1, -1]


def test_check_reports_what_is_wrong() -> None:
    good = ids_of(1, 4)
    cases = (
        (([good, ids_of(1, 10)], 10), {}, "list 1 has an id that is negative or not less than num_rows"),
        (([ids_of(-1), good], 10), {}, "list 0 has an id"),
        (([good, ids_of(3, 3)], 10), {}, "list 1 is not sorted and unique"),
        (([good, ids_of(2, 3)], 10), {"max_union": 3}, "the union has 4 ids, max_union is 3"),
    )
    for arguments, options, words in cases:
        for method in METHODS:
            match = in_world(lambda a=arguments, o=options, m=method: match_lists(*a, method=m, **o))
            with pytest.raises(ValueError, match=words):
                match.check()


def test_arguments_of_match_lists() -> None:
    with pytest.raises(ValueError, match="at least one list"):
        match_lists([], 10)
    with pytest.raises(TypeError, match=r"lists\[1\] must be a strided int64 tensor, got torch.int32"):
        match_lists([ids_of(1), ids_of(2).int()], 10)
    with pytest.raises(TypeError, match=r"lists\[0\] must be a torch.Tensor, got list"):
        match_lists([[1, 2]], 10)  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"lists must have 2 dimension\(s\), got shape \[1\]"):
        match_lists(ids_of(1), 10)
    with pytest.raises(ValueError, match="method must be one of"):
        match_lists([ids_of(1)], 10, "merge")
    with pytest.raises(ValueError, match="num_rows must be an integer"):
        match_lists([ids_of(1)], -1)
    with pytest.raises(ValueError, match=r"lists\[0\] must be a cpu tensor"):
        match_lists([torch.empty(3, dtype=torch.int64, device="meta")], 10)


def test_the_example_of_the_documentation_runs() -> None:
    page = Path(__file__).resolve().parents[3] / "docs" / "index-matching.md"
    (example,) = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
    code = compile(example, page.name, "exec")
    in_world(lambda: exec(code, {}))
    with pytest.raises(AssertionError):
        in_world(lambda: exec(compile(example.replace("[4]", "[3]"), page.name, "exec"), {}))


# ---------------------------------------------------------------------- match_indices


@settings(max_examples=25, deadline=None)
@given(
    local=st.lists(st.integers(-5, 60) | st.integers(-(1 << 63), (1 << 63) - 1), max_size=40),
    there=st.sets(st.integers(0, 60), max_size=40),
)
def test_match_indices(local: list[int], there: set[int]) -> None:
    union = sorted(there)
    with small_blocks(16, grid=2):
        got = in_world(lambda: match_indices(ids_of(*local), ids_of(*union)))
    assert got.dtype == torch.int64
    assert got.tolist() == [union.index(x) if x in there else -1 for x in local]


@bare
def test_match_indices_needs_no_job() -> None:
    union = torch.arange(0, 3000, 3)
    got = match_indices(torch.arange(600), union)
    assert torch.equal(got, torch.where(torch.arange(600) % 3 == 0, torch.arange(600) // 3, -1))


def test_match_indices_takes_strides() -> None:
    local, union = torch.arange(20)[::2], torch.arange(40)[::4]
    got = in_world(lambda: match_indices(local, union))
    assert got.tolist() == [0, -1, 1, -1, 2, -1, 3, -1, 4, -1]


def test_arguments_of_match_indices() -> None:
    with pytest.raises(TypeError, match="local must be a strided int64 tensor, got torch"):
        match_indices(ids_of(1).int(), ids_of(1))
    with pytest.raises(TypeError, match=r"global_ must be a torch\.Tensor, got list"):
        match_indices(ids_of(1), [1])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"local must have 1 dimension\(s\), got shape \[1, 1\]"):
        match_indices(ids_of(1)[None], ids_of(1))
    with pytest.raises(ValueError, match="global_ must be a cpu tensor"):
        match_indices(ids_of(1), torch.empty(1, dtype=torch.int64, device="meta"))
    assert in_world(lambda: match_indices(ids_of(4, 4), ids_of(3, 4))).tolist() == [1, 1]
