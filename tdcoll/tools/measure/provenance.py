# SPDX-License-Identifier: Apache-2.0
"""The versions, GPUs and environment of a measurement. No host names, no paths of this machine."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shlex
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import triton

import tdcoll
from tdcoll import runtime
from tdcoll.base.environment import INTERNAL
from tdcoll.job.settings import asks_to_share_gpus
from tdcoll.tools.setenv import COMMAND

_VARIABLES = ("NCCL_", "NVSHMEM_", "TDCOLL_", "TORCH_SYMM_MEM_")
_LEFT_OUT = INTERNAL | {"TDCOLL_REQUIRES", "TDCOLL_PIP_ARGS", "TDCOLL_COMMIT"}


def _output(*command: str) -> str | None:
    """Return the output of a command; None if there is no such command or it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _commit() -> tuple[str | None, bool | None]:
    """Return tdcoll's commit, and whether its files differ from it.

    ``TDCOLL_COMMIT`` takes precedence, because git's commit is wrong in a copy of the files.
    """
    given = os.environ.get("TDCOLL_COMMIT")
    if given:
        return given, None
    root = Path(tdcoll.__file__).resolve().parents[1]
    if not (root / ".git").exists():  # it may be installed inside another repository
        return None, None
    commit = _output("git", "-C", str(root), "rev-parse", "HEAD")
    changes = _output("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no")
    return commit, None if changes is None else bool(changes)


def _shown(name: str, value: str, host: str) -> str:
    """Return a variable's value without this host's name, and only the last part of a path."""
    if host:
        value = value.replace(host, "<host>")
    if name == "TDCOLL_TUNING" or value.startswith("/"):
        return Path(value).name
    return value


def _nccl_version() -> str | None:
    if not dist.is_nccl_available():
        return None
    return ".".join(str(part) for part in torch.cuda.nccl.version())


def provenance() -> dict[str, Any]:
    """Return the facts for JSON on rank 0, and nothing on other ranks. Collective."""
    owner = runtime.current()
    gpu = torch.cuda.get_device_name() if owner.device.type == "cuda" else None
    gpus = owner.control.all_gather(range(owner.world_size), "GPU names", gpu)
    if owner.rank != 0:
        return {}
    commit, dirty = _commit()
    host = socket.gethostname()
    facts: dict[str, Any] = {
        "tdcoll": tdcoll.__version__,
        "commit": commit,
        "dirty": dirty,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "gpus": gpus,
        "simulated": owner.simulated,
        "environment": {
            name: _shown(name, value, host)
            for name, value in sorted(os.environ.items())
            if name.startswith(_VARIABLES) and name not in _LEFT_OUT
        },
    }
    if gpu is not None:
        wheels = {wheel.name: wheel.version for wheel in importlib.metadata.distributions()}
        driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") or ""
        links = _output("nvidia-smi", "topo", "-m") or ""
        facts |= {
            "nvshmem": wheels.get("nvidia-nvshmem-cu13", wheels.get("nvidia-nvshmem-cu12")),
            "nccl": _nccl_version(),
            "driver": driver.partition("\n")[0] or None,
            "topology": re.sub(r"\x1b\[[0-9;]*m", "", links) or None,
        }
    return facts


def command_line(benchmark: str, arguments: Sequence[str], world: int, simulated: bool) -> str:
    """Return the command that starts this job, without the options that only name output files."""
    local = os.environ.get("LOCAL_WORLD_SIZE", str(world))
    words = [*COMMAND.split(), "--nproc", local]
    if simulated:
        words.append("--simulate")
    if int(local) < world:
        words += ["--nnodes", str(world // int(local))]
    emulated = os.environ.get("TDCOLL_EMULATE_NODES")
    if emulated:
        words += ["--emulate-nodes", emulated]
    if asks_to_share_gpus() and not simulated:
        words.append("--share-gpus")
    words += ["-m", "tdcoll"]
    name = benchmark.split()  # such as "tune matmul"
    if name[0] != "tune":
        words.append("bench")
    words += name
    remaining = iter(arguments)
    for word in remaining:
        if word in ("--json", "--output", "-o"):
            next(remaining, None)  # the file
        elif not word.startswith(("--json=", "--output=", "-o")):
            words.append(word)
    return shlex.join(words)
