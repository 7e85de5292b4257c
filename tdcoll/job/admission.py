# SPDX-License-Identifier: Apache-2.0
"""Admission to a job: questions to a process before it meets the others, and to all ranks when
they have met."""

from __future__ import annotations

import functools
import hashlib
import logging
import multiprocessing
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import triton

from tdcoll.base import versions
from tdcoll.base.errors import RankMismatchError, TdcollError
from tdcoll.language import INTERPRETED
from tdcoll.runtime.control import require_equal

_log = logging.getLogger("tdcoll")

_SIZES_OF_LAUNCHERS = (
    "WORLD_SIZE",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "MV2_COMM_WORLD_SIZE",
    "SLURM_STEP_NUM_TASKS",
)
"""Variables by which a launcher tells a process how many it has started: torchrun, Open MPI, MPICH
and Slurm by PMI, MVAPICH, and ``srun``. ``SLURM_NTASKS`` is set in the shell of an allocation, too."""


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


def node_name() -> str:
    """Return what names this process's node: the launcher's number of it, else the host's name."""
    for variable in ("GROUP_RANK", "SLURM_NODEID"):
        if os.environ.get(variable):
            return f"{variable}={os.environ[variable]}"
    return socket.gethostname()


def gpu_name() -> Any:
    if INTERPRETED:
        return None
    return socket.gethostname(), str(
        torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    )


def refuse_impossible(
    answers: Sequence[tuple[Any, str, Any]], heap: str, *, emulate_nodes: int, share_gpus: bool
) -> None:
    """Raise if ranks with these settings, names of nodes and GPUs cannot make one job."""
    gpus = [gpu for *_, gpu in answers if gpu is not None]
    shared = next((rank for rank, gpu in enumerate(gpus) if gpu in gpus[:rank]), None)
    if shared is not None and not share_gpus:
        raise RankMismatchError(
            f"ranks {gpus.index(gpus[shared])} and {shared} use the same GPU; call torch.cuda.set_device(LOCAL_RANK) "
            "before tdcoll.initialize(). For tests of correctness ranks may share GPUs: launch.sh --share-gpus, "
            "TDCOLL_SHARE_GPUS=1 or initialize(share_gpus=True)"
        )
    hosts = sorted({host for host, _ in gpus})
    if heap == "nvshmem" and len(hosts) > 1:
        # Settings that setenv.sh makes for one host, with which NVSHMEM would hang.
        for variable, value in (
            ("NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME", "lo"),
            ("NVSHMEM_REMOTE_TRANSPORT", "none"),
        ):
            if os.environ.get(variable) == value:
                raise TdcollError(
                    f"{variable}={value} is for one host, and the job has {len(hosts)} ({', '.join(hosts)}). Start "
                    "it with launch.sh --nnodes, set TDCOLL_NNODES before sourcing setenv.sh, or set it yourself."
                )
    if heap != "torch":
        return
    if emulate_nodes > 1:
        raise TdcollError(
            f"emulate_nodes={emulate_nodes} needs puts, which heap='torch' does not have; use heap='nvshmem'"
        )
    # Two agents of torchrun on one host are two nodes, between which algorithms put.
    nodes = sorted(
        {
            name if gpu is None or name == gpu[0] else f"{name} on {gpu[0]}"
            for _, name, gpu in answers
        }
    )
    if len(nodes) > 1:
        raise TdcollError(
            f"heap='torch' is for one node, and the job has {len(nodes)} ({', '.join(nodes)}): install tdcoll[cu12] or "
            "tdcoll[cu13] on all of them, which bring NVSHMEM's Python bindings, and use heap='nvshmem'"
        )
    if shared is not None:
        raise TdcollError(
            "share_gpus needs heap='nvshmem': PyTorch's symmetric memory wants a GPU for each rank"
        )


def of_same_software(answers: Sequence[Any]) -> list[Any]:
    """Return what ranks answer, without their versions, or raise unless those are the same."""
    # A version that doesn't say what it is has a shorter answer.
    unknown = dict.fromkeys(software(), "unknown, an older tdcoll")
    require_equal(
        [answer[3] if len(answer) > 3 else unknown for answer in answers],
        range(len(answers)),
        "the software of tdcoll.initialize()",
    )
    return [answer[:3] for answer in answers]
