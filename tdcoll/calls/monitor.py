# SPDX-License-Identifier: Apache-2.0
"""Bounded waits, host side: the deadline that kernels read and the record that they leave behind.

A kernel's ``wait_signal(..., monitor, ...)`` reads its deadline from words in device memory. When
it expires, the first wait to do so sets the *aborted* word, which ends every other wait on the same
monitor at once, and writes one record (rank, peer, signal, epoch, expected, seen) to pinned host
memory. The host can read that without a synchronisation, so looking at it before every call costs
next to nothing.

A wait that lasts for more than 134 ms leaves a *notice* behind the record, and another each 134 ms:
its peer and epoch, and how long it has lasted. It does so when it has read the clock and found time
left, so short waits execute the same instructions as without notices. There are 16 places for them,
so that thread blocks which wait for different peers usually don't overwrite each other's. The
thread of :mod:`tdcoll.runtime.watch` reads them: the wait goes on if its notice has changed a
moment ago.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

import torch

from tdcoll import runtime
from tdcoll.base import arguments
from tdcoll.base.call_log import CallLog
from tdcoll.base.errors import CollectiveTimeout, ContextError
from tdcoll.runtime import watch
from tdcoll.spec import constants as c

_TOLD = (c.RECORD_PEER, c.RECORD_SIGNAL)

_ALIVE_S = 0.8
"""A wait that has left no notice for so long is over."""


class WaitMonitor:
    """The deadline and the record of the bounded waits of some kernels. Local to one rank.

    Pass it to a kernel of :func:`tdcoll.jit` as the ``monitor`` of its waits, and call
    :meth:`check` before using what the kernel produced. (Kernels of ``triton.jit``, and tuples,
    take its :attr:`words`.) Every :class:`~tdcoll.CollectiveContext` has one.

    >>> monitor = tdcoll.WaitMonitor(timeout_s=5)
    >>> monitor.check()

    Args:
        timeout_s: deadline of each wait, seconds. Default: that of :func:`tdcoll.initialize`.
        rank: group rank to report. Default: the global rank.

    Raises:
        TypeError, ValueError: an argument is not as described.

    Attributes:
        words: int64 ``[4]`` on the device, which kernels get as ``monitor``.
    """

    def __add__(self, offset: Any) -> Any:
        raise TypeError(
            "a kernel that takes a tdcoll.WaitMonitor must be decorated with @tdcoll.jit, or pass its words"
        )

    def __init__(self, *, timeout_s: float | None = None, rank: int | None = None) -> None:
        self.job = runtime.current()
        """The job whose kernels it is for."""
        self.timeout_s = (
            self.job.timeout_s if timeout_s is None else arguments.seconds("timeout_s", timeout_s)
        )
        if rank is not None:
            arguments.whole("rank", rank, 0)
        device = self.job.device
        self._record = torch.zeros(
            c.RECORD_WORDS.value, dtype=torch.int64, pin_memory=device.type == "cuda"
        )
        self._host = self._record.numpy()
        valid = c.RECORD_VALID.value
        host: Any = self._host
        self.valid = memoryview(host)[valid : valid + 1]
        """``[1]``: 0 until a wait has expired. A call looks at it, in a third of numpy's time."""
        words = [0] * c.MONITOR_WORDS.value
        words[c.MONITOR_TIMEOUT_NS.value] = int(self.timeout_s * 1e9)
        words[c.MONITOR_RECORD.value] = self._record.data_ptr()
        self._rank = self.job.rank if rank is None else rank
        words[c.MONITOR_RANK.value] = self._rank
        self.words = torch.tensor(words, dtype=torch.int64, device=device)
        self._deadlines: dict[int, torch.Tensor] = {}
        """On a GPU: pinned words with the deadlines so far, which captured graphs may copy
        again."""
        self.reported = False
        """True once :class:`~tdcoll.CollectiveTimeout` has been raised for it."""
        self.failure: str | None = None
        """Why the host has ended the kernels' waits, if it has: what they were to exchange is
        incomplete."""
        self.expired_epochs: torch.Tensor | None = None
        """int64 ``[world]``: what peers tell if they give up while copies are queued; None if there
        can be none."""
        # Kernels write to this memory when a wait expires, even if nothing refers to it any more.
        self.job.kept_alive[id(self)] = self
        self.calls: CallLog | None = None
        """Those of the context whose monitor this is."""
        self._notices = self._host[c.RECORD_NOTICES.value :].reshape(2, c.NOTICES.value, 2)
        self._changed: dict[tuple[bool, int], tuple[list[int], float]] = {}
        """Each notice as it was seen last, and when it was first seen like this."""
        self.job.monitors[self.words.data_ptr()] = self
        watch.start(self.job)

    def set_timeout(self, timeout_s: float, stream: Any = None) -> None:
        """Change the deadline of the waits that begin behind the present work of a GPU's
        ``stream``, or from now on."""
        self.timeout_s = timeout_s
        nanoseconds = int(timeout_s * 1e9)
        place = c.MONITOR_TIMEOUT_NS.value
        if not self.words.is_cuda:
            self.words[place] = nanoseconds
            return
        if nanoseconds not in self._deadlines:
            self._deadlines[nanoseconds] = torch.tensor([nanoseconds]).pin_memory()
        with torch.cuda.stream(stream):
            self.words[place : place + 1].copy_(self._deadlines[nanoseconds], non_blocking=True)

    @property
    def kernel_argument(self) -> torch.Tensor:
        """The monitor's words, which a kernel of :func:`tdcoll.jit` gets in its place."""
        return self.words

    @property
    def expired(self) -> bool:
        """True once a wait has expired, as far as the host can see. No synchronisation."""
        return bool(self.valid[0])

    def abort(self) -> None:
        """End the waits of kernels that run, and all later ones, as if another had expired. From
        any thread.

        What the kernels were to exchange is incomplete then, of which there is no record: for a
        process that ends.
        """
        if not self.words.is_cuda:
            self.words[c.MONITOR_ABORTED.value] = 1
            return
        place = c.MONITOR_ABORTED.value
        one = torch.ones(1, dtype=torch.int64).pin_memory()
        # Beside the kernels, and by a copy: a kernel would wait for room where they hold all of it.
        stream = torch.cuda.Stream(self.words.device)
        with torch.cuda.stream(stream):
            self.words[place : place + 1].copy_(one, non_blocking=True)
        stream.synchronize()  # `one` lives until then

    def waits(self) -> Iterator[watch.PendingWait]:
        """Waits in kernels that go on, as the notices say. For one thread, which looks more often
        than they are left.

        Of waits that share a place, one at a time.
        """
        now = time.monotonic()
        for lamport, place, notice, peer, waited_s in self._told():
            before, since = self._changed.get((lamport, place), ([0, 0], now))
            if notice != before:
                since = now
                self._changed[lamport, place] = notice, now
            if any(notice) and now - since < _ALIVE_S:
                numbered = notice[1] != c.EXPIRED.value and peer != c.OWN_GRID.value
                yield watch.PendingWait(
                    peer if peer >= 0 else None, notice[1] if numbered else None, lamport, waited_s
                )

    def _told(self) -> Iterator[tuple[bool, int, list[int], int, float]]:
        """All notices: of a Lamport call?, their place, their words, the peer, and how long the
        wait had lasted."""
        for lamport, place in itertools.product((False, True), range(c.NOTICES.value)):
            notice = self._notices[int(lamport), place].tolist()
            peer, waited = divmod(notice[0], 1 << 32)
            yield lamport, place, notice, peer, (waited << c.NOTICE_SHIFT.value) / 1e9

    def _waited_for(self, epoch: int) -> set[int]:
        """Return the peers for which waits in this epoch or Lamport call lasted nearly until a
        deadline over 0.27 s."""
        least_s = self.timeout_s - 2 * (c.NOTICE_EVERY.value << c.NOTICE_SHIFT.value) / 1e9
        if least_s <= 0:
            return set()
        told = self._told()
        return {
            peer
            for *_, notice, peer, waited_s in told
            if peer >= 0 and notice[1] == epoch and waited_s >= least_s
        }

    @property
    def open(self) -> bool:
        """True until its context or the job is closed. Kernels may use it as long as that."""
        return not self.job.closed and id(self) in self.job.kept_alive

    def check(self) -> None:
        """Wait for the current stream, and raise if a wait in one of its kernels has expired.

        Raises:
            CollectiveTimeout: naming rank, peer, signal and epoch.
            ContextError: the monitor is of a context in which a call has failed after it had begun.
        """
        if self.words.is_cuda:
            torch.cuda.current_stream(self.words.device).synchronize()
        self.raise_if_wrong()

    def raise_if_wrong(self) -> None:
        """:meth:`check` of kernels that have ended.

        If a peer has given up while copies were queued, these may have overwritten an inbox that
        kernels of other algorithms have read since, and such kernels don't look themselves
        (:mod:`tdcoll.primitives.copies`). The context is of no more use then.
        """
        if self.expired_epochs is not None and not self.expired and self.failure is None:
            told = [
                (peer, word)
                for peer, word in enumerate(self.expired_epochs.tolist())
                if word and peer != self._rank
            ]
            if told:
                self._record_peer(*told[0])
                self.abort()
        self.raise_if_expired()

    def _record_peer(self, peer: int, word: int) -> None:
        """Leave the record that a kernel leaves if it finds that ``peer`` has given up, as its
        ``word`` says."""
        for place, value in (
            (c.RECORD_RANK, self._rank),
            (c.RECORD_PEER, peer),
            (c.RECORD_SIGNAL, -1),
            (c.RECORD_EPOCH, word - c.EXPIRED.value),
            (c.RECORD_EXPECTED, c.EXPIRED.value),
            (c.RECORD_SEEN, word),
            (c.RECORD_VALID, 1),
        ):
            self._host[place.value] = value

    def raise_if_expired(self) -> None:
        """As :meth:`check`, without waiting: a kernel that still runs may expire later."""
        if self.expired:
            self.job.failed = self.reported = True
            words = [int(word) for word in self._host]
            rank = words[c.RECORD_RANK.value]
            seen = words[c.RECORD_SEEN.value]
            if words[c.RECORD_PEER.value] == c.OWN_GRID.value:
                what = (
                    "in grid_barrier for other thread blocks of its launch: they don't call it, wait for another rank, "
                    "or don't fit on the GPU"
                )
                raise CollectiveTimeout(what, rank=rank, peer=rank, timeout_s=self.timeout_s)
            # -1: the kernel has not told its wait.
            peer, signal = (
                words[place.value] if words[place.value] >= 0 else None for place in _TOLD
            )
            if words[c.RECORD_EXPECTED.value] == c.EXPIRED.value:  # stores.no_peer_expired
                raise CollectiveTimeout(
                    rank=rank, peer=peer, epoch=seen - c.EXPIRED.value, timeout_s=self.timeout_s
                )
            raise CollectiveTimeout(
                rank=rank,
                peer=peer,
                signal=signal,
                epoch=words[c.RECORD_EPOCH.value],
                expected=words[c.RECORD_EXPECTED.value],
                seen=seen,
                timeout_s=self.timeout_s,
                others=tuple(sorted(self._waited_for(words[c.RECORD_EPOCH.value]) - {peer})),
            )
        if self.failure is not None:
            raise ContextError(self.failure)


def check() -> None:
    """Wait for the current stream, and raise if a wait has expired in a kernel of this job on this
    rank.

    It looks at all contexts and monitors, tdcoll's own included. Without it, the next call of the
    kind raises, or ``finalize()``.

    >>> y = tdcoll.all_reduce(torch.ones(4))
    >>> tdcoll.check()

    Raises:
        CollectiveTimeout: naming rank, peer, signal and epoch.
        ContextError: a call has failed after it had begun; those of its context that still ran are
            incomplete.
        NotInitializedError: before :func:`tdcoll.initialize`.
    """
    job = runtime.current()
    if job.device.type == "cuda":
        torch.cuda.current_stream(job.device).synchronize()
    for monitor in job.living_monitors():
        monitor.raise_if_wrong()
