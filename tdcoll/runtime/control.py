# SPDX-License-Identifier: Apache-2.0
"""The control plane: small host-side exchanges between the ranks of a job, off the fast path.

Joining, allocating, creating and closing contexts are collective; they agree over this channel, which is
torch.distributed's key-value store (any backend has one) or, inside an in-process simulation, the
simulator's scheduler. No collective of the user's process group is ever called.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist

from tdcoll.errors import CollectiveTimeout, RankMismatchError, TdcollError
from tdcoll.runtime.store import ask, decode, encode, foreign

__all__ = ["ControlPlane", "StoreControlPlane", "all_equal", "generation", "keep", "missing_ranks", "require_equal"]

_FAREWELL_S = 5.0
"""How long the rank that holds the store waits for the others when all are done."""

_GAVE_UP = "-"
"""What a rank writes in the place of its token when it gives up; the time by its clock follows, seconds."""

_TOKEN = re.compile(rb"[0-9a-f]{32}|-[0-9]{1,12}(\.[0-9]{1,9})?")
"""What a rank writes when it joins."""


class ControlPlane(Protocol):
    """Exchanges among a subset of the job's ranks. Every rank of ``ranks`` must make the same calls."""

    def all_gather(self, ranks: Sequence[int], tag: str, value: Any, timeout_s: float | None = None) -> list[Any]:
        """``value`` of every rank, in the order of ``ranks``.

        Raises CollectiveTimeout if a rank does not come within ``timeout_s``, or the control plane's own deadline.
        """
        ...

    def part(self, name: str) -> ControlPlane:
        """Return a control plane whose exchanges have an order of their own, and wait beside those of other parts.

        ``name`` is the same on all ranks, and used once.
        """
        ...


def all_equal(control: ControlPlane, ranks: Sequence[int], what: str, value: Any) -> None:
    """Raise :class:`RankMismatchError` on every rank of ``ranks`` unless all of them pass the same value."""
    require_equal(control.all_gather(ranks, what, value), ranks, what)


def require_equal(values: Sequence[Any], ranks: Sequence[int], what: str) -> None:
    """Raise :class:`RankMismatchError`, naming each rank's value, unless all are the same.

    Of mappings with the same keys, which are then fields of ``what``, it names the fields that differ.
    """

    def listing(found: Iterable[Any]) -> str:
        return ", ".join(f"rank {rank}: {value}" for rank, value in zip(ranks, found, strict=True))

    first = values[0]
    if all(other == first for other in values):
        return
    if isinstance(first, Mapping):
        fields = [field for field in first if any(other[field] != first[field] for other in values)]
        found = ", ".join(f"{field} ({listing(other[field] for other in values)})" for field in fields)
        raise RankMismatchError(f"{what} must be the same on all ranks; they differ in {found}")
    raise RankMismatchError(f"{what} must be the same on all ranks; got {listing(values)}")


def missing_ranks(rank: int, tag: str, missing: Sequence[int], timeout_s: float) -> CollectiveTimeout:
    """The error of an exchange, ``tag``, for which some ranks did not come."""
    what = f"in '{tag}' for rank(s) {list(missing)}, which did not make the same call"
    return CollectiveTimeout(what, rank=rank, timeout_s=timeout_s)


def wait_for(store: Any, rank: int, tag: str, keys: Mapping[int, str], timeout_s: float) -> None:
    """Wait until the key of every rank is in the store; part of a question to :func:`~tdcoll.runtime.store.ask`.

    Raises:
        CollectiveTimeout: naming the ranks whose keys are not.
    """
    try:
        store.wait(list(keys.values()), timedelta(seconds=timeout_s))
    except dist.DistNetworkError:
        raise
    except RuntimeError as error:
        if missing := [other for other, key in keys.items() if not store.check([key])]:
            raise missing_ranks(rank, tag, missing, timeout_s) from error


class _Connections:
    """Connections to one store: a wait keeps everybody else from using the same one, so threads need several."""

    def __init__(self, store: Any) -> None:
        self._store, self._free = store, [store]

    @contextlib.contextmanager
    def one(self) -> Iterator[Any]:
        """Give out a connection that is free, or a new one."""
        try:
            store = self._free.pop()
        except IndexError:
            store = self._store.clone() if hasattr(self._store, "clone") else self._store
        try:
            yield store
        finally:
            self._free.append(store)


class StoreControlPlane:
    """Control plane over a ``torch.distributed.Store``.

    Each exchange among the same ranks has a number of its own, and each rank writes one key. A rank removes
    its key of two exchanges ago: by then every rank of the group has read it.
    """

    def __init__(self, store: Any, rank: int, timeout_s: float) -> None:
        self._store, self._rank, self._timeout_s = store, rank, timeout_s
        self._connections, self._name = _Connections(store), ""
        self._count: dict[tuple[int, ...], int] = defaultdict(int)
        self._counting = threading.Lock()

    def all_gather(self, ranks: Sequence[int], tag: str, value: Any, timeout_s: float | None = None) -> list[Any]:
        """See :class:`ControlPlane`. Raises TdcollError if the store is gone, or another process writes to it."""
        group, mine = tuple(ranks), encode(tag, value)
        with self._counting:
            number = self._count[group]
            self._count[group] = number + 1
        prefix = "tdcoll/" + "-".join(map(str, group))
        keys = {rank: f"{prefix}/{number}/{rank}" for rank in group}
        limit = self._timeout_s if timeout_s is None else timeout_s

        def exchange() -> list[bytes]:
            with self._connections.one() as connection:
                store: Any = dist.PrefixStore(self._name, connection) if self._name else connection
                store.set(keys[self._rank], mine)
                if number >= 2:
                    store.delete_key(f"{prefix}/{number - 2}/{self._rank}")
                wait_for(store, self._rank, tag, keys, limit)
                return [store.get(key) for key in keys.values()]

        answers = []
        for key, data in zip(keys.values(), ask(exchange, self._rank, tag, limit), strict=True):
            answers.append(decode(data, f"rank {self._rank} in '{tag}': the store's key {key}"))
        others = {rank: seen for rank, (seen, _) in zip(group, answers, strict=True) if seen != tag}
        if others:
            raise RankMismatchError(f"rank {self._rank} is in '{tag}', but {others} are elsewhere")
        return [answer for _, answer in answers]

    def part(self, name: str) -> StoreControlPlane:
        """See :meth:`ControlPlane.part`."""
        part = StoreControlPlane(self._store, self._rank, self._timeout_s)
        part._connections, part._name = self._connections, f"{self._name}{name}/"
        return part

    def leave(self, ranks: Sequence[int]) -> None:
        """The last call: the first rank, whose process holds the store as a rule, returns when no other needs it."""
        keys = {rank: f"tdcoll/left/{rank}" for rank in ranks}
        limit = min(self._timeout_s, _FAREWELL_S)

        def farewell() -> None:
            self._store.set(keys[self._rank], b"")
            if self._rank == ranks[0]:
                wait_for(self._store, self._rank, "leave", keys, limit)

        with contextlib.suppress(TdcollError):  # a rank or a store that is gone now has nothing to lose
            ask(farewell, self._rank, "leave", limit)


# ---------------------------------------------------------------------- one generation after another


def generation(store: Any, rank: int, ranks: Sequence[int], tag: str, timeout_s: float) -> Any:
    """A part of ``store`` for ``ranks`` and for this one time: no earlier generation has left anything in it.

    A store outlives the process groups that were made from it: torchrun's serves the whole job, and one in rank 0's
    process serves until that process ends (:func:`keep`). What gloo, NCCL and tdcoll have left there, an address where
    nobody listens any more or a key of an earlier exchange, must not be found by those who join again. Counting the
    joins in each process would not do: after a join that failed on one rank only, the counts differ.

    The ranks therefore agree through the store. Each asks under a new token. The first of ``ranks`` waits until all of
    them ask, and answers each token with its own, which names the generation. A token that has its answer is spent, and
    a rank that gives up withdraws its token, so that ranks which try again meet once all of them are here.

    Args:
        store: of ``torch.distributed``, the same for all ranks; holds no answer of other ranks under the same prefix.
        rank: this process, one of ``ranks``.
        ranks: who takes part, the same on all of them; each number always means the same process.
        tag: names the call in errors.
        timeout_s: how long to wait for the others, seconds.

    Returns:
        A ``PrefixStore``.

    Raises:
        CollectiveTimeout: naming the ranks that do not ask.
            Or the store does not answer.
        TdcollError: the store is gone, or another process writes to it.
    """
    prefix, token = "tdcoll/join/" + "-".join(map(str, ranks)), uuid.uuid4().hex
    began, deadline = time.time(), time.monotonic() + timeout_s
    asks = {other: f"{prefix}/asks/{other}" for other in ranks}

    def answer(to: str) -> str:
        return f"{prefix}/answer/{to}"

    def read(key: str) -> str:
        """Return what a rank has written there: a token, or when it gave up."""
        data = bytes(store.get(key))
        if not _TOKEN.fullmatch(data):
            raise foreign(f"rank {rank} in '{tag}': the store's key {key}", data)
        return data.decode()

    def asked() -> dict[int, str]:
        """Return what each rank that has ever asked has written last."""
        return {other: read(key) for other, key in asks.items() if store.check([key])}

    def asking() -> dict[int, str]:
        """Tokens of those who ask now."""
        return {
            other: its
            for other, its in asked().items()
            if not its.startswith(_GAVE_UP) and not store.check([answer(its)])
        }

    def too_late() -> CollectiveTimeout:
        """Names who was not here, and so none of those who have waited beside this rank and have given up."""
        here = {*asking()}
        here |= {other for other, its in asked().items() if its.startswith(_GAVE_UP) and float(its[1:]) >= began}
        return missing_ranks(rank, tag, [other for other in ranks if other not in here] or ranks[:1], timeout_s)

    def agree() -> str:
        store.set(asks[rank], token)
        try:
            if rank == ranks[0]:
                wait_for(store, rank, tag, asks, timeout_s)
                pause_s = 1e-4
                while len(tokens := asking()) < len(asks):  # some have asked for an earlier one, and not yet again
                    if time.monotonic() > deadline:
                        raise too_late()
                    time.sleep(pause_s)
                    pause_s = min(2 * pause_s, 0.02)
                for its in tokens.values():
                    store.set(answer(its), token)
            wait_for(store, rank, tag, {rank: answer(token)}, timeout_s)
        except BaseException as error:
            with contextlib.suppress(RuntimeError):  # of a store that is gone
                store.set(asks[rank], f"{_GAVE_UP}{time.time()}")
            if isinstance(error, CollectiveTimeout):
                raise too_late() from error
            raise
        return read(answer(token))

    return dist.PrefixStore(f"tdcoll/{ask(agree, rank, tag, timeout_s)}", store)


_kept: Any = None


def keep(store: Any) -> None:
    """Hold ``store`` until the next call of this, or the end of the process.

    Where there is no launcher's store, rank 0's process serves one for as long as something there refers to it. When
    rank 0 has left a job and another rank joins the next one already, that server has to be the one which rank 0 comes
    back to: PyTorch finds a server of the same port that is alive, and starts another one only when there is none.
    """
    global _kept
    _kept = store
