# SPDX-License-Identifier: Apache-2.0
"""The command line, and the benchmark on the simulator."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch

import tdcoll
from tdcoll.bench import all_gather
from tdcoll.bench.__main__ import main
from tdcoll.bench.all_gather import AllGather
from tdcoll.bench.data import Buffers
from tdcoll.bench.dense import calls_of
from tdcoll.bench.provenance import command_line
from tdcoll.bench.timing import LineUp, graph_time_us
from tdcoll.errors import TdcollError
from tdcoll.testing import World


def test_the_command_line() -> None:
    options = AllGather.parse(
        [
            *("-b", "512", "-e", "2K", "-f", "2", "--dtype", "bfloat16", "--algorithms", "2d,in-place,2d"),
            *("--peers=", "--both", "--iterations", "7"),
        ]
    )
    assert options.sizes == [512, 1024, 2048]
    assert options.dtype == torch.bfloat16
    assert options.algorithms == ["2d", "in-place"]
    assert options.peers == []
    assert options.launches == ["graph", "eager"]
    assert options.iterations == 7
    usual = AllGather.parse([])
    assert (usual.launches, usual.peers, usual.algorithms, usual.straggler) == (
        ["graph"],
        ["nccl"],
        None,
        False,
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("-b 3", "-b must be a multiple of the dtype's 4 bytes"),
        ("--algorithms 3d", "expected some of auto, ll, direct, ring, 1d, 2d"),
        ("--peers mpi", "expected some of nccl"),
        ("--iterations 1", "expected a whole number of at least 2"),
        ("--graph --eager", "not allowed with argument"),
        ("--dtype int3", "invalid choice"),
        ("--json no/such/folder/a.json", "there is no directory no/such/folder"),
    ],
)
def test_a_wrong_command_line_ends_with_status_2(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        AllGather.parse(arguments.split())
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_an_unknown_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["all_scatter"]) == 2
    assert "got all_scatter" in capsys.readouterr().err
    assert main([]) == 2
    assert main(["--help"]) == 0


def test_the_command_is_repeated_without_what_is_local(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("TDCOLL_EMULATE_NODES", "2")
    for json_option in (["--json", "/somewhere/a.json"], ["--json=/somewhere/a.json"], ["-o", "/somewhere/t.json"]):
        said = command_line("all_gather", ["-b", "1K", *json_option, "--eager"], 4, False)
        assert said == "bash launch.sh --nproc 4 --emulate-nodes 2 -m tdcoll bench all_gather -b 1K --eager"
    assert "--nproc 4 --simulate --nnodes 2" in command_line("all_gather", [], 8, True)


def test_the_heap_holds_what_the_sizes_need() -> None:
    size = ["-b", "1M", "-e", "1M"]
    need = AllGather.heap_bytes(AllGather.parse([*size, "--algorithms", "1d"]), 4)
    assert need >= 2 * 4 << 20
    assert AllGather.heap_bytes(AllGather.parse(size), 4) >= need + 3 * (4 << 20)


def test_the_heap_holds_what_a_context_takes_besides_its_slots() -> None:
    """Words of LL, above all, of which two ranks have the most; in place as `tune` asks for it, with a line-up."""

    def host(pe: int) -> None:
        in_place = tdcoll.empty((need_in_place,), torch.uint8)
        with LineUp(), tdcoll.CollectiveContext(max_bytes_per_rank=1 << 20) as context:
            assert context.ll_bytes == 1 << 20
        tdcoll.free(in_place)

    need_in_place = Buffers.storage_bytes(1 << 20, 2, calls_of(1 << 20, 2)[1])
    options = AllGather.parse(["-b", "1M", "-e", "1M", "--algorithms", "in-place"])
    World(2, heap_bytes=AllGather.heap_bytes(options, 2)).run(host)


def test_counts_and_checks_over_two_nodes(rows_of: Callable[..., list[Any]]) -> None:
    rows = rows_of(AllGather, "-b 1K -e 4K --algorithms 1d,2d,in-place", 4, ranks_per_node=2)
    found = {(row.bytes_per_rank, row.algorithm): row for row in rows}
    assert [row.check for row in rows] == ["ok", "ok", "ok", "not run"] * 2
    assert found[1024, "nccl"].note == "needs GPUs"
    for size in (1024, 4096):
        # Each segment crosses to two ranks in 1D, to one in 2D.
        assert found[size, "1d"].counts["inter_node_bytes"] == [2 * size] * 4
        assert found[size, "2d"].counts["inter_node_bytes"] == [size] * 4
        assert found[size, "1d"].counts["put_bytes"] == [3 * size] * 4
        assert found[size, "1d"].median_us is None


def test_what_cannot_run_says_why(rows_of: Callable[..., list[Any]]) -> None:
    rows = rows_of(AllGather, "-b 8 -e 8 --algorithms 1d,2d --peers=", 3, ranks_per_node=[2, 1])
    assert [row.check for row in rows] == ["ok", "not run"]
    assert "same number of ranks on every node" in rows[1].note


def test_wrong_results_are_rows_that_say_so(monkeypatch: pytest.MonkeyPatch, rows_of: Callable[..., list[Any]]) -> None:
    real = all_gather.all_gather

    def careless(tensor: Any, ctx: Any, out: Any, algorithm: str) -> Any:
        real(tensor, ctx, out, algorithm=algorithm)
        if ctx.rank == 1:
            out[-1] = 0
        return out

    monkeypatch.setattr(all_gather, "all_gather", careless)
    (row,) = rows_of(AllGather, "-b 64 -e 64 --algorithms 1d --peers=", 2)
    assert row.check == "WRONG"
    assert row.note.startswith("rank 1: 1 wrong word(s), first: call 0, rank 1's word 15:")


def test_the_simulator_has_no_times() -> None:
    with pytest.raises(TdcollError, match="needs GPUs"):
        World(1).run(lambda *_: graph_time_us(lambda: None))


def test_the_command_on_the_simulator(launch: Callable[..., CompletedProcess[str]], tmp_path: Path) -> None:
    file, table = tmp_path / "result.json", tmp_path / "table.json"
    table.write_text('{"tuning": "tdcoll", "version": 4, "tables": []}')
    done = launch(
        *("--simulate", "--nproc", "2", "-m", "tdcoll.bench", "all_gather"),
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
    assert result["rows"][0]["counts"]["put_bytes"] == [1024, 1024]
    assert "tdcoll in-place" in done.stdout
    assert result["provenance"]["simulated"] is True
    assert result["provenance"]["environment"]["TDCOLL_TUNING"] == "table.json"
    assert str(tmp_path) not in file.read_text()


@pytest.mark.parametrize("rank", ["0", "1"])
def test_rank_0_speaks_for_all(rank: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The others wait until it has, since the first that ends ends all."""
    waits: list[float] = []
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr("time.sleep", waits.append)
    for arguments, status in ((["--begin", "x"], 2), (["--help"], 0)):
        with pytest.raises(SystemExit) as ended:
            AllGather.parse(arguments)
        assert ended.value.code == status
        said = capsys.readouterr()
        assert bool(said.out + said.err) == (rank == "0")
        assert bool(waits) == (rank != "0")
        if status == 2:
            assert ("-b must be a positive number" in said.err) == (rank == "0")
