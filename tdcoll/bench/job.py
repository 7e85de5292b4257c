# SPDX-License-Identifier: Apache-2.0
"""The ranks of a benchmark, and what they agree on."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

from tdcoll import runtime
from tdcoll.errors import CollectiveTimeout, HeapExhaustedError

__all__ = ["Job"]


class Job:
    """The ranks, and what they agree on."""

    def __init__(self) -> None:
        self.owner = runtime.current()
        self.topology = self.owner.topology()
        self.device = self.owner.device
        self.rounds = itertools.count(10_007, 10_007)
        """Where the rounds of inputs begin: far from all before, those of other subjects included."""

    def gather(self, what: str, value: Any) -> list[Any]:
        """``value`` of every rank; also a barrier between hosts."""
        return self.owner.control.all_gather(range(self.owner.world_size), what, value)

    def agree(self, what: str, action: Callable[[], Any], peer: bool) -> tuple[Any, str | None]:
        """``(result, None)`` if the action works on every rank, else ``(None, why not)``, on every rank.

        A peer may fail as it likes. What tdcoll does not support is a ValueError, what does not fit a
        HeapExhaustedError; anything else is raised.
        """
        result, problem = None, None
        try:
            result = action()
        except Exception as error:
            if isinstance(error, CollectiveTimeout) or not (
                peer or isinstance(error, (ValueError, HeapExhaustedError))
            ):
                raise
            problem = " ".join(f"{error}".split())[:300] or type(error).__name__
        for rank, other in enumerate(self.gather(what, problem)):
            if other is not None:
                return None, other if rank == self.topology.rank or problem else f"rank {rank}: {other}"
        return result, None

    def count(self, action: Callable[[], Any], calls: int = 1) -> dict[str, list[float]]:
        """Return what the simulator counts while ``action`` makes ``calls`` calls: per call, of each rank."""
        from tdcoll.runtime.simulator.current import machine

        counted = machine().counts[self.topology.pes[self.topology.rank]]
        before = dataclasses.asdict(counted)
        action()
        own = {key: (value - before[key]) / calls for key, value in dataclasses.asdict(counted).items()}
        counts = self.gather("counts", own)
        return {key: [of_rank[key] for of_rank in counts] for key in own}
