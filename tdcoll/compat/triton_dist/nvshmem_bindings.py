# SPDX-License-Identifier: Apache-2.0
"""``nvshmem.bindings.nvshmem`` on the simulator: this PE, and how many there are."""

from tdcoll import runtime

__all__ = ["my_pe", "n_pes"]


def my_pe() -> int:
    """Return this PE, which is the global rank."""
    return runtime.current().rank


def n_pes() -> int:
    """Return the number of PEs of the job."""
    return runtime.current().world_size
