# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of dense collectives: checks on the simulator, measuring with a made-up clock, the command.

tests/gpu shows that all peers are right on GPUs.
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
from tdcoll import runtime
from tdcoll.base.errors import RankMismatchError
from tdcoll.testing import World
from tdcoll.tools.bench.data import Buffers, buffer_bytes
from tdcoll.tools.bench.dense import case_of
from tdcoll.tools.bench.peers import PEERS, Stock
from tdcoll.tools.bench.rows import load, save
from tdcoll.tools.bench.specs import SPECS
from tdcoll.tools.bench.timing import LineUp

GATHER, REDUCE, SCATTER = map(case_of, ("all_gather", "all_reduce", "reduce_scatter"))


def test_the_heap_holds_what_the_sizes_need(monkeypatch: pytest.MonkeyPatch) -> None:
    def need(algorithms: str, peers: str = "nccl") -> int:
        given = ["-b", "1M", "-e", "1M", "--algorithms", algorithms, "--peers", peers]
        return GATHER.heap_bytes(GATHER.parse(given), 4)

    plain = need("1d")
    assert plain >= 2 * 4 << 20
    assert need("in-place") == plain + buffer_bytes(SPECS["all_gather"], 1 << 20, 4, 3)
    monkeypatch.setattr("tdcoll.tools.bench.engine.CALLS", (20, 21))
    assert need("1d", "fcollect") == plain + 21 * (5 << 20)


def test_the_heap_holds_what_a_context_takes_besides_its_slots() -> None:
    """Words of LL, above all, of which two ranks have the most; with buffers in the heap and a line-up."""
    options = GATHER.parse(["-b", "1M", "-e", "1M", "--algorithms", "in-place"])

    def host(pe: int) -> None:
        with LineUp(), GATHER(options).context(1 << 20) as (context, stock):
            assert context.ll_bytes == 1 << 20
            assert len(stock.in_heap.results) == 3
        assert tdcoll.heap_info().used == 0

    World(2, heap_bytes=GATHER.heap_bytes(options, 2)).run(host)


def test_checks_over_two_nodes(rows_of: Callable[..., list[Any]]) -> None:
    rows = rows_of(GATHER, "-b 1K -e 4K --algorithms 1d,2d,in-place", 4, ranks_per_node=2)
    found = {(row.facts["bytes_per_rank"], row.algorithm): row for row in rows}
    assert [row.check for row in rows] == ["ok", "ok", "ok", "not run"] * 2
    assert found[1024, "nccl"].note == "needs GPUs"
    rows = rows_of(SCATTER, "-b 1K -e 1K --dtype bfloat16 --algorithms auto,1d,direct --peers=", 4, ranks_per_node=2)
    assert [row.check for row in rows] == ["ok", "ok", "not run"]
    assert "needs one node whose ranks can store" in rows[2].note
    facts = {"bytes_per_rank": 1024, "operation": "reduce_scatter", "dtype": "bfloat16", "op": "sum"}
    for row, took in zip(rows, ({"took": "1d", "sms": 4}, {"sms": 4}), strict=False):  # what auto chose
        assert (row.facts, row.median_us) == (facts | took, None)


@pytest.mark.parametrize("kind", [REDUCE, SCATTER])
def test_every_algorithm_on_one_node(kind: Any, rows_of: Callable[..., list[Any]]) -> None:
    """A mean of three, too, which peers round in other places."""
    names = [name for name in kind.spec.names if name != "2d"]
    more = ["symmetric", "in-place"] if kind is REDUCE else []
    rows = rows_of(kind, f"-b 252 -e 252 --algorithms {','.join([*names, *more])} --op mean", 3)
    assert [row.check for row in rows] == ["ok"] * (len(names) + len(more)) + ["not run"]
    assert rows[-1].note == "rounds a mean over 3 ranks more than once: it cannot be checked to the bit"


@pytest.mark.parametrize("mistake", ["an element", "the call before"])
@pytest.mark.parametrize("kind", [GATHER, REDUCE, SCATTER])
def test_wrong_results_are_rows_that_say_so(kind: Any, mistake: str, monkeypatch: Any, rows_of: Any) -> None:
    real = getattr(tdcoll, kind.benchmark)
    kept: dict[int, torch.Tensor] = {}

    def careless(tensor: torch.Tensor, *op: Any, ctx: Any, out: torch.Tensor, **named: Any) -> torch.Tensor:
        new = real(tensor, *op, ctx=ctx, out=out, **named).clone()
        if mistake == "the call before":
            out.copy_(kept.get(ctx.rank, new))
            kept[ctx.rank] = new
        elif ctx.rank == 1:
            out[-1] += 1
        return out

    monkeypatch.setattr(tdcoll, kind.benchmark, careless)
    (row,) = rows_of(kind, "-b 64 -e 64 --algorithms direct --peers=", 2)
    last = kind.spec.sizes(64, 2)[1] // 4 - 1
    wrong = f"rank 1: 1 wrong element(s), first: call 0, element {last}: expected "
    assert row.check == "WRONG"
    assert (wrong if mistake == "an element" else "first: call 1, element ") in row.note


def test_gpus_of_two_kinds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their generators would make different numbers, and right results would be wrong."""

    def gather(self: Any, what: str, own: Any) -> list[Any]:
        return ["GPU 0", "GPU 1"] if what == "GPU" else [own]

    monkeypatch.setattr(GATHER, "gather", gather)
    with pytest.raises(RankMismatchError, match=r"expected GPUs of one kind, .* got GPU 0, GPU 1"):
        World(1).run(lambda _: GATHER(GATHER.parse([])))


@pytest.mark.parametrize("kind", [GATHER, REDUCE, SCATTER])
def test_the_measuring_path(kind: Any, clock: Any, measured: Any, monkeypatch: Any, tmp_path: Path) -> None:
    """Consecutive calls take different inputs; rank 1 is the slowest, and the skew says by how much."""
    real = getattr(tdcoll, kind.benchmark)
    given: list[int] = []

    def timed(tensor: torch.Tensor, *op: Any, **named: Any) -> torch.Tensor:
        clock.passes(5.0 + runtime.current().rank)
        if runtime.current().rank == 0:
            given.append(tensor.data_ptr())
        return real(tensor, *op, **named)

    monkeypatch.setattr(tdcoll, kind.benchmark, timed)
    rows = measured(kind, "-b 64 -e 64 --algorithms direct --both")
    assert [(row.label, row.launch, row.check) for row in rows] == [
        *(("tdcoll direct", launch, "ok") for launch in ("graph", "eager")),
        *(("nccl", launch, "not run") for launch in ("graph", "eager")),
    ]
    for row in rows[:2]:
        assert (row.median_us, row.min_us, row.skew_us) == pytest.approx((6.0, 6.0, 1.0))
        assert (row.calls, row.iterations) == ((2, 3), 4)
    assert len(set(given)) == 3
    assert all(one != following for one, following in itertools.pairwise(given))
    head = {"benchmark": kind.benchmark, "command": "x", "started": "2031-02-03", "provenance": {}}
    save(tmp_path / "r.json", head, rows)
    assert load(tmp_path / "r.json")[1] == rows


@pytest.mark.slow
def test_the_command_on_the_simulator(launch: Callable[..., CompletedProcess[str]], tmp_path: Path) -> None:
    file, table = tmp_path / "result.json", tmp_path / "table.json"
    table.write_text('{"tuning": "tdcoll", "version": 5, "tables": []}')
    done = launch(
        *("--simulate", "--nproc", "2", "-m", "tdcoll", "bench", "all_gather"),
        *("-b", "1K", "-e", "1K", "--algorithms", "1d,in-place", "--json", str(file)),
        env={"TDCOLL_TUNING": str(table)},
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(file.read_text())
    found = [(row["algorithm"], row["check"]) for row in result["rows"]]
    assert found == [("1d", "ok"), ("in-place", "ok"), ("nccl", "not run")]
    heading, first, *_, last = [" ".join(line.split()) for line in done.stdout.splitlines() if "# bytes" not in line]
    assert heading == f"# 2 rank(s) on 1 node(s): {result['command']}"
    assert (first.startswith("1 KB 2 1 tdcoll 1d simulator -"), first[-2:]) == (True, "ok")
    assert last.endswith("not run: needs GPUs")
    assert result["provenance"]["simulated"] is True
    assert result["provenance"]["environment"]["TDCOLL_TUNING"] == "table.json"
    assert str(tmp_path) not in file.read_text()


CPU = torch.device("cpu")


def stock_of(nbytes: int, world: int) -> Stock:
    """The tensors that the all-gather benchmark gives to a baseline."""

    def new(**how: Any) -> Buffers:
        what = SPECS["all_gather"], nbytes, [0] * world, runtime.current().rank, torch.uint8, CPU
        return Buffers(*what, sets=2, **how)

    return Stock(new)


@pytest.mark.parametrize("name", [name for name, peer in PEERS.items() if peer.of == "all_gather"])
def test_without_gpus_they_say_why(name: str) -> None:
    with pytest.raises(RuntimeError, match="needs GPUs"):
        PEERS[name].make(stock_of(8, 1), CPU, lambda buffers: None)


@pytest.mark.parametrize("kind", [REDUCE, SCATTER])
def test_peers_that_only_add_say_so(kind: Any, measured: Callable[..., list[Any]]) -> None:
    names = [name for name, peer in PEERS.items() if peer.of == kind.benchmark]
    rows = measured(kind, f"-b 64 -e 64 --op max --algorithms= --peers {','.join(names)}")
    assert [(row.check, row.note) for row in rows] == [("not run", "has sums only, and --op is max")] * len(names)
