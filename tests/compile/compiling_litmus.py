# SPDX-License-Identifier: Apache-2.0
"""Compile the kernels of the litmus tests for sm_90, and print as JSON, for each form, the problems
that the checkers of PTX find, and the patterns of communication.

Run without TRITON_INTERPRET, as ``compile_kernels.py``.
"""

from __future__ import annotations

import json
import sys

from compiling import ORDER, compile_for

from benchmarks import kernels_litmus as kernels
from benchmarks.litmus import COPIES, TESTS

TYPES = {"counts": "*i64", "begin": "i64"}
COPY_TYPES = {"data": "*i64", "stamps": "*i64", "wrong": "*i64", "number": "i64", "monitor": "*i64"}


def main() -> None:
    for test in TESTS.values():
        if test.pattern is None:
            compile_for(
                kernels.old_words, 90, {"COPIES": COPIES, "BLOCK": 2048}, COPY_TYPES, num_warps=8
            )
            continue
        sides = kernels.Sides("*i64", "*i64", "*i32", "*i64", test.sides)
        for form in test.forms:
            constants = {"PATTERN": test.pattern, "FAULT": form.fault, "BLOCK": kernels.LANES}
            compile_for(kernels.play, 90, constants, {**TYPES, "sides": sides}, num_warps=4)
    found = [{"problems": entry["problems"], "patterns": entry["patterns"]} for entry in ORDER]
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
