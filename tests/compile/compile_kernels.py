# SPDX-License-Identifier: Apache-2.0
"""Compile tdcoll's kernels for GPUs that need not be here, and print what came out as JSON.

Run as a program of its own, without TRITON_INTERPRET: which language a process speaks is decided at import.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from tdcoll.collectives.all_gather import kernels, kernels_ll
from tdcoll.language.jit import bitcode_path, needs_nvshmem

POINTERS = {"signals": "*i64", "ready": "*i64", "control": "*i64", "monitor": "*i64", "routes": "*i32"}
ADDRESSES = ("source", "out", "staging")
LANGUAGE_TYPES = {
    **dict.fromkeys(("dest", "source", "dst", "src"), "*u8"),
    **dict.fromkeys(("signal", "signals", "monitor", "seen", "words"), "*i64"),
    **dict.fromkeys(("out", "ok", "number", "flag"), "*i32"),
    "value": "i64",
}


def resources(ptx: str, arch: int) -> dict[str, int]:
    """Registers and spilled bytes of the kernel, from ptxas -v."""
    tool = get_ptxas(arch)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        suffix = "a" if arch >= 90 else ""
        command = [tool.path, "-v", f"--gpu-name=sm_{arch}{suffix}", str(source), "-o", "/dev/null"]
        report = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stderr
    entry = report.split("Compiling entry function", 1)[1]
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", entry)
    registers = re.search(r"Used (\d+) registers", entry)
    assert spills, report
    assert registers, report
    return {"registers": int(registers[1]), "spilled_bytes": int(spills[1]) + int(spills[2])}


def compile_for(kernel, arch: int, constants: dict[str, object], types: dict[str, str]):
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    libraries = {"libnvshmem_device": bitcode_path()} if needs_nvshmem(kernel) else {}
    return triton.compile(
        ASTSource(kernel, signature, constants),
        target=GPUTarget("cuda", arch, 32),
        options={"extern_libs": libraries, "num_warps": 8},
    )


def compile_all_gather(kernel, arch: int, world: int, in_place: bool) -> dict[str, object]:
    constants = {"WORLD": world, "BLOCK": triton.next_power_of_2(world), "SLOT_SIGNALS": 16 * world}
    constants["IN_PLACE"] = in_place
    compiled = compile_for(kernel, arch, constants, POINTERS | dict.fromkeys(ADDRESSES, "i64"))
    ptx = compiled.asm["ptx"]
    # A definition that the linker inlined leaves no call: its callee does.
    called = sorted(set(re.findall(r"\b(nvshmem[xi]?_\w+)", ptx)))
    return {
        "kernel": kernel.__name__,
        "arch": arch,
        "world": world,
        "in_place": in_place,
        "nvshmem": called,
        "globaltimer": ptx.count("%globaltimer"),
        "acquire_sys": ptx.count("ld.acquire.sys"),
        "cubin_bytes": len(compiled.asm["cubin"]),
        **resources(ptx, arch),
    }


def compile_ll(arch: int, world: int, block: int) -> dict[str, object]:
    kernel = kernels_ll.all_gather_ll
    types = POINTERS | {"peers": "*i64"} | dict.fromkeys(("source", "out", "flagged"), "i64")
    compiled = compile_for(kernel, arch, {"WORLD": world, "BLOCK": block}, types)
    return {
        "kernel": kernel.__name__,
        "arch": arch,
        "block": block,
        "needs": needs_nvshmem(kernel),
        "globaltimer": compiled.asm["ptx"].count("%globaltimer"),
        **resources(compiled.asm["ptx"], arch),
    }


def compile_language_checks(arch: int) -> list[dict[str, object]]:
    """The kernels of the language checks: every function of the device language."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "workers"))
    import language_checks as checks

    done = []
    for name, kernel in vars(checks).items():
        if not isinstance(kernel, JITFunction):
            continue
        types = LANGUAGE_TYPES | ({"data": "*i32"} if name == "store_through_pointer" else {})
        # FORM, STEP and SEMANTIC as values known at run time only: one compilation holds all forms.
        ptx = compile_for(kernel, arch, {"BLOCK": 8} if "BLOCK" in kernel.arg_names else {}, types).asm["ptx"]
        links, needs = "nvshmemi_device_state" in ptx, needs_nvshmem(kernel)
        done.append({"kernel": name, "arch": arch, "links": links, "needs": needs})
    return done


def main() -> None:
    results, ll = [], []
    for arch in (90, 100):
        ll += [compile_ll(arch, 8, block) for block in (256, 1024)]
        for kernel in (kernels.all_gather_1d, kernels.all_gather_2d):
            results += [compile_all_gather(kernel, arch, 8, in_place) for in_place in (False, True)]
    checks = compile_language_checks(90)
    json.dump({"triton": triton.__version__, "all_gather": results, "ll": ll, "language": checks}, sys.stdout)


if __name__ == "__main__":
    main()
