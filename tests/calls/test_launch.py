# SPDX-License-Identifier: Apache-2.0
"""Launches past Triton's look-ups: what reaches the driver, and when they leave it to Triton."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import triton.language as tl
from landings import facts_on
from ranks import on_ranks
from triton import knobs
from triton.compiler import CompiledKernel

import tdcoll
from tdcoll.calls import kernel_launch as launches
from tdcoll.calls.call_launches import launches_of
from tdcoll.calls.kernel_launch import FlatTuple, KernelLaunch, LaunchCache
from tdcoll.collectives.all_gather.spec import SPEC as ALL_GATHER

STREAM = 77


class Pair(NamedTuple):
    near: Any
    far: Any
    SIZE: Any


class Driver:
    """In the place of libcuda: decodes what each launch brings."""

    def __init__(self) -> None:
        self.launches: list[dict[str, Any]] = []
        self.answer = 0
        self.context: int | None = 99
        self.widths: list[Any] = []

    def cuLaunchKernelEx(self, config: Any, function: Any, pointers: Any, extra: Any) -> int:
        assert extra is None
        if self.context is None:
            return 201
        config = launches._Config.from_address(config.value)
        pointers = (ctypes.c_void_p * len(self.widths)).from_address(pointers.value)
        values = [
            kind.from_address(at).value for at, kind in zip(pointers, self.widths, strict=True)
        ]
        attributes = [
            (config.attributes[i].id, config.attributes[i].value[0])
            for i in range(config.n_attributes)
        ]
        self.launches.append(
            {
                "grid": tuple(config.grid),
                "block": tuple(config.block),
                "shared": config.shared_bytes,
                "stream": config.stream,
                "function": function.value,
                "values": values,
                "attributes": attributes,
            }
        )
        return self.answer

    def cuDevicePrimaryCtxRetain(self, context: Any, device: int) -> int:
        context._obj.value = 1000 + device
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:
        self.context = context.value
        return 0

    def cuGetErrorName(self, failed: int, name: Any) -> int:
        name._obj.value = b"CUDA_ERROR_" + str(failed).encode()
        return 0


class Compiled(CompiledKernel):
    """What Triton would have made; its own launches are notes."""

    def __init__(self, kernel: Kernel, num_warps: int, launch_pdl: bool = False) -> None:
        self.kernel, self.function = kernel, 1234
        self.metadata: Any = SimpleNamespace(num_warps=num_warps, shared=512, **kernel.metadata)
        self.metadata.launch_pdl = launch_pdl
        self.src: Any = SimpleNamespace(signature=kernel.signature)
        parameters = ",\n".join(f".param .u64 kernel_param_{i}" for i in range(kernel.parameters))
        self.asm: Any = {
            "ptx": f".visible .entry kernel(\n{parameters}\n)\n.reqntid 64\n{{ .param .b64 of_a_call; }}"
        }

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        return lambda *arguments: None

    @property
    def run(self) -> Callable[..., None]:
        raise AssertionError("not launched by Triton")


class Kernel:
    """A kernel of a tensor, a flag, a number, a pair and a constant; two parameters more are
    Triton's."""

    __name__ = "kernel"
    arg_names = ("tensor", "flag", "number", "pair", "BLOCK")

    def __init__(self, driver: Driver) -> None:
        pair = Pair("*i64", "i64", "constexpr")
        self.signature = {
            "tensor": "*fp32",
            "flag": "i1",
            "number": "i32",
            "pair": pair,
            "BLOCK": "constexpr",
        }
        self.metadata: dict[str, Any] = {"global_scratch_size": 0}
        self.parameters = 7
        self.notes: list[Any] = []
        u64 = ctypes.c_uint64
        driver.widths = [u64, ctypes.c_uint8, ctypes.c_uint32, u64, u64, u64, u64]

    def warmup(
        self, *, grid: tuple[int, int, int], num_warps: int, launch_pdl: bool = False, **given: Any
    ) -> Compiled:
        self.notes.append(("warmup", grid, num_warps, given))
        return Compiled(self, num_warps, launch_pdl)

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., Compiled]:
        def launch(
            *arguments: Any, num_warps: int, launch_pdl: bool = False, **named: Any
        ) -> Compiled:
            self.notes.append(("triton", grid, num_warps, arguments or named))
            self.by_triton_early = launch_pdl
            return Compiled(self, num_warps, launch_pdl)

        return launch


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr("tdcoll.base.driver.driver", lambda: made)
    monkeypatch.setattr("tdcoll.base.driver.launching_driver", lambda: made)
    monkeypatch.setattr(launches, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda device: STREAM + device, raising=False
    )
    return made


@pytest.fixture
def kernel(driver: Driver) -> Kernel:
    return Kernel(driver)


TENSOR, OTHER = torch.zeros(4), torch.ones(4)
PAIR = Pair(OTHER, 1 << 40, 8)
ARGUMENTS = {"tensor": TENSOR, "flag": True, "pair": PAIR, "BLOCK": 64}


def test_a_launch_brings_the_driver_what_changes_and_what_does_not(
    kernel: Kernel, driver: Driver
) -> None:
    launch = KernelLaunch(kernel, (5, 6), ARGUMENTS, ("number", "pair.near"), num_warps=2)
    assert not launch.prepared
    launch(STREAM, -2, OTHER.data_ptr())
    launch(STREAM + 1, 16, 32)
    assert launch.prepared
    assert [note[0] for note in kernel.notes] == ["warmup"]
    first, second = driver.launches
    assert first == {
        "grid": (5, 6, 1),
        "block": (64, 1, 1),
        "shared": 512,
        "stream": STREAM,
        "function": 1234,
        "values": [TENSOR.data_ptr(), 1, 2**32 - 2, OTHER.data_ptr(), 1 << 40, 0, 0],
        "attributes": [],
    }
    assert (second["stream"], second["values"]) == (
        STREAM + 1,
        [TENSOR.data_ptr(), 1, 16, 32, 1 << 40, 0, 0],
    )


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize(
    "missing", [None, "the wait", "the owner's permission", "a GPU that can", "the environment's"]
)
def test_launches_are_early_if_everything_allows_it(
    kernel: Kernel,
    driver: Driver,
    missing: str | None,
    hooked: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    capability = (8, 0) if missing == "a GPU that can" else (9, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setenv("TDCOLL_PDL", "0" if missing == "the environment's" else "1")
    monkeypatch.setattr(launches, "_is_hooked", lambda: hooked)
    monkeypatch.setattr(
        launches, "_supports_early_launches", launches._supports_early_launches.__wrapped__
    )
    kernel.begins_in_stream_order = missing != "the wait"  # type: ignore[attr-defined]
    allowed, expected = missing != "the owner's permission", missing is None
    KernelLaunch(kernel, 1, ARGUMENTS, ("number", "pair.near"), allow_pdl=allowed)(STREAM, 16, 32)
    if hooked:
        assert kernel.by_triton_early == expected
    else:  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        assert driver.launches[0]["attributes"] == ([(6, 1)] if expected else [])
    launch = LaunchCache(allow_pdl=allowed)
    launch(kernel, 1, (TENSOR, True, 7, FlatTuple(PAIR)), (64,))
    if hooked:
        assert kernel.by_triton_early == expected
    else:
        assert driver.launches[1]["attributes"] == driver.launches[0]["attributes"]


def test_a_launch_that_the_driver_refuses_is_an_error(kernel: Kernel, driver: Driver) -> None:
    driver.answer = 701
    with pytest.raises(RuntimeError, match=r"cuLaunchKernelEx failed with CUDA_ERROR_701 \(701\)"):
        launch_once(kernel)


@pytest.mark.parametrize(
    ("arguments", "changing"),
    [(ARGUMENTS, ()), ({**ARGUMENTS, "more": 1}, ("number",)), ({}, ("number",))],
)
def test_defaults_are_not_relied_on(
    kernel: Kernel, arguments: dict[str, Any], changing: tuple[str, ...]
) -> None:
    with pytest.raises(TypeError, match=r"kernel has parameters .* and was given arguments"):
        KernelLaunch(kernel, 1, arguments, changing)
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        LaunchCache()(kernel, 1, (TENSOR, True))
    assert kernel.notes == []


def test_a_thread_without_a_context_gets_that_of_its_gpu(kernel: Kernel, driver: Driver) -> None:
    driver.context = None
    launch_once(kernel)
    assert (driver.context, len(driver.launches)) == (1003, 1)


def launch_once(kernel: Kernel) -> None:
    KernelLaunch(kernel, 1, ARGUMENTS, ("number", "pair.near"))(STREAM, 16, 32)


@pytest.mark.parametrize("which", ["launch_enter_hook", "launch_exit_hook"])
@pytest.mark.parametrize("kind", ["chain", "function", "None"])
def test_profilers_see_every_launch(
    kernel: Kernel, driver: Driver, which: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hook(_: Any) -> None:
        pass

    chain = knobs.HookChain()
    chain.add(hook)
    monkeypatch.setattr(
        knobs.runtime, which, {"chain": chain, "function": hook, "None": None}[kind]
    )
    launch_once(kernel)
    by_triton = [note[3] for note in kernel.notes if note[0] == "triton"]
    if kind == "None":
        assert (by_triton, len(driver.launches)) == ([], 1)
    else:
        assert by_triton == [{**ARGUMENTS, "number": 16, "pair": PAIR._replace(near=32)}]
        assert driver.launches == []


def test_a_kernel_that_makes_descriptors_gets_memory_for_each_thread_block(
    kernel: Kernel, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = torch.empty
    made: list[torch.Tensor] = []

    def empty(size: int, *, dtype: torch.dtype, device: str) -> torch.Tensor:
        assert device == "cuda"
        made.append(real(size, dtype=dtype))
        return made[-1]

    monkeypatch.setattr(torch, "empty", empty)
    kernel.metadata = {"global_scratch_size": 256, "global_scratch_align": 128}
    launch = KernelLaunch(kernel, (5, 6), ARGUMENTS, ("number", "pair.near"))
    launch(STREAM, 16, 32)
    launch(STREAM, 16, 32)
    (memory,) = made
    *_, scratch, profile = driver.launches[0]["values"]
    assert driver.launches[1]["values"][-2:] == [scratch, profile]
    assert profile == 0
    assert scratch % 128 == 0
    assert memory.data_ptr() <= scratch
    assert scratch + 5 * 6 * 256 <= memory.data_ptr() + memory.nbytes


def test_parameters_that_change_need_not_be_neighbours(kernel: Kernel, driver: Driver) -> None:
    launch = KernelLaunch(kernel, 1, {**ARGUMENTS, "number": 3}, ("tensor", "pair.near"))
    launch(STREAM, 16, 32)
    launch(STREAM, 48, 64)
    assert [each["values"][:4] for each in driver.launches] == [[16, 1, 3, 32], [48, 1, 3, 64]]


def test_a_float_is_passed_as_fp32(kernel: Kernel, driver: Driver) -> None:
    """As a field of a tuple that an epilogue reads."""
    pair = Pair(torch.zeros(1, dtype=torch.int64), 0.5, tl.constexpr(2))
    launch = KernelLaunch(kernel, 1, {**ARGUMENTS, "number": 3, "pair": pair}, ("tensor",))
    launch(STREAM, 16)
    bits = driver.launches[0]["values"][4]
    assert struct.unpack("<f", struct.pack("<I", bits & 0xFFFFFFFF)) == (0.5,)


@pytest.mark.parametrize(
    "metadata",
    [{"profile_scratch_size": 8}, {"launch_cooperative_grid": True}, {"num_ctas": 2}],
)
def test_kernels_that_want_more_of_a_launch_are_left_to_triton(
    kernel: Kernel, driver: Driver, metadata: dict[str, Any]
) -> None:
    kernel.metadata = metadata
    launch_once(kernel)
    assert driver.launches == []
    assert kernel.notes[-1][0] == "triton"


def test_a_launcher_gives_the_driver_all_arguments(kernel: Kernel, driver: Driver) -> None:
    launch = LaunchCache()
    kernel.signature["pair"] = "constexpr"
    launch(kernel, 5, (TENSOR, True, 7, None), (64,), num_warps=2)
    launch(kernel, (5, 6), (OTHER, False, -8, None), (64,), num_warps=2)
    assert [note[:3] for note in kernel.notes] == [("warmup", (5, 1, 1), 2)]
    first, second = driver.launches
    assert (first["grid"], first["values"]) == ((5, 1, 1), [TENSOR.data_ptr(), 1, 7, 0, 0, 0, 0])
    assert (second["grid"], second["stream"], second["block"]) == (
        (5, 6, 1),
        STREAM + 3,
        (64, 1, 1),
    )
    assert second["values"] == [OTHER.data_ptr(), 0, 2**32 - 8, 0, 0, 0, 0]


def test_a_launcher_takes_tuples_apart_once_and_leaves_their_constants_out(
    kernel: Kernel, driver: Driver
) -> None:
    launch = LaunchCache()
    near, far = torch.zeros(4), torch.ones(4)
    first, second = (
        FlatTuple(Pair(near, 1 << 40, tl.constexpr(8))),
        FlatTuple(Pair(far, -1, tl.constexpr(8))),
    )
    assert first.numbers == [near.data_ptr(), 1 << 40]
    launch(kernel, 5, (TENSOR, True, 7, first), (64,), num_warps=2)
    launch(kernel, 6, (OTHER, False, 16, second), (64,), num_warps=2)
    (compiled,) = kernel.notes
    assert compiled[3] == {
        "tensor": TENSOR,
        "flag": True,
        "number": 7,
        "pair": first.whole,
        "BLOCK": 64,
    }
    assert [each["values"] for each in driver.launches] == [
        [TENSOR.data_ptr(), 1, 7, near.data_ptr(), 1 << 40, 0, 0],
        [OTHER.data_ptr(), 0, 16, far.data_ptr(), 2**64 - 1, 0, 0],
    ]


def test_a_constant_beside_a_tuple_does_not_shift_its_fields(
    kernel: Kernel, driver: Driver
) -> None:
    """Triton makes a constant of a 1 among the arguments, and of nothing in the tuple."""
    launch = LaunchCache()
    kernel.signature["number"] = "constexpr"
    kernel.parameters, driver.widths = 6, [kind for i, kind in enumerate(driver.widths) if i != 2]
    pair = FlatTuple(Pair(OTHER, 1, tl.constexpr(8)))
    for _ in range(2):
        launch(kernel, 5, (TENSOR, True, 1, pair), (64,))
    assert [each["values"] for each in driver.launches] == [
        [TENSOR.data_ptr(), 1, OTHER.data_ptr(), 1, 0, 0]
    ] * 2


@pytest.mark.parametrize(
    "change", [{"constants": (32,)}, {"variant": "unaligned"}, {"num_warps": 8}]
)
def test_other_kinds_of_launches_are_compiled_for_themselves(
    kernel: Kernel, driver: Driver, change: dict[str, Any]
) -> None:
    launch, usual = LaunchCache(), {"constants": (64,), "variant": None, "num_warps": 4}
    for given in (usual, usual | change, usual):
        launch(kernel, 1, (TENSOR, True, 7, FlatTuple(PAIR)), **given)
    assert ([note[0] for note in kernel.notes], len(driver.launches)) == (["warmup", "warmup"], 3)


@on_ranks(2)
def test_calls_that_are_launched_early_and_as_usual_are_of_two_kinds(pe: int) -> None:
    """Their kernels are compiled with and without ``launch_pdl``: each needs a first call before a
    graph."""
    with tdcoll.CollectiveContext(max_bytes_per_rank=64) as ctx:
        facts = [facts_on(ctx, n << 20, in_place=True) for n in (1, 2, 3)]
        kinds = [launches_of(ALL_GATHER, ctx, each, "direct") for each in facts]
        assert [kind.steps[0]._arguments["nbytes"] for kind in kinds] == [1 << 20, 2 << 20, 3 << 20]
        assert kinds[0].variant == kinds[1].variant != kinds[2].variant
