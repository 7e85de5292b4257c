# SPDX-License-Identifier: Apache-2.0
"""Which all-reduce to launch, and how: the rules of :data:`POLICY`, see :mod:`tdcoll.collectives._host.plan`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from tdcoll.collectives._host.plan import (
    LL_WORD_BYTES,
    Extent,
    Facts,
    Plan,
    Policy,
    Rule,
    cut_chunks,
    cut_words,
    needs_stores,
    words_of,
)
from tdcoll.tuning import Entry

if TYPE_CHECKING:
    from tdcoll.runtime.topology import Topology

__all__ = ["LAMPORT_WORD_BYTES", "POLICY", "by_lamport", "part_bytes", "parts"]

LAMPORT_WORD_BYTES = 16
"""Data of a word that announces itself."""

_ONE_SHOT_BYTES = 640 << 10
"""That a rank sends to all others together, one-shot. Beyond it a second crossing costs less than the bytes that it
saves: on H200s with 2 ranks from about 1 MB on, with 4 from about 200 KB."""


_WORDS_BYTES = 1 << 30
"""Kernels count the bytes that go by words in 32 bits, and go somewhat beyond the last."""


def part_bytes(nbytes: int, parts: int) -> int:
    """Bytes of a part where the data is cut into so many, and these into chunks: a multiple of 16."""
    return max(1, -(-nbytes // (16 * parts))) * 16


def _words_sent(facts: Facts, width: int, shots: int) -> int:
    """Words that a rank has room for in the segment of each other."""
    words = words_of(facts.nbytes, width)
    return words if shots == 1 else 2 * -(-words // facts.topology.world_size)


def by_lamport(facts: Facts, shots: int) -> bool:
    """Whether such a call goes by words that announce themselves; else by flagged ones."""
    return LAMPORT_WORD_BYTES * _words_sent(facts, LAMPORT_WORD_BYTES, shots) <= -(-facts.lamport_bytes // 16) * 16


def _extent(facts: Facts, shots: int) -> Extent:
    width = LAMPORT_WORD_BYTES if by_lamport(facts, shots) else LL_WORD_BYTES
    words = words_of(facts.nbytes, width)
    if shots == 2:
        words = -(-words // facts.topology.world_size)
    return Extent(width * words, width)


def _words(name: str, shots: int) -> Rule:
    def admit(facts: Facts) -> str | None:
        if facts.itemsize > 4:
            return f"needs elements of 2 or 4 bytes; got elements of {facts.itemsize} bytes on "
        if (problem := needs_stores(facts)) is not None:
            return problem
        if facts.nbytes >= _WORDS_BYTES:
            return f"needs less than {_WORDS_BYTES} bytes; got {facts.nbytes} bytes on "
        if by_lamport(facts, shots) or _words_sent(facts, LL_WORD_BYTES, shots) <= words_of(facts.ll_bytes):
            return None
        return f"needs fewer bytes, or a context with more lamport_bytes or flagged_bytes; got {facts.nbytes} bytes on "

    def cut(facts: Facts, entry: Entry) -> Plan:
        extent = _extent(facts, shots)
        usual = 512 if extent.nbytes >= 1 << 20 else 256 if extent.nbytes >= 128 << 10 else 128
        return cut_words(facts, entry, name, extent, usual)

    return Rule(name, admit, cut, (LAMPORT_WORD_BYTES, LL_WORD_BYTES), lambda facts: _extent(facts, shots))


def _parts(name: str, admit: Callable[[Facts], str | None]) -> Rule:
    def extent(facts: Facts) -> Extent:
        topology = facts.topology
        return Extent(part_bytes(facts.nbytes, parts(topology, name)), signals=2)

    def cut(facts: Facts, entry: Entry) -> Plan:
        whole = extent(facts)
        channels = facts.channels // whole.signals
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


def _needs_rails(facts: Facts) -> str | None:
    topology = facts.topology
    if topology.n_nodes < 2 or (topology.ranks_per_node or 1) < 2 or not facts.stores:
        return "needs several nodes of the same number of ranks, which can store to each other; got "
    return _needs_signals(facts)


def _seed(facts: Facts) -> str:
    """Few bytes by words, one-shot and then two-shot (not in the simulator, where words cost much more); else by stores
    in one node; by rails where all nodes have as many ranks, and by puts elsewhere."""
    one, two = (POLICY.rules[name].admit(facts) is None for name in ("one_shot", "two_shot"))
    if not facts.simulated:
        if one and (facts.topology.world_size - 1) * facts.nbytes <= _ONE_SHOT_BYTES:
            return "one_shot"
        if two:
            return "two_shot"
    others = ("direct", "2d", "1d", "one_shot", "two_shot")
    return next((name for name in others if POLICY.rules[name].admit(facts) is None), "1d")  # which then says why not


POLICY = Policy(
    "all_reduce",
    [
        _words("one_shot", 1),
        _words("two_shot", 2),
        _parts("direct", _needs_direct),
        _parts("1d", _needs_signals),
        _parts("2d", _needs_rails),
    ],
    _seed,
)
"""``"one_shot"``, ``"two_shot"``, ``"direct"``, ``"1d"`` and ``"2d"``."""
