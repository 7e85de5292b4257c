# SPDX-License-Identifier: Apache-2.0
"""Compile the kernels of the language checks, and one of them with all of NVSHMEM's library."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "workers"))

import language_checks
import stores_and_waits_checks
from compiling import ORDER, compile_for
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
