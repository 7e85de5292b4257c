# SPDX-License-Identifier: Apache-2.0
"""Words that announce themselves: calls of changing sizes and kinds, and what must not be left out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from kernel_mutants import Change, installed

import tdcoll
from tdcoll.primitives.group import EPOCH_SHIFT
from tdcoll.testing import World, explore, first_failure

from . import cases
from .cases import Words

HEAP = 1 << 18
MORE = (cases.kernels().__name__,)
WRONG = r"AssertionError: rank \d+, call \d+: \d+ wrong numbers"
MISSING = r"[Dd]eadlock[\s\S]*waits for pe\d+\.lamport\["
SIZES = Words((9, 30, 1, 0, 30, 2, 2, 30))
AMONG_OTHERS = Words((9, "g", 12, "g", "g", 9, 12, "g", 12))


@pytest.mark.parametrize("case", [SIZES, AMONG_OTHERS], ids=["sizes", "among others"])
def test_sums(case: Words) -> None:
    for n_pes, seeds in ((1, 1), (2, 2), (3, 4)):
        explore(case, n_pes=n_pes, seeds=seeds, heap_bytes=HEAP)
    explore(case, n_pes=3, seeds=2, heap_bytes=HEAP, resident=1)


def test_sums_with_stragglers() -> None:
    explore(Words((12, 5) * 3, pause=40), n_pes=4, seeds=2, heap_bytes=HEAP, stragglers=True)


def test_lamport_calls_are_counted_apart_from_epochs() -> None:
    def host(pe: int) -> None:
        with tdcoll.CollectiveContext(max_bytes_per_rank=16, lamport_bytes=33) as ctx:
            lamport = ctx.device_lamport
            assert lamport is not None
            assert (lamport.stride, ctx.lamport_bytes) == (48, 33)
            inbox = ctx._symmetric[-1]
            assert (inbox.shape, set(inbox.unique().tolist())) == ((3, 2, 12), {cases.MINUS_ZERO})
            tdcoll.barrier()
            for call in range(1, 5):
                SIZES.launch(ctx, torch.ones(call), torch.zeros(call))
                assert int(lamport.control) == call << EPOCH_SHIFT.value
                tdcoll.all_gather(torch.zeros(4), ctx)
                assert int(ctx.control) == call << EPOCH_SHIFT.value
            assert lamport.extents.tolist() == [1, 1, 1]

    World(2, heap_bytes=HEAP).run(host)


def test_no_words_where_there_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    def host(pe: int) -> None:
        with tdcoll.CollectiveContext(max_bytes_per_rank=16, lamport_bytes=0) as ctx:
            assert (ctx.device_lamport, ctx.lamport_bytes) == (None, 0)
        with tdcoll.CollectiveContext(max_bytes_per_rank=17) as ctx:
            assert ctx.device_lamport is not None
            assert (ctx.device_lamport.stride, ctx.lamport_bytes) == (32, 17)
        with pytest.raises(ValueError, match="lamport_bytes must be at least 0, got -1"):
            tdcoll.CollectiveContext(max_bytes_per_rank=16, lamport_bytes=-1)
        with pytest.raises(tdcoll.RankMismatchError, match=r"differ in lamport_bytes \(rank 0: 0, rank 1: 1\)$"):
            tdcoll.CollectiveContext(max_bytes_per_rank=16, lamport_bytes=pe)
        monkeypatch.setattr("tdcoll.runtime.simulator.memory.MemoryView.peer_base", lambda view, pe: 0)
        tdcoll.barrier()
        with tdcoll.CollectiveContext(max_bytes_per_rank=16, lamport_bytes=64) as ctx:
            assert (ctx.device_lamport, ctx.lamport_bytes) == (None, 0)

    World(2, heap_bytes=HEAP).run(host)


def test_a_killed_peer_is_named() -> None:
    told = {}

    def host(pe: int) -> None:
        with tdcoll.CollectiveContext(max_bytes_per_rank=16, lamport_bytes=64) as ctx:
            SIZES.launch(ctx, torch.ones(5), torch.zeros(5))
            if pe == 1:
                world.kill(pe)
            SIZES.launch(ctx, torch.ones(5), torch.zeros(5))
            with pytest.raises(tdcoll.CollectiveTimeout) as raised:
                ctx.check()
            told[pe] = raised.value
            ctx.close()

    world = World(3, heap_bytes=HEAP)
    world.run(host)
    assert sorted(told) == [0, 2]
    for rank, error in told.items():
        assert (error.rank, error.peer, error.signal, error.epoch, error.expected, error.seen) == (rank, 1, 0, 2, 4, 0)


MUTANTS = {
    "two slots": (Change("lamport.slot", "call % 3", "call % 2"), f"{WRONG}|{MISSING}", SIZES),
    "the slot counts epochs": (
        Change("lamport.start", "lamport.control", "g.control"),
        f"{WRONG}|{MISSING}",
        AMONG_OTHERS,
    ),
    "as much is cleared as this call writes": (
        Change(
            "lamport.clear",
            "tl.load(lamport.extents + slot(call - 1))",
            "tl.maximum((tl.cast(nbytes, tl.int64) + 15) // 16, 1)",
        ),
        WRONG,
        SIZES,
    ),
    "nothing is cleared": (Change("lamport.clear", "begin < left", "begin < 0"), WRONG, SIZES),
    "a program clears what the grid of this call would have written": (
        Change("lamport.clear", "begin += tl.cast(programs, tl.int64) * BLOCK", "begin = left"),
        WRONG,
        SIZES,
    ),
    "what is sent may be the sentinel": (
        Change("lamport._present", "tl.where(part == SENTINEL, 0, part)", "part"),
        MISSING,
        SIZES,
    ),
    "a call of no bytes sends nothing": (
        Change("lamport.carry", "tl.maximum((nbytes + 15) // 16, 1)", "(nbytes + 15) // 16"),
        f"{WRONG}|{MISSING}",
        Words((9, 0, 0, 0, 9, 9, 9)),
    ),
    "a word is there when its first part is": (
        Change(
            "lamport.receive",
            "return tdl.wait_words(landed, SENTINEL, mask, g.monitor, origin, call)",
            "part = landed.to(tl.pointer_type(tl.int32))\n"
            "while tl.max(((tl.load(part, mask=mask, other=0, volatile=True) == SENTINEL) & mask).to(tl.int32)) != 0:\n"
            "    pass\n"
            "first = tl.load(part, mask=mask, other=0)\n"
            "second = tl.load(part + 1, mask=mask, other=0)\n"
            "third = tl.load(part + 2, mask=mask, other=0)\n"
            "fourth = tl.load(part + 3, mask=mask, other=0)\n"
            "return first, second, third, fourth, tl.full(word.shape, 1, tl.int32)",
        ),
        WRONG,
        SIZES,
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(name: str, tmp_path: Path) -> None:
    change, expect, case = MUTANTS[name]
    with installed([change], tmp_path, MORE):
        failure = first_failure(case, n_pes=3, seeds=40, heap_bytes=HEAP)
    assert failure is not None, f"nothing noticed: {name}"
    assert re.search(expect, failure.report), f"{name} fails, but not as it should: {failure.report}"
