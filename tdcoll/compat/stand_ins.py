# SPDX-License-Identifier: Apache-2.0
"""Stand-ins on the simulator, or if ranks share GPUs: nodes, process groups, ``torch.cuda``, CUDA's
driver.

Because a launch on the simulator returns when the kernel has ended, there is one stream, work on it
is done at once, and waiting for it does nothing. The device ``"cuda"`` is the CPU. gloo stands in
for NCCL.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from tdcoll import runtime
from tdcoll.base import arguments

# ---------------------------------------------------------------------- nodes

_device: int | None = None


def emulate_nodes() -> None:
    """Let ``LOCAL_RANK`` and ``LOCAL_WORLD_SIZE`` be those of the emulated node, if nodes are
    emulated.

    Raises:
        ValueError: a variable is no number, or nodes would not be of one size, as such programs
            expect.
    """
    global _device
    _device = device_index()
    nodes = _number("TDCOLL_EMULATE_NODES", 1)
    processes = _number("LOCAL_WORLD_SIZE", 1)
    if nodes == 1:
        return
    if processes % nodes:
        raise ValueError(
            f"TDCOLL_EMULATE_NODES must divide the {processes} processes of this host, as such programs take all nodes "
            f"to be of one size; got {nodes}"
        )
    per_node = processes // nodes
    os.environ |= {"LOCAL_RANK": str(_device % per_node), "LOCAL_WORLD_SIZE": str(per_node)}


def device_index() -> int:
    """Return the number of the host's GPU that this process uses."""
    return _number("LOCAL_RANK", 0) if _device is None else _device


def _number(variable: str, least: int) -> int:
    """Return the number in a variable of the environment, ``least`` if the variable is not set."""
    return arguments.parse_whole(os.environ.get(variable) or str(least), variable, least)


# ---------------------------------------------------------------------- process groups

_COLLECTIVES = re.compile("_?(all|barrier|broadcast|gather|reduce|scatter)")


@functools.cache
def wait_for_collectives() -> None:
    """Let the collectives of all process groups return when they are complete, for the rest of this
    process.

    Programs don't wait for a collective's ``Work`` on the host, because NCCL orders it on the GPU.
    gloo runs it on another thread, and the program would read old data. Sends are left alone,
    because two ranks may begin with one.
    """

    def completed(collective: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(collective)
        def call(*args: Any, **kwargs: Any) -> Any:
            work = collective(*args, **kwargs)
            if work is not None:
                work.wait()
            return work

        return call

    for name in filter(_COLLECTIVES.match, dir(dist.ProcessGroup)):
        setattr(dist.ProcessGroup, name, completed(getattr(dist.ProcessGroup, name)))


# ---------------------------------------------------------------------- torch.cuda


class FinishedStream(torch.cpu.Stream):
    """A stream on which everything is done already."""

    cuda_stream = 0

    def __init__(self, device: Any = None, priority: int = 0, **options: Any) -> None:
        super().__init__(priority)

    def synchronize(self) -> None:
        pass


class Event(torch.cpu.Event):
    """A moment, by the clock of the host."""

    def __init__(self, enable_timing: bool = False, **options: Any) -> None:
        self._at = 0.0

    def record(self, stream: Any = None) -> None:
        self._at = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        return (end._at - self._at) * 1e3


_STREAM = FinishedStream()

_PROPERTIES = SimpleNamespace(
    name="tdcoll's simulator",
    major=9,
    minor=0,
    multi_processor_count=32,
    total_memory=1 << 40,
    warp_size=32,
)
"""An H100's capability, because programs may request descriptors, and few multiprocessors, so that
grids are small."""

_STAND_INS: dict[str, Any] = {
    "Stream": FinishedStream,
    "Event": Event,
    "stream": contextlib.nullcontext,
    "current_stream": lambda device=None: _STREAM,
    "synchronize": lambda device=None: None,
    "set_device": lambda device: None,
    "current_device": lambda: 0,
    "device_count": lambda: 1,
    "is_available": lambda: True,
    "manual_seed": lambda seed: None,
    "manual_seed_all": lambda seed: None,
    "get_device_properties": lambda device=None: _PROPERTIES,
    "get_device_capability": lambda device=None: (_PROPERTIES.major, _PROPERTIES.minor),
    "clock_rate": lambda device=None: 1,
    "_sleep": lambda cycles: None,
}


def _is_cuda(device: Any) -> bool:
    return isinstance(device, (str, torch.device)) and torch.device(device).type == "cuda"


class _OnTheCpu(TorchFunctionMode):
    """A mode in which the device ``"cuda"`` is the CPU wherever PyTorch is given one."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], "cpu", *args[2:])
        return func(*args, **kwargs)


@functools.cache
def replace_cuda() -> TorchFunctionMode:
    """Put the stand-ins for ``torch.cuda`` in place, for the rest of this process and for this
    thread."""
    for name, stand_in in _STAND_INS.items():
        setattr(torch.cuda, name, stand_in)
    mode = _OnTheCpu()
    mode.__enter__()
    return mode


# ---------------------------------------------------------------------- the driver's and the runtime's functions


def _wait(bits: int, stream: Any, address: int, value: int, flags: int) -> tuple[int]:
    if flags not in (0, 1):
        raise ValueError(f"flags must be CU_STREAM_WAIT_VALUE_GEQ or _EQ, got {flags}")
    job = runtime.current()
    job.heap.stream_wait(0, int(address), bits, flags == 0, value, job.timeout_s)
    return (0,)


def _write(bits: int, stream: Any, address: int, value: int, flags: int) -> tuple[int]:
    runtime.current().heap.stream_write(0, int(address), bits, value)
    return (0,)


def _copy(dest: int, source: int, nbytes: int, kind: int, stream: Any) -> tuple[int]:
    job = runtime.current_or_none()
    if job is None:
        ctypes.memmove(int(dest), int(source), nbytes)
    else:
        job.heap.stream_copy(0, int(dest), int(source), nbytes)
    return (0,)


cuda = SimpleNamespace(
    CUstreamWriteValue_flags=SimpleNamespace(CU_STREAM_WRITE_VALUE_DEFAULT=0),
    CUstreamWaitValue_flags=SimpleNamespace(CU_STREAM_WAIT_VALUE_GEQ=0, CU_STREAM_WAIT_VALUE_EQ=1),
    cuStreamWaitValue32=functools.partial(_wait, 32),
    cuStreamWaitValue64=functools.partial(_wait, 64),
    cuStreamWriteValue32=functools.partial(_write, 32),
    cuStreamWriteValue64=functools.partial(_write, 64),
)
"""``cuda.bindings.driver`` as far as such programs use it. Errors are exceptions, so every call
returns success."""

cudart = SimpleNamespace(
    cudaMemcpyKind=SimpleNamespace(cudaMemcpyDeviceToDevice=3, cudaMemcpyDefault=4),
    cudaError_t=SimpleNamespace(cudaSuccess=0),
    cudaMemcpyAsync=_copy,
)
"""``cuda.bindings.runtime`` as far as such programs use it."""
