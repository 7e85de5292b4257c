# SPDX-License-Identifier: Apache-2.0
"""setenv.sh: what it chooses, what it exports, and all that it leaves alone."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from .conftest import REPOSITORY, Shell

SETENV = REPOSITORY / "setenv.sh"
FILES = ("setenv.sh", "pyproject.toml", "constraints-cpu.txt")

# What differs between two shells anyway.
VOLATILE = {"_", "SHLVL", "PWD", "OLDPWD", "BASH_EXECUTION_STRING"}


def stable(environment: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in VOLATILE}


def said(text: str) -> dict[str, str]:
    """`tdcoll: key: value` lines."""
    lines = (line.removeprefix("tdcoll: ") for line in text.splitlines())
    return dict(line.split(": ", 1) for line in lines if ": " in line)


NO_NUMBERS = ("a[$(touch evaluated)]", "1e3", "abc", "0x2", "-1", " 2", "²", "٣", "9" * 5000, "2\n3", "1+1", "PATH")
"""Values that are no decimal numbers. Bash takes most of them as arithmetic, and runs the command in the first."""

# --- what it chooses and exports ------------------------------------------------------------------


def test_without_gpus_it_simulates(shell: Shell) -> None:
    environment, text = shell.source()
    assert environment["TRITON_INTERPRET"] == "1"
    assert not [name for name in environment if name.startswith("NVSHMEM_")]
    assert "LD_LIBRARY_PATH" not in environment
    lines = said(text)
    assert list(lines) == ["python", "mode", "nvshmem", "bootstrap", "heap"]
    assert lines["python"].startswith(sys.executable)
    assert lines["mode"] == "simulator (no GPU visible)"


def test_with_gpus_it_sets_nvshmem_up(shell: Shell) -> None:
    shell.set_gpus(4)
    libraries = shell.directory / "packages" / "nvidia" / "nvshmem" / "lib"
    libraries.mkdir(parents=True)
    path = f"{shell.directory / 'packages'}:{shell.environment['PYTHONPATH']}"
    environment, text = shell.source(PYTHONPATH=path)
    assert environment["NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME"] == "lo"
    assert environment["NVSHMEM_REMOTE_TRANSPORT"] == "none"
    assert "NVSHMEM_SYMMETRIC_SIZE" not in environment  # the default is initialize()'s
    assert environment["NVSHMEM_DISABLE_NVLS"] == "1"
    assert environment["LD_LIBRARY_PATH"] == str(libraries)
    assert "TRITON_INTERPRET" not in environment
    assert said(text) == {
        "python": said(text)["python"],
        "mode": "4 GPUs",
        "nvshmem": str(libraries),
        "bootstrap": "interface lo (one host)",
        "heap": "tdcoll's default (NVSHMEM_SYMMETRIC_SIZE sets another)",
    }


def test_the_users_own_settings_win(shell: Shell) -> None:
    shell.set_gpus(2)
    own = {
        "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME": "ib0",
        "NVSHMEM_REMOTE_TRANSPORT": "ibrc",
        "NVSHMEM_SYMMETRIC_SIZE": "3G",
        "NVSHMEM_DISABLE_NVLS": "0",
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    }
    environment, text = shell.source(**own)
    assert {name: environment[name] for name in own} == own
    assert said(text)["bootstrap"] == "interface ib0 (your NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME)"
    assert said(text)["heap"].startswith("3G per rank (your ")


def test_another_nvshmem(shell: Shell) -> None:
    shell.set_gpus(2)
    home = shell.directory / "nvshmem"
    (home / "lib").mkdir(parents=True)
    environment, text = shell.source(NVSHMEM_HOME=str(home), LD_LIBRARY_PATH="/some/where")
    assert environment["LD_LIBRARY_PATH"] == f"{home}/lib:/some/where"
    assert said(text)["nvshmem"] == f"{home}/lib"


def test_the_users_settings_need_no_export(shell: Shell) -> None:
    shell.set_gpus(2)
    environment, _ = shell.source(before="NVSHMEM_SYMMETRIC_SIZE=5G")
    assert environment["NVSHMEM_SYMMETRIC_SIZE"] == "5G"


def test_the_simulators_heap_is_the_users_to_size(shell: Shell) -> None:
    environment, _ = shell.source(NVSHMEM_SYMMETRIC_SIZE="128M", NVSHMEM_DISABLE_NVLS="1")
    assert environment["NVSHMEM_SYMMETRIC_SIZE"] == "128M"
    assert environment["NVSHMEM_DISABLE_NVLS"] == "1"


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        ("", 0),
        ("-1", 0),
        ("0", 1),
        ("3,1", 2),
        (" 0 , 2 ", 2),
        ("0,4,1", 1),
        ("0,-1,1", 1),
        ("GPU-1,GPU-2", 2),
        ("x", 0),
    ],
)
def test_cuda_visible_devices_counts_as_for_cuda(shell: Shell, visible: str, count: int) -> None:
    shell.set_gpus(4)
    environment, text = shell.source(then="export TDCOLL_GPUS TDCOLL_MODE", CUDA_VISIBLE_DEVICES=visible)
    assert environment["TDCOLL_GPUS"] == str(count), text
    assert environment["TDCOLL_MODE"] == ("gpu" if count else "simulator")
    assert environment["CUDA_VISIBLE_DEVICES"] == visible


def test_a_driver_that_does_not_work_is_no_gpu(shell: Shell) -> None:
    shell.program("nvidia-smi", "#!/bin/bash\necho 'NVIDIA-SMI has failed'\nexit 9\n")
    assert said(shell.source()[1])["mode"] == "simulator (no GPU visible)"


def test_triton_interpret_is_the_users_too(shell: Shell) -> None:
    environment, text = shell.source(TRITON_INTERPRET="0")
    assert environment["TRITON_INTERPRET"] == "0"
    assert "nothing runs" in said(text)["mode"]
    shell.set_gpus(2)
    environment, text = shell.source(TRITON_INTERPRET="1")
    assert "NVSHMEM_SYMMETRIC_SIZE" not in environment
    assert said(text)["mode"] == "simulator (TRITON_INTERPRET=1 or --simulate; GPUs visible: 2)"


def default_route_interface() -> str | None:
    rows = [line.split() for line in Path("/proc/net/route").read_text().splitlines()[1:]]
    routes = [(int(row[6]), row[0]) for row in rows if row[1] == row[7] == "00000000"]
    return min(routes)[1] if routes else None


def test_several_hosts_meet_over_the_default_route(shell: Shell) -> None:
    shell.set_gpus(2)
    environment, _ = shell.source(TDCOLL_NNODES="2", TDCOLL_RDZV="head.example:1234")
    assert environment.get("NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME") == default_route_interface()
    assert "NVSHMEM_REMOTE_TRANSPORT" not in environment


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "localhost", "[::1]"])
def test_agents_that_meet_on_loopback_are_on_one_host(shell: Shell, host: str) -> None:
    shell.set_gpus(2)
    environment, _ = shell.source(TDCOLL_NNODES="2", TDCOLL_RDZV=f"{host}:1234")
    assert environment["NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME"] == "lo"
    assert environment["NVSHMEM_REMOTE_TRANSPORT"] == "none"


# --- sourcing it again ----------------------------------------------------------------------------


@pytest.mark.parametrize("gpus", [0, 3])
def test_a_second_time_changes_nothing(shell: Shell, gpus: int) -> None:
    shell.set_gpus(gpus)
    once, first = shell.source()
    twice, second = shell.source(then=f'source "{SETENV}"')
    assert stable(once) == stable(twice)
    assert second == first * 2


def test_its_own_defaults_follow_the_machine(shell: Shell) -> None:
    shell.set_gpus(2)
    again = f'source "{SETENV}"'
    fresh, _ = shell.source(TDCOLL_NNODES="2", TDCOLL_RDZV="h:1")
    later, _ = shell.source(then=f"export TDCOLL_NNODES=2 TDCOLL_RDZV=h:1\n{again}")
    assert {k: v for k, v in later.items() if k.startswith("NVSHMEM_")} == {
        k: v for k, v in fresh.items() if k.startswith("NVSHMEM_")
    }
    simulated, _ = shell.source(then=f"export CUDA_VISIBLE_DEVICES=\n{again}")
    assert simulated["TRITON_INTERPRET"] == "1"
    assert not [name for name in simulated if name.startswith("NVSHMEM_")]
    back, _ = shell.source(before="export CUDA_VISIBLE_DEVICES=", then=f"unset CUDA_VISIBLE_DEVICES\n{again}")
    assert "TRITON_INTERPRET" not in back
    assert back["NVSHMEM_DISABLE_NVLS"] == "1"


@pytest.mark.parametrize("gpus", [0, 2])
def test_the_heap_that_an_earlier_version_exported_is_withdrawn(shell: Shell, gpus: int) -> None:
    shell.set_gpus(gpus)
    environment, _ = shell.source(
        NVSHMEM_SYMMETRIC_SIZE="1G", TDCOLL_SETENV="NVSHMEM_SYMMETRIC_SIZE=1G NVSHMEM_DISABLE_NVLS=1"
    )
    assert "NVSHMEM_SYMMETRIC_SIZE" not in environment


# --- what it leaves alone -------------------------------------------------------------------------

STATE = 'state() { set +o; shopt -p; trap -p; declare -F; printf "%q " "$IFS" "$PWD" "$@"; declare -p lines; }'
SETTINGS = {
    "plain": "",
    "strict": "set -euo pipefail; shopt -s inherit_errexit",
    "odd": "set -fuC; IFS=/:; shopt -s nullglob failglob nocasematch extglob; CDPATH=/usr",
    "traps": "set -eE -o functrace; trap 'echo failed: $BASH_COMMAND >&2' ERR; trap ': end' EXIT; trap : INT",
}


@pytest.mark.parametrize("gpus", [0, 2])
@pytest.mark.parametrize("settings", SETTINGS)
def test_the_shell_is_as_before(shell: Shell, settings: str, gpus: int) -> None:
    shell.set_gpus(gpus)
    script = f"""
        {STATE}
        lines=(1 2)
        set -- one "two words" ''
        {SETTINGS[settings]}
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


def test_it_leaves_three_variables_and_no_function(shell: Shell) -> None:
    script = f'source "{SETENV}" 2>/dev/null; declare -F; compgen -v'
    names = shell.run("-c", script).stdout.splitlines()
    left = [name for name in names if "tdcoll" in name.lower()]
    assert sorted(left) == ["TDCOLL_GPUS", "TDCOLL_MODE", "TDCOLL_PYTHON", "TDCOLL_SETENV"]


def test_from_any_directory(shell: Shell) -> None:
    root = shell.directory / "a clone"
    root.mkdir()
    for name in FILES:
        shutil.copy(REPOSITORY / name, root)
    environment, _ = shell.source(before="cd /", root=root)
    assert environment["PWD"] == "/"
    assert environment["PYTHONPATH"].split(":")[0] == str(root)
    done = shell.run("-c", 'source setenv.sh && echo "$PYTHONPATH"', cwd=root)
    assert done.stdout.split(":")[0].strip() == str(root)


def test_it_has_to_be_sourced(shell: Shell) -> None:
    done = shell.run(SETENV)
    assert done.returncode == 2
    assert "source setenv.sh" in done.stderr


@pytest.mark.parametrize("settings", ["plain", "odd"])
def test_a_failure_returns_and_does_not_exit(shell: Shell, settings: str) -> None:
    script = f'{SETTINGS[settings]}\nsource "{SETENV}" || echo "returned $?"; declare -F'
    done = shell.run("-c", script, PYTHON="no-such-python")
    assert (done.returncode, done.stdout) == (0, "returned 1\n")
    assert done.stderr == "tdcoll: PYTHON=no-such-python: expected a Python, found no such program\n"


@pytest.mark.parametrize(
    ("package", "file", "version", "verdict"),
    [
        ("torch", "version.py", "2.9.1+cu128", "has torch 2.9.1+cu128, needs 2.10 or newer"),
        ("torch", "version.py", "2.10.0", ""),
        ("torch", "version.py", "3.0.0", ""),
        ("triton", "__init__.py", "3.5.1", "has triton 3.5.1, needs 3.6 or newer, below 4"),
        ("triton", "__init__.py", "4.0.0", "has triton 4.0.0, needs 3.6 or newer, below 4"),
    ],
)
def test_versions_that_will_do(shell: Shell, package: str, file: str, version: str, verdict: str) -> None:
    root = shell.directory / "a clone"
    root.mkdir()
    for name in FILES:
        shutil.copy(REPOSITORY / name, root)
    (root / ".venv").touch()  # so that none can be made
    folder = shell.directory / "versions" / package
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / file).write_text(f"__version__ = '{version}'\n")
    path = f"{folder.parent}:{shell.environment['PYTHONPATH']}"
    done = shell.run("-c", f'source "{root}/setenv.sh"', PYTHONPATH=path)
    if verdict:
        assert done.returncode == 1
        assert f"{verdict}: making" in done.stderr
    else:
        assert done.returncode == 0, done.stderr
        assert f"{package} {version}" in said(done.stderr)["python"]


# --- .venv ----------------------------------------------------------------------------------------

# A Python without torch, whose environments have everything as soon as pip has run in them.
FAKE_PYTHON = """#!/bin/bash
case "$1 $2" in
"-m venv")
    [[ $3 != --clear ]] || rm -r "$4"
    mkdir -p "${@: -1}/bin" && cp "$0" "${@: -1}/bin/python"
    echo "venv ${*:3:$#-3}" >>"$FAKE_LOG"
    ;;
"-m pip")
    echo "pip ${*:3}" >>"$FAKE_LOG"
    echo "not for the user's stdout"
    [[ -z $FAKE_PIP_FAILS ]] || exit 1
    touch "${0%/bin/python}/installed"
    [[ $* != *cu1?,* ]] || touch "${0%/bin/python}/nvshmem"
    ;;
"-c import torch"*) echo "$FAKE_CUDA" ;;
"-c "*)
    for module in "$@"; do
        [[ $module != nvshmem || -e ${0%/bin/python}/nvshmem ]] || lacks=nvshmem
    done
    [[ -e ${0%/bin/python}/installed ]] || lacks=torch
    echo "${lacks:+lacks }${lacks:-ok}"
    printf '%s\\n' "$0" "Python 3.12.0, torch 9, triton 3" - -
    ;;
*) exit 1 ;;
esac
"""


@pytest.fixture
def clone(shell: Shell) -> Path:
    root = shell.directory / "a clone"
    root.mkdir()
    for name in FILES:
        shutil.copy(REPOSITORY / name, root)
    shell.environment["PYTHON"] = str(shell.program("fake-python", FAKE_PYTHON))
    shell.environment["FAKE_LOG"] = str(shell.directory / "log")
    return root


def log(shell: Shell) -> list[str]:
    """What the fake Python was asked to install since the last call."""
    path = shell.directory / "log"
    lines = path.read_text().splitlines() if path.exists() else []
    path.unlink(missing_ok=True)
    return [line.replace("--quiet --disable-pip-version-check ", "") for line in lines]


def test_it_makes_a_venv_once(shell: Shell, clone: Path) -> None:
    environment, text = shell.source(root=clone, before="set -euo pipefail")
    assert log(shell) == [
        "venv ",
        "pip install -c constraints-cpu.txt torch triton numpy",
        "pip install -c constraints-cpu.txt -e .[sim,compile,bench,test,dev]",
    ]
    assert "lacks torch" in text
    assert environment["VIRTUAL_ENV"] == str(clone / ".venv")
    assert environment["PATH"].split(":")[0] == str(clone / ".venv" / "bin")
    again, text = shell.source(root=clone)
    assert log(shell) == []
    assert said(text)["python"].startswith(f"{clone}/.venv/bin/python (.venv")
    assert stable(again) == stable(environment)


def test_pip_runs_again_when_its_input_changed(shell: Shell, clone: Path) -> None:
    shell.source(root=clone)
    log(shell)
    with (clone / "constraints-cpu.txt").open("a") as file:
        file.write("one-more==1\n")
    shell.source(root=clone)
    assert [line.split()[0] for line in log(shell)] == ["pip", "pip"]


def test_a_moved_clone_starts_afresh(shell: Shell, clone: Path) -> None:
    shell.source(root=clone)
    log(shell)
    shell.source(root=clone.rename(clone.with_name("elsewhere")))
    assert log(shell)[0] == "venv --clear"


@pytest.mark.parametrize("cuda", ["12", "13"])
def test_with_gpus_nvshmem_matches_pytorchs_cuda(shell: Shell, clone: Path, cuda: str) -> None:
    shell.set_gpus(1)
    shell.source(root=clone, FAKE_CUDA=cuda)
    assert log(shell) == [
        "venv ",
        "pip install torch numpy",
        f"pip install -e .[cu{cuda},sim,bench,test,dev]",
    ]
    # It serves without GPUs too: hidden for a while, or on another host with the same file system.
    shell.source(root=clone, CUDA_VISIBLE_DEVICES="")
    shell.set_gpus(0)
    shell.source(root=clone)
    assert log(shell) == []


def test_a_venv_for_cpus_does_not_serve_gpus(shell: Shell, clone: Path) -> None:
    shell.source(root=clone)
    log(shell)
    shell.set_gpus(1)
    shell.source(root=clone, TRITON_INTERPRET="1")
    assert log(shell) == []
    shell.source(root=clone, FAKE_CUDA="13")
    assert [line.split()[0] for line in log(shell)] == ["venv", "pip", "pip"]


def test_a_pytorch_that_will_not_do(shell: Shell, clone: Path) -> None:
    shell.set_gpus(1)
    done = shell.run("-c", f'source "{clone}/setenv.sh" || echo "returned $?"', FAKE_CUDA="11")
    assert done.stdout == "returned 1\n"
    assert "CUDA '11'" in done.stderr


def test_pip_takes_the_users_arguments(shell: Shell, clone: Path) -> None:
    shell.source(root=clone, before="IFS=,", TDCOLL_PIP_ARGS="--extra-index-url https://example.org/whl")
    for line in log(shell)[1:]:
        assert line.startswith("pip install --extra-index-url https://example.org/whl -c constraints-cpu.txt ")


def test_a_failed_install_is_tried_again(shell: Shell, clone: Path) -> None:
    done = shell.run("-c", f'source "{clone}/setenv.sh" || echo "returned $?"', FAKE_PIP_FAILS="1")
    assert (done.returncode, done.stdout) == (0, "returned 1\n")
    assert done.stderr.splitlines()[-1].startswith(f"tdcoll: could not make {clone}/.venv")
    log(shell)
    shell.source(root=clone)
    assert len(log(shell)) == 2


def test_a_dry_run_installs_nothing(shell: Shell, clone: Path) -> None:
    shutil.copy(REPOSITORY / "launch.sh", clone)
    (clone / "script.py").touch()
    done = shell.run(clone / "launch.sh", "--dry-run", clone / "script.py")
    assert done.returncode == 0, done.stderr
    assert log(shell) == []
    assert not (clone / ".venv").exists()
    assert "which would be made" in said(done.stderr)["python"]
    assert ".venv/bin/python" in done.stdout


# --- what it refuses ------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [*NO_NUMBERS, "0"], ids=lambda value: repr(value)[:24])
def test_a_number_of_hosts_that_is_none(shell: Shell, value: str) -> None:
    done = shell.run("-c", f'source "{SETENV}"', TDCOLL_NNODES=value)
    assert done.returncode == 1
    assert done.stderr.startswith("tdcoll: TDCOLL_NNODES: expected a whole number of at least 1, got '")
    assert not (shell.directory / "evaluated").exists()


@pytest.mark.parametrize(("value", "interface"), [("08", None), ("010", None), ("01", "lo"), ("", "lo")])
def test_a_number_of_hosts_is_decimal(shell: Shell, value: str, interface: str | None) -> None:
    shell.set_gpus(1)
    environment, _ = shell.source(TDCOLL_NNODES=value)
    if interface is None:
        assert "NVSHMEM_REMOTE_TRANSPORT" not in environment
    else:
        assert environment["NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME"] == interface
