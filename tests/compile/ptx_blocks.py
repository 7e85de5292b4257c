# SPDX-License-Identifier: Apache-2.0
"""Basic blocks of PTX, and those that a kernel cannot reach because NVSHMEM must not use TMA (see
:mod:`ptx_order`)."""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple

TMA_POLICY = {(3, 7): 776, (3, 8): 776}
"""Offset of ``tma_policy`` in NVSHMEM's device state, in bytes, by NVSHMEM's version: that which
``device_host/nvshmem_types.h`` of the wheels 3.7.2 and 3.8.0 gives. Versions that are not here have
no such argument."""
_VERSION = re.compile(r"nvshmemi_device_lib_version_d\[12\] = \{(\d+), 0, 0, 0, (\d+)\b")
_STATE = re.compile(r"ld\.const\.[bsu]32\s+(%r\d+), \[nvshmemi_device_state_d\+(\d+)\];")
_MOVED = re.compile(r"mov\.[bsu]32\s+(%r\d+), (-?\d+|%r\d+);")
_COMPARED = re.compile(r"setp\.(eq|ne)\.[bsu]32\s+(%p\d+), (%r\d+), (-?\d+);")
_NEGATED = re.compile(r"not\.pred\s+(%p\d+), (%p\d+);")
_CONDITION = re.compile(r"@(!?)(%p\d+) bra(?:\.uni)?\s+\$L__BB")


SOURCES = re.compile(r"%(?:tid|laneid|warpid)\b")
AGREED = re.compile(r"\bbar(?:rier\.cta)?\.red\.")
# Loads at GPU scope are those of the epoch, which does not change before all threads have read it.
RACING = re.compile(
    r"\bld\.(?:acquire|relaxed\.sys|volatile)\b|\batom\.|\bbra POLL\b|\bactivemask\b"
)
NO_RESULT = re.compile(r"(?:@!?%\w+ )?(?:st|red|bra|bar|membar|fence|ret|exit|call|brx)\b")
REGISTER = re.compile(r"%[a-z]+\d+\b")
RESULTS = re.compile(r"(?:@!?%\w+\s+)?[a-z][\w.:]*\s+(\{[^}]*\}|[^,]+)")


class Block(NamedTuple):
    """A basic block: its instructions, its events in order, each a set of kinds, the labels that
    may follow, and the instruction of each event."""

    texts: list[str]
    events: list[frozenset[str]]
    following: list[str]
    accesses: list[str]


def without_tma(ptx: str, blocks: dict[str, Block]) -> dict[str, Block]:
    """Return the blocks that a kernel can reach if the word ``tma_policy`` of NVSHMEM's device
    state is 0."""
    version = _VERSION.search(ptx)
    offset = TMA_POLICY.get((int(version[1]), int(version[2]))) if version else None
    if offset is None:
        return blocks
    begin: dict[str, dict[str, int]] = {"begin": {}}
    """Registers and predicates with a known value at the beginning of a block that can be
    reached."""
    following: dict[str, list[str]] = {}
    pending = ["begin"]
    while pending:
        label = pending.pop()
        block = blocks[label]
        known = _known_after(block.texts, begin[label], offset)
        following[label] = block.following
        condition = _CONDITION.match(block.texts[-1]) if block.texts else None
        if condition and condition[2] in known:
            taken = known[condition[2]] != (condition[1] == "!")
            following[label] = block.following[:1] if taken else block.following[1:]
        for after in following[label]:
            before = begin.get(after)
            # Where paths meet, only what they agree on is known.
            both = known if before is None else dict(before.items() & known.items())
            if both != before:
                begin[after] = both
                pending.append(after)
    return {
        label: blocks[label]._replace(following=following[label])
        for label in blocks
        if label in following
    }


def _known_after(texts: list[str], known: dict[str, int], offset: int) -> dict[str, int]:
    """Return the registers and predicates with a known value after some instructions, if
    ``tma_policy`` is 0."""
    known = dict(known)
    for text in texts:
        if "%" not in text:
            continue
        value: int | None = None
        loaded, moved = _STATE.match(text), _MOVED.match(text)
        compared, negated = _COMPARED.match(text), _NEGATED.match(text)
        if loaded and int(loaded[2]) == offset:
            value = 0
        elif moved:
            value = known.get(moved[2]) if moved[2].startswith("%") else int(moved[2])
        elif compared and compared[3] in known:
            value = (known[compared[3]] == int(compared[4])) == (compared[1] == "eq")
        elif negated and negated[2] in known:
            value = not known[negated[2]]
        for register in flows_of(text)[0]:
            known.pop(register, None)
            if value is not None:
                known[register] = int(value)
    return known


@cache
def flows_of(text: str) -> tuple[list[str], list[str], bool]:
    """Registers that an instruction or inline asm writes and reads, and whether its result is
    divergent in any case."""
    lines = [line for line in re.split(r"[;\n]", text.removeprefix("asm ")) if line.strip()]
    written, read = [], []
    for line in lines:
        line = line.strip(" \t{}")
        names = REGISTER.findall(line)
        if names and not NO_RESULT.match(line) and (match := RESULTS.match(line)):
            results = REGISTER.findall(match[1])
            written += results
            read += [
                name
                for name in names
                if name not in results or names.count(name) > 1 or line.startswith("@")
            ]
        else:
            read += names
    if AGREED.search(text):
        read = []
    return written, read, bool(SOURCES.search(text) or RACING.search(text))
