# SPDX-License-Identifier: Apache-2.0
"""Kernels with one protection left out must be caught; their twins with it must not. A test that cannot fail..."""

from __future__ import annotations

import kernels
import protocols
import pytest
import torch
import triton.language as tl
from cases import broadcast, gather, gathering
from tiers import seeds

import tdcoll
import tdcoll.language as tdl
from tdcoll.testing import Deadlock, ExplorationFailed, explore, first_failure

CLEAN = [
    "put_signal",
    "put_signal_nbi, quiet",
    "put, fence, signal",
    "put, signal by the block",
    "put, quiet, store",
    "copy, release",
    "copy, signal by the block",
    "store, atomic release",
    "store, fence, signal by a thread",
]
CAUGHT = [
    "put, signal",
    "blocking put, signal",
    "signal, put",
    "put, release",
    "copy, release on this GPU",
    "copy, relaxed",
    "copy, signal by a thread",
    "store, atomic relaxed",
    "store, signal by a thread",
    "relaxed words, signal by a thread",
    "half stored, half put with a signal",
]


@seeds(10, 30)  # as many as catch the wrong ones
@pytest.mark.parametrize("how", CLEAN)
def test_right_kernels_are_clean(how, seeds):
    explore(gather(how), n_pes=4, seeds=seeds)


@pytest.mark.parametrize("how", CAUGHT)
def test_data_that_no_signal_orders_is_caught(how):
    failure = first_failure(gather(how), n_pes=4, seeds=10)
    assert failure is not None
    assert "bytes of rank" in failure.report
    assert "pe" in failure.report


def test_strong_delivery_hides_a_missing_fence():
    """Which is why exploration is weak by default."""
    assert first_failure(gather("put, signal"), n_pes=4, seeds=10, weak=False) is None


def test_single_slot_is_caught_and_two_are_clean():
    failure = first_failure(gather("put_signal", slots=1, signal_slots=2, calls=4), n_pes=4, seeds=40)
    assert failure is not None
    assert "bytes of rank" in failure.report
    explore(gather("put_signal", slots=2, calls=4), n_pes=4, seeds=40)


def test_single_slot_is_caught_without_weak_delivery_too():
    assert first_failure(gather("put_signal", slots=1, signal_slots=2, calls=4), n_pes=4, seeds=40, weak=False)


def test_equal_wait_is_overtaken():
    """With one row of signals a fast peer sets e+1 before the slow one has seen e, which then waits for ever."""
    failure = first_failure(gather("put_signal", compare=tdl.CMP_EQ.value, signal_slots=1, calls=4), n_pes=4, seeds=60)
    assert failure is not None
    assert isinstance(failure.error, Deadlock)
    assert "==" in str(failure.error)
    explore(gather("put_signal", calls=4), n_pes=4, seeds=60)


def test_one_row_of_signals_is_not_enough_for_two_slots():
    """>= is satisfied by the signal of the call after, which says nothing of this call's bytes."""
    assert first_failure(gather("put_signal", signal_slots=1, calls=4), n_pes=4, seeds=20) is not None


def test_nbi_source_overwritten_before_quiet():
    """The next call but one overwrites the source: two calls later a receiver may still lack the bytes."""
    failure = first_failure(gather("put_signal_nbi", slots=1, signal_slots=2, calls=4), n_pes=4, seeds=40)
    assert failure is not None


def test_forgotten_signal_is_a_deadlock_that_names_it():
    failure = first_failure(gather("PE 2 forgets PE 0"), n_pes=4, seeds=1)
    assert failure is not None
    assert isinstance(failure.error, Deadlock)
    report = str(failure.error)
    assert "pe0 gather(0,0,0) waits for pe0.signals[6] >= 1, is 0" in report  # row 1 of two rows of four
    assert "waits for its launch of gather" in report
    assert any(line.pe == 0 and "signals[6]" in line.reason for line in failure.error.blocked)


def _spinning(forget):
    def launch(buffer, signals, nbytes, call, monitor, n):
        protocols.gather_spinning[(n,)](buffer, signals, nbytes, call, n, forget)

    return gathering(launch, calls=2)


def test_spin_loop_that_ends_is_clean():
    explore(_spinning(0), n_pes=4, seeds=10)


def test_spin_loop_that_cannot_end_is_a_deadlock():
    failure = first_failure(_spinning(1), n_pes=4, seeds=1, spin_limit=100)
    assert failure is not None
    assert isinstance(failure.error, Deadlock)
    assert "pe0 gather_spinning(0,0,0) spins on pe0.signals[6], is 0" in str(failure.error)


def _in_order(kernel):
    def launch(buffer, signals, nbytes, call, monitor, n):
        kernel[(n,)](buffer, signals, nbytes, call, monitor, n)

    return gathering(launch)


def test_grid_that_waits_first_deadlocks_with_one_resident_program():
    explore(_in_order(protocols.gather_waiting_first), n_pes=4, seeds=10)
    explore(_in_order(protocols.gather_waiting_first), n_pes=4, seeds=10, resident=2)
    failure = first_failure(_in_order(protocols.gather_waiting_first), n_pes=4, seeds=1, resident=1)
    assert failure is not None
    assert isinstance(failure.error, Deadlock)
    assert "0 of 4 programs done, 3 not started for lack of room" in str(failure.error)
    explore(_in_order(protocols.gather_waiting_last), n_pes=4, seeds=10, resident=1)


def test_failure_says_how_to_see_it_again():
    with pytest.raises(ExplorationFailed, match=r"replay\(case, \d+, n_pes=4, resident=4\)") as raised:
        explore(gather("put, signal"), n_pes=4, seeds=10, resident=4)
    failure = raised.value.failure
    again = first_failure(gather("put, signal"), seeds=[failure.seed], **failure.options)
    assert again is not None
    assert again.report == failure.report


@pytest.mark.parametrize("seeds", [0, -1, [], iter(())])
@pytest.mark.parametrize("try_seeds", [explore, first_failure])
def test_no_seeds_are_an_error(try_seeds, seeds):
    with pytest.raises(ValueError, match="seeds must be at least 1, or name at least one seed; got "):
        try_seeds(lambda world: None, n_pes=1, seeds=seeds)


def test_seeds_may_be_any_iterable():
    seen = []
    explore(lambda world: seen.append(world.seed), n_pes=1, seeds=(seed for seed in (3, 1)))
    assert seen == [3, 1]


@pytest.mark.parametrize("whole", [True, False])
def test_a_flagged_word_in_two_pieces_is_caught(whole):
    def case(world):
        def host(pe):
            words, monitor = tdcoll.zeros((2, 2), torch.int64), tdcoll.WaitMonitor()
            torn = torch.zeros(1, dtype=torch.int32)
            tdcoll.barrier()
            protocols.flagged[(1,)](words, 5, monitor.words, torn, whole)
            tdcoll.barrier()
            assert int(torn) == 0, f"{int(torn)} words came torn"

        world.run(host)

    failure = first_failure(case, n_pes=2, seeds=30)
    assert (failure is None) == whole
    assert whole or "words came torn" in failure.report


def test_a_broadcast_without_acknowledgement_is_caught_because_stragglers_lag():
    """Its root waits for its own puts in each call, which must not give the other ranks time to read them."""
    case = broadcast(ack=False)
    assert first_failure(case, n_pes=4, seeds=10) is not None
    caught = sum(first_failure(case, n_pes=4, seeds=[seed], stragglers=True) is not None for seed in range(20))
    assert caught > 10


@seeds(10, 30)
@pytest.mark.parametrize("stragglers", [None, True])
def test_a_broadcast_with_acknowledgement_is_clean(stragglers, seeds):
    explore(broadcast(ack=True), n_pes=4, seeds=seeds, stragglers=stragglers)


def _pulled(how, get, calls=3):
    def case(world):
        n = world.n_pes

        def host(pe):
            mine = tdcoll.zeros((calls, 9), torch.int64, name="mine")
            signals = tdcoll.zeros((calls, n), torch.int64, name="signals")
            monitor = tdcoll.WaitMonitor()
            for call in range(calls):
                words = torch.arange(8) + 10 * torch.arange(n)[:, None] + 100 * (call + 1)
                out = torch.zeros(n, 8, dtype=torch.int64)
                protocols.pull_stored[(1,)](mine[call], words[pe], out, signals, call, monitor.words, n, how, get)
                monitor.check()
                assert torch.equal(out, words), f"call {call}: {out.tolist()} should be {words.tolist()}"

        world.run(host)

    return case


PULLS_CLEAN = [
    "release",
    "signal by the block",
    "copy, signal by the block",
    "fence, signal by a thread",
    "quiet, signal by a thread",
]
PULLS_CAUGHT = ["signal by a thread", "relaxed", "release on this GPU", "put with a signal"]


@pytest.mark.parametrize("get", [False, True])
@pytest.mark.parametrize("how", PULLS_CLEAN)
def test_own_stores_that_peers_read_in_order(how, get):
    explore(_pulled(how, get), n_pes=3, seeds=15)


@pytest.mark.parametrize("get", [False, True])
@pytest.mark.parametrize("how", PULLS_CAUGHT)
def test_own_stores_that_nothing_orders_are_caught(how, get):
    """A signal, of a call or of a put, says nothing of what its sender has stored to its own memory."""
    failure = first_failure(_pulled(how, get), n_pes=3, seeds=5)
    assert failure is not None
    assert "should be" in failure.report


def _cleared(how, reply):
    def case(world):
        def host(pe):
            box, told, answered = (tdcoll.zeros(4, torch.int64, name=name) for name in ("box", "told", "answered"))
            monitor = tdcoll.WaitMonitor()
            box[:2] = 3
            tdcoll.barrier()
            protocols.clear_and_tell[(1,)](box, told, answered, monitor.words, how, reply)
            monitor.check()
            tdcoll.barrier()
            assert pe or box[:2].tolist() == [7, 7], f"{box[:2].tolist()} should be 7, 7"

        world.run(host)

    return case


@pytest.mark.parametrize("reply", ["store", "put", "atomic", "signal"])
@pytest.mark.parametrize("how", ["release", "fence", "quiet", "signal by the block"])
def test_own_stores_that_land_before_a_peer_is_told(how, reply):
    explore(_cleared(how, reply), n_pes=2, seeds=15)


@pytest.mark.parametrize("reply", ["store", "put", "atomic", "signal"])
@pytest.mark.parametrize("how", ["relaxed", "release on this GPU", "signal by a thread", "put with a signal"])
def test_own_stores_that_land_after_what_they_caused_are_caught(how, reply):
    """Nothing orders a store to the own memory before a later message to a peer, nor before what the peer writes."""
    failure = first_failure(_cleared(how, reply), n_pes=2, seeds=15)
    assert failure is not None
    assert "should be 7, 7" in failure.report


def _told_by_the_last(push, count, how):
    def case(world):
        def host(pe):
            mine, counter, signals = (tdcoll.zeros(4, torch.int64) for _ in range(3))
            monitor, out = tdcoll.WaitMonitor(), torch.zeros(4, dtype=torch.int64)
            protocols.last_one_tells[(4,)](mine, counter, signals, out, monitor.words, push, count, how)
            monitor.check()
            assert pe == 0 or (out == 7).all(), f"{out.tolist()} should be all 7"

        world.run(host)

    return case


@pytest.mark.parametrize("push", [False, True], ids=["pull", "push"])
@pytest.mark.parametrize("how", ["fence", "quiet", "release", "signal by the block"])
def test_a_release_carries_what_other_programs_have_released_to_this_one(how, push):
    """Order is cumulative: a release on the GPU, seen by a program that releases to the system."""
    explore(_told_by_the_last(push, "acq_rel", how), n_pes=2, seeds=15)


@pytest.mark.parametrize("push", [False, True], ids=["pull", "push"])
@pytest.mark.parametrize(("count", "how"), [("relaxed", "release"), ("acq_rel", "signal by a thread")])
def test_what_other_programs_have_stored_is_not_carried_without_a_release(count, how, push):
    failure = first_failure(_told_by_the_last(push, count, how), n_pes=2, seeds=15)
    assert failure is not None
    assert "should be all 7" in failure.report


def test_a_word_never_goes_back():
    """Stores to the own memory come late to other PEs, but one after another; and none after an atomic."""
    seen = set()

    def case(world):
        def host(pe):
            word = tdcoll.zeros(1, torch.int64, name="word")
            out = torch.zeros(16, dtype=torch.int64)
            protocols.count_up_and_watch[(1,)](word, out)
            values = out.tolist()
            assert values == sorted(values), f"saw {values}"
            seen.update(values)

        world.run(host)

    explore(case, n_pes=2, seeds=20)
    assert seen == {0, 1, 2, 3, 4, 8}


def test_stores_of_a_launch_are_seen_after_it():
    """Without a fence: the end of a kernel is one."""

    def case(world):
        def host(pe):
            words = tdcoll.zeros(8, torch.int64, name="words")
            kernels.store_to[(1,)](words, pe)
            tdcoll.barrier()
            out = torch.zeros(8, dtype=torch.int64)
            kernels.call_two[(1,)](words, out)
            assert out[0] == 5

        kernels.CALL = lambda words, out: tl.store(out, tl.load(tdl.remote_ptr(words, 1)))
        world.run(host)

    explore(case, n_pes=2, seeds=20)
