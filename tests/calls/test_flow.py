# SPDX-License-Identifier: Apache-2.0
"""How far a reader has to go to follow a call: files that it enters, and moves between files.

A profile hook records the functions of the package that are entered during a call in the simulator.
The *host part* of a call consists of the public function's module and of ``calls/``, without the
pure decisions about plans.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import torch

import tdcoll
from tdcoll.testing import World

ROOT = Path(tdcoll.__file__).parent

KERNEL_PARTS = ("simulator/", "language/", "primitives/", "spec/")
"""Where a kernel runs, or a language function is checked."""

PURE = ("calls/plan.py", "calls/words.py", "calls/spec.py", "calls/explain.py", "calls/tuning/")
"""Decisions about plans, which import neither torch nor triton."""


class Visit:
    """A function of the package that was called: its file, relative to the package, and its
    qualified name."""

    def __init__(self, code: CodeType) -> None:
        self.file = Path(code.co_filename).relative_to(ROOT).as_posix()
        self.name = code.co_name
        qualified = getattr(code, "co_qualname", code.co_name)  # from Python 3.11 on
        self.is_closure = "<locals>" in qualified and not code.co_name.startswith("<")

    @property
    def is_host(self) -> bool:
        return not self.file.startswith(KERNEL_PARTS) and "kernels" not in self.file

    @property
    def is_flow(self) -> bool:
        in_calls = self.file.startswith("calls/") and not self.file.startswith(PURE)
        return in_calls or self.file.endswith("/op.py")


def visits(call: Callable[[], Any]) -> list[Visit]:
    """Record the functions of the package that are called."""
    found: list[Visit] = []

    def hook(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(ROOT)):
            found.append(Visit(frame.f_code))

    sys.setprofile(hook)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


def moves(found: list[Visit]) -> int:
    """Count how often the reader changes the file."""
    return sum(before.file != after.file for before, after in itertools.pairwise(found))


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Visit]]:
    """The visits of a first call on a context, and of repeated calls with and without it."""
    monkeypatch.setenv("TDCOLL_DEBUG", "0")
    recorded: dict[str, list[Visit]] = {}

    def host(pe: int) -> None:
        x = torch.ones(8)
        with tdcoll.CollectiveContext() as ctx:
            tdcoll.all_gather(x, ctx=ctx)  # imports what both need
            tdcoll.all_reduce  # noqa: B018
            recorded["first"] = visits(lambda: tdcoll.all_reduce(x, ctx=ctx))
            recorded["repeated"] = visits(lambda: tdcoll.all_reduce(x, ctx=ctx))
            tdcoll.all_reduce(x)
            recorded["without ctx"] = visits(lambda: tdcoll.all_reduce(x))

    World(1).run(host)
    return recorded


def test_a_repeated_call_enters_few_files(record: dict[str, list[Visit]]) -> None:
    files = {
        name: {visit.file for visit in found if visit.is_host} for name, found in record.items()
    }
    assert "calls/run.py" in files["repeated"]
    assert len(files["repeated"]) <= 6, sorted(files["repeated"])
    assert len(files["without ctx"]) <= 6, sorted(files["without ctx"])


def test_a_first_call_moves_between_files_seldom(record: dict[str, list[Visit]]) -> None:
    flow = [visit for visit in record["first"] if visit.is_flow]
    names = [f"{visit.file}:{visit.name}" for visit in flow]
    assert "calls/run.py:make_call" in names
    assert moves(flow) <= 18, "\n".join(names)
    assert [name for name, visit in zip(names, flow, strict=True) if visit.is_closure] == []
