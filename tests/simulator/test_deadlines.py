# SPDX-License-Identifier: Apache-2.0
"""Waits of a World that nobody satisfies: killed and late PEs, deadlines, and who is named."""

from __future__ import annotations

import re

import protocols
import pytest
import torch
import triton.language as tl
from cases import PUT_SIGNAL, add_to_0, device, wait_once

import tdcoll
import tdcoll.language as tdl
from tdcoll import runtime
from tdcoll.base.errors import CollectiveTimeout
from tdcoll.calls.monitor import WaitMonitor
from tdcoll.testing import Deadlock, World


def result():
    return torch.full((1,), -1, dtype=torch.int32)


def _waits(world=None):
    """PE 1 is to signal PE 0 and does not; it dies if there is a ``world``."""

    def host(pe):
        signals, monitor, came = (
            tdcoll.zeros(4, torch.int64, name="signals"),
            WaitMonitor(timeout_s=2.5),
            result(),
        )
        if pe == 1:
            if world is not None:
                world.kill(1)
            return
        device(wait_once, signals[3:], 6, monitor.words, came)
        assert came.item() == 0
        monitor.check()

    return host


WORLD_POW2 = rf"\(from rank 7; .*cases\.py:{wait_once.__code__.co_firstlineno + 2}\)"


def test_wait_expires_or_raises_as_asked():
    with pytest.raises(
        Deadlock,
        match=rf"pe0 call\(0,0,0\) waits for pe0\.signals\[3\] >= 6, is 0 {WORLD_POW2}(?m:$)",
    ):
        World(2).run(_waits())
    killing = World(2)
    for world, host in ((World(2, on_timeout="expire"), _waits()), (killing, _waits(killing))):
        with pytest.raises(CollectiveTimeout) as raised:
            world.run(host)
        error = raised.value
        assert (error.rank, error.peer, error.signal, error.epoch) == (0, 7, 9, 6)
        assert (error.expected, error.seen, error.timeout_s) == (6, 0, 2.5)


def gather(buffer, signals, call, monitor, grid=4):
    protocols.gather[(grid,)](
        buffer, signals, 16, call, monitor.words, 4, PUT_SIGNAL, tdl.CMP_GE.value
    )


@pytest.mark.parametrize("seed", range(5))
def test_killed_in_the_middle_all_others_name_it_or_each_other(seed):
    world, errors = World(4, seed=seed, weak=True), []

    def host(pe):
        monitor = WaitMonitor()
        buffers = tdcoll.zeros((2, 4, 16), torch.uint8, name="buffer")
        signals = tdcoll.zeros((2, 4), torch.int64, name="signals")
        if pe == 2:
            world.kill(2, after_turns=5 + 7 * seed)
        for call in range(1, 20):
            gather(buffers[call % 2], signals[call % 2], call, monitor)
            try:
                monitor.check()
            except CollectiveTimeout as error:
                errors.append(error)
                return "timeout"
        return "finished"

    assert world.run(host) == ["timeout", "timeout", None, "timeout"]
    assert 2 in {error.peer for error in errors}
    assert all(error.peer != error.rank for error in errors)


def test_waits_expire_early_while_their_peer_is_only_late():
    """With some seeds; whose schedules are until then what they are without. What comes later still
    arrives."""
    seen = set()

    def host(world, results, pe):
        signals, monitor, came = (
            tdcoll.zeros(1, torch.int64, name="signals"),
            WaitMonitor(),
            result(),
        )
        if pe == 0:
            device(wait_once, signals, 1, monitor.words, came)
        else:
            world.pause(50)
            device(add_to_0, signals)
        runtime.current().control.all_gather(range(2), "end", None)
        results[pe] = came, monitor, signals

    for seed in range(12):
        expired, early = worlds = [
            World(2, seed=seed, weak=True, on_timeout=how) for how in ("expire", "early")
        ]
        for world in worlds:
            results = {}
            world.run(lambda pe, world=world, results=results: host(world, results, pe))
            came, monitor, signals = results[0]
            gave_up = bool(world.gave_up)
            assert (came.item(), monitor.expired, signals.item()) == (
                0 if gave_up else 1,
                gave_up,
                2,
            )
        assert not expired.gave_up
        seen.add(gave_up)
        if gave_up:
            (report,) = early.gave_up
            waiting = (
                r"pe0 call\(0,0,0\) at step \d+, which waits for pe0\.signals\[0\] >= 1, is 0 "
                r"\(from rank 7; .*:\d+\)"
            )
            assert re.fullmatch(waiting, report)
            assert f"impatient; gave up early: {report}" in early.describe()
        else:
            assert early.scheduler.fingerprint == expired.scheduler.fingerprint
    assert seen == {True, False}


@pytest.mark.parametrize("weak", [False, True])
def test_a_wait_for_words_of_which_some_come(weak):
    """Those are taken; the record names the first that is missing, and what is there instead."""
    out = torch.full((4, 8), -1, dtype=torch.int32)

    def all_but_every_third(words, monitor, out):
        place = tl.arange(0, 8)
        if tdl.my_pe() == 0:
            theirs = tdl.remote_ptr(words, 1) + 2 * place
            tdl.store_flagged(theirs, place + 10, place - 10, place * place, 5, place % 3 != 1)
        else:
            for i, part in enumerate(
                tdl.wait_flagged(words + 2 * place, 5, place != 7, monitor, 0)
            ):
                tl.store(out + 8 * i + place, part)

    def host(pe):
        words, monitor = tdcoll.zeros((8, 2), torch.int64), WaitMonitor()
        words[4, 1], words[1, 1] = 3 << 32, 2 << 32  # older flags
        tdcoll.barrier()
        device(all_but_every_third, words, monitor.words, out)
        if pe == 1:
            with pytest.raises(CollectiveTimeout) as expired:
                monitor.check()
            error = expired.value
            assert (error.peer, error.signal, error.expected, error.seen) == (0, 1, 5, 2)

    World(2, on_timeout="expire", weak=weak, seed=3 if weak else None).run(host)
    came = torch.tensor([0, 2, 3, 5, 6])
    assert out[:, came].T.tolist() == [[n + 10, n - 10, n * n, 1] for n in came.tolist()]
    assert out[3].tolist() == [1, 0, 1, 1, 0, 1, 1, 1]  # the last is masked
    with pytest.raises(
        Deadlock,
        match=r"waits for pe1.tensor\[2\] flagged 5, is 2, pe1.tensor\[8\] flagged 5, is 3",
    ):
        World(2).run(host)


@pytest.mark.parametrize(("killed", "seen"), [(False, 5), (True, 0)])
def test_messages_outlive_their_launch_but_not_their_pe(killed, seen):
    """The end of a kernel does not complete its puts, and the end of a run does."""
    world, words = World(2, weak=True), {}

    def host(pe):
        words[pe] = tdcoll.zeros(1, torch.int64, name="word")
        if pe == 0:
            device(tdl.putmem_block, words[0], torch.full((1,), 5), 8, 1)
            assert words[1].item() == 0
            if killed:
                world.kill(0)

    world.run(host)
    assert words[1].item() == seen
