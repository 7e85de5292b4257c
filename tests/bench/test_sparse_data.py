# SPDX-License-Identifier: Apache-2.0
"""Rows that are drawn as they should be, and a check that finds what it is there for."""

from __future__ import annotations

import itertools

import pytest
import torch

from tdcoll.bench.sparse_data import Rows, SparseData, Vocabulary, mixed

CPU = torch.device("cpu")
WORLD = 3


def made(duplicates: str = "0", dtype: torch.dtype = torch.float32, distribution: str = "zipf1.1", dim: int = 5):
    """The data of all ranks."""
    rows = Rows(Vocabulary(distribution, 60, CPU), 20, duplicates, WORLD, dtype)
    return [SparseData(rows, dim, rank) for rank in range(WORLD)]


def reference(ranks: list[SparseData], number: int) -> torch.Tensor:
    """``[num_rows, dim]`` float64: what torch makes of the inputs, one rank after the other."""
    return sum(data.tensors[number].double().to_dense() for data in ranks)


def result(ranks: list[SparseData], number: int) -> torch.Tensor:
    """The correct sparse result."""
    union = torch.unique(torch.cat([data.indices(number) for data in ranks]))
    values = reference(ranks, number)[union].to(ranks[0].rows.dtype)
    shape = ranks[0].tensors[0].shape
    return torch.sparse_coo_tensor(union[None], values, shape, is_coalesced=True, check_invariants=False)


def test_hashes_are_splitmix64() -> None:
    # The published sequence of seed 1234567, as unsigned numbers.
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    gamma = 0x9E3779B97F4A7C15
    inverse = pow(gamma, -1, 1 << 64)
    from tdcoll.bench.sparse_data import _scramble, _wrapped

    states = [_wrapped((1234567 + (i + 1) * gamma) * inverse) for i in range(3)]
    assert [int(x) % (1 << 64) for x in _scramble(torch.tensor(states))] == expected
    keys = [mixed(1000, CPU, *key) for key in ((), (0,), (1,), (0, 0), (0, 1), (1, 0))]
    assert len(torch.unique(torch.cat(keys))) == 6000


@pytest.mark.parametrize("distribution", ["uniform", "zipf0.9", "zipf1.2"])
@pytest.mark.parametrize("count", [1, 40, 500])
def test_distinct_rows_are_ascending_and_the_same_on_every_run(distribution: str, count: int) -> None:
    vocabulary = Vocabulary(distribution, 500, CPU)
    rows = vocabulary.distinct(count, 3, 1)
    assert rows.shape == (count,)
    assert (rows.diff() > 0).all()
    assert int(rows[0]) >= 0
    assert int(rows[-1]) < 500
    assert rows.equal(Vocabulary(distribution, 500, CPU).distinct(count, 3, 1))
    if count == 40:
        assert not rows.equal(vocabulary.distinct(count, 3, 2))


def test_uniform_rows_are_as_often_in_every_part() -> None:
    vocabulary = Vocabulary("uniform", 1000, CPU)
    rows = torch.cat([vocabulary.distinct(100, i) for i in range(200)])
    tenths = torch.bincount(rows // 100, minlength=10)
    # 2000 in each, standard deviation about 40.
    assert int(tenths.min()) > 1800
    assert int(tenths.max()) < 2200


def test_zipf_rows_are_as_often_as_their_place_says() -> None:
    vocabulary = Vocabulary("zipf1.2", 1000, CPU)
    weights = torch.arange(1, 1001, dtype=torch.float64) ** -1.2
    expected = weights / weights.sum()
    drawn = torch.bincount(vocabulary.drawn(200_000, 7), minlength=1000) / 200_000
    assert torch.allclose(drawn[:5].double(), expected[:5], atol=0.005)
    # One clock each: the first to ring is a row with its frequency.
    first = torch.bincount(torch.cat([vocabulary.distinct(1, i) for i in range(2000)]), minlength=1000) / 2000
    assert torch.allclose(first[:3].double(), expected[:3], atol=0.04)
    # Two different ones, drawn one after the other until they differ.
    pairs = sum(bool((vocabulary.distinct(2, i)[:2] == torch.tensor([0, 1])).all()) for i in range(2000)) / 2000
    p, q = float(expected[0]), float(expected[1])
    assert pairs == pytest.approx(p * q / (1 - p) + p * q / (1 - q), abs=0.03)


def test_repetitions() -> None:
    vocabulary = Vocabulary("uniform", 500, CPU)
    rows = vocabulary.rows(100, "0.3", 1)
    assert rows.shape == (100,)
    assert torch.unique(rows).numel() == 70
    assert not (rows.diff() >= 0).all()
    assert torch.unique(vocabulary.rows(10, "0.99", 1)).numel() == 1
    drawn = Vocabulary("zipf1.2", 500, CPU).rows(100, "drawn", 1)
    assert drawn.shape == (100,)
    assert torch.unique(drawn).numel() < 90


def test_more_rows_than_there_are() -> None:
    with pytest.raises(ValueError, match="11 different rows of 10"):
        Vocabulary("uniform", 10, CPU).distinct(11)


@pytest.mark.parametrize("name", ["", "normal", "zipf", "zipf-1", "zipfx"])
def test_an_unknown_distribution(name: str) -> None:
    with pytest.raises(ValueError, match="expected uniform or zipf"):
        Vocabulary(name, 10, CPU)


@pytest.mark.parametrize("duplicates", ["0", "0.5", "drawn"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_right_sums_pass_in_every_round(duplicates: str, dtype: torch.dtype) -> None:
    ranks = made(duplicates, dtype)
    for number, rounds in itertools.product(range(3), (0, 1, 70)):
        for data in ranks:
            for _ in range(rounds):
                data.advance(number)
        good = result(ranks, number)
        for data in ranks:
            assert data.tensors[number].is_coalesced() == (duplicates == "0")
            assert data.tensors[number]._nnz() == 20
            assert data.errors_of(number, good) == (0, "")
            assert data.errors_of(number, good.to_dense()) == (0, "")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_of_16_bit_values_are_exact(dtype: torch.dtype) -> None:
    ranks = made(dtype=dtype)
    for _ in range(2 * ranks[0].rows.n_rounds - 1):  # the largest values
        for data in ranks:
            data.advance(1)
    assert reference(ranks, 1).max() > 0.6 * {torch.float16: 2048, torch.bfloat16: 256}[dtype]
    assert ranks[0].errors_of(1, result(ranks, 1)) == (0, "")


def test_sums_that_cannot_be_exact_are_refused() -> None:
    vocabulary = Vocabulary("zipf1.2", 60, CPU)
    with pytest.raises(ValueError, match="no exact sum in bfloat16"):
        Rows(vocabulary, 200, "drawn", WORLD, torch.bfloat16)
    Rows(vocabulary, 200, "drawn", WORLD, torch.float32)


@pytest.mark.parametrize("mistake", ["another row", "another input", "an earlier round", "without a rank", "a shift"])
def test_sums_of_something_else_are_wrong(mistake: str) -> None:
    ranks = made(dim=16)
    before = result(ranks, 1)
    for data in ranks:
        data.advance(1)
    good = result(ranks, 1)
    values = good._values().clone()
    held = torch.isin(good._indices()[0], ranks[2].indices(1)) & torch.isin(good._indices()[0], ranks[0].indices(1))
    at = int(held.nonzero()[0])
    if mistake == "another row":
        values[at] = good._values()[at + 1]
    elif mistake == "another input":
        values[at] = result(ranks, 2)._values()[at]
    elif mistake == "an earlier round":
        values[at] = before._values()[at]
    elif mistake == "without a rank":
        values[at] -= ranks[2].values(1)[ranks[2].indices(1) == good._indices()[0][at]][0]
    else:
        values[at] = good._values()[at].roll(1)
    wrong = torch.sparse_coo_tensor(good._indices(), values, good.shape, is_coalesced=True, check_invariants=False)
    count, where = ranks[1].errors_of(1, wrong)
    assert count == int((values[at] != good._values()[at]).sum()) >= 10
    assert f"rank 1, input 1: {count} wrong value(s), first: row {int(good._indices()[0][at])} [" in where
    assert ranks[1].errors_of(1, wrong.to_dense())[0] == count


def test_wrong_rows_are_named() -> None:
    (data, *_) = ranks = made()
    good = result(ranks, 0)
    indices, values = good._indices()[0], good._values()
    assert "expected" in data.errors(0, indices[1:], values[1:])[1]
    other = indices.clone()
    other[3] += 1
    assert data.errors(0, other, values)[1].startswith("rank 0, input 0: 1 wrong row number(s), first: place 3:")
    values[2, 4] = float("nan")
    assert data.errors(0, indices, values)[0] == 1
    unsorted = torch.sparse_coo_tensor(good._indices(), good._values(), good.shape, check_invariants=False)
    assert "not coalesced" in data.errors_of(0, unsorted)[1]
    dense = result(ranks, 0).to_dense()
    empty = int((dense.sum(1) == 0).nonzero()[0])
    dense[empty, 0] = 1
    assert "1 value(s) in rows that nobody gave" in data.errors_of(0, dense)[1]
    assert "expected a tensor of" in data.errors_of(0, dense[1:])[1]


def test_values_say_rank_row_input_and_round() -> None:
    ranks = made(distribution="uniform", dim=8)
    seen = torch.cat([data.values(number) for data in ranks for number in range(3)])
    # Of 180 rows nearly all differ from all others, and so do neighbouring places of a row.
    assert torch.unique(seen, dim=0).shape[0] >= 178
    assert (seen.diff(dim=1) != 0).all()
    before = ranks[0].values(2).clone()
    ranks[0].advance(2)
    assert (ranks[0].values(2) == before + 1).all()


def test_ranks_that_made_other_rows_find_out() -> None:
    one = made()[0].rows
    assert one.checksum == made()[2].rows.checksum
    other = made()[0].rows
    other.indices[1][0][3] += 1
    assert other.checksum != one.checksum
