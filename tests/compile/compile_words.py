# SPDX-License-Identifier: Apache-2.0
"""Compile tests/language/kernels_of_words.py for GPUs that need not be here; print JSON of what came out.

Run as a program of its own, without TRITON_INTERPRET. With another Triton, by hand, as ``pipelined_loops.py`` says.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "language"))

import kernels_of_words as kernels
import triton
from compiling import ORDER, compile_for, instructions, resources

from tdcoll.language.jit import needs_nvshmem

TYPES = {
    **dict.fromkeys(("words", "wide", "arrived", "monitor", "signals", "counter", "old"), "*i64"),
    **dict.fromkeys(("narrow", "buffer", "turns", "ok", "found", "cells", "sums", "source", "dest", "out"), "*i32"),
    **dict.fromkeys(("floats", "out_floats"), "*fp64"),
}
KERNELS: dict[str, dict[str, Any]] = {
    "values": {},
    "atomics": {"ROUNDS": 2},
    "put_then_count": {"FENCE": True},
    "count_by_threads": {"ALL": False},
    "wait_here_and_there": {"SEND": True},
    "any_of": {"BLOCK": 8},
    "ask": {"TIMES": 1},
    "rounds": {"ROUNDS": 2, "BARRIER": True, "BLOCK": 256},
    "move_words": {"BLOCK": 1024},
    "part_of_flagged": {"BLOCK": 32},
}
INSTRUCTIONS = {
    "add by the thread": "atom.release.sys.global.add.u64",
    "swap by the thread": "atom.acq_rel.sys.global.cas.b32",
    "narrow wait": "ld.acquire.sys.global.b32 half",
    "wide wait": "ld.acquire.sys.global.b64 word",
    "signed": "lt.s32 done",
    "look": "ld.acquire.sys.global.b64 seen",
    "lowest": "barrier.cta.red.or.pred",
    "arrive": "atom.global.gpu.acq_rel.add.u64",
    "load": "ld.global.v4.b32",
    "store": "st.relaxed.sys.global.v4.b32",
}
"""The instructions that are looked for in kernels."""


def main() -> None:
    found = []
    for arch in (90, 100):
        for name, constants in KERNELS.items():
            kernel = getattr(kernels, name)
            if arch != 90 and needs_nvshmem(kernel):  # which takes seconds each
                continue
            ptx = compile_for(kernel, arch, constants, TYPES).asm["ptx"]
            body = ptx[ptx.index(".entry") :]
            seen = {what: body.count(text) for what, text in INSTRUCTIONS.items()}
            problems = ORDER.pop()["problems"]
            needs = needs_nvshmem(kernel)
            found.append({"kernel": name, "arch": arch, "problems": problems, "needs": needs, **seen})
            found[-1] |= resources(ptx, arch)
            loads = re.findall(r"\bLDG?\.E(\S*)\.STRONG\.SYS\b", instructions(ptx, arch))
            found[-1]["widths"] = sorted(set(loads))
    json.dump({"triton": triton.__version__, "kernels": found}, sys.stdout)


if __name__ == "__main__":
    main()
