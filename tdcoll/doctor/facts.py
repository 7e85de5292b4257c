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
from pathlib import Path
from typing import Any

from tdcoll.doctor import probe
from tdcoll.doctor.child import Ended, run

__all__ = ["Facts", "collect", "run_as_launched"]

SETENV = Path(__file__).resolve().parents[2] / "setenv.sh"
"""Absent where tdcoll is installed from a wheel."""

_TIMEOUT_S = 120.0
_DISTRIBUTIONS = (
    "triton",
    "triton-dist",
    *(f"{name}-cu{major}" for name in ("nvshmem4py", "nvidia-nvshmem") for major in (12, 13)),
)


@dataclass(frozen=True)
class Facts:
    """Everything that the checks look at.

    Attributes:
        python: version of this Python.
        found: by step of :mod:`.probe`, what it yielded. If it failed, also ``error`` in words and, for a package
            that isn't installed, a true ``missing``.
        distributions: version of each installed distribution that matters here.
        environment: environment variables of this process.
        launched: environment variables that launch.sh gives to its processes, and setenv.sh's ``TDCOLL_MODE`` and
            ``TDCOLL_GPUS``; empty if setenv.sh isn't there or fails.
        setenv: why setenv.sh fails, in words; empty if it doesn't.
        network_cards: InfiniBand, RoCE and EFA devices with an active port.
        network_files: whether ``/dev/infiniband`` has device files.
        nnodes: hosts of the job.
        nproc: ranks on this host.
    """

    python: tuple[int, ...]
    found: Mapping[str, Mapping[str, Any]]
    distributions: Mapping[str, str]
    environment: Mapping[str, str]
    launched: Mapping[str, str]
    setenv: str = ""
    network_cards: tuple[str, ...] = ()
    network_files: bool = False
    nnodes: int = 1
    nproc: int = 2

    @property
    def gpus(self) -> Sequence[Mapping[str, Any]]:
        """Name and compute capability of each GPU that PyTorch sees."""
        gpus: Sequence[Mapping[str, Any]] = self.found["gpus"].get("gpus", ())
        return gpus

    @property
    def simulated(self) -> bool:
        """Whether jobs run in the simulator: as setenv.sh decides, or else if PyTorch sees no GPU."""
        if mode := self.launched.get("TDCOLL_MODE"):
            return mode == "simulator"
        interpret = self.environment.get("TRITON_INTERPRET", "")
        return interpret.lower() in ("1", "true", "yes", "on", "y") if interpret else not self.gpus


def collect(environment: Mapping[str, str], nproc: int | None, nnodes: int) -> Facts:
    """Return the facts of this host. Takes seconds, because children import packages.

    Args:
        environment: environment variables of this process.
        nproc: ranks on this host; None: one per GPU, or two simulated ones.
        nnodes: hosts of the job.
    """
    launched, setenv = _launched(environment, nnodes)
    facts = Facts(
        python=sys.version_info[:3],
        found={step: _probed(step, launched or environment) for step in probe.STEPS},
        distributions=_distributions(),
        environment=environment,
        launched=launched,
        setenv=setenv,
        network_cards=_network_cards(),
        network_files=any(Path("/dev").glob("infiniband/uverbs*")),
        nnodes=nnodes,
    )
    return dataclasses.replace(facts, nproc=nproc or (2 if facts.simulated else max(1, len(facts.gpus))))


def run_as_launched(
    command: Sequence[str],
    timeout_s: float,
    environment: Mapping[str, str],
    *,
    nnodes: int = 1,
    with_stderr: bool = True,
) -> Ended:
    """Run a command with the environment of a rank that launch.sh starts on one of ``nnodes`` hosts.

    Source setenv.sh first if it is there. It is told not to install anything, and to look at this Python.
    """
    ours = {"PYTHON": sys.executable, "TDCOLL_NNODES": str(nnodes), "TDCOLL_RDZV": "", "_TDCOLL_DRY_RUN": "1"}
    if SETENV.is_file():
        script = 'source "$1" && export TDCOLL_MODE TDCOLL_GPUS && exec "${@:2}"'
        command = ["bash", "-c", script, "doctor", str(SETENV), *command]
    return run(command, timeout_s, {**environment, **ours}, with_stderr=with_stderr)


def _launched(environment: Mapping[str, str], nnodes: int) -> tuple[dict[str, str], str]:
    """Return the variables that a launched process has, and why there are none, in words."""
    if not SETENV.is_file():
        return {}, ""
    show = [sys.executable, "-c", "import json, os; print(json.dumps(dict(os.environ)))"]
    ended = run_as_launched(show, _TIMEOUT_S, environment, nnodes=nnodes, with_stderr=False)
    return ({} if ended.reason else json.loads(ended.output.splitlines()[-1])), ended.reason


def _probed(step: str, environment: Mapping[str, str]) -> dict[str, Any]:
    command = [sys.executable, "-m", probe.__name__, step]
    ended = run(command, _TIMEOUT_S, environment, with_stderr=False)
    found: dict[str, Any] = {"error": ended.reason} if ended.reason else {}
    for line in ended.output.splitlines():
        found |= json.loads(line)
    return found or {"error": "it ended without a word"}


def _distributions() -> dict[str, str]:
    found = {}
    for name in _DISTRIBUTIONS:
        with contextlib.suppress(Exception):  # broken metadata raises errors of any class
            found[name] = importlib.metadata.version(name)
    return found


def _network_cards() -> tuple[str, ...]:
    cards = set()
    for state in Path("/sys/class/infiniband").glob("*/ports/*/state"):
        with contextlib.suppress(OSError):
            if "ACTIVE" in state.read_text():
                cards.add(state.parts[-4])
    return tuple(sorted(cards))
