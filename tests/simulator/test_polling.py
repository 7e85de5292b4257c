# SPDX-License-Identifier: Apache-2.0
"""Launches of several threads of one process, which run beside each other; on greenlets and on threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from tdcoll.base.errors import TdcollError
from tdcoll.simulator import polling
from tdcoll.simulator.polling import PollingScheduler
from tdcoll.simulator.tasks import Task, make_switch


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
