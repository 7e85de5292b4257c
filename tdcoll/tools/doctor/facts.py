# SPDX-License-Identifier: Apache-2.0
"""Collect the facts of this host. Nothing here judges or fails: an unknown fact has a default."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tdcoll.base.child import run
from tdcoll.tools.doctor import probe
from tdcoll.tools.setenv import prepare

_TIMEOUT_S = 120.0
_DISTRIBUTIONS = (
    "triton",
    "triton-dist",
    *(f"{name}-cu{major}" for name in ("nvshmem4py", "nvidia-nvshmem") for major in (12, 13)),
)


@dataclass(frozen=True)
class MachineFacts:
    """Everything that the checks look at.

    Attributes:
        found: by step of :mod:`.probe`, what it yielded, or ``error`` in words (``missing`` if it
            isn't installed).
        distributions: version of each installed distribution that matters here.
        environment: environment variables of this process.
        launched: environment variables of ranks that launch.sh starts.
        simulated: whether launch.sh runs jobs in the simulator.
        visible_gpus: the number of GPUs that launch.sh counts.
        nproc: ranks on this host.
    """

    python: tuple[int, ...]
    found: Mapping[str, Mapping[str, Any]]
    distributions: Mapping[str, str]
    environment: Mapping[str, str]
    launched: Mapping[str, str]
    simulated: bool
    visible_gpus: int
    nproc: int = 2

    @property
    def gpus(self) -> Sequence[Mapping[str, Any]]:
        """Name and compute capability of each GPU that PyTorch sees."""
        gpus: Sequence[Mapping[str, Any]] = self.found["gpus"].get("gpus", ())
        return gpus


def collect(environment: Mapping[str, str], nproc: int | None) -> MachineFacts:
    """Return the facts of this host. Takes seconds, because children import packages.

    Args:
        nproc: ranks on this host; None: one per GPU, or two simulated ones.
    """
    job = prepare(environment, dry_run=True, say=lambda text: None)
    distributions = {}
    for name in _DISTRIBUTIONS:
        with contextlib.suppress(Exception):  # broken metadata raises errors of any class
            distributions[name] = importlib.metadata.version(name)
    facts = MachineFacts(
        python=sys.version_info[:3],
        found={step: _probed(step, job.variables) for step in probe.STEPS},
        distributions=distributions,
        environment=environment,
        launched=job.variables,
        simulated=job.simulated,
        visible_gpus=job.gpus,
    )
    return dataclasses.replace(
        facts, nproc=nproc or (2 if facts.simulated else max(1, len(facts.gpus)))
    )


def _probed(step: str, environment: Mapping[str, str]) -> dict[str, Any]:
    command = [sys.executable, "-m", probe.__name__, step]
    ended = run(command, _TIMEOUT_S, environment, with_stderr=False)
    found: dict[str, Any] = {"error": ended.reason} if ended.reason else {}
    for line in ended.output.splitlines():
        found |= json.loads(line)
    return found or {"error": "it ended without a word"}
