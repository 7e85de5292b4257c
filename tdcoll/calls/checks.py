# SPDX-License-Identifier: Apache-2.0
"""State that the calls of a context share, and whether one may be made, here and now.

Each rule stands once, in :meth:`CallChecks.check_fast`, which runs before every call and answers
yes or no, because most of what a repeated call costs the host is spent there. If it answers no,
:meth:`CallChecks.overcome` raises the error, or does what the call needs in spite of the obstacle.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from enum import Enum
from typing import Any, Literal, TypeVar

import torch

from tdcoll.base.call_log import MOST_CALLS, CallLog, CallRecord
from tdcoll.base.capture import capture_of
from tdcoll.base.errors import ContextError, NotInitializedError, RankMismatchError
from tdcoll.base.limits import MAX_BLOCKS
from tdcoll.calls.budget import StreamOrder
from tdcoll.calls.monitor import WaitMonitor
from tdcoll.language import INTERPRETED
from tdcoll.runtime import Runtime
from tdcoll.runtime.control import require_equal
from tdcoll.runtime.topology import Topology

Debug = bool | Literal["first"]
"""Calls whose arguments the ranks compare: all, none, or the first of each kind."""


class Obstacle(Enum):
    """Why :meth:`CallChecks.check_fast` has stopped."""

    REFUSED = "the context refuses calls"
    JOB_ENDED = "the job has ended"
    EXPIRED = "a wait has expired"
    OTHER_DEVICE = "another device is current"
    CAPTURING = "the current stream is being captured"
    LAST_STREAM_CAPTURED = "the stream of the last call is being captured"
    DEBUG = "the ranks compare every call"


_PERMANENT = (Obstacle.REFUSED, Obstacle.JOB_ENDED, Obstacle.EXPIRED)
"""Obstacles that a rank doesn't report to its peers in debug mode, which may be past this call, or
gone."""

MOST_CACHED = 2048
"""The most kinds of calls and launches that a context remembers."""

_Value = TypeVar("_Value")

_PLAIN_TYPES = (bool, int, float, str, type(None))


def debug_mode(default: Debug) -> Debug:
    """Return the mode that ``TDCOLL_DEBUG`` asks for, or ``default`` if it is not set."""
    value = os.environ.get("TDCOLL_DEBUG")
    if not value:
        return default
    if value == "first":
        return "first"
    return value != "0"


def exchangeable(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return facts as ranks exchange them: the caller may have passed any object."""
    return {
        name: fact if isinstance(fact, _PLAIN_TYPES) else str(fact) for name, fact in facts.items()
    }


def compare(
    job: Runtime,
    ranks: Sequence[int],
    operation: str,
    facts: Mapping[str, Any],
    problem: Exception | None,
) -> None:
    """Raise on every rank if the arguments of one are wrong, or if they differ. Collective.

    Raises:
        RankMismatchError: ``facts`` differ, or another rank has a problem.
        TypeError, ValueError, TdcollError: ``problem``.
    """
    what = f"{operation} arguments"
    answers = job.exchange(ranks, what, (str(problem) if problem else None, exchangeable(facts)))
    if problem is not None:
        raise problem
    for rank, (other_problem, _) in enumerate(answers):
        if other_problem is not None:
            raise RankMismatchError(
                f"{operation}: rank {rank} cannot make this call: {other_problem}"
            )
    require_equal([other_facts for _, other_facts in answers], range(len(ranks)), what)


class ComparedKinds:
    """The kinds of calls whose arguments the ranks have compared, the same on all ranks.

    A kind is everything on which the ranks have to agree, so each kind needs one comparison. If
    one rank makes a known call and another a new one, the second blocks until the first makes the
    new one too.
    """

    MOST = 2048

    def __init__(self) -> None:
        self._kinds: set[str] = set()

    def is_new(self, operation: str, facts: Mapping[str, Any]) -> bool:
        """Return whether a call is the first of its kind, so that the ranks compare it."""
        return self._kind(operation, facts) not in self._kinds and len(self._kinds) < self.MOST

    def add(self, operation: str, facts: Mapping[str, Any]) -> None:
        """Remember a kind that the ranks have compared."""
        self._kinds.add(self._kind(operation, facts))

    @staticmethod
    def _kind(operation: str, facts: Mapping[str, Any]) -> str:
        return f"{operation} {exchangeable(facts)}"


class CallChecks:
    """The checks that the calls of a context have to pass, and what the calls share.

    Args:
        order: The order of launches that the context shares with others; None for its own.
        debug: See :data:`Debug`. None: use ``TDCOLL_DEBUG``. If that is unset, compare every call
            in the simulator and no call on GPUs.
    """

    def __init__(
        self,
        job: Runtime,
        topology: Topology,
        monitor: WaitMonitor,
        debug: Debug | None,
        order: StreamOrder | None = None,
    ) -> None:
        self.job = job
        self.topology = topology
        self.rank = topology.rank
        """This process's group rank."""
        self.world_size = topology.world_size
        """Ranks of the group."""
        self.monitor = monitor
        """The :class:`~tdcoll.WaitMonitor` of the kernels that the context's calls launch."""
        self.device = job.device
        """The device on which tensors of calls must be."""
        self.debug: Debug = debug_mode(job.simulated) if debug is None else debug
        self._compared = ComparedKinds()
        self.inbox: torch.Tensor
        """The context's inbox, whose place in the symmetric heap identifies the context."""
        self.capturing = False
        """Whether the last call was made while a CUDA graph was being captured."""
        self.captured = False
        """Whether any call was made while a CUDA graph was being captured. If so, a graph may
        still use the context's memory."""
        self._expired = monitor.valid
        self.calls: CallLog = monitor.calls or CallLog(topology.pes, None)
        """The calls that the context remembers; see :meth:`note`."""
        self.max_blocks = MAX_BLOCKS
        """The most thread blocks that a launch on the context has; policies keep to it."""
        self.cache: dict[Hashable, Any] = {}
        """Prepared calls and launches by key; see :meth:`remember`."""
        self._loaded: set[Hashable] = set()
        self._refusal: str | None = None
        self._obstacle: Obstacle | None = None
        self._number_compared = 0
        self._cuda = self.device.type == "cuda"
        self._index = self.device.index if self._cuda else 0
        self.order = order or StreamOrder(self.device)

    def check(self) -> None:
        """Wait for the context's last eager call, and raise if a wait in one of its kernels
        expired.

        The host doesn't see replays of CUDA graphs: synchronise their stream first.

        Raises:
            CollectiveTimeout: naming rank, peer, signal and epoch.
            ContextError: A call has failed after it had begun, which has ended those that still
                ran.
        """
        stream = self.order.stream
        if stream is not None:
            stream.synchronize()
        with torch.cuda.stream(stream):  # It has nothing to do, unlike the caller's current one.
            self.monitor.raise_if_wrong()

    def set_timeout(self, timeout_s: float) -> None:
        """Change the deadline of the waits of later calls, behind the context's last eager one."""
        self.monitor.set_timeout(timeout_s, self.order.stream)

    def note(self, call: CallRecord | str) -> None:
        """Note a call before it launches: its record or, if its epochs are unknown, its name."""
        log = self.calls.log
        log.append(call)
        if len(log) >= MOST_CALLS:
            self.calls.forget_older()

    def refuse(self, reason: str) -> None:
        """Let every later call raise an error with this reason."""
        self._refusal = reason

    def fail(self, operation: str, error: BaseException) -> None:
        """Refuse every later call, because ``operation`` failed after it may have launched kernels.

        This rank may be epochs behind its peers. The context's kernels do nothing from now on,
        including those of graphs that are replayed, so the peers get a timeout rather than wrong
        results. Nothing collective is tried any more.
        """
        if self._refusal is not None or self.monitor.expired:
            return  # Later calls raise the first error.
        self._refusal = (
            f"an earlier {operation} ended with {type(error).__name__} after it had begun, so this "
            "rank may be out of step with the others, which get a timeout; end the job"
        )
        self.job.failed = True
        if not self.capturing:  # A captured call has not launched anything.
            self.monitor.failure = self._refusal
            with contextlib.suppress(RuntimeError):  # The GPU may be lost.
                self.monitor.abort()

    def current_stream(self) -> int:
        """Return the handle of the device's current stream; 0 on CPUs."""
        return torch._C._cuda_getCurrentRawStream(self._index) if self._cuda else 0

    # ------------------------------------------------------------------ what calls share

    def remember(self, key: Hashable, value: Any) -> None:
        """Put what the host has computed for a kind of call into :attr:`cache`.

        The oldest entries go when there are more than :data:`MOST_CACHED`.
        """
        self.cache[key] = value
        while len(self.cache) > MOST_CACHED:
            del self.cache[next(iter(self.cache))]

    def cached(self, key: Hashable, make: Callable[[], _Value]) -> _Value:
        """Return the value of ``make``, which is remembered under ``key``."""
        value: _Value | None = self.cache.get(key)
        if value is None:
            value = make()
            self.remember(key, value)
        return value

    @property
    def loads_together(self) -> bool:
        """Whether ranks wait for each other to load kernels: see :meth:`wait_for_loads`."""
        return self.max_blocks != MAX_BLOCKS and not INTERPRETED

    def wait_for_loads(self, operation: str, variant: Hashable) -> None:
        """Wait until all ranks have loaded the kernels of a call. Collective, once per ``variant``.

        CUDA loads a kernel only while none is running. If launches of several contexts are in
        flight, this rank may have to wait for one that waits for a peer, which in turn waits for
        this rank. Without ``max_blocks`` there are none.
        """
        if variant in self._loaded or not self.loads_together:
            return
        self.job.exchange(self.topology.pes, f"{operation}: its kernels are loaded")
        self._loaded.add(variant)

    # ------------------------------------------------------------------ before a call

    def check_fast(self) -> int | None:
        """Return the handle of the stream to launch on (0 on CPUs), or None if there is an
        obstacle.

        With an obstacle nothing has been launched, and :meth:`overcome` says or does what is left.
        If the current stream is not the last call's, it waits for that.
        """
        if self._refusal is not None:
            return self._stopped_by(Obstacle.REFUSED)
        if self.job.closed:
            return self._stopped_by(Obstacle.JOB_ENDED)
        if self._expired[0]:
            return self._stopped_by(Obstacle.EXPIRED)
        handle: int = self.order.handle
        if self._cuda:
            # The raw calls take a third of the time. CUDA is initialised already.
            if torch._C._cuda_getDevice() != self._index:
                return self._stopped_by(Obstacle.OTHER_DEVICE)
            current = torch._C._cuda_getCurrentRawStream(self._index)
            # CUDA's default stream, whose handle is 0, can't be captured, and asking takes longer
            # than the rest of this function.
            if current and torch._C._cuda_isCurrentStreamCapturing():
                return self._stopped_by(Obstacle.CAPTURING)
            if current != handle:
                if capture_of(handle):
                    return self._stopped_by(Obstacle.LAST_STREAM_CAPTURED)
                # In debug mode as well: the comparison launches nothing.
                handle = self.order.follow(torch.cuda.current_stream(self.device))
        if self.debug is True:
            return self._stopped_by(Obstacle.DEBUG)
        self.capturing = False
        return handle

    def _stopped_by(self, obstacle: Obstacle) -> int | None:
        self._obstacle = obstacle
        return None

    def find_obstacle(self, operation: str) -> Obstacle | None:
        """Return what stands in the way of a call, or None.

        Raises:
            ContextError, NotInitializedError, CollectiveTimeout: An obstacle that remains. It isn't
                compared with other ranks.
        """
        if self.check_fast() is not None:
            return None
        if self._obstacle in _PERMANENT:
            self.overcome(self._obstacle, operation)
        return self._obstacle

    def overcome(self, obstacle: Obstacle | None, operation: str) -> None:
        """Raise the error of an obstacle, or do what the call needs in spite of it.

        Raises:
            ContextError: The context refuses calls, is on another device, or follows a stream that
                is being captured.
            NotInitializedError: ``tdcoll.finalize()`` has ended the job.
            CollectiveTimeout: A wait has expired.
        """
        if obstacle is Obstacle.REFUSED:
            raise ContextError(f"{operation}: {self._refusal}")
        if obstacle is Obstacle.JOB_ENDED:
            raise NotInitializedError(f"{operation}: {self.job.why_closed}")
        if obstacle is Obstacle.EXPIRED:
            self.monitor.raise_if_expired()
        if obstacle is Obstacle.OTHER_DEVICE:
            raise ContextError(
                f"{operation}: the current device is cuda:{torch.cuda.current_device()}, and the "
                f"context is on {self.device}; call torch.cuda.set_device({self.device.index})"
            )
        if obstacle is Obstacle.LAST_STREAM_CAPTURED:
            raise ContextError(
                f"{operation}: the last eager call was on {self.order.stream}, which is being "
                f"captured now, and {torch.cuda.current_stream(self.device)} is not; make the call "
                "after the capture has ended"
            )
        self.capturing = obstacle is Obstacle.CAPTURING
        if self.capturing:
            self.order.follow_in_capture(torch.cuda.current_stream(self.device))
            self.captured = True
        self.calls.exact = not self.captured

    # ------------------------------------------------------------------ debug mode

    def compares(self, operation: str, facts: Mapping[str, Any]) -> bool:
        """Return whether the ranks compare the arguments of this call."""
        if self.debug == "first":
            return self._compared.is_new(operation, facts)
        return self.debug

    def compare(self, operation: str, facts: Mapping[str, Any], problem: Exception | None) -> None:
        """Raise on all ranks if the call is wrong on one of them, or differs. Collective.

        Args:
            facts: Values that must be the same on all ranks, by name.
            problem: The error of this rank's arguments, if they are wrong.
        """
        all_facts = {
            **facts,
            # Ranks that use two contexts in different orders are found by these.
            "context, by its offset in the symmetric heap": self.job.offset_of(self.inbox, "inbox"),
            "earlier calls on the context": self._number_compared,
        }
        compare(self.job, self.topology.pes, operation, all_facts, problem)
        self._number_compared += 1
        if self.debug == "first":
            self._compared.add(operation, facts)
