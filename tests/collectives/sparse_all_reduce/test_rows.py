# SPDX-License-Identifier: Apache-2.0
"""Which rows ranks bring to a sparse all-reduce: shared, repeated, none, or more than a block or a
tile holds."""

from __future__ import annotations

import pytest
import torch
from tiers import slow_tier

from .cases import BOTH, HUGE, Options, check_all, some_part, some_values
from .reference import Rows


@BOTH
@pytest.mark.parametrize("layout", [[8], [3, 2], [1, 1, 1, 1]], ids=str)
def test_one_row_that_everybody_has(layout: list[int], algorithm: str) -> None:
    parts = [
        Rows(torch.tensor([6]), some_values((1, 3), torch.float32, rank))
        for rank in range(sum(layout))
    ]
    check_all(parts, 7, Options(algorithm=algorithm), layout=layout)


@BOTH
@pytest.mark.parametrize("num_rows", [1, 31, 32, 33, 63, 65])
def test_every_row_of_tables_of_any_size(num_rows: int, algorithm: str) -> None:
    first = Rows(torch.arange(num_rows), some_values((num_rows, 2), torch.float32, 1))
    second = Rows(torch.tensor([num_rows - 1]), some_values((1, 2), torch.float32, 2))
    check_all([first, second], num_rows, Options(algorithm=algorithm, coalesced=True))


@BOTH
@pytest.mark.parametrize("form", ["coo", "pair", "padded"])
@pytest.mark.parametrize("layout", [[2], [1, 1], [1]], ids=str)
def test_no_rows(layout: list[int], form: str, algorithm: str) -> None:
    for num_rows, shape in ((0, (3,)), (1, ()), (HUGE, (0,)), (HUGE, (4,))):
        nothing = Rows(torch.empty(0, dtype=torch.int64), torch.empty(0, *shape))
        got = check_all(
            [nothing] * sum(layout),
            num_rows,
            Options(algorithm=algorithm, form=form),
            layout=layout,
        )
        assert got[0].rows.values.shape == (0, *shape)


@pytest.mark.parametrize("algorithm", ["owner", slow_tier("gather")])
def test_more_rows_than_a_block_handles(algorithm: str) -> None:
    """With the tiles and blocks of real use."""
    parts = [some_part(rank, 1300 - 500 * rank, 1500, (3,), torch.float32) for rank in range(2)]
    check_all(parts, 1500, Options(algorithm=algorithm))


def test_rows_wider_than_a_tile() -> None:
    parts = [some_part(rank, 5, 6, (2500,), torch.float32) for rank in range(3)]
    for algorithm in ("owner", "gather"):
        check_all(parts, 6, Options(algorithm=algorithm))
    check_all(parts, 6, layout=[2, 1])
