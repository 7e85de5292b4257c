# SPDX-License-Identifier: Apache-2.0
"""Compile the kernels of the sparse all-reduce: those that match indices, and its own."""

from __future__ import annotations

import re

import triton.language as tl
from compiling import compile_for, resources, tuples

from tdcoll.collectives.index_match import kernels as index_match
from tdcoll.collectives.sparse_all_reduce import (
    kernels_lists,
    kernels_merge,
    kernels_nodes,
    kernels_reduce,
    kernels_tables,
    kernels_values,
)
from tdcoll.language.jit import needs_nvshmem
from tdcoll.primitives import reduce
from tdcoll.primitives.group import Nodes

INDEX_MATCH = {  # constants, as op.py has them
    "build": {"MARK": 1024, "BLOCK": 512, "TOTALS": 1024, "FIRSTS": 0},
    "build, tables": {"MARK": 1024, "BLOCK": 512, "TOTALS": 1024, "FIRSTS": 32},
    "build, search": {"MARK": 1024, "BLOCK": 512, "TOTALS": 1024, "FIRSTS": 32},
}
INDEX_MATCH_TYPES = {
    **dict.fromkeys(("firsts", "places"), "*i64"),
    **dict.fromkeys(("totals", "leaders", "progress"), "*i32"),
}


def index_of_all(search: bool) -> index_match.Index:
    return index_match.Index("*i64", "*i64", "*i64", "*i64", "i64", "i32", "i64", "i32", "i32", search)


def compile_index_match(arch: int, name: str, constants: dict[str, object]) -> dict[str, object]:
    kernel = getattr(index_match, name.partition(",")[0])
    declared = {parameter.name: parameter.annotation_type for parameter in kernel.params if parameter.annotation_type}
    types = INDEX_MATCH_TYPES | {"index": index_of_all("search" in name)}
    ptx = compile_for(kernel, arch, constants, types).asm["ptx"]
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
_PLANNED = {**_ROW, "PLANS": True, "BEHIND": False, "BLOCK": 256}
_GATHERED = {**_ROW, "PLANS": False, "BEHIND": True, "BLOCK": 256}
SPARSE = [  # kernel, constants as op.py has them, dtype of rows, architectures
    ("reduce", {**_SUM, "ALIGNED": True, "ROWS": 1, "WIDE": 2048, "WAITED": 8}, "*fp32", (90, 100)),
    ("reduce", {**_SUM, "ALIGNED": True, "ROWS": 64, "WIDE": 64, "WAITED": 8}, "*bf16", (90,)),
    ("reduce", {**_SUM, "search": True, "ALIGNED": False, "ROWS": 32, "WIDE": 32, "WAITED": 8}, "*fp64", (90,)),
    ("reduce_nodes", {**_SUM, "WIDE": 2048, "WAITED": 8}, "*fp32", (90, 100)),
    ("reduce_nodes_of_single", {**_SUM, "WIDE": 1, "WAITED": 8}, "*fp16", (90,)),
    ("forward", {"WAITED": 8}, "*fp32", (90,)),
    ("meet", {"WAITED": 8}, "*fp32", (90,)),
    ("meet_nodes", {"WAITED": 8}, "*fp32", (90,)),
    ("prepare", {**_PLANNED, "PIECES": False, "DEEP": 4, "WIDE": 2048}, "*fp32", (90, 100)),
    ("prepare", {**_PLANNED, "PIECES": True, "DEEP": 4, "WIDE": 2048}, "*fp32", (90, 100)),
    ("prepare", {**_PLANNED, "PIECES": True, "DEEP": 4, "WIDE": 2048}, "*bf16", (90,)),
    ("prepare", {**_GATHERED, "PIECES": True, "DEEP": 4, "WIDE": 2048}, "*bf16", (90,)),
    ("prepare", {**_PLANNED, "search": True, "PIECES": True, "DEEP": 8, "WIDE": 64}, "*fp32", (90,)),
    (
        "merge",
        {"OP": reduce.MAX, "ACC": tl.float32, "ALIGNED": True, "ROWS": 8, "WIDE": 256},
        "*fp16",
        (90, 100),
    ),
    ("pad", {"TABLES": 2, "ROWS": 1, "WIDE": 2048}, "*fp32", (90,)),
    ("reduce", {**_SUM, "tables": 4, "ALIGNED": True, "ROWS": 1, "WIDE": 2048, "WAITED": 8}, "*fp32", (90, 100)),
    ("reduce", {**_SUM, "tables": 8, "ALIGNED": True, "ROWS": 64, "WIDE": 64, "WAITED": 8}, "*bf16", (90,)),
    ("reduce_nodes", {**_SUM, "tables": 4, "WIDE": 2048, "WAITED": 8}, "*fp32", (90, 100)),
    ("forward", {"tables": 4, "WAITED": 8}, "*fp32", (90,)),
    ("prepare", {**_PLANNED, "tables": 4, "PIECES": True, "DEEP": 4, "WIDE": 2048}, "*fp32", (90, 100)),
    ("prepare", {**_PLANNED, "tables": 1, "PIECES": True, "DEEP": 8, "WIDE": 64}, "*bf16", (90,)),
    (
        "merge",
        {"tables": 8, "OP": reduce.MAX, "ACC": tl.float32, "ALIGNED": True, "ROWS": 8, "WIDE": 256},
        "*fp16",
        (90,),
    ),
    ("pad", {"tables": 4, "TABLES": 32, "ROWS": 1, "WIDE": 2048}, "*fp32", (90,)),
    ("join", {"given": 26, "ITEM": 4, "COUNT": 26, "BLOCK": 1024}, "*fp32", (90, 100)),
    ("pack", {"REPEATED": True, "BLOCK": 1024, "CLEAR": 4096}, "*fp32", (90, 100)),
    ("pack", {"REPEATED": False, "BLOCK": 1024, "CLEAR": 4096}, "*fp32", (90,)),
]
SPARSE_KERNELS = {
    name: kernel
    for module in (kernels_lists, kernels_tables, kernels_values, kernels_reduce, kernels_nodes, kernels_merge)
    for name, kernel in vars(module).items()
    if name in {of_case for of_case, *_ in SPARSE}
}
SPARSE_TYPES = {
    **dict.fromkeys(("ids", "begins", "order", "count", "counts", "indices", "joined", "remembered"), "*i64"),
    **dict.fromkeys(("target", "status"), "*i64"),
    **dict.fromkeys(("totals", "progress"), "*i32"),
    "partial": "*fp32",
    "g": tuples()["g"],
    "memory": kernels_lists.RowMemory("i64", "i64", "*i32", "*i32", "*i32"),
    "nodes": Nodes("*i32", "*i32", "*i32", "*i32", "i32", "i32", "i32"),
}


def compile_sparse(name: str, arch: int, constants: dict[str, object], rows: str) -> dict[str, object]:
    kernel = SPARSE_KERNELS[name]
    constants = {k: v.value if isinstance(v, tl.constexpr) else v for k, v in constants.items()}
    search = bool(constants.pop("search", False))
    tables = constants.pop("tables", 0)  # elements in 16 bytes of a list of tables; 0: there is one
    one = kernels_tables.Tables("*i64", "*i32", "*i64", "i32", not tables, tables or 1)
    given = ["i64"] * constants.pop("given", 1)
    given = kernels_tables.given(given, given, [*given, "i64"])
    types = SPARSE_TYPES | {"tables": one, "given": given}
    types |= dict.fromkeys(("source", "out", "values", "like"), rows) | {"index": index_of_all(search)}
    ptx = compile_for(kernel, arch, constants, types, aligned=bool(constants.get("ALIGNED"))).asm["ptx"]
    return {
        "kernel": name,
        "arch": arch,
        "rows": rows,
        "search": search,
        "tables": tables,
        "calls": sorted(set(re.findall(r"\b(nvshmem[xi]?_\w+)", ptx))),
        "aligned": bool(constants.get("ALIGNED")),
        "wide": constants.get("WIDE", 0),
        "needs": needs_nvshmem(kernel),
        "globaltimer": ptx.count("%globaltimer"),
        "release_sys": ptx.count("st.release.sys"),
        "nan_max": ptx.count("max.NaN.f32"),
        "wide_loads": len(re.findall(r"ld\.global\S*\.v[248]", ptx)),
        "wide_stores": len(re.findall(r"st\.global\S*\.v[248]", ptx)),
        **resources(ptx, arch),
    }
