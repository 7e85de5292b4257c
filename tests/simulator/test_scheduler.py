# SPDX-License-Identifier: Apache-2.0
"""Tasks, waits, virtual deadlines, kills; the same on greenlets and on threads."""

from __future__ import annotations

import threading

import pytest
from cases import gather

from tdcoll.runtime.simulator.policy import Policy, RandomPolicy
from tdcoll.runtime.simulator.scheduler import Deadlock, Scheduler
from tdcoll.testing import World

BACKENDS = ("greenlet", "thread")


@pytest.fixture(params=BACKENDS)
def scheduler(request):
    return Scheduler(Policy(), backend=request.param)


def test_tasks_take_turns(scheduler):
    log = []

    def body(name):
        for i in range(3):
            log.append(f"{name}{i}")
            scheduler.turn()

    for pe, name in enumerate("ab"):
        scheduler.spawn(name, pe, lambda name=name: body(name))
    scheduler.run()
    assert log == ["a0", "b0", "a1", "b1", "a2", "b2"]


def test_wait_ends_when_notified(scheduler):
    box = []

    def waiter():
        assert scheduler.wait(lambda: bool(box), lambda: "waits for the box", ["box"])
        box.append("seen")

    def writer():
        scheduler.turn()
        box.append("full")
        scheduler.notify("box")

    scheduler.spawn("waiter", 0, waiter)
    scheduler.spawn("writer", 1, writer)
    scheduler.run()
    assert box == ["full", "seen"]


def test_a_wait_for_many_words_is_asked_once_for_a_write(scheduler):
    """And not once for each of the words that it writes: that was quadratic in their number."""
    words, asked = [0] * 1000, 0

    def ready():
        nonlocal asked
        asked += 1
        return all(words)

    def writer():
        for begin in (0, 500):
            words[begin : begin + 500] = [1] * 500
            scheduler.notify_words(8 * begin, 8 * 500)

    scheduler.spawn("waiter", 0, lambda: scheduler.wait(ready, lambda: "waits", range(0, 8000, 8)))
    scheduler.spawn("writer", 1, writer)
    scheduler.run()
    assert asked == 4  # at once, after each write, and when it runs on


def test_value_that_came_and_went_was_not_seen(scheduler):
    word = [0]

    def waiter():
        scheduler.wait(lambda: word[0] == 1, lambda: f"waits for 1, is {word[0]}", ["word"])

    def writer():
        for value in (1, 2):
            word[0] = value
            scheduler.notify("word")

    scheduler.spawn("waiter", 0, waiter)
    scheduler.spawn("writer", 1, writer)
    with pytest.raises(Deadlock, match="waiter waits for 1, is 2"):
        scheduler.run()


def test_deadlock_lists_every_blocked_task(scheduler):
    for pe in range(3):
        scheduler.spawn(f"task {pe}", pe, lambda pe=pe: scheduler.wait(lambda: False, lambda: f"waits for {pe}", []))
    with pytest.raises(Deadlock) as raised:
        scheduler.run()
    assert [str(line) for line in raised.value.blocked] == [f"task {pe} waits for {pe}" for pe in range(3)]
    assert "3 task(s) blocked" in str(raised.value)


def test_deadlines_expire_in_virtual_order(scheduler):
    scheduler.expire = True
    order = []

    def body(timeout_ns):
        assert not scheduler.wait(lambda: False, lambda: "waits", [], timeout_ns)
        order.append((timeout_ns, scheduler.now_ns))

    for timeout_ns in (30, 10, 20):
        scheduler.spawn("task", 0, lambda timeout_ns=timeout_ns: body(timeout_ns))
    scheduler.run()
    assert order == [(10, 10), (20, 20), (30, 30)]


def test_deadline_does_not_expire_while_anything_can_run(scheduler):
    scheduler.expire = True
    box = []

    def waiter():
        assert scheduler.wait(lambda: bool(box), lambda: "waits", ["box"], 1)

    def worker():
        for _ in range(1000):
            scheduler.turn()
        box.append(1)
        scheduler.notify("box")

    scheduler.spawn("waiter", 0, waiter)
    scheduler.spawn("worker", 0, worker)
    scheduler.run()


def test_error_names_its_task_and_ends_the_others(scheduler):
    ended = []

    def waits():
        try:
            scheduler.wait(lambda: False, lambda: "waits", [])
        finally:
            ended.append("waits")

    def raises():
        scheduler.turn()
        raise KeyError("missing")

    scheduler.spawn("pe0 host", 0, waits)
    scheduler.spawn("pe1 host", 1, raises)
    with pytest.raises(KeyError, match="missing") as raised:
        scheduler.run()
    assert raised.value.__notes__ == ["raised by pe1 host"]
    assert ended == ["waits"]


def test_killed_tasks_stop_and_cannot_wait_any_more(scheduler):
    log = []

    def victim():
        try:
            while True:
                scheduler.turn()
        finally:
            log.append("unwound")
            scheduler.wait(lambda: True, lambda: "waits", [])
            log.append("never")

    def killer():
        scheduler.turn()
        scheduler.kill(1)
        log.append("killed")

    scheduler.spawn("victim", 1, victim)
    scheduler.spawn("killer", 0, killer)
    scheduler.run()
    assert log == ["unwound", "killed"]


def test_run_that_does_not_end_is_stopped():
    scheduler = Scheduler(Policy(), max_steps=100)

    def forever():
        while True:
            scheduler.turn()

    scheduler.spawn("forever", 0, forever)
    with pytest.raises(Deadlock, match="no end after 100 steps"):
        scheduler.run()


def test_unknown_backend():
    with pytest.raises(ValueError, match=r"backend must be one of .*'thread'.*, got 'fiber'"):
        Scheduler(Policy(), backend="fiber")


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
@pytest.mark.parametrize("weak", [False, True])
def test_same_schedule_for_a_seed_on_both_backends_and_again(seed, weak):
    fingerprints = []
    for backend in (*BACKENDS, "greenlet"):
        world = World(4, seed=seed, weak=weak, backend=backend)
        gather("put_signal", calls=2)(World(4, seed=seed))  # other work in between changes nothing
        gather("put, fence, signal", calls=2)(world)
        fingerprints.append((world.fingerprint, world.steps))
    assert len(set(fingerprints)) == 1


def test_seeds_differ():
    fingerprints = set()
    for seed in range(10):
        world = World(4, seed=seed, weak=True)
        gather("put_signal", calls=2)(world)
        fingerprints.add(world.fingerprint)
    assert len(fingerprints) == 10


def test_no_threads_are_left_behind():
    before = threading.active_count()
    with pytest.raises(Deadlock):
        gather("PE 2 forgets PE 0")(World(4, backend="thread"))
    for thread in threading.enumerate():
        if thread.name.startswith("pe"):
            thread.join(timeout=5)
    assert threading.active_count() == before


def test_each_four_seeds_have_every_mix_of_habits():
    """In this order, because many tests run one or two seeds."""
    made = [RandomPolicy(seed, 3) for seed in range(16)]
    straggling = [policy.slow_pe is not None or policy.slow_share > 0 for policy in made]
    assert [policy.late_data for policy in made] == [True, False, True, False] * 4
    assert straggling == [False, True, True, False] * 4
    for late in (True, False):
        slow = [policy for policy, slow in zip(made, straggling, strict=True) if slow and policy.late_data == late]
        assert {policy.slow_pe is None for policy in slow} == {True, False}


def test_policy_habits_can_be_fixed_without_changing_the_rest():
    for seed in range(20):
        drawn = RandomPolicy(seed, 4)
        fixed = RandomPolicy(seed, 4, late_data=not drawn.late_data, stragglers=2)
        assert fixed.rate == drawn.rate
        assert fixed.slow_pe == 2
        assert fixed.late_data is not drawn.late_data
        assert [fixed.cuts(9) for _ in range(5)] == [drawn.cuts(9) for _ in range(5)]
