# SPDX-License-Identifier: Apache-2.0
"""setenv.sh: the ``.venv`` that it makes in a clone, and when."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tdcoll.base.versions import INSTALLED_ON_GPUS
from tdcoll.tools import setenv

from .conftest import REPOSITORY, Shell

# ---------------------------------------------------------------------- .venv


class Clone:
    """A clone of which only ``.venv`` has what is needed. pip and venv take notes."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.root, self.patch, self.cuda, self.fails = root, patch, "12", False
        self.log: list[str] = []
        self.lacks = "lacks nvshmem"
        root.mkdir()
        for name in ("pyproject.toml", "constraints-cpu.txt", "launch.sh"):
            shutil.copy(REPOSITORY / name, root)
        self.is_here()
        patch.setattr(setenv, "_problem", self._problem)
        patch.setattr(venv, "create", self._create)
        patch.setattr(subprocess, "run", self._run)

    def is_here(self) -> None:
        self.venv = self.root / ".venv"
        for name, path in (
            ("ROOT", self.root),
            ("_VENV", self.venv),
            ("_STAMP", self.venv / ".tdcoll-stamp"),
        ):
            self.patch.setattr(setenv, name, path)
        self.patch.setattr(setenv, "_OWN", str(self.venv / "bin" / "python"))

    def move(self) -> None:
        self.root = self.root.rename(self.root.with_name("elsewhere"))
        self.is_here()

    def _problem(self, modules: list[str], versions: Any) -> str:
        if sys.executable != setenv._OWN:
            return "lacks torch"
        return "" if (self.venv / "nvshmem").exists() or "nvshmem" not in modules else self.lacks

    def _create(self, folder: Path, *, clear: bool, symlinks: bool, with_pip: bool) -> None:
        assert (symlinks, with_pip) == (True, True)
        self.log.append("venv --clear" if clear else "venv")
        if clear:
            shutil.rmtree(folder)
        (folder / "bin").mkdir(parents=True, exist_ok=True)
        (folder / "bin" / "python").touch()

    def _run(self, command: list[str], **options: Any) -> Any:
        assert (command[0], options["check"]) == (setenv._OWN, True)
        if command[1] == "-c":
            return SimpleNamespace(stdout=f"{self.cuda}\n")
        assert (options["stdout"], options["cwd"]) == (sys.stderr, self.root), (
            "setenv.sh evaluates what is printed"
        )
        self.log.append(" ".join(command[2:]).replace(" --quiet --disable-pip-version-check", ""))
        if self.fails:
            raise subprocess.CalledProcessError(1, command)
        if "cu1" in self.log[-1]:
            (self.venv / "nvshmem").touch()
        return None

    def source(
        self, kind: str = "cpu", python: str = "/usr/bin/python3", dry_run: bool = False
    ) -> list[str]:
        """What is made until a Python has all that is needed; each time, another Python is
        started."""
        self.log = []
        for _ in range(4):
            self.patch.setattr(sys, "executable", python)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(os, "execv", lambda python, command: (python, None))
                gpus = kind == "gpu"
                self.python, about = setenv._python(["nvshmem"] * gpus, gpus, ["--extra"], dry_run)
            if about is not None:
                return self.log
            assert self.python == setenv._OWN
            python = self.python
        raise AssertionError("no end")


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Clone:
    return Clone(tmp_path / "a clone", monkeypatch)


MADE = {
    "cpu": ["pip install --extra -c constraints-cpu.txt -e .[sim,compile,bench,test,dev]"],
    "gpu": [
        f"pip install --extra {' '.join(INSTALLED_ON_GPUS)} numpy",
        "pip install --extra -e .[cu12,sim,bench,test,dev]",
    ],
}
CHANGES: dict[str, Callable[[Clone], object]] = {
    "nothing changes": lambda clone: None,
    "its inputs change": lambda clone: (clone.root / "constraints-cpu.txt").write_text(
        "one-more==1\n"
    ),
    "its Python is gone": lambda clone: (clone.venv / "bin" / "python").unlink(),
    "it is moved": lambda clone: clone.move(),
}


@pytest.mark.parametrize(
    ("before", "change", "then", "made"),
    [
        ("cpu", "nothing changes", "cpu", []),
        ("gpu", "nothing changes", "gpu", []),
        # GPUs are hidden, or on another host with the same file system
        ("gpu", "nothing changes", "cpu", []),
        ("cpu", "nothing changes", "gpu", ["venv --clear", *MADE["gpu"]]),
        ("cpu", "its inputs change", "cpu", ["venv", *MADE["cpu"]]),
        ("gpu", "its inputs change", "cpu", ["venv", *MADE["gpu"]]),
        ("cpu", "its Python is gone", "cpu", ["venv --clear", *MADE["cpu"]]),
        ("gpu", "it is moved", "gpu", ["venv --clear", *MADE["gpu"]]),
    ],
)
def test_when_it_is_made(
    clone: Clone,
    before: str,
    change: str,
    then: str,
    made: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert clone.source(before) == ["venv", *MADE[before]]
    assert f"lacks torch: making {clone.venv}" in capsys.readouterr().err
    CHANGES[change](clone)
    assert clone.source(then) == made
    assert clone.source(then, setenv._OWN) == []
    (clone.root / "pyproject.toml").write_text("")
    assert clone.source(then, setenv._OWN)[0] == "venv", "it is active, and out of date"


def test_what_it_does_not_repair(clone: Clone) -> None:
    clone.source("gpu")
    (clone.venv / "nvshmem").unlink()
    with pytest.raises(SystemExit, match=f"lacks nvshmem; install that, or remove {clone.venv}"):
        clone.source("gpu")
    assert clone.log == []


def test_a_link_is_not_emptied(clone: Clone, tmp_path: Path) -> None:
    clone.source("cpu")
    clone.venv.rename(tmp_path / "other")
    clone.venv.symlink_to(tmp_path / "other")
    (clone.venv / ".tdcoll-stamp").write_text("/other\ncpu")
    with pytest.raises(
        SystemExit, match=f"could not make {clone.venv} .it is a link to {tmp_path}/other"
    ):
        clone.source("cpu")
    assert (tmp_path / "other" / "bin" / "python").exists()


def test_a_failed_install_is_tried_again(clone: Clone) -> None:
    clone.cuda = "11"
    with pytest.raises(
        SystemExit, match=r"could not make .*CUDA '11'.* activate a Python that has nvshmem"
    ):
        clone.source("gpu")
    clone.cuda, clone.fails = "13", True
    with pytest.raises(SystemExit, match="tdcoll: could not make"):
        clone.source("gpu")
    clone.fails = False
    assert clone.source("gpu")[-1] == "pip install --extra -e .[cu13,sim,bench,test,dev]"


def test_another_process_makes_it_meanwhile(clone: Clone, monkeypatch: pytest.MonkeyPatch) -> None:
    clone.source()
    stamp = setenv._STAMP.read_text()
    setenv._STAMP.unlink()
    monkeypatch.setattr("fcntl.flock", lambda lock, how: setenv._STAMP.write_text(stamp))
    assert clone.source() == []


def test_a_dry_run_installs_nothing(clone: Clone) -> None:
    assert (clone.source(dry_run=True), clone.python) == ([], setenv._OWN)
    assert not clone.venv.exists()


def test_its_programs_come_first(
    shell: Shell, clone: Clone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setenv, "_python", lambda *_: (setenv._OWN, ""))
    variables = setenv.prepare({"PATH": f"/a:{clone.venv}/bin::/b"}).variables
    assert (variables["PATH"], variables["VIRTUAL_ENV"]) == (
        f"{clone.venv}/bin:/a::/b",
        str(clone.venv),
    )
