# SPDX-License-Identifier: Apache-2.0
"""Compile one kernel for a GPU that need not be here, and look at what came out. The drivers beside
it import this."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import ptx_divergence
import ptx_order
import ptx_patterns
import torch
import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend, get_ptxas
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from tdcoll.fused.matmul.kernels_gather import Shards
from tdcoll.fused.matmul.product import Scales, Shape, Tile, Weight
from tdcoll.language.jit import (
    OWN_OPTIONS,
    _with_plain_fields,
    bitcode_path,
    for_descriptors,
    needs_nvshmem,
)
from tdcoll.language.library import part_for_language
from tdcoll.primitives.epilogue import Placement
from tdcoll.primitives.group import Group, Inbox, Nodes
from tdcoll.primitives.lamport import Lamport
from tdcoll.primitives.puts import Routes

WORLD = 8


def tuples(slots: int = 2) -> dict[str, Any]:
    """Types of the parameters that are tuples; numbers stand for constants."""
    inbox = Inbox("i64", "i64", "*i64", slots)
    group = Group(*["*i64"] * 6, "i32", chunks=16, world=WORLD)
    return {
        "g": group,
        "inbox": inbox,
        "words": Inbox("i64", "i64", "*i64", 2),
        "routes": Routes("*i32", "i32", "i32"),
    }


_add_stages = CUDABackend.add_stages
_assembles = True


def _stages(backend: Any, stages: dict[str, Any], *rest: Any) -> None:
    _add_stages(backend, stages, *rest)
    if not _assembles:
        stages["cubin"] = lambda source, metadata: b""


CUDABackend.add_stages = _stages
REGISTERS = "--registers" in sys.argv
"""Whether kernels that link NVSHMEM are assembled as well. It takes ptxas up to 7 s for each,
because NVSHMEM's transports are in them."""

knobs.nvidia.dump_ptxas_log = True
knobs.compilation.always_compile = True  # a kernel of Triton's cache has no report
_REPORTS: dict[str, str] = {}
"""What ptxas reports of kernels, by their PTX."""


def instructions(cubin: bytes, arch: int) -> str:
    """Return the instructions that ptxas has made."""
    tool = Path(get_ptxas(arch).path).with_name("nvdisasm")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [str(tool), "-c", file.name], capture_output=True, text=True, check=True, timeout=300
        )
    return done.stdout


def resources(ptx: str) -> dict[str, int]:
    """Return the registers and spilled bytes of the kernel, from ptxas -v; nothing if it was not
    assembled."""
    if ptx not in _REPORTS:
        return {}
    report = _REPORTS[ptx]
    entry = report.split("Compiling entry function", 1)[1]
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", entry)
    registers = re.search(r"Used (\d+) registers", entry)
    assert spills, report
    assert registers, report
    return {"registers": int(registers[1]), "spilled_bytes": int(spills[1]) + int(spills[2])}


def compile_for(
    kernel,
    arch: int,
    constants: dict[str, object],
    types: dict[str, str],
    aligned: bool = False,
    library: str = "",
    assembled: bool = True,
    **options: int,
):
    """``aligned``: pointers, and the elements of a row, are multiples of 16, as they usually are.
    ``library``: which NVSHMEM's functions come from; by default, that which ``tdcoll.jit`` links.
    ``assembled``: also by ptxas, unless the kernel links NVSHMEM and :data:`REGISTERS` is false."""
    global _assembles
    declared = {
        parameter.name: parameter.annotation_type
        for parameter in kernel.params
        if parameter.annotation_type
    }
    types = declared | types
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32")
        for name in kernel.arg_names
    }
    constants = dict(constants)
    for place, (name, kind) in enumerate(signature.items()):
        if isinstance(kind, tuple):
            fixed = (int, tl.constexpr)  # also a default that is a constant
            constants |= {
                (place, i): getattr(of, "value", of)
                for i, of in enumerate(kind)
                if isinstance(of, fixed)
            }
            signature[name] = type(kind)(
                *("constexpr" if isinstance(of, fixed) else of for of in kind)
            )
    library = library or part_for_language(bitcode_path(arch))
    functions = (kernel, *constants.values())
    libraries = {"libnvshmem_device": library} if any(map(needs_nvshmem, functions)) else {}
    hints = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if aligned and (str(signature[name]).startswith("*") or name == "row_elements")
    }
    for place, kind in enumerate(signature.values()):
        if aligned and isinstance(kind, tuple):
            hints |= {
                (place, i): [["tt.divisibility", 16]]
                for i, of in enumerate(kind)
                if of.startswith("*")
            }
    early = getattr(kernel, "begins_in_stream_order", False)
    source = ASTSource(kernel, signature, constants, hints)
    _assembles = assembled and (REGISTERS or not libraries)
    with contextlib.redirect_stdout(io.StringIO()) as told, for_descriptors(source):
        compiled = triton.compile(
            source,
            target=GPUTarget("cuda", arch, 32),
            options={
                "extern_libs": libraries,
                "num_warps": 8,
                "launch_pdl": early,
                **OWN_OPTIONS,
                **options,
            },
        )
    ptx = compiled.asm["ptx"]
    if _assembles:
        _REPORTS[ptx] = told.getvalue()
    problems = [*ptx_order.problems(ptx), *ptx_divergence.divergence(ptx)]
    seen = {"problems": problems, "of_this_gpu": ptx_order.of_this_gpu(ptx), **ptx_order.count(ptx)}
    seen["arithmetic"] = arithmetic(ptx)
    seen["patterns"] = ptx_patterns.patterns(ptx)
    early = {"launched_early": compiled.metadata.launch_pdl, "waits_first": ptx_order.early(ptx)}
    names = {"module": kernel.__module__, "kernel": kernel.__name__, "name": compiled.metadata.name}
    ORDER.append({**names, "arch": arch, **early, **seen})
    return compiled


def arithmetic(ptx: str) -> dict[str, int]:
    """Return how often the kernel rounds by each operation on floating-point numbers. Those on
    pairs count twice.

    Two compilers that make the same numbers of them give the same bits. LLVM and ptxas may fuse a
    product with a sum, which changes these numbers. Without fast-math flags, which Triton doesn't
    set, they keep the order of the rest.
    """
    body = ptx[ptx.index(".entry") :]
    found: dict[str, int] = {}
    for name, kind, pair in ROUNDS.findall(body[: body.index("// -- End function")]):
        name = f"{name.split('.')[0]}.{kind}"
        found[name] = found.get(name, 0) + (2 if pair else 1)
    return dict(sorted(found.items()))


ROUNDS = re.compile(
    r"\b((?:add|sub|mul|fma|div|rcp|sqrt|rsqrt|ex2|lg2)(?:\.\w+)*?|cvt\.r[nzmpa]\w*(?:\.\w+)*?)\.(f16|bf16|f32|f64|e4m3|e5m2)(x2)?\b"
)
"""Instructions that round: operation, type of the result, and whether it is a pair."""

ORDER: list[dict[str, object]] = []
"""What :mod:`ptx_order` finds in each kernel that was compiled."""


def record(
    kernel,
    arch: int,
    constants: dict[str, object],
    types: dict[str, Any],
    about: dict[str, object],
    **options: int,
) -> dict[str, Any]:
    """Compile a kernel; what its PTX has of each kind, and ``about`` it."""
    constants = {name: getattr(value, "value", value) for name, value in constants.items()}
    compiled = compile_for(kernel, arch, constants, types, **options)
    ptx = compiled.asm["ptx"]
    seen = {name: len(re.findall(pattern, ptx)) for name, pattern in SEEN.items()}
    needed = resources(ptx)
    needs = needs_nvshmem(kernel)
    spills_where = copy_spills if needs else hot_spills
    return {
        "kernel": kernel.__name__,
        "arch": arch,
        "needs": needs,
        "links": "nvshmemi_device_state" in ptx,
        # A definition that the linker inlined leaves no call: its callee does.
        "calls": sorted(set(re.findall(r"\b(nvshmem[xi]?_\w+)", ptx))),
        "maxima": sorted(set(re.findall(r"\b(?:max|min)\.\S*f\d\d", ptx))),
        "hot_spills": spills_where(compiled, arch) if needed.get("spilled_bytes") else [],
        **about,
        **seen,
        **needed,
    }


SEEN = {
    "globaltimer": "%globaltimer",  # one for each wait
    "acquire_sys": r"ld\.acquire\.sys",
    "release_sys": r"st\.release\.sys",
    "wide_loads": r"ld\.global\S*\.v[248]",
    "wide_stores": r"st\.global\S*\.v[248]",
    "fused": r"fma\.rn\.f",
    "products": r"\b(?:mul|fma)\.(?:rn\.)?f32",
    "loads": r"ld\.global\.v4",
    "sent": r"st\.relaxed\.sys\.global\.v4",
}
"""Instructions that are counted."""


SPILL = re.compile(r"^.*\b(?:STL|LDL)\b.*$", re.MULTILINE)
"""An instruction that spills a register, or that loads it again."""


def blocks_of(compiled, arch: int) -> list[str]:
    """Return the kernel's instructions, divided at labels and branches."""
    text = instructions(compiled.asm["cubin"], arch)
    return re.split(r"^\.L_\w+:$|^.*\bBRA\b.*$", text, flags=re.MULTILINE)


def hot_spills(compiled, arch: int) -> list[str]:
    """Spilling instructions, but for those around the record of an expired wait.

    Its compare-and-swap wants neighbouring registers; a kernel that gets that far is lost.
    """
    return [
        line
        for block in blocks_of(compiled, arch)
        if not re.search(r"\bATOMG?\S*\.CAS\b", block)
        for line in SPILL.findall(block)
    ]


def copy_spills(compiled, arch: int) -> list[str]:
    """Spilling instructions among those that move or sum rows: in blocks with two or more accesses
    of 16 bytes.

    For kernels with NVSHMEM's functions, which spill around each of its transports.
    """
    wide = re.compile(r"\b(?:LDG?|STG?)\.\S*\.128\b")
    return [
        line
        for block in blocks_of(compiled, arch)
        if len(wide.findall(block)) > 1
        for line in SPILL.findall(block)
    ]


def compiled_forms(kernel, extras: Sequence[Any] = (None,)) -> int:
    """How many kernels ranks 0, 1, 2 and 16 compile, of different sizes too, for these tuples of an
    epilogue."""
    backend, forms = make_backend(GPUTarget("cuda", 90, 32)), set()
    bind = _with_plain_fields(
        create_function_from_signature(kernel.signature, kernel.params, backend)
    )
    word, table = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int32)
    for rank, extra in product((0, 1, 2, 16), extras):
        known = {
            "g": Group(*[word] * 6, rank, chunks=tl.constexpr(16), world=tl.constexpr(32)),
            **dict.fromkeys(("inbox", "words"), Inbox(16 * rank, 1 + rank, word, tl.constexpr(2))),
            "inbox": Lamport(16 * rank, 1 + rank, word, word),
            "routes": Routes(table, rank, 31 - rank),
            "out_deltas": word,
            "weight": Weight(16 * rank, 1 + rank, tl.constexpr(False), tl.constexpr(False)),
            "scales": Scales(16 * rank, rank, 1 + rank, rank, tl.constexpr(False)),
            "shape": Shape(1 + rank, 16 * rank, rank),
            "tile": Tile(*map(tl.constexpr, (8, 8, 8, 8))),
            "extra": extra,
            "shards": Shards(rank, 1 + rank),
            "placement": Placement(16 * rank, 1 + rank, tl.constexpr(True)),
            "nodes": Nodes(table, table, table, table, rank, 1 + rank, 32 + rank),
            **{name: 8 for name in kernel.arg_names if name.isupper()},
        }
        # A parameter that says its type is a number, such as the address of a norm's weight.
        given = {
            param.name: rank if param.annotation_type else known.get(param.name, rank)
            for param in kernel.params
        }
        _, specialization, _ = bind(**given, debug=False)
        forms.add(str(specialization))
    return len(forms)
