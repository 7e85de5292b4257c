# SPDX-License-Identifier: Apache-2.0
"""Something happens to one rank before one of the operations of a call: a case for each of these
moments.

The ranks' hosts queue all their calls on a stream, as a CUDA graph does, or an eager host that
doesn't look. The operations of a call are its launches, its copies, and the forks and joins of its
side streams; then come ``check()`` and the use of the result.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from kernel_mutants import Inserted

import tdcoll
from tdcoll.simulator.streams import SimulatedSideStream, Stream, host_of
from tdcoll.spec.constants import MONITOR_ABORTED
from tdcoll.testing import World

from .operations import LOST, Calls, given
from .suite.algorithm_cases import job

THIS_CALL = 1
"""Number of the call in which something happens; one comes before it."""


class Happens:
    """Calls of all ranks, in one of which something happens to one rank.

    - ``"stops"``: the operation begins when all other ranks have given up, and have done all their
      calls.
    - ``"fails"``: another thread of the host fails the context, as a later call that is interrupted
      does. The call goes on, and is the rank's last one.
    - ``"fails early"``: likewise, and the calls that are queued behind it go on as well, as in a
      graph.
    - ``"interrupted"``: the host is interrupted before it queues the operation, when the GPU has
      done what the stream holds so far. It makes no further call.
    - ``"nothing"`` happens, except to a kernel that a test has changed. The call is the rank's last
      one.

    Behind each call every rank looks for expired waits, as its next call does, uses the result, and
    writes over all the memory of the call. If its look passes, the result must be right. Nothing
    writes to the memory afterwards, and no operation during or before which the rank's waits have
    ended sets a stamp.

    Args:
        calls: what the ranks do.
        what: one of these.
        late: whose copies are late against everything that need not wait for them: ``"its"``,
            ``"others'"`` or ``""``.
        behind: whether ranks queue a call behind that one.

    Attributes:
        operations: of the call on one rank, in the latest run.
        passed, raised: how many looks did, in the latest run.
    """

    def __init__(
        self, calls: Calls, what: str, late: str = "its", *, behind: bool = True
    ) -> None:  # fmt: skip
        self.calls, self.what, self.late = calls, what, late
        self.queued = THIS_CALL + 1 + behind
        self.last = what in ("fails", "nothing")
        self.operations = self.passed = self.raised = 0

    def __str__(self) -> str:
        late = f", {self.late} copies are late" if self.late else ""
        return f"{self.calls}, a rank {self.what}{late}{', in its last call' * (self.queued == THIS_CALL + 1)}"

    def moments(self, world: World) -> range:
        """Return a seed for each rank and each moment. ``world``: for a run in which nothing
        happens."""
        self._run(world, None)
        assert self.last or self.raised == 0
        assert self.passed >= world.n_pes * (THIS_CALL + 1)
        return range(world.n_pes * self.operations)

    def __call__(self, world: World) -> None:
        """The seed of ``world`` says to which rank something happens, and when."""
        assert world.seed is not None
        self._run(world, world.seed)

    def _run(self, world: World, seed: int | None) -> None:
        self.world, self.over = world, set[int]()
        self.rank, self.moment = (
            (0, -1) if seed is None else (seed % world.n_pes, seed // world.n_pes)
        )
        self.operations = self.passed = self.raised = 0
        self.beside: dict[int, list[SimulatedSideStream]] = {pe: [] for pe in range(world.n_pes)}
        self.contexts: dict[int, Any] = {}
        # so that none is freed, and a copy reads what has replaced its source
        self.memory: list[torch.Tensor] = []
        self.watching = False
        with self._watched():
            world.run(self.host)
        assert all(bool((tensor == LOST).all()) for tensor in self.memory), (
            "memory is written to after the calls"
        )

    # ------------------------------------------------------------------ the moment

    @contextmanager
    def _watched(self) -> Iterator[None]:
        real = Stream.queue

        def queue(stream: Stream, operation: Callable[[], Any]) -> None:
            beside = isinstance(stream, SimulatedSideStream)
            if beside and self.late == ("its" if stream._pe == self.rank else "others'"):
                operation = functools.partial(
                    self._after_all_else, operation, self._late_ns(stream)
                )
            if not beside:
                operation = functools.partial(self._heeding, stream._pe, operation)
            if self.watching and stream._pe == self.rank and self.what != "nothing":
                number, self.operations = self.operations, self.operations + 1
                if number == self.moment:
                    if self.what == "interrupted":
                        host_of(self.world.scheduler).streams[-1].synchronize()
                        raise KeyboardInterrupt
                    operation = functools.partial(self._let_happen, operation)
            real(stream, operation)

        Stream.queue = queue  # type: ignore[method-assign]
        try:
            yield
        finally:
            Stream.queue = real  # type: ignore[method-assign]

    def _late_ns(self, stream: SimulatedSideStream) -> int:
        """How late a stream's operations are: each stream's of a rank more than all of the one
        before."""
        streams = self.beside[stream._pe]
        if stream not in streams:
            streams.append(stream)
        return int(1000 ** streams.index(stream))

    def _after_all_else(self, operation: Callable[[], Any], late_ns: int) -> None:
        """Carry out an operation when nothing else can run but what waits for it, or for a later
        time."""
        self.world.scheduler.wait(lambda: False, lambda: "is late", [], timeout_ns=late_ns)
        operation()

    def _heeding(self, pe: int, operation: Callable[[], Any]) -> None:
        """Carry out an operation, which sets no stamp if a rank's waits have ended."""
        ctx = self.contexts[pe]
        before = self._stamps(ctx)
        operation()
        if ctx.monitor.words[MONITOR_ABORTED.value] != 0:
            assert self._stamps(ctx) == before, (
                f"rank {pe} has given up, and says that its data is good"
            )

    @staticmethod
    def _stamps(ctx: Any) -> list[int]:
        stamps = getattr(ctx, "tables", {}).get(("copies", "stamps"))
        return [] if stamps is None else stamps.tolist()

    def _let_happen(self, operation: Callable[[], Any]) -> None:
        ctx = self.contexts[self.rank]
        if self.what.startswith("fails"):
            ctx.fail("all_reduce", KeyboardInterrupt())
            self._wake(ctx)
        else:
            others = set(range(self.world.n_pes)) - {self.rank}
            self.world.scheduler.wait(lambda: self.over >= others, lambda: "has stopped", ["over"])
        operation()

    def _wake(self, ctx: Any) -> None:
        """Let waits look at the monitor, as on GPUs they do by themselves."""
        self.world.scheduler.notify(("monitor", ctx.monitor.words.data_ptr()))

    # ------------------------------------------------------------------ a rank

    def host(self, pe: int) -> None:
        """Run on one rank."""
        operation, stream = self.calls.operation, self.world.stream()
        # The rank to which something happens gives up first if all wait in vain.
        ctx, monitor = self.calls.context(debug=False, timeout_s=20 if pe == self.rank else 30)
        self.contexts[pe] = ctx
        source, out, memories = operation.memory(ctx)
        self.memory += memories
        record, unseen = monitor.valid, memoryview(bytearray(1))
        passed = [False] * self.queued

        def look(call: int) -> None:
            monitor.valid = record
            try:
                monitor.raise_if_expired()
            except tdcoll.TdcollError:
                self.raised += 1
            else:
                self.passed += 1
                passed[call] = True
            finally:
                monitor.valid = unseen  # so that the host queues its next call

        def use(call: int, made: Any) -> None:
            if passed[call]:
                self.calls.check(ctx, call, operation.results(made, out), source)

        monitor.valid = unseen
        for call in range(self.queued):
            stream.queue(functools.partial(bring, pe, call, source))
            made: Any = None
            if pe == self.rank:
                self.watching = call == THIS_CALL
            try:
                with stream:
                    made = operation.call(source, out, ctx, self.calls.algorithm, call)
                if self.what == "interrupted" and pe == self.rank:
                    self.watching = False
                stream.queue(functools.partial(look, call))
                stream.queue(functools.partial(use, call, made))
            except KeyboardInterrupt:
                self._wake(ctx)
            if pe == self.rank:
                self.watching = False
            for tensor in memories:
                stream.queue(functools.partial(tensor.fill_, LOST))
            if made is None or (self.last and pe == self.rank and call == THIS_CALL):
                break
        stream.queue(functools.partial(self._leave, pe))
        stream.synchronize()

    def _leave(self, pe: int) -> None:
        self.over.add(pe)
        self.world.scheduler.notify("over")


def bring(pe: int, call: int, source: torch.Tensor) -> None:
    """Fill a rank's tensor of a call."""
    source.copy_(given(pe, call, source))


# ---------------------------------------------------------------------- other cases


def where(calls: Calls, **more: Any) -> dict[str, Any]:
    """Arguments of ``explore``."""
    return {**job(calls.nodes), "on_timeout": "expire", "stragglers": False, "weak": False, **more}


def stalls(where: str, epoch: int, call: str, of: str = "") -> Inserted:
    """Rank 1 stalls in this epoch before it calls a function, until a word of its memory is set
    that no call uses, because a rank doesn't signal to itself."""
    stall = f"""
if (g.rank == 1) & (epoch == {epoch}):
    while tdl.ld(g.arrived + (2 * g.chunks - 1) * g.world + 1, "sys", "relaxed") == 0:
        pass
"""
    return Inserted(where, call, stall, of=of)


class Overwritten:
    """Rank 1 stalls in its second call, before it reads its inbox. Rank 0, which gives up on it,
    makes a third one by copy engines, in the same slot, and then lets rank 1 go on.

    Args:
        calls: of a dense collective, whose algorithm does not matter.
        algorithms: of the calls, in turn.
        epoch: of the third call.
        checks: rank 1 calls ``check()``; otherwise it looks for expired waits, as its next call
            does.
    """

    def __init__(
        self, calls: Calls, algorithms: tuple[str, str, str], epoch: int, *, checks: bool = False
    ) -> None:  # fmt: skip
        self.calls = calls
        self.algorithms = algorithms
        self.epoch = epoch
        self.checks = checks

    def __str__(self) -> str:
        return f"{self.calls.operation.name} {' '.join(self.algorithms)}"

    def __call__(self, world: World) -> None:
        self.raised: list[tuple[int, int | None, int | None]] = []
        world.run(self.host)
        assert self.raised == [(1, 0, self.epoch)]

    def host(self, pe: int) -> None:
        """Run on one rank."""
        ctx, monitor = self.calls.context(debug=False)
        operation = self.calls.operation
        source, out, _ = operation.memory(ctx)
        record = monitor.valid
        for call, algorithm in enumerate(self.algorithms):
            bring(pe, call, source)
            monitor.valid = memoryview(bytearray(1))  # so that the host makes its next call
            made = operation.call(source, out, ctx, algorithm, call)
            monitor.valid = record
            if pe == 1:
                try:
                    if self.checks:
                        ctx.check()
                    else:
                        monitor.raise_if_expired()
                except tdcoll.CollectiveTimeout as error:
                    self.raised.append((error.rank, error.peer, error.epoch))
                    with pytest.raises(tdcoll.CollectiveTimeout, match=re.escape(str(error))):
                        operation.call(source, out, ctx, algorithm, call)
                    return
                self.calls.check(ctx, call, operation.results(made, out), source)
        assert pe == 0
        tdcoll.write_on_stream(tdcoll.peer_tensor(ctx.signals, 1)[1, -1, 1], 1)


class OneAtATime:
    """Calls of all ranks on a stream, on GPUs that carry out one operation at a time, of any of
    their streams.

    Args:
        calls: what the ranks do.
        late: kernels are late against all copies that need not wait for them.
    """

    def __init__(self, calls: Calls, late: bool = False) -> None:
        self.calls = calls
        self.late = late

    def __str__(self) -> str:
        late = ", kernels are late" if self.late else ""
        return f"{self.calls}, one operation at a time{late}"

    @property
    def where(self) -> dict[str, Any]:
        """Arguments of ``explore``. A wait in vain is a deadlock, unless kernels are late, which
        takes time."""
        if self.late:
            return where(self.calls)
        return {**job(self.calls.nodes), "weak": False}

    def __call__(self, world: World) -> None:
        busy = set[int]()
        real = Stream.queue
        scheduler = world.scheduler

        def queue(stream: Stream, operation: Callable[[], Any]) -> None:
            def alone() -> None:
                pe = stream._pe
                if self.late and not isinstance(stream, SimulatedSideStream):
                    scheduler.wait(lambda: False, lambda: "is late", [], timeout_ns=1)
                while pe in busy:  # others may have waited for it, too
                    scheduler.wait(
                        lambda: pe not in busy, lambda: "waits for another operation", ["idle"]
                    )
                busy.add(pe)
                operation()
                busy.remove(pe)
                scheduler.notify("idle")

            if "Stream.join" in getattr(operation, "__qualname__", ""):
                real(stream, operation)
            else:
                real(stream, alone)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Stream, "queue", queue)
            world.run(lambda pe: self.host(pe, world))

    def host(self, pe: int, world: World) -> None:
        """Run on one rank."""
        operation = self.calls.operation
        stream = world.stream()
        ctx, _ = self.calls.context(debug=False)
        source, out, _ = operation.memory(ctx)
        for call in range(2):
            stream.queue(functools.partial(bring, pe, call, source))
            with stream:
                made = operation.call(source, out, ctx, self.calls.algorithm, call)
        stream.synchronize()
        self.calls.check(ctx, 1, operation.results(made, out), source)
