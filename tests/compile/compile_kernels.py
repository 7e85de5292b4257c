# SPDX-License-Identifier: Apache-2.0
"""Compile tdcoll's kernels for GPUs that need not be here, and print what came out as JSON.

Run as ``compile_kernels.py PART ARCHITECTURE [--registers]``, without TRITON_INTERPRET: which
language a process speaks is decided at import. With ``--registers``, kernels that link NVSHMEM are
assembled as well. The sparse kernels are in ``compiling_sparse.py``; those of the language, of
tutorials and of other styles in ``compiling_language.py``.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import compiling_language as language
import triton
import triton.language as tl
from compiling import (
    ORDER,
    WORLD,
    compiled_forms,
    record,
    tuples,
)
from compiling_sparse import SPARSE, SPARSE_TYPES, compile_sparse

from benchmarks import kernels_signals
from tdcoll.base.limits import SHARED_REGISTERS
from tdcoll.calls.plan import Facts
from tdcoll.collectives.all_gather import kernels_puts, kernels_ring
from tdcoll.collectives.all_reduce import kernels_direct as reduce_direct
from tdcoll.collectives.all_reduce import kernels_loop as reduce_loop
from tdcoll.collectives.all_reduce import kernels_nodes as reduce_over_nodes
from tdcoll.collectives.all_reduce import kernels_puts as reduce_puts
from tdcoll.collectives.all_reduce import kernels_words as reduce_words
from tdcoll.collectives.all_to_all import kernels_puts as to_all_puts
from tdcoll.collectives.broadcast import kernels as broadcast
from tdcoll.collectives.exchange import kernels_direct, kernels_ll, kernels_loop
from tdcoll.collectives.reduce_scatter import kernels_direct as scatter_direct
from tdcoll.collectives.reduce_scatter import kernels_loop as scatter_loop
from tdcoll.collectives.reduce_scatter import kernels_puts as scatter_puts
from tdcoll.collectives.reduce_scatter import kernels_words as scatter_words
from tdcoll.fused import kernels as fused
from tdcoll.fused.kernels_rows import NONE, PER_ROW
from tdcoll.fused.policy import NormRows, choose
from tdcoll.fused.rms_norm import _REGISTERS as REGISTERS
from tdcoll.primitives import copies
from tdcoll.primitives.lamport import Lamport
from tdcoll.primitives.reduce import MAX, MEAN, PROD, SUM
from tdcoll.runtime.topology import Topology

_FLOATS = {"DTYPE": tl.float32, "ACC": tl.float32}
_TILES = {"WORLD_POW2": WORLD}
_ANNOUNCED = {"LAMPORT": True, "BLOCK": 256, "PERSISTENT": False}
_FLAGGED = {**_ANNOUNCED, "LAMPORT": False}
_FP8 = {"DTYPE": tl.float8e4nv, "ACC": tl.float32}
_SCATTER_DIRECT, _SCATTER_PUTS = (
    scatter_direct.reduce_scatter_direct,
    scatter_puts.reduce_scatter_puts,
)
REDUCE_SCATTER = [  # kernel, constants, architectures
    (_SCATTER_DIRECT, {**_FLOATS, **_TILES, "OP": MEAN, "TILE": 1024}, (90, 100)),
    (_SCATTER_DIRECT, {**_FLOATS, **_TILES, "DTYPE": tl.bfloat16, "OP": MAX, "TILE": 2048}, (90,)),
    (
        _SCATTER_DIRECT,
        {**_TILES, "DTYPE": tl.int64, "ACC": tl.int64, "OP": MAX, "TILE": 512},
        (90,),
    ),
    (_SCATTER_DIRECT, {**_FLOATS, **_TILES, "OP": PROD, "TILE": 1024}, (90,)),
    (
        scatter_loop.reduce_scatter_loop,
        {**_FLOATS, **_TILES, "DTYPE": tl.bfloat16, "OP": SUM, "TILE": 2048},
        (90, 100),
    ),
    (_SCATTER_PUTS, {**_FLOATS, **_TILES, "OP": SUM, "TILE": 1024}, (90, 100)),
    (_SCATTER_PUTS, {**_FLOATS, **_TILES, "DTYPE": tl.bfloat16, "OP": MEAN, "TILE": 2048}, (90,)),
    (_SCATTER_DIRECT, {**_TILES, **_FP8, "OP": SUM, "TILE": 1024}, (90, 100)),
    (scatter_words.reduce_scatter_words, {**_FLOATS, "OP": SUM, **_FLAGGED}, (90,)),
    (
        scatter_words.reduce_scatter_words,
        {"DTYPE": tl.uint8, "ACC": tl.int32, "OP": MAX, **_FLAGGED},
        (90,),
    ),
    (
        scatter_words.reduce_scatter_words,
        {**_FLOATS, "DTYPE": tl.bfloat16, "OP": MEAN, **_ANNOUNCED},
        (90, 100),
    ),
]


_ONE, _TWO = reduce_words.all_reduce_one_shot, reduce_words.all_reduce_two_shot
_BF16 = {"DTYPE": tl.bfloat16, "ACC": tl.float32, "OP": SUM}
_FP32 = {**_FLOATS, "OP": SUM}
_COPIED = {"ZERO_COPY": False}
_INT32 = {"DTYPE": tl.int32, "ACC": tl.int32, "OP": MAX}
ALL_REDUCE = [  # kernel, constants, ranks, architectures
    (_ONE, {**_FP32, **_ANNOUNCED}, 8, (90,)),
    (_ONE, {**_BF16, **_ANNOUNCED}, 2, (100,)),
    (_ONE, {**_INT32, **_FLAGGED}, 2, (90,)),
    (_ONE, {**_FP8, "OP": SUM, **_ANNOUNCED}, 8, (90, 100)),
    (_TWO, {"DTYPE": tl.int8, "ACC": tl.int32, "OP": MAX, **_FLAGGED}, 4, (90,)),
    (_TWO, {**_BF16, **_ANNOUNCED}, 4, (90, 100)),
    (_TWO, {**_INT32, **_FLAGGED}, 4, (90,)),
    (_TWO, {**_BF16, **_ANNOUNCED, "PERSISTENT": True}, 2, (90,)),
    (
        reduce_direct.all_reduce_direct,
        {**_FP32, **_COPIED, "TILE": 1024, "WORLD_POW2": 4},
        4,
        (90, 100),
    ),
    (
        reduce_direct.all_reduce_direct,
        {**_BF16, "ZERO_COPY": True, "TILE": 2048, "WORLD_POW2": 4},
        4,
        (90, 100),
    ),
    (
        reduce_direct.all_reduce_direct,
        {**_FP8, **_COPIED, "OP": MEAN, "TILE": 1024, "WORLD_POW2": 8},
        8,
        (90, 100),
    ),
    (
        reduce_loop.all_reduce_loop,
        {**_BF16, **_COPIED, "TILE": 2048, "WORLD_POW2": 4},
        4,
        (90, 100),
    ),
    (
        reduce_loop.all_reduce_loop,
        {**_BF16, "ZERO_COPY": True, "TILE": 2048, "WORLD_POW2": 8},
        8,
        (90,),
    ),
    # With few ranks, loops take the most registers.
    (reduce_loop.all_reduce_loop, {**_BF16, **_COPIED, "TILE": 8192, "WORLD_POW2": 2}, 2, (90,)),
    (
        scatter_loop.reduce_scatter_loop,
        {**_BF16, **_TILES, "TILE": 8192, "WORLD_POW2": 2},
        2,
        (90,),
    ),
    (
        reduce_puts.all_reduce_puts,
        {**_BF16, "OP": MEAN, "TILE": 2048, "WORLD_POW2": 8},
        8,
        (90, 100),
    ),
    (reduce_over_nodes.all_reduce_nodes, {**_BF16, "TILE": 2048}, 8, (90, 100)),
]


_NO_EPILOGUE = {"EPILOGUE": None, "placement": None, "extra": None}


def compile_reduction(
    kernel,
    constants: dict[str, Any],
    world: int,
    arch: int,
    more: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Compile a reduction; without an epilogue unless ``more`` has the types of its arguments."""
    if not more:
        constants = {**_NO_EPILOGUE, **constants}
    announced = bool(constants.get("LAMPORT"))
    types = tuples() | {
        "nodes": SPARSE_TYPES["nodes"],
        "g": tuples()["g"]._replace(world=world),
        "inbox": Lamport("i64", "i64", "*i64", "*i64") if announced else tuples()["words"],
        "out_deltas": "*i64",
        **(more or {}),
    }
    dtype = str(getattr(constants["DTYPE"], "value", constants["DTYPE"]))
    about = {
        "world": world,
        "announced": announced,
        "looped": bool(constants.get("PERSISTENT")),
        "dtype": dtype,
    }
    # with a budget
    looped = kernel in (reduce_loop.all_reduce_loop, scatter_loop.reduce_scatter_loop)
    return record(
        kernel, arch, constants, types, about, **({"maxnreg": SHARED_REGISTERS} if looped else {})
    )


COPIES = [  # kernel, constants, warps
    (copies.enter, {"WORLD_POW2": WORLD}, 1),
    *(
        (copies.wait_arrivals, {"WORLD_POW2": WORLD, "PULLED": pulled}, 1)
        for pulled in (False, True)
    ),
    (copies.check_peers_alive, {"WORLD_POW2": WORLD}, 1),
    *(
        (
            copies.sum_copies,
            {
                **_NO_EPILOGUE,
                **_BF16,
                "TILE": 4096,
                "WHOLE": True,
                "PULLED": pulled,
                "WORLD_POW2": WORLD,
            },
            16,
        )
        for pulled in (False, True)
    ),
]


_NORMS = {
    "one_shot": fused.norm_rows_one_shot,
    "two_shot": fused.norm_rows_two_shot,
    "composed": fused.norm_rows,
}
_EIGHT = {"SCALE": PER_ROW, "WEIGHT": tl.float32}
SHARED = 264
"""Thread blocks of a context that shares a GPU: two on each multiprocessor of an H200."""
# rows, hidden, ranks, architectures, other facts and constants; bf16, cut as the policy says
FUSED = [
    *(
        (rows, hidden, world, (90, 100), {})
        for rows in (1, 64, 512)
        for hidden in (4096, 8192)
        for world in (2, 4)
    ),
    (1, 8192, 8, (90,), {}),
    (64, 16384, 4, (90,), {}),
    (8, 8192, 4, (90, 100), _EIGHT),
    (512, 8192, 4, (90,), _EIGHT),
    (1 << 14, 8192, 4, (90, 100), {}),
    # the most words of a thread and the most ranks, two-shot and one-shot
    (1024, 8192, 8, (90,), {}),
    (256, 8192, 8, (90,), {"max_blocks": SHARED}),
    (64, 8192, 2, (90,), {"max_blocks": SHARED}),
]


def compile_fused(
    rows: int, hidden: int, world: int, arch: int, more: dict[str, Any]
) -> dict[str, object]:
    topology = Topology.of(0, range(world), [0] * world)
    given = {"max_blocks": more["max_blocks"]} if "max_blocks" in more else {}
    plan = choose(
        NormRows(rows, hidden, 2), Facts(0, topology, stores=True, lamport_bytes=1 << 26, **given)
    )
    pieces, block = plan.chunks, plan.chunk // 16
    constants = {
        "HIDDEN": hidden,
        "DTYPE": tl.bfloat16,
        "WEIGHT": tl.bfloat16,
        "SCALE": NONE,
        "PIECES": pieces,
    }
    constants |= {"ROOM": triton.next_power_of_2(pieces), "BLOCK": block, **more}
    constants = {name: value for name, value in constants.items() if name not in given}
    types = {
        "g": tuples()["g"]._replace(world=world),
        "inbox": Lamport("i64", "i64", "*i64", "*i64"),
    }
    about = {"hidden": hidden, "world": world, "pieces": pieces, "warps": plan.num_warps}
    about["words"] = block // min(block, 32 * plan.num_warps)  # of a thread
    options = {"num_warps": plan.num_warps, "maxnreg": REGISTERS}
    return record(_NORMS[plan.algorithm], arch, constants, types, about, **options)


SIGNALS = {"ping_pong": {}}
SIGNAL_TYPES = dict.fromkeys(("signals", "addresses", "counter", "monitor"), "*i64")


def compile_signals(arch: int, name: str, direct: bool) -> dict[str, object]:
    constants = {**SIGNALS[name], "DIRECT": direct}
    return record(getattr(kernels_signals, name), arch, constants, SIGNAL_TYPES, {"direct": direct})


def gathers(arch: int) -> dict[str, object]:
    """All-gathers and all-to-alls, and the exchange of lists, whose segments say how much they
    hold."""
    puts = []
    for in_place in (False, True) if arch == 90 else (False,):
        for kernel in (kernels_puts.all_gather_1d, kernels_puts.all_gather_2d):
            constants, about = {"BLOCK": WORLD, "COUNTED": in_place}, {"in_place": in_place}
            puts.append(record(kernel, arch, constants, tuples(1 if in_place else 2), about))
    direct = [
        record(kernel, arch, constants, tuples(1 if in_place else 2), {"in_place": in_place})
        for kernel, constants in (
            (kernels_direct.exchange_direct, {"COUNTED": False}),
            (kernels_loop.exchange_loop, {"ONE_SEGMENT": True, "WORDS": 4096}),
            (kernels_loop.exchange_loop, {"ONE_SEGMENT": False, "WORDS": 4096}),
            (kernels_ring.all_gather_ring, {}),
        )
        for in_place in (False, True)
    ]
    words = [(kernels_ll.exchange_ll, 128), *[(kernels_ll.exchange_ll, 1024)] * (arch == 90)]
    return {
        "all_gather": puts,
        "ll": [record(kernel, arch, {"BLOCK": block}, tuples(), {}) for kernel, block in words],
        "direct": direct,
        "exchange": [
            record(kernels_direct.exchange_direct, arch, {"COUNTED": True}, tuples(1), {})
        ],
        "all_to_all": [record(to_all_puts.all_to_all_puts, arch, {}, tuples(), {})],
        "broadcast": [
            record(broadcast.broadcast_ll, arch, {"BLOCK": 128}, tuples(), {}),
            record(broadcast.broadcast_direct, arch, {"WORLD_POW2": WORLD}, tuples(), {}),
            record(
                broadcast.broadcast_loop, arch, {"WORDS": 4096, "WORLD_POW2": WORLD}, tuples(), {}
            ),
            record(broadcast.broadcast_puts, arch, {"WORLD_POW2": WORLD}, tuples(), {}),
        ],
    }


def collectives(arch: int) -> dict[str, object]:
    """The kernels of dense collectives."""
    reductions = {kernel.__name__: kernel for kernel, *_ in (*REDUCE_SCATTER, *ALL_REDUCE)}
    return {
        **gathers(arch),
        "reduce_scatter": [
            compile_reduction(k, c, WORLD, arch) for k, c, archs in REDUCE_SCATTER if arch in archs
        ],
        "all_reduce": [
            compile_reduction(k, c, world, arch)
            for k, c, world, archs in ALL_REDUCE
            if arch in archs
        ],
        "forms": {name: compiled_forms(kernel) for name, kernel in reductions.items()},
        "copies": [
            record(
                kernel,
                arch,
                constants,
                tuples() | {"stamps": "*i64", "summed": "*i32"},
                {},
                num_warps=warps,
            )
            for kernel, constants, warps in COPIES
        ],
        "order": list(ORDER),
    }


def others(arch: int) -> dict[str, object]:
    """All others, and for one architecture those of the tests."""
    made = {
        "sparse": [
            compile_sparse(name, arch, c, rows) for name, c, rows, archs in SPARSE if arch in archs
        ],
        "words": language.compile_words(arch),
        "signals": [
            compile_signals(arch, name, direct) for name in SIGNALS for direct in (False, True)
        ],
        "fused_forms": {kernel.__name__: compiled_forms(kernel) for kernel in _NORMS.values()},
        "fused": [
            compile_fused(*about, arch, more) for *about, archs, more in FUSED if arch in archs
        ],
    }
    if arch == 90:
        made["language"] = language.compile_language_checks(arch)
    else:
        made["library"] = language.compile_with_all_of_nvshmem()
    made["order"] = list(ORDER)
    if arch == 90:
        made |= {"tutorials": language.compile_tutorials(), "compat": language.compile_compat()}
    return made


PARTS = {"collectives": collectives, "others": others}

if __name__ == "__main__":
    json.dump(PARTS[sys.argv[1]](int(sys.argv[2])), sys.stdout)
