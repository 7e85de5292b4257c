# SPDX-License-Identifier: Apache-2.0
"""The symmetric heap on GPUs: one NVSHMEM allocation per PE, made through nvshmem4py's bindings.

A process has one NVSHMEM. If another library in the process, for example PyTorch's symmetric
memory, has initialised it already, that instance is used if its PEs are numbered like the ranks,
and is not finalised here.

``nvshmem.core``, the Python layer above the bindings, is not used, because it imports CuPy and
mpi4py if they are installed, which takes longer than the start of NVSHMEM, and the latter starts
MPI. If a program calls it as well, it initialises NVSHMEM by ``nvshmem.core.init`` before tdcoll.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch

from tdcoll.base.errors import AlreadyInitializedError, HeapExhaustedError, TdcollError
from tdcoll.job.cuda import CudaHeap, variable
from tdcoll.language.jit import initialized_modules, set_module_init
from tdcoll.language.warm_up import warm_up
from tdcoll.runtime.control import ControlPlane

_INTERNAL_BYTES = 64 << 20
"""Bytes for NVSHMEM's own use (teams, collectives) if its heap does not grow on demand."""

_IS_INITIALIZED = 2
"""``NVSHMEM_STATUS_IS_INITIALIZED``; higher values are kinds of it (``nvshmemx_init_status``)."""


_NO_NCCL = "NVSHMEM_DISABLE_NCCL"
"""Turned off: NVSHMEM's NCCL communicator, for its collectives on the host, because tdcoll calls
none of them, and the communicator doubles the time that NVSHMEM takes to start and the GPU memory
of the process."""


_TMA_POLICY = "NVSHMEM_TMA_POLICY"
"""Turned off, which is NVSHMEM's default: copies by TMA inside puts, from NVSHMEM 3.7 on."""


def _refuse_tma() -> None:
    """Raise ``ValueError`` if NVSHMEM may copy by TMA.

    Such a copy goes through shared memory that a thread block has registered, which tdcoll's
    kernels never do. Up to 3.7, NVSHMEM doesn't ask which kernel has registered it. Nothing shows
    that tdcoll's signals come after such copies.
    """
    policy = os.environ.get(_TMA_POLICY, "")
    if policy.strip().upper() not in ("", "DISABLE"):
        raise ValueError(
            f"{_TMA_POLICY} must be unset or DISABLE, got {policy!r}: tdcoll's protocols are not made for NVSHMEM's "
            "asynchronous copies"
        )


def _bindings() -> Any:
    """Return ``nvshmem.bindings.nvshmem`` with the host library loaded."""
    try:
        import nvshmem.bindings.nvshmem as bindings
        from cuda.pathfinder import load_nvidia_dynamic_lib
    except ImportError as error:
        raise TdcollError(
            f"NVSHMEM's Python bindings are missing ({error}): install tdcoll[cu12] or tdcoll[cu13], whichever "
            f"matches PyTorch's CUDA {torch.version.cuda}"
        ) from error
    load_nvidia_dynamic_lib("nvshmem_host")
    return bindings


class NvshmemHeap(CudaHeap):
    """This PE's block of symmetric GPU memory. Collective to make and to close.

    Args:
        control: carries NVSHMEM's unique id from PE 0 to the others.
    """

    puts = True

    def __init__(
        self, *, pe: int, n_pes: int, nbytes: int, device: torch.device, control: ControlPlane
    ) -> None:
        super().__init__(pe, n_pes, nbytes, device)
        _refuse_tma()
        with warm_up(device):
            self._bindings = bindings = _bindings()
            self._owns_library = bindings.init_status() < _IS_INITIALIZED
            if self._owns_library:
                self._join(control)
            if (bindings.my_pe(), bindings.n_pes()) != (pe, n_pes):
                raise AlreadyInitializedError(
                    f"NVSHMEM is initialised in this process as PE {bindings.my_pe()} of {bindings.n_pes()}, "
                    f"but torch.distributed says rank {pe} of {n_pes}; NVSHMEM is one per process"
                )
            self.base = bindings.malloc(nbytes)
        if self.base == 0:
            raise HeapExhaustedError(
                f"NVSHMEM could not allocate {nbytes} bytes on {device}: "
                f"{torch.cuda.mem_get_info(device)[0]} bytes of GPU memory are free. Lower NVSHMEM_SYMMETRIC_SIZE "
                "or initialize(heap_bytes=...), or start NVSHMEM before other libraries take the memory."
            )
        self._bytes = self._tensor(self.base, nbytes)
        set_module_init(bindings.cumodule_init)

    def _join(self, control: ControlPlane) -> None:
        bindings = self._bindings
        if not os.environ.get(_NO_NCCL):
            os.environ[_NO_NCCL] = "1"
        # make a CUDA context, because NVSHMEM takes the current one
        torch.cuda.synchronize(self.device)
        unique_id = bindings.uniqueid()
        if self.pe == 0:
            bindings.get_uniqueid(unique_id.ptr)
        mine = unique_id._data.tobytes() if self.pe == 0 else None
        published = control.all_gather(range(self.n_pes), "nvshmem unique id", mine)[0]
        unique_id._data.view(np.uint8)[:] = np.frombuffer(published, dtype=np.uint8)
        attributes = bindings.InitAttr()
        bindings.set_attr_uniqueid_args(self.pe, self.n_pes, unique_id.ptr, attributes.ptr)
        with variable("NVSHMEM_SYMMETRIC_SIZE", str(self.nbytes + _INTERNAL_BYTES)):
            bindings.hostlib_init_attr(bindings.Flags.INIT_WITH_UNIQUEID, attributes.ptr)

    def peer_base(self, pe: int) -> int:
        return int(self._bindings.ptr(self.base, pe))

    def close(self) -> None:
        torch.cuda.synchronize(self.device)
        for module in initialized_modules():
            self._bindings.cumodule_finalize(module)
        set_module_init(None)
        del self._bytes
        self._bindings.free(self.base)
        if self._owns_library:
            self._bindings.hostlib_finalize()

    def abort(self) -> None:
        """Keep NVSHMEM and the block for another heap here, because NVSHMEM stops on all PEs or on
        none."""
        set_module_init(None)
