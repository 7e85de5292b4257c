# SPDX-License-Identifier: Apache-2.0
"""What the language and `tdcoll.jit` do in a process that compiles: printed as JSON, for tests that
are interpreted.

A driver that only takes notes stands for the GPU: kernels are compiled for real, "loaded" and
"launched".
"""

from __future__ import annotations

import inspect
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import kernels_to_launch as kernels
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import file_hash, get_ptxas_version
from triton.compiler import CompiledKernel
from triton.runtime._async_compile import AsyncCompileMode
from triton.runtime.cache import triton_key
from triton.runtime.jit import JITFunction, MockTensor

import tdcoll
import tdcoll.language as tdl
from tdcoll import runtime
from tdcoll.language import jit, nvshmem, warm_up
from tdcoll.spec.functions import FUNCTIONS


class NotingDriver:
    """Just enough of a Triton driver; what is done with it is in ``events``."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.utils = self
        self._modules = 0

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 1 << 18}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[int, ...]:
        self._modules += 1
        self.events.append(f"load {name} as {self._modules}")
        return self._modules, 1000 + self._modules, 32, 0, 1024

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        return lambda *arguments: self.events.append(f"launch {metadata.name}")


def events_of(driver: NotingDriver, action: Any) -> list[str]:
    """What happened during ``action()``, its exception at the end."""
    driver.events.clear()
    try:
        action()
    except Exception as error:
        driver.events.append(f"{type(error).__name__}: {error}")
    return list(driver.events)


def root(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error)


def done_once() -> dict[str, int]:
    """How often Triton has done what it does once per process."""
    functions = {
        "hash of Triton": triton_key,
        "hashes of libraries": file_hash,
        "ptxas --version": get_ptxas_version,
    }
    gluon = int("triton.experimental.gluon" in sys.modules)
    return {"import of Gluon": gluon} | {
        name: of.cache_info().misses for name, of in functions.items()
    }


def warming_up(driver: NotingDriver) -> dict[str, Any]:
    """What is done once per process, before the warm-up, after it, and after another kernel was
    compiled."""
    out = MockTensor(triton.language.int32, (4,))
    seen: dict[str, Any] = {"before": done_once()}
    seen["events"] = events_of(driver, warm_up.compile_nothing)
    seen["after"] = done_once()
    kernels.direct.warmup(out, grid=(1,), num_warps=4)
    seen["later"] = done_once()
    return seen


def launches_with_functions(driver: NotingDriver) -> dict[str, Any]:
    """Launches of a kernel that calls what it is given. In a job."""
    out = MockTensor(triton.language.int32, (4,))
    kernel = kernels.calls_its_argument
    given = {
        "that needs it": kernels.helper,
        "that needs it, deeper": kernels.through_two_helpers,
        "in a constexpr": triton.language.constexpr(kernels.helper_of_helper),
        "that does not need it": kernels.only_thread_helper,
    }
    jit.set_module_init(lambda module: driver.events.append("init"))
    seen: dict[str, Any] = {}
    for name, function in given.items():
        seen[name] = events_of(driver, lambda function=function: kernel[(1,)](out, function))
        seen[name + ", by name"] = events_of(
            driver, lambda function=function: kernel[(1,)](out, function=function)
        )
    return seen


def launches_compiled_in_advance(driver: NotingDriver) -> dict[str, Any]:
    """Launches of kernels that a pool compiles under Triton's AsyncCompileMode."""
    out = MockTensor(triton.language.int32, (4,))
    chosen = {"direct": kernels.by_its_name, "plain": kernels.only_mentions}
    seen: dict[str, Any] = {}
    jit.set_module_init(None)
    with ThreadPoolExecutor(1) as pool, AsyncCompileMode(pool):
        for kernel in chosen.values():
            kernel.warmup(out, grid=(1,), num_warps=2)
        seen["direct, in the mode, before a job"] = events_of(
            driver, lambda: chosen["direct"][(1,)](out, num_warps=2)
        )
        jit.set_module_init(lambda module: driver.events.append("init"))
        seen["direct, in the mode"] = events_of(
            driver, lambda: chosen["direct"][(1,)](out, num_warps=2)
        )
    for name, kernel in chosen.items():
        seen[name] = events_of(driver, lambda kernel=kernel: kernel[(1,)](out, num_warps=2))
    return seen


def launches(driver: NotingDriver) -> dict[str, Any]:
    """Launches before, in and after a job."""
    out = MockTensor(triton.language.int32, (4,))
    direct, plain = kernels.direct, kernels.only_threads

    def launch(kernel: Any) -> list[str]:
        return events_of(driver, lambda: kernel[(1,)](out, num_warps=4))

    def join() -> None:
        jit.set_module_init(lambda module: driver.events.append(f"init {module}"))

    seen: dict[str, Any] = {}
    seen["of another library, before a job"] = launch(kernels.of_another_library)
    seen["plain, before a job"] = launch(plain)
    seen["needing, before a job"] = launch(direct)
    seen["needing, before a job, again"] = launch(direct)
    seen["join"] = events_of(driver, join)
    seen["needing"] = launch(direct)
    seen["needing, again"] = launch(direct)
    seen["plain"] = launch(plain)
    seen["needing, other options"] = events_of(driver, lambda: direct[(1,)](out, num_warps=8))
    seen["modules"] = sorted(jit.initialized_modules())
    seen["leave"] = events_of(driver, lambda: jit.set_module_init(None))
    seen["needing, between jobs"] = launch(direct)
    seen["plain, between jobs"] = launch(plain)
    seen["join again"] = sorted(events_of(driver, join))
    seen["needing, in the second job"] = launch(direct)
    seen["needing, through helpers"] = launch(kernels.through_two_helpers)
    unknown = events_of(driver, lambda: direct[(1,)](out, num_warsp=8))
    seen["unknown keyword"] = unknown
    seen["classes"] = {
        name: sorted(
            {
                type(kernel).__name__
                for cache in function.device_caches.values()
                for kernel in cache[0].values()
            }
        )
        for name, function in (
            ("direct", direct),
            ("plain", plain),
            ("other", kernels.of_another_library),
        )
    }
    seen["compiled kernel is untouched"] = "_init_handles" not in vars(jit.TdcollJITFunction) and (
        CompiledKernel._init_handles.__module__.startswith("triton.")
    )
    return seen


def errors(driver: NotingDriver) -> dict[str, str]:
    out, words = MockTensor(triton.language.int32, (4,)), MockTensor(triton.language.int64, (4,))
    launches = {
        **{name: (kernels.mistaken, out, name) for name in kernels.MISTAKES},
        "launched_by_triton": (kernels.helper, out),
        "calls_a_waiting_helper": (kernels.calls_a_waiting_helper, out),
        "launched_by_triton_through_a_helper": (kernels.launched_by_triton_through_a_helper, out),
        **{name: (kernels.halves, out, words, name) for name in kernels.HALVES},
        "whole_addresses": (kernels.whole_addresses, out, words),
    }
    messages = dict.fromkeys(launches, "nothing was raised")
    for name, (kernel, *arguments) in launches.items():
        try:
            kernel[(1,)](*arguments)
        except Exception as error:
            messages[name] = root(error)
    return messages


class SimpleMonitor:
    """As a WaitMonitor is an argument of a kernel."""

    def __init__(self, words: torch.Tensor) -> None:
        self._words = words

    @property
    def kernel_argument(self) -> torch.Tensor:
        return self._words


def monitors(driver: NotingDriver) -> dict[str, list[str]]:
    """Launches of a kernel that waits, with a monitor and with other memory."""
    out, words = MockTensor(triton.language.int32, (4,)), torch.zeros(8, dtype=torch.int64)
    runtime.install(SimpleNamespace(monitors={words.data_ptr()}))
    seen = {
        "the monitor itself": events_of(
            driver, lambda: kernels.waits[(1,)](out, SimpleMonitor(words))
        ),
        "the monitor itself, by name": events_of(
            driver, lambda: kernels.waits[(1,)](out, monitor=SimpleMonitor(words[4:]))
        ),
        "untold": events_of(driver, lambda: kernels.waits_untold[(1,)](out, SimpleMonitor(words))),
        "a monitor": events_of(driver, lambda: kernels.waits[(1,)](out, words)),
        "other memory": events_of(driver, lambda: kernels.waits[(1,)](out, words[4:])),
        "other memory, by name": events_of(
            driver, lambda: kernels.waits[(1,)](out, monitor=words[4:])
        ),
    }
    runtime.install(None)
    return seen


def cache_keys() -> list[str]:
    """A kernel's key, and the key that it has when the text of the lowering is another."""
    keys = [kernels.direct.cache_key]
    jit._lowering_digest = lambda: "another"
    return [*keys, kernels.direct.cache_key]


def options() -> dict[str, Any]:
    def body(a, b):
        pass

    made = tdcoll.jit(
        do_not_specialize=["b"],
        do_not_specialize_on_alignment=["a"],
        noinline=True,
        version=3,
        debug=True,
    )(body)
    return {
        "type": type(made).__name__,
        "do_not_specialize": [parameter.do_not_specialize for parameter in made.params],
        "on_alignment": [parameter.do_not_specialize_on_alignment for parameter in made.params],
        "noinline": made.noinline,
        "version": made.version,
        "debug": made.debug,
        "bare": type(tdcoll.jit(body)).__name__,
    }


def fused_by_default() -> dict[str, bool]:
    """Whether products are fused with sums in a kernel of tdcoll's and in one of a user's, by
    Triton's default."""
    out = MockTensor(triton.language.int32, (4,))
    seen = {}
    for fused in (True, False):
        with triton.knobs.language.scope():
            triton.knobs.language.default_fp_fusion = fused
            own = warm_up._nothing_of_nvshmem.warmup(out, False, grid=(1,), num_warps=1 + fused)
            users = kernels.only_mentions.warmup(out, grid=(1,), num_warps=1 + fused)
            given = kernels.only_mentions.warmup(
                out, grid=(1,), num_warps=1 + fused, enable_fp_fusion=not fused
            )
        for name, made in (("own", own), ("user's", users), ("user's, the other asked for", given)):
            seen[f"{name}, default {fused}"] = made.metadata.enable_fp_fusion
    return seen


def main() -> None:
    driver = NotingDriver()
    triton.runtime.driver.set_active(driver)
    language = {name: getattr(tdl, name) for name in FUNCTIONS}
    report = {
        "warming up": warming_up(driver),
        "fused by default": fused_by_default(),
        "parameters": {
            name: kernels.parameters_of(function) for name, function in language.items()
        },
        "described": {
            name: [
                inspect.getdoc(function),
                [p for p in inspect.signature(function).parameters if p[0] != "_"],
            ]
            for name, function in language.items()
        },
        "not_its_own": [
            name for name, function in language.items() if function is not getattr(nvshmem, name)
        ],
        "marked": [
            name for name, function in language.items() if getattr(function, "needs_nvshmem", False)
        ],
        "needs": [
            name
            for name, function in language.items()
            if getattr(function, "needs_nvshmem", False)
            or (isinstance(function, JITFunction) and jit.needs_nvshmem(function))
        ],
        "kernels": {
            name: jit.needs_nvshmem(getattr(kernels, name))
            for name in (*kernels.NEED, *kernels.NEED_NOT)
        },
        "options": options(),
        "launches": launches(driver),
        "with functions": launches_with_functions(driver),
        "in advance": launches_compiled_in_advance(driver),
        "errors": errors(driver),
        "monitors": monitors(driver),
        "cache keys": cache_keys(),
    }
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
