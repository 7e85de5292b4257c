# SPDX-License-Identifier: Apache-2.0
"""The algorithm of a fused call, and how rows are cut: a pure function of facts that are the same
on every rank.

A :class:`~tdcoll.calls.plan.Plan` of a fused call has the number of pieces of a row (``chunks``),
the bytes of a piece (``chunk``, 16 times a power of two), and the warps of a thread block.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tdcoll.calls.explain import UNSUPPORTED, Explanation
from tdcoll.calls.plan import Facts, Plan, most_warps, needs_stores
from tdcoll.calls.spec import DEFAULT, REQUESTED
from tdcoll.calls.words import LAMPORT_WORD_BYTES as WORD
from tdcoll.calls.words import power

NAME = "all_reduce_rms_norm"

ONE_SHOT = "one_shot"
TWO_SHOT = "two_shot"
COMPOSED = "composed"
ALGORITHMS = ("auto", ONE_SHOT, TWO_SHOT, COMPOSED)

MOST_HIDDEN = 16384
"""Elements of a row, at most."""

_MOST_WORDS = 64
"""Words of a piece for each warp of a thread block, at most, because more do not fit into its
registers."""

_MOST_WARPS = 16
"""Warps of a thread block, at most. If a context shares the GPU, thread blocks that wait for peers
have fewer."""

_FEWEST_WORDS = 128
"""Words of a piece, at least, unless a row has fewer: one for each thread of four warps."""

_BUSY = 128
"""The most useful thread blocks of a step. H200s have 132 SMs, and one SM moves some 100 GB/s."""

_OF_TWO_RANKS = range(1 << 20, (8 << 20) + 1)
"""Bytes of a call between two ranks that is two-shot. Both send as many, but with two-shot a rank
adds the residual to half of the rows only. Two-shot and one-shot take 6.9 and 7.8 us for 1 MB on 2
H200s, 29.7 and 32.5 for 8 MB, but 4.5 and 4.0 for 128 KB, and 59.8 and 56.6 for 16 MB."""

_SAVED_BYTES = 300 << 10
"""A call is two-shot if that saves a rank more bytes than this, which take longer than a second
hop: about 1 us."""


@dataclass(frozen=True)
class NormRows:
    """The rows of a call, as the heuristic sees them."""

    rows: int
    hidden: int
    itemsize: int

    @property
    def words(self) -> int:
        """Words of a row."""
        return self.hidden * self.itemsize // WORD


def takes(hidden: int, itemsize: int) -> bool:
    """Return whether these kernels normalize rows of ``hidden`` elements of ``itemsize`` bytes."""
    return 0 < hidden <= MOST_HIDDEN and hidden * itemsize % 16 == 0


def _owned(rows: NormRows, world: int) -> int:
    """Return the most rows that a rank owns."""
    return -(-rows.rows // world)


def _room(rows: NormRows, algorithm: str, pieces: int, world: int) -> int:
    """Return the bytes of a segment of the inbox."""
    if algorithm == ONE_SHOT:
        return WORD * rows.rows * rows.words
    return WORD * _owned(rows, world) * (2 * rows.words + pieces)


def blocks_of(rows: NormRows, plan: Plan, world: int) -> int:
    """Return the number of thread blocks of the launch."""
    pieces = plan.chunks
    if plan.algorithm == ONE_SHOT:
        return rows.rows * (2 * pieces if pieces > 1 else 1)
    if plan.algorithm == TWO_SHOT:
        return _owned(rows, world) * pieces * (world + (pieces > 1))
    return rows.rows


def _problem(rows: NormRows, plan: Plan, facts: Facts) -> str | None:
    """Return why a call doesn't support a plan, as a sentence that begins with ``needs``; None if
    it does."""
    world = facts.topology.world_size
    if plan.algorithm == COMPOSED:
        return None  # its all-reduce has a plan of its own
    problem = needs_stores(facts)
    if problem is not None:
        return problem
    if plan.algorithm == TWO_SHOT and not 1 < world <= rows.rows:
        return f"needs at least 2 ranks and a row for each; got {rows.rows} rows on "
    room = _room(rows, plan.algorithm, plan.chunks, world)
    if room > -(-facts.lamport_bytes // WORD) * WORD:
        return f"needs lamport_bytes={room} or more in the context; got {facts.lamport_bytes} on "
    count = blocks_of(rows, plan, world)
    if count > facts.max_blocks:
        return f"needs {count} thread blocks and the context has {facts.max_blocks}; got "
    return None


def _cut(rows: NormRows, algorithm: str, facts: Facts) -> Plan:
    """Cut rows into the smallest pieces with which a step has no more thread blocks than are
    useful."""
    world = facts.topology.world_size
    stage = rows.rows if algorithm == ONE_SHOT else _owned(rows, world)
    whole = power(rows.words)
    block = min(whole, _FEWEST_WORDS)
    if algorithm == COMPOSED or facts.simulated:  # there, few large blocks cost the least
        block = whole
    while block < whole and stage * -(-rows.words // block) * (1 + (algorithm == ONE_SHOT)) > _BUSY:
        block *= 2
    # The kernel behind a composed call's all-reduce waits for no peer.
    warps = _MOST_WARPS if algorithm == COMPOSED else min(_MOST_WARPS, most_warps(facts))
    block = min(block, _MOST_WORDS * warps)
    plan = Plan(algorithm, -(-rows.words // block), WORD * block, max(1, min(warps, block // 32)))
    return replace(plan, blocks=blocks_of(rows, plan, world))


def choose(rows: NormRows, facts: Facts, algorithm: str | Plan = "auto") -> Plan:
    """Return the plan of a call.

    Args:
        facts: of the context; ``nbytes`` is ignored.
        algorithm: one of :data:`ALGORITHMS`; or, from tests, a plan, which is used as it is.
    """
    where = facts.topology.describe()
    if isinstance(algorithm, Plan):
        problem = _problem(rows, algorithm, facts)
        if problem is not None:
            raise ValueError(f"algorithm={algorithm} {problem}{where}")
        return replace(algorithm, blocks=blocks_of(rows, algorithm, facts.topology.world_size))
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm must be one of {', '.join(ALGORITHMS)}; got {algorithm!r}")
    if algorithm != "auto":
        plan = _cut(rows, algorithm, facts)
        problem = _problem(rows, plan, facts)
        if problem is not None:
            raise ValueError(f"algorithm={algorithm!r} {problem}{where}. Use algorithm='auto'.")
        return plan
    world = facts.topology.world_size
    nbytes = rows.rows * rows.hidden * rows.itemsize
    # two-shot sends 2 / world as many bytes as one-shot
    saved = (world - 1) * nbytes * (world - 2) // world
    two = nbytes in _OF_TWO_RANKS if world == 2 else saved > _SAVED_BYTES
    order = (TWO_SHOT, ONE_SHOT) if two else (ONE_SHOT, TWO_SHOT)
    plans = (_cut(rows, name, facts) for name in (*order, COMPOSED))
    return next(plan for plan in plans if _problem(rows, plan, facts) is None)


def explain_rows(rows: NormRows, facts: Facts, algorithm: str | Plan = "auto") -> Explanation:
    """Explain a call: its bytes are those of all rows, and its chunks are pieces of a row, unless
    it is composed."""
    group = facts.topology.describe()
    nbytes = rows.rows * rows.hidden * rows.itemsize
    problems = {
        name: _problem(rows, _cut(rows, name, facts), facts) for name in (ONE_SHOT, TWO_SHOT)
    }
    unsupported = {
        name: f"{problem}{group}" for name, problem in problems.items() if problem is not None
    }
    try:
        plan = choose(rows, facts, algorithm)
    except ValueError as error:
        if algorithm not in ALGORITHMS:
            raise
        return Explanation(
            NAME, nbytes, group, None, reason=UNSUPPORTED, why=str(error), unsupported=unsupported
        )
    reason = DEFAULT if algorithm == "auto" else REQUESTED
    refused = unsupported if (plan.algorithm, reason) == (COMPOSED, DEFAULT) else {}
    why = "; ".join(f"{name} {problem}" for name, problem in refused.items())
    made = Explanation(
        NAME, nbytes, group, plan.algorithm, reason=reason, why=why, unsupported=unsupported
    )
    if plan.algorithm == COMPOSED:  # its all-reduce has numbers of its own
        return made
    return replace(
        made, chunks=plan.chunks, chunk_bytes=plan.chunk, blocks=plan.blocks, warps=plan.num_warps
    )
