# SPDX-License-Identifier: Apache-2.0
"""How a call is cut into words that need no signal (:mod:`tdcoll.primitives.ll`,
:mod:`tdcoll.primitives.lamport`). The functions are pure, as in :mod:`.plan`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tdcoll.calls.plan import MOST_EPOCHS, Facts, Plan, most_warps, needs_stores
from tdcoll.calls.tuning import Entry

LL_BLOCK = 128
"""128-bit words that one LL program moves: one for each thread of 4 warps."""

LL_MOST_WORDS = 1024
"""The most 128-bit words that one LL program moves, because each word of a thread is a separate
loop in the code."""

LL_WORD_BYTES = 12
"""Data of such a word, which the LL protocol sends; the rest is its flag."""

LAMPORT_WORD_BYTES = 16
"""Data of a word that announces itself."""

REDUCING_BLOCKS = 128
"""Blocks of words that are reduced: about one for each SM."""

_REDUCED_BYTES = 1 << 30
"""Kernels count the bytes of words in 32 bits, and go somewhat beyond the last."""


@dataclass(frozen=True)
class Payload:
    """The bytes from which the chunks of a call are cut.

    Attributes:
        nbytes: that they cover together.
        width: bytes of data in a word that needs no signal, where chunks are of such words.
        blocks: thread blocks per chunk of words, or 0 if blocks loop over chunks.
        signals: that another chunk has.
    """

    nbytes: int
    width: int = LL_WORD_BYTES
    blocks: int = 1
    signals: int = 1


def needs_words(facts: Facts) -> str | None:
    """Return why a call cannot use LL, or None if it can."""
    problem = needs_stores(facts)
    if problem is not None:
        return problem
    limit = f"at most {facts.ll_bytes} bytes per rank"
    if facts.nbytes <= facts.ll_bytes:
        if (
            _fewest_words(Payload(facts.nbytes, blocks=facts.topology.world_size), facts.max_blocks)
            <= LL_MOST_WORDS
        ):
            return None
        limit = f"more than {facts.max_blocks} thread blocks"
    return f"needs {limit}; got {facts.nbytes} bytes on "


def per_chunk(facts: Facts, plan: Plan) -> int:
    """Thread blocks of a reduction by words: one for each block of words, or as many as the context
    allows."""
    return min(plan.chunks, facts.max_blocks - 1)


def words_of(nbytes: int, width: int = LL_WORD_BYTES) -> int:
    """Words that carry so many bytes; none is carried by one."""
    return max(1, -(-nbytes // width))


def power(number: int) -> int:
    """The least power of two of at least ``number``, which is positive."""
    return 1 << (number - 1).bit_length()


def _fewest_words(payload: Payload, max_blocks: int) -> int:
    """Words of each chunk, so that there are no more thread blocks than the context may have."""
    blocks = max(1, (max_blocks - 1) // payload.blocks - 1)
    return power(-(-words_of(payload.nbytes, payload.width) // blocks))


def cut_words(
    facts: Facts,
    entry: Entry,
    algorithm: str,
    payload: Payload | None = None,
    usual: int = LL_BLOCK,
) -> Plan:
    """Blocks of words that need no signal.

    Args:
        payload: what they are cut from; None: a segment, a program for each block and rank.
        usual: words of a block.
    """
    payload = payload or Payload(facts.nbytes, blocks=facts.topology.world_size)
    fewest = _fewest_words(payload, facts.max_blocks) if payload.blocks else 1
    words = words_of(payload.nbytes, payload.width)
    if entry.chunk is not None:
        # at most so much
        block = max(32, min(LL_MOST_WORDS, power(entry.chunk // payload.width + 1) // 2))
    elif entry.chunks is not None:
        block = min(LL_MOST_WORDS, max(LL_BLOCK, power(-(-words // entry.chunks))))
    else:
        # The interpreter takes as long for a block of few words as for one of many.
        block = LL_MOST_WORDS if facts.simulated else usual
    block = max(block, fewest)
    # Threads beyond a program's words would send them again. Threads with several words would wait
    # for them in turn.
    warps = max(
        1, min(entry.num_warps or (8 if payload.blocks else 16), most_warps(facts), block // 32)
    )
    return Plan(algorithm, -(-words // block), payload.width * block, warps)


@dataclass(frozen=True)
class Words:
    """How a reduction by words is cut. They use the Lamport protocol where the context has memory
    for it, and else LL. Thread blocks take several blocks of words where there are too many.

    Attributes:
        shots: 1 if a rank sends a whole segment to each other; 2 if a part to each, and then the
            sum of its own to all.
    """

    name: str
    shots: int

    def _parts(self, facts: Facts) -> int:
        return 1 if self.shots == 1 else facts.topology.world_size

    def _words(self, facts: Facts, width: int) -> int:
        return -(-words_of(facts.nbytes, width) // self._parts(facts))

    def _whole(self, facts: Facts) -> Payload:
        """Return what a call of one epoch is cut from."""
        width = LAMPORT_WORD_BYTES
        if (
            width * self.shots * self._words(facts, width)
            > -(-facts.lamport_bytes // width) * width
        ):
            width = LL_WORD_BYTES
        return Payload(width * self._words(facts, width), width, blocks=0)

    def _problem(self, facts: Facts) -> str | None:
        """Return why a call of one epoch can't use words, or None if it can."""
        if facts.itemsize > 4:
            return f"needs elements of at most 4 bytes; got elements of {facts.itemsize} bytes on "
        problem = needs_stores(facts)
        if problem is not None:
            return problem
        if facts.nbytes >= _REDUCED_BYTES:
            return f"needs less than {_REDUCED_BYTES} bytes; got {facts.nbytes} bytes on "
        announced = self._whole(facts).width == LAMPORT_WORD_BYTES
        if announced or self.shots * self._words(facts, LL_WORD_BYTES) <= words_of(facts.ll_bytes):
            return None
        return f"needs fewer bytes, or a context with more lamport_bytes or flagged_bytes; got {facts.nbytes} bytes on "

    def epoch(self, facts: Facts) -> int:
        """Return the bytes of a segment in each epoch.

        A call of two shots that fits into no words at once takes as few epochs of Lamport words as
        possible, of equal size, but for the last. Instead of more than :data:`MOST_EPOCHS` it has
        one, which :meth:`supports` refuses.
        """
        width = LAMPORT_WORD_BYTES
        nbytes = facts.nbytes
        room = min(
            width * self._parts(facts) * (-(-facts.lamport_bytes // width) // 2),
            _REDUCED_BYTES - width,
        )
        if self.shots == 1 or not 0 < nbytes <= MOST_EPOCHS * room or self._problem(facts) is None:
            return nbytes
        epochs = -(-nbytes // room)
        return -(-nbytes // (width * epochs)) * width

    def payload(self, facts: Facts) -> Payload:
        """Return the data of the first epoch, which is cut into blocks of words."""
        return self._whole(replace(facts, nbytes=self.epoch(facts)))

    def supports(self, facts: Facts) -> str | None:
        """Return why a call doesn't support it, or None if it does."""
        return self._problem(replace(facts, nbytes=self.epoch(facts)))

    def cut(self, facts: Facts, entry: Entry) -> Plan:
        """Return the plan of the first epoch: a word for each thread, in about
        :data:`REDUCING_BLOCKS` blocks, and then in larger ones, of up to 16 warps."""
        payload = self.payload(facts)
        usual = max(
            64, min(512, power(-(-words_of(payload.nbytes, payload.width) // REDUCING_BLOCKS)))
        )
        return cut_words(facts, entry, self.name, payload, usual)
