# SPDX-License-Identifier: Apache-2.0
"""The calls that a context remembers, to name the one in which a kernel waits. Needs neither torch nor triton.

A kernel knows the number of its epoch, or of its Lamport call (:mod:`tdcoll.primitives.lamport`), and no names. Each
call is therefore noted before its launches, which costs the host one ``list.append``; everything else is done when a
name is wanted, and by the thread of :mod:`tdcoll.runtime.watch`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

__all__ = ["Calls", "Made", "ranks_text"]

_KEPT = 1024
"""The last calls, whose names are kept."""


class Made(Protocol):
    """A kind of call: its name, and how many epochs and Lamport calls it takes on the device."""

    @property
    def operation(self) -> str: ...

    @property
    def counts(self) -> tuple[int, int]: ...


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
        add: note a call, before its launches: a :class:`Made`, or the name alone of one whose epochs are not known.
        exact: whether all epochs are those of noted calls. False once a CUDA graph has been captured, since the host
            doesn't see replays.
    """

    def __init__(self, ranks: Sequence[int], group: str | None) -> None:
        self.ranks, self.exact = ranks, True
        self._group = f"group {group}" if group is not None else ranks_text(ranks)
        self._log: list[Made | str] = []
        self._forgotten = [0, 0, 0]
        self.add: Callable[[Made | str], None] = self._log.append

    def forget(self) -> None:
        """Keep the last calls only, once there are many more. For one thread, the only one that asks for names."""
        n = len(self._log) - _KEPT
        if n < _KEPT:
            return
        for begin in range(0, n, _KEPT):
            self._count(self._log[begin : min(begin + _KEPT, n)], self._forgotten)
            time.sleep(0)  # those who make calls need not wait for Python's global lock
        del self._log[:n]

    @staticmethod
    def _count(log: Sequence[Made | str], counts: list[int]) -> None:
        counts[0] += len(log)
        for made in log:
            if not isinstance(made, str):
                counts[1] += made.counts[0]
                counts[2] += made.counts[1]

    def _exact(self, log: Sequence[Made | str]) -> bool:
        return self.exact and not any(isinstance(made, str) for made in log)

    def name_of(self, epoch: int, lamport: bool) -> str:
        """Name the call of an epoch, or of a Lamport call: ``all_reduce, call 4 of group 0``.

        If the number of the call isn't known, that of the epoch stands in its place; if the operation isn't, neither
        does that.
        """
        log, number = list(self._log), "Lamport call" if lamport else "epoch"
        call, done = self._forgotten[0], self._forgotten[1 + lamport]
        names = {made if isinstance(made, str) else made.operation for made in log}
        for made in log if self._exact(log) and epoch > done else ():
            call += 1
            done += made.counts[lamport]  # type: ignore[union-attr]
            if epoch <= done:
                return f"{made.operation}, call {call} of {self._group}"  # type: ignore[union-attr]
        what = f"{names.pop()}, " if len(names) == 1 else ""
        return f"{what}{number} {epoch} of {self._group}"

    def describe(self) -> str:
        """Say how many calls were made: ``group 0: 12 calls made, the last one all_reduce, up to epoch 14``."""
        log, counts = list(self._log), list(self._forgotten)
        if not log:
            return f"{self._group}: no call made"
        self._count(log, counts)
        last = log[-1] if isinstance(log[-1], str) else log[-1].operation
        text = f"{self._group}: {counts[0]} call{'s' if counts[0] > 1 else ''} made, the last one {last}"
        if self._exact(log):
            reached = zip(("epoch", "Lamport call"), counts[1:], strict=True)
            text += ", up to " + " and ".join(f"{number} {count}" for number, count in reached if count)
        return text
