# SPDX-License-Identifier: Apache-2.0
"""Limits that policies, contexts, tables and kernels share, and the names of the dense collectives,
of the matmuls that communicate, and of their algorithms."""

COLLECTIVES = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all", "broadcast")
"""The dense collectives: each is a folder of :mod:`tdcoll.collectives` with a ``spec``."""

MATMULS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
"""The matmuls that communicate: functions of :mod:`tdcoll.fused`."""

ALGORITHMS = {
    "all_gather": ("ll", "direct", "loop", "ce", "ring", "1d", "2d"),
    "all_reduce": ("one_shot", "two_shot", "direct", "loop", "ce", "1d", "2d"),
    "reduce_scatter": ("ll", "direct", "loop", "ce", "1d"),
    "all_to_all": ("ll", "direct", "loop", "ce", "1d"),
    "broadcast": ("ll", "direct", "loop", "1d"),
    "all_gather_matmul": ("fused", "copied", "composed"),
    "matmul_reduce_scatter": ("fused", "composed"),
    "matmul_all_reduce": ("one_shot", "two_shot", "composed"),
}
"""The names of each operation's algorithms, for tuning tables, which are read before any collective
is imported."""

MAX_CHUNKS = 512
"""The most chunks of one rank's data, if a context is not made for another number; each has its own
signal."""

MOST_CHUNKS = 4096
"""The most chunks that a context can be made for."""

MAX_BLOCKS = 1 << 20
"""Thread blocks of one launch on a context, at most, because the control word counts up to so
many."""

SHARED_WARPS = 8
SHARED_REGISTERS = 128
"""The most warps of a thread block, and registers of a thread, if a context has a budget of
thread blocks, because it shares the GPU with others. A multiprocessor always fits two such
thread blocks."""

_SENT_BYTES = 1 << 20
_ANNOUNCED_BYTES = 32 << 20
_INBOX_BYTES = 16 << 20


def flagged_bytes(world_size: int) -> int:
    """Return the bytes of one rank that a context handles with LL, if nothing is specified.

    It is for ranks of one node. LL sends a third more and saves hops: a rank sends at most 1 MiB to
    all others.
    """
    return _SENT_BYTES // max(1, world_size - 1)


def inbox_bytes(world_size: int, heap_bytes: int) -> int:
    """Return the ``max_bytes_per_rank`` of a context, if nothing is specified.

    The inbox, with its two slots, takes at most an eighth of the symmetric heap, and at most 16 MiB
    per rank.
    """
    return min(_INBOX_BYTES, heap_bytes // (16 * world_size) // 128 * 128)


def lamport_bytes(world_size: int, n_nodes: int) -> int:
    """Return the bytes of one rank that a context handles with the Lamport protocol, if nothing is
    specified.

    It is for ranks of one node. An all-reduce of 16 MiB is two-shot. The words take 96 MiB for any
    number of ranks.
    """
    return 0 if n_nodes > 1 else _ANNOUNCED_BYTES // world_size
