# SPDX-License-Identifier: Apache-2.0
"""Stores to a PE's own symmetric memory that other PEs do not see yet.

The memory itself changes at once, since the PE sees its own stores. What other PEs see in its place until such a store
arrives, by itself or through a release, is kept here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from tdcoll.runtime.simulator.tasks import Task

__all__ = ["HiddenStore", "Unseen"]

_NOTHING_HIDDEN = nullcontext()


class HiddenStore:
    """One store: who made it, the span of addresses that it lies in, and what was there before, by address."""

    def __init__(self, issuer: Task, runs: Sequence[tuple[int, int]]) -> None:
        self.issuer = issuer
        self.begin, self.end = runs[0][0], runs[-1][0] + runs[-1][1]
        self.before = [(at, ctypes.string_at(at, nbytes)) for at, nbytes in runs]


class Unseen:
    """The stores that other PEs do not see."""

    def __init__(self) -> None:
        self._stores: dict[HiddenStore, None] = {}

    def hide(self, issuer: Task, runs: Sequence[tuple[int, int]]) -> HiddenStore:
        """``issuer`` is about to store to its PE's memory, none of which is hidden.

        Args:
            runs: address and length of each stretch of bytes, ascending.
        """
        store = HiddenStore(issuer, runs)
        self._stores[store] = None
        return store

    def reveal(self, store: HiddenStore) -> None:
        """The store has arrived."""
        del self._stores[store]

    def issuers(self, begin: int, end: int) -> set[Task]:
        """Who has stored to ``[begin, end)`` unseen."""
        return {store.issuer for store in self._stores if store.begin < end and begin < store.end}

    def as_seen_by(self, pe: int, begin: int, end: int) -> AbstractContextManager[None]:
        """Meanwhile the memory has what ``pe`` sees of the bytes ``[begin, end)``."""
        hidden = [s for s in self._stores if s.begin < end and begin < s.end and s.issuer.pe != pe]
        return self._put_back(hidden) if hidden else _NOTHING_HIDDEN

    @contextmanager
    def _put_back(self, stores: list[HiddenStore]) -> Iterator[None]:
        """Meanwhile these stores have not happened. No two of them are to the same bytes."""
        now = [(at, ctypes.string_at(at, len(old))) for store in stores for at, old in store.before]
        try:
            for store in stores:
                for at, old in store.before:
                    ctypes.memmove(at, old, len(old))
            yield
        finally:
            for at, new in now:
                ctypes.memmove(at, new, len(new))
