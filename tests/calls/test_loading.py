# SPDX-License-Identifier: Apache-2.0
"""CUDA loads a kernel only while none is running: contexts in flight together must not wait for that crosswise.

Seen on an H100: with a kernel that doesn't end on another stream, cuModuleLoadData blocks the host, and so does the
first launch of each of PyTorch's kernels. The simulator loads nothing, so a stand-in does it here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import on_streams

import tdcoll
from tdcoll import runtime
from tdcoll.calls import context
from tdcoll.calls.launch import Launch
from tdcoll.testing import World

WORLD = 2


class Loading:
    """Kernels that have to be loaded, on each rank, while no launch of the rank is running."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.running: Counter[int] = Counter()
        self.loaded: set[tuple[int, int]] = set()
        self.world: World
        real = Launch.__call__

        def launch(this: Launch, *given: Any) -> None:
            rank = runtime.current().rank
            assert (rank, id(this)) in self.loaded, "kernels are loaded before a call begins"
            self.running[rank] += 1
            real(this, *given)
            self.running[rank] -= 1

        def prepare(this: Launch) -> None:
            rank = runtime.current().rank
            for _ in range(2000):
                if not self.running[rank] or this.prepared:
                    self.loaded.add((rank, id(this)))
                    return
                self.world.pause(1)
            raise TimeoutError(f"rank {rank} cannot load a kernel: one that is running does not end")

        monkeypatch.setattr(Launch, "__call__", launch)
        monkeypatch.setattr(Launch, "prepare", prepare)
        is_loaded = property(lambda this: (runtime.current().rank, id(this)) in self.loaded)
        monkeypatch.setattr(Launch, "prepared", is_loaded)
        monkeypatch.setattr(context, "INTERPRETED", False)


def _on_two_streams(loading: Loading) -> None:
    """Each rank makes an all-gather and an all-reduce on a stream each, and begins with another one of the two."""
    loading.world = world = World(WORLD, heap_bytes=16 << 20, backend="thread", on_timeout="expire")

    def host(pe: int) -> None:
        owner = runtime.current()
        made = [tdcoll.CollectiveContext(max_bytes_per_rank=1024, max_blocks=8) for _ in range(2)]

        def stream(number: int, call: Callable[[Any], torch.Tensor]) -> Callable[[], None]:
            def run() -> None:
                world.pause(40 * (number ^ pe))
                with owner.through(owner.control.part(f"stream {number}")):
                    for _ in range(3):
                        assert call(made[number]).sum() == 8
                made[number].check()

            return run

        ones = torch.ones(4)
        on_streams(
            world,
            stream(0, lambda ctx: tdcoll.all_gather(ones, ctx=ctx)),
            stream(1, lambda ctx: tdcoll.all_reduce(ones, ctx=ctx)),
        )

    world.run(host)


def test_no_rank_launches_what_another_has_yet_to_load(monkeypatch: pytest.MonkeyPatch) -> None:
    _on_two_streams(Loading(monkeypatch))


def test_without_the_wait_they_wait_crosswise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context.CollectiveContext, "wait_for_loads", lambda *_: None)
    with pytest.raises(TimeoutError, match="cannot load a kernel"):
        _on_two_streams(Loading(monkeypatch))
