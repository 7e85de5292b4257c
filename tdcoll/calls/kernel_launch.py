# SPDX-License-Identifier: Apache-2.0
"""Launches of kernels, prepared once and made again with other addresses.

Triton looks up a kernel and its launcher at every launch, 15 us a time, and the C function below
still takes all arguments apart. Here the parameters of a kernel lie in one block of memory, as the
CUDA driver reads them: a launch writes those that change and calls ``cuLaunchKernelEx`` (CUDA
Driver API, *Execution Control*). The signature that Triton compiled says which arguments are
parameters, and the PTX how many the driver expects.

**Launches that begin early** (programmatic dependent launch). Such a launch may be brought onto the
GPU while the last blocks of the one before it on the stream still run. Its kernel begins with
:func:`tdcoll.primitives.group.in_stream_order`, which waits until that one is over, and only then
lets the next begin likewise. A kernel whose text begins so is compiled with ``launch_pdl``
(:class:`Launch`), which makes the function a wait, and for which the driver is then asked.

Why nothing waits for ever. A launch lets the next begin when *all* of its blocks have said so or
ended. By then all of them have been on the GPU, so blocks that come early take no place which a
block of the launch before needs. The wait comes before the permission, so when blocks of launch k +
1 are there, all launches up to k - 1 have ended: a stream holds the places of at most two launches.
The second may be another library's and as large as the GPU. If launches of several contexts are in
flight together and wait for peers, what waits behind one could keep out the other, on each rank
another one. Contexts with a budget of thread blocks (``max_blocks``), and those of the backend,
therefore launch as usual. So do other libraries' kernels: before or behind ours, one begins when
the other has ended.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import struct
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
import triton.language as tl
from triton import knobs
from triton.compiler import CompiledKernel

from tdcoll.base import driver
from tdcoll.language import INTERPRETED

_PROGRAMMATIC_STREAM_SERIALIZATION = 6
"""``CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION``."""

_INVALID_CONTEXT = 201
"""``CUDA_ERROR_INVALID_CONTEXT``: this thread has none."""

Blocks = int | tuple[int, int]
"""Thread blocks of a grid's first dimension, or of its first two."""


class _Attribute(ctypes.Structure):
    """``CUlaunchAttribute``."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int * 16)]


class _Config(ctypes.Structure):
    """``CUlaunchConfig``."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("n_attributes", ctypes.c_uint),
    ]


@functools.cache
def _supports_early_launches() -> bool:
    """Return whether launches may begin before the one ahead has ended: from Hopper on, unless
    ``TDCOLL_PDL`` is 0."""
    if INTERPRETED or os.environ.get("TDCOLL_PDL") == "0":
        return False
    return torch.cuda.get_device_capability() >= (9, 0)


# ---------------------------------------------------------------------- arguments


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield ``(name, value)``, or those of the fields, ``name.field``, if the value is a tuple."""
    if not isinstance(value, tuple):
        yield name, value
        return
    fields = getattr(value, "_fields", range(len(value)))
    for field, inner in zip(fields, value, strict=True):
        yield from _leaves(f"{name}.{field}", inner)


def _number(value: Any) -> int:
    """Return a tensor's address, a whole number itself, or the bits of a float as fp32, which is
    the type that Triton gives it."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    if isinstance(value, float):
        (bits,) = struct.unpack("<I", struct.pack("<f", value))
        return bits
    return int(value)


class FlatTuple:
    """A tuple that many launches take, flattened once.

    Attributes:
        whole: The tuple.
        numbers: Its addresses and whole numbers, without its constants.
    """

    __slots__ = ("numbers", "whole")

    def __init__(self, whole: tuple[Any, ...], numbers: list[int] | None = None) -> None:
        self.whole = whole
        if numbers is None:
            values = [value for _, value in _leaves("", whole)]
            numbers = [_number(value) for value in values if not isinstance(value, tl.constexpr)]
        self.numbers = numbers


def _whole(argument: Any) -> Any:
    return argument.whole if isinstance(argument, FlatTuple) else argument


def _grid(blocks: Blocks) -> tuple[int, int, int]:
    if isinstance(blocks, int):
        return blocks, 1, 1
    return *blocks, 1


# ---------------------------------------------------------------------- compiled kernels


class _LoadedKernel:
    """A compiled kernel on the GPU, and its parameters in memory as the driver reads them.

    Not for two threads at once, because they would share the parameters.

    Attributes:
        slots: The parameters, 64 bits each. The driver reads the low bits, as wide as the
            parameter.
        place: The index in ``slots`` of a parameter, by name: ``tuple.field`` for one of a tuple.
        passed: For each argument (tuples flattened, without their constants) whether it is a
            parameter. The others are constants in the compiled code.
        scratch: The memory that the kernel makes its tensor descriptors in, for this grid; or None.
        all_passed: Whether all arguments are parameters, except the constants of the kernel's text,
            which come last.
    """

    def __init__(
        self, compiled: CompiledKernel, arguments: Mapping[str, Any], grid: tuple[int, int, int]
    ) -> None:
        _ = compiled[grid]  # loads it
        self.passed: list[bool] = []
        self.place: dict[str, int] = {}
        self.all_passed = True
        values: list[int] = []
        signature = compiled.src.signature
        for argument, given in arguments.items():
            kinds = _leaves(argument, signature[argument])
            for (name, kind), (_, value) in zip(kinds, _leaves(argument, given), strict=True):
                if isinstance(value, tl.constexpr):
                    continue
                is_parameter = kind != "constexpr"
                self.passed.append(is_parameter)
                if is_parameter:
                    self.place[name] = len(values)
                    values.append(_number(value))
                elif not name.isupper():
                    self.all_passed = False
        # Pointers that Triton adds come last: to scratch memory, which is null if the kernel wants
        # none, and to a profiler's, which it never gets.
        metadata = compiled.metadata
        self.scratch = _scratch_memory(metadata, grid)
        if self.scratch is not None:
            values.append(self.scratch.data_ptr())
        entry = re.search(r"\.entry\b[^{]*", compiled.asm["ptx"])
        assert entry is not None
        n_parameters = entry[0].count(".param")
        self.slots: Any = (ctypes.c_uint64 * n_parameters)(*values)
        first = ctypes.addressof(self.slots)
        pointers = [first + 8 * i for i in range(n_parameters)]
        self._pointers = (ctypes.c_void_p * n_parameters)(*pointers)

        self.config = _Config(grid, (32 * metadata.num_warps, 1, 1), metadata.shared)
        if metadata.launch_pdl:
            self._attribute = _Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION)
            self._attribute.value[0] = 1
            self.config.attributes = ctypes.pointer(self._attribute)
            self.config.n_attributes = 1
        self._launch_arguments = (
            ctypes.c_void_p(ctypes.addressof(self.config)),
            ctypes.c_void_p(compiled.function),
            ctypes.c_void_p(ctypes.addressof(self._pointers)),
            None,
        )
        self._launch = driver.launching_driver().cuLaunchKernelEx
        self._stream = 0  # of the last launch

    def launch(self, stream: int) -> None:
        """Launch the kernel with the parameters in ``slots`` on the stream of this handle."""
        if stream != self._stream:
            self.config.stream = stream
            self._stream = stream
        status = self._launch(*self._launch_arguments)
        if status == _INVALID_CONTEXT:
            _use_primary_context()
            status = self._launch(*self._launch_arguments)
        if status:
            driver.check("cuLaunchKernelEx", status)


def _use_primary_context() -> None:
    """Make the GPU's context this thread's, as CUDA's runtime does at a thread's first call. The
    launch may be that first call."""
    library = driver.driver()
    context = ctypes.c_void_p()
    status = library.cuDevicePrimaryCtxRetain(ctypes.byref(context), torch.cuda.current_device())
    driver.check("cuDevicePrimaryCtxRetain", status)
    driver.check("cuCtxSetCurrent", library.cuCtxSetCurrent(context))


def _scratch_memory(metadata: Any, grid: tuple[int, int, int]) -> torch.Tensor | None:
    """Return the memory that a kernel makes its tensor descriptors in; None if it makes none.

    All launches share it, which the stream orders: a launch that begins early makes descriptors
    when the one before it has ended.
    """
    size = getattr(metadata, "global_scratch_size", 0)
    if not size:
        return None
    n_blocks = grid[0] * grid[1] * grid[2]
    alignment = metadata.global_scratch_align
    memory = torch.empty(n_blocks * size + alignment, dtype=torch.uint8, device="cuda")
    return memory[-memory.data_ptr() % alignment :]


_UNSUPPORTED_METADATA = (
    "profile_scratch_size",
    "launch_cooperative_grid",
    "tensordesc_meta",
    "gsan",
)
"""Values that :class:`_LoadedKernel` doesn't give a launch, by name in Triton's metadata."""


def _is_supported(compiled: CompiledKernel) -> bool:
    """Return whether :class:`_LoadedKernel` gives a launch of this kernel everything that it
    needs."""
    metadata = compiled.metadata
    if getattr(metadata, "num_ctas", 1) != 1:
        return False
    return not any(getattr(metadata, name, None) for name in _UNSUPPORTED_METADATA)


def _is_hooked() -> bool:
    """Return whether a profiler has asked Triton for callbacks at launches."""
    enter = knobs.runtime.launch_enter_hook
    leave = knobs.runtime.launch_exit_hook
    try:
        return bool(enter.calls or leave.calls)
    except AttributeError:  # Older profilers replace the chains by functions or None.
        return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


# ---------------------------------------------------------------------- launches


class KernelLaunch:
    """A kernel with its grid and arguments, of which some change from launch to launch.

    A step of a call (:mod:`tdcoll.calls.steps`). For one thread at a time.

    Args:
        kernel: Made by :func:`tdcoll.jit`.
        blocks: The grid.
        arguments: All parameters that don't change, by name, constants included: tensors,
            addresses, numbers, and tuples of these.
        changing: The names of the parameters that each launch brings: addresses or whole numbers,
            or tensors where ``arguments`` has one; ``tuple.field`` for one of a tuple. Neighbours,
            in their order, are brought fastest.
        num_warps: Warps of each thread block.
        num_stages: Stages of the kernel's pipelined loops. None: Triton's default.
        allow_pdl: Whether the launch may begin before the one ahead has ended (programmatic
            dependent launch), if the kernel waits for that.
        maxnreg: The most registers of a thread. None: ptxas decides, and may spill a little.

    Raises:
        TypeError: A parameter has no argument (a compiled kernel has no defaults), or an argument
            no parameter.
    """

    def __init__(
        self,
        kernel: Any,
        blocks: Blocks,
        arguments: Mapping[str, Any],
        changing: Sequence[str],
        *,
        num_warps: int = 4,
        num_stages: int | None = None,
        allow_pdl: bool = False,
        maxnreg: int | None = None,
    ) -> None:
        by_name = {**dict.fromkeys(changing, 0), **arguments}
        by_name = {name: value for name, value in by_name.items() if "." not in name}
        if set(by_name) != set(kernel.arg_names):
            raise TypeError(
                f"{kernel.__name__} has parameters {sorted(kernel.arg_names)} and was given "
                f"arguments {sorted(by_name)}"
            )
        self._arguments = {name: by_name[name] for name in kernel.arg_names}
        self._kernel = kernel
        self._changing = tuple(changing)
        leaves = {
            leaf: value for name, whole in by_name.items() for leaf, value in _leaves(name, whole)
        }
        self._brings_tensors = any(isinstance(leaves.get(name), torch.Tensor) for name in changing)
        self._options: dict[str, Any] = {"num_warps": num_warps}
        if num_stages is not None:
            self._options["num_stages"] = num_stages
        if maxnreg is not None:
            self._options["maxnreg"] = maxnreg
        waits_first = getattr(kernel, "begins_in_stream_order", False)
        if allow_pdl and waits_first and _supports_early_launches():
            self._options["launch_pdl"] = True
        self._grid = _grid(blocks)
        self._loaded: _LoadedKernel | None = None
        self._device = 0

    @property
    def prepared(self) -> bool:
        """True once the kernel is compiled and loaded, which can't happen in a capture."""
        return INTERPRETED or self._loaded is not None

    def prepare(self) -> None:
        """Compile and load the kernel, if that is not done."""
        if self.prepared:
            return
        compiled = self._kernel.warmup(**self._arguments, grid=self._grid, **self._options)
        # While Triton compiles in the background, it returns something else.
        if isinstance(compiled, CompiledKernel) and _is_supported(compiled):
            self._loaded = _LoadedKernel(compiled, self._arguments, self._grid)
            self._device = torch.cuda.current_device()
            self._places = [self._loaded.place[name] for name in self._changing]
            first = self._places[0] if self._places else 0
            self._slice = slice(first, first + len(self._places))
            self._are_neighbours = self._places == list(range(first, self._slice.stop))

    def __call__(self, stream: int, *changing: Any) -> None:
        """Launch it on the stream of this handle, which is the current one."""
        loaded = self._loaded
        if loaded is None:
            self.prepare()
            loaded = self._loaded
        if loaded is None or _is_hooked():
            self._launch_by_triton(changing)
            return
        if self._brings_tensors:
            changing = tuple(_number(value) for value in changing)
        if self._are_neighbours:
            loaded.slots[self._slice] = changing
        else:
            for place, value in zip(self._places, changing, strict=True):
                loaded.slots[place] = value
        loaded.launch(stream)

    def _launch_by_triton(self, changing: Sequence[Any]) -> None:
        arguments = dict(self._arguments)
        for name, value in zip(self._changing, changing, strict=True):
            whole, _, field = name.partition(".")
            arguments[whole] = arguments[whole]._replace(**{field: value}) if field else value
        self._kernel[self._grid](**arguments, **self._options)

    def keep_constants(self, n_arguments: int) -> None:
        """Forget the first arguments, which every launch brings anew: tensors may be large."""
        self._arguments = dict(list(self._arguments.items())[n_arguments:])

    def with_arguments(self, blocks: Blocks, arguments: tuple[Any, ...]) -> None:
        """Launch it on the current stream with another grid and new arguments.

        The kernel is prepared. The arguments are those of all parameters that
        :meth:`keep_constants` has forgotten.
        """
        loaded = self._loaded
        # Scratch memory would have to grow with the grid.
        if loaded is None or loaded.scratch is not None or _is_hooked():
            whole = [_whole(argument) for argument in arguments]
            self._kernel[_grid(blocks)](*whole, *self._arguments.values(), **self._options)
            return
        # Triton asks the driver about every tensor, which takes longer than the launch.
        values: list[int] = []
        for argument in arguments:
            kind = type(argument)  # isinstance takes long to find that an int is no tensor
            if kind is int:
                values.append(argument)
            elif kind is FlatTuple:
                values += argument.numbers
            elif isinstance(argument, torch.Tensor):
                values.append(argument.data_ptr())
            else:
                values.append(argument)
        if not loaded.all_passed:
            values = [value for value, passed in zip(values, loaded.passed, strict=False) if passed]
        loaded.slots[: len(values)] = values
        loaded.config.grid = _grid(blocks)
        loaded.launch(torch._C._cuda_getCurrentRawStream(self._device))


class LaunchCache:
    """Launches of kernels whose arguments all change from launch to launch.

    It keeps a :class:`KernelLaunch` for each kind of arguments. One per device and owner; for one
    thread at a time.

    Attributes:
        only_loads: Whether kernels are compiled and loaded at the moment, and not launched.
    """

    def __init__(self, *, allow_pdl: bool = False) -> None:
        self._allow_pdl = allow_pdl
        self._launches: dict[Hashable, KernelLaunch] = {}
        self.only_loads = False

    def __call__(
        self,
        kernel: Any,
        blocks: Blocks,
        arguments: tuple[Any, ...],
        constants: tuple[Hashable, ...] = (),
        *,
        variant: Hashable = None,
        num_warps: int = 4,
        maxnreg: int | None = None,
    ) -> None:
        """Launch ``kernel`` on the current stream.

        Args:
            arguments: Tensors, addresses, whole numbers and :class:`FlatTuple` of these, in the
                kernel's order.
            constants: The kernel's last parameters, which are all ``tl.constexpr``.
            variant: All else that the compiled code depends on: dtypes of tensors that may differ
                from call to call, alignment, the values of integers that the kernel specialises on,
                and constants in tuples.
        """
        key = (id(kernel), constants, num_warps, variant)
        launch = self._launches.get(key)
        if launch is None:
            values = [_whole(argument) for argument in arguments]
            by_name = dict(zip(kernel.arg_names, [*values, *constants], strict=True))
            launch = KernelLaunch(
                kernel,
                blocks,
                by_name,
                (),
                num_warps=num_warps,
                allow_pdl=self._allow_pdl,
                maxnreg=maxnreg,
            )
            launch.prepare()
            launch.keep_constants(len(arguments))
            self._launches[key] = launch
        if not self.only_loads:
            launch.with_arguments(blocks, arguments)
