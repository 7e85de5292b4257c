# SPDX-License-Identifier: Apache-2.0
"""Launches past Triton's look-ups: what reaches the compiled kernel, and when they leave it to Triton."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton import knobs
from triton.backends.nvidia.driver import CudaLauncher
from triton.compiler import CompiledKernel
from triton.runtime import driver

from tdcoll.collectives import launch as launches
from tdcoll.collectives.launch import Launcher, ReadyKernel, require_all

STREAM = 77


class Compiled(CompiledKernel):
    """Takes notes of its launches: ``("direct" or "triton", ...)``."""

    def __init__(self, notes: list[Any]) -> None:
        self.notes, self.function, self.packed_metadata = notes, 1234, ("metadata",)

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        return lambda *arguments: self.notes.append(("triton", grid, arguments))

    @property
    def run(self) -> Callable[..., None]:
        return lambda *arguments: self.notes.append(("direct", arguments))


class Kernel:
    """Compiles for each launch that Triton looks up."""

    __name__ = "kernel"
    arg_names = ("tensor", "number", "BLOCK")

    def __init__(self) -> None:
        self.notes: list[Any] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., Compiled]:
        def launch(*arguments: Any, num_warps: int) -> Compiled:
            self.notes.append(("compile", grid, arguments, num_warps))
            return Compiled(self.notes)

        return launch


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: STREAM + device, raising=False)
    return Kernel()


def test_the_second_launch_passes_addresses_to_what_was_compiled(kernel: Kernel) -> None:
    launch, tensor, other = Launcher(), torch.zeros(4), torch.ones(4)
    launch(kernel, 5, (tensor, 7), (64,), num_warps=2)
    launch(kernel, (5, 6), (other, 8), (64,), num_warps=2)
    first, second = kernel.notes
    assert first[:2] == ("compile", (5, 1, 1))
    assert (first[2][1:], first[3]) == ((7, 64), 2)
    assert second == ("direct", (5, 6, 1, STREAM + 3, 1234, ("metadata",), None, None, None, other.data_ptr(), 8, 64))


@pytest.mark.parametrize("change", [{"constants": (32,)}, {"variant": "unaligned"}, {"num_warps": 8}])
def test_other_kinds_of_launches_are_compiled_for_themselves(kernel: Kernel, change: dict[str, Any]) -> None:
    launch, arguments = Launcher(), (torch.zeros(4), 7)
    usual: dict[str, Any] = {"constants": (64,), "variant": None, "num_warps": 4}
    launch(kernel, 1, arguments, **usual)
    launch(kernel, 1, arguments, **(usual | change))
    assert [note[0] for note in kernel.notes] == ["compile", "compile"]


@pytest.mark.parametrize("which", ["launch_enter_hook", "launch_exit_hook"])
@pytest.mark.parametrize("kind", ["chain", "function", "None"])
def test_profilers_see_every_launch(kernel: Kernel, which: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def hook(_: Any) -> None:
        pass

    chain = knobs.HookChain()
    chain.add(hook)
    monkeypatch.setattr(knobs.runtime, which, {"chain": chain, "function": hook, "None": None}[kind])
    launch, arguments = Launcher(), (torch.zeros(4), 7)
    for _ in range(2):
        launch(kernel, 1, arguments, (64,))
    assert [note[0] for note in kernel.notes] == ["compile", "direct" if kind == "None" else "triton"]


def test_defaults_are_not_relied_on(kernel: Kernel) -> None:
    require_all(kernel, (1, 2, 3))
    with pytest.raises(TypeError, match="kernel has 3 parameters and was given 2 arguments"):
        Launcher()(kernel, 1, (torch.zeros(4), 7))
    assert kernel.notes == []


# ---------------------------------------------------------------------- below Triton's launcher


class CLauncher:
    """In the place of Triton's C function."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, *arguments: Any) -> None:
        self.calls.append(arguments)


class Loaded(CompiledKernel):
    """With Triton's own launcher object."""

    run: Any = None
    module = None

    def __init__(self, run: Any) -> None:
        self.run, self.function, self.packed_metadata = run, 1234, (4, 1, 512)

    def __getitem__(self, grid: tuple[int, int, int]) -> None:
        pass


@pytest.fixture
def launcher(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``CudaLauncher`` of the installed Triton, as it is after compiling a plain kernel."""
    monkeypatch.setattr(launches, "BuiltinFunctionType", CLauncher)
    monkeypatch.setattr(driver, "_active", SimpleNamespace(allocate_default_profile_scratch=None), raising=False)
    made: Any = object.__new__(CudaLauncher)
    made.launch, made.num_ctas = CLauncher(), 1
    made.global_scratch_size = made.profile_scratch_size = 0
    made.global_scratch_align = made.profile_scratch_align = 1
    made.launch_cooperative_grid, made.launch_pdl, made.gsan_enabled = False, True, False
    made.arg_annotations, made.kernel_signature = ("annotation",), b"signature"
    return made


ARGUMENTS = (4096, 8192, 7, True)


def launched(ready: ReadyKernel, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What reaches ``CudaLauncher.__call__`` when the kernel is launched."""
    through: list[Any] = []
    monkeypatch.setattr(CudaLauncher, "__call__", lambda self, *arguments: through.append(arguments))
    ready(*ARGUMENTS, grid=(5, 6, 1))
    return through


def test_the_c_function_gets_what_triton_gives_it(launcher: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher(5, 6, 1, STREAM + 3, 1234, (4, 1, 512), None, None, None, *ARGUMENTS)
    ready = ReadyKernel(Loaded(launcher), 3)
    assert launched(ready, monkeypatch) == []
    by_triton, by_tdcoll = launcher.launch.calls
    assert by_tdcoll == by_triton


def _changed(self: Any, *arguments: Any) -> None:
    self.launch(*arguments, "something new")


@pytest.mark.parametrize(
    "change",
    [
        {"global_scratch_size": 8},
        {"profile_scratch_size": 8},
        {"gsan_enabled": True},
        {"launch": lambda *arguments: None},  # Triton's wrapper for tensor descriptors
        {"__call__": _changed},
    ],
)
def test_launchers_that_do_more_are_called(
    launcher: Any, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in change.items():
        monkeypatch.setattr(CudaLauncher if name == "__call__" else launcher, name, value)
    ready = ReadyKernel(Loaded(launcher), 3)
    assert launched(ready, monkeypatch) == [(5, 6, 1, STREAM + 3, 1234, (4, 1, 512), None, None, None, *ARGUMENTS)]
