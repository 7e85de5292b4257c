# SPDX-License-Identifier: Apache-2.0
"""Stand-ins on the simulator for what programs ask of CUDA: streams, events, properties, the driver, ``"cuda"``.

A launch on the simulator returns when the kernel has ended, so there is one stream, work on it is done at once, and
waiting for it does nothing. The device ``"cuda"`` is the CPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tdcoll import runtime

__all__ = ["Driver", "Runtime", "install"]


class Stream:
    """A stream on which everything is done already."""

    cuda_stream = 0

    def __init__(self, device: Any = None, priority: int = 0, **options: Any) -> None:
        self.priority = priority

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def wait_stream(self, stream: Stream) -> None:
        pass

    def wait_event(self, event: Event) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, -1


class Event:
    """A moment, by the clock of the host."""

    def __init__(self, enable_timing: bool = False, **options: Any) -> None:
        self._at = 0.0

    def record(self, stream: Stream | None = None) -> None:
        self._at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def wait(self, stream: Stream | None = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        return (end._at - self._at) * 1e3


_STREAM = Stream()


@contextlib.contextmanager
def _stream(stream: Any) -> Iterator[Any]:
    yield stream


_PROPERTIES = SimpleNamespace(
    name="tdcoll's simulator", major=9, minor=0, multi_processor_count=32, total_memory=1 << 40, warp_size=32
)
"""An H100's capability, for programs that ask for descriptors, and few enough programs to be simulated."""

_STAND_INS: dict[str, Any] = {
    "Stream": Stream,
    "Event": Event,
    "stream": _stream,
    "current_stream": lambda device=None: _STREAM,
    "default_stream": lambda device=None: _STREAM,
    "set_stream": lambda stream: None,
    "synchronize": lambda device=None: None,
    "set_device": lambda device: None,
    "current_device": lambda: 0,
    "device_count": lambda: 1,
    "is_available": lambda: True,
    "empty_cache": lambda: None,
    "manual_seed": lambda seed: None,
    "manual_seed_all": lambda seed: None,
    "get_device_properties": lambda device=None: _PROPERTIES,
    "get_device_capability": lambda device=None: (_PROPERTIES.major, _PROPERTIES.minor),
    "get_device_name": lambda device=None: _PROPERTIES.name,
    "clock_rate": lambda device=None: 1,
    "_sleep": lambda cycles: None,
}


def _is_cuda(device: Any) -> bool:
    return (isinstance(device, str) and device.partition(":")[0] == "cuda") or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


class _OnTheCpu(TorchFunctionMode):
    """A mode in which the device ``"cuda"`` is the CPU wherever PyTorch is given one."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], "cpu", *args[2:])
        return func(*args, **kwargs)


_mode: _OnTheCpu | None = None


def install() -> None:
    """Put the stand-ins in place, for the rest of this process and for this thread. Idempotent."""
    global _mode
    if _mode is not None:
        return
    for name, stand_in in _STAND_INS.items():
        setattr(torch.cuda, name, stand_in)
    _mode = _OnTheCpu()
    _mode.__enter__()


# ---------------------------------------------------------------------- the driver's and the runtime's functions


class Driver:
    """``cuda.bindings.driver`` as far as such programs use it. Errors are exceptions, so every call returns success."""

    class CUstreamWriteValue_flags:
        CU_STREAM_WRITE_VALUE_DEFAULT = 0

    class CUstreamWaitValue_flags:
        CU_STREAM_WAIT_VALUE_GEQ = 0
        CU_STREAM_WAIT_VALUE_EQ = 1

    class CUresult:
        CUDA_SUCCESS = 0

    @staticmethod
    def _wait(bits: int, address: int, value: int, flags: int) -> tuple[int]:
        if flags not in (0, 1):
            raise ValueError(f"flags must be CU_STREAM_WAIT_VALUE_GEQ or _EQ, got {flags}")
        job = runtime.current()
        job.heap.stream_wait(0, int(address), bits, flags == 0, value, job.timeout_s)
        return (0,)

    @staticmethod
    def _write(bits: int, address: int, value: int) -> tuple[int]:
        runtime.current().heap.stream_write(0, int(address), bits, value)
        return (0,)

    @classmethod
    def cuStreamWaitValue32(cls, stream: Any, address: int, value: int, flags: int) -> tuple[int]:
        return cls._wait(32, address, value, flags)

    @classmethod
    def cuStreamWaitValue64(cls, stream: Any, address: int, value: int, flags: int) -> tuple[int]:
        return cls._wait(64, address, value, flags)

    @classmethod
    def cuStreamWriteValue32(cls, stream: Any, address: int, value: int, flags: int) -> tuple[int]:
        return cls._write(32, address, value)

    @classmethod
    def cuStreamWriteValue64(cls, stream: Any, address: int, value: int, flags: int) -> tuple[int]:
        return cls._write(64, address, value)


class Runtime:
    """``cuda.bindings.runtime`` as far as such programs use it."""

    class cudaMemcpyKind:
        cudaMemcpyDeviceToDevice = 3
        cudaMemcpyDefault = 4

    class cudaError_t:
        cudaSuccess = 0

    @staticmethod
    def cudaMemcpyAsync(dest: int, source: int, nbytes: int, kind: int, stream: Any) -> tuple[int]:
        job = runtime.current_or_none()
        if job is None:
            ctypes.memmove(int(dest), int(source), nbytes)
        else:
            job.heap.stream_copy(0, int(dest), int(source), nbytes)
        return (0,)
