# SPDX-License-Identifier: Apache-2.0
"""Stores of programs to their own PE's symmetric memory that have not landed yet.

The programs of the PE see such a store at once, and the memory itself changes at once. This module
keeps the bytes that other PEs see instead until it lands, by itself or through a release. If a
write of another PE to the same bytes arrives before, it changes only these bytes, because the store
lands on top of it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from tdcoll.simulator.tasks import Task

_NOTHING_HIDDEN = nullcontext()


class HiddenStore:
    """One store: its issuer, the span of its addresses, and the bytes beneath it, by address.

    ``runs``: address and length of each stretch of bytes, ascending.
    """

    def __init__(self, issuer: Task, runs: Sequence[tuple[int, int]]) -> None:
        self.issuer = issuer
        self.begin = runs[0][0]
        self.end = runs[-1][0] + runs[-1][1]
        self.beneath = [(at, ctypes.string_at(at, nbytes)) for at, nbytes in runs]

    def swap(self) -> None:
        """Exchange the memory's bytes and those beneath the store."""
        beneath = self.beneath
        self.beneath = [(at, ctypes.string_at(at, len(old))) for at, old in beneath]
        for at, old in beneath:
            ctypes.memmove(at, old, len(old))


class Unseen:
    """The stores that other PEs do not see. No two of them are to the same bytes."""

    def __init__(self) -> None:
        self._stores: dict[HiddenStore, None] = {}

    def hide(self, issuer: Task, runs: Sequence[tuple[int, int]]) -> HiddenStore:
        """Hide a coming store of ``issuer`` to its PE's memory, not hidden yet. ``runs``: as for
        HiddenStore."""
        store = HiddenStore(issuer, runs)
        self._stores[store] = None
        return store

    def reveal(self, store: HiddenStore) -> None:
        """Remove a store that has landed, on top of earlier writes."""
        del self._stores[store]

    def _at(self, begin: int, end: int) -> list[HiddenStore]:
        return [store for store in self._stores if store.begin < end and begin < store.end]

    def issuers(self, begin: int, end: int) -> set[Task]:
        """Return the issuers of unseen stores to ``[begin, end)``."""
        return {store.issuer for store in self._at(begin, end)}

    def as_seen_by(self, pe: int, begin: int, end: int) -> AbstractContextManager[None]:
        """Let the memory have ``pe``'s view of bytes ``[begin, end)`` inside; its writes lie
        beneath unseen stores."""
        hidden = [store for store in self._at(begin, end) if store.issuer.pe != pe]
        return _swapped(hidden) if hidden else _NOTHING_HIDDEN

    def write_from(self, pe: int, dest: int, source: int | bytes, nbytes: int) -> None:
        """Let bytes that ``pe`` has sent arrive at ``dest``."""
        with self.as_seen_by(pe, dest, dest + nbytes):
            ctypes.memmove(dest, source, nbytes)


@contextmanager
def _swapped(stores: list[HiddenStore]) -> Iterator[None]:
    """Undo these stores inside the context."""
    for store in stores:
        store.swap()
    try:
        yield
    finally:
        for store in stores:
            store.swap()
