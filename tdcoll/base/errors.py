# SPDX-License-Identifier: Apache-2.0
"""Every exception that tdcoll raises on purpose.

All of them derive from :class:`TdcollError`, so ``except tdcoll.TdcollError`` catches what the
library itself found wrong and nothing else. Bad argument *values* are plain ``ValueError`` and
``TypeError``, as everywhere in Python.
"""

from __future__ import annotations

from typing import Any, TypeVar

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

Error = TypeVar("Error", bound="TdcollError")


class TdcollError(RuntimeError):
    """Base class of tdcoll's own errors. Message and attributes survive pickle and copy."""

    def __reduce__(self) -> tuple[Any, ...]:
        # BaseException would call the class with the message alone; a CollectiveTimeout, for
        # example, takes more.
        return restored, (type(self), self.args, self.__dict__)


def restored(kind: type[Error], args: tuple[Any, ...], attributes: dict[str, Any]) -> Error:
    """Return an error of class ``kind`` with the message and attributes of another one."""
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(attributes)
    return error


class NotInitializedError(TdcollError):
    """A call that needs a job came before ``tdcoll.initialize()`` or after
    ``tdcoll.finalize()``."""


class AlreadyInitializedError(TdcollError):
    """``tdcoll.initialize()`` was called again with other ranks or other settings."""


class HeapExhaustedError(TdcollError):
    """The symmetric heap is too small; the message has the requested and free bytes, and the
    setting to raise."""


class NotSymmetricError(TdcollError, ValueError):
    """A tensor that must lie in the symmetric heap does not."""


class RankMismatchError(TdcollError):
    """Ranks called the same collective with arguments that must agree and do not. Raised on all of
    them."""


class ContextError(TdcollError):
    """A context can't be made, or can't make a call.

    It is closed, its last stream is being captured, the device is another one, ranks lack peer
    access or thread blocks, or the call exceeds its capacity.
    """


class CollectiveTimeout(TdcollError):
    """A deadline has passed while this rank waited for another one.

    Every expired wait of tdcoll raises this class or one derived from it. A wait in a kernel, for a
    peer's signal, sets all attributes. If the peer has itself timed out, and this rank may have
    read its memory too late, ``signal``, ``expected`` and ``seen`` are None. A wait in
    ``grid_barrier`` sets ``rank``, ``peer`` (this rank) and ``timeout_s``. A wait on the host
    (joining, making a context, ``Work.wait``) sets ``timeout_s`` and, if it is known, ``rank``; the
    others are None, and the message names the operation.

    Attributes:
        rank: rank that waited: of the group for a wait in a kernel, of the job for one on the host.
        peer: group rank that it waited for; None if a kernel of yours does not tell its wait.
        signal: index of the signal in the context's row of signals; None likewise.
        epoch: the call, counted from 1, in which the wait expired; or in which the peer's did.
        expected: value that the signal had to reach.
        seen: value that it had.
        timeout_s: the deadline, in seconds.
        others: further group ranks for which this rank had waited as long. The rank that is missing
            may be one of them, because ``peer`` may itself have waited for it.
    """

    def __init__(
        self,
        host_wait: str | None = None,
        *,
        timeout_s: float,
        rank: int | None = None,
        peer: int | None = None,
        signal: int | None = None,
        epoch: int | None = None,
        expected: int | None = None,
        seen: int | None = None,
        others: tuple[int, ...] = (),
    ) -> None:
        """``host_wait``: words behind "waited 30 s", the host's operation and whom it waited for;
        None for a kernel."""
        self.rank = rank
        self.peer = peer
        self.signal = signal
        self.epoch = epoch
        self.expected = expected
        self.seen = seen
        self.timeout_s = timeout_s
        self.others = others
        if expected is None:
            why = (
                f"for peer {peer}, which had itself given up in epoch {epoch}: its queued copies may have "
                "overwritten what this rank was reading. The peer's own error says whom it waited for. "
            )
        else:
            whom = "a peer" if peer is None else f"peer {peer}"
            what = "a signal" if signal is None else f"signal {signal}"
            call = "" if epoch in (None, expected) else f" in epoch {epoch}"
            peers = "peer" if len(others) == 1 else "peers"
            more = f"{peers} {', '.join(map(str, others))}"
            also = f"It was also waiting for {more}. " if others else ""
            why = (
                f"for {whom}: {what} had to reach {expected}{call} and is {seen}. "
                f"{also}The peer has died, hangs, did not make this call or made it with "
                "other arguments (TDCOLL_DEBUG=1 compares them). "
            )
        end = (
            "The exchange is incomplete, and later calls will raise this error: start the job again"
        )
        waited = host_wait or why + end
        # PyTorch's tests, and people who grep logs, look for the word with a space on both sides.
        super().__init__(
            f"{'' if rank is None else f'rank {rank} '}waited {timeout_s:g} s {waited}. If a rank is only slow, set a "
            "longer timeout (initialize(timeout_s=...), TDCOLL_TIMEOUT_S, or that of the group or call)."
        )
