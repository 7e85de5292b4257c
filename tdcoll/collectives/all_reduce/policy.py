# SPDX-License-Identifier: Apache-2.0
"""Which all-reduce to launch, and how: the rules of :data:`POLICY`, see :mod:`tdcoll.collectives._host.plan`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from tdcoll.collectives._host.plan import (
    CHUNK_ALIGNMENT,
    LAMPORT_WORD_BYTES,
    LL_WORD_BYTES,
    Extent,
    Facts,
    Plan,
    Policy,
    Rule,
    cut_chunks,
    cut_reduced_words,
    epoch_of_words,
    needs_puts,
    needs_reduced_words,
    needs_stores,
    reduced_words,
)
from tdcoll.tuning import Entry

if TYPE_CHECKING:
    from tdcoll.runtime.topology import Topology

__all__ = ["POLICY", "part_bytes", "parts"]

_ONE_SHOT_BYTES = 1536 << 10
"""Most of a message by one-shot."""

_SPARED_BYTES = 320 << 10
"""That a second crossing costs as much as: one-shot is taken while it sends no more than so many bytes beyond two-shot.
Both send as many with 2 ranks, and at 1 MB one crossing less still pays there; with 4 ranks it does up to about 200 KB.
Measured on H200s."""

_LEAST_EPOCH = 4 << 20
"""The least bytes of an epoch for which several epochs by two-shot are taken before stores. On 2 H200s two-shot takes
14.5 us for 4 MB and 49.6 us for 16 MB; stores take 211 us for 64 MB and 809 us for 256 MB."""

_DIRECT_CHUNK = 16 << 10
"""Bytes of a chunk by stores, while the context has signals for so many chunks. One program sums a chunk, tile by tile,
and waits for each tile's loads, so a chunk twice as large takes it twice as long. With larger chunks 4 MB took 22 us on
2 H200s, twice what the links need."""


def part_bytes(nbytes: int, parts: int) -> int:
    """Bytes of a part where the data is cut into so many, and these into chunks: a multiple of 16."""
    return max(1, -(-nbytes // (16 * parts))) * 16


def _words(name: str, shots: int) -> Rule:
    def pieces(facts: Facts) -> int:
        return 1 if shots == 1 else facts.topology.world_size

    def epoch(facts: Facts) -> int:
        return facts.nbytes if shots == 1 else epoch_of_words(facts, pieces(facts), shots)

    def first(facts: Facts) -> Facts:
        return dataclasses.replace(facts, nbytes=epoch(facts))

    def extent(facts: Facts) -> Extent:
        return reduced_words(first(facts), pieces(facts), shots)

    def admit(facts: Facts) -> str | None:
        return needs_reduced_words(first(facts), pieces(facts), shots)

    def cut(facts: Facts, entry: Entry) -> Plan:
        return cut_reduced_words(facts, entry, name, extent(facts))

    return Rule(name, admit, cut, (LAMPORT_WORD_BYTES, LL_WORD_BYTES), extent, epoch)


def _parts(name: str, admit: Callable[[Facts], str | None]) -> Rule:
    def extent(facts: Facts) -> Extent:
        topology = facts.topology
        return Extent(part_bytes(facts.nbytes, parts(topology, name)), signals=2)

    def cut(facts: Facts, entry: Entry) -> Plan:
        whole = extent(facts)
        channels = facts.channels // whole.signals
        if name == "direct" and entry.channels is entry.chunk is None and whole.nbytes >= _DIRECT_CHUNK:
            chunk = max(_DIRECT_CHUNK, -(-whole.nbytes // channels // CHUNK_ALIGNMENT) * CHUNK_ALIGNMENT)
            entry = dataclasses.replace(entry, chunk=chunk, num_warps=entry.num_warps or 16)
        return cut_chunks(dataclasses.replace(facts, nbytes=whole.nbytes, channels=channels), entry, name)

    return Rule(name, admit, cut, extent=extent)


def parts(topology: Topology, algorithm: str) -> int:
    """Into how many parts the data is cut: one for each rank, or for each place on a node."""
    return topology.ranks_per_node or 1 if algorithm == "2d" else topology.world_size


def _needs_signals(facts: Facts) -> str | None:
    if facts.channels < 2:
        return "needs a context with at least 2 channels; got 1 on "
    return None


def _needs_direct(facts: Facts) -> str | None:
    return needs_stores(facts) or _needs_signals(facts)


def _needs_puts(facts: Facts) -> str | None:
    return needs_puts(facts) or _needs_signals(facts)


def _needs_rails(facts: Facts) -> str | None:
    topology = facts.topology
    if topology.n_nodes < 2 or (topology.ranks_per_node or 1) < 2 or not facts.stores:
        return "needs several nodes of the same number of ranks, which can store to each other; got "
    return _needs_puts(facts)


def _one_crossing_pays(facts: Facts) -> bool:
    world, nbytes = facts.topology.world_size, facts.nbytes
    return nbytes <= _ONE_SHOT_BYTES and (world - 1) * (world - 2) * nbytes <= _SPARED_BYTES * world


def _epochs_pay(facts: Facts) -> bool:
    """Return whether two-shot, which admits the call, is taken before stores: in one epoch, or in several large ones.

    It is not taken in several epochs where stores go straight into the result.
    """
    epoch = POLICY.rules["two_shot"].epoch(facts)
    return epoch == facts.nbytes or (epoch >= _LEAST_EPOCH and not facts.symmetric)


def _seed(facts: Facts) -> str:
    """Return the name of the algorithm.

    - Words where the context has room (not in the simulator, where they cost much more): one-shot for few bytes, else
      two-shot, also in several large epochs.
    - Else stores in one node, rails where all nodes have as many ranks, and puts elsewhere.
    """
    one, two = (POLICY.rules[name].admit(facts) is None for name in ("one_shot", "two_shot"))
    if not facts.simulated:
        if one and _one_crossing_pays(facts):
            return "one_shot"
        if two and _epochs_pay(facts):
            return "two_shot"
    others = ("direct", "2d", "1d", "one_shot", "two_shot")
    return next((name for name in others if POLICY.rules[name].admit(facts) is None), "1d")  # which then says why not


POLICY = Policy(
    "all_reduce",
    [
        _words("one_shot", 1),
        _words("two_shot", 2),
        _parts("direct", _needs_direct),
        _parts("1d", _needs_puts),
        _parts("2d", _needs_rails),
    ],
    _seed,
)
"""``"one_shot"``, ``"two_shot"``, ``"direct"``, ``"1d"`` and ``"2d"``."""
