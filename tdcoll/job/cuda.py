# SPDX-License-Identifier: Apache-2.0
"""The common parts of symmetric heaps on GPUs, for every transport."""

from __future__ import annotations

import contextlib
import ctypes
import os
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from tdcoll.base import driver
from tdcoll.base.errors import TdcollError
from tdcoll.runtime.heap import SymmetricHeap

_WAIT_GEQ = 0
_WAIT_EQ = 1
"""``CUstreamWaitValue_flags``."""


def _call(function: str, *arguments: Any) -> None:
    """Call a function of CUDA's driver, and raise its error."""
    status = getattr(driver.driver(), function)(*arguments)
    if status:
        raise TdcollError(f"{function} failed: {driver.error_name(status)}")


@contextlib.contextmanager
def variable(name: str, value: str) -> Iterator[None]:
    """Let an environment variable have a value for a library that reads it inside."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


_RESOURCE_OF_SMS = 1
"""``CU_DEV_RESOURCE_TYPE_SM``."""


class _Resource(ctypes.Structure):
    """The beginning of ``CUdevResource``, padded to its largest size in any version of CUDA."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("padding", ctypes.c_ubyte * 92),
        ("sm_count", ctypes.c_uint),
        ("rest", ctypes.c_ubyte * 412),
    ]


def multiprocessors(device: torch.device) -> int:
    """Return how many multiprocessors the current CUDA context can use, if ``device`` is the
    current one.

    A green context has a part of the GPU, and so has a process under MPS with
    ``CUDA_MPS_ACTIVE_THREAD_PERCENTAGE`` (CUDA Driver API, ``cuCtxGetDevResource``, from CUDA 12.4
    on). Older drivers know of the whole GPU alone.
    """
    whole = int(torch.cuda.get_device_properties(device).multi_processor_count)
    # CUDA's runtime makes the context at a thread's first call
    torch.cuda.current_stream(device).query()
    context = ctypes.c_void_p()
    resource = _Resource()
    try:
        library = driver.driver()
        if library.cuCtxGetCurrent(ctypes.byref(context)) or not context:
            return whole
        if library.cuCtxGetDevResource(context, ctypes.byref(resource), _RESOURCE_OF_SMS):
            return whole
    except AttributeError:  # of an older driver
        return whole
    return min(whole, int(resource.sm_count)) or whole


_NON_BLOCKING = 1
_DISABLE_TIMING = 2
"""``CU_STREAM_NON_BLOCKING`` and ``CU_EVENT_DISABLE_TIMING``."""


class CudaSideStream:
    """A CUDA stream of the highest priority with an event for forks and joins:
    :class:`~.heap.SideStream`.

    It is not one of PyTorch's, because these come from a small pool and may be the caller's own.
    """

    def __init__(self) -> None:
        lowest = ctypes.c_int()
        highest = ctypes.c_int()
        stream = ctypes.c_void_p()
        self._event = ctypes.c_void_p()
        _call("cuCtxGetStreamPriorityRange", ctypes.byref(lowest), ctypes.byref(highest))
        _call(
            "cuStreamCreateWithPriority",
            ctypes.byref(stream),
            ctypes.c_uint(_NON_BLOCKING),
            highest,
        )
        _call("cuEventCreate", ctypes.byref(self._event), ctypes.c_uint(_DISABLE_TIMING))
        self.handle = int(stream.value or 0)
        weakref.finalize(self, _destroy, stream, self._event).atexit = False

    def fork(self, stream: int) -> None:
        self._order(stream, self.handle)

    def join(self, stream: int) -> None:
        self._order(self.handle, stream)

    def _order(self, first: int, then: int) -> None:
        """Let later work on ``then`` wait for the work on ``first`` so far. In a capture this adds
        ``then`` to it."""
        _call("cuEventRecord", self._event, ctypes.c_void_p(first))
        _call("cuStreamWaitEvent", ctypes.c_void_p(then), self._event, ctypes.c_uint(0))


def _destroy(stream: ctypes.c_void_p, event: ctypes.c_void_p) -> None:
    driver.driver().cuEventDestroy_v2(event)
    driver.driver().cuStreamDestroy_v2(stream)


class CudaHeap(SymmetricHeap):
    """This PE's block of GPU memory, and that of peers at ``peer_base``."""

    _bytes: torch.Tensor

    def __init__(self, pe: int, n_pes: int, nbytes: int, device: torch.device) -> None:
        self.pe = pe
        self.n_pes = n_pes
        self.nbytes = nbytes
        self.device = device

    def view(self, offset: int, nbytes: int) -> torch.Tensor:
        return self._bytes[offset : offset + nbytes]

    def peer_view(self, pe: int, offset: int, nbytes: int) -> torch.Tensor:
        return self._tensor(self.peer_base(pe) + offset, nbytes)

    def _tensor(self, address: int, nbytes: int) -> torch.Tensor:
        # as_tensor would ask CUDA whose memory it is, and copy it if it is another GPU's.
        storage = torch._C._construct_storage_from_data_pointer(address, self.device, nbytes)
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)

    def stream_wait(
        self, stream: int, address: int, bits: int, at_least: bool, value: int, timeout_s: float
    ) -> None:
        self._on_word("Wait", stream, address, bits, value, _WAIT_GEQ if at_least else _WAIT_EQ)

    def stream_write(self, stream: int, address: int, bits: int, value: int) -> None:
        self._on_word("Write", stream, address, bits, value, 0)

    def _on_word(
        self, what: str, stream: int, address: int, bits: int, value: int, flags: int
    ) -> None:
        word = ctypes.c_uint32(value) if bits == 32 else ctypes.c_uint64(value)
        to = ctypes.c_void_p(stream), ctypes.c_uint64(address), word, ctypes.c_uint(flags)
        _call(f"cuStream{what}Value{bits}_v2", *to)

    def stream_copy(self, stream: int, dest: int, source: int, nbytes: int) -> None:
        to = (
            ctypes.c_uint64(dest),
            ctypes.c_uint64(source),
            ctypes.c_size_t(nbytes),
            ctypes.c_void_p(stream),
        )
        _call("cuMemcpyAsync", *to)

    def side_stream(self) -> CudaSideStream:
        return CudaSideStream()
