# SPDX-License-Identifier: Apache-2.0
"""Facts of hosts on which everything is as it should be; a test changes what it is about."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tdcoll.doctor.facts import Facts, Gpu, Interface, NetworkDevice

H200 = Gpu("NVIDIA H200", (9, 0), 150_754_820_096, 150 << 30, "Default", False)
LIBRARIES = "/venv/nvidia/nvshmem/lib"

GPUS = Facts(
    python=(3, 12, 3),
    probe={
        "numpy": {"version": "2.4.6"},
        "greenlet": {"version": "3.5.6"},
        "torch": {"version": "2.11.0+cu130", "cuda": "13.0", "hip": None},
        "triton": {"version": "3.6.0", "compiler": "", "distributed": False},
        "nvshmem": {"library": f"{LIBRARIES}/libnvshmem_host.so.3"},
        "driver": {"cuda": [13, 0]},
        "gpus": {"available": True},
    },
    distributions={
        "torch": "2.11.0",
        "triton": "3.6.0",
        "nvshmem4py-cu13": "0.4.1",
        "nvidia-nvshmem-cu13": "3.4.5",
    },
    triton_owners=("triton",),
    nvshmem_libraries=LIBRARIES,
    bitcode=f"{LIBRARIES}/libnvshmem_device.bc",
    bitcode_places=(LIBRARIES,),
    environment={
        "LD_LIBRARY_PATH": LIBRARIES,
        "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME": "lo",
        "NVSHMEM_REMOTE_TRANSPORT": "none",
        "NVSHMEM_DISABLE_NVLS": "1",
        "TDCOLL_TIMEOUT_S": "30",
    },
    driver="580.159.04",
    host_gpus=3,
    pci_gpus=3,
    gpus=tuple(replace(H200, host_index=i) for i in range(3)),
    no_peer_access=frozenset(),
    links={(i, j): "NV18" for i in range(3) for j in range(3) if i != j},
    nproc=3,
    interfaces=(Interface("lo", loopback=True), Interface("eth0"), Interface("docker0", up=False)),
    default_interface="eth0",
    shm_free_bytes=64 << 30,
    tmp_free_bytes=64 << 30,
    ptrace=True,
)

HOSTS = replace(
    GPUS,
    nnodes=2,
    environment={
        **{k: v for k, v in GPUS.environment.items() if k != "NVSHMEM_REMOTE_TRANSPORT"},
        "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME": "eth0",
    },
    network_devices=(NetworkDevice("mlx5_0"), NetworkDevice("mlx5_1", active=False)),
    verbs=True,
)

SIMULATOR = Facts(
    python=(3, 11, 7),
    probe={
        "numpy": {"version": "2.4.6"},
        "greenlet": {"version": "3.5.6"},
        "torch": {"version": "2.13.0+cpu", "cuda": None, "hip": None},
        "triton": {"version": "3.7.1", "compiler": "", "distributed": False},
        "nvshmem": {"missing": True, "error": "No module named 'nvshmem'"},
        "driver": {"error": "OSError: libcuda.so.1: cannot open shared object file"},
        "gpus": {"available": False, "gpus": [], "no_peer_access": []},
    },
    distributions={"torch": "2.13.0", "triton": "3.7.1"},
    triton_owners=("triton",),
    environment={"TRITON_INTERPRET": "1"},
    nvidia_smi="there is no such program",
    interfaces=(Interface("lo", loopback=True),),
    shm_free_bytes=1 << 30,
    tmp_free_bytes=1 << 30,
)


def environment(facts: Facts, **changes: str | None) -> dict[str, Any]:
    """``replace``'s argument for an environment with these variables; None unsets one."""
    merged = {**facts.environment, **changes}
    return {"environment": {name: value for name, value in merged.items() if value is not None}}


def found(facts: Facts, **steps: dict[str, Any]) -> dict[str, Any]:
    """``replace``'s argument for a child that found something else in these steps."""
    return {"probe": {**facts.probe, **steps}}


def gpu(facts: Facts, index: int, **changes: Any) -> dict[str, Any]:
    """``replace``'s argument for a host one of whose GPUs is otherwise."""
    return {"gpus": tuple(replace(g, **changes) if i == index else g for i, g in enumerate(facts.gpus))}
