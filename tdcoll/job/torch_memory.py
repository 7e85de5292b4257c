# SPDX-License-Identifier: Apache-2.0
"""The symmetric heap on the GPUs of one host, without NVSHMEM: a block of PyTorch's symmetric
memory per PE.

PyTorch makes the memory and maps it into the peers' address spaces
(``torch.distributed._symmetric_memory``). tdcoll uses nothing else of it: signals and protocols are
tdcoll's, and so are the words that they use. No process group of the user's is needed, because the
ranks meet through the job's store. Loads and stores reach all PEs; there are no puts.
"""

from __future__ import annotations

import itertools
from datetime import timedelta
from typing import Any

import torch

from tdcoll.base.errors import HeapExhaustedError, TdcollError
from tdcoll.job.cuda import CudaHeap, variable
from tdcoll.language.warm_up import warm_up
from tdcoll.runtime.control import ControlPlane

_numbers = itertools.count()
_aborted_heaps: list[Any] = []
"""Heaps of failed jobs, kept because peers may still write to them."""


class TorchHeap(CudaHeap):
    """This PE's block of symmetric GPU memory. Collective to make.

    Args:
        pe, n_pes, nbytes, device: as for :class:`~.heap.SymmetricHeap`; all PEs are on one host,
            each on another GPU.
        store: of ``torch.distributed``, which the ranks meet through; for this heap alone.
        control: tells the ranks of each other's failures.
        timeout_s: how long to wait for the other ranks, seconds.

    Raises:
        HeapExhaustedError: a GPU has too little memory; raised on all ranks.
        TdcollError: PyTorch has no symmetric memory, on any rank, or cannot map that of a peer.
        CollectiveTimeout: a rank did not come.
    """

    puts = False

    def __init__(
        self,
        *,
        pe: int,
        n_pes: int,
        nbytes: int,
        device: torch.device,
        store: Any,
        control: ControlPlane,
        timeout_s: float,
    ) -> None:
        super().__init__(pe, n_pes, nbytes, device)
        self._handle: Any = None
        with warm_up(device, nvshmem=False):
            problem = None
            try:
                self._allocate(store, timeout_s)
            except (ImportError, RuntimeError) as error:
                problem = str(error)
            # All ranks come or none, because PyTorch waits for all when they meet, and each process
            # counts meetings.
            for other, theirs in enumerate(
                control.all_gather(range(n_pes), "symmetric memory", problem)
            ):
                if theirs is not None:
                    raise self._error(other, theirs)
            try:
                self._meet()
            except RuntimeError as error:
                raise self._error(pe, str(error)) from error
        self.base = self._bases[pe]

    def _allocate(self, store: Any, timeout_s: float) -> None:
        if self.n_pes == 1:
            self._bytes = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)
            return
        from torch._C._distributed_c10d import ProcessGroup, _SymmetricMemory

        # PyTorch forgets no group, and takes each name once
        self._name = name = f"tdcoll heap {next(_numbers)}"
        store.set_timeout(timedelta(seconds=timeout_s))
        _SymmetricMemory.set_group_info(name, self.pe, self.n_pes, store)
        self._group = ProcessGroup(store, self.pe, self.n_pes)
        self._bytes = _SymmetricMemory.empty_strided_p2p(
            (self.nbytes,), (1,), torch.uint8, self.device, name
        )

    def _meet(self) -> None:
        """Have PyTorch map the blocks of the peers."""
        if self.n_pes == 1:
            self._bases = [self._bytes.data_ptr()]
            return
        from torch._C import _distributed_c10d

        c10d: Any = _distributed_c10d
        # PyTorch finds the store by the name, or in newer versions by a process group of that name.
        c10d._register_process_group(self._name, self._group)
        try:
            # tdcoll has no use for a multicast object, and on some hosts asking for one fails or
            # hangs.
            with variable("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1"):
                self._handle = c10d._SymmetricMemory.rendezvous(self._bytes)
        finally:
            c10d._unregister_process_group(self._name)
        here = self._bytes.data_ptr() - self._handle.buffer_ptrs[self.pe]
        self._bases = [int(address) + here for address in self._handle.buffer_ptrs]

    def _error(self, rank: int, why: str) -> TdcollError:
        if "out of memory" in why:  # errors of the driver have no class of their own
            return HeapExhaustedError(
                f"PyTorch cannot get {self.nbytes} bytes of symmetric memory on the GPU of rank {rank} ({why}). "
                "Lower NVSHMEM_SYMMETRIC_SIZE or initialize(heap_bytes=...)."
            )
        return TdcollError(
            f"PyTorch {torch.__version__} gives rank {rank} no symmetric memory among the {self.n_pes} GPUs of this "
            f"host ({why}). initialize(heap='nvshmem') does without it, and needs tdcoll[cu12] or tdcoll[cu13]."
        )

    def peer_base(self, pe: int) -> int:
        return self._bases[pe]

    def close(self) -> None:
        torch.cuda.synchronize(self.device)
        self._handle = None
        del self._bytes

    def abort(self) -> None:
        """Keep the memory, because peers may write to it."""
        _aborted_heaps.append(self)
