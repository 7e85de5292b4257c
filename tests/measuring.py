# SPDX-License-Identifier: Apache-2.0
"""Fixtures that run benchmarks in a ``World``, and a made-up clock for the measuring path.

A folder's conftest imports those that its tests use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tdcoll import runtime
from tdcoll.testing import World
from tdcoll.tools.measure.benchmark import Benchmark
from tdcoll.tools.measure.timing import TimedLaunch

__all__ = ["Clock", "clock", "measured", "on_gpus", "rows_of"]


class Clock:
    """Stands in for the GPU: a call says how long it took, and events tell the time that has
    passed.

    Each rank is a PE of a World, which runs one PE at a time; so each PE has a clock of its own.
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
            def replay() -> None:
                for position in range(calls):
                    call(position)

            return TimedLaunch(replay, calls)

        monkeypatch.setattr(torch.cuda, "Event", Event)
        for name in (
            "synchronize",
            "empty_cache",
            "current_device",
            "get_device_properties",
            "_sleep",
        ):
            monkeypatch.setattr(torch.cuda, name, lambda *_: None)
        monkeypatch.setattr("tdcoll.tools.measure.engine.capture", capture)

    def passes(self, us: float) -> None:
        """Let so many microseconds go by on this rank."""
        rank = runtime.current().rank
        self.now_us[rank] = self.now_us.get(rank, 0.0) + us


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Install a clock."""
    return Clock(monkeypatch)


@pytest.fixture
def on_gpus() -> Callable[..., list[Any]]:
    """``on_gpus(function, n_pes, **world)``: run it on all ranks, which say that they aren't
    simulated."""

    def run(function: Callable[[int], Any], n_pes: int, **world: Any) -> list[Any]:
        made = World(n_pes, **world)
        for owner in made.runtimes:
            owner.simulated = False
        return made.run(function)

    return run


@pytest.fixture
def rows_of() -> Callable[..., list[Any]]:
    """``rows_of(benchmark, "its options", n_pes, **world)``: its rows, which all ranks have."""

    def run(benchmark: type[Benchmark], arguments: str, n_pes: int, **world: Any) -> list[Any]:
        options = benchmark.parse(arguments.split())
        world.setdefault("heap_bytes", benchmark.heap_bytes(options, n_pes))

        def host(_: int) -> list[Any]:
            return benchmark(options).measure(lambda rows: None)

        first, *others = World(n_pes, **world).run(host)
        assert all(other == first for other in others)
        return first

    return run


@pytest.fixture
def measured(clock: Clock, on_gpus: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """``measured(benchmark, "its options", n_pes)``: its rows, by the clock."""

    def run(benchmark: type[Benchmark], arguments: str, n_pes: int = 2) -> list[Any]:
        options = benchmark.parse(["--iterations", "4", "--warmup", "1", *arguments.split()])
        shown: list[Any] = []

        def host(pe: int) -> list[Any]:
            show = shown.extend if pe == 0 else lambda rows: None
            return benchmark(options).measure(show)

        heap_bytes = benchmark.heap_bytes(options, n_pes) + (4 << 20)
        rows = on_gpus(host, n_pes, heap_bytes=heap_bytes)[0]
        assert shown == rows
        return rows

    return run
