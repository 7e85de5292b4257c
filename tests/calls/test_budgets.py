# SPDX-License-Identifier: Apache-2.0
"""Thread blocks of contexts whose launches are in flight together: all of them must fit on the GPU at once."""

from __future__ import annotations

import ctypes
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tdcoll
from tdcoll.calls import pool
from tdcoll.job import cuda


class Driver:
    """CUDA's driver, as far as it says how many multiprocessors a context has: ``sms``, or an error."""

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
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(query=lambda: True))
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
    monkeypatch.setattr(cuda, "_driver", lambda: driver)
    assert cuda.multiprocessors(gpu) == multiprocessors
    assert pool._room(gpu) == 2 * multiprocessors
    taken: list[int] = []
    owner: Any = SimpleNamespace(
        device=gpu, blocks_taken=0, accounts=threading.Lock(), exchange=lambda ranks, what, mine: [mine]
    )

    def take_all() -> None:
        while True:
            taken.append(pool.take_blocks(owner, range(2), 64, "all_reduce"))

    with pytest.raises(tdcoll.ContextError, match="other contexts have left"):
        take_all()
    assert 2 * multiprocessors - 6 < sum(taken) <= 2 * multiprocessors
