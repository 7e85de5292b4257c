# SPDX-License-Identifier: Apache-2.0
"""Compile the matmuls that communicate, and print what came out as JSON.

Run as ``compiling_matmuls.py ARCHITECTURE``, without TRITON_INTERPRET.
"""

from __future__ import annotations

import json
import re
import sys
from itertools import groupby
from typing import Any

import triton.language as tl
from compiling import ORDER, compile_for, compiled_forms, resources, tuples

from tdcoll.fused.matmul.kernels_all_reduce import matmul_all_reduce
from tdcoll.fused.matmul.kernels_gather import Shards, all_gather_matmul
from tdcoll.fused.matmul.kernels_scatter import matmul_reduce_scatter
from tdcoll.fused.matmul.launches import Cut, tile_of
from tdcoll.fused.matmul.product import Scales, Shape, Weight
from tdcoll.language.jit import jit
from tdcoll.primitives.epilogue import identity
from tdcoll.primitives.lamport import Lamport

BF16 = tl.bfloat16
WIDE = Cut(128, 256, 64, 3, 8)
SQUARE = Cut(128, 128, 64, 4, 4)
FLAT = Cut(64, 128, 128, 4, 4)
FEW = Cut(64, 64, 128, 4, 4)
DEEP = Cut(128, 128, 128, 4, 8)


@jit
def gelu(sums, rows, columns, inside, extra):
    """An epilogue."""
    return sums / (1.0 + tl.exp(-1.702 * sums))


GATHER: dict[str, Any] = {
    "WHOLE": False,
    "SELF": False,
    "COPIED": False,
    "WORLD_POW2": 128,
    "WORDS": 8192,
}
SCATTER: dict[str, Any] = {"SLICES": 2, "STAGES": 2, "WORLD_POW2": 8}
REDUCE: dict[str, Any] = {"TWO_SHOT": False, "BLOCK": 256}
FP32 = {"DTYPE": tl.float32, "OUT": tl.float32}
KERNELS: list[tuple[Any, Cut, int, dict[str, Any]]] = [  # kernel, cut, ranks, constants
    (all_gather_matmul, WIDE, 2, GATHER),
    (all_gather_matmul, DEEP, 2, {**GATHER, "DTYPE": tl.float8e4nv, "scaled": True}),
    (matmul_reduce_scatter, WIDE, 2, SCATTER),
    (matmul_reduce_scatter, SQUARE, 8, SCATTER),
    (matmul_all_reduce, FEW, 2, REDUCE),
    (matmul_all_reduce, FEW, 8, {**REDUCE, "TWO_SHOT": True, "BLOCK": 128}),
]
MORE: list[tuple[Any, Cut, int, dict[str, Any]]] = [
    (all_gather_matmul, SQUARE, 8, GATHER),
    (all_gather_matmul, FLAT, 4, {**GATHER, "WHOLE": True, "SELF": True}),
    (all_gather_matmul, WIDE, 2, {**GATHER, "COPIED": True}),
    (all_gather_matmul, SQUARE, 2, {**GATHER, "slots": 1, "SELF": True}),
    (all_gather_matmul, WIDE, 2, {**GATHER, "EPILOGUE": gelu, "biased": True, "depth_first": True}),
    (
        all_gather_matmul,
        SQUARE,
        2,
        {**GATHER, "DTYPE": tl.float16, "OUT": tl.float16, "ALIGNED": False},
    ),
    (all_gather_matmul, DEEP, 2, {**GATHER, "DTYPE": tl.float8e5, "scaled": True}),
    (all_gather_matmul, Cut(32, 64, 32, 3, 8), 2, {**GATHER, **FP32}),
    (all_gather_matmul, Cut(128, 128, 32, 4, 8), 2, {**GATHER, **FP32, "PRECISION": "tf32"}),
    (matmul_reduce_scatter, SQUARE, 2, SCATTER),
    (matmul_reduce_scatter, WIDE, 8, SCATTER),
    (matmul_reduce_scatter, FLAT, 4, {**SCATTER, "EPILOGUE": gelu, "biased": True}),
    (matmul_reduce_scatter, WIDE, 2, {**SCATTER, "SLICES": 1, "STAGES": 1}),
    (matmul_reduce_scatter, DEEP, 2, {**SCATTER, "DTYPE": tl.float8e4nv, "scaled": True}),
    (matmul_all_reduce, FEW, 8, REDUCE),
    (matmul_all_reduce, Cut(16, 64, 256, 4, 4), 2, {**REDUCE, "EPILOGUE": gelu, "biased": True}),
    (matmul_all_reduce, FEW, 2, {**REDUCE, "OUT": tl.float32, "ALIGNED": False}),
]
"""Compiled for sm_90 only, in the second tier."""


def compile_matmul(
    kernel: Any, cut: Cut, world: int, arch: int, constants: dict[str, Any]
) -> dict[str, Any]:
    """Compile a kernel; return what its PTX and its TTGIR have."""
    flags = {name: constants.get(name, False) for name in ("depth_first", "biased", "scaled")}
    slots = constants.get("slots", 2)
    given = {name: value for name, value in constants.items() if name.isupper()}
    usual = {
        "DTYPE": BF16,
        "OUT": BF16,
        "PRECISION": "ieee",
        "EPILOGUE": identity,
        "ALIGNED": True,
        "extra": None,
    }
    types = tuples(slots) | {
        "g": tuples()["g"]._replace(world=world),
        "weight": Weight(
            "i64", "i64", tl.constexpr(flags["depth_first"]), tl.constexpr(flags["biased"])
        ),
        "scales": Scales("i64", "i32", "i64", "i32", tl.constexpr(flags["scaled"])),
        "shape": Shape("i32", "i32", "i32"),
        "tile": tile_of(cut),
    }
    if kernel is matmul_all_reduce:
        types["inbox"] = Lamport("i64", "i64", "*i64", "*i64")
    if constants.get("COPIED"):
        types["shards"] = Shards("i32", "i32")
    elif kernel is all_gather_matmul:
        usual["shards"] = None
    compiled = compile_for(kernel, arch, usual | given, types, **cut.options)
    ptx, ttgir = compiled.asm["ptx"], compiled.asm["ttgir"]
    return {
        "kernel": kernel.__name__,
        "arch": arch,
        "world": world,
        "cut": str(cut),
        "stages": cut.num_stages,
        "warps": cut.num_warps,
        **{name: str(getattr(value, "__name__", value)) for name, value in (usual | given).items()},
        "problems": ORDER[-1]["problems"],
        "shared": compiled.metadata.shared,
        "scratch": compiled.metadata.global_scratch_size,
        "tensor_core": len(re.findall(r"wgmma\.mma_async|tcgen05\.mma\.", ptx)),
        "older_tensor_core": len(re.findall(r"\bmma\.sync", ptx)),
        "waits": ptx.count("%globaltimer"),
        "releases": len(re.findall(r"\{ st\.release\.sys", ptx)),
        "descriptor_stores": len(re.findall(r"cp\.async\.bulk\.tensor\S*\.global\.shared", ptx)),
        "completions": len(re.findall(r"cp\.async\.bulk\.wait_group 0;", ptx)),
        "wide_stores": len(re.findall(r"st\.global\S*\.v[248]", ptx)),
        "narrow_stores": len(re.findall(r"st\.global\S*\.b16", ptx)),
        "words": len(re.findall(r"st\.relaxed\.sys\.global\.v4", ptx)),
        "order": order_of(ttgir),
        **resources(ptx),
    }


TTGIR = {
    "for": r"scf\.for",
    "wait": r"ld\.acquire\.sys\.global\.b64 word",
    "load": r"ttng\.async_tma_copy_global",
    "completed": r"cp\.async\.bulk\.wait_group 0",
    "store": r"ttng\.async_tma_copy_local_to_global",
    "multiply": r"ttng\.(warp_group_dot|tc_gen5_mma) |tt\.dot",
}


def order_of(ttgir: str) -> list[str]:
    """Return waits, loads, stores and matmuls in the order of the text; several of a kind in a row
    are one."""
    found = [
        kind
        for line in ttgir.splitlines()
        for kind, pattern in TTGIR.items()
        if re.search(pattern, line)
    ]
    return [kind for kind, _ in groupby(found)]


def main(arch: int) -> dict[str, Any]:
    """Compile the kernels for an architecture; if it isn't sm_90, also those that are only for
    that."""
    made = [
        compile_matmul(kernel, cut, world, arch, constants)
        for kernel, cut, world, constants in KERNELS
    ]
    if arch != 90:
        made += [
            compile_matmul(kernel, cut, world, 90, constants)
            for kernel, cut, world, constants in MORE
        ]
    kernels = (all_gather_matmul, matmul_reduce_scatter, matmul_all_reduce)
    return {
        "matmuls": made,
        "matmul_forms": {kernel.__name__: compiled_forms(kernel) for kernel in kernels},
        "order": list(ORDER),
    }


if __name__ == "__main__":
    json.dump(main(int(sys.argv[1])), sys.stdout)
