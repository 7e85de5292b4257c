# SPDX-License-Identifier: Apache-2.0
"""setenv.sh: what it chooses, what it exports, and all that it leaves alone."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tdcoll.tools import setenv
from tdcoll.tools.setenv import _default_interface

from .conftest import REPOSITORY, Shell

SETENV = REPOSITORY / "setenv.sh"
IFNAME = "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME"

# ---------------------------------------------------------------------- what it chooses and exports


Prepared = Callable[..., tuple[setenv.Job, dict[str, str], list[str]]]


@pytest.fixture
def prepared(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Prepared:
    """``prepared(gpus=0, one_host=True, **variables)``: job, NVSHMEM's variables, and output, if
    nothing is missing."""
    monkeypatch.setattr(setenv, "_problem", lambda modules, versions: "")

    def prepare(gpus: int = 0, one_host: bool = True, **variables: str) -> tuple[Any, ...]:
        shell.set_gpus(gpus)
        job = setenv.prepare({**shell.environment, **variables}, one_host=one_host)
        of_nvshmem = {
            name: value for name, value in job.variables.items() if name.startswith("NVSHMEM_")
        }
        return job, of_nvshmem, capsys.readouterr().err.splitlines()

    return prepare


def test_without_gpus_it_simulates(prepared: Prepared) -> None:
    job, of_nvshmem, (python, mode) = prepared()
    assert (job.python, job.gpus, job.simulated, of_nvshmem) == (sys.executable, 0, True, {})
    assert job.variables["TRITON_INTERPRET"] == "1"
    assert job.variables["PYTHONPATH"].split(":")[0] == str(REPOSITORY)
    assert "LD_LIBRARY_PATH" not in job.variables
    assert python.startswith(f"tdcoll: python: {sys.executable} (Python 3.")
    assert mode == "tdcoll: mode: simulator (visible GPUs: 0)"


def test_with_gpus_it_sets_nvshmem_up(prepared: Prepared, tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    home = {"NVSHMEM_HOME": str(tmp_path)}
    job, of_nvshmem, (_, *said) = prepared(4, **home, LD_LIBRARY_PATH="/some/where")
    assert (job.gpus, job.simulated, "TRITON_INTERPRET" in job.variables) == (4, False, False)
    one_host = {IFNAME: "lo", "NVSHMEM_REMOTE_TRANSPORT": "none"}
    # the default heap is initialize()'s
    assert of_nvshmem == {**home, **one_host, "NVSHMEM_DISABLE_NVLS": "1"}
    assert job.variables["LD_LIBRARY_PATH"] == f"{tmp_path}/lib:/some/where"
    nvshmem = f"tdcoll: nvshmem: {tmp_path}/lib; bootstrap interface: lo (chosen)"
    assert said == ["tdcoll: mode: GPUs (visible GPUs: 4)", nvshmem]


def test_several_hosts_meet_over_the_default_route(prepared: Prepared) -> None:
    _, of_nvshmem, _ = prepared(2, one_host=False)
    assert of_nvshmem.pop(IFNAME, "") == _default_interface()
    assert of_nvshmem == {"NVSHMEM_DISABLE_NVLS": "1"}


@pytest.mark.parametrize("gpus", [0, 2])
def test_the_users_own_settings_win(prepared: Prepared, gpus: int) -> None:
    own = {IFNAME: "ib0", "NVSHMEM_REMOTE_TRANSPORT": "ibrc", "NVSHMEM_SYMMETRIC_SIZE": "3G"}
    own |= {
        "NVSHMEM_DISABLE_NVLS": "0",
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    }
    job, _, said = prepared(gpus, **own)
    assert own.items() <= job.variables.items()
    assert not gpus or f"interface: ib0 (your {IFNAME})" in said[-1]


def test_defaults_of_an_earlier_call_are_no_settings(prepared: Prepared) -> None:
    """They follow the machine, and the job, unless the user has changed them since."""
    before = prepared(2)[0].variables
    assert prepared(2, one_host=False, **before)[1] == prepared(2, one_host=False)[1]
    job, of_nvshmem, _ = prepared(0, **before)
    assert (of_nvshmem, job.variables["TDCOLL_SETENV"]) == ({}, "TRITON_INTERPRET=1")
    assert "TRITON_INTERPRET" not in prepared(2, **job.variables)[0].variables
    job, of_nvshmem, _ = prepared(2, **before | {"NVSHMEM_DISABLE_NVLS": "0"})
    assert of_nvshmem["NVSHMEM_DISABLE_NVLS"] == "0"
    assert job.variables["TDCOLL_SETENV"] == f"{IFNAME}=lo NVSHMEM_REMOTE_TRANSPORT=none"


VISIBLE = {
    "": 0,
    "-1": 0,
    "0": 1,
    "3,1": 2,
    " 0 , 2 ": 2,
    "0,4,1": 1,
    "0,-1,1": 1,
    "0,,1": 1,
    "x": 0,
    "²,1": 0,
}
VISIBLE |= {"GPU-1,GPU-2": 2, "MIG-a": 1}


@pytest.mark.parametrize(("visible", "count"), VISIBLE.items())
def test_cuda_visible_devices_counts_as_for_cuda(shell: Shell, visible: str, count: int) -> None:
    shell.set_gpus(4)
    assert setenv.count_gpus({**shell.environment, "CUDA_VISIBLE_DEVICES": visible}) == (4, count)
    shell.set_gpus(0)
    assert setenv.count_gpus({**shell.environment, "CUDA_VISIBLE_DEVICES": visible}) == (0, 0)


def test_gpus_that_a_driver_shows(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    shell.program("nvidia-smi", "#!/bin/bash\necho 'NVIDIA-SMI has failed'\nexit 9\n")
    assert setenv.count_gpus(shell.environment) == (0, 0)
    monkeypatch.setattr("glob.glob", lambda pattern: ["/dev/nvidia0", "/dev/nvidia1"])
    assert setenv.count_gpus({"PATH": str(shell.directory), "CUDA_VISIBLE_DEVICES": "1,2"}) == (
        2,
        1,
    )


@pytest.mark.parametrize(
    ("interpret", "gpus", "simulated"),
    [
        ("0", 0, False),
        ("0", 2, False),
        ("1", 2, True),
        ("Yes", 2, True),
        ("", 2, False),
        ("", 0, True),
    ],
)
def test_triton_interpret_is_the_users_too(
    prepared: Prepared, interpret: str, gpus: int, simulated: bool
) -> None:
    job, *_ = prepared(gpus, TRITON_INTERPRET=interpret)
    assert (job.gpus, job.simulated) == (gpus, simulated)
    assert job.variables["TRITON_INTERPRET"] == (interpret or ("1" if simulated else ""))


# ---------------------------------------------------------------------- the Python


def test_what_a_python_must_have(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted: list[list[str]] = []
    monkeypatch.setattr(setenv, "_problem", lambda modules, versions: wanted.append(modules) or "")  # type: ignore[func-returns-value]
    for gpus, variables in (
        (0, {}),
        (1, {}),
        (1, {"TDCOLL_HEAP": "torch"}),
        (0, {"TDCOLL_REQUIRES": "a b"}),
    ):
        shell.set_gpus(gpus)
        setenv.prepare({**shell.environment, **variables}, modules=["pytest"])
    every = ["torch", "triton", "numpy", "pytest"]
    assert wanted == [
        [*every, "greenlet"],
        [*every, "nvshmem"],
        every,
        [*every, "a", "b", "greenlet"],
    ]


@pytest.mark.parametrize(
    ("torch", "triton", "problem"),
    [
        ("2.9.1+cu128", "3.6.0", "has torch 2.9.1+cu128, needs 2.10 or newer"),
        ("2.10.0a0", "3.6.0", ""),
        ("3.0.0", "3.7.1", ""),
        ("2.10.0", "3.5.1", "has triton 3.5.1, needs 3.6 or newer, below 4"),
        ("2.10.0", "4.0.0", "has triton 4.0.0, needs 3.6 or newer, below 4"),
        ("?", "?", ""),
    ],
)
def test_versions_that_will_do(torch: str, triton: str, problem: str) -> None:
    assert setenv._problem(["json"], {"torch": torch, "triton": triton}) == problem


def test_modules_that_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "only_a_folder").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    modules = ["json", "only_a_folder", "no_such_module", "json.decoder", "no_such_module.inside"]
    found = setenv._problem(modules, {"torch": "?", "triton": "?"})
    assert found == "lacks only_a_folder, no_such_module, no_such_module.inside"


# ---------------------------------------------------------------------- the shell that sources it


def source(
    shell: Shell, *, then: str = "", before: str = "", **variables: str
) -> tuple[dict[str, str], str]:
    """The environment after ``source setenv.sh``, without what differs between two shells anyway;
    and what it said."""
    done = shell.run(
        "-c", f'{before}\nsource "{SETENV}" || exit 1\n{then}\nexec env -0', **variables
    )
    assert done.returncode == 0, done.stderr
    environment = dict(line.split("=", 1) for line in done.stdout.split("\0") if line)
    return {
        name: value for name, value in environment.items() if name not in ("_", "SHLVL")
    }, done.stderr


AGAIN = f'source "{SETENV}"'


def test_a_second_time_changes_nothing_but_what_has_changed(shell: Shell) -> None:
    shell.set_gpus(3)
    once, first = source(shell, TDCOLL_NNODES="")
    assert (once["TDCOLL_PYTHON"], once["NVSHMEM_REMOTE_TRANSPORT"]) == (sys.executable, "none")
    assert source(shell, then=AGAIN, TDCOLL_NNODES="") == (once, first * 2)
    several, _ = source(shell, then=f"export TDCOLL_NNODES=02\n{AGAIN}")
    assert several == source(shell, TDCOLL_NNODES="02")[0]
    assert "NVSHMEM_REMOTE_TRANSPORT" not in several


def test_values_are_text_to_the_shell(shell: Shell) -> None:
    """Settings need no export, and none of them is evaluated."""
    value = "it's $(touch evaluated) `touch evaluated` \"\n;"
    environment, _ = source(shell, before="NVSHMEM_SYMMETRIC_SIZE=5G", PYTHONPATH=value)
    assert environment["NVSHMEM_SYMMETRIC_SIZE"] == "5G"
    assert environment["PYTHONPATH"] == f"{REPOSITORY}:{value}"
    assert not (shell.directory / "evaluated").exists()


STATE = 'state() { set +o; shopt -p; trap -p; declare -F; printf "%q " "$IFS" "$PWD" "$@"; declare -p lines; }'
SHELLS = {
    "plain": "",
    "strict": "set -euo pipefail; shopt -s inherit_errexit",
    "odd": "set -fuC; IFS=/:; shopt -s nullglob failglob nocasematch extglob; CDPATH=/usr",
    "traps": "set -eE -o functrace; trap 'echo failed: $BASH_COMMAND >&2' ERR; trap ': end' EXIT; trap : INT",
}


@pytest.mark.parametrize("kind", SHELLS)
def test_the_shell_is_as_before(shell: Shell, kind: str) -> None:
    shell.set_gpus(2)
    script = f"""
        {STATE}
        lines=(1 2)
        set -- one "two words" ''
        {SHELLS[kind]}
        state "$@" >before
        source "{SETENV}"
        state "$@" >after
        echo end
    """
    done = shell.run("-c", script)
    assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr
    assert all(line.startswith("tdcoll: ") for line in done.stderr.splitlines()), done.stderr
    before, after = ((shell.directory / name).read_text() for name in ("before", "after"))
    assert before == after
    assert "two\\ words" in after


def test_it_leaves_two_variables_and_no_function(shell: Shell) -> None:
    names = shell.run("-c", f"{AGAIN} 2>/dev/null; declare -F; compgen -v").stdout.splitlines()
    assert [name for name in names if "tdcoll" in name.lower()] == [
        "TDCOLL_PYTHON",
        "TDCOLL_SETENV",
    ]
    assert not {"root", "assignments"} & {*names}


def test_from_any_directory(shell: Shell) -> None:
    environment, _ = source(shell, before="cd /")
    assert (environment["PWD"], environment["PYTHONPATH"].split(":")[0]) == ("/", str(REPOSITORY))
    done = shell.run("-c", f'cd "{REPOSITORY}" && source setenv.sh && echo "$PYTHONPATH"')
    assert done.stdout.split(":")[0].strip() == str(REPOSITORY)
    folder, name = REPOSITORY.parent, REPOSITORY.name
    for command in (f"source {name}/setenv.sh", f"sh {name}/launch.sh --help"):
        done = shell.run("-c", f'cd "{folder}" && {command}', CDPATH=f"{folder}")
        assert done.returncode == 0, done.stderr


def test_it_has_to_be_sourced_by_bash(shell: Shell) -> None:
    done = shell.run(SETENV)
    assert (done.returncode, "source setenv.sh" in done.stderr) == (2, True)
    done = shell.run("-c", f"exec sh -c '. \"{SETENV}\" || exit 5'")
    if "tdcoll: mode" not in done.stderr:  # else sh is bash here
        assert (done.returncode, "needs bash" in done.stderr) == (5, True)


@pytest.mark.parametrize("kind", ["plain", "odd"])
def test_a_failure_returns_and_does_not_exit(shell: Shell, kind: str) -> None:
    script = f'{SHELLS[kind]}\n{AGAIN} || echo "returned $?"; declare -F'
    done = shell.run("-c", script, PYTHON="no-such-python")
    assert (done.returncode, done.stdout) == (0, "returned 1\n")
    assert (
        done.stderr
        == "tdcoll: PYTHON=no-such-python: expected Python 3.10 or newer, found no such program\n"
    )


def test_a_python_that_is_too_old_is_passed_over(shell: Shell) -> None:
    older = "import sys; sys.version_info = (3, 9, 1); exec(sys.argv[1])"
    shell.program(
        "python3", f'#!/bin/sh\n[ $# = 2 ] && exec {sys.executable} -c "{older}" "$2"\nexit 9\n'
    )
    shell.program("python", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    assert source(shell, PYTHON="")[0]["TDCOLL_PYTHON"] == sys.executable


# ---------------------------------------------------------------------- an installed package


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package in a folder. One file of the checkout's name beside it makes no checkout."""
    folder = tmp_path_factory.mktemp("installed")
    shutil.copytree(
        REPOSITORY / "tdcoll", folder / "tdcoll", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name in ("tdcoll_torch.py", "launch.sh"):
        shutil.copy(REPOSITORY / name, folder)
    return folder


@pytest.mark.parametrize(
    ("interpret", "extras"), [("1", "'tdcoll[sim]'"), ("0", "'tdcoll[cu12]' or 'tdcoll[cu13]'")]
)
def test_it_says_what_to_install(
    shell: Shell, installed: Path, interpret: str, extras: str
) -> None:
    command = f"cd '{installed}' && '{sys.executable}' -S -m tdcoll run tdcoll_torch.py"
    done = shell.run("-c", command, PYTHONPATH=str(installed), TRITON_INTERPRET=interpret)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"tdcoll: {sys.executable} lacks torch, triton, numpy")
    assert f": pip install {extras}" in line
    assert not (installed / ".venv").exists()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("tune --help", "example: python -m tdcoll run -m tdcoll tune -b 1K"),
        ("doctor --help", "without torchrun\nand tdcoll run."),
    ],
)
def test_its_advice_names_tdcoll_run(
    shell: Shell, installed: Path, words: str, expected: str
) -> None:
    """It has no launch.sh and no setenv.sh."""
    command = f"cd '{installed}' && '{sys.executable}' -m tdcoll {words}"
    done = shell.run("-c", command, PYTHONPATH=str(installed), CUDA_VISIBLE_DEVICES="")
    text = done.stdout + done.stderr
    assert expected in text
    assert "launch.sh" not in text
    assert "setenv.sh" not in text


@pytest.mark.parametrize("name", ["bench", "report"])
def test_benchmarks_are_in_a_checkout(shell: Shell, installed: Path, name: str) -> None:
    """Even if another package beside it has a folder of that name."""
    other = installed / "benchmarks"
    other.mkdir(exist_ok=True)
    (other / "__init__.py").write_text("raise SystemExit('imported another package')")
    done = shell.run(
        "-c",
        f"cd '{installed}' && '{sys.executable}' -m tdcoll {name} --help",
        PYTHONPATH=str(installed),
    )
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        f"tdcoll {name}: expected a checkout of tdcoll, which has this command in its folder "
    )
    assert f"got the package installed in {installed}" in line
    assert line.endswith(f"run `bash launch.sh -m tdcoll {name} --help`")
