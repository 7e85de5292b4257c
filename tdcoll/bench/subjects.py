# SPDX-License-Identifier: Apache-2.0
"""tdcoll's all-gathers as subjects of the benchmark."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tdcoll.bench.data import Buffers
from tdcoll.collectives.all_gather import all_gather, all_gather_in_place
from tdcoll.collectives.all_gather.policy import ALGORITHMS
from tdcoll.context import CollectiveContext

__all__ = ["IN_PLACE", "NAMES", "Subject", "all_gather_subject", "no_close"]

IN_PLACE = "in-place"
NAMES = (*ALGORITHMS, IN_PLACE)


def no_close() -> None:
    """For subjects that own nothing."""


@dataclass(frozen=True)
class Subject:
    """Something to measure.

    Attributes:
        name: in the table.
        peer: whether it is not tdcoll's.
        buffers: what its calls work on.
        call: makes the call with this number, on the current stream.
        close: gives back what it owns; collective.
    """

    name: str
    peer: bool
    buffers: Buffers
    call: Callable[[int], object]
    close: Callable[[], None] = no_close


def all_gather_subject(name: str, context: CollectiveContext, buffers: Buffers) -> Subject:
    """tdcoll's all-gather by its name in :data:`NAMES`; ``buffers`` are those that it needs."""

    def call(i: int) -> None:
        all_gather(buffers.inputs[i], context, buffers.results[i], algorithm=name)

    def call_in_place(i: int) -> None:
        all_gather_in_place(buffers.results[i], context)

    return Subject(name, False, buffers, call_in_place if name == IN_PLACE else call)
