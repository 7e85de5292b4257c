# SPDX-License-Identifier: Apache-2.0
"""Block barriers in PTX that only some threads of a block may reach."""

from __future__ import annotations

import re

from ptx_blocks import Block, flows_of
from ptx_order import blocks_of

DIVERGENT = "a barrier stands in a branch that only some threads of the block may take"
BARRIER = re.compile(r"\bbar\.sync\b|\bbarrier\.cta\b")
BRANCH = re.compile(r"@!?(%p\d+) bra\b|brx\.idx\S*\s+(%r\d+)")


def _after(flows: list[tuple[list[str], list[str], bool]], divergent: set[str]) -> set[str]:
    """Registers that are divergent after some instructions, given those that are before."""
    divergent = set(divergent)
    for written, read, always in flows:
        if always or not divergent.isdisjoint(read):
            divergent.update(written)
        else:
            divergent.difference_update(written)
    return divergent


def _met_again(blocks: dict[str, Block], places: dict[str, int]) -> dict[str, int]:
    """By label, the blocks that every path from there goes through, as the sum of their places; the
    block is one."""
    through = dict.fromkeys(blocks, (1 << len(blocks)) - 1)
    changed = True
    while changed:
        changed = False
        for label in reversed(blocks):
            after = -1 if blocks[label].following else 0
            for following in blocks[label].following:
                after &= through[following]
            if (now := places[label] | after) != through[label]:
                through[label], changed = now, True
    return through


def _decided(
    blocks: dict[str, Block], places: dict[str, int], through: int, label: str
) -> set[str]:
    """The blocks that a branch at the end of ``label`` decides about: between it and where its
    paths meet again."""
    met = through & ~places[label]
    pending, found = list(blocks[label].following), set()
    while pending:
        here = pending.pop()
        if here not in found and not places[here] & met:
            found.add(here)
            pending += blocks[here].following
    return found


def divergence(ptx: str) -> list[str]:
    """Look for block barriers that only some threads of a block reach; empty: none.

    A value is *divergent* if the threads of a block may have different ones. It was made of a
    thread's number, loaded from a divergent address, or loaded while others may store there, as in
    a polling loop. A barrier that makes the threads agree (``barrier.red``) returns a value that
    isn't divergent. No barrier may stand between a divergent branch and the place where all paths
    from that branch meet again.
    """
    blocks = blocks_of(ptx)
    flows = {
        label: [flows_of(text) for text in block.texts if "%" in text]
        for label, block in blocks.items()
    }
    places = {label: 1 << place for place, label in enumerate(blocks)}
    through = _met_again(blocks, places)
    begin: dict[str, set[str]] = {label: set() for label in blocks}
    decided: set[str] = set()
    pending = list(reversed(blocks))
    while pending:
        label = pending.pop()
        divergent = _after(flows[label], begin[label])
        reached = dict.fromkeys(blocks[label].following, divergent)
        branch = BRANCH.search(blocks[label].texts[-1]) if blocks[label].texts else None
        if branch and (branch[1] or branch[2]) in divergent:
            between = _decided(blocks, places, through[label], label)
            decided |= between
            # Where paths meet again, what they have written differs by the path that a thread took.
            differ = {name for here in between for written, _, _ in flows[here] for name in written}
            for here in between:
                for following in set(blocks[here].following) - between:
                    reached[following] = reached.get(following, set()) | differ
        for following, more in reached.items():
            if not more <= begin[following]:
                begin[following] |= more
                pending.append(following)
    found = any(BARRIER.search(text) for label in decided for text in blocks[label].texts)
    return [DIVERGENT] if found else []
