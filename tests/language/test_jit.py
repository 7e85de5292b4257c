# SPDX-License-Identifier: Apache-2.0
"""`tdcoll.jit`: which kernels get NVSHMEM's bitcode and module initialisation, options, misspelt
keywords."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton.language as tl
from kernels_to_launch import NEED, NEED_NOT

import tdcoll
from tdcoll.language import jit
from tdcoll.testing import World

# ---------------------------------------------------------------------- compiled: a report of another process


def test_kernels_that_reach_nvshmem_are_found(compiled: dict[str, Any]) -> None:
    assert compiled["kernels"] == {**dict.fromkeys(NEED, True), **dict.fromkeys(NEED_NOT, False)}


def test_module_is_given_to_nvshmem_once_between_loading_and_the_first_launch(
    compiled: dict[str, Any],
) -> None:
    seen = compiled["launches"]
    assert seen["needing"] == ["load direct as 3", "init 3", "launch direct"]
    assert seen["needing, again"] == ["launch direct"]
    assert seen["needing, other options"] == ["load direct as 4", "init 4", "launch direct"]
    assert seen["needing, through helpers"][1:] == ["init 5", "launch through_two_helpers"]
    assert seen["modules"] == [3, 4]


def test_launch_before_a_job_is_refused_and_may_be_tried_again(compiled: dict[str, Any]) -> None:
    for when in ("before a job", "before a job, again"):
        (event,) = compiled["launches"][f"needing, {when}"]
        assert event.startswith(
            "NotInitializedError: kernel direct calls NVSHMEM: call tdcoll.initialize() before"
        )


def test_launch_of_a_loaded_kernel_after_the_job_is_refused(compiled: dict[str, Any]) -> None:
    """Its module points at a heap that is freed."""
    (event,) = compiled["launches"]["needing, between jobs"]
    assert event.startswith("NotInitializedError: kernel direct")
    assert compiled["launches"]["plain, between jobs"] == ["launch only_threads"]


def test_second_job_initialises_loaded_modules_again(compiled: dict[str, Any]) -> None:
    seen = compiled["launches"]
    assert seen["leave"] == []
    assert seen["join again"] == ["init 3", "init 4"]
    assert seen["needing, in the second job"] == ["launch direct"]


def test_other_kernels_are_untouched(compiled: dict[str, Any]) -> None:
    seen = compiled["launches"]
    assert seen["of another library, before a job"] == [
        "load of_another_library as 1",
        "launch of_another_library",
    ]
    assert seen["plain, before a job"] == ["load only_threads as 2", "launch only_threads"]
    assert seen["plain"] == ["launch only_threads"]
    assert seen["classes"] == {
        "direct": ["_NvshmemKernel"],
        "plain": ["CompiledKernel"],
        "other": ["CompiledKernel"],
    }
    assert seen["compiled kernel is untouched"]


def test_kernel_that_is_given_a_function_needs_what_that_needs(compiled: dict[str, Any]) -> None:
    seen = compiled["with functions"]
    for name in ("that needs it", "that needs it, deeper", "in a constexpr"):
        assert [event.split()[0] for event in seen[name]] == ["load", "init", "launch"]
    assert [event.split()[0] for event in seen["that does not need it"]] == ["load", "launch"]
    for name in seen:
        if not name.endswith("by name"):
            assert seen[name + ", by name"] == ["launch calls_its_argument"]


def test_kernel_compiled_by_a_pool_is_initialised_too(compiled: dict[str, Any]) -> None:
    """Under Triton's AsyncCompileMode a launch gets a stand-in for the kernel that is still being
    compiled."""
    seen = compiled["in advance"]
    (refusal,) = seen["direct, in the mode, before a job"]
    assert refusal.startswith("NotInitializedError: kernel by_its_name calls NVSHMEM")
    assert [event.split()[0] for event in seen["direct, in the mode"]] == ["load", "init", "launch"]
    assert seen["direct"] == ["launch by_its_name"]
    assert [event.split()[0] for event in seen["plain"]] == ["load", "launch"]


@pytest.mark.parametrize("name", ["launched_by_triton", "launched_by_triton_through_a_helper"])
def test_kernel_of_triton_jit_that_calls_nvshmem_is_refused(
    compiled: dict[str, Any], name: str
) -> None:
    assert (
        "calls NVSHMEM: decorate the kernel that is launched with @tdcoll.jit"
        in compiled["errors"][name]
    )


def test_wait_in_a_helper_that_is_not_inlined_is_refused(compiled: dict[str, Any]) -> None:
    assert compiled["errors"]["calls_a_waiting_helper"].startswith(
        "waiting_helper waits or acquires, and is noinline"
    )


def test_monitor_that_is_none_is_refused_at_the_launch(compiled: dict[str, Any]) -> None:
    seen = compiled["monitors"]
    assert [event.split()[0] for event in seen["the monitor itself"]] == ["load", "launch"]
    assert seen["a monitor"] == ["launch waits"]
    assert [event.split()[0] for event in seen["untold"]] == ["load", "launch"], (
        "of which peer, and of which signal"
    )
    for name in ("other memory", "other memory, by name", "the monitor itself, by name"):
        (refusal,) = seen[name]
        assert refusal.startswith(
            "ValueError: waits: monitor must be the words of an open tdcoll.WaitMonitor"
        )


def test_cached_kernels_are_of_this_lowering(compiled: dict[str, Any]) -> None:
    """Triton's own key has the source of Triton functions, and nothing of what an extern function
    emits."""
    key, other = compiled["cache keys"]
    assert key.rsplit("-", 1)[0] == other.rsplit("-", 1)[0]
    assert key != other


def test_options_are_those_of_triton(compiled: dict[str, Any]) -> None:
    assert compiled["options"] == {
        "type": "TdcollJITFunction",
        "bare": "TdcollJITFunction",
        "do_not_specialize": [False, True],
        "on_alignment": [True, False],
        "noinline": True,
        "version": 3,
        "debug": True,
    }


def test_unknown_keyword_is_refused_when_compiled(compiled: dict[str, Any]) -> None:
    (refusal,) = compiled["launches"]["unknown keyword"]
    assert "num_warsp" in refusal


# ---------------------------------------------------------------------- interpreted


@tdcoll.jit(
    do_not_specialize=["value"], do_not_specialize_on_alignment=["out"], noinline=False, debug=False
)
def with_options(out, value, BLOCK: tl.constexpr = 4):
    tl.store(out + tl.arange(0, BLOCK), value)


def test_options_are_accepted_when_interpreted() -> None:
    out = torch.zeros(4, dtype=torch.int32)
    World(1).run(lambda pe: with_options[(1,)](out, 7, num_warps=8, num_stages=2))
    assert out.tolist() == [7] * 4
    World(1).run(lambda pe: with_options[(1,)](out, value=8, BLOCK=2))
    assert out.tolist() == [8, 8, 7, 7]


def test_unknown_keyword_is_refused_when_interpreted() -> None:
    out = torch.zeros(4, dtype=torch.int32)
    launch = with_options[(1,)]
    with pytest.raises(
        TypeError, match=r"with_options\(\) got unknown keyword\(s\) \['BLOK', 'num_warsp'\]"
    ):
        World(1).run(lambda pe: launch(out, 7, num_warsp=8, BLOK=2))
    assert out.tolist() == [0] * 4


def test_unknown_option_is_refused() -> None:
    with pytest.raises(TypeError, match="do_not_specialise"):
        tdcoll.jit(do_not_specialise=["value"])


# ---------------------------------------------------------------------- the bitcode library


@pytest.fixture
def fresh_path():
    jit._bitcode_path.cache_clear()
    yield
    jit._bitcode_path.cache_clear()


@pytest.mark.usefixtures("fresh_path")
@pytest.mark.parametrize("folder", ["home", "site/nvidia/nvshmem"])
def test_bitcode_of_nvshmem_home_and_of_the_wheel(
    monkeypatch: Any, tmp_path: Path, folder: str
) -> None:
    """NVSHMEM_HOME comes first."""
    library = tmp_path / folder / "lib" / "libnvshmem_device_sm_90.bc"
    for path in (library, tmp_path / "site/nvidia/nvshmem/lib/libnvshmem_device.bc"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    spec = SimpleNamespace(
        submodule_search_locations=(str(tmp_path / "elsewhere"), str(tmp_path / "site/nvidia"))
    )
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setenv("NVSHMEM_HOME", str(tmp_path / "home"))
    if folder != "home":
        monkeypatch.delenv("NVSHMEM_HOME")
    assert jit.bitcode_path(90) == str(library)


@pytest.mark.usefixtures("fresh_path")
def test_bitcode_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NVSHMEM_HOME", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        FileNotFoundError, match=f"for sm_80 .* was not found in {tmp_path / 'lib'}"
    ):
        jit.bitcode_path(80)


@pytest.mark.usefixtures("fresh_path")
def test_bitcode_of_the_current_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    for arch in (80, 90):
        (tmp_path / "lib" / f"libnvshmem_device_sm_{arch}.bc").touch()
    monkeypatch.setenv("NVSHMEM_HOME", str(tmp_path))
    devices = {0: 90, 1: 80}
    current = 0
    target = lambda: SimpleNamespace(arch=devices[current])  # noqa: E731
    active = SimpleNamespace(get_current_device=lambda: current, get_current_target=target)
    monkeypatch.setattr(jit, "driver", SimpleNamespace(active=active))
    jit._architecture.cache_clear()
    try:
        for current, arch in (*devices.items(), *devices.items()):  # noqa: B007
            assert jit.bitcode_path() == str(tmp_path / "lib" / f"libnvshmem_device_sm_{arch}.bc")
    finally:
        jit._architecture.cache_clear()
