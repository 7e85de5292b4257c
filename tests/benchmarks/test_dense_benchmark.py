# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of dense collectives: checks on the simulator, measuring with a made-up clock, the
command.

tests/gpu shows that all baselines are right on GPUs.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch

import tdcoll
from benchmarks.dense import dense_benchmark
from benchmarks.dense_baselines import BASELINES
from tdcoll import runtime
from tdcoll.testing import World
from tdcoll.tools.measure.buffers import Buffers, SharedBuffers, buffer_bytes
from tdcoll.tools.measure.collectives import DENSE_CALLS
from tdcoll.tools.measure.dense import dense_calls
from tdcoll.tools.measure.engine import JobRanks
from tdcoll.tools.measure.results import load, save
from tdcoll.tools.measure.timing import LineUp

GATHER = dense_benchmark("all_gather")
REDUCE = dense_benchmark("all_reduce")
SCATTER = dense_benchmark("reduce_scatter")
CPU = torch.device("cpu")


def test_the_heap_holds_what_the_sizes_need(monkeypatch: pytest.MonkeyPatch) -> None:
    def need(algorithms: str, peers: str = "nccl") -> int:
        arguments = ["-b", "1M", "-e", "1M", "--algorithms", algorithms, "--peers", peers]
        return GATHER.heap_bytes(GATHER.parse(arguments), 4)

    plain = need("1d")
    assert plain >= 2 * 4 << 20
    assert need("in-place") == plain + buffer_bytes(DENSE_CALLS["all_gather"], 1 << 20, 4, 3)
    monkeypatch.setattr("tdcoll.tools.measure.engine.LAUNCH_CALLS", (20, 21))
    assert need("1d", "fcollect") == plain + 21 * (5 << 20)


def test_the_heap_holds_what_a_context_takes_besides_its_slots() -> None:
    """Words of LL, above all, of which two ranks have the most; with buffers in the heap and a
    line-up."""
    options = GATHER.parse(["-b", "1M", "-e", "1M", "--algorithms", "in-place"])

    def host(pe: int) -> None:
        ranks = JobRanks()
        with LineUp(), dense_calls(ranks, GATHER.call, 1 << 20, options.dtype, None) as calls:
            assert calls.context.ll_bytes == 1 << 20
            assert len(calls.buffers.in_heap.results) == 3
        assert tdcoll.heap_info().used == 0

    World(2, heap_bytes=GATHER.heap_bytes(options, 2)).run(host)


def test_checks_of_puts_over_two_nodes(rows_of: Callable[..., list[Any]]) -> None:
    rows = rows_of(GATHER, "-b 1K -e 4K --algorithms 1d,2d,in-place", 4, ranks_per_node=2)
    assert [row.check for row in rows] == ["ok", "ok", "ok", "not run"] * 2
    notes = {(row.facts["bytes_per_rank"], row.algorithm): row.note for row in rows}
    assert notes[1024, "nccl"] == "needs GPUs"


def test_facts_of_rows_and_calls_that_are_not_supported(rows_of: Callable[..., list[Any]]) -> None:
    options = "-b 1K -e 1K --dtype bfloat16 --algorithms auto,1d,direct --peers="
    rows = rows_of(SCATTER, options, 4, ranks_per_node=2)
    assert [row.check for row in rows] == ["ok", "ok", "not run"]
    assert "needs one node whose ranks can store" in rows[2].note
    facts = {
        "bytes_per_rank": 1024,
        "operation": "reduce_scatter",
        "dtype": "bfloat16",
        "op": "sum",
    }
    assert rows[0].facts == {**facts, "took": "1d", "sms": 4}
    assert rows[1].facts == {**facts, "sms": 4}
    assert {row.median_us for row in rows} == {None}


@pytest.mark.parametrize("bench", [REDUCE, SCATTER])
def test_every_algorithm_on_one_node(bench: Any, rows_of: Callable[..., list[Any]]) -> None:
    """With a mean of three, too, which baselines round in other places."""
    names = [name for name in bench.call.spec.names if name != "2d"]
    if bench is REDUCE:
        names += ["symmetric", "in-place"]
    rows = rows_of(bench, f"-b 252 -e 252 --algorithms {','.join(names)} --op mean", 3)
    *ours, baseline = rows
    assert [row.check for row in ours] == ["ok"] * len(names)
    assert baseline.check == "not run"
    assert baseline.note == (
        "rounds a mean over 3 ranks more than once: it cannot be checked to the bit"
    )


@pytest.mark.parametrize("mistake", ["an element", "the call before"])
@pytest.mark.parametrize("bench", [GATHER, REDUCE, SCATTER])
def test_wrong_results_are_rows_that_say_so(
    bench: Any, mistake: str, monkeypatch: pytest.MonkeyPatch, rows_of: Any
) -> None:
    real = getattr(tdcoll, bench.name)
    last_results: dict[int, torch.Tensor] = {}

    def careless(
        tensor: torch.Tensor, *op: Any, ctx: Any, out: torch.Tensor, **named: Any
    ) -> torch.Tensor:
        new = real(tensor, *op, ctx=ctx, out=out, **named).clone()
        if mistake == "the call before":
            out.copy_(last_results.get(ctx.rank, new))
            last_results[ctx.rank] = new
        elif ctx.rank == 1:
            out[-1] += 1
        return out

    monkeypatch.setattr(tdcoll, bench.name, careless)
    (row,) = rows_of(bench, "-b 64 -e 64 --algorithms direct --peers=", 2)
    assert row.check == "WRONG"
    if mistake == "an element":
        last = bench.call.sizes(64, 2)[1] // 4 - 1
        text = f"rank 1: 1 wrong element(s), first: call 0, element {last}: expected "
    else:
        text = "first: call 1, element "
    assert text in row.note


@pytest.mark.parametrize("bench", [GATHER, REDUCE, SCATTER])
def test_the_measuring_path(
    bench: Any, clock: Any, measured: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Consecutive calls take different inputs; rank 1 is the slowest, and the skew says by how
    much."""
    real = getattr(tdcoll, bench.name)
    inputs: list[int] = []

    def timed(tensor: torch.Tensor, *op: Any, **named: Any) -> torch.Tensor:
        rank = runtime.current().rank
        clock.passes(5.0 + rank)
        if rank == 0:
            inputs.append(tensor.data_ptr())
        return real(tensor, *op, **named)

    monkeypatch.setattr(tdcoll, bench.name, timed)
    rows = measured(bench, "-b 64 -e 64 --algorithms direct --both")
    assert [(row.algorithm, row.launch, row.check) for row in rows] == [
        ("direct", "graph", "ok"),
        ("direct", "eager", "ok"),
        ("nccl", "graph", "not run"),
        ("nccl", "eager", "not run"),
    ]
    for row in rows[:2]:
        assert (row.median_us, row.min_us, row.skew_us) == pytest.approx((6.0, 6.0, 1.0))
        assert (row.calls, row.iterations) == ((2, 3), 4)
    assert len(set(inputs)) == 3
    assert all(one != following for one, following in itertools.pairwise(inputs))
    head = {
        "benchmark": bench.name,
        "command": "x",
        "started": "2031-02-03",
        "provenance": {},
    }
    save(tmp_path / "r.json", head, rows)
    assert load(tmp_path / "r.json")[1] == rows


@pytest.mark.slow
def test_the_command_on_the_simulator(
    launch: Callable[..., CompletedProcess[str]], tmp_path: Path
) -> None:
    file = tmp_path / "result.json"
    table = tmp_path / "table.json"
    table.write_text('{"tuning": "tdcoll", "version": 5, "tables": []}')
    done = launch(
        *("--simulate", "--nproc", "2", "-m", "tdcoll", "bench", "all_gather"),
        *("-b", "1K", "-e", "1K", "--algorithms", "1d,in-place", "--json", str(file)),
        env={"TDCOLL_TUNING": str(table)},
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(file.read_text())
    assert [(row["algorithm"], row["check"]) for row in result["rows"]] == [
        ("1d", "ok"),
        ("in-place", "ok"),
        ("nccl", "not run"),
    ]
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    heading, columns, first, *_, last = lines
    assert heading == f"# 2 rank(s) on 1 node(s): {result['command']}"
    assert columns.startswith("# bytes per rank ranks nodes algorithm launch ")
    assert first.startswith("1 KB 2 1 tdcoll 1d simulator -")
    assert first.endswith(" ok")
    assert last.endswith("not run: needs GPUs")
    assert result["provenance"]["simulated"] is True
    assert result["provenance"]["environment"]["TDCOLL_TUNING"] == "table.json"
    assert str(tmp_path) not in file.read_text()


def shared_buffers() -> SharedBuffers:
    """Return the tensors that the all-gather benchmark gives to a baseline."""

    def new(**settings: Any) -> Buffers:
        call = DENSE_CALLS["all_gather"]
        return Buffers(call, 8, [0], runtime.current().rank, torch.uint8, CPU, sets=2, **settings)

    return SharedBuffers(new)


@pytest.mark.parametrize(
    "name", [name for name, baseline in BASELINES.items() if baseline.collective == "all_gather"]
)
def test_baselines_without_gpus_say_why(name: str) -> None:
    with pytest.raises(RuntimeError, match="needs GPUs"):
        BASELINES[name].make(shared_buffers(), CPU, lambda buffers: None)


@pytest.mark.parametrize("bench", [REDUCE, SCATTER])
def test_baselines_that_only_add_say_so(bench: Any, measured: Callable[..., list[Any]]) -> None:
    names = [name for name, baseline in BASELINES.items() if baseline.collective == bench.name]
    options = f"-b 64 -e 64 --op max --algorithms= --peers {','.join(names)}"
    rows = measured(bench, options)
    assert [row.algorithm for row in rows] == names
    assert {(row.check, row.note) for row in rows} == {
        ("not run", "has sums only, and --op is max")
    }
