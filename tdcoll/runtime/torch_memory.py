# SPDX-License-Identifier: Apache-2.0
"""The symmetric heap on the GPUs of one host, without NVSHMEM: a block of PyTorch's symmetric memory per PE.

PyTorch makes the memory and maps it into the peers' address spaces (``torch.distributed._symmetric_memory``). That is
all tdcoll asks of it: signals and protocols are tdcoll's, and so are the words that they use. No process group is
needed, since the ranks meet through the store of the job. Loads and stores reach all PEs; nothing puts.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from tdcoll.errors import HeapExhaustedError, TdcollError
from tdcoll.language.warm_up import warm_up
from tdcoll.runtime.cuda import CudaHeap

__all__ = ["TorchHeap"]

_numbers = itertools.count()
_abandoned: list[Any] = []
"""Heaps of jobs that have failed: peers may still write to them."""


class TorchHeap(CudaHeap):
    """This PE's block of symmetric GPU memory. Collective to make.

    Args:
        pe, n_pes, nbytes, device: as for :class:`~tdcoll.runtime.cuda.CudaHeap`; all PEs are on one host, each on a
            device of its own.
        store: of ``torch.distributed``, which the ranks meet through; for this heap alone.

    Raises:
        HeapExhaustedError: the GPU has not so much memory.
        TdcollError: PyTorch has no symmetric memory, or cannot map that of a peer.
    """

    puts = False

    def __init__(self, *, pe: int, n_pes: int, nbytes: int, device: torch.device, store: Any) -> None:
        super().__init__(pe, n_pes, nbytes, device)
        with warm_up(device, nvshmem=False):
            try:
                self._make(store)
            except torch.OutOfMemoryError as error:
                raise HeapExhaustedError(
                    f"PyTorch could not allocate {nbytes} bytes of symmetric memory on {device} ({error}). Lower "
                    "NVSHMEM_SYMMETRIC_SIZE or initialize(heap_bytes=...)."
                ) from error
            except (ImportError, RuntimeError) as error:
                raise TdcollError(
                    f"PyTorch {torch.__version__} gives no symmetric memory between the {n_pes} GPUs of this host "
                    f"({error}). initialize(heap='nvshmem') does without it, and needs tdcoll[cu12] or tdcoll[cu13]."
                ) from error
        self.base = self._bases[pe]

    def _make(self, store: Any) -> None:
        self._handle: Any = None
        if self.n_pes == 1:
            self._bytes = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)
            self._bases = [self._bytes.data_ptr()]
            return
        from torch._C._distributed_c10d import _SymmetricMemory

        name = f"tdcoll heap {next(_numbers)}"  # PyTorch forgets no group, and takes each name once
        _SymmetricMemory.set_group_info(name, self.pe, self.n_pes, store)
        self._bytes = _SymmetricMemory.empty_strided_p2p((self.nbytes,), (1,), torch.uint8, self.device, name)
        self._handle = _SymmetricMemory.rendezvous(self._bytes)
        here = self._bytes.data_ptr() - self._handle.buffer_ptrs[self.pe]
        self._bases = [int(address) + here for address in self._handle.buffer_ptrs]

    def peer_base(self, pe: int) -> int:
        return self._bases[pe]

    def close(self) -> None:
        torch.cuda.synchronize(self.device)
        self._handle = None
        del self._bytes

    def abandon(self) -> None:
        """The memory stays, since peers may write to it."""
        _abandoned.append(self)
