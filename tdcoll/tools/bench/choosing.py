# SPDX-License-Identifier: Apache-2.0
"""Choose plans of dense collectives: the candidates to measure, and the tuning table that follows from the times.

The fastest right candidate is taken, with hysteresis: a candidate that is slower by at most :data:`MARGIN` is kept if
the size before has it, or if the operation's default heuristic takes it. Noise therefore makes no entries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from tdcoll.base import limits
from tdcoll.base.arguments import format_bytes
from tdcoll.calls.plan import Facts, Plan
from tdcoll.calls.tuning import Entry, Section
from tdcoll.runtime.topology import Topology
from tdcoll.tools.bench.rows import IN_PLACE, Row
from tdcoll.tools.bench.specs import Spec

Requested = str | Plan
"""Values that tdcoll's functions accept for ``algorithm``."""

_BLOCKS = (64, 128, 256, 512, 1024)
"""LL or Lamport words that one thread block moves."""

CHUNK_COUNTS = (1, 4, 16, 64, 256)
"""Numbers of chunks of a segment, and of warps of a thread block, that are tried by default."""

WARP_COUNTS = (2, 4, 8, 16)

BLOCK_COUNTS = (8, 16, 32, 64)
"""Numbers of thread blocks that are tried where any number works."""

_LEAST_CHUNK = 1 << 10
"""Bytes; smaller chunks are not tried."""

MARGIN = 0.03


@dataclass(frozen=True)
class Candidate:
    """A way to make a call; if a field is None, the default heuristic decides.

    Attributes:
        algorithm: as in :class:`~tdcoll.calls.plan.Plan`.
        chunks, chunk, num_warps, blocks: as in :class:`~tdcoll.calls.tuning.Entry`.
    """

    algorithm: str
    in_place: bool = False
    chunks: int | None = None
    chunk: int | None = None
    num_warps: int | None = None
    blocks: int | None = None

    @property
    def name(self) -> str:
        """``"1d 8 chunks 4 warps"``, ``"in-place ll 6 KB chunks"``."""
        chunk = self.chunk and format_bytes(self.chunk)
        counts = (self.chunks, "chunks"), (chunk, "chunks"), (self.num_warps, "warps"), (self.blocks, "blocks")
        words = [f"{IN_PLACE} {self.algorithm}" if self.in_place else self.algorithm]
        return " ".join([*words, *(f"{count} {what}" for count, what in counts if count is not None)])

    def entry(self, up_to: int | None) -> Entry:
        """Return a table's entry that says so."""
        return Entry(up_to, self.algorithm, self.chunks, self.chunk, self.num_warps, self.blocks)


@dataclass(frozen=True)
class Choice:
    """An operation on a machine, for which to choose.

    Attributes:
        topology: the ranks, in nodes of one size.
        in_place: whether calls in place are tried as well, where tables have sections for them.
        names: algorithms that are tried; if None, all.
        chunks, warps: numbers of them that are tried.
    """

    spec: Spec
    topology: Topology
    in_place: bool = False
    names: Sequence[str] | None = None
    chunks: Sequence[int] = CHUNK_COUNTS
    warps: Sequence[int] = WARP_COUNTS

    def _facts(self, nbytes: int, in_place: bool = False) -> Facts:
        """Return the facts of a call on a context of its size, whose ranks can store to each other in a node."""
        shape = self.topology.world_size, self.topology.n_nodes
        return Facts(
            nbytes,
            self.topology,
            ll_bytes=limits.flagged_bytes(shape[0]),
            stores=True,
            lamport_bytes=limits.lamport_bytes(*shape),
            itemsize=getattr(torch, self.spec.tuned_dtype).itemsize,
            in_place=in_place,
        )

    def _several_epochs(self, algorithm: str, nbytes: int) -> bool:
        """Return whether LL or Lamport takes several epochs, although the context holds the call in chunks."""
        found = self.spec.algorithm(algorithm)
        return bool(found.words) and found.epoch(self._facts(nbytes)) < nbytes

    def plan(self, candidate: Candidate, nbytes: int) -> Plan:
        """Return the candidate's plan, of the first epoch if words take several; ``ValueError`` if unsupported."""
        topology, facts = self.topology, self._facts(nbytes, candidate.in_place)
        kind = ("", self.spec.name, topology.ranks_per_node or 0, topology.n_nodes, candidate.in_place)
        section = Section(*kind, (candidate.entry(None),))
        return self.spec.choose(facts, candidate.algorithm, [section])

    def requested(self, candidate: Candidate, nbytes: int) -> Requested:
        """Return the ``algorithm`` of such a call: the candidate's plan, or its name if it takes several epochs."""
        several = self._several_epochs(candidate.algorithm, nbytes)
        return candidate.algorithm if several else self.plan(candidate, nbytes)

    def _tried(self, algorithm: str, nbytes: int) -> list[dict[str, int]]:
        """Return the chunks and warps that are tried of an algorithm, besides the default heuristic's."""
        how = self.spec.algorithm(algorithm)
        if self._several_epochs(algorithm, nbytes):
            return []  # such calls take no plan
        if how.words:
            return [
                {"chunk": width * block, "num_warps": n}
                for width in how.words
                for block in _BLOCKS
                for n in self.warps
                if 32 * n <= block and width * block < 2 * max(width * _BLOCKS[0], nbytes)
            ]
        if how.any_blocks:
            return [{"blocks": count, "num_warps": n} for count in BLOCK_COUNTS for n in self.warps if n >= 8]
        if how.copies is not None:
            return []  # copy engines are the fastest with one copy
        fitting = [count for count in self.chunks if count == 1 or nbytes >= count * _LEAST_CHUNK]
        return [{"chunks": count, "num_warps": n} for count in fitting for n in self.warps]

    def candidates(self, nbytes: int) -> list[Candidate]:
        """List different supported plans. The first of each algorithm is the default heuristic's."""
        made: list[Candidate] = []
        for in_place in (False, True) if self.in_place and self.spec.in_place else (False,):
            found: dict[Plan, Candidate] = {}
            for algorithm in self.spec.names if self.names is None else [n for n in self.names if n in self.spec.names]:
                if not self.spec.algorithm(algorithm).differs(self.topology):
                    continue
                for tried in [{}, *self._tried(algorithm, nbytes)]:
                    candidate = Candidate(algorithm, in_place, **tried)
                    try:
                        found.setdefault(self.plan(candidate, nbytes), candidate)
                    except ValueError:  # not here, or not of this size
                        break
            made += found.values()
        return made

    def picked(self, times_us: Mapping[int, Mapping[Candidate, float]]) -> list[tuple[int, Candidate]]:
        """Return the choice for each size: ``(bytes of a segment, candidate)``.

        The first of these within the margin: the choice for the size before; the default heuristic's own; the fastest.

        Args:
            times_us: the time of each candidate by size, ascending.
        """
        picks: list[tuple[int, Candidate]] = []
        for nbytes, times in times_us.items():
            most = min(times.values()) * (1 + MARGIN)
            good = sorted((c for c in times if times[c] <= most), key=lambda c: times[c])
            usual = self.spec.choose(self._facts(nbytes, good[0].in_place)).algorithm
            wanted = [candidate for _, candidate in picks[-1:]] + [Candidate(usual, good[0].in_place)]
            picks.append((nbytes, next(c for c in (*wanted, *good) if c in good)))
        return picks

    def sections(self, rows: Sequence[Row], architecture: str, source: str) -> list[Section]:
        """Return a table's sections from the rows that were right.

        An entry holds up to the largest size that it was picked for. Above all entries the default heuristic decides.
        """
        per_node, made = self.topology.ranks_per_node, list[Section]()
        assert per_node is not None
        for in_place in (False, True):
            times: dict[int, dict[Candidate, float]] = {}
            for row in sorted(rows, key=lambda row: row.facts["bytes_per_rank"]):
                candidate = Candidate(**row.facts["candidate"])
                if row.check == "ok" and row.median_us and candidate.in_place == in_place:
                    times.setdefault(row.facts["bytes_per_rank"], {})[candidate] = row.median_us
            if picks := self.picked(times):
                ends = zip(picks, [*(candidate for _, candidate in picks[1:]), None], strict=True)
                entries = [candidate.entry(nbytes) for (nbytes, candidate), after in ends if candidate != after]
                kind = (architecture, self.spec.name, per_node, self.topology.n_nodes, in_place)
                made.append(Section(*kind, tuple(entries), source))
        return made
