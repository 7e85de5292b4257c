# SPDX-License-Identifier: Apache-2.0
"""How NVSHMEM is started, with a stand-in for its bindings: what the environment has, and what is not imported."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tdcoll.base.errors import AlreadyInitializedError, HeapExhaustedError
from tdcoll.job import nvshmem
from tdcoll.job.nvshmem import NvshmemHeap
from tdcoll.language import jit

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
        self.my_pe, self.n_pes, self.init_status = lambda: self.pe, lambda: 2, lambda: 2 if self.running else 0
        self.cumodule_init = lambda module: None
        self.get_uniqueid = self.noting("unique id")
        self.free, self.hostlib_finalize = self.noting("free"), self.noting("finalize")

    def noting(self, name: str) -> Callable[..., None]:
        return lambda *given: self.calls.append((name, *given))

    def set_attr_uniqueid_args(self, pe: int, n_pes: int, unique_id: int, attributes: int) -> None:
        self.calls.append(("attributes", pe, n_pes))

    def hostlib_init_attr(self, flags: int, attributes: int) -> None:
        self.calls.append(("init", flags))
        self.found = {name: os.environ.get(name) for name in ("NVSHMEM_DISABLE_NCCL", "NVSHMEM_SYMMETRIC_SIZE")}
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
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: bindings.calls.append(("context", device.index)))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (123, 456))
    monkeypatch.setattr(NvshmemHeap, "_tensor", lambda heap, address, nbytes: torch.zeros(4, dtype=torch.uint8))

    @contextlib.contextmanager
    def warm_up(device: torch.device) -> Iterator[None]:
        bindings.calls.append(("warm-up begins", device.index))
        yield
        bindings.calls.append(("warm-up ends",))

    monkeypatch.setattr(nvshmem, "warm_up", warm_up)
    yield bindings
    nvshmem.set_module_init(None)


def heap() -> NvshmemHeap:
    control: Any = SimpleNamespace(all_gather=lambda ranks, tag, mine: [bytes(range(128)), mine])  # what PE 0 says
    return NvshmemHeap(pe=1, n_pes=2, nbytes=1 << 20, device=DEVICE, control=control)


@pytest.mark.parametrize(("wanted", "found"), [(None, "1"), ("0", "0"), ("1", "1"), ("", "1")])
def test_starts_without_a_communicator_of_nccls_unless_the_user_wants_one(
    monkeypatch: pytest.MonkeyPatch, library: Library, wanted: str | None, found: str
) -> None:
    if wanted is not None:
        monkeypatch.setenv("NVSHMEM_DISABLE_NCCL", wanted)
    heap()
    assert library.found["NVSHMEM_DISABLE_NCCL"] == os.environ["NVSHMEM_DISABLE_NCCL"] == found


@pytest.mark.parametrize("wanted", [None, "3G"])
def test_starts_and_stops(monkeypatch: pytest.MonkeyPatch, library: Library, wanted: str | None) -> None:
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
    assert [name for name, *_ in library.calls if "warm" not in name] == ["malloc", "context", "free"]
    assert "NVSHMEM_DISABLE_NCCL" not in os.environ  # too late


def test_a_heap_that_is_abandoned_launches_nothing_until_the_next(library: Library) -> None:
    heap().abandon()
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
    with pytest.raises(HeapExhaustedError, match=r"123 bytes of GPU memory are free.*NVSHMEM_SYMMETRIC_SIZE"):
        heap()
