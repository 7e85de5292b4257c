# SPDX-License-Identifier: Apache-2.0
"""The check of dense collectives finds what it is there for."""

from __future__ import annotations

import pytest
import torch

from tdcoll.base.arguments import format_bytes
from tdcoll.collectives.reduce_scatter.reference import reduce_parts
from tdcoll.tools.measure.buffers import Buffers, buffer_workload, largest_exact
from tdcoll.tools.measure.collectives import DENSE_CALLS, DenseCall

WORLD = 4
CALLS = 3
COUNT = 250
CPU = torch.device("cpu")
NODES = [0] * WORLD
GATHER = DENSE_CALLS["all_gather"]
REDUCE = DENSE_CALLS["all_reduce"]
SCATTER = DENSE_CALLS["reduce_scatter"]
ALL_TO_ALL = DENSE_CALLS["all_to_all"]

MOVED = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
)
ADDED = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.int32,
    torch.int64,
)


def make(call: DenseCall, dtype: torch.dtype, rank: int, op: str | None = "sum") -> Buffers:
    op = op if call.spec.reduces else None
    return Buffers(call, COUNT * dtype.itemsize, NODES, rank, dtype, CPU, sets=CALLS, op=op)


def correct(
    call: DenseCall, dtype: torch.dtype, rounds: int, op: str | None = "sum"
) -> list[Buffers]:
    """Return the buffers of all ranks after a correct collective, made of the inputs alone."""
    ranks = [make(call, dtype, rank, op) for rank in range(WORLD)]
    for buffers in ranks:
        buffers.fill(0)
        for _ in range(rounds):
            buffers.advance()
    for number in range(CALLS):
        for rank, buffers in enumerate(ranks):
            parts = [other.inputs[number] for other in ranks]
            if call.spec.scatters:
                parts = [part.chunk(WORLD)[rank] for part in parts]
            if call.spec.reduces:
                result = reduce_parts(parts, NODES, op or "sum")
            else:
                result = torch.cat(parts)
            buffers.results[number].copy_(result)
    return ranks


@pytest.mark.parametrize(
    ("call", "dtype", "op"),
    [
        *((call, dtype, None) for call in (GATHER, ALL_TO_ALL) for dtype in MOVED),
        *((call, dtype, "sum") for call in (REDUCE, SCATTER) for dtype in ADDED),
        *((SCATTER, torch.bfloat16, op) for op in ("mean", "max", "min")),
    ],
)
def test_correct_results_are_correct_and_exact(
    call: DenseCall, dtype: torch.dtype, op: str | None
) -> None:
    input_bytes, result_bytes = call.sizes(COUNT * dtype.itemsize, WORLD)
    for rounds in (0, 5, 1100):  # rounds begin again where numbers would be too large
        for buffers in correct(call, dtype, rounds, op):
            for number in range(CALLS):
                assert buffers.errors(number, buffers.results[number]) == (0, "")
            assert buffers.inputs[1].min() > 0, "else a wrong sign would not show"
            assert buffers.inputs[1].nbytes == input_bytes
            assert buffers.results[1].nbytes == result_bytes
            if op == "sum":
                largest = largest_exact(dtype)
                assert float(buffers.results[1].max()) <= largest
                assert buffers.inputs[1].unique().numel() >= min(COUNT / 2, largest / 2 / WORLD)


MISTAKES = ["an earlier round", "another call", "another rank's", "a shift", "nothing"]


@pytest.mark.parametrize("call", [GATHER, ALL_TO_ALL, REDUCE, SCATTER], ids=lambda call: call.name)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_results_of_something_else_are_wrong(call: DenseCall, mistake: str) -> None:
    """Nearly everywhere: numbers of a float32 that is not reduced meet in one place of millions."""
    buffers, *_, other = correct(call, torch.float32, 1)
    before = correct(call, torch.float32, 0)[0]
    good = buffers.results[1]
    found = {
        "an earlier round": before.results[1],
        "another call": buffers.results[0],
        "another rank's": good.roll(COUNT) if call == GATHER else other.results[1],
        "a shift": good.roll(1),
        "nothing": good,
    }[mistake]
    if mistake == "nothing":
        buffers.fill(8)
    count, text = buffers.errors(1, found)
    if (call, mistake) == (REDUCE, "another rank's"):
        assert (count, text) == (0, "")  # all ranks have the same
    else:
        assert count >= good.numel() - 1
        assert text.startswith(f"rank 0: {count} wrong element(s), first: call 1, element ")


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
@pytest.mark.parametrize("bit", [0, 6, 7])
def test_one_wrong_bit_is_found_and_named(dtype: torch.dtype, bit: int) -> None:
    buffers = correct(GATHER, dtype, 2)[1]
    place = 3 * COUNT + 18
    last_byte = place * dtype.itemsize + dtype.itemsize - 1
    buffers.results[2].view(torch.uint8)[last_byte] ^= 1 << bit
    expected = buffers.expected(2)[place].item()
    got = buffers.results[2][place].item()
    first = f"call 2, element {place}: expected {expected}, got {got}"
    text = f"rank 1: 1 wrong element(s), first: {first}"
    assert buffers.errors(2, buffers.results[2]) == (1, text)
    assert buffers.errors(1, buffers.results[1]) == (0, "")


def test_sums_over_too_many_ranks_are_refused() -> None:
    def over(world: int, op: str) -> Buffers:
        return Buffers(SCATTER, 4, [0] * world, 0, torch.bfloat16, CPU, sets=2, op=op)

    over(64, "sum")
    over(65, "max")
    with pytest.raises(ValueError, match="bfloat16 has no exact sums of 65 different numbers"):
        over(65, "sum")


@pytest.mark.parametrize("call", [GATHER, REDUCE], ids=lambda call: call.name)
def test_a_call_in_place_finds_its_input_in_its_result_before_every_launch(call: DenseCall) -> None:
    buffers = make(call, torch.int32, 2)
    workload = buffer_workload(buffers, lambda i: buffers.results[i], in_place=True)
    workload.begin(3)
    own = slice(2 * COUNT, 3 * COUNT) if call == GATHER else slice(None)
    for _ in range(2):
        workload.before([0, 1, 2])
        for number, result in enumerate(buffers.results):
            assert result[own].equal(buffers.inputs[number])
            result.zero_()


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    # 8 ranks, 64 MB each, 1377 us: 7 segments in and out of each rank.
    assert GATHER.sent_bytes(64 << 20, 8) == ALL_TO_ALL.sent_bytes(64 << 20, 8) == 7 * (64 << 20)
    assert SCATTER.sent_bytes(1 << 20, 1) == 0
    assert REDUCE.sent_bytes(64 << 20, 8) == 7 * (16 << 20)


def test_sizes_are_written_exactly() -> None:
    sizes: dict[int, str] = {
        0: "0 B",
        512: "512 B",
        1024: "1 KB",
        1025: "1025 B",
        3 << 20: "3 MB",
        1 << 30: "1 GB",
    }
    assert {nbytes: format_bytes(nbytes) for nbytes in sizes} == sizes
