# SPDX-License-Identifier: Apache-2.0
"""tests/gpu/backend_calls.py: its columns are named after the programs that the launches had."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tdcoll.distributed.handlers import Dense

ROOT = Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location("backend_calls", ROOT / "tests" / "gpu" / "backend_calls.py")
assert SPEC is not None
assert SPEC.loader is not None
backend_calls: Any = importlib.util.module_from_spec(SPEC)
sys.modules["backend_calls"] = backend_calls
SPEC.loader.exec_module(backend_calls)


class Group:
    """A process group whose context is made in its first call, and gets a third of the programs that are left."""

    left = 92

    def __init__(self, wanted: int) -> None:
        self.wanted, self.context = wanted, None

    def call(self) -> None:
        if self.context is None:
            granted = min(self.wanted, Group.left // 3)
            Group.left -= granted
            self.context = SimpleNamespace(max_bytes_per_rank=1 << 20, max_programs=granted)

    def explain(self) -> str:
        service = SimpleNamespace(pool=SimpleNamespace(context=self.context), limit=4096)
        idle = SimpleNamespace(pool=SimpleNamespace(context=None), limit=4096)
        said = {"all_gather": Dense.describe(service), "all_reduce": Dense.describe(idle)}  # type: ignore[arg-type]
        return "\n".join(f"  {kind}: tdcoll; {text}" for kind, text in said.items())


def test_columns_are_named_after_the_granted_programs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Group, "left", 92)
    dist = SimpleNamespace(
        new_group=lambda backend, pg_options: Group(pg_options.programs),
        destroy_process_group=lambda group: None,
        get_rank=lambda: 0,
    )
    monkeypatch.setattr(backend_calls, "dist", dist)
    monkeypatch.setattr(backend_calls, "explain", Group.explain)
    monkeypatch.setattr(backend_calls, "PLAIN", SimpleNamespace(call=lambda: None))
    monkeypatch.setattr(backend_calls, "call_of", lambda kind, nbytes, group: group.call)
    monkeypatch.setattr(backend_calls, "captured", lambda call: call())
    monkeypatch.setattr(backend_calls, "device_us", lambda graph: 1.0)
    (row,) = backend_calls.device_rows(["all_gather"], [4096], [32, 64, 128])
    names = ["tdcoll 30 (of 32)", "tdcoll 20 (of 64)", "tdcoll 14 (of 128)"]
    assert list(row["us"]) == ["nccl", *names]
    assert list(row["explain"]) == names
    shown = capsys.readouterr().out
    assert all(f"{name} 1.0 [1.0, 1.0]" in shown for name in names)


def test_a_group_that_serves_nothing_has_a_column_too() -> None:
    assert backend_calls.column(32, Group(32).explain()) == "tdcoll none (of 32)"
