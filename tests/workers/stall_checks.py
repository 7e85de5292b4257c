# SPDX-License-Identifier: Apache-2.0
"""A stall planted in a kernel, on every rank of a job: the protocol bears it, and with one
protection less it does not.

Each check runs the all-gather by stores twice with the same stall. The shipped protocol must give
right results. The one that lacks a wait, a slot, or the order of data and signal must give wrong
ones: so the checks of tests/workers, which find nothing wrong, could have found it.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from harness import check, device, expect, rank, scaled, world

import tdcoll
from tdcoll import runtime

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kernel_mutants import Change, installed

KERNEL = "exchange.kernels_direct.exchange_direct"
PUSH = "stores.push(mine, given, size, to_delta, signals + g.rank, to_signal_delta, epoch)"
WAIT = "tdl.wait_signal(signals + src_rank, tdl.CMP_GE, epoch, g.monitor, src_rank, chunk_index * g.world + src_rank)"
COPY_OUT = "tdl.copy_block(taken, segment(inbox, g, epoch, src_rank) + offset, size)"
STORE = "tdl.copy_block(target + delta, source, nbytes)"
RELEASE = "release(signal, signal_delta, value)"

ATOMICS = scaled(20_000, 100, shared_gpus=100_000)
"""Atomics of a stall: some milliseconds, while a call takes microseconds."""


def stall(word: str) -> str:
    """Statements that take their time: each atomic needs the result of the one before, whose high
    bits are zero.

    Loads would not do: ptxas drops those whose results nothing uses, relaxed ones too.
    """
    atomic = f'{word}_later = {word}_later + (tl.atomic_max({word}_later, 0, sem="relaxed") >> 62)'
    return f"{word}_later = {word}\nfor _ in tl.range(0, {ATOMICS}):\n    {atomic}\n"


def one_rank_stalls() -> str:
    """Another one in each call."""
    return f"if epoch % g.world == g.rank:\n    {stall('signals').replace(chr(10), chr(10) + '    ').rstrip()}\n"


def wrong_numbers(changes: Sequence[Change]) -> int:
    """How many numbers are wrong, on all ranks together, in calls in a row with these changes to
    the kernels."""
    calls, count = scaled(20, 6), 1000
    wrong = torch.zeros((), dtype=torch.int64, device=device())
    base = torch.arange(world() * count, device=device(), dtype=torch.int32) * 1000
    owner = runtime.current()
    with (
        tempfile.TemporaryDirectory() as folder,
        installed(changes, Path(folder)),
        tdcoll.CollectiveContext(max_bytes_per_rank=4 * count) as ctx,
    ):
        for call in range(calls):
            wanted = base + call
            mine = wanted.view(world(), count)[rank()].clone()
            wrong += (tdcoll.all_gather(mine, ctx=ctx, algorithm="direct") != wanted).sum()
        ctx.check()
        found = owner.control.all_gather(range(world()), "wrong numbers", int(wrong))
        tdcoll.barrier()  # a protocol that lacks something may still be storing
    return sum(found)


def bears_it_only_with(stalled: Change, without: Change, *more: Change) -> str:
    """``stalled`` has a stall, and ``without`` besides one protection less."""
    if world() == 1:
        return "one rank waits for nobody"
    right = wrong_numbers([stalled])
    expect(right == 0, f"{right} wrong numbers with a stall, and nothing missing")
    broken = wrong_numbers([without, *more])
    expect(broken > 0, "no wrong number with a stall, and a protection less")
    return f"{broken} wrong numbers without the protection"


@check
def a_wait_for_a_rank_that_is_late() -> str:
    late = Change(KERNEL, PUSH, one_rank_stalls() + PUSH)
    return bears_it_only_with(late, late, Change(KERNEL, WAIT, WAIT.replace("epoch", "0")))


@check
def a_second_slot_while_a_rank_has_yet_to_read_the_first() -> str:
    late = Change(KERNEL, COPY_OUT, one_rank_stalls() + COPY_OUT)
    return bears_it_only_with(late, late, Change("group.slot", "epoch % 2", "epoch * 0"))


@check
def a_signal_that_comes_after_its_data() -> str:
    both, late = f"{STORE}\n{RELEASE}", stall("signal")
    return bears_it_only_with(
        Change("stores.push", both, f"{STORE}\n{late}{RELEASE}"),
        Change("stores.push", both, f"{RELEASE}\n{late}{STORE}"),
    )
