# SPDX-License-Identifier: Apache-2.0
"""One process per rank over shared memory: two processes, in one go; and launches of several threads of a process."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tdcoll.base.errors import HeapExhaustedError, TdcollError
from tdcoll.simulator import polling, process
from tdcoll.simulator.polling import PollingScheduler
from tdcoll.simulator.tasks import Task, make_switch

HERE = Path(__file__).parent


def test_two_processes(tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent.parent), *sys.path])}
    command = [sys.executable, str(HERE / "process_job.py")]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": environment}
    processes = [subprocess.Popen([*command, str(rank), str(tmp_path)], **options) for rank in range(2)]
    try:
        outputs = [process.communicate(timeout=90)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output
        assert output.rstrip().endswith("done")


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
        with pytest.raises(TdcollError, match=r"of one host, and some ranks could not map it: .*another file"):
            process._share(1, range(2), 8192, Control(place))
        mine.seek(0)
        assert not any(mine.read())


@pytest.mark.parametrize("rank", range(2))
def test_a_heap_without_room_is_the_same_error_on_all_ranks(rank):
    with pytest.raises(HeapExhaustedError, match=r"needs \d+ bytes of shared memory, and this host has \d+\. Lower"):
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
        launch(scheduler, lambda: flags.append(mine), lambda: body(mine, other), lambda: body(mine, other))

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
