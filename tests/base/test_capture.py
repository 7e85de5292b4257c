# SPDX-License-Identifier: Apache-2.0
"""Refusals of what a CUDA graph that is being captured cannot hold."""

from __future__ import annotations

import pytest
import torch

import tdcoll
from tdcoll.base.capture import capturing, refuse
from tdcoll.calls.launch import Launcher
from tdcoll.collectives.index_match.op import Directory

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_only_a_gpu_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    for now in (False, True):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda now=now: now)
        assert capturing(GPU) is now
        assert not capturing(CPU)
        refuse(CPU, "all_gather", "no room")


def test_a_refusal_names_the_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(tdcoll.ContextError, match=r"^all_gather: no room$"):
        refuse(GPU, "all_gather", "no room")


def test_a_directory_does_not_grow_in_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    directory = Directory(1, 4, 4, CPU, Launcher())
    directory.prepare(64)
    directory.device = GPU
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(tdcoll.ContextError, match=r"^index matching: 100000 rows need more memory"):
        directory.prepare(100_000)
