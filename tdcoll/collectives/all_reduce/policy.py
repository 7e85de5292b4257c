# SPDX-License-Identifier: Apache-2.0
"""The default heuristic for all-reduces if nothing was measured, and chunks: pure, see
:mod:`tdcoll.calls.plan`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from tdcoll.calls.plan import (
    CHUNK_ALIGNMENT,
    Facts,
    Plan,
    cut_chunks,
    cut_copies,
    cut_loop,
    needs_puts,
    needs_rails,
    needs_stores,
    prefers_loops,
    shares_gpu,
)
from tdcoll.calls.tuning import Entry
from tdcoll.calls.words import Payload, Words

if TYPE_CHECKING:
    from tdcoll.runtime.topology import Topology

_ONE_SHOT_BYTES = 1536 << 10
"""The most bytes that one-shot takes."""

_MANY_BLOCKS = 45
"""With a budget of fewer thread blocks, loops take one-shot's calls from ``LOOPS_FROM`` bytes: on 2
H100s, 45 take 10.9 us for 1 MB in one shot and 11.4 by loops, and 30 take 13.0 and 12.4."""

_SPARED_BYTES = 320 << 10
"""Bytes that cost as much as a second hop: one-shot is taken if it sends at most so many more than
two-shot. With 2 ranks both send as many, and one hop less still pays off at 1 MB; with 4 ranks it
does up to about 200 KB. Measured on H200s. The limit is 213 KB of data with 4 ranks, and 60 KB with
8."""

_LEAST_EPOCH = 4 << 20
"""If epochs have at least so many bytes, several epochs of two-shot are taken instead of stores. On
2 H200s two-shot takes 14.5 us for 4 MB and 49.6 us for 16 MB; stores take 211 us for 64 MB and 809
us for 256 MB."""

_DIRECT_CHUNK = 16 << 10
"""Bytes of a chunk by stores, if the context has signals for so many chunks. A chunk twice as large
takes twice as long, because one thread block sums a chunk, tile by tile, and waits for each tile's
loads. With larger chunks 4 MB took 22 us on 2 H200s, twice what the links need."""


def part_bytes(nbytes: int, parts: int) -> int:
    """Return the bytes of a part if the data is cut into so many, and these into chunks: a multiple
    of 16."""
    return max(1, -(-nbytes // (16 * parts))) * 16


ONE_SHOT = Words("one_shot", 1)
TWO_SHOT = Words("two_shot", 2)


def one_shot_bytes(world: int) -> int:
    """Return the most bytes that are one-shot by default, if the context has the memory."""
    more = (world - 1) * (world - 2)
    return min(_ONE_SHOT_BYTES, _SPARED_BYTES * world // more) if more else _ONE_SHOT_BYTES


def payload_of_parts(facts: Facts, algorithm: str) -> Payload:
    """Return the data that is cut into chunks: a part, whose chunks have a signal in each of two
    steps."""
    return Payload(part_bytes(facts.nbytes, parts(facts.topology, algorithm)), signals=2)


def cut_parts(facts: Facts, entry: Entry, algorithm: str) -> Plan:
    """Cut a part into chunks."""
    whole = payload_of_parts(facts, algorithm)
    if algorithm == "loop":
        return cut_loop(facts, entry, whole.nbytes, whole.signals)
    chunks = facts.chunks // whole.signals
    part = dataclasses.replace(facts, nbytes=whole.nbytes, chunks=chunks)
    if algorithm == "ce":
        return cut_copies(part, entry, sums=True)
    if (
        algorithm == "direct"
        and entry.chunks is entry.chunk is None
        and whole.nbytes >= _DIRECT_CHUNK
    ):
        chunk = max(_DIRECT_CHUNK, -(-whole.nbytes // chunks // CHUNK_ALIGNMENT) * CHUNK_ALIGNMENT)
        entry = dataclasses.replace(entry, chunk=chunk, num_warps=entry.num_warps or 16)
    return cut_chunks(part, entry, algorithm)


def pieces(facts: Facts, algorithm: str) -> int:
    """Return the number of pieces of a segment of the inbox. The first is for data before the sum,
    the last for sums."""
    if algorithm == "2d":  # a node's sum travels in the accumulator's type
        return 1 + max(1, 4 // facts.itemsize)
    if needs_stores(facts) is not None:  # an outbox between the two, if a rank has to put
        return 3
    return 1 if algorithm in ("direct", "loop", "ce") and facts.symmetric_result else 2


def piece_bytes(facts: Facts, algorithm: str) -> int:
    """Return the bytes of a piece."""
    return facts.capacity // (16 * pieces(facts, algorithm)) * 16


def epoch_of_parts(facts: Facts, algorithm: str) -> int:
    """Return the bytes of each epoch of a call that copies its parts through the inbox."""
    return parts(facts.topology, algorithm) * piece_bytes(facts, algorithm)


def parts(topology: Topology, algorithm: str) -> int:
    """Return the number of parts of the data: one for each rank, or for each place on a node."""
    return topology.ranks_per_node or 1 if algorithm == "2d" else topology.world_size


def default(facts: Facts) -> str:
    """Return the algorithm that is taken if no table has an entry.

    - Lamport or LL if the context has memory for them (not in the simulator, because they cost much
      more there): one-shot for few bytes, otherwise two-shot, also in several large epochs.
    - Otherwise stores in one node, by loops if the context has a budget; rails if nodes have one
      size, or else puts.
    """
    one, two = (words.supports(facts) is None for words in (ONE_SHOT, TWO_SHOT))
    loops = prefers_loops(facts, 2 * part_bytes(facts.nbytes, facts.topology.world_size))
    if not facts.simulated:
        fits = one and facts.nbytes <= one_shot_bytes(facts.topology.world_size)
        if fits and not (loops and facts.max_blocks < _MANY_BLOCKS):
            return "one_shot"
        epoch = TWO_SHOT.epoch(facts) if two else 0
        several = epoch >= _LEAST_EPOCH and not facts.symmetric_result  # where stores are zero-copy
        if two and not loops and (epoch == facts.nbytes or several):
            return "two_shot"
    for name, needs in (
        ("loop" if shares_gpu(facts) else "direct", needs_stores),
        ("2d", needs_rails),
        ("1d", needs_puts),
        ("one_shot", ONE_SHOT.supports),
        ("two_shot", TWO_SHOT.supports),
    ):
        if needs(facts) is None:
            return name
    return "1d"  # which then raises the reason
