# SPDX-License-Identifier: Apache-2.0
"""Which symmetric heap a job has; NVSHMEM's and PyTorch's, with stand-ins for their bindings."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import triton.language as tl
from torch._C import _distributed_c10d as c10d

import tdcoll
import tdcoll.language as tdl
from tdcoll.base.errors import AlreadyInitializedError, HeapExhaustedError, TdcollError
from tdcoll.calls import plan
from tdcoll.job import nvshmem, settings, torch_memory
from tdcoll.job.nvshmem import NvshmemHeap
from tdcoll.language import jit
from tdcoll.testing import World


def test_auto_is_nvshmem_where_its_bindings_are_and_else_pytorch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TDCOLL_HEAP", raising=False)
    assert settings.heap_of(None) == "nvshmem"  # the simulator has all of it
    monkeypatch.setattr(settings, "INTERPRETED", False)
    installed, stand_in = ModuleSpec("nvshmem", None), ModuleSpec("nvshmem", None, is_package=True)
    installed.submodule_search_locations = ["site-packages/nvshmem"]
    for found, wanted in ((installed, "nvshmem"), (stand_in, "torch"), (None, "torch")):
        monkeypatch.setattr("importlib.util.find_spec", lambda name, found=found: found)
        assert settings.heap_of(None) == settings.heap_of("auto") == wanted
        assert settings.heap_of("torch") == "torch"
    monkeypatch.setenv("TDCOLL_HEAP", "nvshmem")
    assert settings.heap_of(None) == "nvshmem"
    assert settings.heap_of("auto") == "torch"


def test_a_wrong_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="heap must be one of auto, nvshmem, torch; got 'nccl'"):
        tdcoll.initialize(heap="nccl")
    with pytest.raises(TypeError, match="heap must be a string"):
        tdcoll.initialize(heap=3)  # type: ignore[arg-type]
    monkeypatch.setenv("TDCOLL_HEAP", "cuda")
    with pytest.raises(
        ValueError, match="TDCOLL_HEAP must be one of auto, nvshmem, torch; got 'cuda'"
    ):
        tdcoll.initialize()


# ---------------------------------------------------------------------- without puts


@tdcoll.jit
def _tell(out):
    tl.store(out, tdl.my_pe())


def test_what_puts_is_refused_by_name() -> None:
    def host(pe: int) -> None:
        x = torch.arange(8.0)
        with tdcoll.CollectiveContext(max_bytes_per_rank=256) as ctx:
            with pytest.raises(
                ValueError, match="needs NVSHMEM's puts, which memory of PyTorch's does not have"
            ):
                tdcoll.all_gather(x, ctx=ctx, algorithm="1d")
            assert tdcoll.all_reduce(x, ctx=ctx).tolist() == (2 * x).tolist()
        _tell[(1,)](torch.zeros(1, dtype=torch.int32))

    with pytest.raises(
        TdcollError, match="my_pe calls NVSHMEM, and the symmetric heap of this job is PyTorch's"
    ):
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
    """``_SymmetricMemory`` as far as a heap uses it: this PE's block begins some bytes into the
    allocation."""

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

    def empty_strided_p2p(
        self, size: Any, stride: Any, dtype: Any, device: Any, group: str
    ) -> torch.Tensor:
        assert (stride, dtype) == ((1,), torch.uint8)
        assert group in self.groups
        if self.fails is not None:
            raise self.fails
        self.block = torch.zeros(self.OFFSET + size[0], dtype=dtype)
        return self.block[self.OFFSET :]

    def rendezvous(self, tensor: torch.Tensor) -> Any:
        assert os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1", (
            "PyTorch would make a multicast object"
        )
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

    def all_gather(
        ranks: Sequence[int], tag: str, value: Any, timeout_s: float | None = None
    ) -> list[Any]:
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


def test_callers_may_use_multicast_afterwards(
    memory: _Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    with pytest.raises(
        TdcollError, match=r"rank 1.*peer access is not supported.*initialize\(heap='nvshmem'\)"
    ):
        _heap(3, 1)
    # The driver's errors, which are what PyTorch raises here, have no class of their own.
    for error in (
        RuntimeError("CUDA driver error: out of memory"),
        torch.OutOfMemoryError("out of memory"),
    ):
        memory.fails = error
        with pytest.raises(
            tdcoll.HeapExhaustedError, match="1024 bytes of symmetric memory on the GPU of rank 1"
        ):
            _heap(3, 1)


def test_who_has_memory_does_not_wait_for_who_has_none(memory: _Memory) -> None:
    memory.meets = AssertionError("it would wait there for rank 2")
    with pytest.raises(tdcoll.HeapExhaustedError, match=r"the GPU of rank 2 \(out of memory\)"):
        _heap(3, 1, {2: "out of memory"})
    with pytest.raises(TdcollError, match=r"gives rank 0 no symmetric memory .* \(none here\)"):
        _heap(3, 1, {0: "none here", 2: "out of memory"})


def test_memory_of_a_failed_job_stays(memory: _Memory) -> None:
    heap = _heap(3, 1)
    heap.abort()
    assert heap in torch_memory._aborted_heaps
    torch_memory._aborted_heaps.remove(heap)


DEVICE = torch.device("cuda", 0)


class FakeId:
    def __init__(self) -> None:
        self._data = np.zeros(16, dtype=np.int64)
        self.ptr = self._data.ctypes.data


class Library(ModuleType):
    """The bindings of an NVSHMEM of two PEs that only takes notes."""

    Flags = SimpleNamespace(INIT_WITH_UNIQUEID=8)
    uniqueid = InitAttr = FakeId

    def __init__(self) -> None:
        super().__init__("nvshmem.bindings.nvshmem")
        self.pe, self.running, self.address = 1, False, 0x1000
        self.calls: list[tuple[Any, ...]] = []
        self.found: dict[str, str | None] = {}
        self.my_pe, self.n_pes, self.init_status = (
            lambda: self.pe,
            lambda: 2,
            lambda: 2 if self.running else 0,
        )
        self.cumodule_init = lambda module: None
        self.get_uniqueid = self.noting("unique id")
        self.free, self.hostlib_finalize = self.noting("free"), self.noting("finalize")

    def noting(self, name: str) -> Callable[..., None]:
        return lambda *given: self.calls.append((name, *given))

    def set_attr_uniqueid_args(self, pe: int, n_pes: int, unique_id: int, attributes: int) -> None:
        self.calls.append(("attributes", pe, n_pes))

    def hostlib_init_attr(self, flags: int, attributes: int) -> None:
        self.calls.append(("init", flags))
        self.found = {
            name: os.environ.get(name)
            for name in ("NVSHMEM_DISABLE_NCCL", "NVSHMEM_SYMMETRIC_SIZE")
        }
        self.running = True

    def malloc(self, nbytes: int) -> int:
        self.calls.append(("malloc", nbytes))
        return self.address


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    for name in ("NVSHMEM_DISABLE_NCCL", "NVSHMEM_SYMMETRIC_SIZE"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    bindings = Library()
    pathfinder = ModuleType("cuda.pathfinder")
    pathfinder.load_nvidia_dynamic_lib = lambda name: None  # type: ignore[attr-defined]
    package, inner, cuda = ModuleType("nvshmem"), ModuleType("nvshmem.bindings"), ModuleType("cuda")
    package.bindings, inner.nvshmem, cuda.pathfinder = inner, bindings, pathfinder  # type: ignore[attr-defined]
    for module in (package, inner, bindings, cuda, pathfinder):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(sys.modules, "nvshmem.core", None)  # importing it fails
    monkeypatch.setattr(
        torch.cuda, "synchronize", lambda device: bindings.calls.append(("context", device.index))
    )
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (123, 456))
    monkeypatch.setattr(
        NvshmemHeap, "_tensor", lambda heap, address, nbytes: torch.zeros(4, dtype=torch.uint8)
    )

    @contextlib.contextmanager
    def warm_up(device: torch.device) -> Iterator[None]:
        bindings.calls.append(("warm-up begins", device.index))
        yield
        bindings.calls.append(("warm-up ends",))

    monkeypatch.setattr(nvshmem, "warm_up", warm_up)
    yield bindings
    nvshmem.set_module_init(None)


def heap() -> NvshmemHeap:
    # what PE 0 says
    control: Any = SimpleNamespace(all_gather=lambda ranks, tag, mine: [bytes(range(128)), mine])
    return NvshmemHeap(pe=1, n_pes=2, nbytes=1 << 20, device=DEVICE, control=control)


@pytest.mark.parametrize(("wanted", "found"), [(None, "1"), ("0", "0"), ("1", "1"), ("", "1")])
def test_starts_without_a_communicator_of_nccls_unless_the_user_wants_one(
    monkeypatch: pytest.MonkeyPatch, library: Library, wanted: str | None, found: str
) -> None:
    if wanted is not None:
        monkeypatch.setenv("NVSHMEM_DISABLE_NCCL", wanted)
    heap()
    assert library.found["NVSHMEM_DISABLE_NCCL"] == os.environ["NVSHMEM_DISABLE_NCCL"] == found


@pytest.mark.parametrize("policy", ["ENABLE", "force", "1"])
def test_asynchronous_copies_of_nvshmems_are_refused(
    monkeypatch: pytest.MonkeyPatch, library: Library, policy: str
) -> None:
    """Also if another library has started NVSHMEM."""
    monkeypatch.setenv("NVSHMEM_TMA_POLICY", policy)
    for library.running in (False, True):
        with pytest.raises(
            ValueError, match=f"NVSHMEM_TMA_POLICY must be unset or DISABLE, got '{policy}'"
        ):
            heap()
    assert library.calls == []
    monkeypatch.setenv("NVSHMEM_TMA_POLICY", "disable")
    heap()


@pytest.mark.parametrize("wanted", [None, "3G"])
def test_starts_and_stops(
    monkeypatch: pytest.MonkeyPatch, library: Library, wanted: str | None
) -> None:
    if wanted is not None:
        monkeypatch.setenv("NVSHMEM_SYMMETRIC_SIZE", wanted)
    made = heap()
    assert library.calls == [
        ("warm-up begins", 0),  # Triton's first compilation runs meanwhile
        *(("context", 0), ("attributes", 1, 2), ("init", 8), ("malloc", 1 << 20)),
        ("warm-up ends",),
    ]
    assert library.found["NVSHMEM_SYMMETRIC_SIZE"] == str((1 << 20) + (64 << 20))
    assert os.environ.get("NVSHMEM_SYMMETRIC_SIZE") == wanted
    library.calls.clear()
    made.close()
    assert library.calls == [("context", 0), ("free", 0x1000), ("finalize",)]
    assert jit._module_init is None


def test_an_nvshmem_that_runs_is_used_and_left_running(library: Library) -> None:
    library.running = True
    heap().close()
    assert [name for name, *_ in library.calls if "warm" not in name] == [
        "malloc",
        "context",
        "free",
    ]
    assert "NVSHMEM_DISABLE_NCCL" not in os.environ  # too late


def test_a_heap_that_is_abandoned_launches_nothing_until_the_next(library: Library) -> None:
    heap().abort()
    assert jit._module_init is None
    assert ("finalize",) not in library.calls  # collective, and a peer may be gone
    heap()
    assert jit._module_init is not None
    assert library.calls.count(("init", 8)) == 1


def test_other_pes_are_refused(library: Library) -> None:
    library.pe = 0
    with pytest.raises(AlreadyInitializedError, match=r"PE 0 of 2.*rank 1 of 2"):
        heap()


def test_no_room(library: Library) -> None:
    library.address = 0
    with pytest.raises(
        HeapExhaustedError, match=r"123 bytes of GPU memory are free.*NVSHMEM_SYMMETRIC_SIZE"
    ):
        heap()
