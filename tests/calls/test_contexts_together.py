# SPDX-License-Identifier: Apache-2.0
"""Contexts in flight together: their thread blocks must fit on the GPU at once, and loads must not
wait crosswise.

CUDA loads a kernel only while none is running. Seen on an H100: with a kernel that doesn't end on
another stream, cuModuleLoadData blocks the host, and so does the first launch of each of PyTorch's
kernels. The simulator loads nothing, so a stand-in does it here.
"""

from __future__ import annotations

import ctypes
import threading
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import on_streams

import tdcoll
from tdcoll import runtime
from tdcoll.calls import budget as budgets
from tdcoll.calls import checks
from tdcoll.calls.kernel_launch import KernelLaunch
from tdcoll.job import cuda
from tdcoll.testing import World


class Driver:
    """CUDA's driver, as far as it says how many multiprocessors a context has: ``sms``, or an
    error."""

    def __init__(self, sms: int, failed: int = 0) -> None:
        self.sms, self.failed = sms, failed

    def cuCtxGetCurrent(self, context: Any) -> int:
        context._obj.value = 7
        return 0

    def cuCtxGetDevResource(self, context: ctypes.c_void_p, resource: Any, kind: int) -> int:
        assert (context.value, kind) == (7, 1)
        ctypes.c_uint.from_address(ctypes.addressof(resource._obj) + 96).value = self.sms
        return self.failed


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A GPU of 132 multiprocessors."""
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: SimpleNamespace(query=lambda: True)
    )
    return torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("driver", "multiprocessors"),
    [
        (Driver(132), 132),
        (Driver(66), 66),  # CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=50
        (Driver(16), 16),  # a green context
        (Driver(16, failed=801), 132),
        (SimpleNamespace(cuCtxGetCurrent=lambda context: 3), 132),
        (SimpleNamespace(), 132),  # older than CUDA 12.4
    ],
)
def test_budgets_are_of_the_part_of_the_gpu_that_the_process_has(
    driver: Any, multiprocessors: int, gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tdcoll.base.driver.driver", lambda: driver)
    assert cuda.multiprocessors(gpu) == multiprocessors
    assert budgets._room(gpu) == 2 * multiprocessors
    taken: list[int] = []
    owner: Any = SimpleNamespace(
        device=gpu,
        blocks_taken=0,
        budget_lock=threading.Lock(),
        exchange=lambda ranks, what, mine: [mine],
    )

    def take_all() -> None:
        while True:
            budget = budgets.Budget(owner, range(2), 64)
            budget.take("all_reduce")
            taken.append(budget.blocks)

    with pytest.raises(tdcoll.ContextError, match="other contexts have left"):
        take_all()
    assert 2 * multiprocessors - 6 < sum(taken) <= 2 * multiprocessors


WORLD = 2


class Loading:
    """Kernels that have to be loaded, on each rank, while no launch of the rank is running."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.running: Counter[int] = Counter()
        self.loaded: set[tuple[int, int]] = set()
        self.world: World
        real = KernelLaunch.__call__

        def launch(this: KernelLaunch, *given: Any) -> None:
            rank = runtime.current().rank
            assert (rank, id(this)) in self.loaded, "kernels are loaded before a call begins"
            self.running[rank] += 1
            real(this, *given)
            self.running[rank] -= 1

        def prepare(this: KernelLaunch) -> None:
            rank = runtime.current().rank
            for _ in range(2000):
                if not self.running[rank] or this.prepared:
                    self.loaded.add((rank, id(this)))
                    return
                self.world.pause(1)
            raise TimeoutError(
                f"rank {rank} cannot load a kernel: one that is running does not end"
            )

        monkeypatch.setattr(KernelLaunch, "__call__", launch)
        monkeypatch.setattr(KernelLaunch, "prepare", prepare)
        is_loaded = property(lambda this: (runtime.current().rank, id(this)) in self.loaded)
        monkeypatch.setattr(KernelLaunch, "prepared", is_loaded)
        monkeypatch.setattr(checks, "INTERPRETED", False)


def _on_two_streams(loading: Loading) -> None:
    """Each rank makes an all-gather and an all-reduce on a stream each, and begins with another one
    of the two."""
    loading.world = world = World(WORLD, heap_bytes=16 << 20, backend="thread", on_timeout="expire")

    def host(pe: int) -> None:
        owner = runtime.current()
        made = [tdcoll.CollectiveContext(max_bytes_per_rank=1024, max_blocks=8) for _ in range(2)]

        def stream(number: int, call: Callable[[Any], torch.Tensor]) -> Callable[[], None]:
            def run() -> None:
                world.pause(40 * (number ^ pe))
                with owner.with_control_plane(owner.control.part(f"stream {number}")):
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
    monkeypatch.setattr(checks.CallChecks, "wait_for_loads", lambda *_: None)
    with pytest.raises(TimeoutError, match="cannot load a kernel"):
        _on_two_streams(Loading(monkeypatch))
