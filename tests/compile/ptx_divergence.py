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


Flows = dict[str, list[tuple[list[str], list[str], bool]]]
"""By label, for each instruction of a block: registers that it writes, those that it reads, and
whether its result is divergent in any case."""

TID = re.compile(r"mov\.[bsu]32\s+(%r\d+), %tid\.x;")
LANE = re.compile(r"mov\.[bsu]32\s+(%r\d+), %laneid;")
SHIFT = re.compile(r"shl\.b32\s+(%r\d+), (%r\d+), (\d+);")
MASK = re.compile(r"and\.b32\s+(%r\d+), (%r\d+), (\d+);")
LANE_BITS = 5
OVER_WARP = "redux.sync"


def _lane_values(blocks: dict[str, Block], flows: Flows, divergent: set[str]) -> set[str]:
    """Divergent registers whose values depend on the thread's number in its warp alone, so that all
    warps have the same ones.

    They are made of the low bits of a thread's number. Triton 3.9 lets every warp add up what all
    warps have left in shared memory: each lane loads a part, and ``redux.sync`` adds the parts of
    the lanes.
    """
    texts = [text for block in blocks.values() for text in block.texts if "%" in text]
    written = [name for of_block in flows.values() for names, _, _ in of_block for name in names]
    repeated = {name for name in written if written.count(name) > 1}
    shifts: dict[str, int] = {}
    """How far the thread's number is shifted to the left, by register. One that is written more
    than once never counts."""
    found: set[str] = set()
    for text, (names, read, always) in zip(
        texts, (flow for of_block in flows.values() for flow in of_block), strict=True
    ):
        if not repeated.isdisjoint(names):
            continue
        made: list[str] = []
        tid = TID.search(text)
        lane = LANE.search(text)
        shift = SHIFT.search(text)
        mask = MASK.search(text)
        if tid:
            shifts[tid[1]] = 0
        elif lane:
            made = [lane[1]]
        elif shift and shift[2] in shifts:
            shifts[shift[1]] = shifts[shift[2]] + int(shift[3])
        elif mask and mask[2] in shifts:
            if int(mask[3]) >> (LANE_BITS + shifts[mask[2]]) == 0:
                made = [mask[1]]
        elif not always and OVER_WARP not in text:
            if all(name in found or name not in divergent for name in read):
                made = names
        found.update(name for name in made if name in divergent)
    return found


def _decided_by_threads(
    blocks: dict[str, Block], flows: Flows, places: dict[str, int], through: dict[str, int]
) -> tuple[set[str], set[str]]:
    """The blocks that divergent branches decide about, and all registers that are divergent
    somewhere."""
    begin: dict[str, set[str]] = {label: set() for label in blocks}
    decided: set[str] = set()
    ever: set[str] = set()
    pending = list(reversed(blocks))
    while pending:
        label = pending.pop()
        divergent = _after(flows[label], begin[label])
        for names, read, always in flows[label]:
            if always or not (begin[label] | divergent).isdisjoint(read):
                ever.update(names)
        reached = dict.fromkeys(blocks[label].following, divergent)
        branch = BRANCH.search(blocks[label].texts[-1]) if blocks[label].texts else None
        if branch and (branch[1] or branch[2]) in divergent:
            between = _decided(blocks, places, through[label], label)
            decided |= between
            # Where paths meet again, what they have written differs by the path that a thread took.
            differ = {name for here in between for written, _, _ in flows[here] for name in written}
            ever |= differ
            for here in between:
                for following in set(blocks[here].following) - between:
                    reached[following] = reached.get(following, set()) | differ
        for following, more in reached.items():
            if not more <= begin[following]:
                begin[following] |= more
                pending.append(following)
    return decided, ever


def divergence(ptx: str) -> list[str]:
    """Look for block barriers that only some threads of a block reach; empty: none.

    A value is *divergent* if the threads of a block may have different ones. It was made of a
    thread's number, loaded from a divergent address, or loaded while others may store there, as in
    a polling loop. A barrier that makes the threads agree (``barrier.red``) returns a value that
    isn't divergent, and so does a reduction over the lanes of each warp (``redux.sync``) if all
    warps have the same values. No barrier may stand between a divergent branch and the place where
    all paths from that branch meet again.
    """
    blocks = blocks_of(ptx)
    flows: Flows = {
        label: [flows_of(text) for text in block.texts if "%" in text]
        for label, block in blocks.items()
    }
    places = {label: 1 << place for place, label in enumerate(blocks)}
    through = _met_again(blocks, places)
    decided, ever = _decided_by_threads(blocks, flows, places, through)
    if decided and OVER_WARP in ptx:
        lanes = _lane_values(blocks, flows, ever)
        for label, block in blocks.items():
            texts = [text for text in block.texts if "%" in text]
            flows[label] = [
                (names, [name for name in read if name not in lanes], always)
                if OVER_WARP in text
                else (names, read, always)
                for text, (names, read, always) in zip(texts, flows[label], strict=True)
            ]
        decided, _ = _decided_by_threads(blocks, flows, places, through)
    found = any(BARRIER.search(text) for label in decided for text in blocks[label].texts)
    return [DIVERGENT] if found else []
