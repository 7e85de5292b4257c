# SPDX-License-Identifier: Apache-2.0
"""The check finds what it is there for; it is the benchmark's only judge."""

from __future__ import annotations

import pytest
import torch

from tdcoll.bench.data import Buffers

WORLD, CALLS = 4, 3


def errors(buffers: Buffers, calls: int = CALLS) -> tuple[int, str]:
    """Those of so many calls, and where the first is."""
    found = [buffers.errors(call, buffers.results[call]) for call in range(calls)]
    return sum(count for count, _ in found), next((where for count, where in found if count), "")


def gathered(nbytes: int, dtype: torch.dtype, rounds: int) -> tuple[list[Buffers], list[Buffers]]:
    """Buffers of all ranks after a correct all-gather: results and inputs apart, and in place."""
    device = torch.device("cpu")
    apart = [Buffers(nbytes, WORLD, rank, CALLS, dtype, device) for rank in range(WORLD)]
    need = Buffers.storage_bytes(nbytes, WORLD, CALLS)
    together = [
        Buffers(nbytes, WORLD, rank, CALLS, dtype, device, torch.zeros(need, dtype=torch.uint8))
        for rank in range(WORLD)
    ]
    for ranks in (apart, together):
        for buffers in ranks:
            buffers.fill(7)
            for _ in range(rounds):
                buffers.advance()
        for buffers in ranks:
            for call in range(CALLS):
                for peer, other in enumerate(ranks):
                    buffers.results[call].chunk(WORLD)[peer].view(torch.uint8).copy_(
                        other.inputs[call].view(torch.uint8).clone()
                    )
    return apart, together


@pytest.mark.parametrize(("nbytes", "dtype"), [(1000, torch.float32), (6, torch.bfloat16), (1, torch.int8)])
@pytest.mark.parametrize("rounds", [0, 5])
def test_correct_results_are_correct(nbytes: int, dtype: torch.dtype, rounds: int) -> None:
    for ranks in gathered(nbytes, dtype, rounds):
        for buffers in ranks:
            assert buffers.results[0].dtype == dtype
            assert buffers.results[0].numel() == WORLD * nbytes // dtype.itemsize
            assert errors(buffers) == (0, "")


@pytest.mark.parametrize("in_place", [False, True])
def test_one_wrong_byte_is_found_and_named(in_place: bool) -> None:
    buffers = gathered(1000, torch.float32, 2)[in_place][1]
    buffers.results[2].view(torch.uint8)[3 * 1000 + 18] ^= 1
    count, where = errors(buffers)
    assert count == 1
    assert where.startswith("rank 1: 1 wrong word(s), first: call 2, rank 3's word 4: expected ")
    assert errors(buffers, 2) == (0, "")  # a launch of two calls has not touched the third result


@pytest.mark.parametrize("mistake", ["an earlier round", "another call", "another rank", "an earlier word"])
def test_data_from_elsewhere_is_wrong_in_every_word(mistake: str) -> None:
    buffers = gathered(1000, torch.int32, 1)[0][0]
    before = gathered(1000, torch.int32, 0)[0][0]
    segment = buffers.results[1].chunk(WORLD)[2]
    source = {
        "an earlier round": before.results[1].chunk(WORLD)[2],
        "another call": buffers.results[0].chunk(WORLD)[2],
        "another rank": buffers.results[1].chunk(WORLD)[3],
        "an earlier word": segment.roll(1),
    }[mistake]
    segment.copy_(source.clone())
    assert errors(buffers)[0] == 250


def test_results_of_nobody_are_wrong() -> None:
    buffers = gathered(1000, torch.int32, 0)[0][0]
    buffers.fill(8)
    assert errors(buffers)[0] == CALLS * WORLD * 250
