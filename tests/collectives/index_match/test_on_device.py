# SPDX-License-Identifier: Apache-2.0
"""The checks of on_device.py: interpreted, so that they are known to work, and on a GPU in a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tdcoll.testing import World
from tests.collectives.index_match import on_device

ROOT = Path(__file__).resolve().parents[3]


def test_checks_work() -> None:
    notes = World(1).run(lambda pe: on_device.matches_torch())[0]
    assert [note.split(":")[0] for note in notes] == ["bitmap", "search"] * len(on_device.CASES)


def test_a_wrong_place_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = on_device.match_indices
    monkeypatch.setattr(on_device, "match_indices", lambda *lists: real(*lists).clamp(max=5))
    with pytest.raises(AssertionError):
        World(1).run(lambda pe: on_device.matches_torch())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", on_device.__name__]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["ok"]
