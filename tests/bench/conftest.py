# SPDX-License-Identifier: Apache-2.0
"""A made-up clock, with which the measuring path runs where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tdcoll import runtime
from tdcoll.testing import World
from tdcoll.tools.bench.case import Case
from tdcoll.tools.bench.timing import TimedLaunch


class Clock:
    """Stands in for the GPU: whatever is called says how long it took, and events tell the time that has passed.

    Each rank is a PE of a World, which runs one PE at a time; so the clock is the PE's own.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_us: dict[int, float] = {}
        clock = self

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                self.at = 0.0

            def record(self) -> None:
                self.at = clock.now_us.get(runtime.current().rank, 0.0)

            def synchronize(self) -> None: ...

            def elapsed_time(self, other: Event) -> float:
                return (other.at - self.at) / 1e3

        def capture(call: Callable[[int], object], calls: int) -> TimedLaunch:
            return TimedLaunch(lambda: [call(position) for position in range(calls)], calls)

        monkeypatch.setattr(torch.cuda, "Event", Event)
        for name in ("synchronize", "empty_cache", "current_device", "get_device_properties", "_sleep"):
            monkeypatch.setattr(torch.cuda, name, lambda *_: None)
        monkeypatch.setattr("tdcoll.tools.bench.engine.capture", capture)

    def passes(self, us: float) -> None:
        """So much time goes by on this rank."""
        rank = runtime.current().rank
        self.now_us[rank] = self.now_us.get(rank, 0.0) + us


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

    def run(kind: type[Case], arguments: str, n_pes: int, **world: Any) -> list[Any]:
        options = kind.parse(arguments.split())
        world.setdefault("heap_bytes", kind.heap_bytes(options, n_pes))
        first, *others = World(n_pes, **world).run(lambda _: kind(options).measure(lambda rows: None))
        assert all(other == first for other in others)
        return first

    return run


@pytest.fixture
def measured(clock: Clock, on_gpus: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """``measured(case, "its options", n_pes)``: its rows on ranks that say that they are not simulated."""

    def run(kind: type[Case], arguments: str, n_pes: int = 2) -> list[Any]:
        options = kind.parse(["--iterations", "4", "--warmup", "1", *arguments.split()])
        shown: list[Any] = []

        def host(pe: int) -> list[Any]:
            return kind(options).measure(shown.extend if pe == 0 else lambda rows: None)

        rows = on_gpus(host, n_pes, heap_bytes=kind.heap_bytes(options, n_pes) + (4 << 20))[0]
        assert shown == rows
        return rows

    return run
