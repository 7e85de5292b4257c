# SPDX-License-Identifier: Apache-2.0
"""The reference, by results that were found by hand."""

from __future__ import annotations

import pytest
import torch

from tdcoll.collectives.reduce_scatter.reference import reduce_parts


def test_ranks_are_summed_inside_their_nodes_first() -> None:
    parts = [torch.tensor([number]) for number in (2.0**24, 1.0, 1.0, -(2.0**24))]
    assert reduce_parts(parts, [0, 0, 0, 0]).item() == 0.0  # 2^24 + 1 is 2^24 in fp32, twice
    assert reduce_parts(parts, [0, 1, 1, 0]).item() == 2.0
    assert reduce_parts(parts, [0, 1, 1, 2]).item() == 2.0
    assert reduce_parts(parts, [0, 1, 0, 1]).item() == 1.0


def test_sums_are_rounded_once() -> None:
    parts = [torch.tensor([number], dtype=torch.bfloat16) for number in (256.0, 1.0, 1.0)]
    assert reduce_parts(parts, [0, 0, 0]).item() == 258.0  # 257 is no bf16
    third = reduce_parts([torch.tensor([1.0])] * 3 + [torch.tensor([0.0])] * 6, [0] * 9, "mean")
    assert third.view(torch.int32).item() == 0x3EAAAAAB


def test_integers_wrap_and_have_no_mean() -> None:
    parts = [torch.tensor([2**31 - 1], dtype=torch.int32)] * 2
    assert reduce_parts(parts, [0, 0]).item() == -2
    with pytest.raises(ValueError, match="mean"):
        reduce_parts(parts, [0, 0], "mean")


@pytest.mark.parametrize("op", ["sum", "mean", "max", "min", "prod"])
def test_no_result_is_minus_zero(op: str) -> None:
    parts = [torch.tensor([-0.0])] * 3
    assert reduce_parts(parts, [0, 0, 0], op).view(torch.int32).item() == 0
    assert reduce_parts([*parts, torch.tensor([float("nan")])], [0, 0, 0, 1], op).isnan().all()
