# SPDX-License-Identifier: Apache-2.0
"""What policies, contexts, tables and kernels share: numbers, and the names of the dense collectives."""

__all__ = ["CHANNELS", "COLLECTIVES", "MAX_PROGRAMS", "SHARED_WARPS", "flagged_bytes", "lamport_bytes"]

COLLECTIVES = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all")
"""The dense collectives: each is a folder of :mod:`tdcoll.collectives` with a ``spec``."""

CHANNELS = 512
"""Most chunks that one rank's data is cut into, if a context is not made for fewer; each has its own signal."""

MAX_PROGRAMS = 1 << 20
"""Programs of one launch on a context, at most: each adds its share, at least 1, of so many to the control word."""

SHARED_WARPS = 8
"""The most warps of a program on a context whose launches have a limit of programs, because they share the GPU with
others. A multiprocessor always has room for two such programs, whose threads have at most 128 registers."""

_SENT_BYTES = 1 << 20
_BYTES_BETWEEN_NODES = 16 << 10
_ANNOUNCED_BYTES = 32 << 20


def flagged_bytes(world_size: int, n_nodes: int) -> int:
    """Bytes of one rank for which a context has flagged words, if it is not told otherwise.

    Flagged words send a third more and save crossings. In one node, a rank sends 1 MiB in them to all others together;
    in a group on several nodes each rank's data has 16 KiB, whatever the number of ranks.
    """
    return _BYTES_BETWEEN_NODES if n_nodes > 1 else _SENT_BYTES // max(1, world_size - 1)


def lamport_bytes(world_size: int, n_nodes: int) -> int:
    """Bytes of one rank for which a context has words that announce themselves, if it is not told otherwise.

    They are for ranks of one node. An all-reduce of 16 MiB goes by such words in two stages. They take three times
    32 MiB of the symmetric heap, whatever the number of ranks.
    """
    return 0 if n_nodes > 1 else _ANNOUNCED_BYTES // world_size
