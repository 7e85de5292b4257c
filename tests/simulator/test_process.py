# SPDX-License-Identifier: Apache-2.0
"""One process per rank over shared memory, as far as one process shows it; and launches of several
of its threads."""

from __future__ import annotations

import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import triton.language as tl
from cases import device, wait_once

import tdcoll
import tdcoll.language as tdl
from tdcoll import runtime
from tdcoll.base.errors import HeapExhaustedError, TdcollError
from tdcoll.simulator import polling, process
from tdcoll.simulator.polling import PollingScheduler
from tdcoll.simulator.tasks import Task, make_switch


@pytest.fixture
def job() -> Iterator[runtime.Runtime]:
    """A job of this process alone, on a heap as processes share it. tests/test_workers.py has jobs
    of several."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            patch.delenv(name, raising=False)
        tdcoll.initialize(heap_bytes=1 << 20, timeout_s=1)
        assert "/memfd:tdcoll-heap" in Path("/proc/self/maps").read_text(), (
            "a file that no folder has"
        )
        yield runtime.current()
        tdcoll.finalize()
        tdcoll.finalize()
    with pytest.raises(TdcollError, match=r"initialize\(\)"):
        tdl.my_pe()


def expect(error: type[Exception], match: str, call: Callable[[], object]) -> None:
    with pytest.raises(error, match=re.escape(match)):
        call()


def spin_for_ever(signal):
    while tl.load(signal, volatile=True) == 0:
        pass


def test_deadlines(job: runtime.Runtime) -> None:
    signals = job.allocate((4,), torch.int64, name="signals")
    result, monitor = torch.full((1,), -1, dtype=torch.int32), tdcoll.WaitMonitor(timeout_s=0.05)
    device(wait_once, signals[2:], 1, monitor.words, result, grid=(2,))
    assert result.item() == 0
    expect(tdcoll.CollectiveTimeout, "for peer 7: signal 9 had to reach 1 and is 0", monitor.check)
    expect(
        tdcoll.CollectiveTimeout,
        "rank 0 waited 1 s in pe0 call(0,0,0), which waits for pe0.signals[1] >= 1, is 0 (",
        lambda: device(lambda signal: tdl.signal_wait_until(signal, tdl.CMP_GE, 1), signals[1:]),
    )
    expect(tdcoll.CollectiveTimeout, "spins on", lambda: device(spin_for_ever, signals))
    expect(
        ValueError,
        "sig_op must be",
        lambda: device(lambda p: tdl.signal_block(p, 1, 77, 0), signals),
    )


def test_bytes_beyond_a_tensor(job: runtime.Runtime) -> None:
    words, after = (job.allocate((1,), torch.int64, name=name) for name in ("words", "after"))
    own, put = torch.zeros(1, dtype=torch.int64), tdl.putmem_block

    def store(pointer):
        tl.store(tdl.remote_ptr(pointer, 0) + 64, 9)

    beyond = "pe0 call(0,0,0) would store to bytes 512..520 of pe0.words, which has 8 bytes"
    expect(ValueError, beyond, lambda: device(store, words))
    beyond = "bytes 8..16 of `arguments[0]`, which has 8 bytes"
    expect(ValueError, beyond, lambda: device(lambda p: tl.store(p + 1, 9), own))
    expect(ValueError, "of pe", lambda: device(put, words, own, 16, 0))
    device(put, words.data_ptr(), own.data_ptr(), 8, 0)
    expect(ValueError, "a tensor at 0x", lambda: device(put, after, own.data_ptr() + 4, 8, 0))
    assert after.item() == 0
    job.release(words)
    expect(
        ValueError,
        "where no symmetric tensor lives",
        lambda: device(lambda p: tl.store(p, 9), words),
    )


class Control:
    """Both ranks answer the same, and rank 0 has made the file at ``place``."""

    def __init__(self, place=None):
        self.place = place

    def all_gather(self, ranks, tag, value, timeout_s=None):
        return [self.place if tag == "create the symmetric heap" else value] * 2


def test_another_file_of_the_same_name_is_not_mapped():
    """In another PID namespace, the path may lead to a file of an unrelated process."""
    with tempfile.TemporaryFile() as mine, tempfile.TemporaryFile() as other:
        mine.truncate(8192)
        found = os.fstat(other.fileno())
        place = [f"/proc/{os.getpid()}/fd/{mine.fileno()}", found.st_dev, found.st_ino]
        with pytest.raises(
            TdcollError, match=r"of one host, and some ranks could not map it: .*another file"
        ):
            process._share(1, range(2), 8192, Control(place))
        mine.seek(0)
        assert not any(mine.read())


@pytest.mark.parametrize("rank", range(2))
def test_a_heap_without_room_is_the_same_error_on_all_ranks(rank):
    with pytest.raises(
        HeapExhaustedError, match=r"needs \d+ bytes of shared memory, and this host has \d+\. Lower"
    ):
        process._share(rank, range(2), 1 << 60, Control())


@pytest.fixture(params=["greenlet", "thread"])
def scheduler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> PollingScheduler:
    monkeypatch.setattr(polling, "make_switch", lambda _: make_switch(request.param))
    return PollingScheduler(timeout_s=20)


def launch(scheduler: PollingScheduler, *bodies: Callable[[], object]) -> None:
    scheduler.run([Task(i, f"program {i}", 0, body) for i, body in enumerate(bodies)])


def wait_for(scheduler: PollingScheduler, flags: list[str], flag: str) -> None:
    scheduler.wait(lambda: flag in flags, lambda: f"waits for {flag}", [])


def test_launches_that_wait_for_each_other(scheduler: PollingScheduler) -> None:
    flags: list[str] = []

    def body(mine: str, other: str) -> None:
        wait_for(scheduler, flags, other)
        flags.append(f"{mine} has seen {other}")

    def one(mine: str, other: str) -> None:
        launch(
            scheduler,
            lambda: flags.append(mine),
            lambda: body(mine, other),
            lambda: body(mine, other),
        )

    with ThreadPoolExecutor() as pool:
        list(pool.map(one, "ab", "ba"))
    assert sorted(flags) == ["a", *2 * ["a has seen b"], "b", *2 * ["b has seen a"]]


def test_one_that_fails_leaves_the_other_alone(scheduler: PollingScheduler) -> None:
    flags: list[str] = []

    def fails() -> None:
        wait_for(scheduler, flags, "other is there")
        raise TdcollError("wrong")

    def other() -> None:
        flags.append("other is there")
        wait_for(scheduler, flags, "first has failed")
        flags.append("other has ended")

    with ThreadPoolExecutor() as pool:
        second = pool.submit(launch, scheduler, other)
        with pytest.raises(TdcollError, match="wrong"):
            launch(scheduler, fails, lambda: wait_for(scheduler, flags, "never"))
        flags.append("first has failed")
        second.result()
    assert flags[-1] == "other has ended"


def test_a_program_is_told_from_a_thread_of_the_host(scheduler: PollingScheduler) -> None:
    answers: list[bool] = []

    def body() -> None:
        answers.append(scheduler.in_a_kernel())
        asks = threading.Thread(target=lambda: answers.append(scheduler.in_a_kernel()))
        asks.start()
        asks.join()

    launch(scheduler, body)
    assert [*answers, scheduler.in_a_kernel()] == [True, False, False]
