# SPDX-License-Identifier: Apache-2.0
"""Long waits, said aloud: a thread that logs them, and answers ``python -m tdcoll hang``.

Kernels that wait leave notices in memory of the host (:mod:`tdcoll.calls.monitor`). One daemon
thread of the process looks at those of all monitors of its job twice a second. It makes no call of
CUDA, so it goes on while the main thread waits for the GPU. (A thread that holds Python's global
lock keeps it from running, for example one that launches while the GPU's queue of launches is
full.) The thread starts when the process begins to join a job, and ends with
:func:`tdcoll.finalize`, or when joining fails; a simulated :class:`~tdcoll.testing.World` has none, and a forked child
begins without one.

Those who ask come to a socket in Linux's abstract namespace, whose name holds user, process and PID
namespace: no file is left behind, however a process ends. Both ends check that the other is the
same user, or root. ``SIGUSR1`` has the thread log the same report, unless the process has a handler
for that signal. The handler is faulthandler's, which doesn't wait for the interpreter: it writes to
a pipe, and the thread reads that.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import re
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton

from tdcoll import runtime
from tdcoll.base.call_log import ranks_text
from tdcoll.base.hang import address, user_of

_log = logging.getLogger("tdcoll")

_PERIOD_S = 0.5
_FIRST_S = 10.0
_SECOND_S = 60.0
_FRAMES = 4
"""Innermost frames of the main thread's stack that a report has: the caller's own, if there are
any."""
_LIBRARIES = tuple(
    f"{Path(file).parent}{os.sep}"
    for file in (runtime.__path__[0], torch.__file__, triton.__file__)
)


class PendingWait(NamedTuple):
    """A wait that goes on, for a rank of the group, if the kernel has named one. ``epoch`` is what
    the signal has to reach, or the number of a Lamport call; None if the peer has given up, or in a
    barrier of the grid."""

    peer: int | None
    epoch: int | None
    lamport: bool
    waited_s: float


def lines_at(timeout_s: float) -> list[float]:
    """After how many seconds a wait with this deadline is logged."""
    return [min(_FIRST_S, timeout_s / 3), *([_SECOND_S] if timeout_s > _SECOND_S else [])]


def _seconds(waited_s: float) -> str:
    return f"{waited_s:.0f} s" if waited_s >= 3 else f"{waited_s:.1f} s"


def _described(monitor: Any, waits: Sequence[PendingWait]) -> str:
    """``all_reduce, call 4 of group 0, has waited 60 s for rank 2``: waits of one launch with this
    WaitMonitor."""
    longest = max(waits, key=lambda wait: wait.waited_s)
    calls = monitor.calls
    peers = sorted({wait.peer for wait in waits if wait.peer is not None})
    if calls is not None:
        peers = sorted(calls.ranks[peer] if peer < len(calls.ranks) else peer for peer in peers)
    if longest.epoch is None:
        what = f"a kernel{'' if calls is None else f' of {calls.group}'} has waited {_seconds(longest.waited_s)}"
        if not peers:
            return f"{what} in a barrier of its grid"
        return f"{what}: {ranks_text(peers)} {'has' if len(peers) == 1 else 'have'} given up"
    whom = ranks_text(peers) if peers else "a rank that the kernel doesn't name"
    if calls is None:
        return f"a kernel has waited {_seconds(longest.waited_s)} for {whom}, whose signal has to reach {longest.epoch}"
    what = calls.name_of(longest.epoch, longest.lamport)
    return f"{what}, has waited {_seconds(longest.waited_s)} for {whom}"


def _by_launch(monitor: Any) -> dict[Hashable, list[PendingWait]]:
    found: dict[Hashable, list[PendingWait]] = {}
    for wait in monitor.waits():
        in_barrier = wait.epoch is None and wait.peer is None
        found.setdefault((wait.epoch, wait.lamport, in_barrier), []).append(wait)
    return found


def _exchanges(job: runtime.Runtime | Joining) -> Iterator[tuple[Hashable, float, float, str]]:
    """Yield the host's waits for values of other ranks: a key, the deadline, how long each has
    lasted, in words."""
    for begin, tag, ranks, timeout_s in list(job.exchanging.values()):
        waited_s = time.monotonic() - begin
        what = f"'{tag}', which {ranks_text(ranks)} make together, has waited {_seconds(waited_s)}"
        yield (tag, begin), timeout_s, waited_s, what


@dataclass
class Joining:
    """A rank that has no job yet, as far as its waits are concerned."""

    rank: int
    world_size: int
    exchanging: dict[int, Any] = field(default_factory=dict)

    def living_monitors(self) -> tuple[()]:
        return ()


class _Watch:
    """The thread of a job. It alone changes what is here, except for ``ending`` and ``job``, which
    is first one that the process joins."""

    def __init__(self, job: runtime.Runtime | Joining) -> None:
        self.job = job
        self.ending = False
        self._said: dict[Hashable, int] = {}
        """How many lines there were about each wait that goes on."""
        self._listener: socket.socket | None = socket.socket(socket.AF_UNIX)
        try:
            self._listener.bind(address(os.getpid()))
            self._listener.listen()
        except OSError as error:  # another process has that name
            _log.debug("nobody can ask this rank what it waits for: %s", error)
            self._listener.close()
            self._listener = None
        self._wake, self._waker = os.pipe()
        self._thread = threading.Thread(target=self._run, name="tdcoll-watch", daemon=True)
        self._thread.start()

    def end(self) -> None:
        self.ending = True
        with contextlib.suppress(OSError):
            os.write(self._waker, b"x")
        if self._thread is not threading.current_thread():
            self._thread.join(2)

    def close(self) -> None:
        for descriptor in (self._wake, self._waker):
            os.close(descriptor)
        if self._listener is not None:
            self._listener.close()

    def _run(self) -> None:
        signalled = _signals()
        with selectors.DefaultSelector() as selector:
            for source in (self._wake, signalled, self._listener):
                if source is not None:
                    selector.register(source, selectors.EVENT_READ)
            while not self.ending:
                ready = [key.fileobj for key, _ in selector.select(_PERIOD_S)]
                try:
                    self._look()
                    if signalled is not None and signalled in ready:
                        _drain(signalled)
                        report = self._report()
                        _log.warning("%s", "\n  ".join([report["rank"], *report["lines"]]))
                    if self._listener is not None and self._listener in ready:
                        self._answer(self._listener)
                except Exception:
                    _log.debug("looking for long waits has failed", exc_info=True)
        self.close()

    def _open(self) -> list[Any]:
        return [monitor for monitor in self.job.living_monitors() if monitor.open]

    def _look(self) -> None:
        """Log what has become long since the last look."""
        said_now: dict[Any, int] = {}
        found = list(_exchanges(self.job))
        for monitor in self._open():
            for launch, waits in _by_launch(monitor).items():
                longest = max(wait.waited_s for wait in waits)
                found.append(
                    ((id(monitor), launch), monitor.timeout_s, longest, _described(monitor, waits))
                )
        for key, timeout_s, waited_s, what in found:
            due = sum(waited_s >= at for at in lines_at(timeout_s))
            said = self._said.get(key, 0)
            if due > said:
                _log.warning("rank %d: %s", self.job.rank, what)
            said_now[key] = max(due, said)
        self._said = said_now

    def _report(self) -> dict[str, Any]:
        """Return what to tell those who ask: ``rank``, a line; ``waits`` and ``lines``, of which
        each wait is one."""
        waits = list[str]()
        lines = list[str]()
        for monitor in self._open():
            mine = []
            for of_launch in _by_launch(monitor).values():
                waits.append(_described(monitor, of_launch))
                _, epoch, lamport, _ = of_launch[0]
                # a kernel of the user's may count otherwise
                known = epoch is not None and monitor.calls is not None
                number = f"in {'Lamport call' if lamport else 'epoch'} {epoch}: " if known else ""
                mine.append(number + waits[-1])
            if monitor.expired:
                mine.append("a wait has expired")
            if monitor.calls is not None:
                lines.append("; ".join([monitor.calls.describe(), *(mine or ["no wait"])]))
            else:
                lines += mine
        exchanges = [what for *_, what in _exchanges(self.job)]
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        stack = traceback.extract_stack(frame) if frame is not None else []
        stack = [at for at in stack if not at.filename.startswith(_LIBRARIES)] or stack
        where = [
            f"main thread: {at.filename}:{at.lineno} in {at.name}"
            for at in reversed(stack[-_FRAMES:])
        ]
        rank = f"rank {self.job.rank} of {self.job.world_size}"
        return {"rank": rank, "waits": waits + exchanges, "lines": lines + exchanges + where}

    def _answer(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(1)
            if user_of(connection) in (os.geteuid(), 0):
                connection.sendall(json.dumps(self._report()).encode())


_current: _Watch | None = None
_starting = threading.Lock()
_pipe: tuple[int, int] | None = None
"""Where faulthandler writes when the signal comes: for the life of the process, as it may come at
any time."""


def _signals() -> int | None:
    """Return what becomes readable when ``SIGUSR1`` comes; None if the process has a handler of its
    own."""
    global _pipe
    if _pipe is None:
        with open("/proc/self/status", encoding="ascii") as status:
            masks = dict(re.findall(r"^(SigIgn|SigCgt):\s*(\w+)", status.read(), re.MULTILINE))
        if any(int(mask, 16) >> (signal.SIGUSR1 - 1) & 1 for mask in masks.values()):
            return None
        _pipe = os.pipe()
        for end in _pipe:
            os.set_blocking(end, False)
        faulthandler.register(signal.SIGUSR1, _pipe[1], all_threads=False)
    return _pipe[0]


def _drain(descriptor: int) -> None:
    with contextlib.suppress(BlockingIOError):
        while os.read(descriptor, 1 << 16):
            pass


def start(job: runtime.Runtime | Joining) -> None:
    """Look at the waits of a job from now on, until :func:`stop`."""
    global _current
    with _starting:
        if runtime._resolver is not None:
            return
        if _current is None:
            _current = _Watch(job)
        else:
            _current.job = job


@contextlib.contextmanager
def joining(rank: int, world_size: int, where: str, timeout_s: float) -> Iterator[None]:
    """Let those who ask see that this process joins a job. If joining fails, the thread ends, and
    with it the answers.

    Args:
        where: the ranks meet, in words.
    """
    job = Joining(rank, world_size)
    if world_size > 1:
        waits = (time.monotonic(), f"initialize, {where}", range(world_size), timeout_s)
        job.exchanging[0] = waits
    start(job)
    try:
        yield
    except BaseException:
        stop()
        raise


def stop() -> None:
    """End the thread, if there is one."""
    global _current
    with _starting:
        if _current is not None:
            _current.end()
        _current = None


def _in_child() -> None:
    """Leave the parent's sockets and pipes to it: a forked child has got them, and not the
    thread."""
    global _current, _starting, _pipe
    if _current is not None:
        _current.close()
    # the signal's handler stays, and a later thread of the child reads what it writes
    if _pipe is not None:
        ends = os.pipe()
        for new, old in zip(ends, _pipe, strict=True):
            os.dup2(new, old, inheritable=False)
            os.close(new)
            os.set_blocking(old, False)
    _current = None
    _starting = threading.Lock()


os.register_at_fork(after_in_child=_in_child)
