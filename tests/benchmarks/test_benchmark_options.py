# SPDX-License-Identifier: Apache-2.0
"""Command lines of all benchmarks: what they take and refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import registry
from benchmarks.all_reduce_rms_norm import NormBenchmark
from benchmarks.dense import dense_benchmark
from benchmarks.signals import SignalBenchmark
from benchmarks.sparse_all_reduce import SparseBenchmark
from tdcoll.__main__ import main
from tdcoll.tools.measure.benchmark import Benchmark
from tdcoll.tools.measure.provenance import command_line

GATHER = dense_benchmark("all_gather")
REDUCE = dense_benchmark("all_reduce")
SCATTER = dense_benchmark("reduce_scatter")


def test_values_of_a_dense_collective() -> None:
    arguments = "-b 512 -e 2K -f 2 --dtype bfloat16 --algorithms 2d,in-place,2d --peers= --both --iterations 7"
    options = GATHER.parse(arguments.split())
    assert options.sizes == [512, 1024, 2048]
    assert options.dtype is torch.bfloat16
    assert options.algorithms == ["2d", "in-place"]
    assert options.peers == []
    assert options.launches == ["graph", "eager"]
    assert options.iterations == 7
    assert GATHER.parse(["-b", "1K", "-e", "5000", "-f", "2"]).sizes == [1024, 2048, 4096]
    reduced = SCATTER.parse(
        ["-b", "512", "-e", "2K", "--dtype", "bfloat16", "--op", "max", "--blocks", "8,4"]
    )
    assert (reduced.sizes, reduced.op, reduced.blocks) == ([512, 2048], "max", [8, 4])


def test_defaults_of_a_dense_collective() -> None:
    options = GATHER.parse([])
    assert options.sizes == [1024 << 2 * k for k in range(6)]
    assert options.launches == ["graph"]
    assert options.peers == ["nccl"]
    assert options.algorithms == ["auto", "in-place"]
    assert SCATTER.parse([]).algorithms == ["auto"]
    assert (options.blocks, options.json) == ([], None)


def test_values_of_a_sparse_all_reduce() -> None:
    arguments = "--rows 7,30,7 --dims 16 --num-rows 50 --distributions zipf1.2,uniform --dtype float64 --eager"
    options = SparseBenchmark.parse(arguments.split())
    assert (options.rows, options.dims, options.num_rows) == ([7, 30], [16], 50)
    assert options.dtype is torch.float64
    assert (options.distributions, options.launches) == (["zipf1.2", "uniform"], ["eager"])


WRONG: list[tuple[type[Benchmark], str, str]] = [
    (GATHER, "-b 0", "-b must be a positive number of bytes"),
    (GATHER, "-b 1Q", "-b must be a positive number of bytes"),
    (GATHER, "-b 3", "-b must be a multiple of the dtype's 4 bytes"),
    (GATHER, "-b 2K -e 1K", "-b must be at most -e"),
    (GATHER, "-e=-1", "-e must be a positive number of bytes"),
    (GATHER, "-f 1", "-f must be a whole number of at least 2"),
    (GATHER, "-f 1.5", "-f must be a whole number of at least 2"),
    (GATHER, f"-f {'9' * 5000}", "-f must be a whole number of at least 2"),
    (GATHER, "--iterations 1", "'--iterations': 1 is not in the range x>=2"),
    (GATHER, "--warmup x", "'--warmup': 'x' is not a valid integer"),
    (GATHER, "--json no/such/folder/a.json", "there is no directory no/such/folder"),
    (GATHER, "--algorithms 3d", "'--algorithms': '3d' is not one of 'auto', 'll', 'direct'"),
    (GATHER, "--peers torch-one-shot", "'torch-one-shot' is not one of 'nccl', "),
    (GATHER, "--blocks 8,0", "'--blocks': 0 is not in the range x>=1"),
    (GATHER, "--graph --eager", "expected one of --graph, --eager, --both; got 2"),
    (GATHER, "--dtype int3", "'--dtype': 'int3' is not one of 'uint8', 'int8', "),
    (GATHER, "--blokcs 8", "No such option '--blokcs'"),
    (SCATTER, "--algorithms ring", "'ring' is not one of 'auto', 'll', 'direct', 'loop', 'ce', '1d'"),
    (SCATTER, "--dtype uint8", "'uint8' is not one of "),
    (SCATTER, "--op prod", "'prod' is not one of 'sum', 'mean', 'max', 'min'"),
    (SCATTER, "--op mean --dtype int32", "a mean is of floating-point numbers; got --dtype torch.int32"),
    (REDUCE, "--peers fcollect", "'fcollect' is not one of "),
    (SparseBenchmark, "--rows 501", "501 different rows are more than the 500 of --num-rows"),
    (SparseBenchmark, "--rows ,", "'--rows': expected at least 1 value, got ','"),
    (SparseBenchmark, "--dims 0", "'--dims': 0 is not in the range x>=1"),
    (SparseBenchmark, "--distributions zipf-1,zipf", "such as zipf1.2; got 'zipf-1'"),
    (SparseBenchmark, "--algorithms tree", "'tree' is not one of 'auto', 'owner', 'gather', 'dense'"),
    (SparseBenchmark, "--peers mpi", "'mpi' is not one of 'published', 'allgather'"),
    (NormBenchmark, "--hidden 33000", "33000 is not in the range 16<=x<=16384"),
    (NormBenchmark, "--hidden 20", "--hidden: expected a multiple of 8, got 20"),
    (NormBenchmark, "--hidden 12", "12 is not in the range 16<=x<=16384"),
    (NormBenchmark, "--algorithms ring", "'ring' is not one of "),
    (NormBenchmark, "--dtype int32", "'int32' is not one of 'bfloat16', 'float16', 'float32'"),
    (SignalBenchmark, "--rounds 1", "1 is not in the range x>=2"),
]  # fmt: skip


@pytest.mark.parametrize(("bench", "arguments", "message"), WRONG)
def test_a_wrong_command_line_ends_with_status_2(
    bench: type[Benchmark], arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench.parse(arguments.split())
    # Older versions of click have other quotes in one message.
    assert message in capsys.readouterr().err.replace(
        "No such option: --blokcs", "No such option '--blokcs'"
    )


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize(("arguments", "status"), [(["--begin", "x"], 2), (["--help"], 0)])
def test_rank_0_speaks_for_all(
    rank: str,
    arguments: list[str],
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """After an error the others wait until it has, since the first rank that ends ends all."""
    waits: list[float] = []
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr("time.sleep", waits.append)
    with pytest.raises(SystemExit) as ended:
        GATHER.parse(arguments)
    assert ended.value.code == status
    printed = capsys.readouterr()
    assert bool(printed.out + printed.err) == (rank == "0")
    assert bool(waits) == (rank != "0" and status == 2)
    if rank == "0" and status == 2:
        assert "-b must be a positive number" in printed.err


def test_help_shows_defaults_and_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        SCATTER.parse(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith("Usage: bash launch.sh [--nproc N] -m tdcoll bench reduce_scatter ")
    assert "timed launches, or calls that are timed one at a time  [default: 100;" in " ".join(
        text.split()
    ).replace("time [", "time  [")
    assert "CUDA graph replays (default)" in text
    assert "  bash launch.sh -m tdcoll bench reduce_scatter --json result.json\n" in text


def test_the_command_is_repeated_without_what_is_local(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("TDCOLL_EMULATE_NODES", "2")
    file = "/some where/a.json"
    for local in (
        ["--json", file],
        [f"--json={file}"],
        ["-o", file],
        [f"-o{file}"],
        ["--output", file],
    ):
        command = command_line("all_gather", ["-b", "1K", *local, "--eager"], 4, False)
        assert command == (
            "bash launch.sh --nproc 4 --emulate-nodes 2 -m tdcoll bench all_gather -b 1K --eager"
        )
    words = ["--peers", "nccl", "--title", "two  words; a -o b"]
    quoted = command_line("all_gather", words, 4, False)
    assert quoted.endswith(" bench all_gather --peers nccl --title 'two  words; a -o b'")
    tuned = command_line("tune", ["-o", file, "--warps", "4"], 4, False)
    assert tuned.endswith(" -m tdcoll tune --warps 4")
    assert "--nproc 4 --simulate --nnodes 2" in command_line("all_gather", [], 8, True)
    monkeypatch.setenv("TDCOLL_SHARE_GPUS", "1")
    assert "--share-gpus -m tdcoll bench litmus" in command_line("litmus", [], 4, False)
    assert "--share-gpus" not in command_line("litmus", [], 4, True)


def times_calls(name: str) -> bool:
    return not registry.benchmark(name).shares_gpus


@pytest.mark.parametrize("name", [*filter(times_calls, registry.SUBJECTS), "tune"])
def test_shared_gpus_have_no_times(
    name: str, tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tdcoll.job.lifecycle.INTERPRETED", False)
    monkeypatch.setenv("TDCOLL_SHARE_GPUS", "1")
    command = ["tune", "-o", str(tmp_path / "t.json")] if name == "tune" else ["bench", name]
    with pytest.raises(SystemExit) as ended:
        main(command)
    assert ended.value.code == 2
    message = f"{name}: error: TDCOLL_SHARE_GPUS (launch.sh --share-gpus) or initialize"
    assert message in capsys.readouterr().err
