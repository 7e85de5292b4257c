# SPDX-License-Identifier: Apache-2.0
"""A shell for the tests of setenv.sh and launch.sh: as many GPUs as asked, none of the caller's settings."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
OWN_VARIABLES = ("TDCOLL_", "NVSHMEM_", "SLURM_", "CUDA_", "TORCHELASTIC_", "PYTEST_", "PIP_")
OWN_NAMES = {
    *("TRITON_INTERPRET", "OMP_NUM_THREADS", "PYTHON", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH"),
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("BASH_ENV", "ENV", "BASHOPTS", "SHELLOPTS", "CDPATH"),
}


@dataclass
class Shell:
    """Runs bash; every process that it starts is gone when the test ends."""

    directory: Path
    environment: dict[str, str]
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def set_gpus(self, count: int) -> None:
        """Puts an nvidia-smi first on PATH that lists `count` GPUs."""
        lines = "".join(f"echo 'GPU {i}: NVIDIA Test (UUID: GPU-{i})'\n" for i in range(count))
        self.program("nvidia-smi", f"#!/bin/bash\n{lines}exit 0\n")

    def program(self, name: str, text: str) -> Path:
        """Writes an executable into the first directory of PATH."""
        path = self.directory / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
        return path

    def start(self, *command: str | Path, cwd: Path | None = None, **variables: str) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            ["bash", *map(str, command)],
            cwd=cwd or self.directory,
            env={**self.environment, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.started.append(child)
        return child

    def run(
        self, *command: str | Path, cwd: Path | None = None, timeout_s: float = 60, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        child = self.start(*command, cwd=cwd, **variables)
        try:
            out, err = child.communicate(timeout=timeout_s)
        finally:
            self.kill(child)
        return subprocess.CompletedProcess(child.args, child.returncode, out, err)

    @staticmethod
    def kill(child: subprocess.Popen[str]) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()

    def source(
        self, *, then: str = "", before: str = "", root: Path = REPOSITORY, **variables: str
    ) -> tuple[dict[str, str], str]:
        """The environment after `source setenv.sh`, and what it said."""
        script = f'{before}\nsource "{root}/setenv.sh" || exit 1\n{then}\nexec env -0'
        done = self.run("-c", script, **variables)
        assert done.returncode == 0, done.stderr
        return dict(line.split("=", 1) for line in done.stdout.split("\0") if line), done.stderr


def clean_environment() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(OWN_VARIABLES) and name not in OWN_NAMES
    }


def with_stand_ins(directory: Path, environment: Mapping[str, str]) -> str:
    """PYTHONPATH with an empty package for what setenv.sh looks for and this machine does not have."""
    for name in ("greenlet", "nvshmem"):
        if importlib.util.find_spec(name) is None:
            package = directory / "packages" / name
            package.mkdir(parents=True)
            (package / "__init__.py").touch()
    entries = [environment.get("PYTHONPATH", ""), str(directory / "packages")]
    return os.pathsep.join(entry for entry in entries if entry)


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    directory = tmp_path / "with space"
    directory.mkdir()
    environment = clean_environment()
    environment["PATH"] = os.pathsep.join([str(directory / "bin"), environment["PATH"]])
    environment["PYTHON"] = sys.executable
    # Whatever goes wrong, no test fills a disk.
    environment["PIP_NO_INDEX"] = "1"
    environment["PYTHONPATH"] = with_stand_ins(directory, environment)
    shell = Shell(directory, environment)
    shell.set_gpus(0)
    try:
        yield shell
    finally:
        for child in shell.started:
            shell.kill(child)
            for stream in (child.stdout, child.stderr):
                if stream is not None:
                    stream.close()
