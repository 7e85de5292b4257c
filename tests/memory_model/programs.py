# SPDX-License-Identifier: Apache-2.0
"""Programs for :mod:`axioms`, written as PTX: ``program({T0: ["st.global.b32 [x], 1", ...]})``.

A line is an instruction with the names of cells in place of addresses:

- ``st.relaxed.sys.global.b32 [x], 1``; ``r0 = ld.acquire.sys.global.b32 [x]``;
- ``r0 = atom.acq_rel.gpu.global.add.u32 [x], 1``, or ``red``;
- ``bar.sync 0``, ``barrier.cta.red.and.pred``: the n-th barrier of each thread of a block is one;
- ``fence.acq_rel.sys``, ``fence.sc.gpu``, ``membar.sys``;
- anything else, such as ``launch ends``, is an operation that touches no memory.

A vector accesses the cells ``x.0``, ``x.1`` and so on, one by one (8.2.4). So does a word of 128
bits, since the model has scalars of up to 64 bits; if :data:`WHOLE_WORDS` is assumed, it accesses
its two halves as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from memory_model.axioms import (
    ATOMIC,
    BARRIER,
    FENCE,
    OTHER,
    READ,
    REDUCTION,
    SCOPES,
    STRONG,
    WRITE,
    Event,
    Execution,
    Outcome,
    Program,
    Thread,
    execution,
)

KINDS = {"ld": READ, "st": WRITE, "atom": ATOMIC, "red": REDUCTION}
"""The kinds of memory operations."""

_LINE = re.compile(r"(?:(?P<name>\w+) = )?(?P<mnemonic>[\w.:]+)(?P<operands>.*)")
_OPERANDS = re.compile(r"\s*\[(?P<cell>[\w.]+)\](?:,\s*(?P<value>\d+))?")


def order_of(mnemonic: str) -> tuple[str, str]:
    """Return ``(order, scope)`` of a memory operation or a fence."""
    words = mnemonic.split(".")
    scope = next((word for word in words if word in SCOPES), "gpu")
    if "gl" in words:
        scope = "gpu"
    if "volatile" in words:
        return "relaxed", "sys"  # 8.4.2
    order = next((word for word in words if word in STRONG), "")
    if words[0] == "membar":
        return "sc", scope
    if words[0] == "fence":
        return order or "acq_rel", scope
    if words[0] in ("atom", "red"):
        return order or "relaxed", scope
    return order or "weak", scope


def _parts(mnemonic: str, cell: str, whole_words: bool) -> list[tuple[str, ...]]:
    """Return the cells of each operation of an access."""
    words = mnemonic.split(".")
    if "b128" in words:
        halves = (f"{cell}.0", f"{cell}.1")
        return [halves] if whole_words else [(half,) for half in halves]
    count = next((int(word[1:]) for word in words if re.fullmatch(r"v\d", word)), 1)
    return [(cell,)] if count == 1 else [(f"{cell}.{part}",) for part in range(count)]


@dataclass(frozen=True)
class Named:
    """A program whose reads have names.

    Attributes:
        reads: the read operations of each name, one for each part of a word.
    """

    program: Program
    reads: dict[str, list[Event]]

    def outcome(self, values: dict[str, int]) -> Outcome:
        """Return the outcome in which reads take these values: ``{"r0": 1, "r1.0": 0}``; ``r1.0``
        is the part of a word whose cell ends so."""
        found: Outcome = {}
        for name, value in values.items():
            register, _, part = name.partition(".")
            for event in self.reads[register]:
                for cell in event.cells:
                    if not part or cell.endswith(f".{part}"):
                        found[event, cell] = value
        return found

    def shows(self, values: dict[str, int]) -> Execution | None:
        """Return an execution in which reads take these values; None if the model forbids it."""
        return execution(self.program, self.outcome(values))


def program(
    threads: dict[Thread, Sequence[str]],
    *,
    whole_words: bool = False,
    synchronizes: Sequence[tuple[str, str]] = (),
    depends: Sequence[tuple[str, str]] = (),
) -> Named:
    """Return the program of these threads.

    Args:
        whole_words: a word of 128 bits is accessed as a whole, which the model doesn't say.
        synchronizes: pairs of operations, each by its text, that synchronize by other means.
        depends: pairs ``(name of a read, text of a write)`` of a dependency.
    """
    events: list[Event] = []
    reads: dict[str, list[Event]] = {}
    by_text: dict[str, Event] = {}
    for thread, lines in threads.items():
        barriers = 0
        for place, line in enumerate(lines):
            match = _LINE.fullmatch(line)
            assert match, line
            name, mnemonic, operands = match["name"], match["mnemonic"], match["operands"]
            operation = mnemonic.split(".")[0]
            order, scope = order_of(mnemonic)
            if operation in ("bar", "barrier"):
                barriers += 1
                made = [Event(line, thread, place, BARRIER, barrier=barriers)]
            elif operation in ("fence", "membar"):
                made = [Event(line, thread, place, FENCE, order=order, scope=scope)]
            elif operation in KINDS:
                access = _OPERANDS.match(operands)
                assert access, line
                kind = KINDS[operation]
                value = int(access["value"] or 0)
                made = [
                    Event(line, thread, place, kind, cells, value, order, scope)
                    for cells in _parts(mnemonic, access["cell"], whole_words)
                ]
            else:
                made = [Event(line, thread, place, OTHER)]
            events += made
            by_text.setdefault(line, made[0])
            if name:
                reads.setdefault(name, []).extend(made)
    return Named(
        Program(
            events,
            [(by_text[one], by_text[other]) for one, other in synchronizes],
            [(reads[one][0], by_text[other]) for one, other in depends],
        ),
        reads,
    )
