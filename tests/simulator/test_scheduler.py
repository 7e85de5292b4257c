# SPDX-License-Identifier: Apache-2.0
"""Tasks, waits, virtual deadlines, kills; the same on greenlets and on threads."""

from __future__ import annotations

import threading

import pytest
from cases import gather

from tdcoll.simulator.policy import Policy, RandomPolicy
from tdcoll.simulator.scheduler import Deadlock, Scheduler
from tdcoll.testing import World

BACKENDS = ("greenlet", "thread")


@pytest.fixture(params=BACKENDS)
def scheduler(request):
    return Scheduler(Policy(), backend=request.param)


def run(scheduler, *bodies):
    """Run ``pe0``, ``pe1``, ..."""
    for pe, body in enumerate(bodies):
        scheduler.spawn(f"pe{pe}", pe, body)
    scheduler.run()


@pytest.mark.parametrize("value", [1, 2])
def test_wait_ends_when_notified_of_a_value_that_stays(scheduler, value):
    """One that came and went was not seen."""
    word = [0]

    def waiter():
        assert scheduler.wait(lambda: word[0] == value, lambda: f"waits for {value}, is {word[0]}", ["word"])
        word.append("seen")

    def writer():
        for written in (1, 2):
            word[0] = written
            scheduler.notify("word")

    if value == 2:
        run(scheduler, waiter, writer)
        assert word == [2, "seen"]
    else:
        with pytest.raises(Deadlock, match="pe0 waits for 1, is 2"):
            run(scheduler, waiter, writer)


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

    run(scheduler, lambda: scheduler.wait(ready, lambda: "waits", range(8, 8000, 16)), writer)  # not the first words
    assert asked == 4  # at once, after each write, and when it runs on


def test_deadlines_expire_in_virtual_order_and_not_while_anything_can_run(scheduler):
    scheduler.expire = True
    order, box = [], []

    def expires(timeout_ns):
        assert not scheduler.wait(lambda: False, lambda: "waits", [], timeout_ns)
        order.append((timeout_ns, scheduler.now_ns, len(box)))

    def waiter():
        assert scheduler.wait(lambda: bool(box), lambda: "waits", ["box"], 1)

    def worker():
        for _ in range(1000):
            scheduler.turn()
        box.append(1)
        scheduler.notify("box")

    run(scheduler, *(lambda t=t: expires(t) for t in (30, 10, 20)), waiter, worker)
    assert order == [(10, 10, 1), (20, 20, 1), (30, 30, 1)]


def test_errors_and_kills_end_tasks_which_cannot_wait_any_more(scheduler):
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
        scheduler.kill(0)
        log.append("killed")

    def raises():
        scheduler.turn()
        raise KeyError("missing")

    run(scheduler, victim, killer)
    assert log == ["unwound", "killed"]
    with pytest.raises(KeyError, match="missing") as raised:
        run(scheduler, victim, raises)
    assert raised.value.__notes__ == ["raised by pe1"]
    assert log == ["unwound", "killed", "unwound"]


def test_run_that_does_not_end_is_stopped():
    scheduler = Scheduler(Policy(), max_steps=100)

    def forever():
        while True:
            scheduler.turn()

    with pytest.raises(Deadlock, match="no end after 100 steps"):
        run(scheduler, forever)
    with pytest.raises(ValueError, match=r"backend must be one of .*'thread'.*, got 'fiber'"):
        Scheduler(Policy(), backend="fiber")


@pytest.mark.parametrize("weak", [False, True])
def test_one_schedule_for_each_seed_on_both_backends_and_again(weak):
    fingerprints = []
    for seed in (None, 0):
        for backend in (*BACKENDS, "greenlet"):
            world = World(4, seed=seed, weak=weak, backend=backend)
            gather(calls=2)(World(4, seed=seed))  # other work in between changes nothing
            gather("nbi put/fence/signal/quiet", calls=2)(world)
            fingerprints.append((world.fingerprint, world.steps))
        assert len(set(fingerprints[-3:])) == 1
    assert len(set(fingerprints)) == 2


def test_no_threads_are_left_behind():
    before = threading.active_count()
    with pytest.raises(Deadlock):
        gather("PE 2 forgets PE 0//put_signal/")(World(4, backend="thread"))
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
        assert (fixed.rate, fixed.slow_pe, fixed.late_data) == (drawn.rate, 2, not drawn.late_data)
        assert [fixed.cuts(9) for _ in range(5)] == [drawn.cuts(9) for _ in range(5)]
