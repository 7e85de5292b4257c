# SPDX-License-Identifier: Apache-2.0
"""Thread blocks and streams that several contexts share: :class:`Budget`, :class:`StreamOrder`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tdcoll.base.capture import capture_of
from tdcoll.base.errors import ContextError
from tdcoll.job.cuda import multiprocessors
from tdcoll.runtime import Runtime

_SIMULATED_MULTIPROCESSORS = 132
"""Multiprocessors of a simulated GPU. An H100 has as many."""


class StreamOrder:
    """The order of launches of contexts that share it: one after the other, on any stream.

    The host doesn't see replays of CUDA graphs, which the caller has to order.

    Attributes:
        stream: The stream of the last eager call; None on CPUs.
        handle: The handle of that stream; 0 on CPUs.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream: Any = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self.handle = 0 if self.stream is None else self.stream.cuda_stream
        self._last_capture = 0
        self._last_captured_stream: Any = None

    def follow(self, stream: Any) -> int:
        """Let ``stream`` wait for the last eager call and take the next one; return its handle."""
        stream.wait_stream(self.stream)
        self.stream = stream
        self.handle = stream.cuda_stream
        return self.handle

    def follow_in_capture(self, stream: Any) -> None:
        """Order a call that is captured on ``stream`` after the last one of the same capture."""
        capture = capture_of(stream.cuda_stream)
        if capture == self._last_capture and stream != self._last_captured_stream:
            stream.wait_stream(self._last_captured_stream)
        self._last_capture = capture
        self._last_captured_stream = stream


def least_blocks(world_size: int) -> int:
    """Return the fewest thread blocks with which a context works: one chunk takes so many."""
    return 2 * world_size + 2


def _room(device: torch.device) -> int:
    """Return how many thread blocks of a shared GPU's size fit on this process's GPU at once."""
    if device.type == "cuda":
        return 2 * multiprocessors(device)
    return 2 * _SIMULATED_MULTIPROCESSORS


class Budget:
    """Thread blocks for contexts whose launches may be in flight beside those of other contexts.

    The thread blocks of all budgets fit on the GPU together, for the reason that
    ``docs/architecture.md`` gives. Contexts that share a budget also share a
    :class:`StreamOrder`: their launches come one after the other, in the same order on all ranks.

    Args:
        wanted: The number of thread blocks to reserve.

    Attributes:
        blocks: The number of thread blocks reserved, the same on all ranks; 0 before :meth:`take`.
        order: The order of launches; None until the first context is made.
    """

    def __init__(self, job: Runtime, ranks: Sequence[int], wanted: int) -> None:
        self._job = job
        self._ranks = ranks
        self._wanted = wanted
        self.blocks = 0
        self.order: StreamOrder | None = None

    def take(self, operation: str) -> None:
        """Reserve the thread blocks, unless that is done. Collective.

        It takes at most a third of the free thread blocks, because later budgets need some, but at
        least as many as one chunk needs.

        Raises:
            ContextError: Some rank has fewer free thread blocks than one chunk needs. Raised on
                all ranks.
        """
        if self.blocks:
            return
        job = self._job
        least = least_blocks(len(self._ranks))
        agreed = 0
        # The lock keeps another thread, which makes another context, from offering the same blocks.
        with job.budget_lock:
            free = _room(job.device) - job.blocks_taken
            offer = 0 if free < least else max(least, min(self._wanted, free // 3))
            job.blocks_taken += offer
        try:
            answers = job.exchange(
                self._ranks, f"thread blocks of a context for {operation}", (offer, free)
            )
            agreed = min(other_offer for other_offer, _ in answers)
        finally:
            with job.budget_lock:
                job.blocks_taken -= offer - agreed
        if not agreed:
            left = min(other_free for _, other_free in answers)
            raise ContextError(
                f"a context of {len(self._ranks)} ranks needs {least} thread blocks, and other "
                f"contexts have left {left}"
            )
        self.blocks = agreed

    def give_back(self) -> None:
        """Return the thread blocks, on this rank, when all contexts are closed."""
        with self._job.budget_lock:
            self._job.blocks_taken -= self.blocks
        self.blocks = 0
