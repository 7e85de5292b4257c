# SPDX-License-Identifier: Apache-2.0
"""match_indices, which needs no job."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tdcoll.collectives.index_match.op import match_indices


def ids_of(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


@settings(max_examples=25, deadline=None)
@given(
    local=st.lists(st.integers(-5, 60) | st.integers(-(1 << 63), (1 << 63) - 1), max_size=40),
    there=st.sets(st.integers(0, 60), max_size=40),
)
def test_match_indices(local: list[int], there: set[int]) -> None:
    union = sorted(there)
    got = match_indices(ids_of(*local), ids_of(*union))
    assert got.dtype == torch.int64
    assert got.tolist() == [union.index(x) if x in there else -1 for x in local]


def test_match_indices_takes_strides() -> None:
    local, union = torch.arange(20)[::2], torch.arange(40)[::4]
    got = match_indices(local, union)
    assert got.tolist() == [0, -1, 1, -1, 2, -1, 3, -1, 4, -1]


def test_arguments_of_match_indices() -> None:
    with pytest.raises(TypeError, match="local must be a strided int64 tensor, got torch"):
        match_indices(ids_of(1).int(), ids_of(1))
    with pytest.raises(TypeError, match=r"global_ must be a torch\.Tensor, got list"):
        match_indices(ids_of(1), [1])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"local must have 1 dimension, got shape \[1, 1\]"):
        match_indices(ids_of(1)[None], ids_of(1))
    with pytest.raises(ValueError, match="global_ must be a cpu tensor"):
        match_indices(ids_of(1), torch.empty(1, dtype=torch.int64, device="meta"))
    assert match_indices(ids_of(4, 4), ids_of(3, 4)).tolist() == [1, 1]


def test_the_example_of_the_documentation_runs() -> None:
    page = Path(__file__).resolve().parents[3] / "docs" / "index-matching.md"
    (example,) = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
    exec(compile(example, page.name, "exec"), {})
    with pytest.raises(AssertionError):
        exec(compile(example.replace("[1, -1]", "[1, 3]"), page.name, "exec"), {})
