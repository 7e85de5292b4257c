# SPDX-License-Identifier: Apache-2.0
"""Policies: every choice that a simulated machine leaves open, in one object.

A policy chooses the ready task that runs next, when a message arrives and in what pieces, and which
of them are late. Without a seed the choices are fair: tasks take turns and messages arrive last, in
the order in which they were sent. With a seed they are random, with two habits of real machines,
because uniform choice seldom drives one part far behind:

- *late data*: bytes without a signal arrive only when no task can run but stragglers. If a kernel
  signals without ordering the data first, nearly every run shows it.
- *stragglers*: one PE, or some programs, hardly ever get their turn when another task can run or a
  message can arrive. This shows kernels that rely on ranks being about equally fast.
"""

from __future__ import annotations

import random
from collections.abc import MutableSequence
from typing import TypeVar

Item = TypeVar("Item")


class Policy:
    """The fair policy, without randomness."""

    def take(self, items: MutableSequence[Item]) -> Item:
        """Remove and return the next of ``items``, which are in the order in which they came."""
        return items.pop(0)

    def deliver_now(self) -> bool:
        """Return whether a message arrives before the next task runs, when both could."""
        return False

    def holds_back(self, *, has_signal: bool, is_flag: bool) -> bool:
        """Return whether a new message is held back until no task can run but stragglers. A flag is
        one word."""
        return False

    def cuts(self, units: int) -> list[int]:
        """Return where to cut a message of ``units`` indivisible parts: ascending, each in
        ``1..units - 1``."""
        return []

    def is_slow(self, pe: int) -> bool:
        """Return whether a new task of ``pe`` is a straggler."""
        return False

    def slow_now(self) -> bool:
        """Return whether a straggler goes before other tasks, and before messages, this time."""
        return False

    def expires_now(self) -> bool:
        """Return whether a kernel's wait expires now, although its message may be on its way."""
        return False

    def describe(self) -> str:
        """Describe the policy for reports."""
        return "fair order"


class RandomPolicy(Policy):
    """Random choices, all from one seed.

    Args:
        late_data: True, False, or None if the seed decides.
        stragglers: True, False, a PE, or None if the seed decides.
        impatient: waits of kernels may expire at any time. Until then the seed's choices are the
            same as without.
    """

    def __init__(
        self,
        seed: int,
        n_pes: int,
        *,
        late_data: bool | None = None,
        stragglers: bool | int | None = None,
        impatient: bool = False,
    ) -> None:
        self._random = random.Random(seed)
        self._patience = random.Random(f"patience {seed}")
        self.expiry_rate = self._patience.choice((0.001, 0.005, 0.02)) if impatient else 0.0
        # always draw the same numbers, because fixing one habit must not change the others
        which = int(self._random.random() * n_pes)
        self.rate = (0.1, 0.3, 0.6)[int(self._random.random() * 3)]
        self.late_data = seed % 4 in (0, 2) if late_data is None else late_data
        self.slow_pe = None
        self.slow_share = 0.0
        if stragglers is not None and not isinstance(stragglers, bool):
            self.slow_pe = stragglers
        elif seed % 4 in (1, 2) if stragglers is None else stragglers:
            if (seed + seed // 4) % 2:  # in turn, with late data and without
                self.slow_pe = which
            else:
                self.slow_share = 0.3

    def take(self, items: MutableSequence[Item]) -> Item:
        index = int(self._random.random() * len(items))
        last = items.pop()
        if index == len(items):
            return last
        item = items[index]
        items[index] = last
        return item

    def deliver_now(self) -> bool:
        return self._random.random() < self.rate

    def holds_back(self, *, has_signal: bool, is_flag: bool) -> bool:
        if self.late_data:
            return not has_signal and not is_flag
        return self._random.random() < 0.5

    def cuts(self, units: int) -> list[int]:
        if units < 2:
            return []
        draw = self._random.random
        wanted = 1 if draw() < 0.5 else 2
        return sorted({1 + int(draw() * (units - 1)) for _ in range(wanted)})

    def is_slow(self, pe: int) -> bool:
        return pe == self.slow_pe or (
            self.slow_share > 0 and self._random.random() < self.slow_share
        )

    def slow_now(self) -> bool:
        return self._random.random() < 0.02

    def expires_now(self) -> bool:
        return self.expiry_rate > 0 and self._patience.random() < self.expiry_rate

    def describe(self) -> str:
        habits = {
            "late data": self.late_data,
            f"pe{self.slow_pe} slow": self.slow_pe is not None,
            "some programs slow": self.slow_share,
            "impatient": self.expiry_rate,
        }
        return ", ".join(
            [f"delivery rate {self.rate}", *(habit for habit, has in habits.items() if has)]
        )
