# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501 (a table has a case per line)
"""The facts of a host, the small job, and the command as a user runs it."""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import tdcoll
from tdcoll.base.child import Ended, run
from tdcoll.testing import World, explore, first_failure
from tdcoll.tools.doctor import command, facts, job
from tests.doctor.healthy import GPUS, MISSING, SIMULATOR, found

ROOT = Path(__file__).resolve().parents[2]
SHELL = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}


def gone(pid: int) -> bool:
    """Whether a process ends within seconds."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    with os.fdopen(process):
        return select.select([process], [], [], 5)[0] == [process]


@pytest.mark.parametrize(
    ("command", "output", "reason"),
    [
        (["bash", "-c", "echo $X; echo b >&2"], "y\n", ""),
        (["bash", "-c", "exit 3"], "", "exit status 3"),
        (["bash", "-c", "kill -SEGV $$"], "", "signal SIGSEGV ended it"),
        (["bash", "-c", "setsid sleep 8 & echo a"], "a\n", ""),  # which holds the output
        (
            ["no-such-program"],
            "",
            "cannot be started: [Errno 2] No such file or directory: 'no-such-program'",
        ),
    ],
)
def test_how_commands_end(command, output, reason):
    assert run(command, 6, {**SHELL, "X": "y"}, with_stderr=False) == (output, reason)


def test_a_command_that_hangs_is_killed_with_its_children():
    ended = run(["bash", "-c", "trap '' TERM; sleep 60 & echo $! >&2; wait; sleep 60"], 0.7, SHELL)
    assert ended.reason == "it did not end within 0.7 s"
    assert gone(int(ended.output))  # its output, that on stderr as well, is not lost


TWO_GPUS = """
import types
card = types.SimpleNamespace(name="H200", major=9, minor=0)
cuda = types.SimpleNamespace(is_available=lambda: True, device_count=lambda: 2, get_device_properties=lambda i: card,
                             get_device_capability=lambda i: (9 + i, 0), can_device_access_peer=lambda i, j: i < j)
"""
H200 = {"name": "H200", "capability": [9, 0]}


@pytest.mark.parametrize(
    ("step", "module", "source", "found"),
    [
        ("greenlet", "x", "", {"error": "ModuleNotFoundError: No module named 'greenlet'", "missing": True}),
        ("numpy", "numpy", "import torch", {"error": "ModuleNotFoundError: No module named 'torch'", "missing": False}),
        ("numpy", "numpy", "raise OSError('libblas.so: no such file\\nand more')", {"error": "OSError: libblas.so: no such file", "missing": False}),
        ("numpy", "numpy", "print('{noise}'); __version__ = '2.0'", {"version": "2.0"}),
        ("triton", "triton", "__version__ = '3.4'", {"version": "3.4", "error": "ModuleNotFoundError: No module named 'triton._C'; 'triton' is not a package", "missing": False}),
        ("numpy", "numpy", "import os; os.kill(os.getpid(), 11)", {"error": "signal SIGSEGV ended it"}),
        ("numpy", "numpy", "import os; os._exit(0)", {"error": "it ended without a word"}),
        ("gpus", "torch", TWO_GPUS, {"gpus": [H200, H200], "no_peer_access": [[1, 0]]}),
        ("numpy", "numpy", "import time; time.sleep(60)", {"error": "it did not end within 4 s"}),
    ],
)  # fmt: skip
def test_a_child_says_what_it_finds(monkeypatch, tmp_path, step, module, source, found):
    (tmp_path / f"{module}.py").write_text(source)

    def run_without_packages(command, *rest, **options):
        return run([command[0], "-S", *command[1:]], *rest, **options)

    monkeypatch.setattr(facts, "_TIMEOUT_S", 4 if "sleep" in source else 60)
    monkeypatch.setattr(facts, "run", run_without_packages)
    assert facts._probed(step, {**SHELL, "PYTHONPATH": f"{tmp_path}:{ROOT}"}) == found


@pytest.mark.parametrize("newest", [90, 100])
def test_a_child_finds_the_device_library_of_each_gpu(monkeypatch, tmp_path, newest):
    """In a folder that serves sm_90 on, or sm_100 only: these GPUs are of both architectures."""
    (tmp_path / "torch.py").write_text(TWO_GPUS)
    (tmp_path / "lib").mkdir()
    library = tmp_path / "lib" / f"libnvshmem_device_sm_{newest}.bc"
    library.touch()
    variables = {**SHELL, "PYTHONPATH": f"{tmp_path}:{ROOT}", "NVSHMEM_HOME": str(tmp_path)}
    found = facts._probed("device library", variables)
    if newest == 90:
        assert found == {"sm_90": str(library), "sm_100": str(library)}
    else:
        assert (
            "has no file for sm_90 or an older architecture, only libnvshmem_device_sm_100.bc"
            in found["error"]
        )


def test_ranks_have_the_environment_of_setenv(monkeypatch):
    """And a value of the user's wins."""
    monkeypatch.setattr(facts, "_probed", lambda step, environment: {})
    found = facts.collect({**SHELL, "TRITON_INTERPRET": "0", "NVSHMEM_DISABLE_NVLS": "0"}, 2)
    assert (found.simulated, found.launched["NVSHMEM_DISABLE_NVLS"]) == (False, "0")
    assert found.launched["NVSHMEM_REMOTE_TRANSPORT"] == "none"
    assert facts.collect({**SHELL, "CUDA_VISIBLE_DEVICES": ""}, 2).simulated


def case(world: World) -> None:
    reports = []
    world.run(lambda pe: reports.append(job.run(30.0)))
    right = (
        "1d and by auto is right"
        if world.memory.puts
        else "auto is right; PyTorch's memory has no puts to test"
    )
    assert len(reports) == world.n_pes
    assert all(
        report.startswith(f"{world.n_pes} simulated ranks, ") and report.endswith(right)
        for report in reports
    )


def test_every_rank_is_content_over_seeds():
    for n_pes, seeds in ((1, 1), (2, 4), (3, 6)):
        explore(case, n_pes=n_pes, seeds=seeds)
    explore(case, n_pes=4, seeds=3, ranks_per_node=2)
    case(World(2, puts=False))


@pytest.mark.parametrize("algorithm", ["1d", "auto"])
def test_wrong_data_is_seen(monkeypatch, algorithm):
    right = tdcoll.all_gather

    def wrong(source, **options):
        got = right(source, **options)
        got[-2:] += options["algorithm"] == algorithm
        return got

    monkeypatch.setattr(tdcoll, "all_gather", wrong)
    failure = first_failure(case, n_pes=2, seeds=1)
    assert failure is not None
    assert f"all_gather by {algorithm}: 2 words from rank 1 are wrong" in str(failure.error)


def lines(*said: dict) -> str:
    return "".join(f"{job._MARK}{json.dumps(line)}\n" for line in said)


JOINING = lines(
    {"rank": 0, "stage": "tdcoll.initialize"}, {"rank": 1, "stage": "tdcoll.initialize"}
)
RAISED = lines(
    {"rank": 1, "error": "CollectiveTimeout: rank 1 waited"}, {"rank": 0, "error": "later"}
)
WELL = "noise" + lines({"rank": 1, "stage": "x"}, {"rank": 0, "result": "2 ranks: right"})


@pytest.mark.parametrize(
    ("ended", "status", "text", "advice"),
    [
        (Ended(WELL), "ok", "2 ranks: right", ""),
        (Ended(WELL, "exit status 1"), "problem", "exit status 1; last in x: rank 1", "docs/errors.md"),
        (Ended(""), "problem", "no rank reported a result; no rank had begun", "docs/errors.md"),
        (Ended(JOINING, "it did not end within 9 s"), "problem", "it did not end within 9 s; last in tdcoll.initialize: rank 0, 1", "NVSHMEM_DEBUG=INFO"),
        (Ended(JOINING + RAISED, "exit status 1"), "problem", "exit status 1; last in tdcoll.initialize: rank 0, 1; first error: rank 1: CollectiveTimeout: rank 1 waited", "NVSHMEM_DEBUG"),
        (Ended(JOINING + RAISED + "tdcoll: died: rank 0 (SIGKILL)\n", "exit status 1"), "problem", "rank 0, 1; died: rank 0 (SIGKILL); first error: rank 1: Coll", ""),
        (Ended("Traceback (most recent call last):\nImportError: cannot\n", "exit status 1"), "problem", "no rank had begun", ""),
    ],
)  # fmt: skip
def test_how_a_job_ended(ended, status, text, advice):
    line = job.judge(GPUS, ended)
    assert (line.status, line.name, text in line.text, advice in line.advice) == (
        status,
        "small job",
        True,
        True,
    ), line
    assert "NVSHMEM" not in job.judge(SIMULATOR, ended).advice


def test_a_job_that_cannot_run_is_not_started():
    assert job.cannot_run(SIMULATOR) == job.cannot_run(GPUS) == ""
    broken = replace(SIMULATOR, **found(SIMULATOR, torch={"error": "x"}, greenlet=MISSING))
    assert job.cannot_run(broken) == "torch, greenlet cannot be imported"
    assert job.cannot_run(replace(GPUS, **found(GPUS, greenlet=MISSING))) == ""
    assert (
        job.cannot_run(replace(GPUS, **found(GPUS, gpus={"error": "it hangs"})))
        == "PyTorch sees no GPU"
    )


@pytest.mark.slow
def test_a_job_that_hangs_is_killed_with_its_ranks(tmp_path):
    """Ranks that ignore SIGTERM, and are in sessions of their own."""
    (tmp_path / "hangs.py").write_text(
        "import os, signal, time\nfrom tdcoll.tools.doctor import job\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "job._say(stage=f'process {os.getpid()}')\ntime.sleep(200)\n"
    )
    shell = {**SHELL, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    ended = job.start(replace(SIMULATOR, launched=shell), 18, "hangs")
    assert job.judge(SIMULATOR, ended).text.startswith(
        "it did not end within 18 s; last in process "
    )
    ranks = [int(pid) for pid in re.findall(r"process (\d+)", ended.output)]
    assert (len(ranks), all(gone(rank) for rank in ranks)) == (2, True)


def test_how_a_job_is_started(monkeypatch):
    """On a free port, since doctors may run beside each other."""
    monkeypatch.setattr(job.child, "run", lambda *arguments: arguments)
    command, timeout_s, shell = job.start(replace(SIMULATOR, launched={"X": "y"}), 9.0)
    assert (
        "--nproc-per-node 2 --nnodes 1 --rdzv-backend c10d --rdzv-endpoint localhost:0 "
        in " ".join(command)
    )
    assert (timeout_s, shell) == (9.0, {"X": "y"})


def doctor(*arguments: str, path: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    shell = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("NVSHMEM_", "TDCOLL_"))
    }
    shell |= {
        "PYTHONPATH": os.pathsep.join([path, str(ROOT), os.environ.get("PYTHONPATH", "")]),
        **variables,
    }
    words = [sys.executable, "-m", "tdcoll", "doctor", *arguments]
    return subprocess.run(words, env=shell, capture_output=True, text=True, timeout=150)


@pytest.mark.slow
@pytest.mark.parametrize("interpret", ["1", pytest.param("", marks=pytest.mark.gpu)])
def test_on_this_host(interpret):
    """With variables that an outer job has left."""
    left = {"RANK": "3", "WORLD_SIZE": "7", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x"}
    done = doctor(TRITON_INTERPRET=interpret, **left)
    assert "\nok       small job: " in done.stdout, done.stdout
    if interpret:
        said = "2 simulated ranks, 64 MiB of symmetric heap each: all-gather by 1d and by auto is right"
        assert done.stdout.endswith(f"\nok       small job: {said}\n\nno problems, no notes\n")
    assert done.returncode == int("\nproblem " in done.stdout)


def test_where_tdcoll_cannot_be_imported(tmp_path):
    """The Triton that Python finds is not the one that pip has installed, and torch is broken."""
    for name, text in (
        ("triton", "__version__ = '3.4.0'\n"),
        ("torch", "raise OSError('libcudart.so.13')\n"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(text)
    done = doctor(path=str(tmp_path), TRITON_INTERPRET="1", TDCOLL_TIMOUT_S="3")
    assert (done.returncode, done.stderr) == (1, "")
    assert (
        "problem  torch: cannot be imported: OSError: libcudart.so.13\n         -> pip install"
        in done.stdout
    )
    assert (
        "problem  triton: 3.4.0 cannot be imported: ModuleNotFoundError: No module named 'triton._C'"
        in done.stdout
    )
    assert "did you mean TDCOLL_TIMEOUT_S?" in done.stdout
    assert (
        "note     small job: not run: torch, triton cannot be imported\n\n3 problems, 1 note\n"
        in done.stdout
    )


@pytest.mark.parametrize(
    ("arguments", "variables", "said"),
    [
        (["--nproc", "0"], {}, "--nproc must be at least 1, got 0"),
        (["--nproc", "x"], {}, "--nproc: invalid int value: 'x'"),
        (["--timeout", "-1"], {}, "--timeout must be greater than 0"),
        ([], {"LOCAL_RANK": "1"}, "run it without torchrun"),
    ],
)
def test_a_wrong_command_line_is_refused(arguments, variables, said, capsys):
    with pytest.raises(SystemExit) as refused:
        command.main(arguments, variables)
    assert refused.value.code == 2
    assert said in capsys.readouterr().err


FAILED = Ended("a\nValueError: x", "exit status 1")
RIGHT = Ended(f'{job._MARK}{{"rank": 0, "result": "right"}}')


@pytest.mark.parametrize(
    ("arguments", "facts", "ended", "status", "said"),
    [
        ([], GPUS, RIGHT, 0, "ok       small job: right\n\nno problems, no notes\n"),
        ([], GPUS, FAILED, 1, "no rank had begun\n         -> first see"),
        ([], GPUS, FAILED, 1, "         | a\n         | ValueError: x\n\n1 problem"),
        (
            ["--no-run"],
            SIMULATOR,
            None,
            0,
            "small job: not run: --no-run was given\n\nno problems, 1 note\n",
        ),
        (["--nproc", "4"], SIMULATOR, RIGHT, 0, "no problems, no notes"),
        (
            ["--nproc", "4"],
            GPUS,
            RIGHT,
            2,
            "--nproc must be at most the 3 visible GPUs of this host, got 4",
        ),
    ],
)
def test_exit_status(monkeypatch, capsys, arguments, facts, ended, status, said):
    monkeypatch.setattr(
        command, "collect", lambda _, nproc: replace(facts, nproc=nproc or facts.nproc)
    )
    monkeypatch.setattr(job, "start", lambda facts, timeout_s: ended)
    assert command.main(arguments, {}) == status
    assert said in "".join(capsys.readouterr())


@pytest.mark.slow
@pytest.mark.parametrize("variable", ["TDCOLL_TIMEOUT_S", "TDCOLL_BACKEND_HANDLES"])
def test_values_that_tdcoll_refuses(variable):
    """The small job reads them as a job of the user's would."""
    shell = {**SHELL, "TRITON_INTERPRET": "1", variable: "soon"}
    line = job.judge(SIMULATOR, job.start(replace(SIMULATOR, launched=shell, nproc=1), 60))
    assert (line.status, f"ValueError: {variable}" in line.text) == ("problem", True), line
