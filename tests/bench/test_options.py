# SPDX-License-Identifier: Apache-2.0
"""Command lines of all benchmarks: what they take and refuse; and benchmarks/, for machines with GPUs.

The commands of measure.py exist, and its jobs end; backend_calls.py names its columns after thread blocks.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tdcoll import runtime
from tdcoll.__main__ import main
from tdcoll.testing import World
from tdcoll.tools.bench import case, sparse_all_reduce, tune
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
        "expected some of auto, ll, direct, loop, ce, 1d; got ring": "--algorithms ring",
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
    monkeypatch.setattr("tdcoll.job.lifecycle.INTERPRETED", False)
    monkeypatch.setenv("TDCOLL_SHARE_GPUS", "1")
    for name in ("all_gather", "reduce_scatter", "all_reduce_rms_norm", "sparse_all_reduce", "signal", "tune"):
        with pytest.raises(SystemExit) as ended:
            main(["tune", "-o", str(tmp_path / "t.json")] if name == "tune" else ["bench", name])
        assert ended.value.code == 2
        assert f"{name}: error: TDCOLL_SHARE_GPUS (launch.sh --share-gpus) or initialize" in capsys.readouterr().err


ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))
measure: Any = importlib.import_module("measure")
backend_calls: Any = importlib.import_module("backend_calls")


def options_of(script: str) -> set[str]:
    """Return the options that a script declares."""
    return set(re.findall(r'add_argument\(\s*"(--[\w-]+)"', (ROOT / script).read_text(encoding="utf-8")))


@pytest.mark.parametrize("nproc", [1, 2, 3, 8])
def test_benchmarks_can_be_given(nproc: int, tmp_path: Path, monkeypatch: Any) -> None:
    parsed: list[argparse.Namespace] = []

    def run(kind: Any, arguments: list[str]) -> int:
        parsed.append(kind.parse(arguments))
        return 0

    monkeypatch.setattr(case, "run", run)
    for module in (tune, sparse_all_reduce):
        monkeypatch.setattr(module, "INTERPRETED", False)
    files = set()
    for jobs in measure.stages(nproc).values():
        for job in jobs:
            command = job.command(tmp_path / f"{job.name}.json")
            if "tdcoll" in command:
                assert main(command[command.index("tdcoll") + 1 :]) == 0
                files.add(getattr(parsed[-1], "json", None) or parsed[-1].output)
    assert len(parsed) == len(files) == 22
    assert all(Path(file).parent == tmp_path for file in files)


def test_scripts_have_the_options_that_they_are_given() -> None:
    seen = set()
    for jobs in measure.stages(2).values():
        for job in jobs:
            script = next(word for word in job.words if word.endswith(".py") or word == "-m" or word == "tests")
            if script.startswith(("benchmarks/", "tests/")):
                given = {word for word in job.words[job.words.index(script) :] if word.startswith("--")}
                assert given <= options_of(script), script
                seen.add(script)
            elif script == "-m":
                assert job.words[-2:-1] in (["--json"], ["-o"])
            else:
                assert script == "tests" or (ROOT / script).is_file()
    assert seen == {"benchmarks/backend_calls.py", "benchmarks/training.py", "tests/sanitizer/sanitize.py"}


def test_heaps_differ_in_the_heap_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert measure.main(["--nproc", "2", "--dry-run", str(tmp_path), "heaps", "tests"]) == 0
    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert lines.pop()[4:6] == ["-k", "not shared"]
    assert [line[0] for line in lines] == ["TDCOLL_HEAP=nvshmem", "TDCOLL_HEAP=torch"] * 6
    assert all(one[1:-1] == other[1:-1] for one, other in zip(lines[::2], lines[1::2], strict=True))


def test_a_wrong_command_line(tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(measure, "_gpus", lambda: iter(()))
    for wrong, said in (
        (["FOLDER", "gather"], "invalid choice: 'gather'"),
        (["--nproc", "2", "FOLDER", "tune"], "--nproc: expected at least 1 and at most the 0 GPUs of this host; got 2"),
        (["FOLDER", "tune"], "the 0 GPUs of this host; got 0"),
        (["--dry-run", "--nproc", "0", "FOLDER", "tune"], "got 0"),
        (["--limit", "soon", "FOLDER", "tune"], "--limit"),
    ):
        with pytest.raises(SystemExit, match="2"):
            measure.main([word.replace("FOLDER", str(tmp_path / "made")) for word in wrong])
        assert said in capsys.readouterr().err
        assert not (tmp_path / "made").exists()


@pytest.fixture
def _handlers() -> Iterator[None]:
    """Signal handlers as they were, but at first as in a shell's background job."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("_handlers")
def test_a_job_that_takes_too_long_ends_with_all_it_has_started(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """It may write what it has; the next job runs, and the exit status tells."""
    writes = "import sys, time\ntry: time.sleep(60)\nexcept KeyboardInterrupt: open(sys.argv[1], 'w').write('rows')"
    starts = "import subprocess, sys\njob = subprocess.Popen([sys.executable, '-c', *sys.argv[1:]])\n"
    starts += "try: job.wait()\nexcept KeyboardInterrupt: job.wait()"  # subprocess.run would kill it after 0.25 s
    jobs = {
        "tests": [measure.Job("long", [sys.executable, "-c", starts, writes, "FILE"])],
        "calls": [measure.Job("calls", ["sh", "-c", "echo $TDCOLL_HEAP; exit 3"], {"TDCOLL_HEAP": "torch"})],
        "tune": [measure.Job("tune", ["true"])],
    }
    monkeypatch.setattr(measure, "stages", lambda nproc: jobs)
    monkeypatch.setattr(measure, "_gpus", lambda: iter(["NVIDIA H200"]))
    assert measure.main(["--limit", "5", str(tmp_path), "tests"]) == 1
    assert (tmp_path / "long-1xH200.json").read_text() == "rows"
    assert measure.main([str(tmp_path), "tune", "calls", "tune"]) == 1
    assert measure.main([str(tmp_path), "tune"]) == 0
    assert (tmp_path / "calls-1xH200.log").read_text() == "torch\n"
    said = capsys.readouterr().out
    assert re.sub(r"\d+ s$", "s", said, flags=re.MULTILINE).split("\n")[0] == "long-1xH200: status 124, s"
    assert "calls-1xH200: status 3" in said


def test_shares_are_of_what_a_group_handles() -> None:
    def row(us: float, *handled: str) -> dict[str, Any]:
        return {"us": {"nccl": [10.0, 20.0, 90.0], "group 1": [us]}, "handled": handled}

    assert list(backend_calls.shares([row(9.0, "group 1"), row(16.0, "group 1"), row(20.5)])) == [
        "group 1: handles 2 of 3 rows, at most 0.80 of NCCL's time; the others at most 1.02"
    ]


def test_every_own_call_is_made(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    dist = SimpleNamespace(get_world_size=lambda: 2, get_rank=lambda: runtime.current().rank)
    monkeypatch.setattr(backend_calls, "dist", dist)
    monkeypatch.setattr(backend_calls, "ROUNDS", 1)
    monkeypatch.setattr(backend_calls, "host_us", lambda call: float(call().numel()))
    monkeypatch.setattr(backend_calls, "call_us", lambda call: float(call().shape[0]))
    monkeypatch.setattr(backend_calls, "slowest", float)
    no_event = SimpleNamespace(record=lambda stream: None, synchronize=lambda: None, seconds=0.0)
    monkeypatch.setattr(backend_calls, "Waits", lambda event: no_event)
    row, _ = World(2).run(lambda pe: backend_calls.own_row())
    gathered = {"all_gather": [2048.0], "all_gather_": [2048.0], "reduce_scatter": [1024.0]}
    reduced = {name: [1024.0] for name in ("all_reduce", "all_reduce_", "all_reduce_ symmetric")}
    assert row == {
        "kind": "own calls",
        "nbytes": 4096,
        "us": gathered | reduced | {"sparse_all_reduce of 1,000 rows": [1e5]},
    }
    assert capsys.readouterr().out.count("own calls") == 1


@pytest.mark.parametrize("name", ["calls-2xH200", "groups-2xH200"])
def test_the_page_has_the_table_of_its_file(name: str) -> None:
    file = json.loads((ROOT / f"docs/results/host/{name}.json").read_text())
    assert backend_calls.table(file) in (ROOT / "docs/tables.md").read_text()
