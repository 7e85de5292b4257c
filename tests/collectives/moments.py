# SPDX-License-Identifier: Apache-2.0
"""Something happens to one rank before one of the operations of a call: a case for each of these moments.

The ranks' hosts queue all their calls on a stream, as a CUDA graph does, or an eager host that doesn't look. The
operations of a call are its launches, its copies, and the forks and joins of its side streams; then come ``check()``
and the use of the result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import tdcoll
from tdcoll.simulator.streams import SimulatedSideStream, Stream, host_of
from tdcoll.testing import World

from .operations import LOST, Calls, Tensors, given

THIS_CALL = 1
"""Number of the call in which something happens; one comes before it."""


class Happens:
    """Calls of all ranks, in one of which something happens to one rank.

    - ``"stops"``: the operation begins when all other ranks have given up, and have done all their calls.
    - ``"fails"``: another thread of the host fails the context, as a later call that is interrupted does. The call goes
      on, and is the rank's last one.
    - ``"fails early"``: likewise, and the calls that are queued behind it go on as well, as in a graph.
    - ``"interrupted"``: the host is interrupted before it queues the operation, when the GPU has done what the stream
      holds so far. It makes no further call.
    - ``"nothing"`` happens, except to a kernel that a test has changed. The call is the rank's last one.

    Behind each call every rank looks for expired waits, as its next call does, uses the result, and writes
    over all the memory of the call. If its look passes, the result must be right.

    Args:
        calls: what the ranks do.
        what: one of these.
        late: whose copies are late against everything that need not wait for them: ``"its"``, ``"others'"`` or ``""``.
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
        """Return a seed for each rank and each moment. ``world``: for a run in which nothing happens."""
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
        self.rank, self.moment = (0, -1) if seed is None else (seed % world.n_pes, seed // world.n_pes)
        self.operations = self.passed = self.raised = 0
        self.contexts: dict[int, Any] = {}
        self.memory: list[Tensors] = []  # so that none is freed, and a copy reads what has replaced its source
        self.watching = False
        with self._watched():
            world.run(self.host)

    # ------------------------------------------------------------------ the moment

    @contextmanager
    def _watched(self) -> Iterator[None]:
        real = Stream.queue

        def queue(stream: Stream, operation: Callable[[], Any]) -> None:
            if isinstance(stream, SimulatedSideStream) and self.late == (
                "its" if stream._pe == self.rank else "others'"
            ):
                operation = functools.partial(self._after_all_else, operation)
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

    def _after_all_else(self, operation: Callable[[], Any]) -> None:
        """Carry out an operation when nothing else can run but what waits for it, or for a deadline."""
        self.world.scheduler.wait(lambda: False, lambda: "is late", [], timeout_ns=1)
        operation()

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
        self.memory.append(memories)
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
