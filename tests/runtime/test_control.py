# SPDX-License-Identifier: Apache-2.0
"""Host-side exchanges over torch.distributed's stores, also in parts that threads use beside each
other."""

from __future__ import annotations

import itertools
import random
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tiers import slow_tier

from tdcoll import runtime
from tdcoll.base.errors import (
    CollectiveTimeout,
    ContextError,
    HeapExhaustedError,
    RankMismatchError,
    TdcollError,
)
from tdcoll.calls.budget import Budget
from tdcoll.runtime.control import StoreControlPlane, generation, require_equal
from tdcoll.runtime.heap import ALIGNMENT
from tdcoll.runtime.store import encode

PLENTY_S = 20.0

Stores = Callable[[int], list[Any]]


@pytest.fixture(params=["hash", "file", "tcp"])
def stores(request: pytest.FixtureRequest, tmp_path: Path) -> Stores:
    """``stores(n)``: one store for each of n ranks, all of them the same."""

    def make(n: int) -> list[Any]:
        if request.param == "hash":
            return [dist.HashStore()] * n
        if request.param == "file":
            return [dist.FileStore(str(tmp_path / "store"), n) for _ in range(n)]
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = server.port
        return [
            server,
            *(dist.TCPStore("127.0.0.1", port, wait_for_workers=False) for _ in range(n - 1)),
        ]

    return make


def everywhere(ranks: list[int], body: Callable[[int], Any]) -> list[Any]:
    """``body(rank)`` at the same time for all ranks; what each returned or raised."""

    def caught(rank: int) -> Any:
        try:
            return body(rank)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(caught, ranks))


def test_answers_come_in_the_order_of_the_ranks_and_subgroups_do_not_meet(stores: Stores) -> None:
    shared = stores(4)
    planes = [StoreControlPlane(shared[rank], rank, PLENTY_S) for rank in range(4)]
    calls = [(call, order) for call in range(5) for order in ([0, 1, 2, 3], [2, 0, 3, 1])]

    def body(rank: int) -> list[Any]:
        gather, mine = planes[rank].all_gather, [rank % 2, rank % 2 + 2]
        inside = [gather(mine, f"half {rank % 2}", rank) for _ in range(3 + rank % 2)]
        return [
            inside[-1],
            gather([rank], "me", 7),
            *(gather(order, "all", (rank, call)) for call, order in calls),
        ]

    everyone = [[(rank, call) for rank in order] for call, order in calls]
    assert everywhere([0, 1, 2, 3], body) == [
        [half, [7], *everyone] for half in ([0, 2], [1, 3], [0, 2], [1, 3])
    ]


def test_different_calls_are_a_mismatch_on_all(stores: Stores) -> None:
    shared = stores(3)

    def body(rank: int) -> None:
        StoreControlPlane(shared[rank], rank, PLENTY_S).all_gather(
            [0, 1, 2], "free" if rank == 1 else "barrier", None
        )

    errors = everywhere([0, 1, 2], body)
    assert {type(error) for error in errors} == {RankMismatchError}
    rule = ": all ranks must make the same collective calls in the same order"
    assert str(errors[0]) == f"rank 0 is in 'barrier', and rank 1 in 'free'{rule}"
    assert (
        str(errors[1]) == f"rank 1 is in 'free', and rank 0 in 'barrier', rank 2 in 'barrier'{rule}"
    )


def test_missing_rank_is_named(stores: Stores) -> None:
    shared = stores(4)

    def body(rank: int) -> None:
        StoreControlPlane(shared[rank], rank, PLENTY_S).all_gather(
            [0, 1, 2, 3], "allocate rows", rank, 0.3
        )

    errors = everywhere([0, 2], body)
    assert {type(error) for error in errors} == {CollectiveTimeout}
    for rank, error in zip((0, 2), errors, strict=True):
        assert re.search(
            rf"rank {rank} waited 0\.3 s in 'allocate rows' for rank\(s\) \[1, 3\].* timeout ",
            str(error),
        )
        assert (error.rank, error.timeout_s, error.peer) == (rank, 0.3, None)
        assert error.__cause__ is not None


def test_what_differs_is_named() -> None:
    require_equal([(4, "same")] * 3, [0, 1, 2], "capacity")
    with pytest.raises(
        RankMismatchError, match=r"^capacity must be the same .*; got rank 3: 32, rank 1: 64$"
    ):
        require_equal([32, 64], [3, 1], "capacity")
    mine, theirs = (
        {"size": 4, "debug": False, "name": "a"},
        {"size": 5, "debug": False, "name": "b"},
    )
    require_equal([mine, dict(mine)], [0, 1], "arguments")
    with pytest.raises(RankMismatchError) as raised:
        require_equal([mine, theirs, mine], [3, 1, 0], "arguments")
    assert str(raised.value) == (
        "arguments must be the same on all ranks; they differ in size (rank 3: 4, rank 1: 5, rank 0: 4), "
        "name (rank 3: a, rank 1: b, rank 0: a)"
    )


def test_keys_are_removed() -> None:
    store = dist.HashStore()
    before = store.num_keys()
    planes = [StoreControlPlane(store, rank, PLENTY_S) for rank in range(2)]
    everywhere(
        [0, 1], lambda rank: [planes[rank].all_gather([0, 1], "call", rank) for _ in range(50)]
    )
    assert store.num_keys() - before <= 2 * 2  # each rank's of the last two exchanges


class Slow:
    """A store that reads late: another rank's next writes come before."""

    def __init__(self, store: Any, before_read: Callable[[], None]) -> None:
        self._store, self._before_read = store, before_read

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def get(self, key: str) -> bytes:
        self._before_read()
        return self._store.get(key)


def test_no_key_is_removed_before_everybody_has_read_it() -> None:
    """Rank 0 may be in the next exchange while rank 1 has not read its key of this one."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=1))  # of a read of a key that is gone
    fast = StoreControlPlane(store, 0, 0.1)
    answers: list[Any] = []

    def run_ahead() -> None:
        if not answers:
            answers.append(fast.all_gather([0, 1], "call", "fast"))
            with pytest.raises(TdcollError, match=r"rank\(s\) \[1\]"):
                fast.all_gather([0, 1], "call", "fast")

    store.set("tdcoll/0-1/0/0", encode("call", "fast"))  # rank 0 has come first
    slow = StoreControlPlane(Slow(store, run_ahead), 1, PLENTY_S)
    assert slow.all_gather([0, 1], "call", "slow") == ["fast", "slow"]
    assert answers == [["fast", "slow"]]
    assert slow.all_gather([0, 1], "call", "slow") == ["fast", "slow"]


# ---------------------------------------------------------------------- generations


def join(shared: list[Any], rank: int, ranks: list[int]) -> list[int]:
    """Join a generation, and return who is in it."""
    part = generation(shared[rank], rank, ranks, "join", PLENTY_S)
    return StoreControlPlane(part, rank, PLENTY_S).all_gather(ranks, "call", rank)


def test_every_generation_begins_with_nothing(stores: Stores) -> None:
    shared = stores(3)
    ranks = [0, 1, 2]

    def body(rank: int) -> None:
        for call in range(10):
            part = generation(shared[rank], rank, ranks, "join", PLENTY_S)
            time.sleep(0.003 * ((rank + call) % 3))
            plane = StoreControlPlane(part, rank, PLENTY_S)
            assert not part.check([f"of rank {other}" for other in ranks])
            plane.all_gather(ranks, "all have looked", None)
            part.set(f"of rank {rank}", "what gloo leaves")
            assert plane.all_gather(ranks, "call", (rank, call)) == [
                (other, call) for other in ranks
            ]

    assert everywhere(ranks, body) == [None] * 3


WITHOUT_FILES = pytest.mark.parametrize("stores", ["hash", "tcp"], indirect=True)


@WITHOUT_FILES
def test_other_ranks_join_another_generation(stores: Stores) -> None:
    """A job of two ranks between two of three: a count in each process would be 3 on two of them
    and 2 on the third."""
    shared = stores(3)

    def body(rank: int) -> list[Any]:
        answers = []
        for ranks in ([0, 1, 2], [1, 0], [0, 1, 2]):
            if rank in ranks:
                answers.append(join(shared, rank, ranks))
        return answers

    everyone = [0, 1, 2]
    assert everywhere(everyone, body) == [[everyone, [1, 0], everyone]] * 2 + [[everyone, everyone]]


@WITHOUT_FILES
def test_ranks_that_were_alone_meet_at_last(stores: Stores) -> None:
    """What a rank that has given up leaves in the store is not taken for the rank."""
    shared = stores(3)
    ranks = [0, 1, 2]

    def alone(rank: int, *missing: int) -> None:
        with pytest.raises(CollectiveTimeout, match=" timeout ") as raised:
            generation(shared[rank], rank, ranks, "join", 0.1)
        assert f"rank {rank} waited 0.1 s in 'join' for rank(s) {list(missing)}" in str(
            raised.value
        )

    for _ in range(2):
        alone(0, 1, 2)
        alone(2, 0, 1)
    assert everywhere([0, 1], lambda rank: alone(rank, 2)) == [None] * 2

    assert everywhere(ranks, lambda rank: join(shared, rank, ranks)) == [ranks] * 3


@WITHOUT_FILES
def test_a_rank_that_failed_inside_joins_anew(stores: Stores) -> None:
    """Rank 1 has its answer, and fails before the first exchange; the others wait in vain, and then
    all meet."""
    shared = stores(3)
    ranks = [0, 1, 2]

    def body(rank: int) -> list[Any]:
        part = generation(shared[rank], rank, ranks, "join", PLENTY_S)
        if rank != 1:
            with pytest.raises(CollectiveTimeout, match=r"for rank\(s\) \[1\]"):
                StoreControlPlane(part, rank, 0.3).all_gather(ranks, "call", rank)
        return join(shared, rank, ranks)

    assert everywhere(ranks, body) == [ranks] * 3


@pytest.fixture
def planes() -> list[StoreControlPlane]:
    """The control planes of two ranks, each with one connection to the same server."""
    first = dist.TCPStore(
        "127.0.0.1", 0, None, True, timedelta(seconds=PLENTY_S), wait_for_workers=False
    )
    other = dist.TCPStore(
        "127.0.0.1", first.port, None, False, timedelta(seconds=PLENTY_S), wait_for_workers=False
    )
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

    return [
        runtime.Runtime(r, 2, heap(), plane, (0, 0), True, PLENTY_S)
        for r, plane in enumerate(planes)
    ]


@pytest.mark.parametrize("seeds", [range(3), slow_tier(range(3, 40))], ids=["first", "more"])
def test_threads_that_allocate_beside_each_other(
    seeds: range, planes: list[StoreControlPlane]
) -> None:
    """In any order: each gets the same offset on both ranks, and memory that nobody else has."""
    for seed in seeds:
        numbers = random.Random(seed)
        sizes = [[numbers.randint(1, 4 * ALIGNMENT) for _ in range(6)] for _ in range(4)]
        room = (
            sum(-(-size // ALIGNMENT) * ALIGNMENT for some in sizes for size in some)
            + 4 * ALIGNMENT * 24
        )
        jobs = jobs_of(planes, room)
        go = threading.Barrier(8)
        found: dict[tuple[int, int, int], tuple[int, int]] = {}

        def body(
            rank: int, thread: int, go=go, jobs=jobs, sizes=sizes, found=found, seed=seed
        ) -> None:
            job = jobs[rank]
            go.wait()
            with job.with_control_plane(job.control.part(f"{seed} {thread}")):
                for i, size in enumerate(sizes[thread]):
                    first = job.offset_of(
                        job.allocate((size,), torch.uint8, name=f"{thread} {i}"), "tensor"
                    )
                    found[rank, thread, i] = first, first + size

        with ThreadPoolExecutor(8) as pool:
            for done in [
                pool.submit(body, rank, thread) for thread in range(4) for rank in range(2)
            ]:
                done.result()
        assert len(found) == 48
        for (rank, thread, i), place in found.items():
            assert place == found[1 - rank, thread, i]
        places = sorted(place for (rank, _, _), place in found.items() if rank == 0)
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(places))
        assert len({job.arena.info.used for job in jobs}) == 1


def test_an_allocation_that_finds_no_room_leaves_none_taken(
    planes: list[StoreControlPlane],
) -> None:
    jobs = jobs_of(planes, 4 * ALIGNMENT)

    def body(job: runtime.Runtime) -> str:
        with pytest.raises(
            HeapExhaustedError, match="1024 of 2048 bytes free on the fullest rank"
        ) as raised:
            job.allocate((3 * ALIGNMENT,), torch.uint8)
        return str(raised.value)

    jobs[1].arena.hold(2 * ALIGNMENT, [1])
    with ThreadPoolExecutor() as pool:
        assert len(set(pool.map(body, jobs))) == 1
    assert [job.arena.info.used for job in jobs] == [0, 2 * ALIGNMENT]


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
    with (
        job.with_control_plane(plane("part"), 2.0, "group 1"),
        job.with_control_plane(plane("inner part")),
    ):
        job.exchange([0], "inside")
    job.exchange([0], "outside")
    assert calls == [("inner part", "inside (group 1)", 2.0), ("job", "outside", None)]


def test_threads_take_no_more_blocks_than_there_are(planes: list[StoreControlPlane]) -> None:
    jobs = jobs_of(planes, ALIGNMENT)

    budgets: list[Budget] = []

    def body(at: tuple[int, int]) -> tuple[int, str]:
        rank, thread = at
        with jobs[rank].with_control_plane(jobs[rank].control.part(f"blocks {thread}")):
            try:
                budgets.append(budget := Budget(jobs[rank], [0, 1], 64))
                budget.take("test")
                return budget.blocks, ""
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
    assert all(
        "of 2 ranks needs 6 thread blocks, and other contexts have left" in why for why in refused
    ), found
    for budget in budgets:
        budget.give_back()
    assert [job.blocks_taken for job in jobs] == [0, 0]
