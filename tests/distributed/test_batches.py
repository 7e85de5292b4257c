# SPDX-License-Identifier: Apache-2.0
"""Batches of messages, for which PyTorch looks at a group's very type."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import batch_isend_irecv
from torch.distributed import distributed_c10d as c10d

from tdcoll import torch_internals

pytestmark = pytest.mark.usefixtures("_batches")


class Other:
    """Keeps a list of what is asked of it."""

    def __init__(self, batches: bool = True) -> None:
        self.asked: list[Any] = []
        self._backend = SimpleNamespace(supports_coalescing=batches)

    def _get_backend(self, device: torch.device) -> Any:
        return self._backend

    def _start_coalescing(self, device: torch.device) -> None:
        self.asked.append(f"begin on {device}")

    def _end_coalescing(self, device: torch.device) -> str:
        self.asked.append(f"end on {device}")
        return "work of all"

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> str:
        self.asked.append(("send", tensors[0].item(), peer, tag))
        return "work of a send"

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> str:
        self.asked.append(("recv", tensors[0].item(), peer, tag))
        return "work of a receive"


class Group(Other):
    """Belongs to the class for which the function is replaced."""


@pytest.fixture
def _batches() -> Iterator[None]:
    function: Any = inspect.unwrap(dist.batch_isend_irecv)
    before, batch = function.__code__, function.__globals__.get("_tdcoll_batch")
    for _ in range(2):  # also where it has been done before
        torch_internals.batch_messages_of.__wrapped__(Group)
    yield
    function.__code__, function.__globals__["_tdcoll_batch"] = before, batch


def operations(group: Any, monkeypatch: pytest.MonkeyPatch) -> list[dist.P2POp]:
    monkeypatch.setitem(c10d._world.pg_group_ranks, group, {rank: rank for rank in range(8)})
    return [
        dist.P2POp(dist.isend, torch.tensor([1.0]), group=group, tag=7, group_peer=3),
        dist.P2POp(dist.irecv, torch.tensor([2.0]), group=group, tag=8, group_peer=4),
    ]


MESSAGES = [("send", 1.0, 3, 7), ("recv", 2.0, 4, 8)]


def test_messages_are_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(batches=True)
    assert batch_isend_irecv(operations(group, monkeypatch)) == ["work of all"]
    assert group.asked == ["begin on cpu", *MESSAGES, "end on cpu"]


@pytest.mark.parametrize("group", [Group(batches=False), Other()], ids=["cannot", "other"])
def test_without_a_batch(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    works = batch_isend_irecv(operations(group, monkeypatch))
    assert works == ["work of a send", "work of a receive"]
    assert group.asked == MESSAGES


def test_a_wrong_list_is_pytorchs_to_refuse() -> None:
    with pytest.raises(ValueError, match="P2POp"):
        batch_isend_irecv(["a message"])
