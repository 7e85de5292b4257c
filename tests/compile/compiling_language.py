# SPDX-License-Identifier: Apache-2.0
"""Compile the kernels of the language checks and of words, and one with all of NVSHMEM's library."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "language"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "workers"))

import kernels_of_words as kernels
import language_checks
import stores_and_waits_checks
from compiling import ORDER, compile_for, instructions, resources
from triton.runtime.jit import JITFunction

from tdcoll.language.jit import bitcode_path, needs_nvshmem
from tdcoll.language.library import part_for_language

LANGUAGE_TYPES = {
    **dict.fromkeys(("dest", "source", "dst", "src"), "*u8"),
    **dict.fromkeys(("signal", "signals", "monitor", "seen", "words", "done"), "*i64"),
    **dict.fromkeys(("parts", "sent"), "*fp16"),
    "total": "*fp32",
    **dict.fromkeys(("out", "ok", "number", "flag", "torn"), "*i32"),
    "value": "i64",
}


def compile_language_checks(arch: int) -> list[dict[str, object]]:
    """The kernels of the language checks: every function of the device language."""
    done = []
    for name, kernel in (vars(language_checks) | vars(stores_and_waits_checks)).items():
        if not isinstance(kernel, JITFunction):
            continue
        types = LANGUAGE_TYPES | ({"data": "*i32"} if name == "store_through_pointer" else {})
        # FORM, STEP and SEMANTIC as values known at run time only: one compilation holds all forms.
        constants = {name: 8 for name in ("BLOCK", "PARTS") if name in kernel.arg_names}
        ptx = compile_for(kernel, arch, constants, types).asm["ptx"]
        links, needs = "nvshmemi_device_state" in ptx, needs_nvshmem(kernel)
        done.append({"kernel": name, "arch": arch, "links": links, "needs": needs})
    return done


def compile_with_all_of_nvshmem() -> dict[str, str]:
    """The code of a kernel that calls much of NVSHMEM, linked with its library and with the part that kernels get."""
    ptx = {}
    for name, library in (("whole", bitcode_path()), ("part", part_for_language(bitcode_path()))):
        whole = compile_for(language_checks.put_signal, 90, {}, LANGUAGE_TYPES, library=library).asm["ptx"]
        ptx[name] = whole.partition("\n\t.file\t")[0]  # not where its source lies
        ORDER.pop()
    return ptx


WORD_TYPES = {
    **dict.fromkeys(("words", "wide", "arrived", "monitor", "signals", "counter", "old"), "*i64"),
    **dict.fromkeys(("narrow", "buffer", "turns", "ok", "found", "cells", "sums", "source", "dest", "out"), "*i32"),
    **dict.fromkeys(("floats", "out_floats"), "*fp64"),
}
WORDS: dict[str, dict[str, Any]] = {
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
"""Kernels of tests/language/kernels_of_words.py, and their constants."""

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


def compile_words() -> list[dict[str, Any]]:
    found = []
    for arch in (90, 100):
        for name, constants in WORDS.items():
            kernel = getattr(kernels, name)
            if arch != 90 and needs_nvshmem(kernel):  # which takes seconds each
                continue
            ptx = compile_for(kernel, arch, constants, WORD_TYPES).asm["ptx"]
            body = ptx[ptx.index(".entry") :]
            seen = {what: body.count(text) for what, text in INSTRUCTIONS.items()}
            whole = len(re.findall(r"\bLDG?\.E\.128\.STRONG\.SYS\b", instructions(ptx, arch)))
            about = {"kernel": name, "arch": arch, "needs": needs_nvshmem(kernel), "whole": whole}
            found.append({**about, "problems": ORDER.pop()["problems"], **seen, **resources(ptx, arch)})
    return found
