# SPDX-License-Identifier: Apache-2.0
"""A kernel's view of :class:`tdcoll.WaitMonitor`: the words in memory that bounded waits share with the host."""

from __future__ import annotations

from dataclasses import dataclass

from tdcoll import runtime
from tdcoll.runtime.simulator.memory import read_word, write_word
from tdcoll.spec import constants as c
from tdcoll.spec.functions import not_a_monitor

__all__ = ["Monitor"]


@dataclass
class Monitor:
    """The four words that bounded waits share with the host; see :mod:`tdcoll.monitor`."""

    address: int

    def __post_init__(self) -> None:
        if self.address not in runtime.current().monitors:
            raise ValueError(not_a_monitor(self.address))

    @property
    def aborted(self) -> bool:
        """Whether some wait of this monitor has expired."""
        return read_word(self.address + 8 * c.MONITOR_ABORTED.value) != 0

    @property
    def timeout_ns(self) -> int:
        """Deadline of each wait."""
        return read_word(self.address + 8 * c.MONITOR_TIMEOUT_NS.value)

    def give_up(self, peer: int, signal: int, expected: int, seen: int, epoch: int) -> None:
        """Set the aborted word and write the record, unless another wait did so first."""
        if self.aborted:
            return
        write_word(self.address + 8 * c.MONITOR_ABORTED.value, 1)
        record = read_word(self.address + 8 * c.MONITOR_RECORD.value)
        for place, value in (
            (c.RECORD_RANK, read_word(self.address + 8 * c.MONITOR_RANK.value)),
            (c.RECORD_PEER, peer),
            (c.RECORD_SIGNAL, signal),
            (c.RECORD_EPOCH, epoch),
            (c.RECORD_EXPECTED, expected),
            (c.RECORD_SEEN, seen),
            (c.RECORD_VALID, 1),
        ):
            write_word(record + 8 * place.value, value)
