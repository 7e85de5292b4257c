# SPDX-License-Identifier: Apache-2.0
"""What the checks judge, and what they say. No fact is looked up here, so that tests can state any."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tdcoll import arguments

__all__ = [
    "Facts",
    "Gpu",
    "Interface",
    "Line",
    "NetworkDevice",
    "note",
    "ok",
    "problem",
    "size",
    "version",
]


@dataclass(frozen=True)
class Line:
    """One line of the report.

    Attributes:
        status: ``ok``, ``note`` (look at it if something is wrong) or ``problem`` (something will not work).
        name: what was looked at.
        text: what was found.
        advice: what to do; empty where there is nothing to do.
    """

    status: str
    name: str
    text: str
    advice: str = ""


def ok(name: str, text: str) -> Line:
    return Line("ok", name, text)


def note(name: str, text: str, advice: str = "") -> Line:
    return Line("note", name, text, advice)


def problem(name: str, text: str, advice: str) -> Line:
    return Line("problem", name, text, advice)


@dataclass(frozen=True)
class Gpu:
    """A GPU that PyTorch sees.

    Attributes:
        name: the product.
        capability: compute capability, (major, minor).
        total_bytes: memory.
        free_bytes: memory that nobody uses; None: not known.
        compute_mode: nvidia-smi's ``compute_mode``, such as ``Default``; empty: not known.
        mig: whether it is, or is split into, MIG instances.
        host_index: nvidia-smi's number of it; None: not known.
    """

    name: str
    capability: tuple[int, int]
    total_bytes: int
    free_bytes: int | None = None
    compute_mode: str = ""
    mig: bool = False
    host_index: int | None = None


@dataclass(frozen=True)
class Interface:
    """A network interface of the host."""

    name: str
    up: bool = True
    has_address: bool = True
    loopback: bool = False


@dataclass(frozen=True)
class NetworkDevice:
    """An InfiniBand, RoCE or EFA device; ``active``: one of its ports has a link."""

    name: str
    active: bool = True


@dataclass(frozen=True)
class Facts:
    """Everything the checks look at.

    Attributes:
        python: version of this Python.
        probe: what the child found, by step of :mod:`.probe`. Of a package: ``version`` and more, or ``missing``, or
            ``error`` in words.
        distributions: version of each installed distribution that matters here, by normalised name.
        triton_owners: distributions that say they brought the package ``triton``.
        nvshmem_libraries: the folder of NVSHMEM's libraries; empty: not found.
        bitcode: path of the device library; empty: not found.
        bitcode_places: where it was looked for.
        environment: environment variables.
        nvidia_smi: what keeps nvidia-smi from answering, in words; empty if it answered.
        driver: version of the driver as nvidia-smi says it; empty: not known.
        host_gpus: GPUs of the host, visible or not.
        pci_gpus: NVIDIA GPUs on the PCI bus, with or without a driver.
        gpus: those that PyTorch sees.
        no_peer_access: pairs (i, j) of ``gpus`` of which i cannot reach j's memory; None: not known.
        links: nvidia-smi's word for the link between two of ``gpus``, such as ``NV18`` or ``PHB``.
        nproc: ranks on this host.
        nnodes: hosts of the job.
        interfaces: network interfaces.
        default_interface: that of the default route; empty: there is none.
        network_devices: InfiniBand and RoCE devices.
        verbs: whether their device files are there (``/dev/infiniband``).
        shm_free_bytes: room in /dev/shm; None: there is none.
        tmp_free_bytes: room in the folder for temporary files.
        tmp_writable: whether files can be made in /tmp.
        stale_sockets: NVSHMEM's sockets in /tmp that no process uses.
        container: whether this is a container, as far as one can tell.
        ptrace: whether the process has CAP_SYS_PTRACE.
        memlock_bytes: limit of locked memory; None: unlimited.
    """

    python: tuple[int, int, int] = (3, 10, 0)
    probe: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    distributions: Mapping[str, str] = field(default_factory=dict)
    triton_owners: tuple[str, ...] = ()
    nvshmem_libraries: str = ""
    bitcode: str = ""
    bitcode_places: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    nvidia_smi: str = ""
    driver: str = ""
    host_gpus: int = 0
    pci_gpus: int = 0
    gpus: tuple[Gpu, ...] = ()
    no_peer_access: frozenset[tuple[int, int]] | None = None
    links: Mapping[tuple[int, int], str] = field(default_factory=dict)
    nproc: int = 2
    nnodes: int = 1
    interfaces: tuple[Interface, ...] = ()
    default_interface: str = ""
    network_devices: tuple[NetworkDevice, ...] = ()
    verbs: bool = False
    shm_free_bytes: int | None = None
    tmp_free_bytes: int = 0
    tmp_writable: bool = True
    stale_sockets: tuple[str, ...] = ()
    container: bool = False
    ptrace: bool = False
    memlock_bytes: int | None = None

    @property
    def simulated(self) -> bool:
        """Whether jobs of this environment run in the simulator, by the rule of setenv.sh."""
        interpret = self.environment.get("TRITON_INTERPRET", "")
        if interpret:
            return interpret.lower() in ("1", "true", "yes", "on", "y")
        if self.gpus:
            return False
        visible = self.environment.get("CUDA_VISIBLE_DEVICES")
        if not self.host_gpus or visible is None:
            return not self.host_gpus
        # CUDA ignores everything from the first entry that does not exist.
        first = visible.split(",")[0].strip()
        index = arguments.decimal(first)
        return not (first.startswith(("GPU-", "MIG-")) if index is None else index < self.host_gpus)

    def of(self, step: str) -> Mapping[str, Any]:
        """Return what the child found in ``step``; if it never came there, that is its error."""
        return self.probe.get(step, {"error": "not looked at"})


def size(nbytes: int) -> str:
    """``1536 MiB``, ``139 GiB``: three digits or so, for people."""
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if nbytes >= 1 << shift:
            value = nbytes / (1 << shift)
            return f"{value:.0f} {unit}" if value >= 10 or value == int(value) else f"{value:.1f} {unit}"
    return f"{nbytes} bytes"


def version(text: object) -> tuple[int, int]:
    """``"3.7.1+cpu"`` -> (3, 7); (0, 0) where there is no such number."""
    match = re.match(r"(\d+)(?:\.(\d+))?", str(text))
    return (int(match[1]), int(match[2] or 0)) if match else (0, 0)
