# SPDX-License-Identifier: Apache-2.0
"""The calls that a context remembers, to name the one in which a kernel waits.

A kernel knows the number of its epoch, or of its Lamport call (:mod:`tdcoll.primitives.lamport`),
but no names. Each call is therefore noted before its launches, which costs the host a tenth of a
microsecond. Everything else is done when a name is wanted, by the thread of
:mod:`tdcoll.runtime.watch`. This module needs neither torch nor triton.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

MOST_CALLS = 2048
"""When a context remembers so many calls, it forgets the older half."""


class CallRecord(NamedTuple):
    """A kind of call, as a context notes it. :func:`record_of` returns one object for each kind.

    Attributes:
        operation: The operation's name.
        epochs: Epochs that it takes on the device.
        lamport: Lamport calls that it takes on the device.
        even: Its epochs are the next even ones (:mod:`tdcoll.primitives.copies`).
    """

    operation: str
    epochs: int = 1
    lamport: int = 0
    even: bool = False


record_of = functools.cache(CallRecord)
"""Return the :class:`CallRecord` with these fields: the same object for the same fields, because a
context keeps many."""


class _Progress(NamedTuple):
    """The number of calls so far, and the last epoch and Lamport call.

    ``known`` is False if the epochs of some call are unknown.
    """

    calls: int = 0
    epoch: int = 0
    lamport: int = 0
    known: bool = True


def _after(progress: _Progress, log: Sequence[CallRecord | str]) -> _Progress:
    """Return the progress after more calls."""
    calls, epoch, lamport, known = progress
    for call in log:
        if isinstance(call, str):
            known = False
            continue
        if call.even:
            epoch = 2 * (epoch // 2 + call.epochs)
        else:
            epoch += call.epochs
        lamport += call.lamport
    return _Progress(calls + len(log), epoch, lamport, known)


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks as text: ``rank 3``, ``ranks 0, 2``, ``ranks 0-7``."""
    consecutive = list(ranks) == list(range(ranks[0], ranks[-1] + 1))
    if len(ranks) > 2 and consecutive:
        listed = f"{ranks[0]}-{ranks[-1]}"
    else:
        listed = ", ".join(map(str, ranks))
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}"


class CallLog:
    """The calls of a context.

    Args:
        ranks: Global ranks of the context's group, in the group's order.
        group: The name of the process group in ``torch.distributed``, if it has one.

    Attributes:
        exact: Whether all epochs are those of noted calls. False after a capture, because the host
            doesn't see replays.
        group: The group's name, for people.
        log: The remembered calls, each appended before its launches: a :class:`CallRecord`, or the
            operation's name if its epochs are unknown.
    """

    def __init__(self, ranks: Sequence[int], group: str | None) -> None:
        self.ranks = ranks
        self.exact = True
        self.group = f"group {group}" if group is not None else ranks_text(ranks)
        self.log: list[CallRecord | str] = []
        # One attribute, because another thread reads the two together.
        self._state = _Progress(), self.log

    def forget_older(self) -> None:
        """Forget the older half of the calls, except their number. For the thread that makes
        calls."""
        half = len(self.log) // 2
        progress = _after(self._state[0], self.log[:half])
        self.log = self.log[half:]
        self._state = progress, self.log

    def name_of(self, epoch: int, lamport: bool) -> str:
        """Name the call of an epoch, or of a Lamport call: ``all_reduce, call 4 of group 0``.

        If the number of the call is unknown, the epoch stands there instead, perhaps without the
        operation.
        """
        progress, shared_log = self._state
        log = list(shared_log)
        last = _after(progress, log)
        last_number = last.lamport if lamport else last.epoch
        first_number = progress.lamport if lamport else progress.epoch
        if self.exact and last.known and first_number < epoch <= last_number:
            for call in log:
                progress = _after(progress, [call])
                if epoch <= (progress.lamport if lamport else progress.epoch):
                    assert isinstance(call, CallRecord)
                    return f"{call.operation}, call {progress.calls} of {self.group}"
        names = {call if isinstance(call, str) else call.operation for call in log}
        number = "Lamport call" if lamport else "epoch"
        place = f"{number} {epoch} of {self.group}"
        return f"{names.pop()}, {place}" if len(names) == 1 else place

    def describe(self) -> str:
        """Describe the calls: ``group 0: 12 calls made, the last one all_reduce, up to epoch
        14``."""
        before, shared_log = self._state
        log = list(shared_log)
        if not log:
            return f"{self.group}: no call made"
        progress = _after(before, log)
        last = log[-1] if isinstance(log[-1], str) else log[-1].operation
        plural = "s" if progress.calls > 1 else ""
        text = f"{self.group}: {progress.calls} call{plural} made, the last one {last}"
        if not (self.exact and progress.known):
            return text
        numbers = []
        if progress.epoch:
            numbers.append(f"epoch {progress.epoch}")
        if progress.lamport:
            numbers.append(f"Lamport call {progress.lamport}")
        return text + ", up to " + " and ".join(numbers)
