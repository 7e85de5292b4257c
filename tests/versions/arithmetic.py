# SPDX-License-Identifier: Apache-2.0
"""Print how often each kernel of a reduction or norm rounds, by operation, as JSON: ``arithmetic.py
ARCHITECTURE``.

Runs without TRITON_INTERPRET and without a GPU, with the Triton that Python finds. Where two
versions of Triton print the same, results have the same bits (:func:`compiling.arithmetic`).
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "compile"))

import compile_kernels
import compiling
import compiling_sparse
from compile_kernels import ALL_REDUCE, COPIES, FUSED, REDUCE_SCATTER
from compiling import ORDER, WORLD, tuples


def kernels(arch: int) -> dict[str, dict[str, int]]:
    """Return the numbers of operations that round, by kernel; each name ends with its place in the
    list."""
    only_ptx = functools.partial(compiling.compile_for, assembled=False)
    compiling.compile_for = only_ptx
    compile_kernels.compile_for = only_ptx
    compiling_sparse.compile_for = only_ptx
    for kernel, constants, _ in REDUCE_SCATTER:
        compile_kernels.compile_reduction(kernel, constants, WORLD, arch)
    for kernel, constants, world, _ in ALL_REDUCE:
        compile_kernels.compile_reduction(kernel, constants, world, arch)
    for kernel, constants, warps in COPIES:
        types = tuples() | {"stamps": "*i64", "summed": "*i32"}
        compiling.record(kernel, arch, constants, types, {}, num_warps=warps)
    for name, constants, rows, _ in compiling_sparse.SPARSE:
        compiling_sparse.compile_sparse(name, arch, constants, rows)
    for rows, hidden, world, _, more in FUSED:
        compile_kernels.compile_fused(rows, hidden, world, arch, more)
    return {
        f"{made['kernel']} {place}": made["arithmetic"]
        for place, made in enumerate(ORDER)
        if made["arithmetic"]
    }


if __name__ == "__main__":
    json.dump(kernels(int(sys.argv[1])), sys.stdout)
