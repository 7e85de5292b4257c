# SPDX-License-Identifier: Apache-2.0
"""The symmetric heap on GPUs: one NVSHMEM allocation per PE, made through nvshmem4py.

NVSHMEM is one per process. If something else in the process (PyTorch's symmetric memory, say) has initialised it
already, that instance is used when its PEs are numbered like the ranks, and is not finalised here.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch

from tdcoll.errors import AlreadyInitializedError, HeapExhaustedError, TdcollError
from tdcoll.language.jit import initialized_modules, set_module_init
from tdcoll.runtime.control import ControlPlane

__all__ = ["NvshmemHeap"]

_INTERNAL_BYTES = 64 << 20
"""Room left to NVSHMEM for its own use (teams, collectives) where its heap does not grow on demand."""

_IS_INITIALIZED = 2
"""``NVSHMEM_STATUS_IS_INITIALIZED``; higher values are kinds of it (``nvshmemx_init_status``)."""


def _bindings() -> tuple[Any, Any]:
    """``(nvshmem.core, nvshmem.bindings.nvshmem)`` with the host library loaded."""
    try:
        import nvshmem.bindings.nvshmem as bindings
        import nvshmem.core as core
        from cuda.pathfinder import load_nvidia_dynamic_lib
    except ImportError as error:
        raise TdcollError(
            f"NVSHMEM's Python bindings are missing ({error}): install tdcoll[cu12] or tdcoll[cu13], whichever "
            f"matches PyTorch's CUDA {torch.version.cuda}"
        ) from error
    load_nvidia_dynamic_lib("nvshmem_host")
    return core, bindings


class _Memory:
    """Device bytes as an object that ``torch.as_tensor`` takes without a copy."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class NvshmemHeap:
    """This PE's block of symmetric GPU memory. Collective to make and to close.

    Args:
        pe: this PE, equal to the global rank.
        n_pes: ranks of the job.
        nbytes: size of the block, the same on all PEs.
        device: the CUDA device of this PE.
        control: carries NVSHMEM's unique id from PE 0 to the others.
    """

    def __init__(self, *, pe: int, n_pes: int, nbytes: int, device: torch.device, control: ControlPlane) -> None:
        self.pe, self.n_pes, self.nbytes, self.device = pe, n_pes, nbytes, device
        core, bindings = _bindings()
        self._bindings = bindings
        self._owns_library = bindings.init_status() < _IS_INITIALIZED
        if self._owns_library:
            self._join(core, control)
        if (bindings.my_pe(), bindings.n_pes()) != (pe, n_pes):
            raise AlreadyInitializedError(
                f"NVSHMEM is initialised in this process as PE {bindings.my_pe()} of {bindings.n_pes()}, "
                f"but torch.distributed says rank {pe} of {n_pes}; NVSHMEM is one per process"
            )
        self.base: int = bindings.malloc(nbytes)
        if self.base == 0:
            raise HeapExhaustedError(
                f"NVSHMEM could not allocate {nbytes} bytes on {device}: "
                f"{torch.cuda.mem_get_info(device)[0]} bytes of GPU memory are free. Lower NVSHMEM_SYMMETRIC_SIZE "
                "or initialize(heap_bytes=...), or start NVSHMEM before other libraries take the memory."
            )
        self._bytes = torch.as_tensor(_Memory(self.base, nbytes), device=device)
        set_module_init(bindings.cumodule_init)

    def _join(self, core: Any, control: ControlPlane) -> None:
        from cuda.core import Device

        device = Device(self.device.index)
        device.set_current()
        unique_id = core.get_unique_id(empty=self.pe != 0)
        mine = unique_id._data.tobytes() if self.pe == 0 else None
        published = control.all_gather(range(self.n_pes), "nvshmem unique id", mine)[0]
        unique_id._data.view(np.uint8)[:] = np.frombuffer(published, dtype=np.uint8)
        wanted = os.environ.get("NVSHMEM_SYMMETRIC_SIZE")
        os.environ["NVSHMEM_SYMMETRIC_SIZE"] = str(self.nbytes + _INTERNAL_BYTES)
        try:
            core.init(device=device, uid=unique_id, rank=self.pe, nranks=self.n_pes, initializer_method="uid")
        finally:
            os.environ.pop("NVSHMEM_SYMMETRIC_SIZE")
            if wanted is not None:
                os.environ["NVSHMEM_SYMMETRIC_SIZE"] = wanted

    def view(self, offset: int, nbytes: int) -> torch.Tensor:
        return self._bytes[offset : offset + nbytes]

    def peer_base(self, pe: int) -> int:
        return int(self._bindings.ptr(self.base, pe))

    def label(self, offset: int, nbytes: int, name: str, itemsize: int) -> None:
        """NVSHMEM has no reports to put names in."""

    def close(self) -> None:
        torch.cuda.synchronize(self.device)
        for module in initialized_modules():
            self._bindings.cumodule_finalize(module)
        set_module_init(None)
        del self._bytes
        self._bindings.free(self.base)
        if self._owns_library:
            import nvshmem.core

            nvshmem.core.finalize()
