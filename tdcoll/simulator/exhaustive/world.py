# SPDX-License-Identifier: Apache-2.0
"""A World whose schedule is chosen step by step, for :mod:`.search`."""

from __future__ import annotations

from typing import Any

import torch

from tdcoll.simulator.exhaustive.network import ChosenOrder, RecordedNetwork
from tdcoll.simulator.exhaustive.races import RecordedRaces
from tdcoll.simulator.exhaustive.recorder import Recorder
from tdcoll.simulator.exhaustive.scheduler import RecordedScheduler
from tdcoll.simulator.exhaustive.search import Schedule
from tdcoll.simulator.network import Network
from tdcoll.simulator.races import Races
from tdcoll.simulator.scheduler import Scheduler
from tdcoll.simulator.world import World


class RecordedWorld(World):
    """A World that takes the steps of ``schedule``, and cuts messages into ``pieces``."""

    def __init__(self, n_pes: int, schedule: Schedule, *, pieces: int, **options: Any) -> None:
        self._schedule = schedule
        self._order = ChosenOrder(pieces)
        super().__init__(n_pes, **options)

    def _make_scheduler(self, **options: Any) -> Scheduler:
        self._policy = self._order
        self._recorder = Recorder(self._schedule, self.memory)
        limited = self.resident is not None or self.room is not None
        self._recorded = RecordedScheduler(self._order, self._recorder, limited=limited, **options)
        return self._recorded

    def _make_network(self) -> Network:
        scheduler = self._recorded
        return RecordedNetwork(
            self._order,
            scheduler.notify_words,
            scheduler.notify,
            self._recorder,
        )

    def _make_races(self, *, reports: bool) -> Races | None:
        return RecordedRaces(self.memory, self.scheduler, self._recorder, reports=reports)

    def describe(self) -> str:
        return super().describe().removeprefix("seed None, ")

    def ignore_order_of(self, tensor: torch.Tensor) -> None:
        self._recorder.ignore(tensor.data_ptr(), tensor.nbytes)
