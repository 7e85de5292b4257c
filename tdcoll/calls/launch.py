# SPDX-License-Identifier: Apache-2.0
"""Launches of kernels, prepared once and made again with other addresses.

Triton looks up a kernel and its launcher at every launch, 15 us a time, and the C function below still takes all
arguments apart. Here the parameters of a kernel lie in one block of memory, as the CUDA driver reads them: a launch
writes those that change and calls ``cuLaunchKernelEx`` (CUDA Driver API, *Execution Control*). The signature that
Triton compiled says which arguments are parameters, and the PTX how many the driver expects.

**Launches that begin early** (programmatic dependent launch). Such a launch may be brought onto the GPU while the last
blocks of the one before it on the stream still run. Its kernel begins with
:func:`tdcoll.primitives.group.in_stream_order`, which waits until that one is over, and only then lets the next begin
likewise. A kernel whose text begins so is compiled with ``launch_pdl`` (:class:`Launch`), which makes the function a
wait, and for which the driver is then asked.

Why nothing waits for ever. A launch lets the next begin when *all* of its blocks have said so or ended. By then all of
them have been on the GPU, so blocks that come early take no place which a block of the launch before needs. The wait
comes before the permission, so when blocks of launch k + 1 are there, all launches up to k - 1 have ended: a stream
holds the places of at most two launches. The second may be another library's and as large as the GPU. If launches of
several contexts are in flight together and wait for peers, what waits behind one could keep out the other, on each rank
another one. Contexts with a budget of thread blocks (``max_blocks``), and those of the backend, therefore launch as
usual. So do other libraries' kernels: before or behind ours, one begins when the other has ended.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import compress
from typing import Any

import torch
import triton.language as tl
from triton import knobs
from triton.compiler import CompiledKernel

from tdcoll.language import INTERPRETED

_PROGRAMMATIC_STREAM_SERIALIZATION = 6
"""``CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION``."""

_INVALID_CONTEXT = 201
"""``CUDA_ERROR_INVALID_CONTEXT``: this thread has none."""


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
def _driver() -> Any:
    return ctypes.PyDLL("libcuda.so.1")  # which keeps the GIL: a launch takes less time than giving it away


@functools.cache
def _early_launches() -> bool:
    """Return whether launches may begin before the one ahead has ended: from Hopper on, unless ``TDCOLL_PDL`` is 0."""
    return not INTERPRETED and os.environ.get("TDCOLL_PDL") != "0" and torch.cuda.get_device_capability() >= (9, 0)


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """``(name, value)``, or those of its fields, ``name.field``, if it is a tuple."""
    if isinstance(value, tuple):
        names = getattr(value, "_fields", range(len(value)))
        for field, inner in zip(names, value, strict=True):
            yield from _leaves(f"{name}.{field}", inner)
    else:
        yield name, value


def _number(value: Any) -> int:
    return value.data_ptr() if isinstance(value, torch.Tensor) else int(value)


class Packed:
    """A tuple that many launches take, taken apart once. ``numbers``: addresses and whole numbers, no constants."""

    __slots__ = ("numbers", "whole")

    def __init__(self, whole: tuple[Any, ...], numbers: list[int] | None = None) -> None:
        self.whole = whole
        if numbers is None:
            numbers = [_number(value) for _, value in _leaves("", whole) if not isinstance(value, tl.constexpr)]
        self.numbers = numbers


class _Prepared:
    """A compiled kernel and its parameters. Not for two threads at once: they would share the parameters.

    Attributes:
        slots: the parameters, 64 bits each, of which the driver reads as many as the parameter has: the low ones.
        place: index in ``slots`` by name, ``tuple.field`` for one of a tuple.
        passed: of the arguments (tuples one by one, without ``tl.constexpr`` in them), parameters and not constants.
        all_passed: none but the constants of the kernel's text, which come last, are constants.
    """

    def __init__(self, compiled: CompiledKernel, arguments: Mapping[str, Any], grid: tuple[int, int, int]) -> None:
        _ = compiled[grid]  # loads it
        metadata, signature = compiled.metadata, compiled.src.signature
        leaves = [
            (name, kind, value)
            for argument in arguments
            for (name, kind), (_, value) in zip(
                _leaves(argument, signature[argument]), _leaves(argument, arguments[argument]), strict=True
            )
            if not isinstance(value, tl.constexpr)
        ]
        kinds, values = [(name, kind) for name, kind, _ in leaves], [value for _, _, value in leaves]
        self.passed = [kind != "constexpr" for _, kind in kinds]
        self.all_passed = all(passed or name.isupper() for passed, (name, _) in zip(self.passed, kinds, strict=True))
        self.place = {name: i for i, (name, _) in enumerate(compress(kinds, self.passed))}
        entry = re.search(r"\.entry\b[^{]*", compiled.asm["ptx"])
        assert entry is not None
        n = entry[0].count(".param")  # pointers that Triton adds come last, null for kernels that want none
        self.slots: Any = (ctypes.c_uint64 * n)(*map(_number, compress(values, self.passed)))
        begin = ctypes.addressof(self.slots)
        self._pointers = (ctypes.c_void_p * n)(*(begin + 8 * i for i in range(n)))
        self.config = config = _Config(grid, (32 * metadata.num_warps, 1, 1), metadata.shared)
        if metadata.launch_pdl:
            self._attribute = _Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION)
            self._attribute.value[0] = 1
            config.attributes, config.n_attributes = ctypes.pointer(self._attribute), 1
        at_config, at_pointers = ctypes.addressof(config), ctypes.addressof(self._pointers)
        self._given = *map(ctypes.c_void_p, (at_config, compiled.function, at_pointers)), None
        self._launch = _driver().cuLaunchKernelEx
        self._stream = 0  # of the last launch

    def launch(self, stream: int) -> None:
        if stream != self._stream:
            self.config.stream = self._stream = stream
        failed = self._launch(*self._given)
        if failed == _INVALID_CONTEXT:
            _use_primary_context()
            failed = self._launch(*self._given)
        if failed:
            _raise("cuLaunchKernelEx", failed)


def _use_primary_context() -> None:
    """Make the GPU's context this thread's, as CUDA's runtime does at a thread's first call: the launch may be that."""
    context = ctypes.c_void_p()
    if failed := _driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), torch.cuda.current_device()):
        _raise("cuDevicePrimaryCtxRetain", failed)
    if failed := _driver().cuCtxSetCurrent(context):
        _raise("cuCtxSetCurrent", failed)


def _raise(function: str, failed: int) -> None:
    name = ctypes.c_char_p()
    _driver().cuGetErrorName(failed, ctypes.byref(name))
    raise RuntimeError(f"{function} failed with {(name.value or b'?').decode()} ({failed})")


def _known(compiled: CompiledKernel) -> bool:
    """Return whether :class:`_Prepared` gives a launch of this kernel all that it needs."""
    metadata = compiled.metadata
    more = ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "tensordesc_meta", "gsan")
    return getattr(metadata, "num_ctas", 1) == 1 and not any(getattr(metadata, name, None) for name in more)


def _hooked() -> bool:
    """Return whether a profiler has asked Triton to be told of launches."""
    hooks = knobs.runtime
    enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook
    try:
        return bool(enter.calls or leave.calls)
    except AttributeError:  # functions or None, which older profilers put in the place of the chains
        return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def _grid(blocks: int | tuple[int, int]) -> tuple[int, int, int]:
    return (blocks, 1, 1) if isinstance(blocks, int) else (*blocks, 1)


def _whole(argument: Any) -> Any:
    return argument.whole if isinstance(argument, Packed) else argument


class Launch:
    """A kernel with its grid and arguments, of which some change from launch to launch. For one thread at a time.

    Args:
        kernel: made by :func:`tdcoll.jit`.
        blocks: of the grid's first dimension, or first two.
        arguments: of all other parameters, by name, constants included: tensors, addresses, numbers, tuples of these.
        changing: parameters that each launch gives: neighbours, addresses or whole numbers; ``tuple.field`` of a tuple.
        num_warps: warps of each thread block.
        early: may begin before what was launched before has ended, if the kernel waits for that.
        maxnreg: the most registers of a thread. None: ptxas decides, and may spill a little.

    Raises:
        TypeError: a parameter has no argument (a compiled kernel knows of no defaults), or an argument no parameter.
    """

    def __init__(
        self,
        kernel: Any,
        blocks: int | tuple[int, int],
        arguments: Mapping[str, Any],
        changing: Sequence[str],
        *,
        num_warps: int = 4,
        early: bool = False,
        maxnreg: int | None = None,
    ) -> None:
        given = {**dict.fromkeys(changing, 0), **arguments}
        given = {name: value for name, value in given.items() if "." not in name}
        if set(given) != set(kernel.arg_names):
            raise TypeError(
                f"{kernel.__name__} has parameters {sorted(kernel.arg_names)} and was given arguments {sorted(given)}"
            )
        self._arguments = {name: given[name] for name in kernel.arg_names}
        order = [leaf for name, value in self._arguments.items() for leaf, _ in _leaves(name, value)]
        first = order.index(changing[0]) if changing else 0
        assert order[first : first + len(changing)] == list(changing), f"{kernel.__name__} has another order: {order}"
        self._kernel, self._changing = kernel, tuple(changing)
        self._options: dict[str, Any] = {"num_warps": num_warps}
        if maxnreg is not None:
            self._options["maxnreg"] = maxnreg
        if early and getattr(kernel, "begins_in_stream_order", False) and _early_launches():
            self._options["launch_pdl"] = True
        self._grid = _grid(blocks)
        self._prepared: _Prepared | None = None
        self._device = 0

    @property
    def prepared(self) -> bool:
        """True once the kernel is compiled and loaded. A kernel cannot be compiled while a CUDA graph is captured."""
        return INTERPRETED or self._prepared is not None

    def prepare(self) -> None:
        """Compile and load the kernel, if that is not done."""
        if self.prepared:
            return
        compiled = self._kernel.warmup(**self._arguments, grid=self._grid, **self._options)
        if isinstance(compiled, CompiledKernel) and _known(compiled):  # not while it is compiled in the background
            self._prepared = prepared = _Prepared(compiled, self._arguments, self._grid)
            self._device = torch.cuda.current_device()
            first = prepared.place[self._changing[0]] if self._changing else 0
            self._places = slice(first, first + len(self._changing))

    def __call__(self, stream: int, *new: int) -> None:
        """Launch it on the stream of this handle, which is the current one."""
        prepared = self._prepared
        if prepared is None:
            self.prepare()
            prepared = self._prepared
        if prepared is None or _hooked():
            arguments = dict(self._arguments)
            for name, value in zip(self._changing, new, strict=True):
                whole, _, field = name.partition(".")
                arguments[whole] = arguments[whole]._replace(**{field: value}) if field else value
            self._kernel[self._grid](**arguments, **self._options)
            return
        prepared.slots[self._places] = new
        prepared.launch(stream)

    def keep_constants(self, n: int) -> None:
        """Let the first ``n`` arguments go, which every launch brings anew: tensors may be large."""
        self._arguments = dict(list(self._arguments.items())[n:])

    def with_arguments(self, blocks: int | tuple[int, int], arguments: tuple[Any, ...]) -> None:
        """Launch it, once it is prepared, on the current stream with other arguments for all parameters but those that
        :meth:`keep_constants` has kept, and with another grid."""
        prepared = self._prepared
        if prepared is None or _hooked():
            self._kernel[_grid(blocks)](*map(_whole, arguments), *self._arguments.values(), **self._options)
            return
        # Triton asks the driver about every tensor, which takes longer than the launch; not about addresses.
        values: list[int] = []
        for argument in arguments:
            if (of := type(argument)) is int:  # isinstance takes long to find that it is no tensor
                values.append(argument)
            elif of is Packed:
                values += argument.numbers
            else:
                values.append(argument.data_ptr() if isinstance(argument, torch.Tensor) else argument)
        if not prepared.all_passed:
            values = list(compress(values, prepared.passed))
        prepared.slots[: len(values)] = values
        prepared.config.grid = _grid(blocks)
        prepared.launch(torch._C._cuda_getCurrentRawStream(self._device))


class Launcher:
    """Launches of kernels whose arguments all change from launch to launch: a :class:`Launch` for each kind of them.

    One per device and owner; for one thread at a time.
    """

    def __init__(self, *, early: bool = False) -> None:
        self._early = early
        self._launches: dict[Hashable, Launch] = {}
        self.only_loads = False
        """Whether kernels are compiled and loaded at the moment, and not launched."""

    def __call__(
        self,
        kernel: Any,
        blocks: int | tuple[int, int],
        arguments: tuple[Any, ...],
        constants: tuple[Hashable, ...] = (),
        *,
        variant: Hashable = None,
        num_warps: int = 4,
        maxnreg: int | None = None,
    ) -> None:
        """Launch ``kernel`` on the current stream.

        Args:
            arguments: tensors, addresses, whole numbers and :class:`Packed` tuples of these, in the kernel's order.
            constants: its last parameters, ``tl.constexpr`` all.
            variant: whatever else the compiled code depends on: the dtypes of tensors whose dtype may differ from call
                to call, alignment, the values of integers that the kernel specialises on, and constants in tuples.
        """
        key = (id(kernel), constants, num_warps, variant)
        launch = self._launches.get(key)
        if launch is None:
            values = (*map(_whole, arguments), *constants)
            given = dict(zip(kernel.arg_names, values, strict=True))
            launch = Launch(kernel, blocks, given, (), num_warps=num_warps, early=self._early, maxnreg=maxnreg)
            launch.prepare()
            launch.keep_constants(len(arguments))
            self._launches[key] = launch
        if not self.only_loads:
            launch.with_arguments(blocks, arguments)
