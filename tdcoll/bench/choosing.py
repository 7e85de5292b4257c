# SPDX-License-Identifier: Apache-2.0
"""From times to a tuning table: what could be the fastest, and what is taken. Pure.

Of what was right the fastest is taken, with hysteresis: as long as they are not slower by more than a margin, what the
size before has is kept, or else what the operation's seed takes. So noise makes no entries, and NCCL gets a size only
if it is faster by more than the margin, and only of an operation that can leave calls to it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tdcoll.bench.arithmetic import format_bytes
from tdcoll.bench.dense import IN_PLACE, plan_of
from tdcoll.bench.rows import Row, distinct
from tdcoll.bench.table import number
from tdcoll.collectives._host.plan import Facts, Plan, Policy
from tdcoll.runtime.topology import Topology
from tdcoll.tuning import HANDED_OVER, Entry, Section, Table

__all__ = ["CHANNEL_COUNTS", "WARP_COUNTS", "Candidate", "Choice", "pick", "times_of"]

_BLOCKS = (64, 128, 256, 512, 1024)
"""Words, which need no signal, that one program moves."""

CHANNEL_COUNTS = (1, 4, 16, 64, 256)
"""Chunks of a segment that are tried, by default; and warps of a program."""

WARP_COUNTS = (2, 4, 8, 16)

_LEAST_CHUNK = 1 << 10
"""Bytes; smaller chunks are not tried."""

_NAME = re.compile(
    rf"({IN_PLACE} )?(?P<algorithm>\S+)(?: (?P<channels>\d+) chunks)?"
    r"(?: (?P<chunk>\d+) (?P<unit>B|KB|MB|GB) chunks)?(?: (?P<num_warps>\d+) warps)?"
)


@dataclass(frozen=True)
class Candidate:
    """A way to make a call; None is left to the rules.

    Attributes:
        algorithm: as in :class:`~tdcoll.Plan`.
        in_place: whether the call is.
        channels, chunk, num_warps: as in :class:`~tdcoll.tuning.Entry`.
    """

    algorithm: str
    in_place: bool = False
    channels: int | None = None
    chunk: int | None = None
    num_warps: int | None = None

    @property
    def name(self) -> str:
        """``"1d 8 chunks 4 warps"``, ``"in-place 1d"``, ``"nccl"``."""
        words = [f"{IN_PLACE} {self.algorithm}" if self.in_place else self.algorithm]
        if self.channels is not None:
            words.append(f"{self.channels} chunks")
        if self.chunk is not None:
            words.append(f"{format_bytes(self.chunk)} chunks")
        if self.num_warps is not None:
            words.append(f"{self.num_warps} warps")
        return " ".join(words)

    @classmethod
    def named(cls, name: str) -> Candidate:
        """The candidate of this name."""
        if (said := _NAME.fullmatch(name)) is None:
            raise ValueError(f"expected the name of a candidate, got {name!r}")
        numbers = {key: int(said[key]) for key in ("channels", "chunk", "num_warps") if said[key]}
        if "chunk" in numbers:
            numbers["chunk"] <<= {"B": 0, "KB": 10, "MB": 20, "GB": 30}[said["unit"]]
        return cls(said["algorithm"], bool(said[1]), **numbers)

    def entry(self, up_to: int | None) -> Entry:
        """A table's entry that says so."""
        return Entry(up_to, self.algorithm, self.channels, self.chunk, self.num_warps)


Times = dict[int, dict[Candidate, float]]
"""Microseconds of each candidate at each size."""


def times_of(rows: Sequence[Row]) -> dict[bool, Times]:
    """Return the times of the rows that were right, by whether the call is in place."""
    found: dict[bool, Times] = {}
    for in_place in (False, True):
        times: Times = {}
        for row in rows:
            candidate = Candidate.named(row.algorithm)
            # NCCL does the same in place and out of place, and was measured once.
            fits = candidate.in_place == in_place or candidate.algorithm == HANDED_OVER
            if fits and row.check == "ok" and row.median_us:
                candidate = dataclasses.replace(candidate, in_place=in_place)
                times.setdefault(row.bytes_per_rank, {})[candidate] = row.median_us
        compared = {n: found for n, found in times.items() if any(c.algorithm != HANDED_OVER for c in found)}
        if compared:
            found[in_place] = dict(sorted(compared.items()))
    return found


def pick(
    times_us: Sequence[tuple[int, Mapping[Candidate, float]]], usual: Callable[[int], str], margin: float
) -> list[tuple[int, Candidate]]:
    """For each size what is to be taken: ``(bytes of a segment, candidate)``.

    In this order, of those that are slower than the fastest by at most ``margin`` (0.03: 3%): the same as for the size
    before; the seed's own; the fastest of tdcoll's; and the fastest.

    Args:
        times_us: sizes, ascending, with the time of each candidate; sizes without times are left out.
        usual: the algorithm that the seed takes.
    """
    picks: list[tuple[int, Candidate]] = []
    for nbytes, times in times_us:
        if not times:
            continue
        fastest = min(times.values())
        good = sorted((c for c in times if times[c] <= fastest * (1 + margin)), key=lambda c: times[c])
        before = [picks[-1][1]] if picks else []
        rules = [c for c in good if c == Candidate(usual(nbytes), c.in_place)]
        ours = [c for c in good if c.algorithm != HANDED_OVER]
        picks.append((nbytes, next(c for c in (*before, *rules, *ours, *good) if c in good)))
    return picks


@dataclass(frozen=True)
class Choice:
    """An operation on a machine, for which to choose.

    Attributes:
        policy: of the operation.
        topology: the ranks.
        itemsize: bytes of an element.
        hand_over: whether the operation can leave calls to NCCL.
        margin: what is slower than the fastest by no more may be kept.
    """

    policy: Policy
    topology: Topology
    itemsize: int = 1
    hand_over: bool = True
    margin: float = 0.03

    def plan(self, candidate: Candidate, nbytes: int, ll_bytes: int, lamport_bytes: int = 0) -> Plan:
        """Return the plan of a candidate for such a call, or for its first epoch where a call by words takes several.

        Raises:
            ValueError: it cannot be had.
        """
        facts = self._facts(nbytes, ll_bytes, lamport_bytes, candidate.in_place)
        topology, in_place = self.topology, candidate.in_place
        kind = ("", self.policy.operation, topology.ranks_per_node or 0, topology.n_nodes, in_place)
        return self.policy.choose(facts, candidate.algorithm, [Section(*kind, (candidate.entry(None),))])

    def wish(self, candidate: Candidate, nbytes: int, ll_bytes: int, lamport_bytes: int = 0) -> str | Plan:
        """Return what to give such a call: the candidate's plan, or its algorithm's name for one of several epochs."""
        several = self._several_epochs(candidate.algorithm, nbytes, ll_bytes, lamport_bytes)
        return candidate.algorithm if several else self.plan(candidate, nbytes, ll_bytes, lamport_bytes)

    def _facts(self, nbytes: int, ll_bytes: int, lamport_bytes: int, in_place: bool = False) -> Facts:
        return Facts(
            nbytes,
            self.topology,
            ll_bytes=ll_bytes,
            stores=ll_bytes >= 0,  # both need ranks that can store to each other's memory
            lamport_bytes=lamport_bytes,
            itemsize=self.itemsize,
            in_place=in_place,
        )

    def _several_epochs(self, algorithm: str, nbytes: int, ll_bytes: int, lamport_bytes: int) -> bool:
        """Return whether an algorithm by words takes several epochs, though the context holds the call by chunks."""
        rule = self.policy.rules[algorithm]
        return bool(rule.words) and rule.epoch(self._facts(nbytes, ll_bytes, lamport_bytes)) < nbytes

    def candidates(
        self,
        nbytes: int,
        ll_bytes: int,
        in_place: bool = False,
        algorithms: Sequence[str] | None = None,
        channels: Sequence[int] = CHANNEL_COUNTS,
        warps: Sequence[int] = WARP_COUNTS,
        lamport_bytes: int = 0,
    ) -> list[Candidate]:
        """List different plans that can be had. The first of each algorithm is that of the rules."""
        found: dict[Plan, Candidate] = {}
        for algorithm in self.policy.names if algorithms is None else algorithms:
            if algorithm not in self.policy.names:
                continue  # another operation's
            if algorithm == "2d" and self.topology.n_nodes == 1:
                continue  # 1D with other names
            if algorithm == "ring" and self.topology.world_size < 3:
                continue  # direct stores with other names
            tried = [Candidate(algorithm, in_place)]
            if self._several_epochs(algorithm, nbytes, ll_bytes, lamport_bytes):
                pass  # calls of several epochs take no plan
            elif widths := self.policy.rules[algorithm].words:
                tried += [
                    Candidate(algorithm, in_place, chunk=width * block, num_warps=n)
                    for width in widths
                    for block in _BLOCKS
                    for n in warps
                    if 32 * n <= block and width * block < 2 * max(width * _BLOCKS[0], nbytes)
                ]
            else:
                tried += [
                    Candidate(algorithm, in_place, channels=count, num_warps=n)
                    for count in channels
                    for n in warps
                    if count == 1 or nbytes >= count * _LEAST_CHUNK
                ]
            for candidate in tried:
                try:
                    found.setdefault(self.plan(candidate, nbytes, ll_bytes, lamport_bytes), candidate)
                except ValueError:  # not here, or not of this size
                    break
        return list(found.values())

    def picked(self, times: Times, in_place: bool) -> list[tuple[int, Candidate]]:
        """For each size what the table is to say."""

        def usual(nbytes: int) -> str:
            name = IN_PLACE if in_place else "auto"
            return plan_of(self.policy, name, nbytes, self.topology, self.itemsize).algorithm

        allowed = [
            (n, {c: us for c, us in found.items() if self.hand_over or c.algorithm != HANDED_OVER})
            for n, found in times.items()
        ]
        return pick(allowed, usual, self.margin)

    def sections(
        self, rows: Sequence[Row], architecture: str, source: str, before: Table | None = None
    ) -> list[Section]:
        """A table's sections from the rows that were right.

        An entry holds up to the largest size that it was picked for. Above the largest of all the rules hold, unless
        NCCL was picked there: then it is for all that is larger.

        Args:
            before: of measurements that are still to be finished: a table whose entries hold for larger sizes until
                then.
        """
        made = []
        for in_place, times in times_of(rows).items():
            picks = self.picked(times, in_place)
            entries: list[Entry] = []
            for place, (nbytes, candidate) in enumerate(picks):
                if place + 1 < len(picks) and picks[place + 1][1] == candidate:
                    continue
                last = place + 1 == len(picks) and candidate.algorithm == HANDED_OVER and before is None
                entries.append(candidate.entry(None if last else nbytes))
            per_node = self.topology.ranks_per_node
            assert per_node is not None
            kind = (architecture, self.policy.operation, per_node, self.topology.n_nodes, in_place)
            section = Section(*kind, tuple(entries), source)
            for old in before.sections if before is not None else ():
                if old.kind == section.kind:
                    largest = picks[-1][0]
                    kept = tuple(entry for entry in old.entries if entry.up_to is None or entry.up_to > largest)
                    section = dataclasses.replace(section, entries=(*section.entries, *kept))
            made.append(section)
        return made

    def verdict(self, nbytes: int, rows: Sequence[Row]) -> str:
        """Return one line: what is taken at a size, and how much longer the best of every other algorithm takes.

        Args:
            rows: of this size, and of those before it, on which the choice depends.
        """
        said = []
        for in_place, times in times_of(rows).items():
            if nbytes not in times:
                continue
            taken = self.picked({n: found for n, found in times.items() if n <= nbytes}, in_place)[-1][1]
            mine = times[nbytes][taken]
            best: dict[str, float] = {}
            for candidate, us in sorted(times[nbytes].items(), key=lambda item: item[1]):
                if candidate.algorithm != taken.algorithm:
                    best.setdefault(candidate.algorithm, us)
            others = ", ".join(f"{name} {100 * (us / mine - 1):+.0f}%" for name, us in best.items())
            said.append(f"{taken.name} {number(mine, 2)} µs" + (f" ({others})" if others else ""))
        if wrong := [row.algorithm for row in rows if row.bytes_per_rank == nbytes and row.check == "WRONG"]:
            said.append(f"WRONG: {', '.join(distinct(wrong))}")
        return "; ".join(said) or "nothing was right"
