# SPDX-License-Identifier: Apache-2.0
"""A shell for the tests of setenv.sh and launch.sh: as many GPUs as asked, none of the caller's
settings."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
OWN_VARIABLES = ("TDCOLL_", "NVSHMEM_", "SLURM_", "CUDA_", "TORCHELASTIC_", "PYTEST_", "PIP_")
OWN_NAMES = {
    *(
        "TRITON_INTERPRET",
        "OMP_NUM_THREADS",
        "PYTHON",
        "VIRTUAL_ENV",
        "CONDA_PREFIX",
        "LD_LIBRARY_PATH",
    ),
    *(
        "RANK",
        "LOCAL_RANK",
        "GROUP_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    ),
    *("BASH_ENV", "ENV", "BASHOPTS", "SHELLOPTS", "CDPATH"),
}


@dataclass
class Shell:
    """Runs bash in a directory of its own. Every process that it starts is gone when the test
    ends."""

    directory: Path
    environment: dict[str, str]
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def set_gpus(self, count: int) -> None:
        """Put an nvidia-smi first on PATH that lists ``count`` GPUs."""
        lines = "".join(f"echo 'GPU {i}: NVIDIA Test (UUID: GPU-{i})'\n" for i in range(count))
        self.program("nvidia-smi", f"#!/bin/bash\n{lines}exit 0\n")

    def program(self, name: str, text: str) -> None:
        """Write an executable into the first directory of PATH."""
        path = self.directory / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def start(self, *command: str | Path, **variables: str) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            ["bash", *map(str, command)],
            cwd=self.directory,
            env={**self.environment, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.started.append(child)
        return child

    def run(self, *command: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        child = self.start(*command, **variables)
        out, err = child.communicate(timeout=60)
        return subprocess.CompletedProcess(child.args, child.returncode, out, err)


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Take the caller's settings out of this process's environment, for one test."""
    for name in list(os.environ):
        if name.startswith(OWN_VARIABLES) or name in OWN_NAMES:
            monkeypatch.delenv(name)
    return monkeypatch


@pytest.fixture
def shell(tmp_path: Path, clean: pytest.MonkeyPatch) -> Iterator[Shell]:
    directory = tmp_path / "with space"
    directory.mkdir()
    packages = directory / "packages"
    for name in ("greenlet", "nvshmem"):  # what launch.sh looks for and this machine may lack
        if importlib.util.find_spec(name) is None:
            (packages / name).mkdir(parents=True)
            (packages / name / "__init__.py").touch()
    # no test fills a disk
    environment = {**os.environ, "PYTHON": sys.executable, "PIP_NO_INDEX": "1"}
    environment["PATH"] = f"{directory / 'bin'}:{environment['PATH']}"
    environment["PYTHONPATH"] = ":".join(
        filter(None, [environment.get("PYTHONPATH"), str(packages)])
    )
    shell = Shell(directory, environment)
    shell.set_gpus(0)
    yield shell
    for child in shell.started:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
