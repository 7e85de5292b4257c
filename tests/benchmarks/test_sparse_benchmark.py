# SPDX-License-Identifier: Apache-2.0
"""The benchmark of sparse all-reduces: what runs, what is counted, and mistakes."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch

import tdcoll
from benchmarks.sparse_all_reduce import BASELINES, SparseBenchmark
from benchmarks.sparse_data import INPUTS
from tdcoll import runtime
from tdcoll.tools.measure.results import Row, load

LABEL = SparseBenchmark.columns.label


@pytest.mark.slow
def test_checks_over_two_nodes(rows_of: Callable[..., list[Any]]) -> None:
    options = (
        "--rows 6 --dims 4 --num-rows 20 --distributions zipf1 --algorithms auto --peers published"
    )
    rows = rows_of(SparseBenchmark, options, 4, ranks_per_node=2)
    assert [(LABEL(row), row.check) for row in rows] == [
        ("tdcoll auto", "ok"),
        ("tdcoll auto, no copy", "ok"),
        ("tdcoll auto, padded", "ok"),
        ("published", "not run"),
    ]
    facts = rows[0].facts
    assert (facts["took"], "took" in rows[-1].facts) == ("gather", False)
    assert (facts["rows"], facts["dim"], facts["dtype"]) == (6, 4, "float32")
    assert rows[0].median_us is None
    assert facts["moved_rows"] == pytest.approx(24 + 2 * facts["union_rows"])
    assert facts["bytes_per_rank"] == facts["moved_rows"] * 16 / 4
    assert facts["floor_us"] == pytest.approx(facts["bytes_per_rank"] / 390e3)
    assert "process group" in rows[-1].note


@pytest.mark.parametrize("mistake", ["a value", "the call before"])
def test_wrong_sums_are_rows_that_say_so(
    mistake: str, monkeypatch: pytest.MonkeyPatch, rows_of: Any
) -> None:
    real = tdcoll.sparse_all_reduce
    last_results: dict[int, torch.Tensor] = {}

    def careless(*arguments: Any, **named: Any) -> torch.Tensor:
        rank = runtime.current().rank
        before = last_results.get(rank)
        new = real(*arguments, **named)
        last_results[rank] = new
        if mistake == "a value" and rank == 1:
            new._values()[2, 3] += 1
        if mistake == "the call before" and before is not None:
            return before
        return new

    monkeypatch.setattr(tdcoll, "sparse_all_reduce", careless)
    options = "--rows 8 --dims 4 --distributions uniform --algorithms owner --eager --peers="
    row = rows_of(SparseBenchmark, options, 2)[0]
    assert row.check == "WRONG"
    if mistake == "a value":
        assert row.note.startswith("rank 1, input 0: 1 wrong value(s), first: place [2, 3]: ")
    else:
        assert row.note.startswith("rank 0")


def test_the_heap_holds_the_largest_size() -> None:
    arguments = ["--rows", "1000,50000", "--dims", "64,2048", "--num-rows", "5000000"]
    need = SparseBenchmark.heap_bytes(SparseBenchmark.parse(arguments), 8)
    assert 9 * 50_000 * 8192 < need < 9 * 50_000 * 8192 * 1.05


def test_the_measuring_path(
    clock: Any, measured: Callable[..., list[Row]], monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs: set[float] = set()

    def timed(us: float, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        clock.passes(us)
        if us == 12.0:
            inputs.add(float(arguments[0]._values().sum()))
        return function(*arguments, **named)

    published = functools.partial(timed, 12.0, tdcoll.sparse_all_reduce)
    monkeypatch.setitem(BASELINES, "published", published)
    for name in ("sparse_all_reduce", "sparse_all_reduce_padded"):
        monkeypatch.setattr(tdcoll, name, functools.partial(timed, 8.0, getattr(tdcoll, name)))
    options = "--iterations 2 --rows 6 --dims 4 --distributions zipf1 --algorithms owner --peers published,allgather"
    rows = measured(SparseBenchmark, options)
    assert [(LABEL(row), row.launch, row.check, row.median_us, row.calls) for row in rows] == [
        ("tdcoll owner", "eager", "ok", 8.0, (1,)),
        ("tdcoll owner, no copy", "eager", "ok", 8.0, (1,)),
        ("tdcoll owner, padded", "graph", "ok", 8.0, (2, 3)),
        ("published", "eager", "ok", 12.0, (1,)),
        ("allgather", "eager", "not run", None, (1,)),
    ]
    assert [row.iterations for row in rows] == [2, 2, 2, 2, 0]
    assert len(inputs) > 2 * INPUTS, "inputs change"


@pytest.mark.slow
def test_the_command_on_the_simulator(
    launch: Callable[..., CompletedProcess[str]], tmp_path: Path
) -> None:
    """Also the only test of the baselines: over gloo."""
    file = tmp_path / "result.json"
    done = launch(
        *("--simulate", "--nproc", "3", "-m", "tdcoll", "bench", "sparse_all_reduce"),
        *("--rows", "12", "--dims", "4", "--num-rows", "60", "--distributions", "zipf1.2"),
        *("--algorithms", "auto,dense", "--eager", "--peers", ",".join(BASELINES)),
        *("--json", str(file)),
    )
    assert done.returncode == 0, done.stderr
    head, rows = load(file)
    assert [(LABEL(row), row.check) for row in rows] == [
        ("tdcoll auto", "ok"),
        ("tdcoll auto, no copy", "ok"),
        ("tdcoll dense", "ok"),
        ("tdcoll dense, no copy", "ok"),
        ("published", "ok"),
        ("allgather", "ok"),
    ]
    start = "bash launch.sh --nproc 3 --simulate -m tdcoll bench sparse_all_reduce --rows 12"
    assert head["command"].startswith(start)
    assert "tdcoll auto" in done.stdout
    assert str(tmp_path) not in json.dumps(head)
