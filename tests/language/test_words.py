# SPDX-License-Identifier: Apache-2.0
"""Words of other PEs and barriers of a grid under many schedules: `words_checks.py` has the rest,
on GPUs as well."""

from __future__ import annotations

from typing import Any

import kernels_of_words as kernels
import pytest
import torch
from exploring import explore, first_failure

from tdcoll import zeros
from tdcoll.base.errors import CollectiveTimeout
from tdcoll.calls.monitor import WaitMonitor
from tdcoll.testing import Deadlock, World


def put_and_get(world: World) -> None:
    def host(pe: int) -> None:
        words, floats = zeros(1, torch.int64), zeros(1, torch.float64)
        out, out_floats = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.float64)
        monitor, arrived = WaitMonitor(), zeros(1, torch.int64)
        kernels.values[(1,)](words, floats, out, out_floats, arrived, monitor.words)
        before = (pe - 1) % world.n_pes
        assert (words.item(), floats.item()) == ((before + 1) * 10_000_000_000, before + 0.25)
        assert (out.item(), out_floats.item()) == ((pe + 1) * 10_000_000_000, pe + 0.25)

    world.run(host)


def test_values_of_every_type() -> None:
    explore(put_and_get, n_pes=3, seeds=10)
    put_and_get(World(3, ranks_per_node=1))


def change_words_of_pe_0(world: World) -> None:
    rounds = 3
    kept: dict[int, list[int]] = {}

    def host(pe: int) -> None:
        narrow, wide = zeros(3, torch.int32), zeros(2, torch.int64)
        old, arrived = torch.zeros(rounds + 3, dtype=torch.int64), zeros(1, torch.int64)
        kernels.atomics[(1,)](narrow, wide, old, arrived, WaitMonitor().words, rounds)
        kept[pe] = old.tolist()
        if pe == 0:
            assert narrow.tolist()[:2] == [rounds * world.n_pes, 0]
            assert wide[0].item() == world.n_pes * rounds << 33

    world.run(host)
    n = world.n_pes
    counted = sorted(value for old in kept.values() for value in old[:rounds])
    assert counted == list(range(n * rounds))  # nobody was told the same
    held = [old[rounds] for old in kept.values()]
    assert len(set(held)) == n  # each sees who had the lock before
    assert len({old[rounds + 1] for old in kept.values()}) == n
    assert {old[rounds + 2] for old in kept.values()} == {n * rounds << 33}


def test_atomics_of_several_pes() -> None:
    explore(change_words_of_pe_0, n_pes=3, seeds=10)


def counted_puts(fence: bool) -> Any:
    def case(world: World) -> None:
        def host(pe: int) -> None:
            buffer, counter = zeros(16, torch.int32), zeros(1, torch.int32)
            if pe == 1:
                buffer.copy_(torch.arange(16) + 7)
            out = torch.zeros(16, dtype=torch.int32)
            kernels.put_then_count[(1,)](buffer, counter, out, WaitMonitor().words, fence)
            assert pe == 1 or torch.equal(out, torch.arange(16, dtype=torch.int32) + 7), (
                f"got {out.tolist()}"
            )

        world.run(host)

    return case


def test_an_atomic_after_a_fence_says_that_data_are_there() -> None:
    explore(counted_puts(True), n_pes=2, seeds=30)
    failure = first_failure(counted_puts(False), n_pes=2, seeds=10)
    assert failure is not None
    assert "got [" in failure.report


def meeting(barrier: bool, blocks: tuple[int, ...] = (5, 3, 5)) -> Any:
    """Launches of several sizes on one counter."""
    n, width = 4, 8

    def case(world: World) -> None:
        def host(pe: int) -> None:
            counter, monitor = torch.zeros(1, dtype=torch.int64), WaitMonitor(timeout_s=1)
            for launch, size in enumerate(blocks):
                cells, sums = (torch.zeros(n, width, dtype=torch.int32) for _ in range(2))
                kernels.rounds[(size,)](cells, sums, counter, monitor.words, n, barrier, width)
                monitor.raise_if_expired()
                for i in range(n):
                    wanted = sum(range(i + 1, size + i + 1))
                    assert sums[i, :size].tolist() == [wanted] * size, (
                        f"launch {launch}, round {i}: {sums[i]}"
                    )

        world.run(host)

    return case


def test_programs_of_a_grid_meet() -> None:
    explore(meeting(True), n_pes=2, seeds=10)
    failure = first_failure(meeting(False), n_pes=2, seeds=3)
    assert failure is not None
    assert "round" in failure.report


def test_a_grid_that_does_not_fit_cannot_meet() -> None:
    with pytest.raises(Deadlock, match="waits for"):
        meeting(True)(World(1, resident=3))
    with pytest.raises(CollectiveTimeout, match="rank 0 waited 1 s in grid_barrier"):
        meeting(True)(World(1, resident=3, on_timeout="expire"))
