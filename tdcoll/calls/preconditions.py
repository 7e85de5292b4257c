# SPDX-License-Identifier: Apache-2.0
"""Preconditions: whether a call may be made here and now.

Each rule stands once, in :meth:`Preconditions.enter`, which runs before every call and answers yes or no: that is most
of what a call costs the host. :meth:`Preconditions.begin` calls it, too, and raises the error or does what is left.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import torch

from tdcoll.base.call_log import MOST, Calls, Made
from tdcoll.base.capture import capture_of
from tdcoll.base.errors import ContextError, NotInitializedError, RankMismatchError
from tdcoll.calls.monitor import WaitMonitor
from tdcoll.runtime import Runtime
from tdcoll.runtime.control import require_equal
from tdcoll.runtime.topology import Topology

_REFUSED, _JOB_ENDED, _EXPIRED = "refused", "job ended", "expired"
_ELSEWHERE, _CAPTURING, _CAPTURED, _DEBUG = "elsewhere", "capturing", "captured", "debug"
_FOR_GOOD = (_REFUSED, _JOB_ENDED, _EXPIRED)
"""Obstacles of which a rank does not tell the others in debug mode: they may be past this call, or gone."""


Debug = bool | Literal["first"]
"""The calls whose arguments are compared: all, none, or the first of each kind (:class:`Compared`)."""

_MOST_COMPARED = 2048


def debugging(otherwise: Debug) -> Debug:
    """Return what ``TDCOLL_DEBUG`` asks for, or ``otherwise`` if it is not set."""
    asked = os.environ.get("TDCOLL_DEBUG")
    return otherwise if not asked else "first" if asked == "first" else asked != "0"


class Compared:
    """The kinds of calls whose arguments ranks have compared, which is the same on all of them: a kind is all that the
    ranks have to agree on. If one passes what it has passed before, and another something new, the latter waits."""

    def __init__(self) -> None:
        self._kinds: set[str] = set()

    @contextlib.contextmanager
    def first(self, operation: str, facts: Mapping[str, Any]) -> Iterator[bool]:
        """Tell whether a call is the first of its kind; the comparison is the body."""
        kind = f"{operation} {shown(facts)}"
        new = kind not in self._kinds and len(self._kinds) < _MOST_COMPARED
        yield new
        if new:
            self._kinds.add(kind)


def shown(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return facts as ranks exchange them. The caller may have passed any object."""
    plain = (bool, int, float, str, type(None))
    return {name: fact if isinstance(fact, plain) else str(fact) for name, fact in facts.items()}


def compare(
    job: Runtime, ranks: Sequence[int], operation: str, facts: Mapping[str, Any], problem: Exception | None
) -> None:
    """Raise on every rank if the arguments of one are wrong, or if they differ. Collective.

    Raises:
        RankMismatchError: ``facts`` differ, or another rank has a problem.
        TypeError, ValueError, TdcollError: ``problem``.
    """
    what = f"{operation} arguments"
    answers = job.exchange(ranks, what, (str(problem) if problem else None, shown(facts)))
    if problem is not None:
        raise problem
    for rank, (other, _) in enumerate(answers):
        if other is not None:
            raise RankMismatchError(f"{operation}: rank {rank} cannot make this call: {other}")
    require_equal([theirs for _, theirs in answers], range(len(ranks)), what)


class Lane:
    """Where the launches of contexts go that come one after the other: a GPU's stream, which may change from call to
    call.

    Attributes:
        stream: of the last eager call; None on CPUs.
        handle: of that stream.
        captured: the capture and the stream of the last call that was captured.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream: Any = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self.handle = 0 if self.stream is None else self.stream.cuda_stream
        self.captured: tuple[int, Any] | None = None

    def follow(self, stream: Any) -> int:
        """Let the stream wait for the last eager call, and be that of the next one; return its handle."""
        stream.wait_stream(self.stream)
        self.stream, self.handle = stream, stream.cuda_stream
        return self.handle


class Preconditions:
    """The checks that a context's calls have to pass.

    Args:
        lane: which the context shares with others; None for one of its own.
        debug: compare the ranks' arguments, see :data:`Debug`. None: as ``TDCOLL_DEBUG`` says; unless it is set, of all
            calls in the simulator, and of none on GPUs.
    """

    def __init__(
        self, job: Runtime, topology: Topology, monitor: WaitMonitor, debug: Debug | None, lane: Lane | None = None
    ) -> None:
        self.job, self.topology = job, topology
        self.monitor = monitor
        """The :class:`~tdcoll.WaitMonitor` of the kernels that the context's calls launch."""
        self.device = job.device
        """Where tensors of calls must be."""
        self.debug: Debug = debugging(job.simulated) if debug is None else debug if debug == "first" else bool(debug)
        self._compared = Compared()
        self.inbox: torch.Tensor
        """Of the context; where it lies in the symmetric heap says which context it is."""
        self.capturing = False
        """Whether the last call was made while a CUDA graph was being captured."""
        self.captured = False
        """Whether a call was made while a CUDA graph was being captured: then a graph may still use the memory."""
        self._expired = monitor.valid
        self.calls: Calls = monitor.calls if monitor.calls is not None else Calls(topology.pes, None)
        """The calls that the context remembers; see :meth:`noted`."""
        self._refusal: str | None = None
        self._obstacle = ""
        self._calls = 0
        self._cuda = self.device.type == "cuda"
        self._index = self.device.index if self._cuda else 0
        self.lane = Lane(self.device) if lane is None else lane

    def check(self) -> None:
        """Wait for the context's last eager call, and raise if a wait in one of its kernels has expired.

        The host doesn't see replays of CUDA graphs: synchronise their stream first.

        Raises:
            CollectiveTimeout: naming rank, peer, signal and epoch.
            ContextError: a call has failed after it had begun, which has ended those that still ran.
        """
        stream = self.lane.stream
        if stream is not None:
            stream.synchronize()
        with torch.cuda.stream(stream):  # which has nothing to do, unlike the caller's current one
            self.monitor.raise_if_wrong()

    def set_timeout(self, timeout_s: float) -> None:
        """Change the deadline of the waits of later calls, behind the context's last eager one."""
        self.monitor.set_timeout(timeout_s, self.lane.stream)

    def noted(self, call: Made | str) -> None:
        """Note a call, before it launches, by its kind or, if its epochs are not known, by its name."""
        log = self.calls.log
        log.append(call)
        if len(log) >= MOST:
            self.calls.forget()

    def refuse(self, why: str) -> None:
        """Every call from now on is an error that says ``why``."""
        self._refusal = why

    def begin(
        self, operation: str, agree: Mapping[str, Any] = MappingProxyType({}), prepare: Callable[[], Any] = lambda: None
    ) -> Any:
        """Check whether a call is allowed here and now, as every collective does before it launches.

        Args:
            agree: what must be the same on all ranks, by name; compared in debug mode.
            prepare: raises if the other arguments are wrong on this rank; else returns what is to be launched.

        Returns:
            What ``prepare`` returned.

        Raises:
            ContextError: closed, or on another device.
            CollectiveTimeout: a wait has expired.
            NotInitializedError: after ``tdcoll.finalize()``.
            RankMismatchError: (debug) ranks disagree, or another rank's arguments are wrong; raised on all of them.
        """
        obstacle = self._obstacle if self.enter() is None else None
        if obstacle in _FOR_GOOD:
            self._overcome(obstacle, operation)
        if self.debug is True:
            return self._agree(operation, agree, prepare, obstacle)
        if self.debug:
            with self._compared.first(operation, agree) as new:
                if new:
                    return self._agree(operation, agree, prepare, obstacle)
        self._overcome(obstacle, operation)
        return prepare()

    @contextlib.contextmanager
    def calling(
        self,
        operation: str,
        agree: Mapping[str, Any] = MappingProxyType({}),
        prepare: Callable[[], Any] = lambda: None,
        alike: tuple[type[BaseException], ...] = (),
    ) -> Iterator[Any]:
        """:meth:`begin`, and whatever the call launches as the body: if it fails, the context does (:meth:`fail`).

        Args:
            alike: errors of the body that all ranks raise, after the same launches.
        """
        prepared = self.begin(operation, agree, prepare)
        try:
            yield prepared
        except alike:
            raise
        except BaseException as error:
            self.fail(operation, error)
            raise

    def fail(self, operation: str, error: BaseException) -> None:
        """Refuse every later call: ``operation`` ended with ``error`` when it might have launched some of its kernels.

        This rank may be epochs behind the others. Kernels of the context do nothing from now on, also those of graphs
        that are replayed, so the peers get a timeout in place of wrong results. Nothing collective is tried any more.
        """
        if self._refusal is None and not self.monitor.expired:  # whose error every later call raises
            self._refusal = (
                f"an earlier {operation} ended with {type(error).__name__} after it had begun, so this rank may be out "
                "of step with the others, which get a timeout; end the job"
            )
            self.job.failed = True
            if not self.capturing:  # nothing has been launched then
                self.monitor.failure = self._refusal
                with contextlib.suppress(RuntimeError):  # of a GPU that is lost
                    self.monitor.abort()

    def current_stream(self) -> int:
        """Handle of the device's current stream; 0 on CPUs."""
        return torch._C._cuda_getCurrentRawStream(self._index) if self._cuda else 0

    def enter(self) -> int | None:
        """:meth:`begin` for a call that differs from an earlier one in its addresses alone, in less time.

        Returns:
            The handle of the stream to launch on (0 on CPUs); None where :meth:`begin` has something to do or to say,
            and then nothing has been launched: the context refuses calls, a wait has expired, debug mode, another
            device, a CUDA graph that is being captured. On another stream than the last call's, it waits for that.
        """
        # The rules stand here only; `begin` asks here, too, and then does or says what is left in `_obstacle`.
        if self._refusal is not None:
            return self._stopped_by(_REFUSED)
        if self.job.closed:
            return self._stopped_by(_JOB_ENDED)
        if self._expired[0]:
            return self._stopped_by(_EXPIRED)
        handle: int = self.lane.handle
        if self._cuda:
            # The raw calls: CUDA runs already, and they take a third of the time.
            if torch._C._cuda_getDevice() != self._index:
                return self._stopped_by(_ELSEWHERE)
            current = torch._C._cuda_getCurrentRawStream(self._index)
            # CUDA's default stream, whose handle is 0, cannot be captured; asking takes longer than the rest of this.
            if current and torch._C._cuda_isCurrentStreamCapturing():
                return self._stopped_by(_CAPTURING)
            if current != handle:
                if capture_of(handle):
                    return self._stopped_by(_CAPTURED)
                handle = self.lane.follow(torch.cuda.current_stream(self.device))  # also for debug mode
        if self.debug is True:
            return self._stopped_by(_DEBUG)
        self.capturing = False
        return handle

    def _stopped_by(self, obstacle: str) -> int | None:
        self._obstacle = obstacle
        return None

    def _overcome(self, obstacle: str | None, operation: str) -> None:
        """Raise the error that says what was in the way of :meth:`enter`, or do what the call needs in spite of it."""
        if obstacle == _REFUSED:
            raise ContextError(f"{operation}: {self._refusal}")
        if obstacle == _JOB_ENDED:
            raise NotInitializedError(f"{operation}: {self.job.why_closed}")
        if obstacle == _EXPIRED:
            self.monitor.raise_if_expired()
        if obstacle == _ELSEWHERE:
            raise ContextError(
                f"{operation}: the current device is cuda:{torch.cuda.current_device()}, and the context is on "
                f"{self.device}; call torch.cuda.set_device({self.device.index})"
            )
        if obstacle == _CAPTURED:
            raise ContextError(
                f"{operation}: the last eager call was on {self.lane.stream}, which is being captured now, and "
                f"{torch.cuda.current_stream(self.device)} is not; make the call after the capture has ended"
            )
        self.capturing = obstacle == _CAPTURING
        if self.capturing:
            self._follow_in_capture()
        self.captured = self.captured or self.capturing
        self.calls.exact = not self.captured

    def _agree(self, operation: str, agree: Mapping[str, Any], prepare: Callable[[], Any], obstacle: str | None) -> Any:
        """The checks of a call in debug mode: what is wrong on one rank is an error on all."""
        problem: Exception | None = None
        prepared = None
        try:
            self._overcome(obstacle, operation)
            prepared = prepare()
        except Exception as error:  # memory that is not there, for instance
            problem = error
        facts = {
            **agree,
            # Two contexts used in different orders show as well.
            "context, by its offset in the symmetric heap": self.job.offset_of(self.inbox, "inbox"),
            "earlier calls on the context": self._calls,
        }
        compare(self.job, self.topology.pes, operation, facts, problem)
        self._calls += 1
        return prepared

    def _follow_in_capture(self) -> None:
        """Order a call that is captured after the last one of the same capture, if that was on another stream."""
        stream, last = torch.cuda.current_stream(self.device), self.lane.captured
        capture = capture_of(stream.cuda_stream)
        if last is not None and last[0] == capture and last[1] != stream:
            stream.wait_stream(last[1])
        self.lane.captured = capture, stream
