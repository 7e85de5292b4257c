# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of sparse all-reduce, signals and all-reduce + RMSNorm: what runs, what is counted, and mistakes."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch

import tdcoll
from tdcoll import runtime
from tdcoll.testing import World, explore
from tdcoll.tools.bench import all_reduce_rms_norm as norms
from tdcoll.tools.bench import rows
from tdcoll.tools.bench import sparse_all_reduce as bench
from tdcoll.tools.bench.rows import Row
from tdcoll.tools.bench.signal import SENDS, Signalling
from tdcoll.tools.bench.sparse_all_reduce import INPUTS, PEERS, DrawnRows, SparseCase, SparseData, draw

CPU = torch.device("cpu")
WORLD = 3


@pytest.mark.parametrize("distribution", ["uniform", "zipf0.9", "zipf1.2"])
@pytest.mark.parametrize("count", [1, 40, 500])
def test_distinct_rows_are_ascending_and_the_same_on_every_rank(distribution: str, count: int) -> None:
    of = DrawnRows(distribution, 500, count, 2)
    lists = [one for lists in draw(of) for one in lists]
    for one in lists:
        assert one.shape == (count,)
        assert (one[1:] > one[:-1]).all()
        assert 0 <= one[0] <= one[-1] < 500
    draw.cache_clear()
    assert all((one == other).all() for one, other in zip(lists, (x for y in draw(of) for x in y), strict=True))
    if count == 40:
        assert len({tuple(one) for one in lists}) == 2 * INPUTS


def test_rows_are_as_often_as_their_place_says() -> None:
    weights = torch.arange(1, 1001, dtype=torch.float64) ** -1.2
    p, q, *_ = expected = weights / weights.sum()
    ones = [int(one[0]) for lists in draw(DrawnRows("zipf1.2", 1000, 1, 5_000)) for one in lists]
    drawn = torch.bincount(torch.tensor(ones), minlength=1000).double() / len(ones)
    assert torch.allclose(drawn[:5], expected[:5], atol=0.02)
    # The first two different ones that are drawn.
    pairs = [list(one) for lists in draw(DrawnRows("zipf1.2", 1000, 2, 600)) for one in lists]
    both = sum(pair == [0, 1] for pair in pairs) / len(pairs)
    assert both == pytest.approx(float(p * q / (1 - p) + p * q / (1 - q)), abs=0.03)
    uniform = [torch.from_numpy(one) for lists in draw(DrawnRows("uniform", 1000, 100, 100)) for one in lists]
    tenths = torch.bincount(torch.cat(uniform) // 100, minlength=10)
    assert (tenths - 3000).abs().max() < 300  # standard deviation about 50


def made(dtype: torch.dtype = torch.float32, dim: int = 5) -> list[SparseData]:
    """The data of all ranks."""
    return [SparseData(DrawnRows("zipf1.1", 60, 20, WORLD), dim, dtype, rank, CPU) for rank in range(WORLD)]


def result(ranks: list[SparseData], number: int) -> torch.Tensor:
    """The correct sparse result, by another way than the check's."""
    union = torch.unique(torch.cat([data.tensors[number]._indices()[0] for data in ranks]))
    values = sum(data.tensors[number].double().to_dense() for data in ranks)[union].to(ranks[0].dtype)
    shape = ranks[0].tensors[0].shape
    return torch.sparse_coo_tensor(union[None], values, shape, is_coalesced=True, check_invariants=False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_right_sums_pass_in_every_round(dtype: torch.dtype) -> None:
    ranks = made(dtype)
    for number, rounds in itertools.product(range(INPUTS), (0, 1, 70, ranks[0]._numbers.rounds - 72)):
        for data in ranks:
            for _ in range(rounds):
                data.advance(number)
        good = result(ranks, number)  # the last of them has the largest values
        for data in ranks:
            assert data.tensors[number].is_coalesced()
            assert data.tensors[number]._nnz() == 20
            assert data.errors_of(number, good) == (0, "")
    if dtype.itemsize == 2:
        total = sum(data.tensors[1].double().to_dense() for data in ranks)
        assert total.max() > 0.6 * {torch.float16: 2048, torch.bfloat16: 256}[dtype]


@pytest.mark.parametrize("mistake", ["next row", "other input", "old round", "no rank 2", "rank 0 twice", "a shift"])
def test_sums_of_something_else_are_wrong(mistake: str) -> None:
    ranks = made(dim=16)
    before = result(ranks, 1)
    for data in ranks:
        data.advance(1)
    good, given = result(ranks, 1), [data.tensors[1] for data in ranks]
    values, rows = good._values().clone(), good._indices()[0]
    held = torch.isin(rows, given[0]._indices()[0]) & torch.isin(rows, given[2]._indices()[0])
    at = int(held.nonzero()[0])
    theirs = {rank: given[rank]._values()[given[rank]._indices()[0] == rows[at]][0] for rank in (0, 2)}
    values[at] = {
        "next row": values[at + 1],
        "other input": result(ranks, 2)._values()[at],
        "old round": before._values()[at],
        "no rank 2": values[at] - theirs[2],
        "rank 0 twice": values[at] - theirs[2] + theirs[0],
        "a shift": values[at].roll(1),
    }[mistake].clone()
    wrong = torch.sparse_coo_tensor(good._indices(), values, good.shape, is_coalesced=True, check_invariants=False)
    count, where = ranks[1].errors_of(1, wrong)
    assert count == int((values[at] != good._values()[at]).sum()) >= 10
    assert f"rank 1, input 1: {count} wrong value(s), first: place [{at}, " in where


def test_wrong_rows_are_named() -> None:
    (data, *_) = ranks = made()
    good = result(ranks, 0)
    indices, values = good._indices()[0], good._values()
    assert "expected" in data.errors(0, indices[1:], values[1:])[1]
    other = indices.clone()
    other[3] += 1
    assert data.errors(0, other, values)[1].startswith(
        "rank 0, input 0: 1 wrong row number(s), first: place [3]: expected"
    )
    values[2, 4] = float("nan")
    assert data.errors(0, indices, values)[0] == 1
    unsorted = torch.sparse_coo_tensor(good._indices(), good._values(), good.shape, check_invariants=False)
    assert "coalesced: False" in data.errors_of(0, unsorted)[1]
    assert "expected a coalesced tensor of (60, 5)" in data.errors_of(0, good.to_dense()[1:].to_sparse())[1]


def test_moved_rows_are_those_that_somebody_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    lists = [[[1, 4, 5, 9], [4, 5, 9, 11], [5, 9, 11, 12]], [[1, 2, 3, 4], [1, 2, 3, 4], [5, 6, 7, 8]]]
    lists.append([[0, 1, 2, 3]] * 3)
    held = [sum(row in its for its in one) for one in lists for row in set().union(*one)]
    sent = sum(contributors - 1 + (WORLD - 1) for contributors in held)  # to the owner, and the sum to everybody
    monkeypatch.setattr(bench, "draw", lambda of: [[torch.tensor(one).numpy() for one in held] for held in lists])
    monkeypatch.setattr(SparseData, "_input", lambda self, rank, number: None)
    data = SparseData(DrawnRows("uniform", 60, 4, WORLD), 5, torch.float32, 0, CPU)
    assert (data.moved_rows, data.union_rows) == (pytest.approx(sent / 3), (6 + 8 + 4) / 3)


ONE = "--rows 8 --dims 4 --distributions uniform --algorithms owner --eager --peers="


@pytest.mark.slow
def test_checks_over_two_nodes(rows_of: Callable[..., list[Any]]) -> None:
    given = "--rows 6 --dims 4 --num-rows 20 --distributions zipf1 --algorithms auto --peers published"
    owner, *others = rows_of(SparseCase, given, 4, ranks_per_node=2)
    assert [row.check for row in (owner, *others)] == ["ok"] * 3 + ["not run"]
    assert [row.label for row in others[:2]] == ["tdcoll auto, no copy", "tdcoll auto, padded"]
    facts = owner.facts
    assert (facts["took"], "took" in others[-1].facts) == ("gather", False)
    assert (facts["rows"], facts["dim"], facts["dtype"], owner.median_us) == (6, 4, "float32", None)
    assert facts["moved_rows"] == pytest.approx(24 + 2 * facts["union_rows"])
    assert facts["bytes_per_rank"] == facts["moved_rows"] * 16 / 4
    assert facts["floor_us"] == pytest.approx(facts["bytes_per_rank"] / 390e3)
    assert "process group" in others[-1].note


@pytest.mark.parametrize("mistake", ["a value", "the call before"])
def test_wrong_sums_are_rows_that_say_so(mistake: str, monkeypatch: Any, rows_of: Any) -> None:
    real = tdcoll.sparse_all_reduce
    kept: dict[int, Any] = {}

    def careless(*arguments: Any, **named: Any) -> torch.Tensor:
        rank = runtime.current().rank
        before, kept[rank] = kept.get(rank), real(*arguments, **named)
        if mistake == "a value" and rank == 1:
            kept[rank]._values()[2, 3] += 1
        return before if mistake == "the call before" and before is not None else kept[rank]

    monkeypatch.setattr(tdcoll, "sparse_all_reduce", careless)
    row = rows_of(SparseCase, ONE, 2)[0]
    assert row.check == "WRONG"
    assert row.note.startswith(
        "rank 1, input 0: 1 wrong value(s), first: place [2, 3]: " if mistake == "a value" else "rank 0"
    )


def test_the_heap_holds_the_largest_size() -> None:
    options = SparseCase.parse(["--rows", "1000,50000", "--dims", "64,2048", "--num-rows", "5000000"])
    need = SparseCase.heap_bytes(options, 8)
    assert 9 * 50_000 * 8192 < need < 9 * 50_000 * 8192 * 1.05


def test_the_measuring_path(clock: Any, measured: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    given: set[float] = set()

    def timed(us: float, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        clock.passes(us)
        if us == 12.0:
            given.add(float(arguments[0]._values().sum()))
        return function(*arguments, **named)

    monkeypatch.setitem(PEERS, "published", functools.partial(timed, 12.0, tdcoll.sparse_all_reduce))
    for name in ("sparse_all_reduce", "sparse_all_reduce_padded"):
        monkeypatch.setattr(tdcoll, name, functools.partial(timed, 8.0, getattr(tdcoll, name)))
    options = "--iterations 2 --rows 6 --dims 4 --distributions zipf1 --algorithms owner"
    found = measured(SparseCase, f"{options} --peers published,allgather")
    assert [(row.label, row.launch, row.check, row.median_us, row.calls, row.iterations) for row in found] == [
        *(("tdcoll owner", "eager", "ok", 8.0, (1,), 2), ("tdcoll owner, no copy", "eager", "ok", 8.0, (1,), 2)),
        *(("tdcoll owner, padded", "graph", "ok", 8.0, (2, 3), 2), ("published", "eager", "ok", 12.0, (1,), 2)),
        ("allgather", "eager", "not run", None, (1,), 0),
    ]
    assert len(given) > 2 * INPUTS, "inputs change"


@pytest.mark.slow
def test_the_command_on_the_simulator(launch: Callable[..., CompletedProcess[str]], tmp_path: Path) -> None:
    """Also the only test of the peers: over gloo."""
    file = tmp_path / "result.json"
    done = launch(
        *("--simulate", "--nproc", "3", "-m", "tdcoll", "bench", "sparse_all_reduce", "--rows", "12", "--dims", "4"),
        *("--num-rows", "60", "--distributions", "zipf1.2", "--json", str(file)),
        *("--algorithms", "auto,dense", "--eager", "--peers", ",".join(PEERS)),
    )
    assert done.returncode == 0, done.stderr
    head, found = rows.load(file)
    labels = [f"tdcoll {name}{form}" for name in ("auto", "dense") for form in ("", ", no copy")]
    assert [(row.label, row.check) for row in found] == [(label, "ok") for label in (*labels, *PEERS)]
    assert head["command"].startswith("bash launch.sh --nproc 3 --simulate -m tdcoll bench sparse_all_reduce --rows 12")
    assert "tdcoll auto" in done.stdout
    assert str(tmp_path) not in json.dumps(head)


def simulated(world: World, arguments: str) -> list[Row]:
    options = Signalling.parse(arguments.split())
    return world.run(lambda _: Signalling(options).measure(lambda rows: None))[0]


def key(row: Row) -> tuple[Any, ...]:
    return row.facts["peer_rank"], row.algorithm


def test_signals_between_all_pairs() -> None:
    rows = simulated(World(3), "--rounds 2")
    assert {row.check for row in rows} == {"ok"}
    assert [key(row) for row in rows] == [(peer, send) for peer in (1, 2) for send in SENDS]


def test_stores_stay_inside_a_node() -> None:
    found = {key(row): row for row in simulated(World(4, ranks_per_node=2), "--rounds 2")}
    assert found[1, "st_release"].facts["same_node"]
    assert not found[2, "signal_block"].facts["same_node"]
    assert [key for key, row in found.items() if row.check != "ok"] == [(2, "st_release"), (3, "st_release")]
    assert found[2, "st_release"].note == "needs ranks that can store to each other's memory"


@pytest.mark.slow
def test_with_late_deliveries() -> None:
    def case(world: World) -> None:
        assert {row.check for row in simulated(world, "--rounds 3")} == {"ok"}

    explore(case, n_pes=3, seeds=6)


def test_a_signal_that_is_not_what_it_should_be_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Signalling.launch

    def spoilt(self: Any, *launch: Any) -> None:
        real(self, *launch)
        if self.topology.rank == 1:
            self.signals[0] += 1

    monkeypatch.setattr(Signalling, "launch", spoilt)
    found = {key(row): row for row in simulated(World(2), "--rounds 3")}
    assert found[1, "st_release"].check == "WRONG"
    assert found[1, "st_release"].note == "rank 1: expected signals of 3, got 4, counted 3"


@pytest.mark.slow
def test_the_measuring_path_of_signals(
    clock: Any, measured: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Signalling.launch

    def timed(self: Any, peer: int, direct: bool) -> None:
        real(self, peer, direct)
        if self.topology.rank in (0, peer):
            clock.passes(2.0 + 2 * 3.0)

    monkeypatch.setattr(Signalling, "launch", timed)
    rows = measured(Signalling, "--rounds 2 --iterations 2", 3)
    assert {(row.check, row.launch, row.calls, row.median_us) for row in rows} == {("ok", "graph", (1, 2), 2.0)}


COMMON = "--algorithms auto,composed --peers tdcoll-torch,nccl"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_everything_is_checked_and_peers_say_why_not(dtype: str, rows_of: Callable[..., list[Any]]) -> None:
    rows = rows_of(norms.AllReduceNorm, f"{COMMON} --dtype {dtype}", 2, heap_bytes=1 << 24)
    ours = ("tdcoll auto", "tdcoll composed", "tdcoll-torch")
    assert {(row.facts["rows"], row.label): row.check for row in rows} == {
        **{(rows, label): "ok" for rows in (1, 3) for label in ours},
        **{(rows, "nccl"): "not run" for rows in (1, 3)},
    }
    assert {row.note for row in rows if row.check == "not run"} == {"needs GPUs"}
    assert rows[0].facts == {"rows": 1, "hidden": 64, "dtype": dtype, "took": "one_shot"}
    assert "took" not in rows[1].facts


@pytest.mark.parametrize("mistake", ["the residual", "a rank", "the weight"])
def test_a_wrong_result_is_seen(mistake: str, monkeypatch: Any, rows_of: Any) -> None:
    real = norms.all_reduce_rms_norm

    def careless(x: Any, residual: Any, weight: Any, **named: Any) -> Any:
        out, new = real(x, residual, weight, **named)
        new[-1, 5] += mistake == "the residual"
        out[-1, 5] *= 1.1 if mistake == "the weight" else 1
        return norms._norm(x, residual, weight) if mistake == "a rank" else (out, new)

    monkeypatch.setattr(norms, "all_reduce_rms_norm", careless)
    rows = rows_of(norms.AllReduceNorm, "--rows 2 --algorithms auto", 2, heap_bytes=1 << 24)
    assert [row.check for row in rows] == ["WRONG"]
