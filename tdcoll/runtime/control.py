# SPDX-License-Identifier: Apache-2.0
"""The control plane: small host-side exchanges between the ranks of a job, off the fast path.

Joining, allocating, creating and closing contexts are collective; they agree over this channel, which is
torch.distributed's key-value store (any backend has one) or, inside an in-process simulation, the
simulator's scheduler. No collective of the user's process group is ever called.
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

from tdcoll.errors import RankMismatchError, TdcollError

__all__ = ["ControlPlane", "StoreControlPlane", "all_equal", "require_equal"]


class ControlPlane(Protocol):
    """Exchanges among a subset of the job's ranks. Every rank of ``ranks`` must make the same calls."""

    def all_gather(self, ranks: Sequence[int], tag: str, value: Any) -> list[Any]:
        """``value`` of every rank, in the order of ``ranks``. Raises TdcollError if a rank does not come."""
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


class StoreControlPlane:
    """Control plane over a ``torch.distributed.Store``.

    Each exchange among the same ranks has a number of its own, and each rank writes one key. A rank removes
    its key of two exchanges ago: by then every rank of the group has read it.
    """

    def __init__(self, store: Any, rank: int, timeout_s: float) -> None:
        self._store, self._rank, self._timeout_s = store, rank, timeout_s
        self._count: dict[tuple[int, ...], int] = defaultdict(int)

    def all_gather(self, ranks: Sequence[int], tag: str, value: Any) -> list[Any]:
        group = tuple(ranks)
        number = self._count[group]
        self._count[group] = number + 1
        prefix = "tdcoll/" + "-".join(map(str, group))
        self._store.set(f"{prefix}/{number}/{self._rank}", pickle.dumps((tag, value)))
        if number >= 2:
            self._store.delete_key(f"{prefix}/{number - 2}/{self._rank}")
        keys = [f"{prefix}/{number}/{rank}" for rank in group]
        try:
            self._store.wait(keys, timedelta(seconds=self._timeout_s))
        except Exception as error:
            missing = [rank for rank, key in zip(group, keys, strict=True) if not self._store.check([key])]
            raise TdcollError(
                f"rank {self._rank} waited {self._timeout_s:g} s in '{tag}' for rank(s) {missing}, which did "
                "not make the same call"
            ) from error
        answers = [pickle.loads(self._store.get(key)) for key in keys]
        others = {rank: seen for rank, (seen, _) in zip(group, answers, strict=True) if seen != tag}
        if others:
            raise RankMismatchError(f"rank {self._rank} is in '{tag}', but {others} are elsewhere")
        return [answer for _, answer in answers]
