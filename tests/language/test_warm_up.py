# SPDX-License-Identifier: Apache-2.0
"""What Triton does once per process is done by the warm-up, beside what else runs."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from tdcoll.language import warm_up

DEVICE = torch.device("cuda", 3)


def test_a_kernel_after_the_warm_up_finds_everything_done(compiled: dict[str, Any]) -> None:
    seen = compiled["warming up"]
    assert not any(seen["before"].values())
    assert all(seen["after"].values())
    assert seen["after"]["hashes of libraries"] == 2  # Triton's and NVSHMEM's
    assert seen["later"] == seen["after"]


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
