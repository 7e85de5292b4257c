# SPDX-License-Identifier: Apache-2.0
"""The error that a data race raises (:mod:`.races`): both accesses, and what would order them."""

from __future__ import annotations

from collections.abc import Sequence

from tdcoll.base.errors import TdcollError
from tdcoll.simulator.clocks import DESCRIPTOR, LANE, NO_ACQUIRE, Actor
from tdcoll.simulator.shadow import Access

PUT_TOO_EARLY = "syncthreads() between what the block stores and the put that reads it"
BY_DESCRIPTOR = "stores to it by a descriptor"


class DataRace(TdcollError):
    """Two accesses to the same bytes, one of them a write, and nothing orders them.

    Attributes:
        bytes: whose, for example ``pe1.inbox[16:32]``.
        accesses: the earlier and the later of this run, each with who, what and the line.
        remedies: what would order them.
    """

    def __init__(self, bytes: str, accesses: tuple[str, str], remedies: Sequence[str]) -> None:
        self.bytes = bytes
        self.accesses = accesses
        self.remedies = tuple(remedies)
        ordered = "\n  ".join(
            ("would be ordered by " + remedies[0], *("or by " + r for r in remedies[1:]))
        )
        super().__init__(
            f"data race on {bytes}: nothing orders\n  {accesses[0]}, and\n  {accesses[1]};\n  {ordered}"
        )


def described(access: Access) -> str:
    """Return who made an access, what it did, and in which line."""
    return f"{access.who}, which {access.what}{access.place.note()}"


def remedies(before: Access, access: Access, written: bool, actor: Actor | None) -> list[str]:
    """Return what would order two accesses."""
    event = before.event
    if actor is not None:
        if event & actor.own:
            return [PUT_TOO_EARLY]
        threads = [actor, *actor.lanes.values()]
        if any(event & thread.known for thread in threads):
            return [LANE]
        reasons = [reason for reason, clock in actor.lost.items() if event & clock]
        if reasons:
            return reasons[:1]
        if any(event & thread.pending for thread in threads):
            return [NO_ACQUIRE]
    if before.what == BY_DESCRIPTOR:
        return [DESCRIPTOR]
    if before.message and written:
        return [
            "a wait for the signal of that put (putmem_signal), or for one that a fence() puts behind it",
            "quiet() of its sender, and then a signal or a barrier",
        ]
    if access.message and before.who == access.who:
        return [
            PUT_TOO_EARLY,
            "quiet() before the source of an nbi put is written again",
        ]
    if before.message and before.what.startswith("puts"):
        return ["quiet() before the source of an nbi put is written again"]
    if not written:
        return [
            "a signal that the reader sends behind its load and the writer waits for",
            "another slot, so that a write of this one has heard of the reader",
        ]
    return ["a signal, released behind the first and waited for before the second", "a barrier"]
