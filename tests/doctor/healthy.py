# SPDX-License-Identifier: Apache-2.0
"""Facts of hosts without a problem. A test changes the facts that it is about."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tdcoll.tools.doctor.facts import MachineFacts

ONE_HOST = {
    "LD_LIBRARY_PATH": "/venv/nvshmem/lib",
    "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME": "lo",
    "NVSHMEM_DISABLE_NVLS": "1",
    "NVSHMEM_REMOTE_TRANSPORT": "none",
}
GPUS = MachineFacts(
    python=(3, 12, 3),
    found={
        "torch": {"version": "2.11.0+cu130", "cuda": "13.0"},
        "triton": {"version": "3.6.0"},
        "numpy": {"version": "2.4.6"},
        "greenlet": {"version": "3.5.6"},
        "nvshmem": {"library": "/venv/nvshmem/lib/libnvshmem_host.so.3"},
        "device library": {"sm_90": "/venv/nvshmem/lib/libnvshmem_device_sm_90.bc"},
        "driver": {"cuda": [13, 0]},
        "gpus": {"gpus": [{"name": "NVIDIA H200", "capability": [9, 0]}] * 3, "no_peer_access": []},
    },
    distributions={"triton": "3.6.0", "nvshmem4py-cu13": "0.4.1", "nvidia-nvshmem-cu13": "3.4.5"},
    environment=ONE_HOST,
    launched=ONE_HOST,
    simulated=False,
    visible_gpus=3,
    nproc=3,
)

MISSING = {"missing": True, "error": "ModuleNotFoundError: No module named ..."}
NO_GPU = {"gpus": [], "no_peer_access": []}
SIMULATOR = replace(
    GPUS,
    found={
        **GPUS.found,
        "nvshmem": MISSING,
        "driver": {"error": "OSError: libcuda.so.1"},
        "gpus": NO_GPU,
    },
    distributions={"triton": "3.6.0"},
    environment={"TRITON_INTERPRET": "1"},
    launched={"TRITON_INTERPRET": "1"},
    simulated=True,
    visible_gpus=0,
    nproc=2,
)


def environment(facts: MachineFacts, **more: str) -> dict[str, Any]:
    """``replace``'s arguments for a shell that has more variables, which setenv.sh keeps."""
    return {"environment": {**facts.environment, **more}, "launched": {**facts.launched, **more}}


def found(facts: MachineFacts, **steps: dict[str, Any]) -> dict[str, Any]:
    """``replace``'s argument for children that find something else in these steps."""
    return {"found": {**facts.found, **steps}}
