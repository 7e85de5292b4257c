# SPDX-License-Identifier: Apache-2.0
"""Thread blocks of contexts whose launches are in flight together: all of them must fit on the GPU at once."""

from __future__ import annotations

import ctypes
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tdcoll
from tdcoll import fused
from tdcoll.collectives._host import pool
from tdcoll.collectives._host.plan import Facts, Plan
from tdcoll.fused.policy import MOST_HIDDEN, Rows, choose, programs
from tdcoll.limits import SHARED_WARPS
from tdcoll.runtime import cuda
from tdcoll.runtime.topology import Topology
from tdcoll.testing import World

MEMORY: dict[str, Any] = {"stores": True, "ll_bytes": 1 << 20, "lamport_bytes": 16 << 20}


def facts(world: int, nbytes: int = 0, **more: Any) -> Facts:
    return Facts(nbytes, Topology.of(0, range(world), [0] * world), **{**MEMORY, **more})


@given(
    world=st.integers(2, 9), rows=st.integers(1, 600), words=st.integers(1, MOST_HIDDEN // 4),
    limit=st.integers(20, 264), algorithm=st.sampled_from(["auto", "one_shot", "two_stage"]),
)  # fmt: skip
def test_fused_calls_keep_to_the_blocks_and_warps_of_their_context(
    world: int, rows: int, words: int, limit: int, algorithm: str
) -> None:
    cut = Rows(rows, 4 * words, 4)
    try:
        plan = choose(cut, facts(world, max_programs=limit), algorithm)
    except ValueError:
        assert algorithm != "auto"
        return
    if plan.algorithm != "composed":  # which waits for no peer
        assert plan.num_warps <= SHARED_WARPS
        assert programs(cut, plan, world) <= limit
        assert plan.chunk <= 16 * 64 * SHARED_WARPS, "a warp has 64 words at most"


def test_fused_plans_made_by_hand_keep_to_the_warps_of_their_context() -> None:
    rows = Rows(2, 1024, 4)
    assert choose(rows, facts(2), Plan("one_shot", 1, 4096, 16)).num_warps == 16
    with pytest.raises(ValueError, match=r"num_warps must be one of 1, 2, 4, 8 on a context with max_programs; got 16"):
        choose(rows, facts(2, max_programs=64), Plan("one_shot", 1, 4096, 16))
    wide = Rows(2, 4096, 4)
    assert choose(wide, facts(2), Plan("one_shot", 1, 16384, 8)).chunk == 16384
    with pytest.raises(ValueError, match="up to 8192 bytes; got 16384"):
        choose(wide, facts(2, max_programs=64), Plan("one_shot", 1, 16384, 8))


def test_rows_in_more_pieces_have_the_same_bits() -> None:
    """With the eight warps of a shared context, rows of 8192 words have twice as many pieces."""

    def host(pe: int) -> None:
        x = torch.randn(3, 8192, generator=torch.Generator().manual_seed(pe))
        residual, weight = torch.ones(3, 8192), torch.arange(8192) / 8192
        make = tdcoll.CollectiveContext
        with make(max_bytes_per_rank=1 << 18) as alone, make(max_bytes_per_rank=1 << 18, max_programs=64) as shared:
            for algorithm in ("one_shot", "two_stage"):
                one, other = (
                    fused.all_reduce_rms_norm(x, residual, weight, ctx=ctx, algorithm=algorithm)
                    for ctx in (alone, shared)
                )
                assert all(mine.equal(theirs) for mine, theirs in zip(one, other, strict=True))

    World(2, heap_bytes=8 << 20).run(host)


# ---------------------------------------------------------------------- how many multiprocessors there are


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
        device=gpu, programs_taken=0, accounts=threading.Lock(), exchange=lambda ranks, what, mine: [mine]
    )

    def take_all() -> None:
        while True:
            taken.append(pool.take_programs(owner, range(2), 64, "all_reduce"))

    with pytest.raises(tdcoll.ContextError, match="other contexts have left"):
        take_all()
    assert 2 * multiprocessors - 6 < sum(taken) <= 2 * multiprocessors
