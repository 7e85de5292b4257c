# SPDX-License-Identifier: Apache-2.0
"""Compile the kernels of tests/primitives for GPUs that need not be here, and print what came out as JSON.

Run as a program of its own, without TRITON_INTERPRET. With another Triton, by hand, as ``pipelined_loops.py`` says.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import triton
import triton.language as tl
from compiling import ORDER, compile_for, resources
from primitives import kernels
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from tdcoll.language.jit import needs_nvshmem
from tdcoll.primitives.group import Group, Window
from tdcoll.primitives.lamport import Lamport

WORLD = 4
TYPES: dict[str, Any] = {
    "g": Group(*["*i64"] * 6, "i32", channels=16, world=WORLD),
    "window": Window("i64", "i64", "*i64", 2),
    "lamport": Lamport("i64", "i64", "*i64", "*i64"),
}
KERNELS: dict[str, dict[str, int]] = {
    "all_reduce_of_words": {"BLOCK": 256},
}


def compiled(name: str, constants: dict[str, int]) -> dict[str, Any]:
    kernel = getattr(kernels, name)
    ptx = compile_for(kernel, 90, constants, TYPES).asm["ptx"]
    order = ORDER.pop()
    return {
        "kernel": name,
        "needs": needs_nvshmem(kernel),
        **{name: order[name] for name in ("problems", "of_this_gpu", "release")},
        "word_stores": ptx.count("st.relaxed.sys.global.v4.b32"),
        "word_loads": ptx.count("ld.relaxed.sys.global.v4.b32"),
        **resources(ptx, 90),
    }


class _NoDevice:
    """A driver for a GPU that is not there."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def of_rank(name: str, constants: dict[str, int], rank: int) -> str:
    """A hash of the PTX that a launch on this rank compiles."""
    words = torch.zeros(64, dtype=torch.int64)
    sizes = {"channels": tl.constexpr(16), "world": tl.constexpr(WORLD)}
    known = {
        "g": Group(*[words] * 6, rank, **sizes),
        "window": Window(4096 * rank, 16 * rank + 1, words, tl.constexpr(2)),
        "lamport": Lamport(4096 * rank, 16 * rank + 1, words, words),
    }
    kernel = getattr(kernels, name)
    arguments = {name: known.get(name, constants.get(name, 16 * rank + 1)) for name in kernel.arg_names}
    made = kernel.warmup(**arguments, grid=(1,), num_warps=8)
    return hashlib.sha256(made.asm["ptx"].encode()).hexdigest()


def main() -> None:
    driver.set_active(_NoDevice())
    found = [compiled(name, constants) for name, constants in KERNELS.items()]
    ranks = {name: [of_rank(name, constants, rank) for rank in (0, 1, 2)] for name, constants in KERNELS.items()}
    variants = {name: len(getattr(kernels, name).device_caches[0][0]) for name in KERNELS}
    json.dump({"triton": triton.__version__, "kernels": found, "ranks": ranks, "variants": variants}, sys.stdout)


if __name__ == "__main__":
    main()
