# SPDX-License-Identifier: Apache-2.0
"""A dense collective as data: one :class:`Collective`, which its folder exports as ``SPEC``.

Everything that is not the same for all dense collectives stands in that record: calls, the backend,
operators, tuning, benchmarks and tests read it there, and name no collective. This module needs
neither torch nor triton.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from tdcoll.base.errors import ContextError
from tdcoll.base.limits import inbox_bytes
from tdcoll.calls.plan import MOST_EPOCHS, Facts, Landing, Plan, shares_gpu
from tdcoll.calls.tuning import Entry, Section
from tdcoll.calls.words import Payload

if TYPE_CHECKING:
    from tdcoll.runtime.topology import Topology

FEW_BLOCKS = (30, 4 << 20), (13, 1 << 20), (8, 256 << 10)
"""``(blocks, bytes)``: on a context with fewer thread blocks, the backend handles no more than so
many bytes."""

WORLD = "world"
"""In :attr:`Collective.segments`: one segment for each rank of the group."""

Shape = tuple[int, ...]

_NOTHING_MEASURED = Entry(None, "")


REQUESTED = "requested"
TABLE = "table"
DEFAULT = "default"


@dataclass(frozen=True)
class Decision:
    """The plan of a call, and why it was made.

    Attributes:
        reason: of its algorithm: ``"requested"``, ``"table"`` (measured to be the fastest) or
            ``"default"``.
        found: the section and the entry of the tuning table that hold for the call, if there are
            any. The entry's algorithm is another one if it was not requested, or doesn't support
            the call.
    """

    plan: Plan
    reason: str
    found: tuple[Section, Entry] | None = None


@dataclass(frozen=True)
class Algorithm:
    """One way to make the calls of a collective.

    Attributes:
        supports: why such a call can't have it, as a sentence that begins with ``needs``; None if
            it can.
        cut: the plan of such a call, given what an entry of a table says.
        kernel: made by :func:`tdcoll.jit`. Its parameters begin with the addresses ``source`` and
            ``out``.
        blocks: thread blocks of a plan.
        values: arguments beyond those that kernels of any collective may have, by name, of a
            :class:`~tdcoll.calls.launch_spec.LaunchSpec`.
        words: bytes of data that a word may carry, for algorithms whose chunks are blocks of words
            without signals.
        payload: what the chunks of a call are cut from.
        epoch: bytes of a segment in each epoch; the last may be shorter. ``cut`` and ``payload``
            are of the first.
        allow_pdl: whether launches may begin before the one ahead of them has ended (programmatic
            dependent launch).
        works_with_any_grid: whether any number of thread blocks works, with the same bits; a plan
            then says how many.
        copies: makes the steps of a call by copy engines, of a
            :class:`~tdcoll.calls.launch_spec.LaunchSpec`.
        distinct_on: whether it does anything on these ranks that no other algorithm does, and needs
            to be measured.
    """

    name: str
    supports: Callable[[Facts], str | None]
    cut: Callable[[Facts, Entry], Plan]
    kernel: Callable[[Facts], Any]
    blocks: Callable[[Facts, Plan], int]
    values: Callable[[Any], Mapping[str, Any]] = lambda spec: {}
    words: tuple[int, ...] = ()
    payload: Callable[[Facts], Payload] = lambda facts: Payload(
        facts.nbytes, blocks=facts.topology.world_size
    )
    epoch: Callable[[Facts], int] = lambda facts: facts.nbytes
    allow_pdl: Callable[[Facts], bool] = lambda facts: True
    works_with_any_grid: bool = False
    copies: Callable[[Any], Any] | None = None
    distinct_on: Callable[[Topology], bool] = lambda topology: True


class BackendLimits(NamedTuple):
    """The largest segments, in bytes, that the backend for ``torch.distributed`` handles by
    default: up to there, a call takes no longer than NCCL's (``benchmarks/backend_calls.py``
    measures it).

    Attributes:
        two_ranks: Measured on 2 GPUs.
        more_ranks: For more ranks, measured on 4 GPUs.
    """

    two_ranks: int = 16 << 20
    more_ranks: int = 4 << 20


DEFAULT_LIMITS = BackendLimits()


@dataclass(frozen=True)
class Collective:
    """A dense collective.

    Attributes:
        name: of its public function, its folder, and its sections of tuning tables.
        segments: how many segments the caller's tensor and the result have, ``(given, result)``: 1
            or :data:`WORLD`.
        default: the name of the one to take if nothing was measured. If it doesn't support the
            call, none does.
        torch: the name of the same function in ``torch.distributed``.
        capacity: ``(bytes of a segment, ranks) ->`` the ``max_bytes_per_rank`` with which a call is
            always one epoch.
        adjoint: the name of the collective that takes the gradient of the result to that of the
            tensor.
        reduces: whether elements are reduced: calls then have an operation, and a dtype that
            matters.
        rooted: whether one rank's tensor goes to all ranks: calls then have a root.
        in_place: whether there is a form whose peers write into the caller's buffer, ``NAME_``.
        backend_limits: what the backend for ``torch.distributed`` handles by default.
    """

    name: str
    segments: tuple[int | str, int | str]
    algorithms: tuple[Algorithm, ...]
    default: Callable[[Facts], str]
    torch: str
    capacity: Callable[[int, int], int]
    adjoint: str
    reduces: bool = False
    rooted: bool = False
    in_place: bool = False
    backend_limits: BackendLimits = DEFAULT_LIMITS

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the algorithms."""
        return tuple(algorithm.name for algorithm in self.algorithms)

    def algorithm(self, name: str) -> Algorithm:
        """Return the algorithm of this name."""
        return next(algorithm for algorithm in self.algorithms if algorithm.name == name)

    def backend_limit(self, world: int, blocks: int | None = None) -> int:
        """Return the largest segment, in bytes, that the backend handles by default.

        Args:
            blocks: The thread blocks of the group's contexts; None: no budget.
        """
        limits = [self.backend_limits.two_ranks]
        if world > 2:
            limits.append(self.backend_limits.more_ranks)
        for fewest, nbytes in FEW_BLOCKS:
            if blocks is not None and blocks < fewest:
                limits.append(nbytes)
        return min(limits)

    # ------------------------------------------------------------------ shapes

    @property
    def scatters(self) -> bool:
        """Whether the caller's tensor has a segment for each rank."""
        return self.segments[0] == WORLD

    @property
    def gathers(self) -> bool:
        """Whether the result has a segment of each rank."""
        return self.segments[1] == WORLD

    def segment_bytes(self, nbytes: int, world: int) -> int:
        """Return the bytes of a segment of a tensor of ``nbytes``."""
        return nbytes // world if self.scatters else nbytes

    def results(self, shape: Shape, world: int) -> tuple[Shape, ...]:
        """Return the shapes that the result of a tensor may have, of which the first is made; none
        if the tensor's first dimension must be divisible by the number of ranks and isn't."""
        segments = [shape]
        if self.scatters:
            if not shape or shape[0] % world:
                return ()
            segments = [
                (shape[0] // world, *shape[1:]),
                *([shape[1:]] if shape[0] == world else []),
            ]
        if not self.gathers:
            return tuple(segments)
        first = segments[0]
        whole = (world * first[0], *first[1:]) if first else (world,)
        return shape if self.scatters else whole, (world, *first)

    def inbox(self, segment: int, world: int, heap_bytes: int) -> int:
        """Return the ``max_bytes_per_rank`` of a context that tdcoll makes by itself for such
        calls."""
        return min(self.capacity(segment, world), inbox_bytes(world, heap_bytes))

    @property
    def lamport_bytes(self) -> int | None:
        """The ``lamport_bytes`` of such a context."""
        return None if self.reduces else 0

    def may_overlap_at(self, segment: int, rank: int) -> int | None:
        """Return how many bytes behind the caller's tensor the result may begin if the two share
        memory: the smaller is this rank's segment of the larger, or both are the same. None: they
        must not overlap."""
        if self.scatters:
            return None if self.gathers else rank * segment
        return -rank * segment if self.gathers else 0

    def landing(self, *, symmetric: bool, in_place: bool) -> Landing:
        """Return where peers' data lands.

        Args:
            symmetric: Whether ``out`` is symmetric memory, which peers may write to.
            in_place: Whether the tensor is, and has a segment for each rank.
        """
        if in_place or (symmetric and self.in_place):
            return Landing.CALLER_BUFFER
        return Landing.PEER_RESULT if symmetric else Landing.INBOX

    # ------------------------------------------------------------------ the choice

    def supported(self, name: str, facts: Facts) -> Algorithm:
        """Return the algorithm of this name; raise ``ValueError``, which says why, if it doesn't
        support the call."""
        algorithm = self.algorithm(name)
        problem = algorithm.supports(facts)
        if problem is not None:
            raise ValueError(
                f"algorithm={name!r} {problem}{facts.topology.describe()}. Use algorithm='auto'."
            )
        return algorithm

    def choose(
        self, facts: Facts, algorithm: str | Plan = "auto", sections: Sequence[Section] = ()
    ) -> Plan:
        """Return the plan of a call of one epoch, as :meth:`decide` makes it."""
        return self.decide(facts, algorithm, sections).plan

    def decide(
        self, facts: Facts, algorithm: str | Plan = "auto", sections: Sequence[Section] = ()
    ) -> Decision:
        """Decide about a call, or the first epoch of a larger one; the same on all ranks of the
        group.

        Args:
            algorithm: ``"auto"``, or one of ``self.names``; or, from measurements and tests, a
                plan, which is taken as it is. ``"auto"`` takes what the table says if that supports
                the call, and the default otherwise.
            sections: of a tuning table, for these GPUs; its chunks and warps count if its algorithm
                is taken.
        """
        if isinstance(algorithm, Plan):
            self.supported(algorithm.algorithm, facts)
            return Decision(self._with_blocks(facts, algorithm), REQUESTED)
        if algorithm not in ("auto", *self.names):
            raise ValueError(
                f"algorithm must be one of auto, {', '.join(self.names)}; got {algorithm!r}"
            )
        found = self._entry(facts, sections)
        entry = None if found is None else found[1]
        if algorithm != "auto":
            reason = REQUESTED
            chosen = self.supported(algorithm, facts)
        elif entry is not None and self.algorithm(entry.algorithm).supports(facts) is None:
            reason = TABLE
            chosen = self.algorithm(entry.algorithm)
        else:
            reason = DEFAULT
            chosen = self.algorithm(self.default(facts))
            problem = chosen.supports(facts)
            if problem is not None:
                raise ValueError(f"{self.name} {problem}{facts.topology.describe()}")
        if entry is None or entry.algorithm != chosen.name:
            entry = _NOTHING_MEASURED
        return Decision(self._with_blocks(facts, chosen.cut(facts, entry)), reason, found)

    def decide_call(
        self, facts: Facts, algorithm: str | Plan = "auto", sections: Sequence[Section] = ()
    ) -> tuple[Decision, list[int]]:
        """Decide about a call of any size.

        Returns:
            The decision about its first epoch, whose algorithm is that of the whole, and the
            :meth:`epochs`.

        Raises:
            ValueError: an unknown algorithm, or one that doesn't support the call.
            ContextError: the context is far too small.
        """
        decision = self.decide(facts, algorithm, sections)
        epochs = self.epochs(facts, decision.plan.algorithm)
        if isinstance(algorithm, Plan):
            nbytes = self.algorithm(algorithm.algorithm).payload(facts).nbytes
            covered = algorithm.chunks * algorithm.chunk
            if len(epochs) > 1 or covered < nbytes:
                raise ValueError(
                    f"a Plan must cover {nbytes} bytes in one epoch; got {covered} in {len(epochs)}"
                )
        if len(epochs) == 1:
            return decision, epochs
        first = self.choose(replace(facts, nbytes=epochs[0]), decision.plan.algorithm, sections)
        return replace(decision, plan=first), epochs

    def epochs(self, facts: Facts, algorithm: str) -> list[int]:
        """Return the bytes of a segment in each epoch of a call."""
        nbytes = facts.nbytes
        capacity = self.algorithm(algorithm).epoch(facts)
        if nbytes > MOST_EPOCHS * capacity:
            raise ContextError(
                f"{self.name}: {nbytes} bytes would take more than {MOST_EPOCHS} epochs of {capacity} bytes. "
                f"Make the context with max_bytes_per_rank={nbytes // MOST_EPOCHS * 4 + 128} or more"
            )
        n = max(1, -(-nbytes // max(1, capacity)))
        return [*(n - 1) * [capacity], nbytes - (n - 1) * capacity]

    def _with_blocks(self, facts: Facts, plan: Plan) -> Plan:
        return (
            plan
            if plan.blocks
            else replace(plan, blocks=self.algorithm(plan.algorithm).blocks(facts, plan))
        )

    def _entry(self, facts: Facts, sections: Sequence[Section]) -> tuple[Section, Entry] | None:
        """The first entry that holds for such a call, and its section. On a context with a budget
        of thread blocks only those hold that state how many, or that need none, because the others
        were measured with the whole GPU."""
        topology = facts.topology
        kind = (self.name, topology.ranks_per_node, topology.n_nodes, facts.in_place)
        for section in sections:
            if section.kind[1:] == kind:
                for entry in section.entries:
                    holds = (
                        not shares_gpu(facts)
                        or entry.blocks
                        or self.algorithm(entry.algorithm).copies
                    )
                    if holds and (entry.up_to is None or facts.nbytes <= entry.up_to):
                        return section, entry
        return None

    def sections(self, table: Sequence[Section], name: str) -> tuple[Section, ...]:
        """Return the sections of a table that are of this collective."""
        mine = tuple(section for section in table if section.operation == self.name)
        for section in mine:
            for entry in section.entries:
                if entry.algorithm not in self.names:
                    raise ValueError(
                        f"{name}: {section.where(entry)}: algorithm: expected one of {', '.join(self.names)}, got "
                        f"{entry.algorithm}"
                    )
        return mine
