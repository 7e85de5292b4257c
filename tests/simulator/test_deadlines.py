# SPDX-License-Identifier: Apache-2.0
"""Waits of a World that nobody satisfies: killed and late PEs, deadlines, and who is named."""

from __future__ import annotations

import re

import kernels
import protocols
import pytest
import torch

import tdcoll
from tdcoll import runtime
from tdcoll.errors import CollectiveTimeout, TdcollError
from tdcoll.monitor import WaitMonitor
from tdcoll.testing import Deadlock, World


def _waits_for_dead(world, *, kill):
    """PE 1 is to signal PE 0 and does not."""

    def host(pe):
        job = runtime.current()
        monitor = WaitMonitor(timeout_s=2.5)
        signals = job.allocate((4,), torch.int64, name="signals")
        result = torch.full((1,), -1, dtype=torch.int32)
        if pe == 1:
            if kill:
                world.kill(1)
            return
        kernels.wait_once[(1,)](signals[3:], 6, monitor.words, result)
        assert result.item() == 0
        monitor.check()
        return

    return host


def test_wait_for_a_killed_pe_expires():
    world = World(2)
    with pytest.raises(CollectiveTimeout) as raised:
        world.run(_waits_for_dead(world, kill=True))
    error = raised.value
    assert (error.rank, error.peer, error.signal, error.epoch) == (0, 7, 9, 6)
    assert (error.expected, error.seen, error.timeout_s) == (6, 0, 2.5)


def test_wait_expires_or_raises_as_asked():
    with pytest.raises(Deadlock, match=r"pe0 wait_once\(0,0,0\) waits for pe0\.signals\[3\] >= 6, is 0"):
        World(2).run(_waits_for_dead(None, kill=False))
    with pytest.raises(CollectiveTimeout):
        World(2, on_timeout="expire").run(_waits_for_dead(None, kill=False))


@pytest.mark.parametrize("seed", range(5))
def test_killed_in_the_middle_all_others_name_it_or_each_other(seed):
    world = World(4, seed=seed, weak=True)
    outcomes = {}

    def host(pe):
        job = runtime.current()
        monitor = WaitMonitor()
        buffers = job.allocate((2, 4, 16), torch.uint8, name="buffer")
        signals = job.allocate((2, 4), torch.int64, name="signals")
        if pe == 2:
            world.kill(2, after_turns=5 + 7 * seed)
        for call in range(1, 20):
            protocols.gather[(4,)](buffers[call % 2], signals[call % 2], 16, call, monitor.words, 4, "put_signal", 5)
            try:
                monitor.check()
            except CollectiveTimeout as error:
                outcomes[pe] = error
                return "timeout"
        return "finished"

    assert world.run(host) == ["timeout", "timeout", None, "timeout"]
    assert 2 in {error.peer for error in outcomes.values()}
    assert all(error.peer != error.rank for error in outcomes.values())


def _waits_for_late(results):
    def host(pe):
        job, monitor = runtime.current(), WaitMonitor()
        signals = job.allocate((1,), torch.int64, name="signals")
        result = torch.full((1,), -1, dtype=torch.int32)
        if pe == 0:
            kernels.wait_once[(1,)](signals, 1, monitor.words, result)
        else:
            job.world.pause(50)
            kernels.add_to_0[(1,)](signals)
        job.control.all_gather(range(2), "end", None)
        results[pe] = result, monitor, signals

    return host


def test_waits_expire_early_while_their_peer_is_only_late():
    """With some seeds; whose schedules are until then what they are without. What comes later still arrives."""
    seen = set()
    for seed in range(12):
        worlds, results = [], {}
        for on_timeout in ("expire", "early"):
            world = World(2, seed=seed, weak=True, on_timeout=on_timeout)
            for job in world.runtimes:
                job.world = world
            worlds.append(world)
            world.run(_waits_for_late(results))
            gave_up = bool(world.gave_up)
            result, monitor, signals = results[0]
            assert (result.item(), monitor.expired, signals.item()) == (0 if gave_up else 1, gave_up, 2)
        expired, early = worlds
        assert not expired.gave_up
        seen.add(gave_up)
        if gave_up:
            (report,) = early.gave_up
            assert re.fullmatch(
                r"pe0 wait_once\(0,0,0\) at step \d+, which waits for pe0\.signals\[0\] >= 1, is 0", report
            )
            assert f"impatient; gave up early: {report}" in early.describe()
        else:
            assert early.fingerprint == expired.fingerprint
    assert seen == {True, False}


def test_expired_wait_ends_the_others_of_its_monitor():
    def host(pe):
        job = runtime.current()
        monitor = WaitMonitor()
        signals = job.allocate((2, 4), torch.int64, name="signals")
        buffer = job.allocate((4, 16), torch.uint8)
        protocols.gather[(1,)](buffer, signals[0], 16, 1, monitor.words, 4, "put_signal", 5)
        assert monitor.expired
        result = torch.full((1,), -1, dtype=torch.int32)
        kernels.wait_once[(3,)](signals[1], 1, monitor.words, result)  # returns at once
        signals[1] = 1
        first = result.item()
        kernels.wait_once[(1,)](signals[1], 1, monitor.words, result)
        return first, result.item()

    assert World(1, on_timeout="expire").run(lambda pe: host(pe)) == [(0, 1)]


@pytest.mark.parametrize("weak", [False, True])
def test_a_wait_for_words_of_which_some_come(weak):
    """Those are taken; the record names the first that is missing, and what is there instead."""
    out = torch.full((4, 8), -1, dtype=torch.int32)

    def host(pe):
        words, monitor = tdcoll.zeros((8, 2), torch.int64), WaitMonitor()
        words[4, 1] = 3 << 32  # an older flag
        words[1, 1] = 2 << 32
        tdcoll.barrier()
        kernels.flagged_but_every_third[(1,)](words, 5, monitor.words, out)
        if pe == 1:
            with pytest.raises(CollectiveTimeout) as expired:
                monitor.check()
            error = expired.value
            assert (error.peer, error.signal, error.expected, error.seen) == (0, 1, 5, 2)

    World(2, on_timeout="expire", weak=weak, seed=3 if weak else None).run(host)
    came = torch.tensor([0, 2, 3, 5, 6])
    assert out[:, came].T.tolist() == [[n + 10, n - 10, n * n, 1] for n in came.tolist()]
    assert out[3].tolist() == [1, 0, 1, 1, 0, 1, 1, 1]  # the last is masked
    with pytest.raises(Deadlock, match=r"waits for pe1.tensor\[2\] flagged 5, is 2, pe1.tensor\[8\] flagged 5, is 3"):
        World(2).run(host)


def test_exchange_with_a_killed_pe_raises_as_the_store_does():
    world = World(2, timeout_s=4)

    def host(pe):
        if pe == 1:
            world.kill(1)
        with pytest.raises(TdcollError, match=r"rank 0 waited 4 s in 'allocate rows' for rank\(s\) \[1\]"):
            runtime.current().allocate((1,), torch.int64, name="rows")
        return "told"

    assert world.run(host) == ["told", None]


def test_kill_loses_messages_or_not():
    for lose, seen in ((True, 0), (False, 5)):
        world = World(2, weak=True)
        words = {}

        def host(pe, world=world, words=words, lose=lose):
            words[pe] = runtime.current().allocate((1,), torch.int64, name="word")
            if pe == 0:
                kernels.put[(1,)](words[0], torch.full((1,), 5), 8, 1)
                world.kill(0, lose_messages=lose)

        world.run(host)
        assert words[1].item() == seen
