# SPDX-License-Identifier: Apache-2.0
"""TDCOLL_COMPILER: which implementation of the language a process gets, and what it says when it cannot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tdcoll.language as tdl
from tdcoll.spec.functions import FUNCTIONS

PROGRAM = Path(__file__).with_name("choose_compiler.py")


def lowering(monkeypatch: pytest.MonkeyPatch, compiler: str | None, interpreted: bool) -> str:
    monkeypatch.setattr(tdl, "INTERPRETED", interpreted)
    if compiler is None:
        monkeypatch.delenv("TDCOLL_COMPILER", raising=False)
    else:
        monkeypatch.setenv("TDCOLL_COMPILER", compiler)
    return tdl._lowering()


@pytest.mark.parametrize(
    ("compiler", "interpreted", "module"),
    [
        (None, False, "language.nvshmem"),
        ("", False, "language.nvshmem"),
        ("triton", False, "language.nvshmem"),
        ("triton_dist", False, "language.triton_dist"),
        (None, True, "simulator.lowering"),
        ("triton", True, "simulator.lowering"),
    ],
)
def test_choice(monkeypatch: pytest.MonkeyPatch, compiler: str | None, interpreted: bool, module: str) -> None:
    assert lowering(monkeypatch, compiler, interpreted) == f"tdcoll.{module}"


@pytest.mark.parametrize("interpreted", [False, True])
def test_unknown_compiler(monkeypatch: pytest.MonkeyPatch, interpreted: bool) -> None:
    with pytest.raises(ValueError, match="TDCOLL_COMPILER must be triton or triton_dist, got 'gcc'"):
        lowering(monkeypatch, "gcc", interpreted)


def test_compiler_and_simulator(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ValueError, match=r"TDCOLL_COMPILER=triton_dist compiles kernels, and TRITON_INTERPRET=1.*unset"
    ):
        lowering(monkeypatch, "triton_dist", True)


@pytest.fixture(scope="module")
def report() -> dict[str, object]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TDCOLL_COMPILER": "triton_dist"}
    done = subprocess.run(
        [sys.executable, str(PROGRAM)], capture_output=True, text=True, env=environment, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("case", ["without", "without the package"])
def test_import_without_the_compiler_says_what_to_do(report: dict[str, object], case: str) -> None:
    text = str(report[case])
    assert "TDCOLL_COMPILER=triton_dist needs Triton-distributed with its compiler" in text
    assert "Build it from source (the triton-dist 0.0.0 on PyPI has no compiler), or unset TDCOLL_COMPILER" in text


def test_functions_of_nvshmem_are_those_of_the_compiler(report: dict[str, object]) -> None:
    assert report["with"] == "imported"
    assert report["lowering"] == "tdcoll.language.triton_dist"
    assert report["theirs"] == [name for name, function in FUNCTIONS.items() if function.symbol is not None]
    assert report["ours"] == [name for name, function in FUNCTIONS.items() if function.symbol is None]
