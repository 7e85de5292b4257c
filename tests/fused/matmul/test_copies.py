# SPDX-License-Identifier: Apache-2.0
"""All-gathers + matmuls for which copy engines send: the order of copies and launches, and ranks
that fail, come late or are interrupted at any moment.

In a CUDA graph, or if ranks share a GPU, a call has two launches, here *apart*.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from collectives.moments import Happens, OneAtATime, bring, where
from collectives.operations import Calls, Operation, Tensors
from exploring import explore, first_failure
from kernel_mutants import AnyChange, Call, Change, Moved, installed
from tiers import slow_tier

import tdcoll
from tdcoll.fused.matmul import copies
from tdcoll.fused.matmul.policy import GATHER, Cut, MatmulPlan
from tdcoll.job import lifecycle
from tdcoll.simulator.streams import Stream
from tdcoll.testing import World

from .calls import Calls as MatmulCalls
from .calls import calls_by

ROWS, DEPTH = 4, 8
PLAN = MatmulPlan("copied", Cut(4, 16, 8, 1, 1, group=2), 2, piece=64)
"""A tile and two pieces of a shard."""

WEIGHT = torch.eye(DEPTH)


def _memory(ctx: Any) -> tuple[torch.Tensor, torch.Tensor, Tensors]:
    source = torch.empty(ROWS, DEPTH)
    out = torch.empty(ctx.world_size * ROWS, DEPTH)
    return source, out, (source, out)


def _call(source: torch.Tensor, out: torch.Tensor, ctx: Any, algorithm: Any, number: int) -> Any:
    function = tdcoll.fused.all_gather_matmul
    return [function(source, WEIGHT, out=out, ctx=ctx, algorithm=algorithm)]


MATMUL = Operation(
    "all_gather_matmul",
    _memory,
    _call,
    lambda sources, topology, number: [torch.cat(list(sources))],
    tells=True,
)


def calls(*nodes: int) -> Calls:
    """Calls by copy engines."""
    return Calls(MATMUL, PLAN, (), nodes)


TWO = calls(2)


@contextmanager
def launched(apart: bool) -> Iterator[None]:
    """Calls have two launches if ``apart``."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (lifecycle, copies):
            patch.setattr(module, "may_share_gpus", lambda: apart)
        yield


EACH = pytest.mark.parametrize("apart", [False, True], ids=["together", "apart"])


# ---------------------------------------------------------------------- moments


@pytest.mark.parametrize(
    ("what", "late", "apart"),
    [
        ("fails", "its", True),
        ("interrupted", "its", False),
        ("stops", "", False),
        slow_tier("fails", "its", False),
        slow_tier("fails", "others'", True),
        slow_tier("fails early", "its", False),
        slow_tier("interrupted", "its", True),
        slow_tier("interrupted", "others'", False),
        slow_tier("stops", "", True),
        slow_tier("stops", "others'", False),
    ],
)
def test_no_rank_has_a_wrong_result_that_passes_a_check(what: str, late: str, apart: bool) -> None:
    """Whatever happens to the other rank, at any moment; and copies of an interrupted call are done
    when its memory is used again."""
    case = Happens(TWO, what, late)
    settings = where(TWO)
    with launched(apart):
        seeds = case.moments(World(seed=0, **settings))
        assert len(seeds) >= 16, "few moments: the call isn't what it should be"
        explore(case, **settings, seeds=seeds)


# ---------------------------------------------------------------------- order


class InOneQueue:
    """Calls of all ranks, on GPUs that carry out the operations of all streams in the order in
    which the host has queued them: the streams have one hardware queue."""

    def __call__(self, world: World) -> None:
        real = Stream.queue
        scheduler = world.scheduler
        queued = [0] * world.n_pes
        done = [0] * world.n_pes

        def queue(stream: Stream, operation: Callable[[], Any]) -> None:
            pe = stream._pe
            number = queued[pe]
            queued[pe] += 1

            def in_turn() -> None:
                scheduler.wait(lambda: done[pe] == number, lambda: "waits for its turn", ["turn"])
                operation()
                done[pe] += 1
                scheduler.notify("turn")

            real(stream, in_turn)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Stream, "queue", queue)
            world.run(lambda pe: self.host(pe, world))

    def host(self, pe: int, world: World) -> None:
        """Run on one rank."""
        stream = world.stream()
        ctx, _ = TWO.context(debug=False)
        source, out, _ = _memory(ctx)
        for call in range(2):
            stream.queue(lambda call=call: bring(pe, call, source))
            with stream:
                made = _call(source, out, ctx, PLAN, call)
        stream.synchronize()
        TWO.check(ctx, 1, made, source)


ONE_AT_A_TIME = OneAtATime(TWO)
JOB = ONE_AT_A_TIME.where
DEADLOCK = "[Dd]eadlock"


@EACH
def test_copies_in_one_hardware_queue_with_the_matmul_come_before_it(apart: bool) -> None:
    with launched(apart):
        explore(InOneQueue(), **JOB, seeds=3)


@pytest.mark.parametrize("late", [False, True], ids=["", "kernels are late"])
def test_in_a_graph_no_copy_waits_for_a_matmul(late: bool) -> None:
    """Whatever order the driver takes. One launch would not do."""
    case = OneAtATime(TWO, late)
    with launched(True):
        explore(case, **case.where, seeds=4)
    if not late:
        with launched(False):
            failure = first_failure(case, **case.where, seeds=20)
        assert failure is not None
        assert "eadlock" in failure.report


# ---------------------------------------------------------------------- negative controls

STEP = "matmul.copies.CopiedShardsStep.__call__"
QUEUE = "matmul.copies.ShardCopies.queue"
FORK = "copies.fork(stream)"
DATA = "engines.queue(stream, source, landing, piece, piece.nbytes)"
STAMP = "engines.queue_stamp(stream, peer, 0, number)"
OWN = "self._own(stream, frame)"
JOIN = "copies.join(stream)"
OTHERS = "self._others(stream, frame)"
WHOLE = "self._whole(stream, frame)"
SPOILS = "wrong numbers|is written to after the calls"
LATE = OneAtATime(TWO, late=True)

SCALES = """
if self._scale is not None:
    scales = frame[self._scale].data_ptr()
    engines.queue(stream, scales, landing, self._scales, self._scales.nbytes)
"""
PIECES = f"""
for number, piece in enumerate(self._pieces):
    {DATA}
    {STAMP}
"""
PLAIN = calls_by(GATHER, "copied", count=4)
SCALED = calls_by(
    GATHER,
    "copied",
    dtype=torch.float8_e4m3fn,
    scales="tensor",
    depth=128,
    context=(("max_bytes_per_rank", 1 << 12),),
)
EXPLORED = {"n_pes": 3, "heap_bytes": 1 << 22}

MUTANTS: dict[str, tuple[bool, AnyChange, Any, str]] = {
    "the stamp before the piece": (
        False,
        Change(QUEUE, f"{DATA}\n{STAMP}", f"{STAMP}\n{DATA}"),
        PLAIN,
        "wrong elements",
    ),
    "scales behind the stamps": (
        False,
        Change(QUEUE, f"{SCALES}\n{PIECES}", f"{PIECES}\n{SCALES}"),
        SCALED,
        "wrong elements",
    ),
    "no scales": (False, Change(QUEUE, SCALES, "pass"), SCALED, "wrong elements"),
    "no stamp": (False, Change(QUEUE, STAMP, "pass"), InOneQueue(), DEADLOCK),
    "one stamp for all pieces": (
        False,
        Change(QUEUE, STAMP, STAMP.replace("number", "0")),
        InOneQueue(),
        DEADLOCK,
    ),
    "copies are not behind enter": (False, Change(STEP, FORK, "pass"), LATE, "wrong numbers"),
    "the matmul is queued before the copies": (
        False,
        Moved(STEP, "copies.queue", behind="self._whole"),
        InOneQueue(),
        DEADLOCK,
    ),
    "later work doesn't wait for copies": (
        False,
        Change(STEP, f"{WHOLE}\n{JOIN}", WHOLE),
        Happens(TWO, "stops", "its"),
        SPOILS,
    ),
    "the other shards are multiplied before the copies are done": (
        True,
        Change(STEP, f"{JOIN}\n{OTHERS}", f"{OTHERS}\n{JOIN}"),
        ONE_AT_A_TIME,
        DEADLOCK,
    ),
    "the own shard is left out": (True, Change(STEP, OWN, "pass"), ONE_AT_A_TIME, "wrong numbers"),
    "the other shards are left out": (
        True,
        Change(STEP, OTHERS, "pass"),
        ONE_AT_A_TIME,
        "wrong numbers",
    ),
    "one launch in a graph": (
        True,
        Call(STEP, "may_share_gpus", "False"),
        ONE_AT_A_TIME,
        DEADLOCK,
    ),
    "an interrupt leaves the stream as it is": (
        False,
        Change(STEP, f"{JOIN}\nraise", "raise"),
        Happens(TWO, "interrupted"),
        SPOILS,
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(name: str, tmp_path: Path) -> None:
    apart, change, case, expect = MUTANTS[name]
    settings = JOB
    if isinstance(case, OneAtATime):
        settings = case.where
    elif isinstance(case, Happens):
        settings = where(TWO)
    elif isinstance(case, MatmulCalls):
        settings = EXPLORED
    with launched(apart), installed([change], tmp_path):
        failure = first_failure(case, **settings, seeds=60)
    assert failure is not None, "nothing was noticed"
    assert re.search(expect, failure.report), failure.report
