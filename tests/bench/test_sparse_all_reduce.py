# SPDX-License-Identifier: Apache-2.0
"""The sparse all-reduce benchmark: command line, checks and counts on the simulator, measuring with a made-up clock."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch

import tdcoll
from tdcoll import runtime
from tdcoll.bench import engine, rows, sparse_peers
from tdcoll.bench import sparse_all_reduce as benchmark
from tdcoll.bench.arithmetic import floor_us, moved_rows
from tdcoll.bench.engine import Entry, Plan, Subject, measure_entries
from tdcoll.bench.job import Job
from tdcoll.bench.sparse_all_reduce import SparseAllReduce
from tdcoll.bench.timing import Launch, LineUp, Straggler
from tdcoll.testing import World

# ---------------------------------------------------------------------- arithmetic


def test_moved_rows_are_those_that_somebody_sends() -> None:
    held = [{1, 4, 5, 9}, {4, 5}, {5, 9, 11}, set()]
    sent = 0
    for row in set.union(*held):
        contributors = [rank for rank, its in enumerate(held) if row in its]
        owner = contributors[-1]
        sent += sum(1 for rank in contributors if rank != owner)  # to the owner
        sent += sum(1 for rank in range(4) if rank != owner)  # and the sum to everybody
    assert moved_rows(sum(map(len, held)), len(set.union(*held)), 4) == sent == 19
    assert moved_rows(7, 7, 1) == 0


def test_the_floor_is_bytes_over_rate() -> None:
    # 50,000 rows of 8 KiB on each of 8 ranks, 386,000 different ones.
    rows_moved = moved_rows(8 * 50_000, 386_000, 8)
    assert rows_moved == 14_000 + 386_000 * 7
    assert floor_us(rows_moved * 8192 / 8, 390) == pytest.approx(7131, abs=1)


@pytest.mark.parametrize(
    ("num_rows", "row_bytes", "room", "expected"),
    [(10, 8, 80, (1, 10)), (10, 8, 79, (2, 5)), (10, 8, 8, (10, 1)), (10, 8, 24, (4, 3)), (3, 8, 10**9, (1, 3))],
)
def test_pieces_of_a_dense_tensor(num_rows: int, row_bytes: int, room: int, expected: tuple[int, int]) -> None:
    number, each = sparse_peers.pieces(num_rows, row_bytes, room)
    assert (number, each) == expected
    assert number * each >= num_rows
    assert each * row_bytes <= room


def test_a_dense_tensor_of_which_no_row_fits() -> None:
    with pytest.raises(ValueError, match="7 bytes are free"):
        sparse_peers.pieces(10, 8, 7)


# ---------------------------------------------------------------------- the command line


def test_the_command_line() -> None:
    options = SparseAllReduce.parse(
        [
            *("--rows", "7,30,7", "--dims", "16", "--num-rows", "50", "--distributions", "zipf1.2,uniform"),
            *("--duplicates", "0,0.5,drawn", "--dtype", "float64", "--algorithms", "auto", "--peers="),
            *("--copy", "no", "--eager", "--iterations", "9", "--floor-GBps", "450.5", "--straggler"),
        ]
    )
    assert (options.rows, options.dims, options.num_rows) == ([7, 30], [16], 50)
    assert (options.distributions, options.duplicates) == (["zipf1.2", "uniform"], ["0", "0.5", "drawn"])
    assert (options.dtype, options.algorithms, options.peers) == (torch.float64, ["auto"], [])
    assert SparseAllReduce.forms(options) == [("coo", False)]
    assert (options.iterations, options.floor_GBps, options.straggler) == (9, 450.5, True)
    usual = SparseAllReduce.parse([])
    assert (usual.rows, usual.dims, usual.num_rows) == ([40], [8], 500)
    assert SparseAllReduce.forms(usual) == [("coo", True), ("coo", False), ("padded", None)]
    assert usual.peers == ["published", "allgather", "gloo", "dense"]
    assert SparseAllReduce.forms(SparseAllReduce.parse(["--graph"])) == [("padded", None)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--rows 501", "501 different rows are more than the 500 of --num-rows"),
        ("--rows 1,x", "expected a whole number of at least 1, got 'x'"),
        ("--rows ,", "expected at least one number"),
        ("--dims 0", "expected a whole number of at least 1"),
        ("--distributions normal", "expected uniform or zipf"),
        ("--duplicates 1.5", "expected 'drawn' or a fraction"),
        ("--duplicates 0.5 --dtype bfloat16", "no exact value in 16 bits"),
        ("--algorithms tree", "expected some of auto, owner, gather, dense"),
        ("--peers mpi", "expected some of published"),
        ("--copy maybe", "invalid choice"),
        ("--iterations 1", "expected a whole number of at least 2"),
        ("--floor-GBps 0", "expected a positive number of GB/s"),
        ("--floor-GBps fast", "expected a positive number of GB/s"),
        ("--graph --eager", "not allowed with argument"),
        ("--json no/such/folder/a.json", "there is no directory no/such/folder"),
    ],
)
def test_a_wrong_command_line_ends_with_status_2(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        SparseAllReduce.parse(arguments.split())
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_the_heap_holds_the_largest_size() -> None:
    options = SparseAllReduce.parse(["--rows", "1000,50000", "--dims", "64,2048", "--num-rows", "5000000"])
    need = SparseAllReduce.heap_bytes(options, 8)
    assert need > 9 * 50_000 * 8192
    assert need < 9 * 50_000 * 8192 * 1.05


# ---------------------------------------------------------------------- on the simulator


def run(arguments: str, n_pes: int, **world: Any) -> list[Any]:
    options = SparseAllReduce.parse(arguments.split())
    world.setdefault("heap_bytes", SparseAllReduce.heap_bytes(options, n_pes))
    return World(n_pes, **world).run(lambda _: SparseAllReduce(options).measure(lambda row: None))[0]


@pytest.mark.slow
def test_checks_and_counts_over_two_nodes() -> None:
    found = run(
        "--rows 6 --dims 4 --num-rows 20 --distributions zipf1 --algorithms owner --peers gloo", 4, ranks_per_node=2
    )
    assert [row.check for row in found] == ["ok"] * 3 + ["not run"]
    owner = found[0]
    assert (owner.label, found[1].label, found[2].label) == (
        "tdcoll owner",
        "tdcoll owner, no copy",
        "tdcoll owner, padded",
    )
    assert min(owner.counts["inter_node_bytes"]) > 0
    assert (owner.ranks, owner.nodes, owner.rows, owner.dim, owner.dtype) == (4, 2, 6, 4, "float32")
    assert owner.moved_rows == pytest.approx(24 - owner.union_rows + 3 * owner.union_rows)
    assert owner.bytes_per_rank == owner.moved_rows * 16 / 4
    assert owner.floor_us == pytest.approx(owner.bytes_per_rank / 390e3)
    assert owner.median_us is None
    assert "process group" in found[-1].note


def test_inputs_that_are_not_coalesced() -> None:
    found = run(
        "--rows 12 --dims 4 --num-rows 40 --distributions zipf1 --duplicates 0.5,drawn --algorithms auto --peers=", 2
    )
    assert [(row.duplicates, row.check) for row in found] == [(d, "ok") for d in ("0.5", "drawn") for _ in range(3)]
    assert found[0].note.startswith("took ")


def test_a_context_that_does_not_fit_is_a_row_that_says_so() -> None:
    found = run(
        "--rows 40 --dims 64 --algorithms owner --distributions uniform --copy yes --eager --peers=",
        2,
        heap_bytes=16384,
    )
    assert [row.check for row in found] == ["not run"]
    assert "heap" in found[0].note


def test_wrong_sums_are_rows_that_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    real = tdcoll.sparse_all_reduce

    def careless(*arguments: Any, **named: Any) -> torch.Tensor:
        result = real(*arguments, **named)
        if runtime.current().rank == 1:
            result._values()[2, 3] += 1
        return result

    monkeypatch.setattr(tdcoll, "sparse_all_reduce", careless)
    (row,) = run("--rows 8 --dims 4 --distributions uniform --algorithms owner --copy yes --eager --peers=", 2)
    assert row.check == "WRONG"
    assert row.note.startswith("rank 1, input 0: 1 wrong value(s), first: row ")


def test_results_of_the_call_before_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    real = tdcoll.sparse_all_reduce
    kept: dict[int, Any] = {}

    def stale(*arguments: Any, **named: Any) -> torch.Tensor:
        rank = runtime.current().rank
        before, kept[rank] = kept.get(rank), real(*arguments, **named)
        return kept[rank] if before is None else before

    monkeypatch.setattr(tdcoll, "sparse_all_reduce", stale)
    (row,) = run("--rows 8 --dims 4 --distributions uniform --algorithms owner --copy yes --eager --peers=", 2)
    assert row.check == "WRONG"


# ---------------------------------------------------------------------- measuring, with a made-up clock


class Clock:
    """Stands in for the GPU: events count, and an interval lasts ``step_us`` for each event between its ends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step_us: float = 8.0) -> None:
        ticks = itertools.count()

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                self.at = 0

            def record(self) -> None:
                self.at = next(ticks)

            def synchronize(self) -> None:
                pass

            def elapsed_time(self, other: Event) -> float:
                return (other.at - self.at) * step_us / 1e3

        def capture(call: Callable[[int], object], calls: int) -> Launch:
            def replay() -> None:
                for position in range(calls):
                    call(position)

            return Launch(replay, calls)

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr("tdcoll.bench.timing.pause", lambda us: None)
        monkeypatch.setattr(engine, "capture", capture)


def on_gpus(arguments: str, n_pes: int, shown: list[Any]) -> list[Any]:
    """The measuring path, in a world that says that it is not simulated."""
    options = SparseAllReduce.parse(arguments.split())
    world = World(n_pes, heap_bytes=SparseAllReduce.heap_bytes(options, n_pes))
    for owner in world.runtimes:
        owner.simulated = False

    def host(pe: int) -> list[Any]:
        return SparseAllReduce(options).measure(shown.append if pe == 0 else lambda row: None)

    return world.run(host)[0]


def test_the_measuring_path(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch)
    monkeypatch.setitem(sparse_peers.PEERS, "published", quick_peer)
    monkeypatch.setattr(benchmark, "calls_per_launch", lambda nbytes, world: (2, 3))
    shown: list[Any] = []
    found = on_gpus(
        "--rows 4,6 --dims 4 --distributions zipf1 --algorithms owner --peers published,dense --iterations 2 "
        "--warmup 1 --straggler",
        2,
        shown,
    )
    assert shown == found
    assert [row.label for row in found] == [
        *("tdcoll owner", "tdcoll owner, no copy", "tdcoll owner, padded", "published", "dense")
    ] * 2
    assert [row.launch for row in found[:5]] == ["eager", "eager", "graph", "eager", "eager"]
    for row in found:
        if row.algorithm == "dense":
            assert row.check == "not run"
            continue
        assert row.check == "ok"
        assert row.straggler
        assert row.median_us > 0
        assert row.gbps == pytest.approx(row.bytes_per_rank / row.median_us / 1e3)
        assert row.over_floor == pytest.approx(row.median_us / row.floor_us)
    owner, padded, peer = found[0], found[2], found[3]
    assert owner.iterations == 2
    assert owner.calls == (1,)
    assert owner.wall_us > 0
    assert padded.calls == (2, 3)
    assert padded.wall_us is None
    assert owner.ratios == {"published": pytest.approx(peer.median_us / owner.median_us)}
    assert padded.ratios == {}
    assert peer.iterations == 1


def quick_peer(data: Any) -> Subject:
    """Knows the answer."""

    def call(number: int) -> torch.Tensor:
        union = data.rows.unions[number].rows
        values = data._expected(number, 0, union.numel())
        return torch.sparse_coo_tensor(
            union[None], values, data.tensors[0].shape, is_coalesced=True, check_invariants=False
        )

    return sparse_peers.subject_of(data, call, most_iterations=1)


def measured(subject: Subject, launch: str, monkeypatch: pytest.MonkeyPatch, **plan: Any) -> Entry:
    """One entry, measured by one rank."""
    Clock(monkeypatch)
    entry = Entry("x", False, launch, subject)

    def host(_: int) -> None:
        with LineUp() as line_up:
            measure_entries(Job(), [entry], Plan(**{"iterations": 5, "warmup": 1, **plan}), line_up)

    World(1).run(host)
    return entry


def test_every_timed_call_is_checked_and_inputs_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []
    checked: list[Any] = []
    prepared: list[list[int]] = []

    def call(number: int) -> tuple[int, int]:
        called.append(number)
        return number, len(called)

    def errors(number: int, result: tuple[int, int]) -> tuple[int, str]:
        checked.append((number, result))
        return (1, f"call {result[1]}") if result[1] == 8 else (0, "")

    subject = Subject(call, errors, inputs=3, before=prepared.append, alone=True)
    entry = measured(subject, "eager", monkeypatch)
    # Three to prepare; then four turns, each with one that is not timed before.
    assert called == [0, 1, 2, *(0, 0, 1), *(0, 1), *(0, 2), *(0, 0)]
    assert prepared == [[number] for number in called]
    assert checked == [(number, (number, i + 1)) for i, number in enumerate(called)]
    assert len(entry.times_us) == len(entry.walls_us) == 5
    assert entry.times_us == [8.0] * 5
    assert entry.summary.median_us == 8.0
    assert (entry.errors, entry.where) == (1, "call 8")
    assert entry.common(FakeJob(), True)["check"] == "WRONG"


class FakeJob:
    """As much of a job as a row asks for."""

    topology = type("Topology", (), {"world_size": 3, "n_nodes": 1})()
    owner = type("Owner", (), {"simulated": False})()


def test_graphs_are_checked_by_the_last_call_of_the_last_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = [0, 0, 0]
    checked: list[tuple[int, int]] = []

    def before(numbers: Sequence[int]) -> None:
        for number in dict.fromkeys(numbers):
            rounds[number] += 1

    def errors(number: int, result: tuple[int, int]) -> tuple[int, str]:
        checked.append((number, result[0]))
        return int(result != (number, rounds[number])), "stale"

    call = lambda number: (number, rounds[number])  # noqa: E731
    subject = Subject(call, errors, inputs=3, before=before, calls=(2, 3), alone=True)
    entry = measured(subject, "graph", monkeypatch)
    assert checked[:3] == [(0, 0), (1, 1), (2, 2)]
    assert checked[3:] == [(1, 1), (2, 2)] * 2  # graphs of two calls and of three were last in turn
    assert entry.errors == 0
    assert entry.calls == (2, 3)
    assert entry.times_us == [pytest.approx(8 / n) for n in (3, 2, 3, 2, 3)]
    assert entry.walls_us == []
    assert entry.wall_us is None


def test_a_peer_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(number: int) -> None:
        raise RuntimeError("no such\ntransport")

    Clock(monkeypatch)
    entry = Entry("x", True, "eager", Subject(fail, lambda number, result: (0, "")))

    def host(_: int) -> None:
        with LineUp() as line_up:
            measure_entries(Job(), [entry], Plan(4, 1, Straggler(0, 1)), line_up)

    World(1).run(host)
    assert entry.problem == "no such transport"
    assert entry.common(FakeJob(), False)["check"] == "not run"
    assert entry.times_us == []


# ---------------------------------------------------------------------- as a command


@pytest.mark.slow
def test_the_command_on_the_simulator(launch: Callable[..., CompletedProcess[str]], tmp_path: Path) -> None:
    """Also the only test of the peers: over gloo, with as many rows on every rank and with different numbers."""
    file = tmp_path / "result.json"
    peers = ",".join(sparse_peers.PEERS)
    done = launch(
        *("--simulate", "--nproc", "3", "-m", "tdcoll.bench", "sparse_all_reduce", "--rows", "12", "--dims", "4"),
        *("--num-rows", "60", "--distributions", "zipf1.2", "--duplicates", "0,drawn", "--json", str(file)),
        *("--algorithms", "auto,dense", "--copy", "yes", "--eager", "--peers", peers),
    )
    assert done.returncode == 0, done.stderr
    head, found = rows.load(file)
    labels = ["tdcoll auto", "tdcoll dense", *sparse_peers.PEERS]
    assert [(row.label, row.check) for row in found] == [(label, "ok") for label in labels] * 2
    assert all(row.counts for row in found if not row.peer)
    assert found[-1].note.startswith("only the all-reduce of 0.0 GB")
    assert head["command"].startswith("bash launch.sh --nproc 3 --simulate -m tdcoll bench sparse_all_reduce --rows 12")
    assert "tdcoll auto" in done.stdout
    assert str(tmp_path) not in json.dumps(head)
