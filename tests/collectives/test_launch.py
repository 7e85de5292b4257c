# SPDX-License-Identifier: Apache-2.0
"""Launches past Triton's look-ups: what reaches the compiled kernel, and when they leave it to Triton."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from triton import knobs
from triton.compiler import CompiledKernel

from tdcoll.collectives.launch import Launcher, require_all

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
