# SPDX-License-Identifier: Apache-2.0
"""The part of NVSHMEM's library that kernels link. That they come out the same is shown by tests/compile."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from tdcoll.language import library
from tdcoll.language.jit import bitcode_path
from tdcoll.language.library import part_for_language
from tdcoll.spec.functions import FUNCTIONS

SYMBOLS = {symbol for function in FUNCTIONS.values() for symbol in function.symbols}


@pytest.fixture(autouse=True)
def _forgotten():
    part_for_language.cache_clear()
    yield
    part_for_language.cache_clear()


def test_it_has_what_the_language_calls_and_little_else() -> None:
    whole = Path(bitcode_path())
    part = Path(part_for_language(str(whole)))
    assert part.stat().st_size < whole.stat().st_size / 10
    defined = set(re.findall(r"^define .*@(nvshmemx?_\w+)\(", part.read_text(), re.MULTILINE))
    assert defined == SYMBOLS


def test_it_is_cut_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    part = part_for_language(bitcode_path())
    part_for_language.cache_clear()
    monkeypatch.delattr(library, "_cut")
    assert part_for_language(bitcode_path()) == part != bitcode_path()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("no library", "Failed to parse"),
        ("define void @nvshmem_quiet() {\n ret void\n}\n", r"does not define .*nvshmem_barrier_all, .*nvshmem_fence, "),
    ],
)
def test_a_library_that_is_not_known_is_linked_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, text: str, problem: str
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    other = tmp_path / "other.bc"
    other.write_text(text)
    with caplog.at_level(logging.WARNING, "tdcoll"):
        assert part_for_language(str(other)) == str(other)
    (record,) = caplog.records
    assert re.search(problem, record.getMessage())
    assert "each kernel links all of" in record.getMessage()
