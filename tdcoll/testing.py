# SPDX-License-Identifier: Apache-2.0
"""Test your own kernels on a machine with no GPU: see ``docs/simulator.md``."""

from __future__ import annotations

from tdcoll.runtime.simulator.machine import Counts
from tdcoll.runtime.simulator.scheduler import Blocked, Deadlock
from tdcoll.runtime.simulator.trace import Trace, merge_traces
from tdcoll.runtime.simulator.world import World

__all__ = ["Blocked", "Counts", "Deadlock", "Trace", "World", "merge_traces"]
