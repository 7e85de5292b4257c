# SPDX-License-Identifier: Apache-2.0
"""Kernels of index matching and of the sparse all-reduce, for GPUs that need not be here."""

from __future__ import annotations

import re

import triton.language as tl
from compiling import (
    compile_for,
    copy_spills,
    resources,
    tuples,
)

from tdcoll.collectives.index_match import kernels as index_match
from tdcoll.collectives.sparse_all_reduce import (
    kernels_lists,
    kernels_merge,
    kernels_nodes,
    kernels_reduce,
    kernels_tables,
    kernels_values,
)
from tdcoll.collectives.sparse_all_reduce.policy import REGISTERS as SPARSE_REGISTERS
from tdcoll.language.jit import needs_nvshmem, typed_fields
from tdcoll.primitives import reduce
from tdcoll.primitives.group import Nodes


def index_of_all(search: bool) -> index_match.Index:
    pointers = (*["*i64"] * 4, *["*i32"] * 3)
    return index_match.Index(*pointers, "i64", "i64", "i32", "i64", *["i32"] * 4, search, 512, 1024)


_SUM = {"REPEATED": True, "OP": reduce.SUM, "ACC": tl.float32}
_ROW = {"REPEATED": True, "ACC": tl.float32, "ALIGNED": True}
_PLANNED = {**_ROW, "PLANS": True, "BLOCK": 256, "FIRSTS": 0}
_TILES = {"DEEP": 4, "WIDE": 2048, "PIECES": False}
_PACKED = {**_ROW, **_TILES, "SORT_BLOCK": 0, "BEHIND": False, "BLOCK": 1024, "CLEAR": 4096}
_GATHERED = {**_PACKED, "BEHIND": True, "PIECES": True}
_MERGED = {
    "OP": reduce.MAX,
    "ACC": tl.float32,
    "ALIGNED": True,
    "ROWS": 8,
    "WIDE": 256,
    "FIRSTS": 0,
}
SPARSE = [  # kernel, constants as op.py has them, dtype of rows, architectures
    (
        "reduce",
        {**_SUM, "ALIGNED": True, "ROWS": 1, "WIDE": 2048, "WORLD_POW2": 8},
        "*fp32",
        (90, 100),
    ),
    ("reduce", {**_SUM, "ALIGNED": True, "ROWS": 64, "WIDE": 64, "WORLD_POW2": 8}, "*bf16", (90,)),
    (
        "reduce",
        {**_SUM, "search": True, "ALIGNED": False, "ROWS": 32, "WIDE": 32, "WORLD_POW2": 8},
        "*fp64",
        (90,),
    ),
    ("reduce_nodes", {**_SUM, "WIDE": 2048, "WORLD_POW2": 8}, "*fp32", (90, 100)),
    ("reduce_nodes_of_single", {**_SUM, "WIDE": 1, "WORLD_POW2": 8}, "*fp16", (90,)),
    ("forward", {"WORLD_POW2": 8}, "*fp32", (90,)),
    ("meet_nodes", {"WORLD_POW2": 8}, "*fp32", (90,)),
    ("prepare", {**_PLANNED, "PIECES": False, "DEEP": 4, "WIDE": 2048}, "*fp32", (90, 100)),
    ("prepare", {**_PLANNED, "PIECES": True, "DEEP": 4, "WIDE": 2048}, "*fp32", (90, 100)),
    ("prepare", {**_PLANNED, "PIECES": True, "DEEP": 4, "WIDE": 2048}, "*bf16", (90,)),
    (
        "prepare",
        {**_PLANNED, "search": True, "PIECES": True, "DEEP": 8, "WIDE": 64},
        "*fp32",
        (90,),
    ),
    (
        "prepare",
        {**_PLANNED, "PLANS": False, "PIECES": True, "DEEP": 4, "WIDE": 2048},
        "*fp32",
        (90,),
    ),
    ("merge", _MERGED, "*fp16", (90, 100)),
    ("merge", {**_MERGED, "search": True}, "*fp16", (90,)),
    ("pad", {"TABLES": 2, "ROWS": 1, "WIDE": 2048}, "*fp32", (90,)),
    (
        "reduce",
        {**_SUM, "tables": 4, "ALIGNED": True, "ROWS": 1, "WIDE": 2048, "WORLD_POW2": 8},
        "*fp32",
        (90, 100),
    ),
    (
        "reduce",
        {**_SUM, "tables": 8, "ALIGNED": True, "ROWS": 64, "WIDE": 64, "WORLD_POW2": 8},
        "*bf16",
        (90,),
    ),
    ("reduce_nodes", {**_SUM, "tables": 4, "WIDE": 2048, "WORLD_POW2": 8}, "*fp32", (90, 100)),
    ("forward", {"tables": 4, "WORLD_POW2": 8}, "*fp32", (90,)),
    (
        "prepare",
        {**_PLANNED, "tables": 4, "PIECES": True, "DEEP": 4, "WIDE": 2048, "FIRSTS": 32},
        "*fp32",
        (90, 100),
    ),
    (
        "prepare",
        {**_PLANNED, "tables": 1, "PIECES": True, "DEEP": 8, "WIDE": 64, "FIRSTS": 32},
        "*bf16",
        (90,),
    ),
    ("merge", {**_MERGED, "tables": 8, "FIRSTS": 32}, "*fp16", (90,)),
    ("pad", {"tables": 4, "TABLES": 32, "ROWS": 1, "WIDE": 2048}, "*fp32", (90,)),
    (
        "join",
        {"narrow": True, "given": 26, "ITEM": 4, "TENSORS": 26, "BLOCK": 1024},
        "*fp32",
        (90, 100),
    ),
    ("pack", _PACKED, "*fp32", (90, 100)),
    ("pack", {**_PACKED, "narrow": True}, "*fp32", (90,)),
    ("pack", {**_PACKED, "REPEATED": False}, "*fp32", (90,)),
    ("pack", {**_GATHERED, "SORT_BLOCK": 32, "narrow": True, "tables": 4}, "*fp32", (90, 100)),
    ("pack", _GATHERED, "*bf16", (90,)),
    ("pack", {**_GATHERED, "REPEATED": False, "PIECES": False}, "*fp32", (90,)),
]
SPARSE_KERNELS = {
    name: kernel
    for module in (
        kernels_lists,
        kernels_tables,
        kernels_values,
        kernels_reduce,
        kernels_nodes,
        kernels_merge,
    )
    for name, kernel in vars(module).items()
    if name in {of_case for of_case, *_ in SPARSE}
}
SPARSE_TYPES = {
    **dict.fromkeys(
        (
            "ids",
            "begins",
            "order",
            "count",
            "counts",
            "indices",
            "joined",
            "remembered",
            "unsorted",
        ),
        "*i64",
    ),
    "totals": "*i32",
    "partial": "*fp32",
    "g": tuples()["g"],
    "memory": kernels_lists.RowMemory("i64", "i64", "*i32", "*i32", "*i64", "*i32"),
    "nodes": Nodes("*i32", "*i32", "*i32", "*i32", "i32", "i32", "i32"),
}


def compile_sparse(
    name: str, arch: int, constants: dict[str, object], rows: str
) -> dict[str, object]:
    kernel = SPARSE_KERNELS[name]
    constants = {k: v.value if isinstance(v, tl.constexpr) else v for k, v in constants.items()}
    search = bool(constants.pop("search", False))
    tables = constants.pop("tables", 0)  # elements in 16 bytes of a list of tables; 0: there is one
    one = kernels_tables.Tables("*i64", "*i32", "*i64", "i32", not tables, tables or 1)
    given = ["i64"] * constants.pop("given", 1)
    given = kernels_tables.given(given, given, [*given, "i64"])
    types = SPARSE_TYPES | {"tables": one, "given": given}
    narrow = (
        ("joined", "unsorted") if constants.get("SORT_BLOCK") else ("ids", "joined", "unsorted")
    )
    types |= dict.fromkeys(narrow, "*i32") if constants.pop("narrow", False) else {}
    types |= dict.fromkeys(("source", "out", "values", "like"), rows) | {
        "index": index_of_all(search)
    }
    options = {"maxnreg": SPARSE_REGISTERS} if name in ("pack", "prepare", "merge") else {}
    compiled = compile_for(
        kernel, arch, constants, types, aligned=bool(constants.get("ALIGNED")), **options
    )
    ptx = compiled.asm["ptx"]
    needed = resources(ptx)
    looks = needed.get("spilled_bytes") and needs_nvshmem(kernel)
    declared = {parameter.name: parameter.annotation_type for parameter in kernel.params}
    declared |= {
        name: str(of).replace("int", "i") for name, of in typed_fields(index_match.Index).items()
    }
    return {
        "kernel": name,
        "arch": arch,
        "rows": rows,
        "search": search,
        "tables": tables,
        "of_64_bits": sorted(name for name, kind in declared.items() if kind == "i64"),
        "calls": sorted(set(re.findall(r"\b(nvshmem[xi]?_\w+)", ptx))),
        "aligned": bool(constants.get("ALIGNED")),
        "wide": constants.get("WIDE", 0),
        "needs": needs_nvshmem(kernel),
        "globaltimer": ptx.count("%globaltimer"),
        "release_sys": ptx.count("st.release.sys"),
        "nan_max": ptx.count("max.NaN.f32"),
        "popcounts": ptx.count("popc.b"),
        "or64": len(re.findall(r"(?:atom|red)\.global\S*\.or\.b64", ptx)),
        "wide_loads": len(re.findall(r"ld\.global\S*\.v[248]", ptx)),
        "wide_stores": len(re.findall(r"st\.global\S*\.v[248]", ptx)),
        "hot_spills": copy_spills(compiled, arch) if looks else [],
        **needed,
    }
