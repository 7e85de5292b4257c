# SPDX-License-Identifier: Apache-2.0
"""Say how a call is made, and why: :class:`Explanation`. Pure, see :mod:`.plan`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tdcoll.base.arguments import byte_text
from tdcoll.base.errors import ContextError
from tdcoll.calls.plan import Facts, Plan
from tdcoll.calls.spec import DEFAULT, TABLE, Collective, Decision
from tdcoll.calls.tuning import Section

UNSUPPORTED = "unsupported"


@dataclass(frozen=True)
class Explanation:
    """How a call is made, and why. ``str()`` is for people: :attr:`line`, and a line for each
    unsupported algorithm.

    Attributes:
        operation: the collective.
        nbytes: of a segment, which is what one rank sends to another; of all rows of a fused call,
            and of this rank's for a sparse all-reduce.
        group: the ranks, in words.
        algorithm: the one that is taken; None if the call is refused.
        chunks: pieces that a segment is cut into.
        chunk_bytes: bytes of a chunk; the last may be shorter.
        blocks: thread blocks of a launch on this rank.
        warps: of each thread block.
        epochs: launches that the call takes, one after the other.
        reason: ``"requested"``, ``"table"``, ``"default"`` or ``"unsupported"``.
        why: the reason in words.
        unsupported: the algorithms that don't support the call, each with the reason.
    """

    operation: str
    nbytes: int
    group: str
    algorithm: str | None
    chunks: int = 0
    chunk_bytes: int = 0
    blocks: int = 0
    warps: int = 0
    epochs: int = 1
    reason: str = DEFAULT
    why: str = ""
    unsupported: Mapping[str, str] = field(default_factory=dict)

    @property
    def line(self) -> str:
        """The call in one line."""
        call = f"{self.operation} of {byte_text(self.nbytes)} per rank on {self.group}"
        if self.algorithm is None:
            return f"{call}: refused ({self.why})"
        how = [self.algorithm]
        if self.blocks:
            how += [
                f"{_count(self.chunks, 'chunk')} of {byte_text(self.chunk_bytes)}",
                f"{_count(self.blocks, 'thread block')} of {_count(self.warps, 'warp')}",
                _count(self.epochs, "epoch"),
            ]
        return f"{call}: {', '.join(how)} ({self.reason}{self.why and f': {self.why}'})"

    def __str__(self) -> str:
        others = [f"  not {name}: {why}" for name, why in self.unsupported.items()]
        return "\n".join([self.line, *others])


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def explain_call(
    spec: Collective,
    facts: Facts,
    algorithm: str | Plan = "auto",
    sections: Sequence[Section] = (),
    table: str = "",
) -> Explanation:
    """Explain a call of a dense collective."""
    group = facts.topology.describe()
    problems = ((each.name, each.supports(facts)) for each in spec.algorithms)
    unsupported = {name: f"{problem}{group}" for name, problem in problems if problem is not None}
    try:
        decision, epochs = spec.decide_call(facts, algorithm, sections)
    except (ContextError, ValueError) as error:
        if isinstance(algorithm, Plan) or algorithm not in ("auto", *spec.names):
            raise
        why = str(error)
        return Explanation(
            spec.name,
            facts.nbytes,
            group,
            None,
            reason=UNSUPPORTED,
            why=why,
            unsupported=unsupported,
        )
    plan = decision.plan
    return Explanation(
        spec.name, facts.nbytes, group, plan.algorithm, plan.chunks, plan.chunk, plan.blocks, plan.num_warps,
        len(epochs), decision.reason, _why(decision, unsupported, table), unsupported,
    )  # fmt: skip


def _why(decision: Decision, unsupported: Mapping[str, str], table: str) -> str:
    """Return the reason of a decision in words."""
    if decision.reason not in (TABLE, DEFAULT):
        return ""
    if decision.found is None:
        return "no entry of the tuning table holds for such a call"
    section, entry = decision.found
    where = f"{table}, {section.where(entry)}"
    if decision.reason == TABLE:
        return where
    return f"{where} says {entry.algorithm}, which {unsupported[entry.algorithm]}"
