# SPDX-License-Identifier: Apache-2.0
"""Parts of the control plane, which threads use beside each other: what they exchange, and the memory they take."""

from __future__ import annotations

import itertools
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tiers import second

from tdcoll import runtime
from tdcoll.base.errors import ContextError, HeapExhaustedError, RankMismatchError
from tdcoll.calls.pool import give_back_blocks, take_blocks
from tdcoll.runtime.control import StoreControlPlane
from tdcoll.runtime.heap import ALIGNMENT

PLENTY_S = 20.0


@pytest.fixture
def planes() -> list[StoreControlPlane]:
    """The control planes of two ranks, each with one connection to the same server."""
    first = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=PLENTY_S), wait_for_workers=False)
    other = dist.TCPStore("127.0.0.1", first.port, None, False, timedelta(seconds=PLENTY_S), wait_for_workers=False)
    return [StoreControlPlane(store, rank, PLENTY_S) for rank, store in enumerate((first, other))]


def test_parts_have_orders_of_their_own(planes: list[StoreControlPlane]) -> None:
    """One rank waits in two parts at once, which the other comes to in the other order."""
    parts = [[plane.part(name) for name in ("a", "b")] for plane in planes]
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(parts[0][i].all_gather, [0, 1], f"in part {i}", i) for i in (0, 1)]
        for i in (1, 0):
            assert parts[1][i].all_gather([0, 1], f"in part {i}", i + 10) == [i, i + 10]
        assert [done.result() for done in waiting] == [[0, 10], [1, 11]]
        both = [pool.submit(plane.all_gather, [0, 1], "in none", None) for plane in planes]
        assert [done.result() for done in both] == [[None, None]] * 2


def test_connections_are_used_anew(planes: list[StoreControlPlane]) -> None:
    """There are as many as threads have waited at once, not as many as there are parts."""
    with ThreadPoolExecutor() as pool:
        for i in range(50):
            parts = [plane.part(f"part {i}") for plane in planes]
            list(pool.map(lambda part: part.all_gather([0, 1], "exchange", None), parts))
    assert [len(plane._idle) for plane in planes] == [1, 1]


def jobs_of(planes: list[StoreControlPlane], nbytes: int) -> list[runtime.Runtime]:
    def heap() -> Any:
        memory = torch.zeros(nbytes, dtype=torch.uint8)
        return SimpleNamespace(
            nbytes=nbytes,
            base=memory.data_ptr(),
            device=memory.device,
            view=lambda offset, nbytes: memory[offset : offset + nbytes],
            label=lambda *of: None,
        )

    return [runtime.Runtime(r, 2, heap(), plane, (0, 0), True, PLENTY_S) for r, plane in enumerate(planes)]


@pytest.mark.parametrize("seeds", [range(3), second(range(3, 40))], ids=["first", "more"])
def test_threads_that_allocate_beside_each_other(seeds: range, planes: list[StoreControlPlane]) -> None:
    """In any order: each gets the same offset on both ranks, and memory that nobody else has."""
    for seed in seeds:
        numbers = random.Random(seed)
        sizes = [[numbers.randint(1, 4 * ALIGNMENT) for _ in range(6)] for _ in range(4)]
        room = sum(-(-size // ALIGNMENT) * ALIGNMENT for some in sizes for size in some) + 4 * ALIGNMENT * 24
        jobs = jobs_of(planes, room)
        go = threading.Barrier(8)
        found: dict[tuple[int, int, int], tuple[int, int]] = {}

        def body(rank: int, thread: int, go=go, jobs=jobs, sizes=sizes, found=found, seed=seed) -> None:
            job = jobs[rank]
            go.wait()
            with job.through(job.control.part(f"{seed} {thread}")):
                for i, size in enumerate(sizes[thread]):
                    first = job.offset_of(job.allocate((size,), torch.uint8, name=f"{thread} {i}"), "tensor")
                    found[rank, thread, i] = first, first + size

        with ThreadPoolExecutor(8) as pool:
            for done in [pool.submit(body, rank, thread) for thread in range(4) for rank in range(2)]:
                done.result()
        assert len(found) == 48
        for (rank, thread, i), place in found.items():
            assert place == found[1 - rank, thread, i]
        places = sorted(place for (rank, _, _), place in found.items() if rank == 0)
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(places))
        assert len({job.heap_info.used for job in jobs}) == 1


def test_an_allocation_that_finds_no_room_leaves_none_taken(planes: list[StoreControlPlane]) -> None:
    jobs = jobs_of(planes, 4 * ALIGNMENT)

    def body(job: runtime.Runtime) -> str:
        with pytest.raises(HeapExhaustedError, match="1024 of 2048 bytes free on the fullest rank") as raised:
            job.allocate((3 * ALIGNMENT,), torch.uint8)
        return str(raised.value)

    jobs[1].arena.hold(2 * ALIGNMENT, [1])
    with ThreadPoolExecutor() as pool:
        assert len(set(pool.map(body, jobs))) == 1
    assert [job.heap_info.used for job in jobs] == [0, 2 * ALIGNMENT]


def test_ranks_that_make_different_calls_may_go_on(planes: list[StoreControlPlane]) -> None:
    def body(job: runtime.Runtime) -> list[Any]:
        with pytest.raises(RankMismatchError, match="must make the same collective calls"):
            job.exchange([0, 1], f"call {job.rank}")
        return job.exchange([0, 1], "call", job.rank)

    with ThreadPoolExecutor() as pool:
        assert list(pool.map(body, jobs_of(planes, ALIGNMENT))) == [[0, 1]] * 2


def test_what_exchanges_are_given_ends_with_the_block() -> None:
    calls: list[tuple[Any, ...]] = []

    def plane(name: str) -> Any:
        gather = lambda ranks, tag, value, timeout_s: calls.append((name, tag, timeout_s))  # noqa: E731
        return SimpleNamespace(all_gather=gather)

    (job,) = jobs_of([plane("job")], ALIGNMENT)
    with job.through(plane("part"), 2.0, "group 1"), job.through(plane("inner part")):
        job.exchange([0], "inside")
    job.exchange([0], "outside")
    assert calls == [("inner part", "inside (group 1)", 2.0), ("job", "outside", None)]


def test_threads_take_no_more_blocks_than_there_are(planes: list[StoreControlPlane]) -> None:
    jobs = jobs_of(planes, ALIGNMENT)

    def body(at: tuple[int, int]) -> tuple[int, str]:
        rank, thread = at
        with jobs[rank].through(jobs[rank].control.part(f"blocks {thread}")):
            try:
                return take_blocks(jobs[rank], [0, 1], 64, "test"), ""
            except ContextError as error:
                return 0, str(error)

    with ThreadPoolExecutor(10) as pool:
        for turn in range(3):  # the third finds no program
            places = [(rank, 10 * turn + thread) for thread in range(5) for rank in range(2)]
            found = dict(zip(places, pool.map(body, places), strict=True))
            for (rank, thread), answer in found.items():
                assert answer == found[1 - rank, thread]
            assert jobs[0].blocks_taken == jobs[1].blocks_taken <= 264
    refused = [why for _, why in found.values()]
    assert all("of 2 ranks needs 6 thread blocks, and other contexts have left" in why for why in refused), found
    for job in jobs:
        give_back_blocks(job, job.blocks_taken)
        assert job.blocks_taken == 0
