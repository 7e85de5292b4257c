# SPDX-License-Identifier: Apache-2.0
"""Tasks, waits, virtual deadlines, kills, on greenlets and on threads; and what the network may
reorder."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

import pytest
from cases import FORGETFUL, gather
from hypothesis import given, settings
from hypothesis import strategies as st
from protocols import Steps

from tdcoll.simulator.network import Network
from tdcoll.simulator.policy import Policy, RandomPolicy
from tdcoll.simulator.scheduler import Deadlock, Scheduler
from tdcoll.simulator.tasks import Task
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
        assert scheduler.wait(
            lambda: word[0] == value, lambda: f"waits for {value}, is {word[0]}", ["word"]
        )
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

    # not the first words
    run(scheduler, lambda: scheduler.wait(ready, lambda: "waits", range(8, 8000, 16)), writer)
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
            gather(Steps("nbi put", order="fence", notify="signal", end="quiet"), calls=2)(world)
            fingerprints.append((world.scheduler.fingerprint, world.scheduler.steps))
        assert len(set(fingerprints[-3:])) == 1
    assert len(set(fingerprints)) == 2


def test_no_threads_are_left_behind():
    before = threading.active_count()
    with pytest.raises(Deadlock):
        gather(FORGETFUL)(World(4, backend="thread"))
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
        slow = [
            policy
            for policy, slow in zip(made, straggling, strict=True)
            if slow and policy.late_data == late
        ]
        assert {policy.slow_pe is None for policy in slow} == {True, False}


def test_policy_habits_can_be_fixed_without_changing_the_rest():
    for seed in range(20):
        drawn = RandomPolicy(seed, 4)
        fixed = RandomPolicy(seed, 4, late_data=not drawn.late_data, stragglers=2)
        assert (fixed.rate, fixed.slow_pe, fixed.late_data) == (drawn.rate, 2, not drawn.late_data)
        assert [fixed.cuts(9) for _ in range(5)] == [drawn.cuts(9) for _ in range(5)]


class Wire:
    """A network over a buffer of bytes, two programs of PE 0 and one of PE 1, and a log of what
    arrived."""

    def __init__(self, policy: Policy):
        self.p, self.q, self.r = (
            Task(0, name, pe, print) for name, pe in (("p", 0), ("q", 0), ("r", 1))
        )
        self.memory = ctypes.create_string_buffer(256)
        self.base = ctypes.addressof(self.memory)
        self.log: list[object] = []
        self.arrived: list[object] = []
        self.network = Network(
            policy, lambda at, n: self.log.append((at - self.base, n)), self.arrived.append
        )

    def send(self, issuer, pe, at, data, *, kind="put", signal=None):
        pieces = self.network.cut(self.base + at, data, len(data))
        update = None if signal is None else (lambda: self.log.append(signal))
        return self.network.issue(issuer, pe, kind, pieces, signal=update)

    def settle(self):
        while self.network.deliver():
            pass
        return self.log


def logs(scenario: Callable[[Wire], object], count: int = 100) -> list[list[object]]:
    """What arrives, with many seeds."""
    wires = [Wire(RandomPolicy(seed, 4)) for seed in range(count)]
    for wire in wires:
        scenario(wire)
    return [wire.settle() for wire in wires]


def test_pieces_come_in_any_order_before_their_own_signal():
    found = logs(lambda wire: wire.send(wire.p, 1, 0, b"abcdefgh", signal="done"))
    assert all(log[-1] == "done" and sum(n for _, n in log[:-1]) == 8 for log in found)
    firsts = {log[0] for log in found}
    assert (0, 8) not in firsts
    assert {at > 0 for at, _ in firsts} == {True, False}


def fenced(first, second, pe=0, kind="put"):
    """Sends ``a``, fences, and sends ``b``, each by a program to a PE."""

    def scenario(wire):
        wire.send(getattr(wire, first[0]), first[1], 0, b"a", kind=kind)
        if pe is not None:
            wire.network.fence(pe)
        wire.send(getattr(wire, second[0]), second[1], 1, b"b", kind=kind, signal="done")

    return scenario


@pytest.mark.parametrize(
    ("scenario", "ordered"),
    [
        (fenced(("p", 1), ("p", 1)), True),
        (fenced(("p", 1), ("q", 1)), True),  # whoever of the PE has sent it
        (fenced(("p", 1), ("p", 1), pe=None), False),  # a signal says nothing of other puts
        (fenced(("p", 1), ("p", 2)), False),  # nor a fence of other PEs
        (fenced(("p", 1), ("p", 1), pe=2), False),  # nor that of another PE
        (fenced(("p", 1), ("p", 1), kind="get"), False),
        (fenced(("p", 1), ("p", 1), kind="copy"), False),
    ],
)
def test_what_a_fence_orders(scenario, ordered):
    before = {
        log.index((0, 1)) < min(log.index((1, 1)), log.index("done")) for log in logs(scenario)
    }
    assert before == ({True} if ordered else {True, False})


def test_flush_delivers_stores_and_what_a_fence_puts_before_them():
    wire = Wire(Policy())
    wire.send(wire.p, 1, 0, b"")
    assert wire.arrived == [("arrived", 0)]  # of no bytes, at once
    wire.send(wire.p, 1, 0, b"a")
    wire.network.fence(0)
    wire.send(wire.p, 1, 1, b"b")
    wire.send(wire.p, 1, 2, b"c", kind="store")
    wire.send(wire.p, 2, 4, b"e", kind="store")
    wire.send(wire.q, 1, 3, b"d", kind="store")
    wire.network.flush_stores(wire.p, (wire.base + 2, wire.base + 3))
    assert wire.log == [(0, 1), (2, 1)]
    wire.network.flush_stores(wire.p, to=1)
    assert wire.p.in_flight == 2
    wire.network.flush_stores(wire.p)
    assert wire.log[2:] == [(4, 1)]
    assert sorted(wire.settle()[3:]) == [(1, 1), (3, 1)]
    assert wire.arrived == [("arrived", 0)] * 6


def test_quiet_is_for_all_that_the_pe_has_sent_but_stores_of_other_programs():
    wire = Wire(Policy())
    sent = [
        wire.send(wire.p, 1, 0, b"a"),
        wire.send(wire.p, 2, 1, b"b", kind="store"),
        wire.send(wire.q, 1, 2, b"c", kind="get"),
        wire.send(wire.q, 1, 3, b"d", signal="s"),
    ]
    other = wire.send(wire.q, 1, 4, b"e", kind="store")
    wire.send(Task(0, "host", 0, print), 1, 6, b"g", kind="copy")
    wire.send(wire.r, 1, 5, b"f")
    assert set(wire.network.outstanding(wire.p)) == set(sent)
    assert set(wire.network.outstanding(wire.q)) == {sent[0], *sent[2:], other}


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 2**32),
    st.lists(st.sampled_from(["put", "signal", "fence", "deliver", "flush"]), max_size=30),
)
def test_everything_arrives_once_and_epochs_hold(seed, actions):
    wire = Wire(RandomPolicy(seed, 2))
    epoch, sent = 0, []
    for number, action in enumerate(actions):
        if action in ("put", "signal"):
            wire.send(
                wire.p, 1, number, b"x" if action == "put" else b"", signal=("mark", epoch, number)
            )
            sent.append(number)
        elif action == "fence":
            wire.network.fence(0)
            epoch += 1
        elif action == "deliver":
            wire.network.deliver()
        else:
            wire.network.flush_stores(wire.p)
    marks = [entry[1:] for entry in wire.settle() if entry[0] == "mark"]
    assert wire.p.in_flight == 0
    assert wire.memory.raw.count(b"x") == actions.count("put")
    assert sorted(number for _, number in marks) == sent
    assert [epoch for epoch, _ in marks] == sorted(epoch for epoch, _ in marks)
