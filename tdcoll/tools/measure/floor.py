# SPDX-License-Identifier: Apache-2.0
"""Lower bounds of the times of collectives. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Floor:
    """The lower bound of a dense collective inside a node whose GPUs have NVLink to all others.

    Attributes:
        launch_us: time of an empty kernel in a CUDA graph, in microseconds.
        hop_us: time from a store until the other GPU sees it, in microseconds.
        gbps: rate at which a rank can store to all others, in GB/s.
        pair_gbps: rate at which a rank can store to a single other rank, in GB/s.
    """

    launch_us: float
    hop_us: float
    gbps: float
    pair_gbps: float

    def rate(self, world: int) -> float:
        """Return the rate at which a rank can send in a node of ``world`` ranks, in GB/s."""
        return self.pair_gbps if world == 2 else self.gbps

    def us(self, sent_bytes: float, world: int) -> float:
        """Return the lower bound in microseconds, for a rank that sends ``sent_bytes`` bytes.

        It is the time of a launch and a hop, or the time of all bytes at the full rate if that is
        longer.
        """
        latency = self.launch_us
        if world > 1:
            latency += self.hop_us
        return max(latency, sent_bytes / self.rate(world) / 1e3)


FLOORS = {"NVIDIA H200": Floor(launch_us=0.8, hop_us=1.0, gbps=390.0, pair_gbps=361.0)}
"""Lower bounds by the name of the GPU. The launch and the rates are measured. ``gbps`` is the best
rate that was seen, when copy engines sent around a ring of 8 (stores to all 7 others at once
reached 341). Between two GPUs, both ways at once, stores, bulk copies (TMA) and copy engines have
the same rate. A hop is about a store and the load that sees it; the signal benchmark measures
it."""
