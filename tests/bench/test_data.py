# SPDX-License-Identifier: Apache-2.0
"""The check of dense collectives finds what it is there for; it is the benchmark's only judge."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tdcoll.collectives.reduce_scatter.reference import reduce_parts
from tdcoll.tools.bench.data import Buffers, exact
from tdcoll.tools.bench.engine import calls_of
from tdcoll.tools.bench.peers import subject_of
from tdcoll.tools.bench.specs import SPECS, Spec

WORLD, CALLS, COUNT = 4, 3, 250
CPU, NODES = torch.device("cpu"), [0] * WORLD
GATHER, REDUCE, SCATTER = SPECS["all_gather"], SPECS["all_reduce"], SPECS["reduce_scatter"]
ALL_TO_ALL = SPECS["all_to_all"]

MOVED = tuple(getattr(torch, name) for name in ("uint8", "int8", "int16", "float16", "bfloat16", "float32", "float64"))
ADDED = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64)


def made(spec: Spec, dtype: torch.dtype, rank: int, op: str | None = "sum", **named: Any) -> Buffers:
    named = {"sets": CALLS, "op": op if spec.reduces else None, **named}
    return Buffers(spec, COUNT * dtype.itemsize, NODES, rank, dtype, CPU, **named)


def done(spec: Spec, dtype: torch.dtype, rounds: int, op: str | None = "sum") -> list[Buffers]:
    """Buffers of all ranks after a correct collective, of which the result is made of the inputs alone."""
    ranks = [made(spec, dtype, rank, op) for rank in range(WORLD)]
    for buffers in ranks:
        buffers.fill(0)
        for _ in range(rounds):
            buffers.advance()
    for call in range(CALLS):
        for rank, buffers in enumerate(ranks):
            given = [other.inputs[call] for other in ranks]
            parts = [one.chunk(WORLD)[rank] if spec.scatters else one for one in given]
            result = reduce_parts(parts, NODES, op or "sum") if spec.reduces else torch.cat(parts)
            buffers.results[call].copy_(result)
    return ranks


@pytest.mark.parametrize(
    ("spec", "dtype", "op"),
    [
        *((spec, dtype, None) for spec in (GATHER, ALL_TO_ALL) for dtype in MOVED),
        *((spec, dtype, "sum") for spec in (REDUCE, SCATTER) for dtype in ADDED),
        *((SCATTER, torch.bfloat16, op) for op in ("mean", "max", "min")),
    ],
)
def test_correct_results_are_correct_and_exact(spec: Spec, dtype: torch.dtype, op: str | None) -> None:
    for rounds in (0, 5, 1100):  # rounds begin again where numbers would be too large
        for buffers in done(spec, dtype, rounds, op):
            assert [buffers.errors(call, buffers.results[call]) for call in range(CALLS)] == [(0, "")] * CALLS
            given, result = (nbytes // dtype.itemsize for nbytes in spec.sizes(COUNT * dtype.itemsize, WORLD))
            assert buffers.inputs[1].min() > 0, "else a wrong sign would not show"
            assert (buffers.inputs[1].shape, buffers.results[1].shape) == ((given,), (result,))
            if op == "sum":
                assert float(buffers.results[1].max()) <= exact(dtype)
                assert buffers.inputs[1].unique().numel() >= min(COUNT / 2, exact(dtype) / 2 / WORLD)


@pytest.mark.parametrize("spec", [GATHER, ALL_TO_ALL, REDUCE, SCATTER], ids=lambda spec: spec.name)
@pytest.mark.parametrize("mistake", ["an earlier round", "another call", "another rank's", "a shift", "nothing"])
def test_results_of_something_else_are_wrong(spec: Spec, mistake: str) -> None:
    """Nearly everywhere: of a float32 that is not reduced, the numbers meet in one place of millions."""
    buffers, *_, other = done(spec, torch.float32, 1)
    before, good = done(spec, torch.float32, 0)[0], buffers.results[1]
    found = {
        "an earlier round": before.results[1],
        "another call": buffers.results[0],
        "another rank's": good.roll(COUNT) if spec == GATHER else other.results[1],
        "a shift": good.roll(1),
        "nothing": good,
    }[mistake]
    if mistake == "nothing":
        buffers.fill(8)
    count, where = buffers.errors(1, found)
    if (spec, mistake) == (REDUCE, "another rank's"):
        assert (count, where) == (0, "")  # all ranks have the same
    else:
        assert count >= good.numel() - 1
        assert where.startswith(f"rank 0: {count} wrong element(s), first: call 1, element ")


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
@pytest.mark.parametrize("bit", [0, 6, 7])
def test_one_wrong_bit_is_found_and_named(dtype: torch.dtype, bit: int) -> None:
    buffers = done(GATHER, dtype, 2)[1]
    at = 3 * COUNT + 18
    buffers.results[2].view(torch.uint8)[at * dtype.itemsize + dtype.itemsize - 1] ^= 1 << bit
    count, where = buffers.errors(2, buffers.results[2])
    expected, got = buffers.expected(2)[at].item(), buffers.results[2][at].item()
    said = f"rank 1: 1 wrong element(s), first: call 2, element {at}: expected {expected}, got {got}"
    assert (count, where) == (1, said)
    assert buffers.errors(1, buffers.results[1]) == (0, "")


def test_sums_over_too_many_ranks_are_refused() -> None:
    def over(world: int, op: str) -> Buffers:
        return Buffers(SCATTER, 4, [0] * world, 0, torch.bfloat16, CPU, sets=2, op=op)

    over(64, "sum")
    over(65, "max")
    with pytest.raises(ValueError, match="bfloat16 has no exact sums of 65 different numbers"):
        over(65, "sum")


@pytest.mark.parametrize("spec", [GATHER, REDUCE], ids=lambda spec: spec.name)
def test_a_call_in_place_finds_its_input_in_its_result_before_every_launch(spec: Spec) -> None:
    buffers = made(spec, torch.int32, 2)
    subject = subject_of(buffers, lambda i: buffers.results[i], in_place=True)
    subject.begin(3)
    for _ in range(2):
        subject.before([0, 1, 2])
        for call, result in enumerate(buffers.results):
            own = slice(2 * COUNT, 3 * COUNT) if spec == GATHER else slice(None)
            assert result[own].equal(buffers.inputs[call])
            result.zero_()


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    # 8 ranks, 64 MB each, 1377 us: 7 segments in and out of each rank.
    assert GATHER.sent_bytes(64 << 20, 8) == ALL_TO_ALL.sent_bytes(64 << 20, 8) == 7 * (64 << 20)
    assert SCATTER.sent_bytes(1 << 20, 1) == 0
    assert REDUCE.sent_bytes(64 << 20, 8) == 7 * (16 << 20)


def test_launches_have_an_even_and_an_odd_number_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = (1, 8 << 20, 128 << 20, 8 << 30)
    assert {calls_of(nbytes) for nbytes in sizes} == {(2, 3)}, "nothing is timed here"
    monkeypatch.setattr("tdcoll.tools.bench.engine.CALLS", (20, 21))
    assert [calls_of(nbytes) for nbytes in sizes] == [(20, 21), (20, 21), (8, 9), (2, 3)]
