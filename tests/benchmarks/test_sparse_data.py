# SPDX-License-Identifier: Apache-2.0
"""Inputs of sparse all-reduces, and mistakes that their check finds."""

from __future__ import annotations

import itertools

import pytest
import torch

from benchmarks import sparse_data
from benchmarks.sparse_data import INPUTS, RowSample, SparseData, draw, sparse_tensor

CPU = torch.device("cpu")
WORLD = 3


def all_lists(sample: RowSample) -> list[torch.Tensor]:
    """Return the row numbers of all inputs and ranks."""
    return [torch.from_numpy(rows) for rows in itertools.chain.from_iterable(draw(sample))]


@pytest.mark.parametrize("distribution", ["uniform", "zipf0.9", "zipf1.2"])
@pytest.mark.parametrize("count", [1, 40, 500])
def test_distinct_rows_are_ascending_and_the_same_on_every_rank(
    distribution: str, count: int
) -> None:
    sample = RowSample(distribution, 500, count, 2)
    lists = all_lists(sample)
    for rows in lists:
        assert rows.shape == (count,)
        assert (rows[1:] > rows[:-1]).all()
        assert 0 <= rows[0] <= rows[-1] < 500
    draw.cache_clear()
    again = all_lists(sample)
    assert all(rows.equal(other) for rows, other in zip(lists, again, strict=True))
    if count == 40:
        assert len({tuple(rows.tolist()) for rows in lists}) == 2 * INPUTS


def test_rows_are_as_frequent_as_their_place_says() -> None:
    weights = torch.arange(1, 1001, dtype=torch.float64) ** -1.2
    expected = weights / weights.sum()
    singles = torch.cat(all_lists(RowSample("zipf1.2", 1000, 1, 5_000)))
    frequencies = torch.bincount(singles, minlength=1000).double() / len(singles)
    assert torch.allclose(frequencies[:5], expected[:5], atol=0.02)
    # The first two different rows that are drawn.
    pairs = torch.stack(all_lists(RowSample("zipf1.2", 1000, 2, 600)))
    first_two = (pairs == torch.tensor([0, 1])).all(1).double().mean()
    p, q = expected[0], expected[1]
    assert float(first_two) == pytest.approx(float(p * q / (1 - p) + p * q / (1 - q)), abs=0.03)


def test_uniform_rows_are_equally_frequent() -> None:
    rows = torch.cat(all_lists(RowSample("uniform", 1000, 100, 100)))
    tenths = torch.bincount(rows // 100, minlength=10)
    assert (tenths - 3000).abs().max() < 300  # the standard deviation is about 50


def data_of_all_ranks(dtype: torch.dtype = torch.float32, dim: int = 5) -> list[SparseData]:
    sample = RowSample("zipf1.1", 60, 20, WORLD)
    return [SparseData(sample, dim, dtype, rank, CPU) for rank in range(WORLD)]


def dense_sum(ranks: list[SparseData], number: int) -> torch.Tensor:
    """Return the sum of an input over the ranks: ``[num_rows, dim]`` float64."""
    return torch.stack([data.tensors[number].double().to_dense() for data in ranks]).sum(0)


def correct_result(ranks: list[SparseData], number: int) -> torch.Tensor:
    """Return the right sparse result, by another way than the check's."""
    union = torch.unique(torch.cat([data.tensors[number]._indices()[0] for data in ranks]))
    values = dense_sum(ranks, number)[union].to(ranks[0].dtype)
    return sparse_tensor(union, values, ranks[0].shape)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_right_sums_pass_in_every_round(dtype: torch.dtype) -> None:
    ranks = data_of_all_ranks(dtype)
    last_rounds = ranks[0]._numbers.rounds - 72  # to the round with the largest values
    for number in range(INPUTS):
        for rounds in (0, 1, 70, last_rounds):
            for data in ranks:
                for _ in range(rounds):
                    data.advance(number)
            good = correct_result(ranks, number)
            for data in ranks:
                assert data.tensors[number].is_coalesced()
                assert data.tensors[number]._nnz() == 20
                assert data.tensor_errors(number, good) == (0, "")
    if dtype.itemsize == 2:
        largest_exact = {torch.float16: 2048, torch.bfloat16: 256}[dtype]
        assert dense_sum(ranks, 1).max() > 0.6 * largest_exact


MISTAKES = ["next row", "other input", "old round", "no rank 2", "rank 0 twice", "a shift"]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_sums_of_something_else_are_wrong(mistake: str) -> None:
    ranks = data_of_all_ranks(dim=16)
    before = correct_result(ranks, 1)
    for data in ranks:
        data.advance(1)
    good = correct_result(ranks, 1)
    rows = good._indices()[0]
    values = good._values().clone()
    inputs = [data.tensors[1] for data in ranks]
    in_both = torch.isin(rows, inputs[0]._indices()[0]) & torch.isin(rows, inputs[2]._indices()[0])
    at = int(in_both.nonzero()[0])
    own = {}
    for rank in (0, 2):
        own[rank] = inputs[rank]._values()[inputs[rank]._indices()[0] == rows[at]][0]
    values[at] = {
        "next row": values[at + 1],
        "other input": correct_result(ranks, 2)._values()[at],
        "old round": before._values()[at],
        "no rank 2": values[at] - own[2],
        "rank 0 twice": values[at] - own[2] + own[0],
        "a shift": values[at].roll(1),
    }[mistake].clone()
    count, text = ranks[1].tensor_errors(1, sparse_tensor(rows, values, ranks[0].shape))
    assert count == int((values[at] != good._values()[at]).sum()) >= 10
    assert f"rank 1, input 1: {count} wrong value(s), first: place [{at}, " in text


def test_wrong_rows_are_named() -> None:
    ranks = data_of_all_ranks()
    data = ranks[0]
    good = correct_result(ranks, 0)
    rows = good._indices()[0]
    values = good._values()
    count, text = data.errors(0, rows[1:], values[1:])
    assert count == 1
    assert text.startswith("rank 0, input 0: expected row numbers of shape ")
    other = rows.clone()
    other[3] += 1
    count, text = data.errors(0, other, values)
    assert text.startswith("rank 0, input 0: 1 wrong row number(s), first: place [3]: expected")
    unsorted = torch.sparse_coo_tensor(good._indices(), values, good.shape, check_invariants=False)
    assert "coalesced: False" in data.tensor_errors(0, unsorted)[1]
    shorter = good.to_dense()[1:].to_sparse()
    assert "expected a coalesced tensor of (60, 5)" in data.tensor_errors(0, shorter)[1]
    values[2, 4] = float("nan")
    assert data.errors(0, rows, values)[0] == 1


def test_moved_rows_are_those_that_a_rank_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = [
        [[1, 4, 5, 9], [4, 5, 9, 11], [5, 9, 11, 12]],
        [[1, 2, 3, 4], [1, 2, 3, 4], [5, 6, 7, 8]],
        [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3]],
    ]
    sent = 0
    for lists in inputs:
        for row in set(itertools.chain.from_iterable(lists)):
            contributors = sum(row in rows for rows in lists)
            sent += contributors - 1  # to the owner
            sent += WORLD - 1  # the sum, to all others
    drawn = [[torch.tensor(rows).numpy() for rows in lists] for lists in inputs]
    monkeypatch.setattr(sparse_data, "draw", lambda sample: drawn)
    monkeypatch.setattr(SparseData, "_input", lambda self, rank, number: None)
    data = SparseData(RowSample("uniform", 60, 4, WORLD), 5, torch.float32, 0, CPU)
    assert data.moved_rows == pytest.approx(sent / 3)
    assert data.union_rows == (6 + 8 + 4) / 3
