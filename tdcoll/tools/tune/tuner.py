# SPDX-License-Identifier: Apache-2.0
"""Choose plans of dense collectives: candidates to measure, and the table that follows from times.

The fastest right candidate is taken, with hysteresis: a candidate that is slower by at most
:data:`MARGIN` is kept if the size before has it, or if the operation's default heuristic takes it.
Noise therefore makes no entries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from tdcoll.base import limits
from tdcoll.base.arguments import format_bytes
from tdcoll.calls.plan import Facts, Landing, Plan
from tdcoll.calls.spec import Collective
from tdcoll.calls.tuning import Entry, Section
from tdcoll.runtime.topology import Topology
from tdcoll.tools.measure.collectives import DenseCall
from tdcoll.tools.measure.dense import IN_PLACE, Algorithm
from tdcoll.tools.measure.results import Row

CHUNK_COUNTS = (1, 4, 16, 64, 256)
"""Numbers of chunks of a segment that are tried by default."""

WARP_COUNTS = (2, 4, 8, 16)
"""Numbers of warps of a thread block that are tried by default."""

_BLOCK_WORDS = (64, 128, 256, 512, 1024)
"""Numbers of words that one thread block moves, which are tried if an algorithm has words."""

_BLOCK_COUNTS = (8, 16, 32, 64)
"""Numbers of thread blocks that are tried if an algorithm works with any number."""

_LEAST_BLOCK_WARPS = 8
"""Fewer warps are not tried if an algorithm works with any number of thread blocks."""

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
        words = [self.algorithm]
        if self.in_place:
            words.insert(0, IN_PLACE)
        if self.chunks is not None:
            words.append(f"{self.chunks} chunks")
        if self.chunk is not None:
            words.append(f"{format_bytes(self.chunk)} chunks")
        if self.num_warps is not None:
            words.append(f"{self.num_warps} warps")
        if self.blocks is not None:
            words.append(f"{self.blocks} blocks")
        return " ".join(words)

    def entry(self, up_to: int | None) -> Entry:
        """Return the table's entry with this candidate, for segments of up to ``up_to`` bytes."""
        return Entry(up_to, self.algorithm, self.chunks, self.chunk, self.num_warps, self.blocks)


Times = Mapping[int, Mapping[Candidate, float]]
"""Microseconds of each candidate by bytes of a segment, ascending."""


@dataclass(frozen=True)
class Tuner:
    """The choice of plans for one collective on a machine.

    Attributes:
        topology: the ranks, in nodes of one size.
        in_place: whether calls in place are tried as well, if tables have sections for them.
        names: algorithms that are tried; all, if None.
        chunks, warps: numbers of chunks and of warps that are tried.
    """

    call: DenseCall
    topology: Topology
    in_place: bool = False
    names: Sequence[str] | None = None
    chunks: Sequence[int] = CHUNK_COUNTS
    warps: Sequence[int] = WARP_COUNTS

    @property
    def _spec(self) -> Collective:
        return self.call.spec

    def _facts(self, nbytes: int, in_place: bool = False) -> Facts:
        """Return the facts of a call on a context of its size.

        Ranks of a node can store to each other.
        """
        world = self.topology.world_size
        nodes = self.topology.n_nodes
        return Facts(
            nbytes,
            self.topology,
            ll_bytes=limits.flagged_bytes(world),
            stores=True,
            lamport_bytes=limits.lamport_bytes(world, nodes),
            itemsize=getattr(torch, self.call.tuned_dtype).itemsize,
            landing=Landing.CALLER_BUFFER if in_place else Landing.INBOX,
        )

    def _takes_several_epochs(self, algorithm: str, nbytes: int) -> bool:
        """Return whether LL or Lamport takes several epochs on a context that holds the call."""
        found = self._spec.algorithm(algorithm)
        return bool(found.words) and found.epoch(self._facts(nbytes)) < nbytes

    def plan(self, candidate: Candidate, nbytes: int) -> Plan:
        """Return the candidate's plan, of the first epoch if words take several.

        Raises:
            ValueError: the call doesn't support the candidate.
        """
        topology = self.topology
        section = Section(
            architecture="",
            operation=self._spec.name,
            ranks_per_node=topology.ranks_per_node or 0,
            nodes=topology.n_nodes,
            in_place=candidate.in_place,
            entries=(candidate.entry(None),),
        )
        facts = self._facts(nbytes, candidate.in_place)
        return self._spec.choose(facts, candidate.algorithm, [section])

    def algorithm(self, candidate: Candidate, nbytes: int) -> Algorithm:
        """Return the ``algorithm`` of the candidate's calls: its plan, or only its name.

        A call of several epochs takes no plan.
        """
        if self._takes_several_epochs(candidate.algorithm, nbytes):
            return candidate.algorithm
        return self.plan(candidate, nbytes)

    def _variations(self, algorithm: str, nbytes: int) -> list[dict[str, int]]:
        """Return the chunks, warps and blocks that are tried besides the default heuristic's."""
        if self._takes_several_epochs(algorithm, nbytes):
            return []  # such calls take no plan
        found = self._spec.algorithm(algorithm)
        if found.words:
            return self._word_variations(found.words, nbytes)
        if found.works_with_any_grid:
            warps = [count for count in self.warps if count >= _LEAST_BLOCK_WARPS]
            return _combinations("blocks", _BLOCK_COUNTS, warps)
        if found.copies is not None:
            return []  # copy engines are the fastest with one copy
        chunks = [count for count in self.chunks if count == 1 or nbytes >= count * _LEAST_CHUNK]
        return _combinations("chunks", chunks, self.warps)

    def _word_variations(self, widths: Sequence[int], nbytes: int) -> list[dict[str, int]]:
        """Return the chunks and warps that are tried of LL or Lamport.

        Args:
            widths: bytes that a word carries.
        """
        found: list[dict[str, int]] = []
        for width in widths:
            largest = 2 * max(width * _BLOCK_WORDS[0], nbytes)
            for words in _BLOCK_WORDS:
                if width * words >= largest:
                    continue
                # Each thread has a word.
                warps = [count for count in self.warps if 32 * count <= words]
                found += _combinations("chunk", [width * words], warps)
        return found

    def candidates(self, nbytes: int) -> list[Candidate]:
        """List different supported plans, for each algorithm the default heuristic's first."""
        found = self._candidates(nbytes, in_place=False)
        if self.in_place and self._spec.in_place:
            found += self._candidates(nbytes, in_place=True)
        return found

    def _candidates(self, nbytes: int, in_place: bool) -> list[Candidate]:
        by_plan: dict[Plan, Candidate] = {}
        names = self._spec.names
        if self.names is not None:
            names = tuple(name for name in self.names if name in names)
        for name in names:
            if not self._spec.algorithm(name).distinct_on(self.topology):
                continue
            for variation in [{}, *self._variations(name, nbytes)]:
                candidate = Candidate(name, in_place, **variation)
                try:
                    by_plan.setdefault(self.plan(candidate, nbytes), candidate)
                except ValueError:  # not supported here, or not for this size
                    break
        return list(by_plan.values())

    def picks(self, times_us: Times) -> list[tuple[int, Candidate]]:
        """Return the choice for each size: ``(bytes of a segment, candidate)``.

        See :func:`pick`.
        """
        picks: list[tuple[int, Candidate]] = []
        for nbytes, times in times_us.items():
            in_place = next(iter(times)).in_place
            plan = self._spec.choose(self._facts(nbytes, in_place))
            before = picks[-1][1] if picks else None
            picks.append((nbytes, pick(times, before, Candidate(plan.algorithm, in_place))))
        return picks

    def sections(self, rows: Sequence[Row], architecture: str, source: str) -> list[Section]:
        """Return a table's sections from the rows whose results were right.

        An entry holds up to the largest size that it was picked for. Above all entries the default
        heuristic decides.
        """
        per_node = self.topology.ranks_per_node
        assert per_node is not None
        sections = []
        for in_place in (False, True):
            picks = self.picks(_times_of(rows, in_place))
            if not picks:
                continue
            entries = []
            for place, (nbytes, candidate) in enumerate(picks):
                is_last = place == len(picks) - 1
                if is_last or picks[place + 1][1] != candidate:
                    entries.append(candidate.entry(nbytes))
            sections.append(
                Section(
                    architecture=architecture,
                    operation=self._spec.name,
                    ranks_per_node=per_node,
                    nodes=self.topology.n_nodes,
                    in_place=in_place,
                    entries=tuple(entries),
                    source=source,
                )
            )
        return sections


_Way = TypeVar("_Way")


def pick(times_us: Mapping[_Way, float], before: _Way | None, default: _Way) -> _Way:
    """Return the choice for one size.

    It is the choice for the size before if that is within the margin. Otherwise it is the default's
    own choice if that is within the margin, and else the fastest.

    Args:
        times_us: Microseconds of each candidate.
        before: The choice for the size before; None for the first size.
    """
    limit = min(times_us.values()) * (1 + MARGIN)
    good = sorted((way for way in times_us if times_us[way] <= limit), key=times_us.__getitem__)
    if before is not None and before in good:
        return before
    return default if default in good else good[0]


def _combinations(name: str, counts: Sequence[int], warps: Sequence[int]) -> list[dict[str, int]]:
    """Return each of ``counts`` with each number of warps."""
    return [{name: count, "num_warps": warp_count} for count in counts for warp_count in warps]


def _times_of(rows: Sequence[Row], in_place: bool) -> Times:
    """Return the times of candidates in place, or of the others, whose results were right."""
    times: dict[int, dict[Candidate, float]] = {}
    for row in sorted(rows, key=lambda row: row.facts["bytes_per_rank"]):
        candidate = Candidate(**row.facts["candidate"])
        if row.check == "ok" and row.median_us and candidate.in_place == in_place:
            times.setdefault(row.facts["bytes_per_rank"], {})[candidate] = row.median_us
    return times
