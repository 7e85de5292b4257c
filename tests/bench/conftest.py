# SPDX-License-Identifier: Apache-2.0
"""A made-up clock, with which the measuring path runs where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tdcoll.bench.case import Benchmark
from tdcoll.bench.timing import Launch
from tdcoll.testing import World


class Clock:
    """Stands in for the GPU: whatever is called says how long it took, and events tell the time that has passed.

    Each rank is a PE of a World, which runs one PE at a time; so the clock is the PE's own.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from tdcoll import runtime

        self.now_us: dict[int, float] = {}
        clock = self

        def rank() -> int:
            return runtime.current().rank

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                self.at = 0.0

            def record(self) -> None:
                self.at = clock.now_us.get(rank(), 0.0)

            def synchronize(self) -> None:
                pass

            def elapsed_time(self, other: Event) -> float:
                return (other.at - self.at) / 1e3

        def capture(call: Callable[[int], object], calls: int) -> Launch:
            def replay() -> None:
                for position in range(calls):
                    call(position)

            return Launch(replay, calls)

        self._rank = rank
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr("tdcoll.bench.timing.pause", lambda us: None)
        monkeypatch.setattr("tdcoll.bench.engine.capture", capture)

    def passes(self, us: float) -> None:
        """So much time goes by on this rank."""
        self.now_us[self._rank()] = self.now_us.get(self._rank(), 0.0) + us


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Installs a clock."""
    return Clock(monkeypatch)


@pytest.fixture
def on_gpus() -> Callable[..., list[Any]]:
    """``on_gpus(function, n_pes, **world)``: run it on every rank of a world that says that it is not simulated."""

    def run(function: Callable[[int], Any], n_pes: int, **world: Any) -> list[Any]:
        made = World(n_pes, **world)
        for owner in made.runtimes:
            owner.simulated = False
        return made.run(function)

    return run


@pytest.fixture
def rows_of() -> Callable[..., list[Any]]:
    """``rows_of(case, "its options", n_pes, **world)``: its rows on a simulated world; all ranks have the same."""

    def run(kind: type[Benchmark], arguments: str, n_pes: int, **world: Any) -> list[Any]:
        options = kind.parse(arguments.split())
        world.setdefault("heap_bytes", kind.heap_bytes(options, n_pes))
        first, *others = World(n_pes, **world).run(lambda _: kind(options).measure(lambda row: None))
        assert all(other == first for other in others)
        return first

    return run
