# SPDX-License-Identifier: Apache-2.0
"""The calls that a context remembers, to name the one in which a kernel waits. Needs neither torch nor triton.

A kernel knows the number of its epoch, or of its Lamport call (:mod:`tdcoll.primitives.lamport`), and no names. Each
call is therefore noted before its launches, which costs the host a tenth of a microsecond; everything else is done when
a name is wanted, by the thread of :mod:`tdcoll.runtime.watch`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

MOST = 2048
"""When a context remembers so many calls, it forgets the older half."""


class Made(NamedTuple):
    """A kind of call. :func:`kind_of` returns the same object for the same kind, because a context keeps many.

    Attributes:
        epochs, lamport: how many epochs and Lamport calls it takes on the device.
        even: the epochs are the next even ones (:mod:`tdcoll.primitives.copies`).
    """

    operation: str
    epochs: int = 1
    lamport: int = 0
    even: bool = False


kind_of = functools.cache(Made)


class _Progress(NamedTuple):
    """How many calls there were, and the last epoch and Lamport call, which are ``known`` if those of all calls are."""

    calls: int = 0
    epoch: int = 0
    lamport: int = 0
    known: bool = True


def _after(progress: _Progress, log: Sequence[Made | str]) -> _Progress:
    calls, epoch, lamport, known = progress
    for call in log:
        if isinstance(call, str):
            known = False
        else:
            _, epochs, more, even = call
            epoch = 2 * (epoch // 2 + epochs) if even else epoch + epochs
            lamport += more
    return _Progress(calls + len(log), epoch, lamport, known)


def ranks_text(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0, 2``, ``ranks 0-7``."""
    several = len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1))
    listed = f"{ranks[0]}-{ranks[-1]}" if several else ", ".join(map(str, ranks))
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}"


class Calls:
    """The calls of a context.

    Args:
        ranks: global ranks of its group, in the group's order.
        group: the name of the process group in ``torch.distributed``, if it has one.

    Attributes:
        exact: whether all epochs are those of noted calls; not after a capture, because replays aren't seen.
        group: its name, for people.
        log: the calls that are remembered, each appended before its launches: a :class:`Made`, or the name
            alone if its epochs are not known.
    """

    def __init__(self, ranks: Sequence[int], group: str | None) -> None:
        self.ranks, self.exact = ranks, True
        self.group = f"group {group}" if group is not None else ranks_text(ranks)
        self.log: list[Made | str] = []
        # Changed together, because another thread asks for names.
        self._kept = _Progress(), self.log

    def forget(self) -> None:
        """Forget the older half of the calls, but for their number. For the thread that makes calls."""
        half = len(self.log) // 2
        progress, self.log = _after(self._kept[0], self.log[:half]), self.log[half:]
        self._kept = progress, self.log

    def name_of(self, epoch: int, lamport: bool) -> str:
        """Name the call of an epoch, or of a Lamport call: ``all_reduce, call 4 of group 0``.

        If the number of the call isn't known, that of the epoch stands in its place, perhaps without the operation.
        """
        progress, log = self._kept
        log, number = list(log), "Lamport call" if lamport else "epoch"
        names = {call if isinstance(call, str) else call.operation for call in log}
        if self.exact and _after(progress, log).known and epoch > (progress.lamport if lamport else progress.epoch):
            for call in log:
                progress = _after(progress, [call])
                if epoch <= (progress.lamport if lamport else progress.epoch):
                    return f"{call.operation}, call {progress.calls} of {self.group}"  # type: ignore[union-attr]
        what = f"{names.pop()}, " if len(names) == 1 else ""
        return f"{what}{number} {epoch} of {self.group}"

    def describe(self) -> str:
        """Say how many calls were made: ``group 0: 12 calls made, the last one all_reduce, up to epoch 14``."""
        before, log = self._kept
        log = list(log)
        if not log:
            return f"{self.group}: no call made"
        calls, epoch, lamport, known = _after(before, log)
        last = log[-1] if isinstance(log[-1], str) else log[-1].operation
        text = f"{self.group}: {calls} call{'s' if calls > 1 else ''} made, the last one {last}"
        if self.exact and known:
            progress = ("epoch", epoch), ("Lamport call", lamport)
            text += ", up to " + " and ".join(f"{number} {count}" for number, count in progress if count)
        return text
