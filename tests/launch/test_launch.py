# SPDX-License-Identifier: Apache-2.0
"""launch.sh: what it would start, what it refuses, and a few small jobs that it does start."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from tdcoll.tools import launch
from tdcoll.tools.setenv import Job

from .conftest import REPOSITORY, Shell

LAUNCH = REPOSITORY / "launch.sh"


class Plan(NamedTuple):
    """What launch.sh would become, and whether it takes all ranks to be on this host."""

    command: list[str]
    variables: dict[str, str]
    one_host: bool

    def option(self, name: str) -> str:
        return self.command[self.command.index(name) + 1]

    @property
    def hosts(self) -> str:
        return " ".join(
            self.option(f"--{name}")
            for name in ("nnodes", "node-rank", "master-addr", "master-port")
        )

    @property
    def program(self) -> list[str]:
        return self.command[self.command.index("--") + 1 :]


Planner = Callable[..., Plan]


@pytest.fixture
def plan(clean: pytest.MonkeyPatch, tmp_path: Path) -> Planner:
    """``plan("--option job.py", "of the program", gpus=0, **variables)``."""
    clean.chdir(tmp_path)
    (tmp_path / "job.py").touch()

    def make(line: str, *arguments: str, gpus: int = 0, **variables: str) -> Plan:
        became: list[Any] = []

        def prepare(given: Mapping[str, str], one_host: bool = True, **_: Any) -> Job:
            became.append(one_host)
            interpret = given.get("TRITON_INTERPRET")
            return Job("PYTHON", gpus, interpret == "1" or not (interpret or gpus), dict(given))

        with pytest.MonkeyPatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            patch.setattr(launch, "prepare", prepare)
            patch.setattr(os, "execvpe", lambda _, *given: became.append(given))
            if status := launch.main([*line.split(), *arguments], "launch.sh"):
                sys.exit(status)
        return Plan(*became[1], became[0])

    return make


@pytest.fixture
def refusal(plan: Planner, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The last line on stderr of what ends with status 2."""

    def refused(*arguments: str, **given: str | int) -> str:
        with pytest.raises(SystemExit) as ended:
            plan(*arguments, **given)
        out, err = capsys.readouterr()
        assert (ended.value.code, out) == (2, "")
        return err.splitlines()[-1]

    return refused


# --- what it would start --------------------------------------------------------------------------


def test_simulates_four_ranks_where_there_are_no_gpus(plan: Planner) -> None:
    p = plan("job.py")
    assert p.command[:3] == ["PYTHON", "-m", "tdcoll.tools.torchrun"]
    assert (p.option("--nproc-per-node"), p.program, p.one_host) == ("4", ["job.py"], True)
    assert p.option("--rdzv-endpoint") == "localhost:0", "jobs on one host take ports of their own"
    assert "--master-port" not in p.command
    assert p.variables["OMP_NUM_THREADS"] == "1"
    assert plan("job.py", OMP_NUM_THREADS="3").variables["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize(
    ("options", "gpus", "nproc"),
    [
        ("", 6, "6"),
        ("--nproc 7", 0, "7"),
        ("--nproc=07", 8, "7"),
        ("--simulate", 2, "4"),
        ("--simulate --nproc 3", 2, "3"),
        ("--share-gpus", 2, "2"),
        ("--share-gpus --nproc 8", 2, "8"),
    ],
)
def test_how_many_processes(plan: Planner, options: str, gpus: int, nproc: str) -> None:
    p = plan(f"{options} job.py", gpus=gpus)
    assert p.option("--nproc-per-node") == nproc
    assert p.variables.get("TRITON_INTERPRET") == ("1" if "--simulate" in options else None)
    assert ("OMP_NUM_THREADS" in p.variables) == (not gpus or "--simulate" in options)
    assert p.variables.get("TDCOLL_SHARE_GPUS") == ("1" if "--share-gpus" in options else None)


@pytest.mark.parametrize(
    "host", ["head.example", "fe80::1", "127.0.0.1", "127.1.2.3", "localhost", "::1"]
)
def test_several_hosts(plan: Planner, host: str) -> None:
    """Agents that meet on a loopback address are on one host, whatever their number."""
    p = plan(f"--nnodes=3 --node-rank 2 --rdzv {f'[{host}]' if ':' in host else host}:1234 job.py")
    assert (p.hosts, p.one_host) == (f"3 2 {host} 1234", host[0] not in "hf")


def test_emulated_nodes_timeout_and_monitor_interval(plan: Planner) -> None:
    p = plan("--emulate-nodes 2 --timeout 2.5 --monitor-interval 10 job.py")
    assert (p.variables["TDCOLL_EMULATE_NODES"], p.variables["TDCOLL_TIMEOUT_S"]) == ("2", "2.5")
    assert p.option("--monitor-interval") == "10.0"


def test_arguments_are_the_programs_own(plan: Planner) -> None:
    arguments = ["--", "--nproc", "9", "", "two words", "--help", "-m", "$HOME", "--"]
    assert plan("job.py", *arguments).program == ["job.py", *arguments]
    for module in ("some.module", "tests"):
        p = plan(f"-m {module}", *arguments)
        assert p.program == [module, *arguments]
        assert p.command[p.command.index("--") - 1] == "-m"


def test_one_leading_dash_dash_is_no_program(plan: Planner, refusal: Callable[..., str]) -> None:
    assert plan("--nproc 2 -- job.py -- --nproc 9").program == ["job.py", "--", "--nproc", "9"]
    assert plan("-- tests -s").command == ["PYTHON", "-m", "pytest", "-s"]
    assert plan("-m -- some.module").program == ["some.module"]
    assert "got nothing" in refusal("--nproc 2 --")
    assert "script: expected a Python file, got '--'" in refusal("-- -- job.py")


def test_tests_are_pytest_without_torchrun(plan: Planner) -> None:
    assert plan("tests -k", "two words").command[3:] == [*launch._SPREAD, "-k", "two words"]
    assert Path.cwd() == REPOSITORY
    for argument in ("--pdb", "-s"):
        assert plan(f"tests {argument}").command == ["PYTHON", "-m", "pytest", argument]
    assert plan("tests", gpus=2).command == ["PYTHON", "-m", "pytest"]
    assert plan("--timeout 3 tests").variables["TDCOLL_TIMEOUT_S"] == "3.0"


# --- SLURM ----------------------------------------------------------------------------------------

SLURM = {
    "JOB_ID": "1234567",
    "STEP_NUM_NODES": "2",
    "NNODES": "2",
    "NODEID": "1",
    "JOB_NODELIST": "gpu[007-009,12],other",
}
BATCH = "STEP_NUM_NODES= NODEID=0"
"""What a batch script sees: the allocation's hosts, of which it runs on the first."""


def of_slurm(changes: str) -> dict[str, str]:
    variables = SLURM | dict(change.split("=") for change in changes.split())
    return {
        name if name.startswith("MASTER") else f"SLURM_{name}": value
        for name, value in variables.items()
    }


@pytest.mark.parametrize(
    ("options", "changes", "hosts"),
    [
        ("", "", "2 1 gpu007 24567"),
        # decimal all the same
        ("", "JOB_ID=0100000000089 STEP_NUM_NODES=010 NODEID=08", "10 8 gpu007 20089"),
        ("", "JOB_NODELIST=a-1,a-2", "2 1 a-1 24567"),
        ("", "JOB_NODELIST=n[3]x,b", "2 1 n3x 24567"),
        ("", "JOB_NODELIST=rack[1-2]n[03,4],b", "2 1 rack1n03 24567"),
        ("", "MASTER_PORT=4711", "2 1 gpu007 4711"),
        ("--node-rank 0 --rdzv h:99", "", "2 0 h 99"),
        ("--nnodes 1", "", "alone"),
        ("", "STEP_NUM_NODES=1 NNODES=1 NODEID=0 LOCALID=0", "alone"),
        ("", "NNODES=1 STEP_NUM_NODES= NODEID=0", "alone"),
        # fewer hosts than the allocation
        ("", "STEP_NUM_NODES=1 STEP_NODELIST=gpu008 NODEID=0", "alone"),
        ("", "STEP_NUM_NODES=2 STEP_NODELIST=gpu[008-009] NNODES=4", "2 1 gpu008 24567"),
        ("--nnodes 1", BATCH, "alone"),
        ("--nnodes 2 --node-rank 1 --rdzv h:99", BATCH, "2 1 h 99"),
    ],
)
def test_slurm_says_the_hosts(plan: Planner, options: str, changes: str, hosts: str) -> None:
    p = plan(f"{options} job.py", **of_slurm(changes))
    assert ("alone" if p.one_host else p.hosts) == hosts
    assert ("localhost:0" in p.command) == p.one_host


@pytest.mark.parametrize(
    ("options", "changes", "words"),
    [
        # It would wait for ever for the other hosts, on which nothing was started.
        ("", BATCH, "--nnodes: |the 2 hosts|srun --ntasks-per-node 1|--nnodes 1"),
        ("--nnodes 2", BATCH, "--rdzv: expected HOST:PORT"),
        ("", "LOCALID=1", "SLURM_LOCALID: "),
        *(
            ("", f"JOB_NODELIST={nodes}", f"--rdzv: |SLURM_JOB_NODELIST|got '{nodes}'")
            for nodes in ("", "a]", "a[1-2", "[x]")
        ),
    ],
)
def test_what_slurm_says_wrong(
    refusal: Callable[..., str], options: str, changes: str, words: str
) -> None:
    message = refusal(f"{options} job.py", **of_slurm(changes))
    assert [word for word in words.split("|") if word not in message] == []


# A shell takes most of these as arithmetic, and runs the command in the first.
NO_NUMBERS = (
    "a[$(touch evaluated)]",
    "1e3",
    "abc",
    "0x2",
    "-1",
    " 2",
    "²",
    "٣",
    "9" * 5000,
    "2\n3",
    "1+1",
    "PATH",
)


NUMBERS = "SLURM_JOB_ID SLURM_STEP_NUM_NODES SLURM_NODEID MASTER_PORT TDCOLL_NNODES"


@pytest.mark.parametrize("name", NUMBERS.split())
def test_a_variable_that_is_no_number_is_named(refusal: Callable[..., str], name: str) -> None:
    line = "--setenv" if name == "TDCOLL_NNODES" else "job.py"
    for value in NO_NUMBERS:
        message = refusal(line, **of_slurm("") | {name: value})
        assert re.match(rf"tdcoll: {name} must be a whole number of at least [01], got '", message)


# --- what it refuses ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        *((f"{text} job.py", f"unrecognized {text}") for text in ("--bogus", "--simul")),
        *((text, "program: got nothing") for text in ("", "--nproc 2", "-m")),
        ("nowhere.py", "script: 'nowhere.py'"),
        (".", "script: '.'"),
        ("--nproc", "--nproc: expected one argument"),
        *(
            (f"--nproc={text} job.py", f"--nproc at least 1, got '{text}'")
            for text in ("two", "0", "-1", "1.5", "")
        ),
        ("--simulate=yes job.py", "--simulate 'yes'"),
        ("--emulate-nodes 0 job.py", "--emulate-nodes at least 1, got '0'"),
        ("--emulate-nodes 5 job.py", "--emulate-nodes: expected 1 to 4, got 5"),
        ("--nproc 2 --emulate-nodes 3 job.py", "--emulate-nodes: expected 1 to 2, got 3"),
        ("--timeout 0 job.py", "--timeout must be greater than 0 got 0.0"),
        ("--timeout soon job.py", "--timeout: 'soon'"),
        ("--monitor-interval inf job.py", "--monitor-interval must be at most got inf"),
        ("--nnodes x job.py", "--nnodes whole number 'x'"),
        (
            "--nnodes 2 --node-rank 0 job.py",
            "--rdzv: expected HOST:PORT with --nnodes 2 got nothing",
        ),
        ("--nnodes 2 --rdzv h:1 job.py", "--node-rank: expected 0 to 1 got nothing"),
        ("--nnodes 2 --rdzv h:1 --node-rank 2 job.py", "--node-rank: expected 0 to 1 got 2"),
        ("--node-rank 1 job.py", "--node-rank: expected 0 to 0 got 1"),
        *(
            (
                f"--nnodes 2 --rdzv {text} --node-rank 0 job.py",
                f"--rdzv: HOST:PORT port got '{text}'",
            )
            for text in ("h", "h:0", "h:x", "h:65536", "a:b:1", "[::1:1")
        ),
        *(
            (f"--{option} tests", f"--{option.split()[0]}: tests")
            for option in ("nproc 2", "share-gpus")
        ),
        ("--share-gpus job.py", "--share-gpus: expected GPUs simulator"),
    ],
)
def test_a_wrong_command_line(refusal: Callable[..., str], arguments: str, words: str) -> None:
    message = refusal(arguments)
    for word in words.split(" "):
        assert word in message


def test_more_processes_than_gpus(refusal: Callable[..., str]) -> None:
    for environment in ({}, {"TDCOLL_SHARE_GPUS": "0"}, {"TDCOLL_SHARE_GPUS": ""}):
        message = refusal("--nproc 3 job.py", gpus=2, **environment)
        for word in ("--nproc:", "at most 2", "got 3", "--share-gpus"):
            assert word in message


def test_the_variable_lets_processes_share_gpus_too(plan: Planner) -> None:
    assert (
        plan("--nproc 3 job.py", gpus=1, TDCOLL_SHARE_GPUS="yes").option("--nproc-per-node") == "3"
    )
    assert plan("--simulate job.py", TDCOLL_SHARE_GPUS="1").option("--nproc-per-node") == "4"


def test_no_gpu_and_the_simulator_forbidden(refusal: Callable[..., str]) -> None:
    assert "TRITON_INTERPRET: expected 1" in refusal("job.py", TRITON_INTERPRET="0")


# --- jobs -----------------------------------------------------------------------------------------

REPORT = """
import json, os, sys
rank = os.environ["RANK"]
with open(f"rank{rank}.json", "w") as file:
    json.dump([sys.argv[1:], dict(os.environ)], file)
"""


def reports(shell: Shell, *names: str) -> tuple[list[list[str]], list[list[str]]]:
    """Each rank's arguments and variables."""
    found = [json.loads(path.read_text()) for path in sorted(shell.directory.glob("rank*.json"))]
    return [arguments for arguments, _ in found], [
        [variables[name] for name in names] for _, variables in found
    ]


@pytest.fixture
def script(shell: Shell) -> Path:
    path = shell.directory / "a script.py"
    path.write_text(REPORT)
    return path


def test_a_dry_run_prints_a_job(shell: Shell, script: Path) -> None:
    """Any shell runs launch.sh, and nothing in the current directory is taken for a module of
    Python's."""
    shadow = shell.directory / "argparse.py"
    shadow.write_text("raise AssertionError\n")
    arguments = ["--", "--nproc", "9", "it's two words", "$HOME", ""]
    options = ("--nproc", "2", "--emulate-nodes", "2", "--timeout", "3", script.name)
    done = shell.run(
        "-c", 'exec sh "$@"', "-", LAUNCH, "--dry-run", *options, *arguments, OMP_NUM_THREADS="3"
    )
    assert done.returncode == 0, done.stderr
    assert reports(shell) == ([], [])
    shadow.unlink()
    done = shell.run("-c", done.stdout, OMP_NUM_THREADS="3")
    assert done.returncode == 0, done.stderr
    names = (
        "RANK",
        "LOCAL_RANK",
        "GROUP_RANK",
        "WORLD_SIZE",
        "TDCOLL_EMULATE_NODES",
        "TDCOLL_TIMEOUT_S",
    )
    found, variables = reports(shell, *names, "TRITON_INTERPRET", "OMP_NUM_THREADS")
    assert found == [arguments] * 2
    assert variables == [[rank, rank, "0", "2", "2", "3.0", "1", "3"] for rank in "01"]


def test_a_failing_job_fails(shell: Shell) -> None:
    sleeps = "import os, time\ntime.sleep(60 * (os.environ['RANK'] == '0'))\nraise SystemExit(7)\n"
    (shell.directory / "fails.py").write_text(sleeps)
    done = shell.run(LAUNCH, "--nproc", "2", "fails.py")
    assert done.returncode == 1
    assert "exitcode  : 7" not in done.stderr
    ended = [
        "tdcoll: ended: rank 1 (exit status 7)",
        "tdcoll: still running, ended by torchrun: rank 0",
    ]
    assert done.stderr.splitlines()[-2:] == ended
    assert (
        "exitcode  : 7"
        in shell.run(LAUNCH, "--nproc", "2", "fails.py", TDCOLL_TRACEBACK="1").stderr
    )


def test_two_launches_on_one_host_make_one_job(shell: Shell, script: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    hosts = ["--nnodes", "2", "--rdzv", f"127.0.0.1:{port}", "--nproc", "2"]
    # The one with the higher rank comes first: ranks follow from --node-rank, not from the order of
    # arrival.
    agents = [shell.start(LAUNCH, *hosts, "--node-rank", "1", script)]
    time.sleep(0.5)
    agents.append(shell.start(LAUNCH, *hosts, "--node-rank", "0", script))
    for agent in agents:
        _, err = agent.communicate(timeout=60)
        assert agent.returncode == 0, err
    found = reports(shell, "GROUP_RANK", "LOCAL_RANK", "WORLD_SIZE")[1]
    assert found == [["0", "0", "4"], ["0", "1", "4"], ["1", "0", "4"], ["1", "1", "4"]]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_ends_the_job_and_leaves_nothing(shell: Shell, number: signal.Signals) -> None:
    """Also before ranks have called anything of tdcoll's, and ranks that ignore the signal that
    torchrun passes on. It waits for such ranks for 30 s; after Ctrl-C that is cut short."""
    ignored = {signal.SIGKILL: "SIGTERM", signal.SIGINT: "SIGINT"}.get(number)
    ignore = f"signal.signal(signal.{ignored}, signal.SIG_IGN)" if ignored else ""
    (shell.directory / "sleeps.py").write_text(
        f"import os, pathlib, signal, time\n{ignore}\nassert os.environ['TDCOLL_LAST_WORDS']\n"
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
    ranks = [psutil.Process(int(file.read_text().rstrip("."))) for file in files]
    child.send_signal(number)
    assert child.wait(timeout=20) != 0
    _, left = psutil.wait_procs(ranks, timeout=5)
    alive = [rank for rank in left if rank.status() != psutil.STATUS_ZOMBIE]  # if nobody reaps them
    for rank in alive:
        rank.kill()
    assert not alive, "the ranks outlived their launcher"
    said = child.communicate()[1]
    assert "tdcoll: died" not in said
    assert (number == signal.SIGINT) == said.endswith("tdcoll: Ctrl-C has ended the job\n")
    # PyTorch's own
    left = [path.name for path in temporary.iterdir() if not path.name.startswith("torchelastic_")]
    assert left == []
