# SPDX-License-Identifier: Apache-2.0
"""Which symmetric heap a job has, and what one without puts can and cannot do."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import triton.language as tl
from torch._C import _distributed_c10d as c10d

import tdcoll
import tdcoll.language as tdl
from tdcoll.base.errors import TdcollError
from tdcoll.calls import plan
from tdcoll.job import lifecycle, torch_memory
from tdcoll.testing import World


def test_auto_is_nvshmem_where_its_bindings_are_and_else_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TDCOLL_HEAP", raising=False)
    assert lifecycle.heap_of(None) == "nvshmem"  # the simulator has all of it
    monkeypatch.setattr(lifecycle, "INTERPRETED", False)
    installed, stand_in = ModuleSpec("nvshmem", None), ModuleSpec("nvshmem", None, is_package=True)
    installed.submodule_search_locations = ["site-packages/nvshmem"]
    for found, wanted in ((installed, "nvshmem"), (stand_in, "torch"), (None, "torch")):
        monkeypatch.setattr("importlib.util.find_spec", lambda name, found=found: found)
        assert lifecycle.heap_of(None) == lifecycle.heap_of("auto") == wanted
        assert lifecycle.heap_of("torch") == "torch"
    monkeypatch.setenv("TDCOLL_HEAP", "nvshmem")
    assert lifecycle.heap_of(None) == "nvshmem"
    assert lifecycle.heap_of("auto") == "torch"


def test_a_wrong_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="heap must be one of auto, nvshmem, torch; got 'nccl'"):
        tdcoll.initialize(heap="nccl")
    with pytest.raises(TypeError, match="heap must be a string"):
        tdcoll.initialize(heap=3)  # type: ignore[arg-type]
    monkeypatch.setenv("TDCOLL_HEAP", "cuda")
    with pytest.raises(ValueError, match="TDCOLL_HEAP must be one of auto, nvshmem, torch; got 'cuda'"):
        tdcoll.initialize()


# ---------------------------------------------------------------------- without puts


@tdcoll.jit
def _tell(out):
    tl.store(out, tdl.my_pe())


def test_what_puts_is_refused_by_name() -> None:
    def host(pe: int) -> None:
        x = torch.arange(8.0)
        with tdcoll.CollectiveContext(max_bytes_per_rank=256) as ctx:
            with pytest.raises(ValueError, match="needs NVSHMEM's puts, which memory of PyTorch's does not have"):
                tdcoll.all_gather(x, ctx=ctx, algorithm="1d")
            assert tdcoll.all_reduce(x, ctx=ctx).tolist() == (2 * x).tolist()
        _tell[(1,)](torch.zeros(1, dtype=torch.int32))

    with pytest.raises(TdcollError, match="my_pe calls NVSHMEM, and the symmetric heap of this job is PyTorch's"):
        World(2, puts=False).run(host)


@pytest.mark.parametrize("in_place", [False, True])
def test_large_all_gathers_go_by_stores(monkeypatch: pytest.MonkeyPatch, in_place: bool) -> None:
    """With puts they are made in one step by puts, or what a table says."""
    monkeypatch.setattr(plan, "LARGE", 1 << 10)

    def host(pe: int) -> None:
        buffer = tdcoll.empty(2 * 4096, torch.uint8)
        buffer.view(2, 4096)[pe].fill_(pe + 1)
        with tdcoll.CollectiveContext(max_bytes_per_rank=4096) as ctx:
            if in_place:
                out = tdcoll.all_gather_(buffer, ctx=ctx)
            else:
                out = tdcoll.all_gather(buffer.view(2, 4096)[pe], ctx=ctx)
            assert out.view(2, 4096).float().mean(1).tolist() == [1, 2]

    World(2, puts=False).run(host)


# ---------------------------------------------------------------------- PyTorch's memory, played by a stand-in


class _Memory:
    """``_SymmetricMemory`` as far as a heap uses it: this PE's block begins some bytes into the allocation."""

    OFFSET = 64

    def __init__(self) -> None:
        self.groups: dict[str, tuple[Any, ...]] = {}
        self.fails: Exception | None = None
        """What an allocation raises."""
        self.meets: Exception | None = None
        """What a meeting raises."""

    def set_group_info(self, name: str, rank: int, world_size: int, store: Any) -> None:
        assert name not in self.groups, "PyTorch takes a name once"
        self.groups[name] = (rank, world_size, store)

    def empty_strided_p2p(self, size: Any, stride: Any, dtype: Any, device: Any, group: str) -> torch.Tensor:
        assert (stride, dtype) == ((1,), torch.uint8)
        assert group in self.groups
        if self.fails is not None:
            raise self.fails
        self.block = torch.zeros(self.OFFSET + size[0], dtype=dtype)
        return self.block[self.OFFSET :]

    def rendezvous(self, tensor: torch.Tensor) -> Any:
        assert os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1", "PyTorch would make a multicast object"
        name, (rank, world_size, store) = list(self.groups.items())[-1]
        found = c10d._resolve_process_group(name)  # as PyTorch 2.13 does, and not what was set
        assert (found.rank(), found.size(), found.get_group_store()) == (rank, world_size, store)
        if self.meets is not None:
            raise self.meets
        own = self.block.data_ptr()
        return SimpleNamespace(buffer_ptrs=[own - 4096, own, own + 4096])


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> _Memory:
    played = _Memory()
    monkeypatch.setattr("torch._C._distributed_c10d._SymmetricMemory", played)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return played


STORE = dist.HashStore()


def _heap(n_pes: int, pe: int, others: dict[int, Any] | None = None) -> torch_memory.TorchHeap:
    """``others``: what ranks other than this one tell of their failures."""

    def all_gather(ranks: Sequence[int], tag: str, value: Any, timeout_s: float | None = None) -> list[Any]:
        return [value if rank == pe else (others or {}).get(rank) for rank in ranks]

    return torch_memory.TorchHeap(
        pe=pe,
        n_pes=n_pes,
        nbytes=1024,
        device=torch.device("cpu"),
        store=STORE,
        control=SimpleNamespace(all_gather=all_gather),
        timeout_s=5.0,
    )


def test_peers_are_where_pytorch_has_mapped_them(memory: _Memory) -> None:
    for _ in range(2):  # a job after another
        heap = _heap(3, 1)
        assert heap.base == heap.view(0, 1024).data_ptr() == heap.peer_base(1)
        assert [heap.peer_base(pe) - heap.base for pe in range(3)] == [-4096, 0, 4096]
        heap.view(8, 8).fill_(7)
        assert memory.block[memory.OFFSET + 8 : memory.OFFSET + 16].tolist() == [7] * 8
        heap.close()
    assert list(memory.groups.values()) == [(1, 3, STORE)] * 2
    assert STORE.timeout.total_seconds() == 5
    for name in memory.groups:
        with pytest.raises(RuntimeError, match="not resolve"):
            c10d._resolve_process_group(name)


def test_callers_may_use_multicast_afterwards(memory: _Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
    monkeypatch.setenv(name, "0")
    _heap(3, 1)
    assert os.environ[name] == "0"
    monkeypatch.delenv(name)
    _heap(3, 1)
    assert name not in os.environ


def test_one_rank_needs_nobody(memory: _Memory) -> None:
    heap = _heap(1, 0)
    assert heap.peer_base(0) == heap.base
    assert heap.view(0, 1024).nbytes == 1024
    assert memory.groups == {}


def test_memory_that_cannot_be_had_is_an_error_that_says_what_to_do(memory: _Memory) -> None:
    memory.meets = RuntimeError("CUDA driver error: peer access is not supported")
    with pytest.raises(TdcollError, match=r"rank 1.*peer access is not supported.*initialize\(heap='nvshmem'\)"):
        _heap(3, 1)
    # The driver's errors, which are what PyTorch raises here, have no class of their own.
    for error in (RuntimeError("CUDA driver error: out of memory"), torch.OutOfMemoryError("out of memory")):
        memory.fails = error
        with pytest.raises(tdcoll.HeapExhaustedError, match="1024 bytes of symmetric memory on the GPU of rank 1"):
            _heap(3, 1)


def test_who_has_memory_does_not_wait_for_who_has_none(memory: _Memory) -> None:
    memory.meets = AssertionError("it would wait there for rank 2")
    with pytest.raises(tdcoll.HeapExhaustedError, match=r"the GPU of rank 2 \(out of memory\)"):
        _heap(3, 1, {2: "out of memory"})
    with pytest.raises(TdcollError, match=r"gives rank 0 no symmetric memory .* \(none here\)"):
        _heap(3, 1, {0: "none here", 2: "out of memory"})


def test_memory_of_a_failed_job_stays(memory: _Memory) -> None:
    heap = _heap(3, 1)
    heap.abandon()
    assert heap in torch_memory._abandoned
    torch_memory._abandoned.remove(heap)
