# SPDX-License-Identifier: Apache-2.0
"""``nvshmem.bindings.nvshmem`` on the simulator: who this is."""

from tdcoll import runtime

__all__ = ["my_pe", "n_pes"]


def my_pe() -> int:
    """This PE: the global rank."""
    return runtime.current().rank


def n_pes() -> int:
    """Number of PEs of the job."""
    return runtime.current().world_size
