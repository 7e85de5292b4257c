# SPDX-License-Identifier: Apache-2.0
"""Every exception that tdcoll raises on purpose.

All of them derive from :class:`TdcollError`, so ``except tdcoll.TdcollError`` catches what the
library itself found wrong and nothing else. Bad argument *values* are plain ``ValueError`` and
``TypeError``, as everywhere in Python.
"""

from __future__ import annotations

__all__ = [
    "AlreadyInitializedError",
    "CollectiveTimeout",
    "ContextError",
    "HeapExhaustedError",
    "NotInitializedError",
    "NotSymmetricError",
    "RankMismatchError",
    "TdcollError",
]


class TdcollError(RuntimeError):
    """Base class of tdcoll's own errors."""


class NotInitializedError(TdcollError):
    """A call that needs a job came before ``tdcoll.initialize()`` or after ``tdcoll.finalize()``."""


class AlreadyInitializedError(TdcollError):
    """``tdcoll.initialize()`` was called again with other ranks or other settings."""


class HeapExhaustedError(TdcollError):
    """The symmetric heap has no room; the message says how much was asked, how much is free, what to raise."""


class NotSymmetricError(TdcollError, ValueError):
    """A tensor that must lie in the symmetric heap does not."""


class RankMismatchError(TdcollError):
    """Ranks called the same collective with arguments that must agree and do not. Raised on all of them."""


class ContextError(TdcollError):
    """A context used after close, on another stream or device, or over its capacity."""


class CollectiveTimeout(TdcollError):
    """A bounded wait inside a kernel expired: a peer did not signal in time.

    Attributes:
        rank: group rank that waited.
        peer: group rank that it waited for.
        signal: index of the signal in the context's row of signals.
        epoch: the call, counted from 1, in which the wait expired.
        expected: value that the signal had to reach.
        seen: value that it had.
        timeout_s: the deadline, in seconds.
    """

    def __init__(
        self, *, rank: int, peer: int, signal: int, epoch: int, expected: int, seen: int, timeout_s: float
    ) -> None:
        self.rank, self.peer, self.signal, self.epoch = rank, peer, signal, epoch
        self.expected, self.seen, self.timeout_s = expected, seen, timeout_s
        super().__init__(
            f"rank {rank} waited {timeout_s:g} s for peer {peer}: signal {signal} had to reach {expected} "
            f"in epoch {epoch} and is {seen}. The peer has died, hangs, did not make this call or made it with "
            "other arguments (TDCOLL_DEBUG=1 compares them). "
            "What was being exchanged is incomplete, and the context cannot be used any more: start the job again."
        )
