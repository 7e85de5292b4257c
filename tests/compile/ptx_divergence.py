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
EXCHANGE = re.compile(r"shfl\.sync\.bfly\.b32\s+(%r\d+), (%r\d+), (1|2|4|8|16), 31, -1;")
COMMUTES = re.compile(r"(?:add|min|max|and|or|xor)\.\w+\s+(%r\d+), (%r\d+), (%r\d+);")
ALL_LANES = 31
OVER_WARP = "redux.sync"


class _LaneBits:
    """Values that depend on some bits of a thread's lane alone, so that all warps have the same.

    They are made of the low bits of a thread's number. Triton lets every warp add up what all warps
    have left in shared memory: each lane loads a part, and the lanes' parts are added. Triton 3.9
    adds them by ``redux.sync``. Triton 3.8 exchanges them with the lane whose number differs in one
    bit, and adds both; the sum doesn't depend on that bit. A value that depends on no bit any more
    is the same in all threads.
    """

    def __init__(self, divergent: set[str], repeated: set[str]) -> None:
        self.bits: dict[str, int] = {}
        self._divergent = divergent
        self._repeated = repeated
        """Registers that are written more than once, which never count."""
        self._shifts: dict[str, int] = {}
        """How far the thread's number is shifted to the left, by register."""
        self._partners: dict[str, tuple[str, int]] = {}
        """The value that a value is of another lane, and the bit in which that lane differs."""

    def learn(self, text: str, names: list[str], read: list[str], always: bool) -> None:
        """Learn what an instruction makes."""
        if not self._repeated.isdisjoint(names):
            return
        tid = TID.search(text)
        lane = LANE.search(text)
        shift = SHIFT.search(text)
        mask = MASK.search(text)
        if tid:
            self._shifts[tid[1]] = 0
        elif lane:
            self.bits[lane[1]] = ALL_LANES
        elif shift and shift[2] in self._shifts:
            self._shifts[shift[1]] = self._shifts[shift[2]] + int(shift[3])
        elif mask and mask[2] in self._shifts:
            kept = int(mask[3]) >> self._shifts[mask[2]]
            if kept <= ALL_LANES:
                self.bits[mask[1]] = kept
        elif not always and all(name in self.bits or name not in self._divergent for name in read):
            self._combine(text, names, read)

    def _combine(self, text: str, names: list[str], read: list[str]) -> None:
        bits = 0
        for name in read:
            bits |= self.bits.get(name, 0)
        exchange = EXCHANGE.search(text)
        both = COMMUTES.search(text)
        if OVER_WARP in text:
            bits = 0
        elif exchange:
            self._partners[exchange[1]] = exchange[2], int(exchange[3])
        elif "shfl" in text:
            return
        elif both:
            for mine, theirs in ((both[2], both[3]), (both[3], both[2])):
                partner, bit = self._partners.get(theirs, ("", 0))
                if partner == mine:
                    bits &= ~bit
        for name in names:
            self.bits[name] = bits


def _alike(blocks: dict[str, Block], flows: Flows, divergent: set[str]) -> set[str]:
    """Registers that all threads have alike, although they are made of what differs between
    lanes."""
    written = [name for of_block in flows.values() for names, _, _ in of_block for name in names]
    lanes = _LaneBits(divergent, {name for name in written if written.count(name) > 1})
    for label, block in blocks.items():
        texts = [text for text in block.texts if "%" in text]
        for text, flow in zip(texts, flows[label], strict=True):
            lanes.learn(text, *flow)
    return {name for name, bits in lanes.bits.items() if bits == 0 and name in divergent}


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
    isn't divergent, and so does a reduction over the lanes of each warp if all warps have the same
    values (:class:`_LaneBits`). No barrier may stand between a divergent branch and the place where
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
    alike = _alike(blocks, flows, ever) if decided else set()
    if alike:
        for label, of_block in flows.items():
            flows[label] = [
                (names, [] if alike.issuperset(names) else read, always)
                for names, read, always in of_block
            ]
        decided, _ = _decided_by_threads(blocks, flows, places, through)
    found = any(BARRIER.search(text) for label in decided for text in blocks[label].texts)
    return [DIVERGENT] if found else []
