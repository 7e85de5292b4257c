# SPDX-License-Identifier: Apache-2.0
"""What is asked of a process before it joins a job: whether it is the only rank, and which software
it runs."""

from __future__ import annotations

import functools
import hashlib
import logging
import multiprocessing
import os
from collections.abc import Mapping
from pathlib import Path

import torch
import triton

from tdcoll.base import versions
from tdcoll.base.errors import TdcollError

_log = logging.getLogger("tdcoll")

_SIZES_OF_LAUNCHERS = (
    "WORLD_SIZE",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "PMIX_SIZE",
    "MV2_COMM_WORLD_SIZE",
    "SLURM_STEP_NUM_TASKS",
)
"""Variables by which a launcher tells a process how many it has started. Slurm's is that of ``srun``,
because ``SLURM_NTASKS`` is set in the shell of an allocation, too."""


@functools.cache
def kernels_digest() -> str:
    """Return eight hexadecimal digits that differ where the source of tdcoll's package does.

    Ranks with other kernels, or another host side, may disagree about words and places in each
    other's memory.
    """
    package = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(str(file.relative_to(package)).encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:8]


def software() -> dict[str, str]:
    """Return the versions that must be the same on all ranks, by package."""
    return {
        "tdcoll": f"{versions.TDCOLL}, source {kernels_digest()}",
        "torch": str(torch.__version__),
        "triton": str(triton.__version__),
    }


def check_alone(variables: Mapping[str, str] = os.environ) -> None:
    """Look for signs that a process without a process group, ``RANK`` and ``WORLD_SIZE`` is one of
    several ranks. As a job of one, it would return its own values as sums.

    A process that ``multiprocessing`` has started gets a warning only, since it may well work alone.

    Raises:
        TdcollError: a launcher says that it has started several processes.
    """
    how_to = (
        "Start ranks with torchrun or launch.sh, set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in each, or call "
        "torch.distributed.init_process_group before tdcoll.initialize()"
    )
    for name in _SIZES_OF_LAUNCHERS:
        text = variables.get(name, "")
        if text.isdecimal() and int(text) > 1:
            raise TdcollError(
                f"initialize: {name}={text} says that there are {text} ranks, but RANK and WORLD_SIZE, or a process "
                f"group, must say which of them this is. {how_to}"
            )
    if multiprocessing.parent_process() is not None:
        _log.warning(
            "initialize: this process was started by multiprocessing, and has neither a process group nor RANK and "
            "WORLD_SIZE, so its job has one rank. If it is one of several: %s",
            how_to[0].lower() + how_to[1:],
        )
