# SPDX-License-Identifier: Apache-2.0
"""Ranks compare the arguments of first calls, and what they exchange anyway says which call it is
for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import on_ranks

import tdcoll
from tdcoll.calls.checks import debug_mode
from tdcoll.fused import all_reduce_rms_norm
from tdcoll.runtime import Runtime
from tdcoll.testing import Deadlock, World


@pytest.fixture(autouse=True)
def _usual(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TDCOLL_DEBUG", raising=False)


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The exchanges of rank 0 that compare arguments of calls."""
    made: list[str] = []
    exchange = Runtime.exchange

    def counting(job: Runtime, ranks: Any, tag: str, value: Any = None) -> Any:
        if job.rank == 0 and tag.endswith(" arguments") and "CollectiveContext" not in tag:
            made.append(tag)
        return exchange(job, ranks, tag, value)

    monkeypatch.setattr(Runtime, "exchange", counting)
    return made


def context(**more: Any) -> tdcoll.CollectiveContext:
    return tdcoll.CollectiveContext(max_bytes_per_rank=256, **more)


def test_each_kind_of_call_is_compared_once(compared: list[str]) -> None:
    def host(pe: int) -> None:
        with context(debug="first") as ctx:
            for n in (4, 8):
                for _ in range(3):
                    tdcoll.all_reduce(torch.ones(n), ctx=ctx)
            # Other calls here, and the same ones for the other rank: what ranks agree on has been
            # compared.
            tdcoll.all_reduce(torch.ones(4) if pe else torch.ones(2, 2), ctx=ctx)
            x = torch.ones(4)
            tdcoll.all_reduce(x, ctx=ctx, **({"out": x} if pe else {}))
            tdcoll.all_gather(torch.ones(4), ctx=ctx)

    World(2).run(host)
    assert compared == ["all_reduce arguments", "all_reduce arguments", "all_gather arguments"]


@on_ranks(2)
def test_what_differs_is_said_for_each_rank_and_the_context_goes_on(pe: int) -> None:
    with context() as ctx:
        for _ in range(2):
            with pytest.raises(tdcoll.RankMismatchError) as raised:
                tdcoll.all_reduce(torch.ones(4 + 4 * pe), ctx=ctx)
            text = "all_reduce arguments must be the same on all ranks; they differ in bytes (rank 0: 16, rank 1: 32)"
            assert str(raised.value) == text
        x, weight = torch.ones(4, 4), torch.ones(4)
        with pytest.raises(ValueError if pe else tdcoll.RankMismatchError, match="contiguous"):
            tdcoll.all_reduce(x.t() if pe else x, ctx=ctx)
        with pytest.raises(ValueError if pe else tdcoll.RankMismatchError, match="contiguous"):
            all_reduce_rms_norm(x.t() if pe else x, x, weight, ctx=ctx)
        assert all_reduce_rms_norm(x, x, weight, ctx=ctx)[1].tolist() == [[3.0] * 4] * 4
        assert tdcoll.all_reduce(torch.ones(4), ctx=ctx).tolist() == [2.0] * 4


def test_an_old_call_of_another_rank_is_waited_for() -> None:
    def host(pe: int) -> None:
        ctx = context(debug="first")
        tdcoll.all_reduce(torch.ones(4), ctx=ctx)
        tdcoll.all_reduce(torch.ones(4 + 4 * pe), ctx=ctx)

    with pytest.raises(
        Deadlock, match=r"pe1 host waits in 'all_reduce arguments' for rank\(s\) \[0\]"
    ):
        World(2).run(host)


@pytest.mark.parametrize(
    ("value", "simulated", "wanted"),
    [("", True, True), ("", False, False), (None, False, False), ("yes", 0, True)],
)
def test_unless_it_is_set_only_the_simulator_compares(
    monkeypatch: pytest.MonkeyPatch, value: str | None, simulated: bool, wanted: Any
) -> None:
    if value is not None:
        monkeypatch.setenv("TDCOLL_DEBUG", value)
    assert debug_mode(simulated) == wanted


@pytest.mark.parametrize(
    ("value", "debug", "calls"), [("0", False, 0), ("first", "first", 1), ("1", True, 3)]
)
def test_the_variable_says_which_calls_unless_the_context_does(
    monkeypatch: pytest.MonkeyPatch, compared: list[str], value: str, debug: Any, calls: int
) -> None:
    def host(pe: int) -> None:
        for variable, given in ((value, None), ("0" if debug else "1", debug)):
            monkeypatch.setenv("TDCOLL_DEBUG", variable)
            with context(debug=given) as ctx:
                assert ctx.debug == debug
                for _ in range(3):
                    tdcoll.all_reduce(torch.ones(4), ctx=ctx)

    World(2).run(host)
    assert len(compared) == 2 * calls


@on_ranks(1)
def test_debug_is_one_of_three(pe: int) -> None:
    with pytest.raises(TypeError, match=r'debug must be a bool, "first" or None, got'):
        context(debug="frist")


@pytest.mark.parametrize("debug", ["0", "first"])
def test_contexts_that_tdcoll_makes_or_enlarges_compare_the_call(
    monkeypatch: pytest.MonkeyPatch, debug: str
) -> None:
    """Whatever debug mode is: the ranks exchange the context's arguments anyway."""
    monkeypatch.setenv("TDCOLL_DEBUG", debug)
    large = 1 << 19

    def host(pe: int) -> None:
        for n in (4, large):  # the first makes the context, the second a larger one
            with pytest.raises(tdcoll.RankMismatchError) as raised:
                tdcoll.all_gather(torch.ones(n + 4 * pe))
            assert str(raised.value) == (
                "all_gather arguments must be the same on all ranks; they differ in bytes "
                f"(rank 0: {4 * n}, rank 1: {4 * n + 16})"
            )
            with pytest.raises(
                tdcoll.RankMismatchError,
                match=r"differ in dtype \(rank 0: torch.int32, rank 1: torch.f",
            ):
                tdcoll.all_gather(torch.ones(n, dtype=torch.float32 if pe else torch.int32))
            if n == 4:
                tdcoll.all_gather(torch.ones(n))
        with pytest.raises(
            tdcoll.RankMismatchError, match="must make the same collective calls in the same order"
        ):
            (tdcoll.reduce_scatter if pe else tdcoll.all_reduce)(torch.ones(4))
        with pytest.raises(
            tdcoll.RankMismatchError, match=r"differ in op \(rank 0: sum, rank 1: max\)"
        ):
            tdcoll.all_reduce(torch.ones(4), "max" if pe else "sum")

    World(2, heap_bytes=64 << 20).run(host)
