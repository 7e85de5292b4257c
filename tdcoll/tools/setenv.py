# SPDX-License-Identifier: Apache-2.0
"""The environment of jobs: which Python, GPUs or the simulator, and NVSHMEM's variables.

``setenv.sh`` exports it, and ``launch.sh`` starts jobs in it. The module imports nothing but the
standard library, because both run it in the first Python that they find.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import importlib.metadata
import importlib.util
import itertools
import os
import platform
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tdcoll.base import arguments
from tdcoll.base.child import run
from tdcoll.base.environment import nvshmem_folders
from tdcoll.base.versions import (
    INSTALLED_ON_GPUS,
    OLDEST_TORCH,
    OLDEST_TRITON,
    TRITON_BELOW,
    text_of,
    version_of,
)

ROOT = Path(__file__).resolve().parents[2]
IN_CHECKOUT = all(
    (ROOT / name).is_file() for name in ("setenv.sh", "launch.sh", "constraints-cpu.txt")
)
"""Whether this is a checkout of the repository, which may make ``.venv``, and not an installed
package."""

LAUNCHER, COMMAND = (
    ("launch.sh", "bash launch.sh") if IN_CHECKOUT else ("tdcoll run", "python -m tdcoll run")
)
"""The name of the program that starts jobs, for help and advice, and the words that run it."""

_VENV = ROOT / ".venv"
_OWN = str(_VENV / "bin" / "python")
_STAMP = _VENV / ".tdcoll-stamp"
"""The sources of ``.venv``, a line each, and in the last line its kind: gpu or cpu."""

_INTERFACE = "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME"


class Job(NamedTuple):
    """The setting of a job: a Python's path, the number of visible GPUs, whether it is simulated,
    the environment."""

    python: str
    gpus: int
    simulated: bool
    variables: dict[str, str]


def say(text: str) -> None:
    """Print a line on stderr."""
    print(f"tdcoll: {text}", file=sys.stderr, flush=True)


def prepare(
    environment: Mapping[str, str],
    *,
    one_host: bool = True,
    modules: Sequence[str] = (),
    dry_run: bool = False,
    say: Callable[[str], None] = say,
) -> Job:
    """Find a Python for jobs, or make ``.venv``, and set up the environment. Print the choice on
    stderr.

    Args:
        environment: the environment so far. The user's values stay. ``TDCOLL_SETENV`` lists the defaults
            of an earlier call, which are set again, or removed if they no longer hold.
        one_host: whether all ranks are on this host.
        modules: that the Python needs besides tdcoll's own requirements.
        dry_run: install nothing.
        say: prints the lines.

    Raises:
        SystemExit: no Python has the modules, and ``.venv`` cannot be made.
    """
    variables = dict(environment)
    for name, _, value in (
        word.partition("=") for word in variables.pop("TDCOLL_SETENV", "").split()
    ):
        if variables.get(name) == value:
            del variables[name]
    host_gpus, gpus = count_gpus(variables)
    interpret = variables.get("TRITON_INTERPRET", "")
    # as Triton reads it
    simulated = interpret.lower() in ("1", "true", "yes", "on", "y") if interpret else not gpus
    needed = ["torch", "triton", "numpy", *modules, *variables.get("TDCOLL_REQUIRES", "").split()]
    if simulated:
        needed.append("greenlet")
    elif gpus and variables.get("TDCOLL_HEAP") != "torch":
        needed.append("nvshmem")
    # .venv is made for the host's GPUs, visible or not, because hiding them for a while is no
    # reason to make it again.
    python, about = _python(
        needed, host_gpus > 0, variables.get("TDCOLL_PIP_ARGS", "").split(), dry_run
    )
    say(f"python: {python} ({about})")
    asked = f", TRITON_INTERPRET={interpret}" if interpret else ""
    say(f"mode: {'simulator' if simulated else 'GPUs'} (visible GPUs: {gpus}{asked})")

    if IN_CHECKOUT:
        _put_first(variables, "PYTHONPATH", str(ROOT))
    if python == _OWN:
        _put_first(variables, "PATH", str(_VENV / "bin"))
        variables["VIRTUAL_ENV"] = str(_VENV)
    defaults = {"TRITON_INTERPRET": "1"} if simulated else _nvshmem_defaults(one_host)
    defaults = {name: value for name, value in defaults.items() if not variables.get(name)}
    variables |= defaults
    if defaults:
        variables["TDCOLL_SETENV"] = " ".join(f"{name}={value}" for name, value in defaults.items())
    if not simulated:
        folders = [
            folder for folder in nvshmem_folders(variables.get("NVSHMEM_HOME")) if folder.is_dir()
        ]
        for folder in folders[:1]:  # NVSHMEM's host library loads its plug-ins by bare name
            _put_first(variables, "LD_LIBRARY_PATH", str(folder))
        whose = "chosen" if _INTERFACE in defaults else f"your {_INTERFACE}"
        interface = (
            f"{variables[_INTERFACE]} ({whose})"
            if variables.get(_INTERFACE)
            else "NVSHMEM's choice"
        )
        say(
            f"nvshmem: {folders[0] if folders else 'where the loader finds it'}; bootstrap interface: {interface}"
        )
    return Job(python, gpus, simulated, variables)


def _nvshmem_defaults(one_host: bool) -> dict[str, str]:
    """Return NVSHMEM's settings if the user has none.

    Multicast is off because its set-up fails or hangs on some hosts, and tdcoll never needs it.
    Left to itself, NVSHMEM takes the first interface that is up, often a container engine's bridge
    that other ranks cannot reach. On one host it need not look for network cards, because that
    takes time, and fails if there are none.
    """
    defaults = {"NVSHMEM_DISABLE_NVLS": "1"}
    if one_host:
        return defaults | {_INTERFACE: "lo", "NVSHMEM_REMOTE_TRANSPORT": "none"}
    interface = _default_interface()
    if interface:
        defaults[_INTERFACE] = interface
    return defaults


def _put_first(variables: dict[str, str], name: str, folder: str) -> None:
    others = (
        [entry for entry in variables[name].split(":") if entry != folder]
        if variables.get(name)
        else []
    )
    variables[name] = ":".join([folder, *others])


def count_gpus(variables: Mapping[str, str]) -> tuple[int, int]:
    """Return how many GPUs the host has, and how many of them ``CUDA_VISIBLE_DEVICES`` leaves
    visible."""
    if shutil.which("nvidia-smi", path=variables.get("PATH")):
        listed = run(["nvidia-smi", "-L"], 60, variables, with_stderr=False).output
        count = sum(line.startswith("GPU ") for line in listed.splitlines())
    else:  # a container may have only the device files
        count = len(glob.glob("/dev/nvidia[0-9]*"))
    visible = variables.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not count:
        return count, count

    def exists(device: str) -> bool:
        index = arguments.decimal(device)
        return device.startswith(("GPU-", "MIG-")) if index is None else index < count

    # CUDA ignores everything from the first entry that does not exist.
    return count, len(list(itertools.takewhile(exists, map(str.strip, visible.split(",")))))


# ---------------------------------------------------------------------- the Python


def _python(
    modules: Sequence[str], gpus: bool, pip_args: Sequence[str], dry_run: bool
) -> tuple[str, str]:
    """Return the path of this Python, and words about it, if it has all modules; otherwise start
    again in ``.venv``'s."""
    versions = {"torch": "?", "triton": "?"}
    for name in versions:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    problem = _problem(modules, versions)
    about = ", ".join([f"Python {platform.python_version()}", *map(" ".join, versions.items())])
    if not IN_CHECKOUT:  # installed for this Python
        if problem and not dry_run:
            extras = (
                "'tdcoll[sim]'"
                if "greenlet" in modules
                else "'tdcoll[cu12]' or 'tdcoll[cu13]', as PyTorch's CUDA"
            )
            sys.exit(f"tdcoll: {sys.executable} {problem}: pip install {extras}")
        return sys.executable, about
    sums = (
        str(zlib.crc32((ROOT / name).read_bytes()))
        for name in ("pyproject.toml", "constraints-cpu.txt")
    )
    inputs = "\n".join([str(ROOT), *sums])
    kind = "gpu" if gpus else "cpu"
    before = _text(_STAMP)
    up_to_date = before.rpartition("\n")[0] == inputs and Path(_OWN).exists()
    inside = sys.executable == _OWN
    if inside and before and not up_to_date:
        problem = problem or "is not up to date"
    if not problem:
        return sys.executable, about
    if not up_to_date or (inside and before.endswith("\ncpu") and gpus):
        if dry_run:
            return _OWN, "which would be made or updated first"
        say(f"{sys.executable} {problem}: making {_VENV} (once; this takes minutes)")
        try:
            _make_venv(pip_args, f"{inputs}\n{kind}", before)
        except (ImportError, OSError, subprocess.CalledProcessError) as error:
            what = ", ".join(modules)
            sys.exit(
                f"tdcoll: could not make {_VENV} ({error}); or activate a Python that has {what}"
            )
    elif inside:
        sys.exit(f"tdcoll: {sys.executable} {problem}; install that, or remove {_VENV}")
    return os.execv(_OWN, [_OWN, *sys.orig_argv[1:]])


def _problem(modules: Sequence[str], versions: Mapping[str, str]) -> str:
    """Return a problem of this Python, in words; empty if there is none. Import nothing large."""

    def lacks(name: str) -> bool:
        try:
            found = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            return True
        return found is None or found.origin is None  # a folder that has the name by chance

    torch, triton = map(version_of, versions.values())  # (0, 0): not known
    missing = list(filter(lacks, modules))
    if missing:
        return f"lacks {', '.join(missing)}"
    if (0, 0) < torch < OLDEST_TORCH:
        return f"has torch {versions['torch']}, needs {text_of(OLDEST_TORCH)} or newer"
    if (0, 0) < triton < OLDEST_TRITON or triton >= TRITON_BELOW:
        needs = f"{text_of(OLDEST_TRITON)} or newer, below {text_of(TRITON_BELOW)}"
        return f"has triton {versions['triton']}, needs {needs}"
    return ""


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8") if file.is_file() else ""


def _make_venv(extra: Sequence[str], stamp: str, before: str) -> None:
    """Make or update ``.venv`` with ``extra`` arguments for pip, unless its stamp is not ``before``
    any more."""
    import venv  # which some systems' Pythons lack

    def pip(*what: str) -> None:
        say(f"installing: pip install {' '.join([*extra, *what])}")
        command = [
            _OWN,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            *extra,
            *what,
        ]
        subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=True)

    if _VENV.is_symlink():  # starting afresh would empty what it points to
        raise OSError(
            f"it is a link to {_VENV.resolve()}, which may be another checkout's: remove the link"
        )
    with open(ROOT / ".venv.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        now = _text(_STAMP)
        # if several agents start on one host at once, another has made it
        if now != before and now == stamp:
            return
        inputs, _, kind = stamp.rpartition("\n")
        kind = "gpu" if now.endswith("\ngpu") else kind  # it works on a machine without GPUs too
        # Start afresh if it was moved here, has a PyTorch for CPUs although there are GPUs, or has
        # lost its Python.
        fits = now.startswith(f"{ROOT}\n") and now.endswith(f"\n{kind}") and Path(_OWN).exists()
        venv.create(_VENV, clear=bool(now) and not fits, symlinks=True, with_pip=True)
        if kind == "cpu":
            pip("-c", "constraints-cpu.txt", "-e", ".[sim,compile,bench,test,dev]")
        else:  # first PyTorch, then NVSHMEM for its CUDA
            pip(*INSTALLED_ON_GPUS, "numpy")
            code = "import torch; print((torch.version.cuda or 'none').partition('.')[0])"
            cuda = subprocess.run(
                [_OWN, "-c", code], capture_output=True, text=True, check=True
            ).stdout.strip()
            if cuda not in ("12", "13"):
                raise OSError(
                    f"pip gave a PyTorch for CUDA '{cuda}', and tdcoll needs 12 or 13: see TDCOLL_PIP_ARGS"
                )
            pip("-e", f".[cu{cuda},sim,bench,test,dev]")
        _STAMP.write_text(f"{inputs}\n{kind}", encoding="utf-8")


def _default_interface() -> str:
    """Return the interface of the default route with the lowest metric, or an empty text if there
    is no such route."""
    try:
        table = Path("/proc/net/route").read_text()
    except OSError:
        return ""
    rows = [line.split() for line in table.splitlines()[1:]]
    routes = [
        (int(row[6]), row[0]) for row in rows if len(row) > 7 and row[1] == row[7] == "00000000"
    ]
    return min(routes)[1] if routes else ""
