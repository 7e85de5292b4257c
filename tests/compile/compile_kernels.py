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
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import ptx_order
import torch
import triton
import triton.language as tl
from kernel_mutants import Change, installed
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

import tdcoll.language as tdl
from tdcoll.bench import kernels as bench
from tdcoll.collectives._host.plan import Facts
from tdcoll.collectives.all_gather import kernels_direct, kernels_ll, kernels_puts, kernels_ring
from tdcoll.collectives.all_reduce import kernels_direct as reduce_direct
from tdcoll.collectives.all_reduce import kernels_nodes as reduce_over_nodes
from tdcoll.collectives.all_reduce import kernels_puts as reduce_puts
from tdcoll.collectives.all_reduce import kernels_words as reduce_words
from tdcoll.collectives.index_match import kernels as index_match
from tdcoll.collectives.reduce_scatter import kernels_direct as scatter_direct
from tdcoll.collectives.reduce_scatter import kernels_pull as scatter_pull
from tdcoll.collectives.reduce_scatter import kernels_puts as scatter_puts
from tdcoll.collectives.reduce_scatter import kernels_words as scatter_words
from tdcoll.collectives.sparse_all_reduce import (
    kernels_lists,
    kernels_merge,
    kernels_nodes,
    kernels_reduce,
    kernels_values,
)
from tdcoll.fused import kernels as fused
from tdcoll.fused.kernels_rows import NONE, PER_ROW
from tdcoll.fused.policy import Rows, choose
from tdcoll.language import jit, waits
from tdcoll.language.jit import _with_plain_fields, bitcode_path, needs_nvshmem
from tdcoll.language.jit import jit as tdl_jit
from tdcoll.language.library import part_for_language
from tdcoll.primitives import reduce
from tdcoll.primitives.group import Group, Nodes, Window, in_stream_order
from tdcoll.primitives.lamport import Lamport
from tdcoll.primitives.puts import Routes
from tdcoll.primitives.reduce import MAX, MEAN, PROD, SUM
from tdcoll.runtime.topology import Topology

WORLD = 8


def tuples(slots: int = 2) -> dict[str, Any]:
    """Types of the parameters that are tuples; numbers stand for constants."""
    window = Window("i64", "i64", "*i64", slots)
    group = Group("*i64", "*i64", "*i64", "*i64", "*i64", "i32", channels=16, world=WORLD)
    return {
        "g": group,
        "window": window,
        "words": Window("i64", "i64", "*i64", 2),
        "routes": Routes("*i32", "i32", "i32"),
    }


LANGUAGE_TYPES = {
    **dict.fromkeys(("dest", "source", "dst", "src"), "*u8"),
    **dict.fromkeys(("signal", "signals", "monitor", "seen", "words", "done"), "*i64"),
    **dict.fromkeys(("parts", "sent"), "*fp16"),
    "total": "*fp32",
    **dict.fromkeys(("out", "ok", "number", "flag", "torn"), "*i32"),
    "value": "i64",
}


def _assembled(ptx: str, arch: int) -> tuple[bytes, str]:
    """Return ``(cubin, what ptxas -v reports)``."""
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(ptx)
        suffix = "a" if arch >= 90 else ""
        command = [get_ptxas(arch).path, "-v", f"--gpu-name=sm_{arch}{suffix}", str(source), "-o", str(made)]
        report = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stderr
        return made.read_bytes(), report


def _disassembled(cubin: bytes, arch: int) -> str:
    tool = Path(get_ptxas(arch).path).with_name("nvdisasm")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([str(tool), "-c", file.name], capture_output=True, text=True, check=True, timeout=300)
    return done.stdout


def instructions(ptx: str, arch: int) -> str:
    """Return the instructions that ptxas makes."""
    return _disassembled(_assembled(ptx, arch)[0], arch)


def resources(ptx: str, arch: int) -> dict[str, int]:
    """Return the registers and spilled bytes of the kernel, from ptxas -v."""
    _, report = _assembled(ptx, arch)
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
    **options: int,
):
    """``aligned``: pointers, and the elements of a row, are multiples of 16, as they usually are. ``library``: which
    NVSHMEM's functions come from; by default, that which ``tdcoll.jit`` links."""
    declared = {parameter.name: parameter.annotation_type for parameter in kernel.params if parameter.annotation_type}
    types = declared | types
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    constants = dict(constants)
    for place, (name, kind) in enumerate(signature.items()):
        if isinstance(kind, tuple):
            fixed = (int, tl.constexpr)  # also a default that is a constant
            constants |= {(place, i): getattr(of, "value", of) for i, of in enumerate(kind) if isinstance(of, fixed)}
            signature[name] = type(kind)(*("constexpr" if isinstance(of, fixed) else of for of in kind))
    library = library or part_for_language(bitcode_path())
    libraries = {"libnvshmem_device": library} if needs_nvshmem(kernel) else {}
    hints = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if aligned and (str(signature[name]).startswith("*") or name == "row_elements")
    }
    for place, kind in enumerate(signature.values()):
        if aligned and isinstance(kind, tuple):
            hints |= {(place, i): [["tt.divisibility", 16]] for i, of in enumerate(kind) if of.startswith("*")}
    early = getattr(kernel, "begins_in_stream_order", False)
    compiled = triton.compile(
        ASTSource(kernel, signature, constants, hints),
        target=GPUTarget("cuda", arch, 32),
        options={"extern_libs": libraries, "num_warps": 8, "launch_pdl": early, **options},
    )
    ptx = compiled.asm["ptx"]
    seen = {"problems": ptx_order.problems(ptx), **ptx_order.count(ptx)}
    early = {"launched_early": compiled.metadata.launch_pdl, "waits_first": ptx_order.early(ptx)}
    ORDER.append({"module": kernel.__module__, "kernel": kernel.__name__, "arch": arch, **early, **seen})
    return compiled


ORDER: list[dict[str, object]] = []
"""What :mod:`ptx_order` finds in each kernel that was compiled."""


def compile_all_gather(kernel, arch: int, in_place: bool) -> dict[str, object]:
    constants = {"BLOCK": WORLD, "COUNTED": in_place}
    if kernel is kernels_puts.all_gather_2d:
        constants["STORES"] = arch == 90  # both forms, once each
    compiled = compile_for(kernel, arch, constants, tuples(1 if in_place else 2))
    ptx = compiled.asm["ptx"]
    # A definition that the linker inlined leaves no call: its callee does.
    called = sorted(set(re.findall(r"\b(nvshmem[xi]?_\w+)", ptx)))
    return {
        "kernel": kernel.__name__,
        "arch": arch,
        "world": WORLD,
        "in_place": in_place,
        "stores": constants.get("STORES", False),
        "nvshmem": called,
        "globaltimer": ptx.count("%globaltimer"),
        "acquire_sys": ptx.count("ld.acquire.sys"),
        "cubin_bytes": len(compiled.asm["cubin"]),
        **resources(ptx, arch),
    }


def compile_ll(arch: int, block: int, over_nodes: bool) -> dict[str, object]:
    kernel = kernels_puts.all_gather_ll_2d if over_nodes else kernels_ll.all_gather_ll
    compiled = compile_for(kernel, arch, {"BLOCK": block}, tuples())
    return {
        "kernel": kernel.__name__,
        "arch": arch,
        "block": block,
        "needs": needs_nvshmem(kernel),
        "globaltimer": compiled.asm["ptx"].count("%globaltimer"),
        **resources(compiled.asm["ptx"], arch),
    }


def direct_ptx(kernel, arch: int, in_place: bool) -> str:
    constants = {"COUNTED": False} if "COUNTED" in kernel.arg_names else {}
    return compile_for(kernel, arch, constants, tuples(1 if in_place else 2)).asm["ptx"]


def compile_exchange(arch: int) -> dict[str, object]:
    """The exchange of lists in one node: in place, with segments that say how much they hold."""
    kernel = kernels_direct.all_gather_direct
    ptx = compile_for(kernel, arch, {"COUNTED": True}, tuples(1)).asm["ptx"]
    called = sorted(set(re.findall(r"\b(nvshmem[xi]?_\w+)", ptx)))
    return {"counted": True, "needs": needs_nvshmem(kernel), "calls": called, **resources(ptx, arch)}


def compile_direct(kernel, arch: int, in_place: bool) -> dict[str, object]:
    ptx = direct_ptx(kernel, arch, in_place)
    return {
        "kernel": kernel.__name__,
        "arch": arch,
        "in_place": in_place,
        "needs": needs_nvshmem(kernel),
        "globaltimer": ptx.count("%globaltimer"),
        "release_sys": ptx.count("st.release.sys"),
        "wide_stores": len(re.findall(r"st\.global\S*\.v[248]", ptx)),
        **resources(ptx, arch),
    }


INDEX_MATCH = {  # constants, as op.py has them
    "clear": {"BLOCK": 4096},
    "mark": {"BLOCK": 1024},
    "unite": {"BLOCK": 512},
    "number": {"BLOCK": 512, "TOTALS": 1024},
    "find_leaders": {"BLOCK": 512},
    "number_leaders": {"BLOCK": 512, "TOTALS": 1024},
    "place_leaders": {"BLOCK": 512},
    "emit_match": {"BLOCK": 256, "SEARCH": False},
    "emit_match, search": {"BLOCK": 256, "SEARCH": True},
    "pack_list": {"BLOCK": 256},
    "invert_indices": {"BLOCK": 256},
}
INDEX_MATCH_TYPES = {
    **dict.fromkeys(("lists", "entries", "status", "union", "target", "source", "local", "ids", "out"), "*i64"),
    **dict.fromkeys(("totals", "leaders", "positions", "contributors"), "*i32"),
}


def compile_index_match(arch: int, name: str, constants: dict[str, object]) -> dict[str, object]:
    kernel = getattr(index_match, name.split(",")[0])
    declared = {parameter.name: parameter.annotation_type for parameter in kernel.params if parameter.annotation_type}
    ptx = compile_for(kernel, arch, constants, INDEX_MATCH_TYPES).asm["ptx"]
    return {
        "kernel": name,
        "arch": arch,
        "needs": needs_nvshmem(kernel),
        "wide": sorted(name for name, kind in declared.items() if kind == "i64"),
        "popcounts": ptx.count("popc.b"),
        "or64": len(re.findall(r"(?:atom|red)\.global\S*\.or\.b64", ptx)),
        **resources(ptx, arch),
    }


_SUM = {"REPEATED": True, "OP": reduce.SUM, "ACC": tl.float32}
_ROW = {"REPEATED": True, "ACC": tl.float32, "ALIGNED": True}
SPARSE = [  # kernel, constants as op.py has them, dtype of rows, architectures
    ("reduce", {**_SUM, "ALIGNED": True, "ROWS": 1, "WIDE": 2048, "WAITED": 8}, "*fp32", (90, 100)),
    ("reduce", {**_SUM, "ALIGNED": True, "ROWS": 64, "WIDE": 64, "WAITED": 8}, "*bf16", (90,)),
    ("reduce", {**_SUM, "search": True, "ALIGNED": False, "ROWS": 32, "WIDE": 32, "WAITED": 8}, "*fp64", (90,)),
    ("reduce_nodes", {**_SUM, "WIDE": 2048, "WAITED": 8}, "*fp32", (90, 100)),
    ("reduce_nodes_of_single", {**_SUM, "WIDE": 1, "WAITED": 8}, "*fp16", (90,)),
    ("forward", {"WAITED": 8}, "*fp32", (90,)),
    ("meet", {"WAITED": 8}, "*fp32", (90,)),
    ("meet_nodes", {"WAITED": 8}, "*fp32", (90,)),
    ("plan", {"REPEATED": True, "BLOCK": 256}, "*fp32", (90,)),
    ("combine", {**_ROW, "ALL": False, "DEEP": 4, "WIDE": 2048}, "*fp32", (90, 100)),
    ("sum_pieces", {"ACC": tl.float32, "DEEP": 4, "WIDE": 2048}, "*bf16", (90,)),
    ("sum_partial", {"ACC": tl.float32, "ALIGNED": True, "WIDE": 2048}, "*bf16", (90,)),
    (
        "merge",
        {"OP": reduce.MAX, "ACC": tl.float32, "ALIGNED": True, "ROWS": 8, "WIDE": 256},
        "*fp16",
        (90, 100),
    ),
    ("pad", {"ROWS": 1, "WIDE": 2048}, "*fp32", (90,)),
    ("count_first", {"BLOCK": 1024}, "*fp32", (90,)),
    ("write_list", {"BLOCK": 1024}, "*fp32", (90,)),
    ("copy_list", {"BLOCK": 1024}, "*fp32", (90,)),
]
SPARSE_KERNELS = {
    name: kernel
    for module in (kernels_lists, kernels_values, kernels_reduce, kernels_nodes, kernels_merge)
    for name, kernel in vars(module).items()
    if name in module.__all__
}
SPARSE_TYPES = {
    **dict.fromkeys(("ids", "begins", "order", "count", "indices", "remembered"), "*i64"),
    "totals": "*i32",
    "partial": "*fp32",
    "g": tuples()["g"],
    "memory": kernels_lists.Memory("*i64", "*i64", "*i32", "*i32", "*i32"),
    "nodes": Nodes("*i32", "*i32", "*i32", "*i32", "i32", "i32", "i32"),
}


def index_of_all(search: bool) -> kernels_lists.Index:
    return kernels_lists.Index("*i64", "*i64", "*i64", "*i64", "i64", "i32", "i32", "i32", search)


def compile_sparse(name: str, arch: int, constants: dict[str, object], rows: str) -> dict[str, object]:
    kernel = SPARSE_KERNELS[name]
    constants = {k: v.value if isinstance(v, tl.constexpr) else v for k, v in constants.items()}
    search = bool(constants.pop("search", False))
    types = SPARSE_TYPES | dict.fromkeys(("source", "out", "values", "like"), rows) | {"index": index_of_all(search)}
    ptx = compile_for(kernel, arch, constants, types, aligned=bool(constants.get("ALIGNED"))).asm["ptx"]
    return {
        "kernel": name,
        "arch": arch,
        "rows": rows,
        "search": search,
        "calls": sorted(set(re.findall(r"\b(nvshmem[xi]?_\w+)", ptx))),
        "aligned": bool(constants.get("ALIGNED")),
        "needs": needs_nvshmem(kernel),
        "globaltimer": ptx.count("%globaltimer"),
        "release_sys": ptx.count("st.release.sys"),
        "nan_max": ptx.count("max.NaN.f32"),
        "wide_loads": len(re.findall(r"ld\.global\S*\.v[248]", ptx)),
        "wide_stores": len(re.findall(r"st\.global\S*\.v[248]", ptx)),
        **resources(ptx, arch),
    }


_FLOATS = {"DTYPE": tl.float32, "ACC": tl.float32}
_TILES = {"WAITED": WORLD}
_ANNOUNCED = {"LAMPORT": True, "BLOCK": 256, "LOOPED": False}
_FLAGGED = {**_ANNOUNCED, "LAMPORT": False}
_FP8 = {"DTYPE": tl.float8e4nv, "ACC": tl.float32}
_SCATTER_PULL = scatter_pull.reduce_scatter_pull
_SCATTER_DIRECT, _SCATTER_PUTS = scatter_direct.reduce_scatter_direct, scatter_puts.reduce_scatter_puts
REDUCE_SCATTER = [  # kernel, constants, architectures
    (_SCATTER_DIRECT, {**_FLOATS, **_TILES, "OP": MEAN, "COUNT": 1024}, (90, 100)),
    (_SCATTER_DIRECT, {**_FLOATS, **_TILES, "DTYPE": tl.bfloat16, "OP": MAX, "COUNT": 2048}, (90,)),
    (_SCATTER_DIRECT, {**_TILES, "DTYPE": tl.int64, "ACC": tl.int64, "OP": MAX, "COUNT": 512}, (90,)),
    (_SCATTER_DIRECT, {**_FLOATS, **_TILES, "OP": PROD, "COUNT": 1024}, (90,)),
    (_SCATTER_PULL, {**_FLOATS, **_TILES, "DTYPE": tl.bfloat16, "OP": SUM, "COUNT": 2048}, (90, 100)),
    (_SCATTER_PUTS, {**_FLOATS, **_TILES, "OP": SUM, "COUNT": 1024}, (90, 100)),
    (_SCATTER_PUTS, {**_FLOATS, **_TILES, "DTYPE": tl.bfloat16, "OP": MEAN, "COUNT": 2048}, (90,)),
    (_SCATTER_DIRECT, {**_TILES, **_FP8, "OP": SUM, "COUNT": 1024}, (90, 100)),
    (scatter_words.reduce_scatter_words, {**_FLOATS, "OP": SUM, **_FLAGGED}, (90,)),
    (scatter_words.reduce_scatter_words, {"DTYPE": tl.uint8, "ACC": tl.int32, "OP": MAX, **_FLAGGED}, (90,)),
    (scatter_words.reduce_scatter_words, {**_FLOATS, "DTYPE": tl.bfloat16, "OP": MEAN, **_ANNOUNCED}, (90, 100)),
]


def compile_reduce_scatter(kernel, arch: int, constants: dict[str, object]) -> dict[str, object]:
    constants = {k: v.value if isinstance(v, tl.constexpr) else v for k, v in constants.items()}
    announced = bool(constants.get("LAMPORT"))
    inbox = Lamport("i64", "i64", "*i64", "*i64") if announced else tuples()["words"]
    types = tuples(1 if kernel is _SCATTER_PULL else 2) | {"nodes": SPARSE_TYPES["nodes"], "inbox": inbox}
    ptx = compile_for(kernel, arch, constants, types).asm["ptx"]
    return {
        "kernel": kernel.__name__,
        "arch": arch,
        "dtype": str(constants["DTYPE"]),
        "announced": announced,
        "needs": needs_nvshmem(kernel),
        "links": "nvshmemi_device_state" in ptx,
        "maxima": sorted(set(re.findall(r"\b(?:max|min)\.\S*f\d\d", ptx))),
        "fused": len(re.findall(r"fma\.rn\.f", ptx)),
        "globaltimer": ptx.count("%globaltimer"),
        "release_sys": ptx.count("st.release.sys"),
        "wide_loads": len(re.findall(r"ld\.global\S*\.v[248]", ptx)),
        "wide_stores": len(re.findall(r"st\.global\S*\.v[248]", ptx)),
        **resources(ptx, arch),
    }


_ONE, _TWO = reduce_words.all_reduce_one_shot, reduce_words.all_reduce_two_shot
_BF16 = {"DTYPE": tl.bfloat16, "ACC": tl.float32, "OP": SUM}
_FP32 = {**_FLOATS, "OP": SUM}
_STAGED = {"STRAIGHT": False}
_INT32 = {"DTYPE": tl.int32, "ACC": tl.int32, "OP": MAX}
ALL_REDUCE = [  # kernel, constants, ranks, architectures
    (_ONE, {**_FP32, **_ANNOUNCED}, 8, (90,)),
    (_ONE, {**_BF16, **_ANNOUNCED}, 2, (100,)),
    (_ONE, {**_INT32, **_FLAGGED}, 2, (90,)),
    (_ONE, {**_FP8, "OP": SUM, **_ANNOUNCED}, 8, (90, 100)),
    (_TWO, {"DTYPE": tl.int8, "ACC": tl.int32, "OP": MAX, **_FLAGGED}, 4, (90,)),
    (_TWO, {**_BF16, **_ANNOUNCED}, 4, (90, 100)),
    (_TWO, {**_INT32, **_FLAGGED}, 4, (90,)),
    (_TWO, {**_BF16, **_ANNOUNCED, "LOOPED": True}, 2, (90,)),
    (reduce_direct.all_reduce_direct, {**_FP32, **_STAGED, "COUNT": 1024, "WAITED": 4}, 4, (90, 100)),
    (reduce_direct.all_reduce_direct, {**_BF16, "STRAIGHT": True, "COUNT": 2048, "WAITED": 4}, 4, (90, 100)),
    (reduce_direct.all_reduce_direct, {**_FP8, **_STAGED, "OP": MEAN, "COUNT": 1024, "WAITED": 8}, 8, (90, 100)),
    (reduce_puts.all_reduce_puts, {**_BF16, "OP": MEAN, "COUNT": 2048, "WAITED": 8}, 8, (90, 100)),
    (reduce_over_nodes.all_reduce_nodes, {**_BF16, "COUNT": 2048}, 8, (90, 100)),
]


def compile_all_reduce(kernel, arch: int, constants: dict[str, object], world: int) -> dict[str, object]:
    constants = {k: v.value if isinstance(v, tl.constexpr) else v for k, v in constants.items()}
    announced = bool(constants.get("LAMPORT"))
    types = tuples() | {
        "nodes": SPARSE_TYPES["nodes"],
        "g": tuples()["g"]._replace(world=world),
        "inbox": Lamport("i64", "i64", "*i64", "*i64") if announced else tuples()["words"],
        "straight": "*i64",
    }
    compiled = compile_for(kernel, arch, constants, types)
    ptx = compiled.asm["ptx"]
    return {
        "kernel": kernel.__name__,
        "arch": arch,
        "world": world,
        "dtype": str(constants["DTYPE"]),
        "announced": announced,
        "looped": bool(constants.get("LOOPED")),
        "needs": needs_nvshmem(kernel),
        "links": "nvshmemi_device_state" in ptx,
        "fused": len(re.findall(r"fma\.rn\.f", ptx)),
        "globaltimer": ptx.count("%globaltimer"),
        "loads": len(re.findall(r"ld\.global\.v4", ptx)),
        "sent": len(re.findall(r"st\.relaxed\.sys\.global\.v4", ptx)),
        "hot_spills": hot_spills(compiled.asm["cubin"], arch),
        **resources(ptx, arch),
    }


_NORMS = {
    "one_shot": fused.norm_rows_one_shot,
    "two_stage": fused.norm_rows_two_stage,
    "composed": fused.norm_rows,
}
_EIGHT = {"SCALE": PER_ROW, "WEIGHT": tl.float32}
FUSED = [  # rows, hidden, ranks, architectures, other constants; bf16, cut as the policy says
    *((rows, hidden, world, (90, 100), {}) for rows in (1, 64, 512) for hidden in (4096, 8192) for world in (2, 4)),
    (1, 8192, 8, (90,), {}),
    (64, 16384, 4, (90,), {}),
    (8, 8192, 4, (90, 100), _EIGHT),
    (512, 8192, 4, (90,), _EIGHT),
    (1 << 14, 8192, 4, (90, 100), {}),
]


def compile_fused(rows: int, hidden: int, world: int, arch: int, more: dict[str, Any]) -> dict[str, object]:
    topology = Topology.of(0, range(world), [0] * world)
    plan = choose(Rows(rows, hidden, 2), Facts(0, topology, stores=True, lamport_bytes=1 << 24))
    kernel, pieces = _NORMS[plan.algorithm], plan.channels
    constants = {"HIDDEN": hidden, "DTYPE": tl.bfloat16, "WEIGHT": tl.bfloat16, "SCALE": NONE, "PIECES": pieces}
    constants |= {"ROOM": triton.next_power_of_2(pieces), "BLOCK": plan.chunk // 16, **more}
    constants = {name: getattr(value, "value", value) for name, value in constants.items()}
    types = {"g": tuples()["g"]._replace(world=world), "inbox": Lamport("i64", "i64", "*i64", "*i64")}
    compiled = compile_for(kernel, arch, constants, types, num_warps=plan.num_warps, maxnreg=128)
    ptx = compiled.asm["ptx"]
    return {
        "kernel": kernel.__name__,
        "arch": arch,
        "rows": rows,
        "hidden": hidden,
        "world": world,
        "pieces": pieces,
        "words": plan.chunk // 16 // min(plan.chunk // 16, 32 * plan.num_warps),  # of a thread
        "needs": needs_nvshmem(kernel),
        "waits": ptx.count("%globaltimer"),
        "contracted": len(re.findall(r"fma\.rn\.f", ptx)),
        **resources(ptx, arch),
    }


def hot_spills(cubin: bytes, arch: int) -> list[str]:
    """Spilling instructions, but for those around the record of an expired wait.

    Its compare-and-swap wants neighbouring registers; a kernel that gets that far is lost.
    """
    text = _disassembled(cubin, arch)
    blocks = re.split(r"^\.L_\w+:$|^.*\bBRA\b.*$", text, flags=re.MULTILINE)
    spill = re.compile(r"^.*\b(?:STL|LDL)\b.*$", re.MULTILINE)
    return [line for block in blocks if not re.search(r"\bATOMG?\S*\.CAS\b", block) for line in spill.findall(block)]


def compiled_forms(kernel) -> int:
    """How many kernels ranks 0, 1, 2 and 16 compile, of different sizes too."""
    backend, forms = make_backend(GPUTarget("cuda", 90, 32)), set()
    bind = _with_plain_fields(create_function_from_signature(kernel.signature, kernel.params, backend))
    word, table = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int32)
    for rank in (0, 1, 2, 16):
        known = {
            "g": Group(word, word, word, word, word, rank, channels=tl.constexpr(16), world=tl.constexpr(32)),
            **dict.fromkeys(("window", "words"), Window(16 * rank, 1 + rank, word, tl.constexpr(2))),
            "inbox": Lamport(16 * rank, 1 + rank, word, word),
            "routes": Routes(table, rank, 31 - rank),
            "straight": word,
            "nodes": Nodes(table, table, table, table, rank, 1 + rank, 32 + rank),
            **{name: 8 for name in kernel.arg_names if name.isupper()},
        }
        _, specialization, _ = bind(**{name: known.get(name, rank) for name in kernel.arg_names}, debug=False)
        forms.add(str(specialization))
    return len(forms)


SIGNALS = {"ping_pong": {}, "signal_all": {"WORLD": 8, "BLOCK": 8}}
SIGNAL_TYPES = {"pes": "*i32", **dict.fromkeys(("signals", "addresses", "counter", "monitor"), "*i64")}


def compile_signals(arch: int, name: str, direct: bool) -> dict[str, object]:
    ptx = compile_for(getattr(bench, name), arch, {**SIGNALS[name], "DIRECT": direct}, SIGNAL_TYPES).asm["ptx"]
    return {
        "kernel": name,
        "arch": arch,
        "direct": direct,
        "links": "nvshmemi_device_state" in ptx,
        "releases": ptx.count("st.release.sys"),
        "globaltimer": ptx.count("%globaltimer"),
        **resources(ptx, arch),
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
        constants = {name: 8 for name in ("BLOCK", "PARTS") if name in kernel.arg_names}
        ptx = compile_for(kernel, arch, constants, types).asm["ptx"]
        links, needs = "nvshmemi_device_state" in ptx, needs_nvshmem(kernel)
        done.append({"kernel": name, "arch": arch, "links": links, "needs": needs})
    return done


def compile_with_all_of_nvshmem() -> dict[str, str]:
    """The code of a kernel that calls much of NVSHMEM, linked with its library and with the part that kernels get."""
    from language_checks import put_signal

    ptx = {}
    for name, library in (("whole", bitcode_path()), ("part", part_for_language(bitcode_path()))):
        whole = compile_for(put_signal, 90, {}, LANGUAGE_TYPES, library=library).asm["ptx"]
        ptx[name] = whole.partition("\n\t.file\t")[0]  # not where its source lies
        ORDER.pop()
    return ptx


@triton.jit
def wait_signal_without_its_barrier(signal, compare: tl.constexpr, value, monitor, peer, index):
    return waits._poll(signal, compare, value, monitor, 1, peer, index)


@tdl_jit
def waits_late(out, BLOCK: tl.constexpr):
    tl.store(out, BLOCK)
    in_stream_order()


@tdl_jit
def _waits_in_a_helper():
    in_stream_order()


@tdl_jit
def waits_elsewhere(out, BLOCK: tl.constexpr):
    _waits_in_a_helper()
    tl.store(out, BLOCK)


def refusals() -> dict[str, str]:
    """What is said of kernels that wait for the launch before them, and not first."""
    said = {}
    for kernel in (waits_late, waits_elsewhere):
        try:
            said[kernel.__name__] = str(kernel.begins_in_stream_order)
        except ValueError as error:
            said[kernel.__name__] = str(error)
    return said


def compile_mutants() -> dict[str, list[str]]:
    """What :mod:`ptx_order` finds in the all-gather by stores with one protection switched off."""
    found = {}

    def note(name: str) -> None:
        jit._lowering_digest = lambda: name  # what of the lowering changes here is in no file
        direct_ptx(import_module("tdcoll.collectives.all_gather.kernels_direct").all_gather_direct, 90, False)
        found[name] = ORDER.pop()["problems"]

    with tempfile.TemporaryDirectory() as folder:
        for name, change in (
            ("released without a barrier", Change("stores.release", "tdl.syncthreads()", "pass")),
            (
                "epoch read without a barrier",
                Change("group.begin_epoch", "tdl.block_and(aborted == 0)", "(aborted == 0).to(tl.int32)"),
            ),
        ):
            with installed([change], Path(folder)):
                note(name)
        polling, wait_signal = waits._polling, tdl.wait_signal
        waits._polling = lambda **pieces: polling(**pieces).replace("ld.acquire.sys", "ld.relaxed.sys")
        note("relaxed wait")
        waits._polling = polling
        tdl.wait_signal = wait_signal_without_its_barrier
        note("wait without a barrier")
        tdl.wait_signal = wait_signal
    return found


def main() -> None:
    results, ll, matching, signals = [], [], [], []
    signals += [compile_signals(90, name, direct) for name in SIGNALS for direct in (False, True)]
    for arch in (90, 100):
        matching += [compile_index_match(arch, name, constants) for name, constants in INDEX_MATCH.items()]
        ll += [compile_ll(arch, 128, over) for over in (False, True)]
        for kernel in (kernels_puts.all_gather_1d, kernels_puts.all_gather_2d):
            results += [compile_all_gather(kernel, arch, place) for place in (False, True) if arch == 90 or not place]
    ll += [compile_ll(90, 1024, False)]
    sums = [compile_sparse(name, arch, constants, rows) for name, constants, rows, archs in SPARSE for arch in archs]
    checks = compile_language_checks(90)
    compiled = {"all_gather": results, "ll": ll, "language": checks, "index_match": matching, "sparse": sums}
    compiled["signals"] = signals
    kernels = (_SCATTER_DIRECT, _SCATTER_PULL, _SCATTER_PUTS, scatter_words.reduce_scatter_words)
    compiled["reduce_scatter_forms"] = {kernel.__name__: compiled_forms(kernel) for kernel in kernels}
    compiled["reduce_scatter"] = [
        compile_reduce_scatter(k, arch, c) for k, c, archs in REDUCE_SCATTER for arch in archs
    ]
    kernels = (_ONE, _TWO, *(kernel for kernel, *_ in ALL_REDUCE[-3:]))
    compiled["all_reduce_forms"] = {kernel.__name__: compiled_forms(kernel) for kernel in kernels}
    compiled["all_reduce"] = [compile_all_reduce(k, arch, c, n) for k, c, n, archs in ALL_REDUCE for arch in archs]
    compiled["fused_forms"] = {kernel.__name__: compiled_forms(kernel) for kernel in _NORMS.values()}
    compiled["fused"] = [compile_fused(*about, arch, more) for *about, archs, more in FUSED for arch in archs]
    stores = (kernels_direct.all_gather_direct, kernels_ring.all_gather_ring)
    compiled["direct"] = [
        compile_direct(k, arch, place) for k in stores for arch in (90, 100) for place in (False, True)
    ]
    compiled["exchange"] = [compile_exchange(90)]
    compiled["library"] = compile_with_all_of_nvshmem()
    compiled["order"] = list(ORDER)
    compiled["refusals"] = refusals()
    json.dump({"triton": triton.__version__, **compiled, "mutants": compile_mutants()}, sys.stdout)


if __name__ == "__main__":
    main()
