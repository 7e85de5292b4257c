# SPDX-License-Identifier: Apache-2.0
"""The control plane: small host-side exchanges between the ranks of a job, off the fast path.

Joining, allocating, creating and closing contexts are collective; they agree over this connection,
which is torch.distributed's key-value store (any backend has one) or, inside an in-process
simulation, the simulator's scheduler. No collective of the user's process group is ever called.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist

from tdcoll.base.errors import CollectiveTimeout, RankMismatchError
from tdcoll.base.forks import never_destroy
from tdcoll.runtime.store import ask, decode, encode


class ControlPlane(Protocol):
    """Exchanges among a subset of the job's ranks. Every rank of ``ranks`` must make the same
    calls."""

    def all_gather(
        self, ranks: Sequence[int], tag: str, value: Any, timeout_s: float | None = None
    ) -> list[Any]:
        """Return ``value`` of every rank, in the order of ``ranks``.

        Raises CollectiveTimeout if a rank does not come within ``timeout_s``, or the control
        plane's own deadline.
        """

    def part(self, name: str) -> ControlPlane:
        """Return a control plane with a separate order and separate waits. ``name``: alike on all
        ranks, used once."""


def require_equal(values: Sequence[Any], ranks: Sequence[int], what: str) -> None:
    """Raise :class:`RankMismatchError`, naming each rank's value, unless all are the same.

    If the values are mappings with the same keys, which are fields of ``what``, it names the fields
    that differ.
    """

    def listing(found: Iterable[Any]) -> str:
        return ", ".join(f"rank {rank}: {value}" for rank, value in zip(ranks, found, strict=True))

    first = values[0]
    if all(other == first for other in values):
        return
    if isinstance(first, Mapping):
        fields = [field for field in first if any(other[field] != first[field] for other in values)]
        found = ", ".join(
            f"{field} ({listing(other[field] for other in values)})" for field in fields
        )
        raise RankMismatchError(f"{what} must be the same on all ranks; they differ in {found}")
    raise RankMismatchError(f"{what} must be the same on all ranks; got {listing(values)}")


def elsewhere(rank: int, tag: str, others: Mapping[int, str]) -> str:
    """Say that ranks have made different exchanges."""
    theirs = ", ".join(f"rank {other} in '{what}'" for other, what in others.items())
    return f"rank {rank} is in '{tag}', and {theirs}: all ranks must make the same collective calls in the same order"


def missing_ranks(
    rank: int, tag: str, missing: Sequence[int], timeout_s: float
) -> CollectiveTimeout:
    """Return the error of an exchange, ``tag``, for which some ranks did not come."""
    what = f"in '{tag}' for rank(s) {list(missing)}, which died, or did not make the same call"
    return CollectiveTimeout(what, rank=rank, timeout_s=timeout_s)


def wait_for(store: Any, rank: int, tag: str, keys: Mapping[int, str], timeout_s: float) -> None:
    """Wait, in a question to ``ask``, for all ranks' keys in the store; ``CollectiveTimeout`` names
    missing ranks."""
    try:
        store.wait(list(keys.values()), timedelta(seconds=timeout_s))
    except RuntimeError as error:
        missing = [other for other, key in keys.items() if not store.check([key])]
        if missing:
            raise missing_ranks(rank, tag, missing, timeout_s) from error


class StoreControlPlane:
    """Control plane over a ``torch.distributed.Store``.

    Each exchange among the same ranks has its own number, and each rank writes one key. A rank
    removes its key of two exchanges ago, because every rank of the group has read it by then.
    """

    def __init__(self, store: Any, rank: int, timeout_s: float) -> None:
        self._store = store
        self._rank = rank
        self._timeout_s = timeout_s
        self._name = ""
        self._idle = [store]
        """Connections to the store. Threads need several, because a wait keeps its connection from
        the others."""
        self._count: dict[tuple[int, ...], int] = defaultdict(int)
        self._counting = threading.Lock()

    def all_gather(
        self, ranks: Sequence[int], tag: str, value: Any, timeout_s: float | None = None
    ) -> list[Any]:
        """See :class:`ControlPlane`. Raises TdcollError if the store is gone, or another process
        writes to it."""
        group = tuple(ranks)
        mine = encode(tag, value)
        with self._counting:
            number = self._count[group]
            self._count[group] = number + 1
        prefix = "tdcoll/" + "-".join(map(str, group))
        keys = {rank: f"{prefix}/{number}/{rank}" for rank in group}
        limit = self._timeout_s if timeout_s is None else timeout_s

        def exchange() -> list[bytes]:
            try:
                connection = self._idle.pop()
            except IndexError:
                connection = another_connection(self._store)
            store: Any = dist.PrefixStore(self._name, connection) if self._name else connection
            try:
                store.set(keys[self._rank], mine)
                if number >= 2:
                    store.delete_key(f"{prefix}/{number - 2}/{self._rank}")
                wait_for(store, self._rank, tag, keys, limit)
                return [store.get(key) for key in keys.values()]
            finally:
                self._idle.append(connection)

        found = zip(keys.values(), ask(exchange, self._rank, tag, limit), strict=True)
        answers = [
            decode(data, f"rank {self._rank} in '{tag}': the store's key {key}")
            for key, data in found
        ]
        others = {rank: seen for rank, (seen, _) in zip(group, answers, strict=True) if seen != tag}
        if others:
            raise RankMismatchError(elsewhere(self._rank, tag, others))
        return [answer for _, answer in answers]

    def part(self, name: str) -> StoreControlPlane:
        """See :meth:`ControlPlane.part`."""
        part = StoreControlPlane(self._store, self._rank, self._timeout_s)
        part._idle = self._idle
        part._name = f"{self._name}{name}/"
        return part


# ---------------------------------------------------------------------- one generation after another


def generation(store: Any, rank: int, ranks: Sequence[int], tag: str, timeout_s: float) -> Any:
    """Return a part of ``store`` for ``ranks`` and for this one time, in which no earlier
    generation has left anything.

    A store outlives the process groups that were made from it: torchrun's lives as long as the job,
    and one in rank 0's process until that process ends (:func:`keep`). Ranks that join again must
    not find keys that gloo, NCCL and tdcoll have left there, for example an address without a
    listener or a key of an earlier exchange. Counting the joins in each process is not enough,
    because if a join fails on one rank only, the counts differ.

    The ranks therefore agree through the store. Each asks under a new token. The first of ``ranks``
    waits until all of them ask, and answers each token with its own, which names the generation. A
    token that has its answer is spent. If a rank gives up, it writes the time beside its token, so
    that ranks which try again meet when all of them are here.

    Args:
        store: of ``torch.distributed``, the same for all ranks; holds no answer of other ranks
            under the same prefix.
        rank: this process, one of ``ranks``.
        ranks: that take part, the same on all of them; each number always means the same process.
        timeout_s: how long to wait for the others, seconds.

    Raises:
        CollectiveTimeout: naming the ranks that do not ask. Or the store does not answer.
        TdcollError: the store is gone, or another process writes to it.
    """
    prefix = "tdcoll/join/" + "-".join(map(str, ranks))
    token = uuid.uuid4().hex
    began = time.time()
    deadline = time.monotonic() + timeout_s
    asks = {other: f"{prefix}/asks/{other}" for other in ranks}

    def answer(to: str) -> str:
        return f"{prefix}/answer/{to}"

    def read(key: str) -> tuple[str, float | None]:
        """Return the token that a rank has written there, and when it gave up."""
        return decode(store.get(key), f"rank {rank} in '{tag}': the store's key {key}")

    def asked() -> dict[int, tuple[str, float | None]]:
        """Return the last token of each rank that has ever written one."""
        return {other: read(key) for other, key in asks.items() if store.check([key])}

    def asking() -> dict[int, str]:
        """Return the tokens of the ranks that ask now."""
        found = {other: its for other, (its, expired_at) in asked().items() if expired_at is None}
        return {other: its for other, its in found.items() if not store.check([answer(its)])}

    def too_late() -> CollectiveTimeout:
        """Name the ranks that never came, but none that waited beside this rank and gave up."""
        here = {
            other
            for other, (_, expired_at) in asked().items()
            if expired_at is not None and expired_at >= began
        }
        here |= {*asking()}
        return missing_ranks(
            rank, tag, [other for other in ranks if other not in here] or ranks[:1], timeout_s
        )

    def agree() -> str:
        store.set(asks[rank], encode(token, None))
        try:
            if rank == ranks[0]:
                wait_for(store, rank, tag, asks, timeout_s)
                pause_s = 1e-4
                tokens = asking()
                # Some have asked for an earlier one, but not again.
                while len(tokens) < len(asks):
                    if time.monotonic() > deadline:
                        raise too_late()
                    time.sleep(pause_s)
                    pause_s = min(2 * pause_s, 0.02)
                    tokens = asking()
                for its in tokens.values():
                    store.set(answer(its), encode(token, None))
            wait_for(store, rank, tag, {rank: answer(token)}, timeout_s)
        except BaseException as error:
            with contextlib.suppress(RuntimeError):  # of a store that is gone
                store.set(asks[rank], encode(token, time.time()))
            if isinstance(error, CollectiveTimeout):
                raise too_late() from error
            raise
        return read(answer(token))[0]

    return dist.PrefixStore(f"tdcoll/{ask(agree, rank, tag, timeout_s)}", store)


def another_connection(store: Any) -> Any:
    """Return ``store`` by another connection, if it has connections."""
    return store.clone() if hasattr(store, "clone") else store


_kept: Any = None


def keep(store: Any) -> None:
    """Hold ``store`` until the next call of this, or the end of the process.

    If there is no launcher's store, rank 0's process runs one as long as something there refers to
    it. When rank 0 has left a job and another rank joins the next one already, rank 0 must come
    back to the same server: PyTorch uses a live server of the same port, and starts another one
    only if there is none.
    """
    global _kept
    _kept = store


os.register_at_fork(after_in_child=lambda: never_destroy(_kept))
