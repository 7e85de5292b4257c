# SPDX-License-Identifier: Apache-2.0
"""Tests run interpreted. Those marked `slow` are the second tier; those marked `gpu` start jobs of
their own.

A test that ends without a check fails: it has passed no assertion, in the test or in a module of
``HELPERS``, has compared no tensors, and has expected no exception. So every parameter set checks
something.

As on GPUs, ranks don't compare the arguments of first calls unless a test asks for it: a rank whose
first call fails alone would tell the others, and one that makes none would be missed on the host,
not in a kernel.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # before triton is first imported
os.environ.setdefault("TDCOLL_DEBUG", "0")

import pytest
import torch
from _pytest.assertion import util

HELPERS = ("cases", "checks", "collectives", "fused", "kernel_mutants", "ranks")
"""Modules and packages whose assertions count as a test's own."""

pytest.register_assert_rewrite(*HELPERS)

ROOT = Path(__file__).resolve().parent.parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what ``-m`` does not speak of: tests of the second tier, and of GPUs where there
    are none."""
    expression = config.getoption("markexpr") or ""
    absent = {"slow"} if torch.cuda.is_available() else {"slow", "gpu"}
    absent = {marker for marker in absent if marker not in expression}
    chosen = [
        item for item in items if not any(item.get_closest_marker(marker) for marker in absent)
    ]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
    items[:] = chosen


class Checks:
    """What the running test has checked.

    Attributes:
        any: whether an assertion has passed, tensors are compared, or an exception is expected.
        calling: whether the test itself runs, and not its fixtures.
    """

    any = False
    calling = False


def pytest_assertion_pass() -> None:
    Checks.any = True
    if Checks.calling:
        # One is enough. Else pytest would describe the values of all that follow, which takes long.
        util._assertion_pass = None


def _expecting(expect: Any) -> Any:
    """``pytest.raises``, or another function whose calls are checks."""

    def expected(*arguments: Any, **options: Any) -> Any:
        Checks.any = True
        return expect(*arguments, **options)

    return expected


pytest.raises = _expecting(pytest.raises)
pytest.warns = _expecting(pytest.warns)
torch.testing.assert_close = _expecting(torch.testing.assert_close)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fail a test that has checked nothing."""
    Checks.any = False
    Checks.calling = True
    try:
        result = yield
    finally:
        Checks.calling = False
    if not Checks.any:
        pytest.fail(f"{item.name} checks nothing", pytrace=False)
    return result


@pytest.fixture
def launch():
    """``launch(*arguments, timeout=..., env=...)``: run launch.sh; its CompletedProcess. Children
    never survive it."""

    def run(*arguments: str, timeout: float = 120, env: dict[str, str] | None = None):
        surroundings = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET",)}
        surroundings |= {"PYTHON": sys.executable, **(env or {})}
        process = subprocess.Popen(
            ["bash", str(ROOT / "launch.sh"), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=surroundings,
            start_new_session=True,
        )
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired as error:
            told = b"".join(part or b"" for part in (error.output, error.stderr)).decode(
                errors="replace"
            )
            pytest.fail(f"launch.sh {' '.join(arguments)} did not end in {timeout:g} s:\n{told}")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    return run
