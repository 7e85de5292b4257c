# SPDX-License-Identifier: Apache-2.0
"""launch.sh: what it would start, what it refuses, and two small jobs that it does start."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from .conftest import REPOSITORY, Shell
from .test_setenv import NO_NUMBERS

LAUNCH = REPOSITORY / "launch.sh"

REPORT = """
import json, os, sys
names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "TDCOLL_EMULATE_NODES", "TDCOLL_TIMEOUT_S",
         "TRITON_INTERPRET", "OMP_NUM_THREADS")
with open(f"rank{os.environ['RANK']}.json", "w") as file:
    json.dump({"arguments": sys.argv[1:], **{name: os.environ.get(name) for name in names}}, file)
"""


@dataclass
class Plan:
    """What --dry-run printed."""

    exports: dict[str, str]
    command: list[str]

    def option(self, name: str) -> str:
        return self.command[self.command.index(name) + 1]

    @property
    def program(self) -> list[str]:
        return self.command[self.command.index("--") + 1 :]


@pytest.fixture
def script(shell: Shell) -> Path:
    path = shell.directory / "a script.py"
    path.write_text(REPORT)
    return path


def plan(shell: Shell, *arguments: str | Path, **variables: str) -> Plan:
    done = shell.run(LAUNCH, "--dry-run", *arguments, **variables)
    assert done.returncode == 0, done.stderr
    *exports, command = done.stdout.splitlines()
    pairs = [shlex.split(line.removeprefix("export "))[0].split("=", 1) for line in exports]
    return Plan(dict(pairs), shlex.split(command))


def refusal(shell: Shell, *arguments: str | Path, **variables: str) -> str:
    done = shell.run(LAUNCH, *arguments, **variables)
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert done.stdout == ""
    *chosen, message = done.stderr.splitlines()
    assert all(line.startswith("tdcoll: ") for line in chosen), done.stderr
    assert message.startswith("launch.sh: ")
    return message.removeprefix("launch.sh: ")


# --- what it would start --------------------------------------------------------------------------


def test_simulates_four_ranks_where_there_are_no_gpus(shell: Shell, script: Path) -> None:
    p = plan(shell, script.name)
    assert p.command[:3] == [sys.executable, "-m", "tdcoll.torchrun"]
    assert p.option("--nproc-per-node") == "4"
    assert p.program == [script.name]
    assert p.exports["TRITON_INTERPRET"] == "1"
    assert p.exports["OMP_NUM_THREADS"] == "1"
    assert p.exports["TDCOLL_NNODES"] == "1"
    assert "NVSHMEM_SYMMETRIC_SIZE" not in p.exports


def test_takes_all_gpus(shell: Shell, script: Path) -> None:
    shell.set_gpus(6)
    p = plan(shell, script)
    assert p.option("--nproc-per-node") == "6"
    assert "TRITON_INTERPRET" not in p.exports
    assert "OMP_NUM_THREADS" not in p.exports
    assert p.exports["NVSHMEM_REMOTE_TRANSPORT"] == "none"
    assert plan(shell, script, CUDA_VISIBLE_DEVICES="2,5,1").option("--nproc-per-node") == "3"


def test_nproc(shell: Shell, script: Path) -> None:
    assert plan(shell, "--nproc", "7", script).option("--nproc-per-node") == "7"
    assert plan(shell, "--nproc=07", script).option("--nproc-per-node") == "7"


def test_jobs_on_one_host_take_ports_of_their_own(shell: Shell, script: Path) -> None:
    p = plan(shell, script)
    assert p.option("--rdzv-endpoint") == "localhost:0"
    assert "--master-port" not in p.command


def test_simulate_wins_over_gpus(shell: Shell, script: Path) -> None:
    shell.set_gpus(2)
    p = plan(shell, "--simulate", script)
    assert p.exports["TRITON_INTERPRET"] == "1"
    assert p.option("--nproc-per-node") == "4"
    assert plan(shell, "--simulate", "--nproc", "3", script).option("--nproc-per-node") == "3"


def test_processes_that_share_gpus(shell: Shell, script: Path) -> None:
    shell.set_gpus(2)
    p = plan(shell, "--share-gpus", "--nproc", "8", "--emulate-nodes", "2", script)
    assert p.option("--nproc-per-node") == "8"
    assert p.exports["TDCOLL_SHARE_GPUS"] == "1"
    assert "TRITON_INTERPRET" not in p.exports
    assert plan(shell, "--share-gpus", script).option("--nproc-per-node") == "2"
    assert "TDCOLL_SHARE_GPUS" not in plan(shell, script).exports


def test_the_variable_lets_processes_share_gpus_too(shell: Shell, script: Path) -> None:
    shell.set_gpus(1)
    assert plan(shell, "--nproc", "3", script, TDCOLL_SHARE_GPUS="yes").option("--nproc-per-node") == "3"
    assert "1 visible GPU" in refusal(shell, "--nproc", "3", script, TDCOLL_SHARE_GPUS="0")
    assert "1 visible GPU" in refusal(shell, "--nproc", "3", script, TDCOLL_SHARE_GPUS="")
    assert plan(shell, "--simulate", script, TDCOLL_SHARE_GPUS="1").option("--nproc-per-node") == "4"


def test_several_hosts(shell: Shell, script: Path) -> None:
    p = plan(shell, "--nnodes", "3", "--node-rank", "2", "--rdzv", "head.example:1234", script)
    assert [p.option(f"--{name}") for name in ("nnodes", "node-rank", "master-addr", "master-port")] == [
        *("3", "2", "head.example", "1234")
    ]
    assert p.exports["TDCOLL_NNODES"] == "3"
    assert p.exports["TDCOLL_RDZV"] == "head.example:1234"


def test_an_ipv6_meeting_point(shell: Shell, script: Path) -> None:
    p = plan(shell, "--nnodes=2", "--node-rank=0", "--rdzv=[fe80::1]:1234", script)
    assert (p.option("--master-addr"), p.option("--master-port")) == ("fe80::1", "1234")


SLURM = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_STEP_ID": "0",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_JOB_NODELIST": "gpu[007-009,12],other",
}


def test_slurm_says_the_hosts(shell: Shell, script: Path) -> None:
    p = plan(shell, script, **SLURM)
    assert [p.option(f"--{name}") for name in ("nnodes", "node-rank", "master-addr", "master-port")] == [
        *("2", "1", "gpu007", "24567")
    ]


def test_scontrol_knows_the_first_host_best(shell: Shell, script: Path) -> None:
    shell.program("scontrol", '#!/bin/bash\n[[ "$1 $2" == "show hostnames" ]] && printf "first\\nsecond\\n"\n')
    assert plan(shell, script, **SLURM).option("--master-addr") == "first"


def test_options_win_over_slurm(shell: Shell, script: Path) -> None:
    p = plan(shell, "--node-rank", "0", "--rdzv", "h:99", script, **SLURM)
    assert [p.option(f"--{name}") for name in ("nnodes", "node-rank", "master-addr", "master-port")] == [
        *("2", "0", "h", "99")
    ]
    assert plan(shell, "--nnodes", "1", script, **SLURM).exports["TDCOLL_NNODES"] == "1"
    assert plan(shell, script, MASTER_PORT="4711", **SLURM).option("--master-port") == "4711"


def test_an_allocation_of_one_host_is_nothing_special(shell: Shell, script: Path) -> None:
    batch = {"SLURM_NNODES": "1", "SLURM_NODEID": "0", "SLURM_JOB_NODELIST": "gpu7", "SLURM_LOCALID": "0"}
    assert plan(shell, script, **batch).option("--rdzv-endpoint") == "localhost:0"
    assert plan(shell, script, SLURM_STEP_ID="0", **batch).option("--rdzv-endpoint") == "localhost:0"


def test_a_step_may_have_fewer_hosts_than_the_allocation(shell: Shell, script: Path) -> None:
    step = {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "gpu008", "SLURM_NODEID": "0"}
    assert plan(shell, script, **{**SLURM, **step}).option("--rdzv-endpoint") == "localhost:0"
    step = {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "gpu[008-009]", "SLURM_NNODES": "4"}
    p = plan(shell, script, **{**SLURM, **step})
    assert (p.option("--nnodes"), p.option("--master-addr")) == ("2", "gpu008")


def outside_a_step() -> dict[str, str]:
    """What a batch script sees: the allocation's hosts, of which it runs on the first."""
    return {**{name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"}, "SLURM_NODEID": "0"}


def test_a_batch_script_may_ask_for_its_host_alone(shell: Shell, script: Path) -> None:
    assert plan(shell, "--nnodes", "1", script, **outside_a_step()).option("--rdzv-endpoint") == "localhost:0"
    several = ("--nnodes", "2", "--node-rank", "1", "--rdzv", "h:99")
    assert plan(shell, *several, script, **outside_a_step()).option("--node-rank") == "1"
    assert plan(shell, "tests", **outside_a_step()).command[2] == "pytest"


def test_emulated_nodes_timeout_and_monitor_interval(shell: Shell, script: Path) -> None:
    p = plan(shell, "--emulate-nodes", "2", "--timeout", "2.5", "--monitor-interval", "10", script)
    assert p.exports["TDCOLL_EMULATE_NODES"] == "2"
    assert p.exports["TDCOLL_TIMEOUT_S"] == "2.5"
    assert p.option("--monitor-interval") == "10"


def test_arguments_are_the_programs_own(shell: Shell, script: Path) -> None:
    arguments = ["--", "--nproc", "9", "", "two words", "--help", "$HOME", "--"]
    assert plan(shell, script, *arguments).program == [str(script), *arguments]
    p = plan(shell, "-m", "some.module", *arguments)
    assert p.program == ["some.module", *arguments]
    assert p.command[p.command.index("--") - 1] == "-m"


def test_tests_are_pytest_without_torchrun(shell: Shell) -> None:
    p = plan(shell, "tests", "-k", "two words", "-n", "0")
    assert p.command == [sys.executable, "-m", "pytest", "-k", "two words", "-n", "0"]
    assert plan(shell, "tests", "--pdb").command[-2:] == ["pytest", "--pdb"]
    shell.set_gpus(2)
    assert plan(shell, "tests").command == [sys.executable, "-m", "pytest"]


def test_dry_run_output_is_a_script(shell: Shell, script: Path) -> None:
    done = shell.run(LAUNCH, "--dry-run", "--nproc", "1", script, "it's")
    done = shell.run("-c", done.stdout)
    assert done.returncode == 0, done.stderr
    assert json.loads((shell.directory / "rank0.json").read_text())["arguments"] == ["it's"]


def test_help(shell: Shell) -> None:
    for option in ("-h", "--help"):
        done = shell.run(LAUNCH, option)
        assert done.returncode == 0
        assert "--emulate-nodes" in done.stdout
        assert "--share-gpus" in done.stdout


# --- what it refuses ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--bogus", "SCRIPT"], ["--bogus", "--help"]),
        ([], ["script:", "got nothing"]),
        (["--nproc", "2"], ["script:", "got nothing"]),
        (["nowhere.py"], ["script:", "'nowhere.py'", "not found"]),
        (["."], ["script:", "'.'", "not a file"]),
        (["-m"], ["-m:", "a module", "nothing"]),
        (["-m", "--nproc"], ["-m:", "a module", "'--nproc'"]),
        (["--nproc"], ["--nproc:", "a value", "nothing"]),
        (["--nproc", "two", "SCRIPT"], ["--nproc:", "whole number", "'two'"]),
        (["--nproc", "0", "SCRIPT"], ["--nproc:", "at least 1", "'0'"]),
        (["--nproc", "-1", "SCRIPT"], ["--nproc:", "at least 1", "'-1'"]),
        (["--nproc", "1.5", "SCRIPT"], ["--nproc:", "whole number", "'1.5'"]),
        (["--nproc=", "SCRIPT"], ["--nproc:", "whole number", "''"]),
        (["--simulate=yes", "SCRIPT"], ["--simulate:", "no value", "'yes'"]),
        (["--emulate-nodes", "0", "SCRIPT"], ["--emulate-nodes:", "at least 1", "'0'"]),
        (["--emulate-nodes", "5", "SCRIPT"], ["--emulate-nodes:", "1 to 4", "got 5"]),
        (["--nproc", "2", "--emulate-nodes", "3", "SCRIPT"], ["--emulate-nodes:", "1 to 2", "got 3"]),
        (["--timeout", "0", "SCRIPT"], ["--timeout:", "positive", "'0'"]),
        (["--timeout", "soon", "SCRIPT"], ["--timeout:", "seconds", "'soon'"]),
        (["--monitor-interval", "x", "SCRIPT"], ["--monitor-interval:", "seconds", "'x'"]),
        (["--nnodes", "x", "SCRIPT"], ["--nnodes:", "whole number", "'x'"]),
        (["--nnodes", "2", "--node-rank", "0", "SCRIPT"], ["--rdzv:", "HOST:PORT", "nothing"]),
        (["--nnodes", "2", "--rdzv", "h:1", "SCRIPT"], ["--node-rank:", "0 to 1", "nothing"]),
        (
            ["--nnodes", "2", "--rdzv", "h:1", "--node-rank", "2", "SCRIPT"],
            ["--node-rank:", "0 to 1", "got 2"],
        ),
        (["--node-rank", "1", "SCRIPT"], ["--node-rank:", "0 to 0", "got 1"]),
        (["--nnodes", "2", "--rdzv", "h", "--node-rank", "0", "SCRIPT"], ["--rdzv:", "HOST:PORT", "'h'"]),
        (["--nnodes", "2", "--rdzv", "h:0", "--node-rank", "0", "SCRIPT"], ["--rdzv:", "port", "'h:0'"]),
        (["--nnodes", "2", "--rdzv", "h:x", "--node-rank", "0", "SCRIPT"], ["--rdzv:", "port", "'h:x'"]),
        (["--nproc", "2", "tests"], ["--nproc:", "tests"]),
        (["--share-gpus", "tests"], ["--share-gpus:", "tests"]),
        (["--compat", "tests"], ["--compat:", "tests"]),
        (["--compat=1", "SCRIPT"], ["--compat:", "no value", "'1'"]),
        (["--compat", "-m", "json.tool"], ["--compat:", "expected a script", "json.tool"]),
        (["--share-gpus=1", "SCRIPT"], ["--share-gpus:", "no value", "'1'"]),
        (["--share-gpus", "SCRIPT"], ["--share-gpus:", "expected GPUs", "simulator"]),
        (["--share-gpus", "--simulate", "SCRIPT"], ["--share-gpus:", "expected GPUs", "simulator"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_wrong_command_line(shell: Shell, script: Path, arguments: list[str], words: list[str]) -> None:
    message = refusal(shell, *(script if a == "SCRIPT" else a for a in arguments))
    for word in words:
        assert word in message


def test_more_processes_than_gpus(shell: Shell, script: Path) -> None:
    shell.set_gpus(2)
    message = refusal(shell, "--nproc", "3", script)
    assert "--nproc:" in message
    assert "2 visible GPUs" in message
    assert "got 3" in message
    assert "--share-gpus" in message
    assert "1 visible GPU" in refusal(shell, "--nproc", "2", script, CUDA_VISIBLE_DEVICES="1")


def test_no_gpu_and_the_simulator_forbidden(shell: Shell, script: Path) -> None:
    assert "TRITON_INTERPRET:" in refusal(shell, script, TRITON_INTERPRET="0")


def test_several_tasks_of_slurm_on_one_host(shell: Shell, script: Path) -> None:
    assert "SLURM_LOCALID:" in refusal(shell, script, SLURM_LOCALID="1", **SLURM)


def test_slurm_without_hosts(shell: Shell, script: Path) -> None:
    message = refusal(shell, script, SLURM_STEP_ID="0", SLURM_NNODES="2", SLURM_NODEID="0")
    assert "--rdzv:" in message
    assert "SLURM_JOB_NODELIST" in message


@pytest.mark.parametrize(
    "name", ["SLURM_JOB_ID", "SLURM_NNODES", "SLURM_STEP_NUM_NODES", "SLURM_NODEID", "MASTER_PORT"]
)
def test_a_variable_that_is_no_number_is_named(shell: Shell, script: Path, name: str) -> None:
    for value in NO_NUMBERS:
        done = shell.run(LAUNCH, script, **{**SLURM, name: value})
        assert done.returncode == 2
        assert done.stderr.startswith(f"launch.sh: {name}: expected a whole number of at least ")
    assert not (shell.directory / "evaluated").exists()


def test_slurms_numbers_are_decimal(shell: Shell, script: Path) -> None:
    numbers = {"SLURM_JOB_ID": "0100000000089", "SLURM_NNODES": "010", "SLURM_NODEID": "08"}
    p = plan(shell, script, **{**SLURM, **numbers})
    assert [p.option(f"--{name}") for name in ("nnodes", "node-rank", "master-port")] == ["10", "8", "20089"]


def test_a_batch_script_of_several_hosts_outside_a_step(shell: Shell, script: Path) -> None:
    """It would wait for ever for the other hosts, on which nothing was started."""
    message = refusal(shell, script, **outside_a_step())
    for word in ("--nnodes:", "2 hosts", "srun --ntasks-per-node 1", "--nnodes 1"):
        assert word in message
    assert "outside of a step" in refusal(shell, script, SLURM_STEP_ID="4294967291", **outside_a_step())
    message = refusal(shell, "--nnodes", "2", script, **outside_a_step())
    assert "--rdzv:" in message


# --- jobs -----------------------------------------------------------------------------------------


def reports(directory: Path) -> dict[int, dict[str, object]]:
    return {int(p.stem.removeprefix("rank")): json.loads(p.read_text()) for p in directory.glob("rank*.json")}


def test_a_job(shell: Shell, script: Path) -> None:
    arguments = ["--", "--nproc", "9", "two words", ""]
    done = shell.run(
        *(LAUNCH, "--nproc", "2", "--emulate-nodes", "2", "--timeout", "3", script.name, *arguments),
        OMP_NUM_THREADS="3",
    )
    assert done.returncode == 0, done.stderr
    found = reports(shell.directory)
    assert sorted(found) == [0, 1]
    for rank, report in found.items():
        assert report == {
            "arguments": arguments,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "GROUP_RANK": "0",
            "WORLD_SIZE": "2",
            "TDCOLL_EMULATE_NODES": "2",
            "TDCOLL_TIMEOUT_S": "3",
            "TRITON_INTERPRET": "1",
            "OMP_NUM_THREADS": "3",
        }


def test_a_failing_job_fails(shell: Shell) -> None:
    (shell.directory / "fails.py").write_text("raise SystemExit(7)\n")
    done = shell.run(LAUNCH, "--nproc", "1", "fails.py")
    assert done.returncode == 1
    assert "exitcode  : 7" in done.stderr
    assert done.stderr.endswith("\ntdcoll: ended: rank 0 (exit status 7)\n")


def test_two_launches_on_one_host_make_one_job(shell: Shell, script: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    hosts = ["--nnodes", "2", "--rdzv", f"127.0.0.1:{port}", "--nproc", "2"]
    # The one with the higher rank comes first: ranks follow from --node-rank, not from the order of arrival.
    agents = [shell.start(LAUNCH, *hosts, "--node-rank", "1", script)]
    time.sleep(0.3)
    agents.append(shell.start(LAUNCH, *hosts, "--node-rank", "0", script))
    for agent in agents:
        _, err = agent.communicate(timeout=60)
        assert agent.returncode == 0, err
    found = reports(shell.directory)
    assert [(r["GROUP_RANK"], r["LOCAL_RANK"], r["WORLD_SIZE"]) for _, r in sorted(found.items())] == [
        *(("0", "0", "4"), ("0", "1", "4"), ("1", "0", "4"), ("1", "1", "4"))
    ]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_job(shell: Shell, number: signal.Signals) -> None:
    (shell.directory / "sleeps.py").write_text(
        "import os, pathlib, time\npathlib.Path('pid').write_text(str(os.getpid()))\ntime.sleep(60)\n"
    )
    child = shell.start(LAUNCH, "--nproc", "1", "sleeps.py")
    pid = shell.directory / "pid"
    deadline = time.monotonic() + 30
    while not (pid.exists() and pid.read_text()):
        assert child.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    child.send_signal(number)
    try:
        _, err = child.communicate(timeout=30)
    except subprocess.TimeoutExpired:
        pytest.fail(f"the job outlived {number.name}")
    assert child.returncode != 0
    assert "tdcoll: died" not in err
    stat = Path("/proc", pid.read_text(), "stat")
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_launcher_that_is_killed_takes_its_ranks_along_and_leaves_nothing(shell: Shell) -> None:
    """Also ranks that ignore SIGTERM, and before they have called anything of tdcoll's."""
    (shell.directory / "sleeps.py").write_text(
        "import os, pathlib, signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "assert os.environ['TDCOLL_LAST_WORDS']\n"
        "pathlib.Path(f'pid{os.environ[\"RANK\"]}').write_text(f'{os.getpid()}.')\ntime.sleep(60)\n"
    )
    temporary = shell.directory / "temporary"
    temporary.mkdir()
    child = shell.start(LAUNCH, "--nproc", "2", "sleeps.py", TMPDIR=str(temporary))
    files = [shell.directory / f"pid{rank}" for rank in range(2)]
    deadline = time.monotonic() + 30
    while not all(file.exists() and file.read_text().endswith(".") for file in files):
        assert child.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    ranks = [int(file.read_text().rstrip(".")) for file in files]
    assert all(map(runs, ranks))
    child.send_signal(signal.SIGKILL)
    child.wait(timeout=30)
    deadline = time.monotonic() + 5
    try:
        while any(map(runs, ranks)):
            assert time.monotonic() < deadline, "the ranks outlived their launcher"
            time.sleep(0.05)
    finally:
        for rank in filter(runs, ranks):
            os.kill(rank, signal.SIGKILL)
    left = [path.name for path in temporary.iterdir() if not path.name.startswith("torchelastic_")]  # PyTorch's own
    assert left == []


def test_another_shell_is_told_to_use_bash() -> None:
    done = subprocess.run(["sh", str(LAUNCH), "x.py"], capture_output=True, text=True, timeout=30)
    if subprocess.run(["sh", "-c", "echo ${BASH_VERSION:-}"], capture_output=True, text=True).stdout.strip():
        pytest.skip("sh is bash here")
    assert done.returncode == 2
    assert "expected to be run by bash" in done.stderr
