# SPDX-License-Identifier: Apache-2.0
"""NVTX ranges of calls, if ``TDCOLL_NVTX`` asks for them; and what a CUDA graph that is being
captured cannot hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tdcoll
from tdcoll.base import ranges
from tdcoll.base.capture import capturing, refuse
from tdcoll.calls.call_launches import CallLaunches
from tdcoll.calls.kernel_launch import KernelLaunch
from tdcoll.collectives.index_match.op import Directory
from tdcoll.fused import all_reduce_rms_norm
from tdcoll.testing import World


@pytest.fixture
def pushed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Messages to NVTX, because ``TDCOLL_NVTX`` asks for it: names, and "end"."""
    told: list[str] = []
    monkeypatch.setattr(ranges, "_available", lambda: True)
    monkeypatch.setenv("TDCOLL_NVTX", "1")
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", told.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: told.append("end"))
    return told


CALLS: dict[str, Callable[[tdcoll.CollectiveContext], object]] = {
    "all_reduce[one_shot, 64 B]": lambda ctx: tdcoll.all_reduce(
        torch.ones(16), ctx=ctx, algorithm="one_shot"
    ),
    # two epochs
    "all_gather[1d, 4.9 KiB]": lambda ctx: tdcoll.all_gather(
        torch.ones(1250), ctx=ctx, algorithm="1d"
    ),
    "all_reduce_rms_norm[composed, 128 B]": lambda ctx: all_reduce_rms_norm(
        torch.ones(2, 16), torch.ones(2, 16), torch.ones(16), ctx=ctx, algorithm="composed"
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_each_call_is_a_range(name: str, pushed: list[str]) -> None:
    def host(pe: int) -> None:
        with tdcoll.CollectiveContext(max_bytes_per_rank=4096) as ctx:
            for _ in range(3):
                CALLS[name](ctx)

    World(1).run(host)
    of_calls = [told for told in pushed if told == f"tdcoll.{name}"]
    assert len(of_calls) == 3
    assert pushed.count("end") == len(pushed) // 2
    if "composed" in name:  # the all-reduce in it is a range inside
        assert "tdcoll.all_reduce[" in pushed[pushed.index(f"tdcoll.{name}") + 1]


def test_calls_in_place_and_sparse_ones(pushed: list[str]) -> None:
    def host(pe: int) -> None:
        with tdcoll.CollectiveContext(max_bytes_per_rank=4096) as ctx:
            tdcoll.all_gather_(tdcoll.zeros(16), ctx=ctx, algorithm="ll")
        rows = torch.sparse_coo_tensor(torch.tensor([[0, 1]]), torch.ones(2, 4), (8, 4))
        for _ in range(2):
            tdcoll.sparse_all_reduce(rows)

    World(1).run(host)
    names = [told for told in pushed if told.startswith("tdcoll.")]
    assert names == [
        "tdcoll.all_gather_[ll, 64 B]",
        *2 * ["tdcoll.sparse_all_reduce[auto, rows of 16 B]"],
    ]


def test_a_range_ends_when_the_call_fails(pushed: list[str]) -> None:
    def fails() -> None:
        raise ValueError("of the call")

    with pytest.raises(ValueError, match="of the call"):
        ranges.ranged("tdcoll.call", fails)()
    assert pushed[-2:] == ["tdcoll.call", "end"]


@pytest.mark.parametrize("value", [None, "", "0"])
def test_without_the_variable_nothing_is_in_the_way(
    value: str | None, pushed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TDCOLL_NVTX", raising=False)
    if value is not None:
        monkeypatch.setenv("TDCOLL_NVTX", value)

    def host(pe: int) -> None:
        with tdcoll.CollectiveContext(max_bytes_per_rank=4096) as ctx:
            CALLS["all_reduce[one_shot, 64 B]"](ctx)
            (launches,) = [made for made in ctx.cache.values() if isinstance(made, CallLaunches)]
            assert launches.run.__func__ is KernelLaunch.__call__  # type: ignore[attr-defined]

    World(1).run(host)
    assert pushed == []


def test_without_nvtx_the_variable_has_no_effect(
    monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    def missing(name: str) -> None:
        raise RuntimeError("NVTX functions not installed")

    monkeypatch.setenv("TDCOLL_NVTX", "1")
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", missing)
    ranges._available.cache_clear()
    World(1).run(lambda pe: CALLS["all_reduce[one_shot, 64 B]"](tdcoll.CollectiveContext()))
    ranges._available.cache_clear()
    assert caplog.text.count("TDCOLL_NVTX has no effect: NVTX functions not installed") == 1


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
    directory = Directory(1, 4, 4, CPU)
    directory.prepare(64)
    directory.device = GPU
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(tdcoll.ContextError, match=r"^index matching: 100000 rows need more memory"):
        directory.prepare(100_000)
