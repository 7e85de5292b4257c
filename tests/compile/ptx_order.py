# SPDX-License-Identifier: Apache-2.0
"""What a protocol assumes of the order of instructions, looked for in PTX along every path of a kernel.

The simulator runs a program as one thread and its loads in order, so it cannot see a barrier of the block that is
missing, nor a wait that does not acquire. Each inline asm is one event: what the device language and Triton emit for an
access is one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

KINDS = {  # the first that occurs in an instruction, or in an inline asm, is its kind
    "poll": r"\bbra POLL\b",
    "barrier": r"\bbar\.sync|\bbarrier\.cta",
    "release": r"\bst\.release\.",
    "add": r"\b(atom|red)\.\S*\badd\.[us]64",
    "control": r"\bld\.relaxed\.gpu\.global\.b64",
    "store": r"\bst\.global\.",
    "load": r"\bld\.global\.",
}
MEMORY = r"\b(?:(?:ld|st|atom|red)\.(?!param|shared)|cp\.|mbarrier\.|call\b)"  # of any kind, and calls that may
EARLY = r"\bgriddepcontrol\.wait; griddepcontrol\.launch_dependents;"
WAIT = r"\bld\.acquire\.sys\.global\.(b64 word|b32 half)"  # of a signal, or of a word
# Of a word that holds its data, and orders nothing else.
FLAGGED = r"\bld\.(volatile\.global\.b128 wide|relaxed\.sys\.global\.v4\.b32)"
RULES = (  # from, to, and what it means if there is a path without a barrier
    ("store", "release", "stores are released without a barrier, by a thread that need not have made them"),
    ("control", "add", "the epoch goes up before all threads have read it"),
    ("wait", "load", "loads follow a wait without a barrier, in threads that need not have waited"),
)

Block = tuple[list[str], list[str]]
"""Kinds of events in order, and the labels of the blocks that may follow."""


def _instructions(ptx: str) -> Iterator[str]:
    """Instructions and labels of the kernel's body; an inline asm is one."""
    body = ptx[ptx.index(".entry") :]
    body = body[: body.index("// -- End function")]  # what follows are functions that it calls
    asm: list[str] | None = None
    for line in body.splitlines():
        if "// begin inline asm" in line:
            asm = []
        elif "// end inline asm" in line:
            yield "asm " + "\n".join(asm or [])
            asm = None
        elif asm is not None:
            asm.append(line)
        elif text := line.split("//")[0].strip():
            yield text


def _blocks(ptx: str) -> dict[str, Block]:
    """The kernel's basic blocks by label."""
    blocks: dict[str, Block] = {}
    events, following, label, count = [], [], "begin", 0
    for text in _instructions(ptx):
        begins, branch = re.match(r"(\$L__BB\w+):", text), re.search(r"\bbra(?:\.uni)?\s+(\$L__BB\w+);", text)
        if begins or branch:
            count += 1
            after = begins[1] if begins else f"after {count}"
            if branch:
                following.append(branch[1])
            if begins or text.startswith("@"):
                following.append(after)
            blocks[label] = (events, following)
            events, following, label = [], [], after
        elif re.match(r"(ret|exit);", text):
            blocks[label] = (events, [])
            count += 1
            events, following, label = [], [], f"after {count}"
        else:
            kind = next((kind for kind, pattern in KINDS.items() if re.search(pattern, text)), None)
            if kind == "poll":
                kind = "wait" if re.search(WAIT, text) else "flagged" if re.search(FLAGGED, text) else "poll"
            if kind is not None:
                events.append(kind)
    blocks[label] = (events, following)
    return blocks


def _reaches(blocks: dict[str, Block], label: str, place: int, wanted: str) -> bool:
    """Whether an event ``wanted`` follows event ``place`` of a block, on some path without a barrier."""
    pending, seen = [(label, place + 1)], set()
    while pending:
        here, first = pending.pop()
        events, following = blocks[here]
        for kind in events[first:]:
            if kind == wanted:
                return True
            if kind == "barrier":
                break
        else:
            pending += [(after, 0) for after in following if after not in seen]
            seen.update(following)
    return False


def early(ptx: str) -> bool | None:
    """Whether a kernel waits for the launch before it ahead of every access to memory, and then lets the next launch
    begin; None if it does not wait."""
    if "griddepcontrol" not in ptx:
        return None
    for text in _instructions(ptx):
        if re.search(EARLY, text):
            return True
        if re.search(MEMORY, text) or re.search(r"\bbra\b|^\$L__BB", text):  # nor on a path of its own
            return False
    return False


def count(ptx: str) -> dict[str, int]:
    """How often each kind of event stands in the kernel."""
    events = [kind for kinds, _ in _blocks(ptx).values() for kind in kinds]
    return {kind: events.count(kind) for kind in (*KINDS, "wait", "flagged")}


def problems(ptx: str) -> list[str]:
    """What is not in order; empty: nothing."""
    blocks = _blocks(ptx)
    found = ["a wait does not acquire"] if count(ptx)["poll"] else []
    for origin, wanted, meaning in RULES:
        if any(
            kind == origin and _reaches(blocks, label, place, wanted)
            for label, (events, _) in blocks.items()
            for place, kind in enumerate(events)
        ):
            found.append(meaning)
    return found
