# SPDX-License-Identifier: Apache-2.0
"""Which all-gather to launch, and how: pure functions of facts that are the same on every rank.

Two ranks that choose differently wait for signals that nobody sends. So nothing here may look at the rank, the clock,
the device or an environment variable: only at the operation's size, the topology's shape, the caller's wish and the
entries of a tuning table, which the ranks have compared (:mod:`.tuning`). What no entry decides, the rules here do.
"""

from __future__ import annotations

from dataclasses import dataclass

from tdcoll.limits import CHANNELS, MAX_PROGRAMS
from tdcoll.runtime.topology import Topology

__all__ = [
    "ALGORITHMS",
    "HANDED_OVER",
    "LL_MOST_WORDS",
    "LL_WORD_BYTES",
    "Entry",
    "Plan",
    "choose",
    "is_ll_chunk",
    "put_chunks",
]

ALGORITHMS = ("auto", "ll", "direct", "ring", "1d", "2d")

HANDED_OVER = "nccl"
"""In a tuning table and a plan: leave this call to torch.distributed."""

CHUNK_ALIGNMENT = 128
"""Bytes. Chunks start at multiples of it, so that full 128-byte lines travel."""

TARGET_CHUNK_BYTES = 8 << 10
"""Chunks of about this size keep one block's copy short beside the crossing; those of large messages are larger."""

USUAL_CHANNELS = 64, 32
"""Chunks are made larger before there are more of them than this, in one node and between nodes."""

LARGE_CHUNKS = 8, 32
"""Times :data:`TARGET_CHUNK_BYTES`, likewise: no larger while there are signals for more chunks, so that a large
message is copied out, or forwarded, while it arrives. A put between nodes costs more than one inside. In place in one
node nothing is copied out, and chunks may be as large as they get, but not on a ring, which forwards them."""

MANY_WARPS_FROM = 128 << 10
"""Bytes. Larger chunks are copied by 16 warps, smaller ones by 8, if the message is not :data:`LARGE`."""

LARGE = 8 << 20
"""Bytes per rank. Messages from here on are copied by 16 warps, and out of place put rather than stored in a node."""

LL_BLOCK = 128
"""128-bit words that one LL program moves: one for each thread of 4 warps."""

LL_MOST_WORDS = 1024
"""The same, at most: each word of a thread is a loop of its own in the code."""

LL_WORD_BYTES = 12
"""Data of such a word; the rest is its flag."""

LL_RESULT_BYTES = 512 << 10
"""Of all ranks together. Over several nodes LL is taken up to here: beyond, what comes from other nodes and is passed
on with its flags costs more than the crossings that it saves against 2D. By the model of ``bench --project``; not
measured. (Against 1D, which puts to more ranks, few bytes are worth it if a put costs its rank more than 0.03 us.)"""


_LL_CHUNKS = f"{LL_WORD_BYTES} times a power of two, at most {LL_WORD_BYTES * LL_MOST_WORDS},"


@dataclass(frozen=True)
class Plan:
    """How one all-gather is launched.

    Attributes:
        algorithm: ``"ll"``, ``"direct"``, ``"ring"``, ``"1d"`` or ``"2d"``; ``"nccl"``: torch.distributed does it.
        channels: chunks that each segment is cut into.
        chunk: bytes of a chunk; the last may be shorter.
        num_warps: warps of each program.
    """

    algorithm: str
    channels: int
    chunk: int
    num_warps: int


@dataclass(frozen=True)
class Entry:
    """What a tuning table says of calls of one kind up to one size; None is left to the rules.

    Attributes:
        ranks_per_node, nodes: the group that it was measured on.
        launch: ``"graph"``, captured in a CUDA graph, or ``"eager"``.
        in_place: whether the call is.
        up_to: the most bytes per rank that it holds for; None: any number.
        algorithm: as in :class:`Plan`.
        channels, chunk: chunks of a segment, or bytes of one; at most one of the two.
        num_warps: warps of each program.
    """

    ranks_per_node: int
    nodes: int
    launch: str
    in_place: bool
    up_to: int | None
    algorithm: str
    channels: int | None = None
    chunk: int | None = None
    num_warps: int | None = None


_BY_THE_RULES = Entry(0, 0, "", False, None, "")


def _entry(nbytes: int, topology: Topology, entries: tuple[Entry, ...], graph: bool, in_place: bool) -> Entry | None:
    """The first entry that holds for such a call."""
    kind = (topology.ranks_per_node, topology.n_nodes, "graph" if graph else "eager", in_place)
    for entry in entries:
        if (entry.ranks_per_node, entry.nodes, entry.launch, entry.in_place) == kind:
            if entry.up_to is None or nbytes <= entry.up_to:
                return entry
    return None


def _refusal(nbytes: int, topology: Topology, algorithm: str, ll_bytes: int, direct: bool) -> str | None:
    """Why the algorithm cannot be had for such a call."""
    if algorithm == "2d" and topology.ranks_per_node is None:
        return (
            "algorithm='2d' needs the same number of ranks on every node; this group has "
            f"{topology.describe()}. Use algorithm='1d' or 'auto'."
        )
    if algorithm == "ll" and (topology.ranks_per_node is None or nbytes > ll_bytes):
        limit = f"at most {ll_bytes} bytes per rank"
        if ll_bytes < 0:
            limit = "ranks that can store to each other's memory inside each node"
        return (
            f"algorithm='ll' needs the same number of ranks on every node and {limit}; got {nbytes} bytes on "
            f"{topology.describe()}. Use '1d' or 'auto'."
        )
    if algorithm in ("direct", "ring") and (topology.n_nodes > 1 or not direct):
        return (
            f"algorithm={algorithm!r} needs one node whose ranks can store to each other's memory; got "
            f"{topology.describe()}. Use '1d' or 'auto'."
        )
    return None


def _by_rules(nbytes: int, topology: Topology, ll_bytes: int, direct: bool, in_place: bool, simulated: bool) -> str:
    """The algorithm that is taken where no table says anything."""
    one_node, per_node = topology.n_nodes == 1, topology.ranks_per_node
    in_two = not one_node and per_node is not None and per_node > 1
    few = one_node or (in_two and nbytes * topology.world_size <= LL_RESULT_BYTES)
    # The interpreter makes about a hundred block operations, some 20 ms, for every program of LL, and one copy for a
    # chunk of the others.
    if nbytes <= ll_bytes and few and not simulated:
        return "ll"
    if one_node and direct and (in_place or nbytes < LARGE):
        return "direct"
    return "2d" if in_two else "1d"


def _most_channels(topology: Topology, channels: int) -> int:
    """Chunks of one segment, at most: a launch has up to ``2 * world + 1`` programs for each, and all of its programs
    must have a share of one epoch."""
    return max(1, min(channels, (MAX_PROGRAMS - 1) // (2 * topology.world_size + 1)))


def is_ll_chunk(nbytes: int) -> bool:
    """Whether one LL program can carry so many bytes: a power of two of words, at most :data:`LL_MOST_WORDS`."""
    words, rest = divmod(nbytes, LL_WORD_BYTES)
    return rest == 0 and 1 <= words <= LL_MOST_WORDS and words & (words - 1) == 0


def _plan_ll(nbytes: int, entry: Entry, simulated: bool) -> Plan:
    words = max(1, -(-nbytes // LL_WORD_BYTES))
    if entry.chunk is not None:
        block = entry.chunk // LL_WORD_BYTES
    elif entry.channels is not None:
        block = min(LL_MOST_WORDS, max(LL_BLOCK, 1 << (-(-words // entry.channels) - 1).bit_length()))
    else:
        block = LL_MOST_WORDS if simulated else LL_BLOCK
    warps = max(1, min(entry.num_warps or 8, block // 32))  # threads beyond its words would send them again
    return Plan("ll", -(-words // block), LL_WORD_BYTES * block, warps)


def put_chunks(nbytes: int, plan: Plan, channels: int) -> Plan:
    """How LL's puts between nodes are cut: at most ``channels`` chunks, each of whole programs' words."""
    chunk = -(-max(TARGET_CHUNK_BYTES, -(-nbytes // channels)) // plan.chunk) * plan.chunk
    return Plan("2d", max(1, -(-nbytes // chunk)), chunk, plan.num_warps)


def _plan_puts(nbytes: int, topology: Topology, algorithm: str, entry: Entry, most: int, in_place: bool) -> Plan:
    several = topology.n_nodes > 1
    usual = max(TARGET_CHUNK_BYTES, -(-nbytes // USUAL_CHANNELS[several]))
    if several or not in_place or algorithm == "ring":
        usual = min(usual, LARGE_CHUNKS[several] * TARGET_CHUNK_BYTES)
    wanted = entry.channels or -(-nbytes // (entry.chunk or usual))
    channels = min(most, max(1, wanted))
    chunk = -(-nbytes // channels)
    chunk = max(1, -(-chunk // CHUNK_ALIGNMENT)) * CHUNK_ALIGNMENT
    channels = max(1, -(-nbytes // chunk))
    many = nbytes >= LARGE or chunk >= MANY_WARPS_FROM
    return Plan(algorithm, channels, chunk, entry.num_warps or (16 if many else 8))


def _check_plan(nbytes: int, topology: Topology, plan: Plan, ll_bytes: int, direct: bool, most: int) -> None:
    """Raise unless the plan, which somebody has made by hand, can be launched."""
    if plan.algorithm not in ALGORITHMS[1:]:
        raise ValueError(f"a Plan's algorithm must be one of {', '.join(ALGORITHMS[1:])}; got {plan.algorithm!r}")
    if refusal := _refusal(nbytes, topology, plan.algorithm, ll_bytes, direct):
        raise ValueError(refusal)
    ll = plan.algorithm == "ll"
    aligned = is_ll_chunk(plan.chunk) if ll else plan.chunk % 16 == 0
    if plan.chunk < 1 or not aligned or plan.channels * plan.chunk < nbytes:
        raise ValueError(
            f"a Plan's chunks must be {_LL_CHUNKS if ll else 'a multiple of 16'} bytes and cover all {nbytes} bytes; "
            f"got {plan.channels} of {plan.chunk} bytes"
        )
    if ll:  # no more than carry something: others would wait for puts that nobody makes
        most = max(1, -(-nbytes // plan.chunk))
    if not 1 <= plan.channels <= most:
        raise ValueError(f"a Plan's channels must be 1 to {most}, got {plan.channels}")
    if ll and (plan.channels + 1) * topology.world_size >= MAX_PROGRAMS:
        raise ValueError(f"a Plan for 'll' must have chunks of more than {plan.chunk} bytes for {topology.describe()}")


def choose(
    nbytes: int,
    topology: Topology,
    algorithm: str | Plan = "auto",
    *,
    ll_bytes: int = -1,
    direct: bool = False,
    channels: int = CHANNELS,
    entries: tuple[Entry, ...] = (),
    graph: bool = False,
    in_place: bool = False,
    hand_over: bool = False,
    simulated: bool = False,
) -> Plan:
    """The plan for ``nbytes`` per rank over ``topology``; the same on all of its ranks.

    ``"auto"`` takes what the first entry for such a call says, if that can be had. Without one it takes

    - LL where it can, in one node, and over nodes of several ranks each up to :data:`LL_RESULT_BYTES`; never in the
      simulator;
    - in one node direct stores for other messages of less than :data:`LARGE` bytes, and in place for all;
    - 2D where there are several nodes of several ranks each, all of one size: a segment then crosses between nodes once
      per node pair;
    - 1D everywhere else;
    - the ring nowhere: it was not measured on more than two GPUs. An entry may say so.

    Chunks and warps are an entry's too, if it is of that algorithm.

    Args:
        nbytes: bytes per rank.
        topology: the group.
        algorithm: one of :data:`ALGORITHMS`; or a plan, which is checked and taken as it is.
        ll_bytes: the most that the context can send by LL, -1 if its ranks cannot store to each other's memory inside
            each node.
        direct: whether the ranks of a node can store to each other's memory.
        channels: the most chunks that the context has signals for.
        entries: of a tuning table, for these GPUs.
        graph: whether the call is captured in a CUDA graph.
        in_place: whether it is in place.
        hand_over: whether torch.distributed could take it.
        simulated: whether the kernels run in the simulator, where each block operation of a program costs the same,
            however large the block is: LL's programs are then the largest, and only had when asked for.

    Raises:
        ValueError: an unknown algorithm, 2D or LL over nodes of different sizes, LL beyond ``ll_bytes``, direct stores
            or the ring between nodes, a plan that cannot be launched.
    """
    most = _most_channels(topology, channels)
    if isinstance(algorithm, Plan):
        _check_plan(nbytes, topology, algorithm, ll_bytes, direct, most)
        return algorithm
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm must be one of {', '.join(ALGORITHMS)}; got {algorithm!r}")
    entry = _entry(nbytes, topology, entries, graph, in_place)
    if algorithm == "auto":
        if entry is not None and entry.algorithm == HANDED_OVER:
            if hand_over and nbytes:
                return Plan(HANDED_OVER, 0, 0, 0)
            entry = None
        if entry is not None and _refusal(nbytes, topology, entry.algorithm, ll_bytes, direct) is None:
            algorithm = entry.algorithm
        else:
            algorithm = _by_rules(nbytes, topology, ll_bytes, direct, in_place, simulated)
    elif refusal := _refusal(nbytes, topology, algorithm, ll_bytes, direct):
        raise ValueError(refusal)
    if entry is None or entry.algorithm != algorithm:
        entry = _BY_THE_RULES
    if algorithm == "ll":
        return _plan_ll(nbytes, entry, simulated)
    return _plan_puts(nbytes, topology, algorithm, entry, most, in_place)
