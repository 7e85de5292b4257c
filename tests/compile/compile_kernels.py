# SPDX-License-Identifier: Apache-2.0
"""Compile tdcoll's kernels for GPUs that need not be here, and print what came out as JSON.

Run as ``compile_kernels.py PART``, without TRITON_INTERPRET: which language a process speaks is decided at import. The
kernels of dense collectives, of fused functions and of the benchmarks' signals are here; the others are in
``compiling_*.py``.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import triton
import triton.language as tl
from compiling import ORDER, WORLD, compile_for, compiled_forms, direct_ptx, hot_spills, resources, tuples
from compiling_language import compile_language_checks, compile_with_all_of_nvshmem
from compiling_mutants import compile_mutants, refusals
from compiling_sparse import INDEX_MATCH, SPARSE, SPARSE_TYPES, compile_index_match, compile_sparse

from tdcoll.bench import kernels as bench
from tdcoll.collectives._host.plan import Facts
from tdcoll.collectives.all_gather import kernels_puts, kernels_ring
from tdcoll.collectives.all_reduce import kernels_direct as reduce_direct
from tdcoll.collectives.all_reduce import kernels_loop as reduce_loop
from tdcoll.collectives.all_reduce import kernels_nodes as reduce_over_nodes
from tdcoll.collectives.all_reduce import kernels_puts as reduce_puts
from tdcoll.collectives.all_reduce import kernels_words as reduce_words
from tdcoll.collectives.all_to_all import kernels_puts as to_all_puts
from tdcoll.collectives.exchange import kernels_direct, kernels_ll, kernels_loop
from tdcoll.collectives.reduce_scatter import kernels_direct as scatter_direct
from tdcoll.collectives.reduce_scatter import kernels_loop as scatter_loop
from tdcoll.collectives.reduce_scatter import kernels_pull as scatter_pull
from tdcoll.collectives.reduce_scatter import kernels_puts as scatter_puts
from tdcoll.collectives.reduce_scatter import kernels_words as scatter_words
from tdcoll.fused import kernels as fused
from tdcoll.fused.kernels_rows import NONE, PER_ROW
from tdcoll.fused.op import _REGISTERS as REGISTERS
from tdcoll.fused.policy import Rows, choose
from tdcoll.language.jit import needs_nvshmem
from tdcoll.primitives import copies
from tdcoll.primitives.lamport import Lamport
from tdcoll.primitives.reduce import MAX, MEAN, PROD, SUM
from tdcoll.runtime.topology import Topology


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
    kernel = kernels_puts.all_gather_ll_2d if over_nodes else kernels_ll.exchange_ll
    compiled = compile_for(kernel, arch, {"BLOCK": block}, tuples())
    return {
        "kernel": kernel.__name__,
        "arch": arch,
        "block": block,
        "needs": needs_nvshmem(kernel),
        "globaltimer": compiled.asm["ptx"].count("%globaltimer"),
        **resources(compiled.asm["ptx"], arch),
    }


def compile_exchange(arch: int) -> dict[str, object]:
    """The exchange of lists in one node: in place, with segments that say how much they hold."""
    kernel = kernels_direct.exchange_direct
    ptx = compile_for(kernel, arch, {"COUNTED": True}, tuples(1)).asm["ptx"]
    called = sorted(set(re.findall(r"\b(nvshmem[xi]?_\w+)", ptx)))
    return {"counted": True, "needs": needs_nvshmem(kernel), "calls": called, **resources(ptx, arch)}


def compile_all_to_all(arch: int) -> dict[str, object]:
    """All-to-all between nodes. Those inside a node have the kernels of all-gathers."""
    kernel = to_all_puts.all_to_all_puts
    ptx = compile_for(kernel, arch, {}, tuples()).asm["ptx"]
    called = sorted(set(re.findall(r"\b(nvshmem[xi]?_\w+)", ptx)))
    return {"arch": arch, "needs": needs_nvshmem(kernel), "calls": called, **resources(ptx, arch)}


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
    (
        scatter_loop.reduce_scatter_loop,
        {**_FLOATS, **_TILES, "DTYPE": tl.bfloat16, "OP": SUM, "COUNT": 2048},
        (90, 100),
    ),
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
        "world": WORLD,
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
_STAGED = {"ZERO_COPY": False}
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
    (reduce_direct.all_reduce_direct, {**_BF16, "ZERO_COPY": True, "COUNT": 2048, "WAITED": 4}, 4, (90, 100)),
    (reduce_direct.all_reduce_direct, {**_FP8, **_STAGED, "OP": MEAN, "COUNT": 1024, "WAITED": 8}, 8, (90, 100)),
    (reduce_loop.all_reduce_loop, {**_BF16, **_STAGED, "COUNT": 2048, "WAITED": 4}, 4, (90, 100)),
    (reduce_loop.all_reduce_loop, {**_BF16, "ZERO_COPY": True, "COUNT": 2048, "WAITED": 8}, 8, (90,)),
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
        "out_deltas": "*i64",
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


_SUMMED = {**_FLOATS, "DTYPE": tl.bfloat16, "OP": SUM, "COUNT": 4096, "WHOLE": True}
COPIES = [  # kernel, constants, warps
    (copies.enter, {}, 1),
    (copies.hear, {"LOOKS": True}, 1),
    (copies.hear, {"LOOKS": False}, 1),
    (copies.look, {}, 1),
    (copies.sum_copies, _SUMMED, 16),
]


def compile_copies(kernel, arch: int, constants: dict[str, object], warps: int) -> dict[str, object]:
    constants = {k: v.value if isinstance(v, tl.constexpr) else v for k, v in {**_TILES, **constants}.items()}
    ptx = compile_for(kernel, arch, constants, tuples() | {"stamp": "*i64"}, num_warps=warps).asm["ptx"]
    return {
        "kernel": kernel.__name__,
        "arch": arch,
        "needs": needs_nvshmem(kernel),
        "globaltimer": ptx.count("%globaltimer"),
        "release_sys": ptx.count("st.release.sys"),
        "wide_loads": len(re.findall(r"ld\.global\S*\.v[248]", ptx)),
        **resources(ptx, arch),
    }


_NORMS = {
    "one_shot": fused.norm_rows_one_shot,
    "two_stage": fused.norm_rows_two_stage,
    "composed": fused.norm_rows,
}
_EIGHT = {"SCALE": PER_ROW, "WEIGHT": tl.float32}
SHARED = 264
"""Thread blocks of a context that shares a GPU: two on each multiprocessor of an H200."""
FUSED = [  # rows, hidden, ranks, architectures, other facts and constants; bf16, cut as the policy says
    *((rows, hidden, world, (90, 100), {}) for rows in (1, 64, 512) for hidden in (4096, 8192) for world in (2, 4)),
    (1, 8192, 8, (90,), {}),
    (64, 16384, 4, (90,), {}),
    (8, 8192, 4, (90, 100), _EIGHT),
    (512, 8192, 4, (90,), _EIGHT),
    (1 << 14, 8192, 4, (90, 100), {}),
    (1024, 8192, 8, (90,), {}),  # the most words of a thread and the most ranks, by two stages and by one
    (256, 8192, 8, (90,), {"max_programs": SHARED}),
    (64, 8192, 2, (90,), {"max_programs": SHARED}),
]


def compile_fused(rows: int, hidden: int, world: int, arch: int, more: dict[str, Any]) -> dict[str, object]:
    topology = Topology.of(0, range(world), [0] * world)
    given = {"max_programs": more["max_programs"]} if "max_programs" in more else {}
    facts = Facts(0, topology, stores=True, lamport_bytes=1 << 26, **given)
    plan = choose(Rows(rows, hidden, 2), facts)
    kernel, pieces = _NORMS[plan.algorithm], plan.channels
    constants = {"HIDDEN": hidden, "DTYPE": tl.bfloat16, "WEIGHT": tl.bfloat16, "SCALE": NONE, "PIECES": pieces}
    constants |= {"ROOM": triton.next_power_of_2(pieces), "BLOCK": plan.chunk // 16, **more}
    constants = {name: getattr(value, "value", value) for name, value in constants.items() if name not in given}
    types = {"g": tuples()["g"]._replace(world=world), "inbox": Lamport("i64", "i64", "*i64", "*i64")}
    compiled = compile_for(kernel, arch, constants, types, num_warps=plan.num_warps, maxnreg=REGISTERS)
    ptx = compiled.asm["ptx"]
    return {
        "kernel": kernel.__name__,
        "arch": arch,
        "rows": rows,
        "hidden": hidden,
        "world": world,
        "pieces": pieces,
        "warps": plan.num_warps,
        "shared": bool(given),
        "words": plan.chunk // 16 // min(plan.chunk // 16, 32 * plan.num_warps),  # of a thread
        "needs": needs_nvshmem(kernel),
        "waits": ptx.count("%globaltimer"),
        "contracted": len(re.findall(r"fma\.rn\.f", ptx)),
        **resources(ptx, arch),
    }


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


def collectives() -> dict[str, object]:
    """The kernels of dense collectives."""
    gathers, ll = [], [compile_ll(90, 1024, False)]
    for arch in (90, 100):
        ll += [compile_ll(arch, 128, over) for over in (False, True)]
        for kernel in (kernels_puts.all_gather_1d, kernels_puts.all_gather_2d):
            gathers += [compile_all_gather(kernel, arch, place) for place in (False, True) if arch == 90 or not place]
    scatters = (
        _SCATTER_DIRECT,
        scatter_loop.reduce_scatter_loop,
        _SCATTER_PULL,
        _SCATTER_PUTS,
        scatter_words.reduce_scatter_words,
    )
    reduces = (_ONE, _TWO, reduce_loop.all_reduce_loop, *(kernel for kernel, *_ in ALL_REDUCE[-2:]))
    reduces += (reduce_direct.all_reduce_direct,)
    stores = (kernels_direct.exchange_direct, kernels_loop.exchange_loop, kernels_ring.all_gather_ring)
    return {
        "all_gather": gathers,
        "ll": ll,
        "direct": [compile_direct(k, arch, place) for k in stores for arch in (90, 100) for place in (False, True)],
        "exchange": [compile_exchange(90)],
        "all_to_all": [compile_all_to_all(arch) for arch in (90, 100)],
        "reduce_scatter_forms": {kernel.__name__: compiled_forms(kernel) for kernel in scatters},
        "reduce_scatter": [compile_reduce_scatter(k, arch, c) for k, c, archs in REDUCE_SCATTER for arch in archs],
        "all_reduce_forms": {kernel.__name__: compiled_forms(kernel) for kernel in reduces},
        "all_reduce": [compile_all_reduce(k, arch, c, n) for k, c, n, archs in ALL_REDUCE for arch in archs],
        "copies": [compile_copies(kernel, arch, c, n) for kernel, c, n in COPIES for arch in (90, 100)],
        "order": list(ORDER),
    }


def others() -> dict[str, object]:
    """All others, and kernels in which something is missing."""
    return {
        "index_match": [
            compile_index_match(arch, name, constants) for arch in (90, 100) for name, constants in INDEX_MATCH.items()
        ],
        "sparse": [compile_sparse(name, arch, c, rows) for name, c, rows, archs in SPARSE for arch in archs],
        "language": compile_language_checks(90),
        "signals": [compile_signals(90, name, direct) for name in SIGNALS for direct in (False, True)],
        "fused_forms": {kernel.__name__: compiled_forms(kernel) for kernel in _NORMS.values()},
        "fused": [compile_fused(*about, arch, more) for *about, archs, more in FUSED for arch in archs],
        "library": compile_with_all_of_nvshmem(),
        "order": list(ORDER),
        "refusals": refusals(),
        "mutants": compile_mutants(),
    }


PARTS = {"collectives": collectives, "others": others}

if __name__ == "__main__":
    json.dump(PARTS[sys.argv[1]](), sys.stdout)
