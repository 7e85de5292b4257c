# SPDX-License-Identifier: Apache-2.0
"""What may and what may not be reordered, on plain buffers."""

from __future__ import annotations

import ctypes

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tdcoll.runtime.simulator.network import Network
from tdcoll.runtime.simulator.policy import Policy, RandomPolicy
from tdcoll.runtime.simulator.tasks import Task


class Wire:
    """A network over a buffer of bytes, and a log of what arrived."""

    def __init__(self, policy):
        self.p, self.q, self.r = (Task(0, name, pe, print) for name, pe in (("p", 0), ("q", 0), ("r", 1)))
        self.memory = ctypes.create_string_buffer(256)
        self.base = ctypes.addressof(self.memory)
        self.log: list[object] = []
        self.arrived: list[object] = []
        self.network = Network(policy, lambda at, n: self.log.append((at - self.base, n)), self.arrived.append)

    def send(self, issuer, pe, at, data, *, kind="put", signal=None):
        pieces = self.network.cut(self.base + at, data, len(data))
        update = None if signal is None else (lambda: self.log.append(signal))
        return self.network.issue(issuer, pe, kind, pieces, signal=update)

    def settle(self):
        while self.network.deliver():
            pass
        return self.log


def seeds(count=100):
    return (RandomPolicy(seed, 4) for seed in range(count))


def test_fair_order_is_the_order_of_issue():
    wire = Wire(Policy())
    wire.send(wire.p, 1, 0, b"abcd", signal="first")
    wire.send(wire.p, 1, 8, b"efgh")
    assert wire.memory.raw[:12] == bytes(12)
    assert wire.settle() == [(0, 4), (8, 4), "first"]
    assert wire.memory.raw[:12] == b"abcd\0\0\0\0efgh"


def test_signal_comes_after_its_own_bytes():
    for policy in seeds():
        wire = Wire(policy)
        wire.send(wire.p, 1, 0, b"abcdefgh", signal="done")
        log = wire.settle()
        assert log[-1] == "done"
        assert sum(n for _, n in log[:-1]) == 8


def test_signal_says_nothing_of_other_puts():
    orders = set()
    for policy in seeds():
        wire = Wire(policy)
        wire.send(wire.p, 1, 0, b"a")
        wire.send(wire.p, 1, 8, b"b", signal="done")
        log = wire.settle()
        orders.add(log.index("done") < log.index((0, 1)))
    assert orders == {True, False}


def test_pieces_come_in_any_order():
    firsts = set()
    for policy in seeds():
        wire = Wire(policy)
        wire.send(wire.p, 1, 0, b"abcdefgh")
        firsts.add(wire.settle()[0])
    assert (0, 8) not in firsts
    assert any(at == 0 for at, _ in firsts)
    assert any(at > 0 for at, _ in firsts)


def test_fence_orders_per_destination():
    across = set()
    for policy in seeds():
        wire = Wire(policy)
        wire.send(wire.p, 1, 0, b"a")
        wire.send(wire.p, 2, 1, b"b")
        wire.network.fence(0)
        wire.send(wire.p, 1, 2, b"c", signal="one")
        log = wire.settle()
        assert log.index((0, 1)) < log.index((2, 1)) < log.index("one")
        across.add(log.index((1, 1)) < log.index((2, 1)))
    assert across == {True, False}, "a fence says nothing about different PEs"


def test_fence_orders_what_any_program_of_the_pe_sends():
    for policy in seeds():
        wire = Wire(policy)
        wire.send(wire.p, 1, 0, b"a")
        wire.network.fence(0)
        wire.send(wire.q, 1, 1, b"b")
        log = wire.settle()
        assert log.index((0, 1)) < log.index((1, 1))


def test_fence_is_the_pes_own():
    orders = set()
    for policy in seeds():
        wire = Wire(policy)
        wire.send(wire.p, 1, 0, b"a")
        wire.network.fence(2)
        wire.send(wire.p, 1, 1, b"b")
        log = wire.settle()
        orders.add(log.index((0, 1)) < log.index((1, 1)))
    assert orders == {True, False}


def test_fence_does_not_order_gets():
    orders = set()
    for policy in seeds():
        wire = Wire(policy)
        wire.send(wire.p, 1, 0, b"a", kind="get")
        wire.network.fence(0)
        wire.send(wire.p, 1, 1, b"b", kind="get")
        log = wire.settle()
        orders.add(log.index((0, 1)) < log.index((1, 1)))
    assert orders == {True, False}


def test_bytes_of_an_nbi_put_are_read_when_they_leave():
    wire = Wire(Policy())
    source = ctypes.create_string_buffer(b"old!")
    for nbi, at in ((True, 0), (False, 8)):
        payload = ctypes.addressof(source) if nbi else source.raw[:4]
        wire.network.issue(wire.p, 1, "put", wire.network.cut(wire.base + at, payload, 4))
    source.value = b"new!"
    wire.settle()
    assert wire.memory.raw[:12] == b"new!\0\0\0\0old!"


def test_flush_delivers_stores_and_what_a_fence_puts_before_them():
    wire = Wire(Policy())
    wire.send(wire.p, 1, 0, b"a")
    wire.network.fence(0)
    wire.send(wire.p, 1, 1, b"b")
    wire.send(wire.p, 1, 2, b"c", kind="store")
    wire.send(wire.q, 1, 3, b"d", kind="store")
    wire.network.flush_stores(wire.p)
    assert wire.log == [(0, 1), (2, 1)]
    assert wire.p.in_flight == 1
    assert sorted(wire.settle()[2:]) == [(1, 1), (3, 1)]


def test_flush_of_stores_to_some_addresses():
    wire = Wire(Policy())
    wire.send(wire.p, 1, 0, b"a", kind="store")
    wire.send(wire.p, 1, 1, b"b", kind="store")
    wire.network.flush_stores(wire.p, (wire.base + 1, wire.base + 2))
    assert wire.log == [(1, 1)]


def test_drop_loses_what_a_pe_has_sent():
    wire = Wire(Policy())
    wire.send(wire.r, 1, 0, b"a")
    wire.send(wire.q, 1, 1, b"b")
    wire.network.drop(1)
    assert wire.settle() == [(1, 1)]
    assert wire.r.in_flight == 0


def test_every_arrival_is_told():
    wire = Wire(Policy())
    wire.send(wire.p, 1, 0, b"")
    assert wire.arrived == [("arrived", 0)]
    wire.send(wire.p, 1, 0, b"ab", signal="s")
    wire.send(wire.p, 2, 8, b"c")
    assert wire.p.in_flight == 2
    wire.settle()
    assert wire.arrived == [("arrived", 0)] * 3


def test_quiet_is_for_all_that_the_pe_has_sent_but_stores_of_other_programs():
    wire = Wire(Policy())
    sent = [
        wire.send(wire.p, 1, 0, b"a"),
        wire.send(wire.p, 2, 1, b"b", kind="store"),
        wire.send(wire.q, 1, 2, b"c", kind="get"),
        wire.send(wire.q, 1, 3, b"d", signal="s"),
    ]
    other = wire.send(wire.q, 1, 4, b"e", kind="store")
    wire.send(wire.r, 1, 5, b"f")
    assert set(wire.network.outstanding(wire.p)) == set(sent)
    assert set(wire.network.outstanding(wire.q)) == {sent[0], *sent[2:], other}


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32), st.lists(st.sampled_from(["put", "signal", "fence", "deliver", "flush"]), max_size=30))
def test_everything_arrives_once_and_epochs_hold(seed, actions):
    wire = Wire(RandomPolicy(seed, 2))
    epoch, sent = 0, []
    for number, action in enumerate(actions):
        if action == "put":
            wire.send(wire.p, 1, number, b"x", signal=("mark", epoch, number))
            sent.append(number)
        elif action == "signal":
            wire.network.issue(
                wire.p, 1, "signal", [], signal=lambda mark=("mark", epoch, number): wire.log.append(mark)
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


@pytest.mark.parametrize("unit", [1, 4, 8])
def test_cuts_keep_units_whole(unit):
    for policy in seeds(20):
        network = Wire(policy).network
        pieces = network.cut(1000, bytes(range(32)), 32, unit)
        assert 1 <= len(pieces) <= 3
        assert all(n % unit == 0 for _, _, n in pieces)
        assert b"".join(source for _, source, _ in pieces) == bytes(range(32))
        assert [dest for dest, _, _ in pieces] == [1000 + sum(n for _, _, n in pieces[:i]) for i in range(len(pieces))]
