# SPDX-License-Identifier: Apache-2.0
"""Patterns of communication in a kernel's PTX: what stands between two accesses on which a protocol
relies, on every path.

A pattern is ``(origin, barriers..., goal)``, such as ``("st.global", "bar.sync",
"st.release.sys.global.b64")``: the goal follows the origin on some path, and only these barriers
stand between them. :mod:`memory_model.communication` makes litmus tests of patterns. What else
stands between, such as fences, is left out, so a test assumes less than there is. Barriers that
come again aren't repeated.

Data is accessed by any number of bits, which makes no difference to its order. The mnemonic of its
accesses therefore has no type.
"""

from __future__ import annotations

import re

from ptx_order import blocks_of

ROLES = {
    "stores released": ("store", "release"),
    "stores put": ("store", "put"),
    "loads after a wait": ("wait", "load"),
    "loads after a meeting": ("meeting", "load"),
    "stores after a wait": ("wait", "store"),
    "releases after a wait": ("wait", "release"),
    "releases after loads": ("load", "release"),
    "releases after words": ("flagged", "release"),
}
"""The kinds of origin and goal, as :mod:`ptx_order` has them, by the name of the pattern."""

_POLLED = re.compile(r"POLL:.*?\b(ld\.[\w.:]+)", re.DOTALL)
_MNEMONIC = {
    "barrier": re.compile(r"\b(?:bar|barrier)\.(?!\w*warp)[\w.]+"),
    "release": re.compile(r"\b(?:st|atom|red)\.[\w.]*(?:release|acq_rel)[\w.]*"),
    "store": re.compile(r"\bst\.(?:global|relaxed)[\w.:]*"),
    "load": re.compile(r"\bld\.global[\w.:]*"),
    "meeting": re.compile(r"\bld\.acquire\.gpu[\w.]*"),
}
_TYPE = re.compile(r"(?:\.(?:L\w+::\w+|v\d|[busf]\d+))+$")


def _mnemonic(kind: str, text: str) -> str:
    """Return the instruction of this kind in the text of an event."""
    if kind == "put":
        return "put"
    if kind in ("wait", "flagged"):
        match = _POLLED.search(text)
        assert match, text
        return match[1]
    match = _MNEMONIC[kind].search(text)
    assert match, text
    found = match[0]
    is_word = ".relaxed." in found
    return _TYPE.sub("", found) if kind in ("store", "load") and not is_word else found


def patterns(ptx: str) -> dict[str, list[list[str]]]:
    """Return the different patterns of each role; none of a role that the kernel doesn't have."""
    found = {}
    for name, (origin, goal) in ROLES.items():
        different = sorted(_between(ptx, origin, goal))
        if different:
            found[name] = [list(pattern) for pattern in different]
    words = _words(ptx)
    if words:
        found["words"] = words
    return found


def _words(ptx: str) -> list[list[str]]:
    """Return the accesses of words that hold their own flag or announce themselves: stores first."""
    stores = set()
    loads = set()
    for block in blocks_of(ptx).values():
        for kinds, text in zip(block.events, block.accesses, strict=True):
            if "flagged" in kinds:
                loads.add(_mnemonic("flagged", text))
            elif "store" in kinds and ".relaxed." in _mnemonic("store", text):
                stores.add(_mnemonic("store", text))
    return [sorted(stores), sorted(loads)] if loads else []


def _between(ptx: str, origin: str, goal: str) -> set[tuple[str, ...]]:
    """Return the patterns from an event of kind ``origin`` to the next one of kind ``goal``."""
    blocks = blocks_of(ptx)
    found = set()
    pending: list[tuple[str, int, tuple[str, ...]]] = []
    for label, block in blocks.items():
        for place, (kinds, text) in enumerate(zip(block.events, block.accesses, strict=True)):
            if origin in kinds:
                pending.append((label, place + 1, (_mnemonic(origin, text),)))
    seen = set(pending)
    while pending:
        label, first, pattern = pending.pop()
        block = blocks[label]
        ended = False
        for kinds, text in list(zip(block.events, block.accesses, strict=True))[first:]:
            if goal in kinds:
                found.add((*pattern, _mnemonic(goal, text)))
                ended = True
                break
            if "barrier" in kinds:
                barrier = _mnemonic("barrier", text)
                if barrier not in pattern:
                    pattern = (*pattern, barrier)
        if ended:
            continue
        for after in block.following:
            state = (after, 0, pattern)
            if state not in seen:
                seen.add(state)
                pending.append(state)
    return found
