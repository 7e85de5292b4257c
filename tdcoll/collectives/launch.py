# SPDX-License-Identifier: Apache-2.0
"""Launching compiled kernels without Triton's own lookup, which takes 15 us a time where a launch takes 4."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from types import BuiltinFunctionType
from typing import Any

import torch
from triton import knobs
from triton.compiler import CompiledKernel

__all__ = ["Launcher", "ReadyKernel", "require_all"]


def require_all(kernel: Any, arguments: tuple[Any, ...]) -> None:
    """Raise ``TypeError`` unless ``arguments`` has one for each parameter of ``kernel``, those with a default included:
    a compiled kernel knows of no defaults, and it is only there from the second call on, on a GPU."""
    if len(arguments) != len(kernel.arg_names):
        raise TypeError(
            f"{kernel.__name__} has {len(kernel.arg_names)} parameters and was given {len(arguments)} arguments"
        )


class _Passed:
    """Something to be found again among the arguments of a call."""


def _c_launcher(compiled: CompiledKernel) -> tuple[Callable[..., Any], tuple[Any, ...], bool] | None:
    """The C function below Triton's ``CudaLauncher``, which spends 1 to 2 us on arguments that never change.

    Its parameters differ between versions of Triton, so the launcher is called once with a recorder in the place of
    the function, and what arrives there must be one of the two known forms.

    Returns:
        The function, what it gets between the stream and the kernel's arguments, and whether these are one argument, a
        tuple; None if the launcher is any other, or does more at a launch than to pass its arguments on.
    """
    run: Any = compiled.run
    kind, launch = type(run), getattr(run, "launch", None)
    # A Python function here is Triton's wrapper for tensor descriptors.
    if (kind.__module__, kind.__name__) != ("triton.backends.nvidia.driver", "CudaLauncher") or not isinstance(
        launch, BuiltinFunctionType
    ):
        return None
    scratch = [getattr(run, f"{of}_scratch_size", None) for of in ("global", "profile")]
    if scratch != [0, 0] or getattr(run, "gsan_enabled", False):
        return None
    grid, stream, function, metadata = (_Passed(), _Passed(), _Passed()), _Passed(), _Passed(), _Passed()
    arguments = (_Passed(), _Passed())
    recorded: list[tuple[Any, ...]] = []
    probe = copy.copy(run)
    probe.launch = lambda *given: recorded.append(given)
    try:
        probe(*grid, stream, function, metadata, None, None, None, *arguments)
    except Exception:  # of a launcher that wants to know more of its arguments
        return None
    flags = (getattr(run, "launch_cooperative_grid", None), getattr(run, "launch_pdl", None))
    described = (getattr(run, "arg_annotations", None), getattr(run, "kernel_signature", None))
    begin, hooks = (*grid, stream, function, *flags), (None, None, None)
    apart = (*begin, None, None, metadata, *hooks, *arguments)
    packed = (*begin, metadata, *hooks, None, None, *described, arguments)
    own = (compiled.function, *flags)
    if recorded == [apart]:  # Triton 3.6
        return launch, (*own, None, None, compiled.packed_metadata, *hooks), False
    if recorded == [packed]:  # Triton 3.7 to 3.9
        return launch, (*own, compiled.packed_metadata, *hooks, None, None, *described), True
    return None


class ReadyKernel:
    """A compiled and loaded kernel, launched on the current stream of its device.

    What Triton looks up at each launch and does not change is looked up once: that halves what the host takes.

    Args:
        compiled: what a launch of the kernel returned; it knows of no defaults of parameters.
        device: index of the GPU.
    """

    def __init__(self, compiled: CompiledKernel, device: int) -> None:
        _ = compiled[(1, 1, 1)]  # loads it
        self._compiled, self._device = compiled, device
        known = _c_launcher(compiled)
        if known is None:
            between = (compiled.function, compiled.packed_metadata, None, None, None)
            known = compiled.run, between, False
        self._run, self._between, self._packed = known

    def __call__(self, *arguments: Any, grid: tuple[int, int, int]) -> None:
        """Launch it. All of the kernel's arguments, constants included; addresses may stand for tensors."""
        self.launch(grid, torch._C._cuda_getCurrentRawStream(self._device), arguments)

    def launch(self, grid: tuple[int, int, int], stream: int, arguments: tuple[Any, ...]) -> None:
        """As a call, for callers that know the handle of the current stream."""
        hooks = knobs.runtime
        enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook
        try:
            hooked = enter.calls or leave.calls
        except AttributeError:  # functions or None, which older profilers put in the place of the chains
            hooked = getattr(enter, "calls", enter) or getattr(leave, "calls", leave)
        if hooked:
            self._compiled[grid](*arguments)
        elif self._packed:
            self._run(*grid, stream, *self._between, arguments)
        else:
            self._run(*grid, stream, *self._between, *arguments)


class Launcher:
    """Remembers what Triton compiled for a kernel. One per device and owner; forgotten with its owner."""

    def __init__(self) -> None:
        self._ready: dict[Hashable, ReadyKernel] = {}

    def __call__(
        self,
        kernel: Any,
        programs: int | tuple[int, int],
        arguments: tuple[Any, ...],
        constants: tuple[Hashable, ...] = (),
        *,
        variant: Hashable = None,
        num_warps: int = 4,
    ) -> None:
        """Launch ``kernel`` on the current stream.

        Args:
            programs: of the grid's first dimension, or first two.
            arguments: tensors, addresses and numbers, in the order of the kernel's parameters.
            constants: its last parameters, ``tl.constexpr`` all.
            variant: whatever else the compiled code depends on: the dtypes of tensors whose dtype may differ from call
                to call, alignment, and the values of integers that the kernel specialises on.
        """
        grid = (programs, 1, 1) if isinstance(programs, int) else (*programs, 1)
        key = (id(kernel), constants, num_warps, variant)
        ready = self._ready.get(key)
        if ready is not None:
            # Triton asks the driver about every tensor, which takes longer than the launch; not about addresses.
            plain = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments]
            ready(*plain, *constants, grid=grid)
            return
        require_all(kernel, (*arguments, *constants))
        made = kernel[grid](*arguments, *constants, num_warps=num_warps)
        if isinstance(made, CompiledKernel):  # not in the interpreter, nor while it is compiled in the background
            self._ready[key] = ReadyKernel(made, torch.cuda.current_device())
