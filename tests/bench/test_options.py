# SPDX-License-Identifier: Apache-2.0
"""Command lines of all benchmarks: what they take, what they refuse, and who says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tdcoll.tools.bench.all_reduce_rms_norm import AllReduceNorm
from tdcoll.tools.bench.case import Case
from tdcoll.tools.bench.dense import case_of
from tdcoll.tools.bench.provenance import command_line
from tdcoll.tools.bench.signal import Signalling
from tdcoll.tools.bench.sparse_all_reduce import SparseCase
from tdcoll.tools.bench.tune import Tune

GATHER, REDUCE, SCATTER = map(case_of, ("all_gather", "all_reduce", "reduce_scatter"))


def test_a_dense_collective() -> None:
    given = "-b 512 -e 2K -f 2 --dtype bfloat16 --algorithms 2d,in-place,2d --peers= --both --iterations 7"
    options = GATHER.parse(given.split())
    assert (options.sizes, options.dtype, options.algorithms) == ([512, 1024, 2048], torch.bfloat16, ["2d", "in-place"])
    assert (options.peers, options.launches, options.iterations) == ([], ["graph", "eager"], 7)
    assert GATHER.parse(["-b", "1K", "-e", "5000", "-f", "2"]).sizes == [1024, 2048, 4096]
    usual = GATHER.parse([])
    assert (usual.sizes, usual.launches) == ([1024 << 2 * k for k in range(6)], ["graph"])
    assert (usual.peers, usual.algorithms) == (["nccl"], ["auto", "in-place"])
    options = SCATTER.parse(["-b", "512", "-e", "2K", "--dtype", "bfloat16", "--op", "max"])
    assert (options.sizes, options.op, options.algorithms) == ([512, 2048], "max", ["auto"])


def test_a_sparse_one() -> None:
    given = "--rows 7,30,7 --dims 16 --num-rows 50 --distributions zipf1.2,uniform --dtype float64"
    options = SparseCase.parse(f"{given} --eager".split())
    assert (options.rows, options.dims, options.num_rows, options.dtype) == ([7, 30], [16], 50, torch.float64)
    assert (options.distributions, options.launches) == (["zipf1.2", "uniform"], ["eager"])


WRONG: dict[type[Case], dict[str, str]] = {
    GATHER: {
        "-b must be a positive number of bytes": "-b 0|-b 1Q",
        "-b must be a multiple of the dtype's 4 bytes": "-b 3",
        "-b must be at most -e": "-b 2K -e 1K",
        "-e must be a positive number of bytes": "-e=-1",
        "-f must be a whole number of at least 2": f"-f 1|-f 1.5|-f {'9' * 5000}",
        "expected a whole number of at least 2, got '1'": "--iterations 1",
        "expected a whole number of at least 1, got 'x'": "--warmup x",
        "there is no directory no/such/folder": "--json no/such/folder/a.json",
        "expected some of auto, ll, direct, loop, ce, ring, 1d, 2d, in-place, in-place-ll, ": "--algorithms 3d",
        "torch-symm-cat, fcollect; got torch-one-shot": "--peers torch-one-shot",
        "not allowed with argument": "--graph --eager",
        "expected some of uint8, int8,": "--dtype int3",
    },
    SCATTER: {
        "expected some of auto, ll, direct, pull, loop, ce, 1d, symmetric; got ring": "--algorithms ring",
        "got uint8": "--dtype uint8",
        "invalid choice": "--op prod",
        "--op: a mean is of floating-point numbers; got --dtype torch.int32": "--op mean --dtype int32",
    },
    REDUCE: {"torch-one-shot, torch-two-shot; got fcollect": "--peers fcollect"},
    SparseCase: {
        "501 different rows are more than the 500 of --num-rows": "--rows 501",
        "expected at least one": "--rows ,",
        "expected a whole number of at least 1": "--dims 0",
        "expected uniform or zipf with an exponent, such as zipf1.2; got 'zipf": "--distributions zipf-1,zipf",
        "expected some of auto, owner, gather, dense": "--algorithms tree",
        "expected some of published": "--peers mpi",
    },
    AllReduceNorm: {
        "--hidden: expected at most 16384 and a multiple of 8": "--hidden 33000|--hidden 20",
        "argument --hidden: expected a whole number of at least 16, got '12'": "--hidden 12",
        "got ring": "--algorithms ring",
        "got int32": "--dtype int32",
    },
    Signalling: {"expected a whole number of at least 2": "--rounds 1"},
    Tune: {
        "the following arguments are required: -o": "",
        "there is no directory no/such/folder": "-o no/such/folder/t.json",
        "expected a tuning table in JSON": f"-o {__file__}",
        "expected a whole number from 1 to 512, got '513'": "--chunks 4,513",
        "expected one of 1, 2, 4, 8, 16, 32, got '3'": "--warps 3",
        "expected some of ll, direct, loop, ce, ring, 1d, 2d": "--algorithms auto",
        "reduce_scatter, all_to_all; got broadcast": "--operation broadcast",
        "-b must be at most -e": "-o t.json -b 2K -e 1K",
    },
}


CASES = [(kind, said, one) for kind, wrong in WRONG.items() for said in wrong for one in wrong[said].split("|")]


@pytest.mark.parametrize(("kind", "message", "given"), CASES)
def test_a_wrong_command_line_ends_with_status_2(kind: type[Case], message: str, given: str, capsys: Any) -> None:
    with pytest.raises(SystemExit, match="2"):
        kind.parse(given.split())
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("rank", ["0", "1"])
def test_rank_0_speaks_for_all(rank: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The others wait until it has, since the first that ends ends all."""
    waits: list[float] = []
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr("time.sleep", waits.append)
    for arguments, status in ((["--begin", "x"], 2), (["--help"], 0)):
        with pytest.raises(SystemExit) as ended:
            GATHER.parse(arguments)
        assert ended.value.code == status
        said = capsys.readouterr()
        assert bool(said.out + said.err) == (rank == "0")
        assert bool(waits) == (rank != "0")
        if status == 2:
            assert ("-b must be a positive number" in said.err) == (rank == "0")


def test_the_command_is_repeated_without_what_is_local(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("TDCOLL_EMULATE_NODES", "2")
    file = "/some where/a.json"
    for json_option in (["--json", file], [f"--json={file}"], ["-o", file], [f"-o{file}"], ["--output", file]):
        said = command_line("all_gather", ["-b", "1K", *json_option, "--eager"], 4, False)
        assert said == "bash launch.sh --nproc 4 --emulate-nodes 2 -m tdcoll bench all_gather -b 1K --eager"
    quoted = command_line("all_gather", ["--peers", "nccl", "--title", "two  words; a -o b"], 4, False)
    assert quoted.endswith(" bench all_gather --peers nccl --title 'two  words; a -o b'")
    assert command_line("tune", ["-o", file, "--warps", "4"], 4, False).endswith(" -m tdcoll tune --warps 4")
    assert "--nproc 4 --simulate --nnodes 2" in command_line("all_gather", [], 8, True)


def test_shared_gpus_have_no_times(tmp_path: Any, monkeypatch: Any, capsys: Any) -> None:
    from tdcoll.__main__ import main as command

    monkeypatch.setattr("tdcoll.job.lifecycle.INTERPRETED", False)
    monkeypatch.setenv("TDCOLL_SHARE_GPUS", "1")
    for name in ("all_gather", "reduce_scatter", "all_reduce_rms_norm", "sparse_all_reduce", "signal", "tune"):
        with pytest.raises(SystemExit) as ended:
            command(["tune", "-o", str(tmp_path / "t.json")] if name == "tune" else ["bench", name])
        assert ended.value.code == 2
        assert f"{name}: error: TDCOLL_SHARE_GPUS (launch.sh --share-gpus) or initialize" in capsys.readouterr().err
