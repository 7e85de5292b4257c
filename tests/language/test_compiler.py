# SPDX-License-Identifier: Apache-2.0
"""TDCOLL_COMPILER, the part of NVSHMEM's library that kernels link, and the warm-up of Triton."""

from __future__ import annotations

import json
import logging
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import python

import tdcoll.language as tdl
from tdcoll.language import library, warm_up
from tdcoll.language.jit import bitcode_path
from tdcoll.language.library import part_for_language
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
def test_choice(
    monkeypatch: pytest.MonkeyPatch, compiler: str | None, interpreted: bool, module: str
) -> None:
    assert lowering(monkeypatch, compiler, interpreted) == f"tdcoll.{module}"


@pytest.mark.parametrize("interpreted", [False, True])
def test_unknown_compiler(monkeypatch: pytest.MonkeyPatch, interpreted: bool) -> None:
    with pytest.raises(
        ValueError, match="TDCOLL_COMPILER must be triton or triton_dist, got 'gcc'"
    ):
        lowering(monkeypatch, "gcc", interpreted)


def test_compiler_and_simulator(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ValueError,
        match=r"TDCOLL_COMPILER=triton_dist compiles kernels, and TRITON_INTERPRET=1.*unset",
    ):
        lowering(monkeypatch, "triton_dist", True)


@pytest.fixture(scope="module")
def report() -> dict[str, object]:
    done = python(str(PROGRAM), without=["TRITON_INTERPRET"], TDCOLL_COMPILER="triton_dist")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("case", ["without", "without the package"])
def test_import_without_the_compiler_says_what_to_do(report: dict[str, object], case: str) -> None:
    text = str(report[case])
    assert "TDCOLL_COMPILER=triton_dist needs Triton-distributed with its compiler" in text
    assert (
        "Build it from source (the triton-dist 0.0.0 on PyPI has no compiler), or unset TDCOLL_COMPILER"
        in text
    )


def test_functions_of_nvshmem_are_those_of_the_compiler(report: dict[str, object]) -> None:
    assert report["with"] == "imported"
    assert report["lowering"] == "tdcoll.language.triton_dist"
    assert report["theirs"] == [
        name for name, function in FUNCTIONS.items() if function.symbol is not None
    ]
    assert report["ours"] == [
        name for name, function in FUNCTIONS.items() if function.symbol is None
    ]


SYMBOLS = {symbol for function in FUNCTIONS.values() for symbol in function.symbols}


@pytest.fixture(autouse=True)
def _forgotten():
    part_for_language.cache_clear()
    yield
    part_for_language.cache_clear()


def test_it_has_what_the_language_calls_and_little_else() -> None:
    whole = Path(bitcode_path(90))
    part = Path(part_for_language(str(whole)))
    assert part.stat().st_size < whole.stat().st_size / 3
    defined = set(re.findall(r"^define .*@(nvshmemx?_\w+)\(", part.read_text(), re.MULTILINE))
    assert defined == SYMBOLS


def test_it_is_cut_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    part = part_for_language(bitcode_path(90))
    part_for_language.cache_clear()
    monkeypatch.delattr(library, "_cut")
    assert part_for_language(bitcode_path(90)) == part != bitcode_path(90)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("no library", "Failed to parse"),
        (
            "define void @nvshmem_quiet() {\n ret void\n}\n",
            r"does not define .*nvshmem_barrier_all, .*nvshmem_fence, ",
        ),
    ],
)
def test_a_library_that_is_not_known_is_linked_as_a_whole(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    text: str,
    problem: str,
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    other = tmp_path / "other.bc"
    other.write_text(text)
    with caplog.at_level(logging.WARNING, "tdcoll"):
        assert part_for_language(str(other)) == str(other)
    (record,) = caplog.records
    assert re.search(problem, record.getMessage())
    assert "each kernel links all of" in record.getMessage()


DEVICE = torch.device("cuda", 3)


def test_a_kernel_after_the_warm_up_finds_everything_done(compiled: dict[str, Any]) -> None:
    seen = compiled["warming up"]
    assert not any(seen["before"].values())
    assert all(seen["after"].values())
    assert seen["after"]["hashes of libraries"] == 2  # Triton's and NVSHMEM's
    assert seen["later"] == seen["after"]


def test_bits_of_tdcolls_kernels_do_not_depend_on_tritons_default(compiled: dict[str, Any]) -> None:
    assert compiled["fused by default"] == {
        "own, default True": True,
        "own, default False": True,
        "user's, default True": True,
        "user's, default False": False,
        "user's, the other asked for, default True": False,
        "user's, the other asked for, default False": True,
    }


def test_the_warm_up_launches_nothing(compiled: dict[str, Any]) -> None:
    assert compiled["warming up"]["events"] == []


def test_it_runs_beside_the_block_and_is_over_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    inside, may_end = threading.Event(), threading.Event()

    def compile_nothing(nvshmem: bool) -> None:
        assert nvshmem
        inside.set()
        assert may_end.wait(30)
        events.append("compiled")

    monkeypatch.setattr(torch.cuda, "set_device", lambda device: events.append(str(device)))
    monkeypatch.setattr(warm_up, "compile_nothing", compile_nothing)
    with warm_up.warm_up(DEVICE):
        assert inside.wait(30)
        events.append("block")
        may_end.set()
    assert events == ["cuda:3", "block", "compiled"]


def test_what_fails_in_it_is_left_to_the_first_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(device: torch.device) -> None:
        raise RuntimeError("no such device")

    monkeypatch.setattr(torch.cuda, "set_device", fail)
    with warm_up.warm_up(DEVICE):
        done = True
    assert done


def test_an_error_of_the_block_comes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(warm_up, "compile_nothing", lambda nvshmem: None)
    with pytest.raises(ValueError, match="of the block"), warm_up.warm_up(DEVICE):
        raise ValueError("of the block")
    assert not any(thread.name == "tdcoll-warm-up" for thread in threading.enumerate())
