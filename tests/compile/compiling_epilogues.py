# SPDX-License-Identifier: Apache-2.0
"""Compile dense reductions with an epilogue, and without it, for GPUs that need not be here, and
print what came out as JSON.

Run as ``compiling_epilogues.py ARCHITECTURE``, without TRITON_INTERPRET.
"""

from __future__ import annotations

import json
import sys
from typing import Any, NamedTuple

import triton
import triton.language as tl
from compile_kernels import compile_reduction
from compiling import ORDER, compiled_forms, record, tuples

from tdcoll.calls.epilogues import with_plain_numbers
from tdcoll.collectives.all_reduce import kernels_direct, kernels_loop, kernels_nodes, kernels_puts
from tdcoll.collectives.all_reduce import kernels_words as reduce_words
from tdcoll.collectives.reduce_scatter import kernels_direct as scatter_direct
from tdcoll.collectives.reduce_scatter import kernels_loop as scatter_loop
from tdcoll.collectives.reduce_scatter import kernels_puts as scatter_puts
from tdcoll.collectives.reduce_scatter import kernels_words as scatter_words
from tdcoll.primitives import casts, copies
from tdcoll.primitives.epilogue import Placement
from tdcoll.primitives.reduce import MAX, MEAN, SUM


class Residual(NamedTuple):
    """What :func:`add_residual` adds."""

    base: Any
    stride: Any


@triton.jit
def add_residual(sums, rows, columns, inside, extra):
    """An epilogue: three times the sum plus a residual."""
    at = extra.base + rows * extra.stride + columns
    return 3.0 * sums + tl.load(at, mask=inside, other=0.0).to(tl.float32)


BF16 = {"DTYPE": tl.bfloat16, "ACC": tl.float32, "OP": SUM}
FP8 = {"DTYPE": tl.float8e4nv, "ACC": tl.float32, "OP": SUM}
WORDS = {"LAMPORT": True, "BLOCK": 256, "PERSISTENT": False}
TILES = {"TILE": 2048, "WORLD_POW2": 4}
KERNELS: list[tuple[Any, dict[str, Any], bool]] = [  # kernel, constants, narrow
    (reduce_words.all_reduce_one_shot, {**BF16, **WORDS, "PERSISTENT": True}, True),
    (reduce_words.all_reduce_two_shot, {**BF16, **WORDS}, False),
    (reduce_words.all_reduce_two_shot, {**FP8, **WORDS, "LAMPORT": False}, True),
    (kernels_direct.all_reduce_direct, {**BF16, **TILES, "OP": MEAN, "ZERO_COPY": False}, True),
    (kernels_direct.all_reduce_direct, {**FP8, **TILES, "TILE": 1024, "ZERO_COPY": True}, False),
    (kernels_loop.all_reduce_loop, {**BF16, **TILES, "ZERO_COPY": False}, True),
    (kernels_puts.all_reduce_puts, {**BF16, **TILES}, True),
    (kernels_nodes.all_reduce_nodes, {**BF16, "TILE": 2048}, True),
    (scatter_words.reduce_scatter_words, {**BF16, **WORDS}, True),
    (scatter_direct.reduce_scatter_direct, {**BF16, **TILES, "OP": MAX}, True),
    (scatter_loop.reduce_scatter_loop, {**BF16, **TILES}, True),
    (scatter_puts.reduce_scatter_puts, {**BF16, **TILES}, False),
    (
        copies.sum_copies,
        {**BF16, "TILE": 4096, "WORLD_POW2": 4, "WHOLE": True, "PULLED": True},
        True,
    ),
]
"""All kernels that have epilogues."""

WORLD = 4


def compiled(
    kernel: Any, constants: dict[str, Any], arch: int, with_epilogue: bool, narrow: bool
) -> dict[str, Any]:
    """What comes out of a kernel."""
    types: dict[str, Any] = {}
    more: dict[str, Any] = {"EPILOGUE": None, "placement": None, "extra": None}
    if with_epilogue:
        more = {"EPILOGUE": add_residual}
        types = {"placement": Placement("i64", "i64", narrow), "extra": Residual("*bf16", "i64")}
    if kernel is not copies.sum_copies:
        return compile_reduction(kernel, constants | more, WORLD, arch, types)
    types |= tuples() | {"stamps": "*i64", "summed": "*i32"}
    types["g"] = types["g"]._replace(world=WORLD)
    return record(kernel, arch, constants | more, types, {}, num_warps=16)


def pairs(arch: int) -> list[list[dict[str, Any]]]:
    """Of each kernel what comes out with an epilogue, and without it."""
    return [
        [compiled(kernel, constants, arch, yes, narrow) for yes in (True, False)]
        for kernel, constants, narrow in KERNELS
    ]


CASTS = (
    (tl.bfloat16, tl.float32),
    (tl.float32, tl.float16),
    (tl.float8e5, tl.float32),
    (tl.float32, tl.float8e4nv),
)


def compiled_casts(arch: int) -> list[dict[str, Any]]:
    """Of each cast beside a reduction what comes out."""
    found = []
    for source, target in CASTS:
        constants = {"FROM": source, "TO": target, "TILE": 4096}
        about = {"from": str(source), "to": str(target)}
        found.append(record(casts.cast, arch, constants, {}, about, num_warps=8))
    return found


class Factor(NamedTuple):
    """A number."""

    factor: Any


def number_forms() -> dict[str, int]:
    """How many kernels an epilogue's numbers compile, as they are and as contexts with a budget
    pass them."""
    numbers = [Factor(number) for number in (1, 3, 16, 1 << 40)]
    kernel = reduce_words.all_reduce_one_shot
    return {
        "as they are": compiled_forms(kernel, numbers),
        "plain": compiled_forms(kernel, [with_plain_numbers(extra) for extra in numbers]),
    }


if __name__ == "__main__":
    arch = int(sys.argv[1])
    made = {"epilogues": pairs(arch), "casts": compiled_casts(arch), "order": list(ORDER)}
    made["number_forms"] = number_forms()
    json.dump(made, sys.stdout)
