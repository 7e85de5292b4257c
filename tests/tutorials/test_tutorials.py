# SPDX-License-Identifier: Apache-2.0
"""The tutorials: they run, they fail when a check fails, and the rules that they teach are needed."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from changes import load_changed
from tiers import seeds

import tdcoll
from tdcoll import runtime
from tdcoll.testing import World, explore, first_failure

TUTORIALS = Path(__file__).resolve().parents[2] / "tutorials"
NOTIFY, ALL_GATHER = TUTORIALS / "01-notify-and-wait.py", TUTORIALS / "02-all-gather.py"
ALL_REDUCE = TUTORIALS / "05-all-reduce.py"


def meet() -> None:
    """A barrier among the PEs of a World, which have no torch.distributed."""
    owner = runtime.current()
    owner.control.all_gather(range(owner.world_size), "meet", None)


# ---------------------------------------------------------------------- as a reader runs them


def test_notify_and_wait_runs(launch):
    done = launch("--simulate", "--nproc", "2", str(NOTIFY))
    assert done.returncode == 0, done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == ["hello", "queue", "deadline"]


def test_all_gather_runs_on_two_emulated_nodes(launch):
    done = launch("--simulate", "--nproc", "4", "--emulate-nodes", "2", str(ALL_GATHER))
    assert done.returncode == 0, done.stderr
    assert "2 node(s) (2 + 2)" in done.stdout
    for name in (
        "my_all_gather",
        "all_gather 1d",
        "all_gather 2d",
        "all_gather_in_place",
        "all_gather_into_tensor",
    ):
        assert f"\n{name}: " in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 2])
def test_all_reduce_runs(launch, nodes):
    """On three ranks, whose number divides nothing."""
    done = launch("--simulate", "--nproc", "3", "--emulate-nodes", str(nodes), str(ALL_REDUCE))
    assert done.returncode == 0, done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == [
        f"3 rank(s) on {nodes} node(s) ({'3' if nodes == 1 else '2 + 1'})",
        "my all-reduce in 1 stage(s)",
        "my all-reduce in 2 stage(s)",
        "all_reduce_rms_norm",
        "decoding",
        "time",
    ]


@pytest.mark.slow
def test_a_rank_that_leaves_is_named_by_the_others(launch):
    done = launch("--simulate", "--nproc", "2", "--timeout", "5", "--monitor-interval", "25", str(NOTIFY), "--die", "1")
    assert done.returncode != 0
    assert "CollectiveTimeout: rank 0 waited 5 s for peer 1" in done.stderr
    assert "queue:" not in done.stdout


@pytest.mark.gpu
@pytest.mark.parametrize("tutorial", [NOTIFY, ALL_GATHER, ALL_REDUCE], ids=lambda path: path.stem)
def test_runs_on_gpus(launch, tutorial):
    done = launch(str(tutorial), timeout=280)
    assert done.returncode == 0, done.stderr
    print(done.stdout)


# ---------------------------------------------------------------------- checks that can fail


def test_check_of_the_queue_fails_on_wrong_data(tmp_path):
    module = load_changed(NOTIFY, tmp_path)
    received = 3 * 1000000 + torch.arange(module.ITEMS)[:, None] * 1000 + torch.arange(module.WORDS)
    module.check_received(received, 3)
    with pytest.raises(AssertionError, match="from rank 2"):
        module.check_received(received, 2)
    received[5, 7] += 1
    with pytest.raises(AssertionError, match="1 wrong words from rank 3; item 5, word 7"):
        module.check_received(received, 3)


def test_check_of_the_all_gather_fails_on_wrong_data(tmp_path):
    module = load_changed(ALL_GATHER, tmp_path)
    right = torch.cat([module.make(rank, 1, 10, torch.device("cpu")) for rank in range(3)])
    module.check("right", right.view(3, 10), right)
    wrong = torch.cat([right[10:20], right[:10], right[20:]])
    with pytest.raises(AssertionError, match="swapped: 20 of 30 numbers are wrong; number 0"):
        module.check("swapped", wrong, right)


# ---------------------------------------------------------------------- the rules that they teach


def queue_case(module: ModuleType):
    def case(world):
        def host(pe):
            ring, monitor = module.Queue(), tdcoll.WaitMonitor()
            meet()
            module.hello[(1,)](ring.hello, monitor.words)
            ring.run(monitor, 0, 9)
            ring.run(monitor, 9, module.ITEMS - 9)
            monitor.check()
            module.check_received(ring.received, (pe - 1) % world.n_pes)

        world.run(host)

    return case


SMALL = ("WORDS, SLOTS, ITEMS = 256, 4, 24", "WORDS, SLOTS, ITEMS = 16, 2, 18")


@pytest.mark.parametrize("options", [{"n_pes": 1}, {"n_pes": 3}, {"n_pes": 3, "ranks_per_node": 1}], ids=str)
@seeds(5, 20)
def test_queue_is_right_in_any_order(tmp_path, options, seeds):
    explore(queue_case(load_changed(NOTIFY, tmp_path, SMALL)), seeds=seeds, **options)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(("arrived + slot", "arrived"), id="1: one signal for all slots"),
        pytest.param(("wait_signal(credits, tdl.CMP_GE", "wait_signal(credits, tdl.CMP_EQ"), id="2: equal"),
        pytest.param(("i + 1 - SLOTS, 0)", "i - SLOTS, 0)"), id="3: one credit too many"),
        pytest.param(("putmem_signal_block(", "putmem_signal_nbi_block("), id="4: source not kept"),
    ],
)
def test_queue_without_a_rule_is_caught(tmp_path, change):
    assert first_failure(queue_case(load_changed(NOTIFY, tmp_path, SMALL, change)), n_pes=3, seeds=60) is not None


def test_dead_neighbour_is_named(tmp_path):
    module = load_changed(NOTIFY, tmp_path, SMALL)
    world = World(2, seed=3, weak=True)

    def host(pe):
        ring, monitor = module.Queue(), tdcoll.WaitMonitor()
        meet()
        ring.run(monitor, 0, 9)
        if pe == 1:
            world.kill(1)
        ring.run(monitor, 9, module.ITEMS - 9)
        with pytest.raises(tdcoll.CollectiveTimeout) as caught:
            monitor.check()
        return caught.value

    error, dead = world.run(host)
    assert dead is None
    assert (error.rank, error.peer) == (0, 1)


def gather_case(module: ModuleType):
    def case(world):
        def host(pe):
            gather = module.MyAllGather(20, torch.int32)
            cpu = torch.device("cpu")
            for call in range(6):
                result = gather(module.make(pe, call, 20, cpu))
                expected = torch.cat([module.make(rank, call, 20, cpu) for rank in range(world.n_pes)])
                world.pause()
                module.check("my_all_gather", result, expected)
            gather.monitor.check()

        world.run(host)

    return case


@pytest.fixture
def no_process_group(monkeypatch):
    monkeypatch.setattr(torch.distributed, "barrier", meet)


@pytest.mark.usefixtures("no_process_group")
@pytest.mark.parametrize(
    "options",
    [{"n_pes": 1}, {"n_pes": 4}, {"n_pes": 4, "resident": 1}, {"n_pes": 4, "ranks_per_node": 2}],
    ids=str,
)
@seeds(5, 20)
def test_my_all_gather_is_right_in_any_order(tmp_path, options, seeds):
    explore(gather_case(load_changed(ALL_GATHER, tmp_path)), seeds=seeds, **options)


@pytest.mark.usefixtures("no_process_group")
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(("self.slots[self.epoch % 2]", "self.slots[0]"), id="one slot"),
        pytest.param(("self.signals[self.epoch % 2]", "self.signals[0]"), id="one row of signals"),
        pytest.param(("self.epoch += 1", "self.epoch = 1"), id="no epoch"),
    ],
)
def test_my_all_gather_without_a_rule_is_caught(tmp_path, change):
    assert first_failure(gather_case(load_changed(ALL_GATHER, tmp_path, change)), n_pes=4, seeds=60) is not None


# ---------------------------------------------------------------------- the all-reduce


def all_reduces(module: ModuleType, stages: int) -> None:
    def case(world: World) -> None:
        def host(pe: int) -> None:
            mine, count = module.MyAllReduce(70), 70
            results = [mine(module.make(pe, call, count, "cpu"), stages).clone() for call in range(4)]
            mine.monitor.check()
            for call, result in enumerate(results):
                module.check("all-reduce", result, module.reference(call, count, "cpu"))
            meet()

        world.run(host)

    return case


@seeds(2, 20)
@pytest.mark.parametrize("stages", [1, 2])
def test_all_reduces_of_the_tutorial_are_right(stages, seeds, tmp_path):
    explore(all_reduces(load_changed(ALL_REDUCE, tmp_path), stages), n_pes=3, seeds=seeds, heap_bytes=1 << 18)


@pytest.mark.parametrize(
    ("stages", "old", "new"),
    [
        (1, "inbox, signals = self.slots[slot]", "inbox, signals = self.slots[0]"),
        (
            1,
            "range(0, world):\n                total += tl.load(inbox + rank",
            "range(0, world):\n                total += tl.load(inbox + (rank + me) % world",
        ),
        (2, "signals + world + me, epoch", "signals + me, epoch"),
        (
            2,
            "elif tdl.wait_signals(signals, world, me, tdl.CMP_GE, epoch,",
            "elif tdl.wait_signals(signals, world, me, tdl.CMP_GE, 0,",
        ),
    ],
)
def test_rules_of_the_all_reduce_are_needed(stages, old, new, tmp_path):
    module = load_changed(ALL_REDUCE, tmp_path, (old, new))
    failure = first_failure(all_reduces(module, stages), n_pes=3, seeds=60, heap_bytes=1 << 18)
    assert failure is not None
