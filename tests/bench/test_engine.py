# SPDX-License-Identifier: Apache-2.0
"""What the engine does with a subject, and that the check of dense collectives finds what it is there for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tdcoll.base.arguments import format_bytes
from tdcoll.base.errors import TdcollError
from tdcoll.collectives.reduce_scatter.reference import reduce_parts
from tdcoll.testing import World
from tdcoll.tools.bench import engine
from tdcoll.tools.bench.arithmetic import ratio, summarize
from tdcoll.tools.bench.data import Buffers, exact
from tdcoll.tools.bench.engine import TURNS, Contender, Ranks, Subject, calls_of, simulate
from tdcoll.tools.bench.peers import subject_of
from tdcoll.tools.bench.rows import Row
from tdcoll.tools.bench.specs import SPECS, Spec
from tdcoll.tools.bench.timing import LineUp, graph_time_us


class Recorded:
    """A subject of three inputs that takes down what is done with it. A result is ``(input, its round, call)``."""

    def __init__(self, wrong: Callable[[int], bool] = lambda at: False, **fields: Any) -> None:
        self.did: list[Any] = []
        self.rounds = [0, 0, 0]
        self.calls = 0
        self.wrong = wrong
        self.subject = Subject(self.call, self.errors, 3, self.begin, self.before, (2, 3), **fields)

    def begin(self, round_: int) -> None:
        self.did.append("begin")
        self.rounds = [round_] * 3

    def before(self, numbers: Any) -> None:
        self.did.append(list(numbers))
        for number in dict.fromkeys(numbers):
            self.rounds[number] += 1

    def call(self, number: int) -> tuple[int, int, int]:
        self.did.append(number)
        self.calls += 1
        return number, self.rounds[number], self.calls

    def errors(self, number: int, result: tuple[int, int, int]) -> tuple[int, str]:
        assert result[:2] == (number, self.rounds[number]), "it checks the results of the last launch"
        self.did.append("check")
        return int(self.wrong(number)), f"input {number}"


def entry_of(subject: Subject, launch: str = "graph", peer: bool = False) -> Contender:
    return Contender(Row(ranks=1, nodes=1, algorithm="x", peer=peer, launch=launch, check="ok"), subject)


def measured(subject: Subject, launch: str, iterations: int = 4, warmup: int = 1, **how: Any) -> Contender:
    """One entry, measured by one rank."""
    entry = entry_of(subject, launch, how.pop("peer", False))

    def host(_: int) -> None:
        with LineUp() as line_up:
            engine.measure(Ranks(), [entry], line_up, iterations, warmup, **how)

    World(1).run(host)
    return entry


CHECKED = ["check", "check", "check"]
TWO, THREE = [[0, 1], 0, 1], [[0, 1, 2], 0, 1, 2]
ONE_BY_ONE = [x for number in (0, 1, 2) for x in ([number], number, "check")]


@pytest.mark.parametrize("launch", ["graph", "eager"])
def test_inputs_change_before_every_launch_and_all_results_of_the_last_are_checked(launch: str, clock: Any) -> None:
    recorded = Recorded()
    entry = measured(recorded.subject, launch)
    even = ["begin", *TWO, *TWO, "check", "check"]  # a launch that is not timed, and one that is
    odd = ["begin", *THREE, *THREE, *CHECKED]
    assert recorded.did == ["begin", *THREE, *CHECKED, *even, *odd, *even, *odd]
    assert (entry.row.calls, entry.row.iterations, entry.row.check) == ((2, 3), TURNS, "ok")


def test_both_launches_are_timed_and_the_warm_up_is_longer_in_the_first_turn(clock: Any) -> None:
    recorded = Recorded()
    entry = measured(recorded.subject, "graph", iterations=9, warmup=4)
    launches = ["|" if x == "begin" else str(len(x)) for x in recorded.did if isinstance(x, list) or x == "begin"]
    assert "".join(launches) == "|33|3232232|323|232|323"
    assert len(entry.times_us) == 9


@pytest.mark.parametrize("alone", [False, True])
def test_what_is_wrong_is_counted_and_named(alone: bool, clock: Any) -> None:
    recorded = Recorded(wrong=lambda number: number == 1 and recorded.calls > 3, alone=alone)  # not in the preparation
    entry = measured(recorded.subject, "eager", iterations=5)
    assert (entry.row.check, entry.row.note, entry.row.iterations) == ("WRONG", "input 1", 5)


@pytest.mark.parametrize("iterations", [2, 5])
def test_every_call_that_is_alone_is_timed_and_checked_and_inputs_take_turns(iterations: int, clock: Any) -> None:
    recorded = Recorded(alone=True)
    call = recorded.call
    subject = recorded.subject
    object.__setattr__(subject, "call", lambda number: (clock.passes(8.0), call(number))[1])
    entry = measured(subject, "eager", iterations)
    called = [[0, 0, 1], [0, 1], [0, 2], [0, 0]] if iterations == 5 else [[0, 0], [0, 1]]
    turns = [["begin", *(x for number in turn for x in ([number], number, "check"))] for turn in called]
    assert recorded.did == ["begin", *ONE_BY_ONE, *(x for turn in turns for x in turn)]
    assert (entry.times_us, entry.row.calls, entry.row.median_us) == ([8.0] * iterations, (1,), 8.0)


def test_graphs_of_calls_that_are_alone_are_checked_by_the_last_call_of_the_last_replay(clock: Any) -> None:
    recorded = Recorded(alone=True)
    entry = measured(recorded.subject, "graph")
    even, odd = ["begin", *TWO, *TWO, "check"], ["begin", *THREE, *THREE, "check"]
    assert recorded.did == ["begin", *ONE_BY_ONE, *even, *odd, *even, *odd]
    assert (entry.row.calls, entry.row.check) == ((2, 3), "ok")


def test_times_are_of_a_part_and_of_ranks_that_take_part(clock: Any, on_gpus: Callable[..., list[Any]]) -> None:
    def host(pe: int) -> Contender:
        us = [8.0, 12.0, 99.0][pe]
        entry = entry_of(Subject(lambda _: clock.passes(us), lambda *_: (0, ""), parts=4, takes_part=pe < 2))
        with LineUp() as line_up:
            engine.measure(Ranks(), [entry], line_up, 4, 1)
        return entry

    for entry in on_gpus(host, 3):
        assert (entry.row.median_us, entry.row.skew_us) == pytest.approx((3.0, 1.0))


@pytest.mark.parametrize("alone", [False, True])
def test_the_simulator_changes_inputs_and_checks_each_call(alone: bool) -> None:
    recorded = Recorded(alone=alone)
    entry = entry_of(recorded.subject, "simulator")
    World(1).run(lambda _: simulate(Ranks(), entry))
    assert recorded.did == ["begin", *([*ONE_BY_ONE, [0], 0, "check"] if alone else 2 * [*THREE, *CHECKED])]
    assert (entry.row.check, entry.row.note, entry.row.calls) == ("ok", None, (1,))


def test_a_peer_that_fails_says_why_and_tdcoll_must_not(clock: Any) -> None:
    def fail(number: int) -> None:
        raise RuntimeError("no such\ntransport")

    subject = Subject(fail, lambda number, result: (0, ""))
    entry = measured(subject, "eager", peer=True)
    assert (entry.row.check, entry.row.note, entry.row.median_us) == ("not run", "no such transport", None)
    with pytest.raises(RuntimeError, match="no such"):
        measured(subject, "eager")
    found = World(2).run(lambda pe: Ranks().agree("make", lambda: fail(0) if pe else "made", True))
    assert found == [(None, "rank 1: no such transport"), (None, "no such transport")]


def test_the_simulator_has_no_times() -> None:
    with pytest.raises(TdcollError, match="needs GPUs"):
        World(1).run(lambda *_: graph_time_us(lambda: None))


def test_an_iteration_takes_as_long_as_its_slowest_rank() -> None:
    # Every rank is fast in most iterations; only the maximum over ranks shows that no iteration is. Skews 8, 7, 6, 4.
    times = [[9.0, 1.0, 1.0, 1.0], [1.0, 8.0, 1.0, 5.0], [1.0, 1.0, 7.0, 1.0]]
    assert summarize(times) == {"median_us": 7.5, "min_us": 5.0, "p90_us": 9.0, "skew_us": 6.5}
    assert summarize([[float(i) for i in range(1, 101)]])["p90_us"] == 90.0  # a time that was measured
    assert summarize([[3.0]])["p90_us"] == 3.0


@pytest.mark.parametrize("times", [[], [[]], [[1.0], [1.0, 2.0]]])
def test_ranks_without_times_or_with_different_numbers_of_them(times: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="same number of times"):
        summarize(times)


def test_a_ratio_is_the_peers_time_over_ours() -> None:
    assert [ratio(*times) for times in ((15.0, 3.0), (3.0, 6.0), (None, 3.0), (3.0, None))] == [5.0, 0.5, None, None]


def test_sizes_are_written_exactly() -> None:
    found = [format_bytes(n) for n in (0, 512, 1024, 1025, 3 << 20, 1 << 30)]
    assert found == ["0 B", "512 B", "1 KB", "1025 B", "3 MB", "1 GB"]


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
