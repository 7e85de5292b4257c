# SPDX-License-Identifier: Apache-2.0
"""Compile kernels in Triton-distributed's style for a GPU that need not be here; print what came out as JSON.

Run as a program of its own, without TRITON_INTERPRET.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "compile"))

from compiling import compile_for, resources

import tdcoll.compat

TYPES = {
    **dict.fromkeys(("source", "inbox", "signal", "out"), "*i64"),
    **dict.fromkeys(("words", "peers", "counter", "cells", "turn"), "*i32"),
    "floats": "*fp32",
}
TEXTS = {
    "wait": ".b64 seen, [at]",
    "warp": "bar.warp.sync",
    "proxy": "fence.proxy.async.global",
    "release": "st.release",
    "add": "atom.release.sys.global.add.u32",
    "shuffle": "shfl.sync",
}


def main() -> None:
    tdcoll.compat.activate()
    style, more = importlib.import_module("in_its_style"), importlib.import_module("more_kernels")
    found = []
    for kernel, constants, types in (
        (style.pass_on, {"N": 64, "SCOPE": "intra_node"}, {"turn": "i32"}),
        (style.by_threads, {"N": 4}, {}),
        (style.rounds, {"PROGRAMS": 4}, {"out": "*i32"}),
        (more.extras, {}, {"out": "*i32"}),
    ):
        ptx = compile_for(kernel, 90, constants, TYPES | types).asm["ptx"]
        body = ptx[ptx.index(".entry") :]
        counts = {what: body.count(text) for what, text in TEXTS.items()}
        found.append({"kernel": kernel.__name__, "counts": counts, **resources(ptx, 90)})
    pipelined = {}
    types = dict.fromkeys(("a", "b"), "*fp16") | {"out": "*fp32", "ready": "*i64"}
    for what, wait in (("with a wait", True), ("without", False)):
        made = compile_for(more.multiply, 90, {"WAIT": wait, "N": 64}, types, aligned=True)
        pipelined[what] = int("async_copy_global_to_local" in made.asm["ttgir"])
    json.dump({"kernels": found, "pipelined": pipelined}, sys.stdout)


if __name__ == "__main__":
    main()
