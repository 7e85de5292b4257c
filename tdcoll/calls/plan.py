# SPDX-License-Identifier: Apache-2.0
"""How a call is cut: pure functions of facts that are the same on every rank.

Two ranks that choose differently wait for signals that no rank sends. A choice may therefore look
at :class:`Facts`, at the requested algorithm and at the sections of a tuning table, which the ranks
have compared, and at nothing else: not at the rank, the clock, the device or an environment
variable, nor at whether this rank captures a CUDA graph.

:mod:`.spec` chooses between the algorithms of a collective. Here are preconditions (``needs_*``),
and ways to cut segments into chunks (``cut_*``). :mod:`.words` cuts them into words.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from tdcoll.base.limits import MAX_BLOCKS, MAX_CHUNKS, SHARED_WARPS
from tdcoll.calls.tuning import WARPS, Entry

if TYPE_CHECKING:
    from tdcoll.runtime.topology import Topology

CHUNK_ALIGNMENT = 128
"""Bytes. Chunks start at multiples of it, so that full 128-byte lines travel."""

TARGET_CHUNK_BYTES = 8 << 10
"""A copy of so many bytes is short beside the hop; chunks of large messages are larger."""

USUAL_CHUNKS = 64, 32
"""Chunks are made larger before there are more of them than this, in one node and between nodes."""

LARGE_CHUNKS = 8, 32
"""Times :data:`TARGET_CHUNK_BYTES`, likewise: no larger while there are signals for more chunks, so
that a large message is used, or forwarded, while it arrives. A put between nodes costs more than
one inside."""

MANY_WARPS_FROM = 128 << 10
"""Bytes. Larger chunks are moved by 16 warps, smaller ones by 8, if the message is not
:data:`LARGE`."""

LARGE = 8 << 20
"""Bytes per rank. Messages from here on are moved by 16 warps."""

MOST_EPOCHS = 1024
"""The most epochs of a call. One that needs more has a context that is far too small for it."""

LOOP_BLOCKS = (32, 64)
LOOP_BYTES = 128 << 10
"""Thread blocks that loop over chunks, at least and at most, and bytes for each between the two,
if nothing else is measured: so many reach 90 percent of the speed that more of them have on 2
H100s."""

LOOPS_FROM = 256 << 10
"""Bytes of a rank's data from which a context with a budget of thread blocks takes loops rather
than words or chunks with a thread block each: on 2 H100s with 30 thread blocks, an all-gather of
256 KB takes 5.8 us by loops and 7.6 by direct stores, and an all-reduce of 16 MB takes 68 us by
loops and 240 by words."""

LOOPED_BYTES = 8 << 10
"""Bytes for each thread block from which a small budget takes loops, if that is less than
:data:`LOOPS_FROM`."""

SUMMING_BLOCKS = 32
"""Thread blocks that sum what copy engines have brought, at most."""

SUMMED_BYTES = 16 << 10
"""Bytes that such a thread block sums, at least."""


@dataclass(frozen=True)
class Plan:
    """How one call is launched: each segment in ``chunks`` chunks of ``chunk`` bytes, of which the
    last may be shorter.

    Attributes:
        algorithm: one of its operation's, not ``"auto"``.
        num_warps: warps of each thread block.
        blocks: thread blocks; only they may differ between ranks, on nodes of different sizes. 0:
            the algorithm's own.
    """

    algorithm: str
    chunks: int
    chunk: int
    num_warps: int
    blocks: int = 0


class Landing(Enum):
    """Where the data that peers send lands; the same on all ranks."""

    INBOX = "inbox"
    """In the context's memory, from which the kernel takes it. It works for any tensors."""

    CALLER_BUFFER = "caller's buffer"
    """In symmetric memory of the caller's that has a segment for each rank: the tensor of a call in
    place, such as :func:`tdcoll.all_gather_`, or ``out`` with ``symmetric=True``. Passing
    ``out=tensor`` doesn't make a call land there, because one rank may do so and another not."""

    PEER_RESULT = "peers' results"
    """In the inbox until it is reduced. Then sums, or segments by copy engines, go straight to
    ``out`` of all ranks, which is symmetric memory."""


@dataclass(frozen=True)
class Facts:
    """The facts on which a choice may depend.

    They are the same on every rank of the group, except the rank in ``topology``.

    Attributes:
        nbytes: Bytes of one segment, which is what one rank sends to another.
        capacity, ll_bytes, stores, lamport_bytes, chunks, max_blocks: Of the
            :class:`~tdcoll.CollectiveContext`. ``lamport_bytes`` is also 0 if the dtype has values
            that look like an empty Lamport word.
        puts: Whether the job has NVSHMEM's puts.
        itemsize: Bytes of an element; 1 where bytes are moved as they are.
        landing: Where peers' data lands.
        simulated: Whether the kernels run in the simulator, where block operations cost the same
            for any size.
    """

    nbytes: int
    topology: Topology
    capacity: int = 1 << 62
    ll_bytes: int = -1
    stores: bool = False
    puts: bool = True
    lamport_bytes: int = 0
    chunks: int = MAX_CHUNKS
    max_blocks: int = MAX_BLOCKS
    itemsize: int = 1
    landing: Landing = Landing.INBOX
    simulated: bool = False

    @property
    def in_place(self) -> bool:
        """Whether peers write to a buffer of the caller's that has a segment for each rank."""
        return self.landing is Landing.CALLER_BUFFER

    @property
    def symmetric_result(self) -> bool:
        """Whether results go straight to symmetric memory of all ranks' callers."""
        return self.landing is Landing.PEER_RESULT

    @staticmethod
    def of(ctx: Any, nbytes: int, dtype: Any = None, landing: Landing = Landing.INBOX) -> Facts:
        """Return the facts of a call on a context, of ``nbytes`` per segment.

        Args:
            ctx: A context, or a :class:`~tdcoll.calls.implicit.PlannedContext`.
            dtype: Of the elements, if they are reduced; else None.
        """
        # A Lamport word of these dtypes can be told from an empty one.
        has_sentinel = dtype is not None and dtype.is_floating_point and dtype.itemsize <= 4
        return Facts(
            nbytes,
            ctx.topology,
            capacity=ctx.capacity,
            ll_bytes=ctx.ll_bytes,
            stores=ctx.stores,
            puts=ctx.job.heap.puts,
            lamport_bytes=ctx.lamport_bytes if has_sentinel else 0,
            chunks=ctx.chunks,
            max_blocks=ctx.max_blocks,
            itemsize=1 if dtype is None else dtype.itemsize,
            landing=landing,
            simulated=ctx.job.simulated,
        )


# ---------------------------------------------------------------------- preconditions


def shares_gpu(facts: Facts) -> bool:
    """Return whether launches of other contexts need room on the GPU, so that few thread blocks
    have to do."""
    return facts.max_blocks != MAX_BLOCKS


def needs_stores(facts: Facts) -> str | None:
    """Return why a call cannot use stores alone, or None if it can."""
    if facts.topology.n_nodes > 1 or not facts.stores:
        return "needs one node whose ranks can store to each other's memory; got "
    return None


def needs_puts(facts: Facts) -> str | None:
    """Return why a call cannot use puts, or None if it can."""
    return (
        None
        if facts.puts
        else "needs NVSHMEM's puts, which memory of PyTorch's does not have; got "
    )


def needs_rails(facts: Facts) -> str | None:
    """Return why a call cannot use rails, or None if it can."""
    topology = facts.topology
    if topology.n_nodes < 2 or (topology.ranks_per_node or 1) < 2 or not facts.stores:
        return (
            "needs several nodes of the same number of ranks, which can store to each other; got "
        )
    return needs_puts(facts)


def half(capacity: int) -> int:
    """Return the bytes of the inbox, and of the outbox, of a segment where a rank has to put from
    the context."""
    return capacity // 32 * 16


def inbox_epoch(facts: Facts) -> int:
    """Return the bytes of a segment in each epoch of a call whose segments land in the inbox, and
    leave from the outbox where a rank has to put."""
    room = facts.capacity if needs_stores(facts) is None else half(facts.capacity)
    return room // 128 * 128 or room // 16 * 16


def per_segment(facts: Facts, plan: Plan) -> int:
    """Thread blocks of an algorithm that has one for each chunk of each rank's segment."""
    return plan.chunks * facts.topology.world_size


def most_chunks(facts: Facts) -> int:
    """Most chunks of a segment: each has up to ``2 * world + 1`` thread blocks, all with a share of
    one epoch."""
    return max(1, min(facts.chunks, (facts.max_blocks - 1) // (2 * facts.topology.world_size + 1)))


def warps(nbytes: int, chunk: int) -> int:
    """Warps that move chunks of so many bytes."""
    return 16 if nbytes >= LARGE or chunk >= MANY_WARPS_FROM else 8


def most_warps(facts: Facts) -> int:
    """Return how many warps a program may have: fewer where launches of other contexts need room on
    the GPU."""
    return SHARED_WARPS if shares_gpu(facts) else max(WARPS)


def cut_chunks(facts: Facts, entry: Entry, algorithm: str, large: bool = False) -> Plan:
    """Chunks with a signal each.

    Args:
        large: chunks may be as large as they get, since nothing is done with one before all are
            there.
    """
    several = facts.topology.n_nodes > 1
    usual = max(TARGET_CHUNK_BYTES, -(-facts.nbytes // USUAL_CHUNKS[several]))
    if not large:
        usual = min(usual, LARGE_CHUNKS[several] * TARGET_CHUNK_BYTES)
    wanted = entry.chunks or -(-facts.nbytes // (entry.chunk or usual))
    chunks = min(most_chunks(facts), max(1, wanted))
    chunk = -(-facts.nbytes // chunks)
    chunk = max(1, -(-chunk // CHUNK_ALIGNMENT)) * CHUNK_ALIGNMENT
    chunks = max(1, -(-facts.nbytes // chunk))
    num_warps = min(entry.num_warps or warps(facts.nbytes, chunk), most_warps(facts))
    return Plan(algorithm, chunks, chunk, num_warps)


def cut_copies(facts: Facts, entry: Entry, sums: bool = False) -> Plan:
    """One copy of a segment, because copy engines are faster the more they move at once; thread
    blocks only sum."""
    whole = facts.nbytes
    chunks = min(
        most_chunks(facts), entry.chunks or -(-whole // (entry.chunk or max(1, whole))) or 1
    )
    chunk = max(1, -(-whole // (chunks * CHUNK_ALIGNMENT))) * CHUNK_ALIGNMENT
    plan = Plan("ce", max(1, -(-whole // chunk)), chunk, 1, 1)
    if sums:
        num_warps = min(entry.num_warps or 16, most_warps(facts))
        blocks = min(entry.blocks or 0, facts.max_blocks - 1)
        plan = replace(plan, num_warps=num_warps, blocks=blocks or summing_blocks(facts, plan))
    return plan


def summing_blocks(facts: Facts, plan: Plan) -> int:
    """Return the thread blocks that sum what copy engines have brought, if the plan doesn't state
    them: few."""
    return max(
        1, min(SUMMING_BLOCKS, facts.max_blocks - 1, plan.chunks * plan.chunk // SUMMED_BYTES)
    )


def cut_loop(facts: Facts, entry: Entry, whole: int, signals: int = 1) -> Plan:
    """One chunk for each thread block, if nothing else is measured: on 2 H100s with 8 to 64 thread
    blocks, more and smaller chunks were slower, because a barrier and a release follow each."""
    least, most = LOOP_BLOCKS
    wanted = entry.blocks or max(least, min(most, whole // LOOP_BYTES))
    blocks = min(wanted, facts.max_blocks - 1)
    usual = max(TARGET_CHUNK_BYTES, -(-whole // blocks))
    wanted = entry.chunks or -(-whole // (entry.chunk or usual))
    chunks = min(facts.chunks // signals, max(1, wanted))
    chunk = max(1, -(-whole // (chunks * CHUNK_ALIGNMENT))) * CHUNK_ALIGNMENT
    chunks = max(1, -(-whole // chunk))
    num_warps = min(entry.num_warps or warps(facts.nbytes, chunk), most_warps(facts))
    return Plan("loop", chunks, chunk, num_warps, min(chunks, blocks))


def loop_blocks(facts: Facts, plan: Plan) -> int:
    """Return the thread blocks of a plan whose thread blocks loop over chunks, if it doesn't state
    them."""
    return min(plan.chunks, LOOP_BLOCKS[1], facts.max_blocks - 1)


def prefers_loops(facts: Facts, nbytes: int) -> bool:
    """Return whether a call takes loops before words, see :data:`LOOPS_FROM`. Not with larger
    budgets than they use.

    Args:
        nbytes: of a rank's data; of twice a part where ranks exchange parts, as in the measurements
            of 2 ranks.
    """
    least = min(LOOPS_FROM, LOOPED_BYTES * facts.max_blocks)
    return facts.max_blocks <= LOOP_BLOCKS[1] and nbytes >= least and needs_stores(facts) is None


def node_default(facts: Facts, nbytes: int, words: Callable[[Facts], str | None]) -> str | None:
    """Return the algorithm that is taken inside a node if nothing was measured; None without stores
    inside one node.

    Words if they are supported, but for what loops are better at; otherwise loops if the context
    has a budget of thread blocks, and else chunks with a thread block each. In the simulator never
    words, which take some 20 ms per program.

    Args:
        nbytes: as for :func:`prefers_loops`.
        words: why a call cannot use ``ll``, or None.
    """
    if not facts.simulated and not prefers_loops(facts, nbytes) and words(facts) is None:
        return "ll"
    if needs_stores(facts) is not None:
        return None
    return "loop" if shares_gpu(facts) else "direct"
