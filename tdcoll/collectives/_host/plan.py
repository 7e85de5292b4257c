# SPDX-License-Identifier: Apache-2.0
"""Which algorithm a call takes, and how it is cut: pure functions of facts that are the same on every rank.

Two ranks that choose differently wait for signals that nobody sends. So a choice may look at :class:`Facts`, at the
caller's wish and at the sections of a tuning table, which the ranks have compared (:mod:`tdcoll.tuning`), and at
nothing else: not at the rank, the clock, the device or an environment variable, and not at whether this rank captures a
CUDA graph, because another may replay one while this rank calls eagerly.

Three things are kept apart. A :class:`Rule` *admits* a call or says why it cannot have the algorithm. A table says what
was *measured* to be the fastest. A policy's *seed* says what to take where nothing was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tdcoll.limits import CHANNELS, MAX_PROGRAMS, SHARED_WARPS
from tdcoll.tuning import HANDED_OVER, WARPS, Entry, Section

if TYPE_CHECKING:
    from tdcoll.runtime.topology import Topology

__all__ = [
    *("CHUNK_ALIGNMENT", "LAMPORT_WORD_BYTES", "LL_BLOCK", "LL_MOST_WORDS", "LL_WORD_BYTES", "MOST_EPOCHS"),
    *("TARGET_CHUNK_BYTES", "Extent", "Facts", "Plan", "Policy", "Rule", "check_warps", "cut_chunks"),
    *("cut_reduced_words", "cut_words", "epoch_of_words", "is_word_chunk", "most_channels", "most_warps"),
    *("needs_puts", "needs_reduced_words", "needs_stores", "needs_words", "reduced_words", "warps", "words_of"),
]

CHUNK_ALIGNMENT = 128
"""Bytes. Chunks start at multiples of it, so that full 128-byte lines travel."""

TARGET_CHUNK_BYTES = 8 << 10
"""Chunks of about this size keep one block's copy short beside the crossing; those of large messages are larger."""

USUAL_CHANNELS = 64, 32
"""Chunks are made larger before there are more of them than this, in one node and between nodes."""

LARGE_CHUNKS = 8, 32
"""Times :data:`TARGET_CHUNK_BYTES`, likewise: no larger while there are signals for more chunks, so that a large
message is used, or forwarded, while it arrives. A put between nodes costs more than one inside."""

MANY_WARPS_FROM = 128 << 10
"""Bytes. Larger chunks are moved by 16 warps, smaller ones by 8, if the message is not :data:`LARGE`."""

LARGE = 8 << 20
"""Bytes per rank. Messages from here on are moved by 16 warps."""

LL_BLOCK = 128
"""128-bit words that one LL program moves: one for each thread of 4 warps."""

LL_MOST_WORDS = 1024
"""The same, at most: each word of a thread is a loop of its own in the code."""

LL_WORD_BYTES = 12
"""Data of such a word; the rest is its flag."""

LAMPORT_WORD_BYTES = 16
"""Data of a word that announces itself."""

MOST_EPOCHS = 1024
"""The most epochs of a call. One that needs more has a context that is far too small for it."""

REDUCING_PROGRAMS = 128
"""Blocks of words that are reduced: about one for each SM."""

_REDUCED_BYTES = 1 << 30
"""Kernels count the bytes that go by words in 32 bits, and go somewhat beyond the last."""


@dataclass(frozen=True)
class Plan:
    """How one call is launched.

    Attributes:
        algorithm: one of its operation's, not ``"auto"``; ``"nccl"``: torch.distributed does it.
        channels: chunks that each segment is cut into.
        chunk: bytes of a chunk; the last may be shorter.
        num_warps: warps of each program.
    """

    algorithm: str
    channels: int
    chunk: int
    num_warps: int


@dataclass(frozen=True)
class Facts:
    """What a choice may look at; the same on every rank of the group, but for the rank in ``topology``.

    Attributes:
        nbytes: of one segment, which is what one rank sends to another.
        topology: the group.
        ll_bytes: the most that the context can send by LL; -1 if its ranks cannot store to each other's memory inside
            each node.
        stores: whether the ranks of a node can store to each other's memory.
        puts: whether the job has NVSHMEM's puts.
        lamport_bytes: the most that the context can send by words which announce themselves; 0 also where the dtype has
            values that no such word can be told from.
        channels: the most chunks that the context has signals for.
        max_programs: the most programs of a launch on the context.
        itemsize: bytes of an element; 1 where bytes are moved as they are.
        in_place: whether peers write to the caller's buffer, as in :func:`tdcoll.all_gather_in_place`. Passing
            ``out=input`` doesn't set this, because one rank may do so while another doesn't.
        symmetric: of a reduction: whether peers may read or write the caller's tensor.
        hand_over: whether torch.distributed could take it.
        simulated: whether the kernels run in the simulator, where each block operation of a program costs the same,
            however large the block is.
    """

    nbytes: int
    topology: Topology
    ll_bytes: int = -1
    stores: bool = False
    puts: bool = True
    lamport_bytes: int = 0
    channels: int = CHANNELS
    max_programs: int = MAX_PROGRAMS
    itemsize: int = 1
    in_place: bool = False
    symmetric: bool = False
    hand_over: bool = False
    simulated: bool = False


@dataclass(frozen=True)
class Extent:
    """What the chunks of a call are cut from.

    Attributes:
        nbytes: that they cover together.
        width: bytes of data in a word that needs no signal, where chunks are of such words.
        programs: that a chunk of words takes; 0: programs take several chunks where there are too many.
        signals: that another chunk has.
    """

    nbytes: int
    width: int = LL_WORD_BYTES
    programs: int = 1
    signals: int = 1


@dataclass(frozen=True)
class Rule:
    """An algorithm as far as it is chosen.

    Attributes:
        name: what callers and tables call it.
        admit: why such a call cannot have it, as a sentence that begins with ``needs``; None if it can.
        cut: the plan of such a call, with what an entry of a table says.
        words: where a chunk is a block of words that need no signal, bytes of data that such a word may carry.
        extent: what the chunks of a call are cut from.
        epoch: with ``words``: bytes of a segment in each epoch of a call; the last may be shorter. Where a call has
            several epochs, ``cut`` and ``extent`` are of the first.
    """

    name: str
    admit: Callable[[Facts], str | None]
    cut: Callable[[Facts, Entry], Plan]
    words: tuple[int, ...] = ()
    extent: Callable[[Facts], Extent] = lambda facts: Extent(facts.nbytes, programs=facts.topology.world_size)
    epoch: Callable[[Facts], int] = lambda facts: facts.nbytes


# ---------------------------------------------------------------------- what rules are made of


def needs_words(facts: Facts) -> str | None:
    """Return why a call cannot go by flagged words, or None if it can."""
    limit = f"at most {facts.ll_bytes} bytes per rank"
    if facts.ll_bytes < 0:
        limit = "ranks that can store to each other's memory inside each node"
    elif facts.topology.ranks_per_node is not None and facts.nbytes <= facts.ll_bytes:
        if _fewest_words(Extent(facts.nbytes, programs=facts.topology.world_size), facts.max_programs) <= LL_MOST_WORDS:
            return None
        limit = f"more than {facts.max_programs} programs"
    return f"needs the same number of ranks on every node and {limit}; got {facts.nbytes} bytes on "


def needs_stores(facts: Facts) -> str | None:
    """Return why a call cannot go by stores alone, or None if it can."""
    if facts.topology.n_nodes > 1 or not facts.stores:
        return "needs one node whose ranks can store to each other's memory; got "
    return None


def needs_puts(facts: Facts) -> str | None:
    """Return why a call cannot go by puts, or None if it can."""
    return None if facts.puts else "needs NVSHMEM's puts, which memory of PyTorch's does not have; got "


def most_channels(facts: Facts) -> int:
    """Chunks of one segment, at most: a launch has up to ``2 * world + 1`` programs for each, and all of its programs
    must have a share of one epoch."""
    return max(1, min(facts.channels, (facts.max_programs - 1) // (2 * facts.topology.world_size + 1)))


def warps(nbytes: int, chunk: int) -> int:
    """Warps that move chunks of so many bytes."""
    return 16 if nbytes >= LARGE or chunk >= MANY_WARPS_FROM else 8


def most_warps(facts: Facts) -> int:
    """Return how many warps a program may have: fewer where launches of other contexts need room on the GPU."""
    return max(WARPS) if facts.max_programs == MAX_PROGRAMS else SHARED_WARPS


def check_warps(plan: Plan, facts: Facts) -> None:
    """Raise unless programs may have as many warps as a plan says that somebody has made by hand."""
    allowed = [warps for warps in WARPS if warps <= most_warps(facts)]
    if plan.num_warps not in allowed:
        shared = " on a context with max_programs" if facts.max_programs != MAX_PROGRAMS else ""
        raise ValueError(
            f"a Plan's num_warps must be one of {', '.join(map(str, allowed))}{shared}; got {plan.num_warps}"
        )


def cut_chunks(facts: Facts, entry: Entry, algorithm: str, large: bool = False) -> Plan:
    """Chunks with a signal each.

    Args:
        large: chunks may be as large as they get, since nothing is done with one before all are there.
    """
    several = facts.topology.n_nodes > 1
    usual = max(TARGET_CHUNK_BYTES, -(-facts.nbytes // USUAL_CHANNELS[several]))
    if not large:
        usual = min(usual, LARGE_CHUNKS[several] * TARGET_CHUNK_BYTES)
    wanted = entry.channels or -(-facts.nbytes // (entry.chunk or usual))
    channels = min(most_channels(facts), max(1, wanted))
    chunk = -(-facts.nbytes // channels)
    chunk = max(1, -(-chunk // CHUNK_ALIGNMENT)) * CHUNK_ALIGNMENT
    channels = max(1, -(-facts.nbytes // chunk))
    num_warps = min(entry.num_warps or warps(facts.nbytes, chunk), most_warps(facts))
    return Plan(algorithm, channels, chunk, num_warps)


def is_word_chunk(nbytes: int, width: int = LL_WORD_BYTES) -> bool:
    """Return whether one program can carry so many bytes: a power of two of words of this width, at most
    :data:`LL_MOST_WORDS`."""
    words, rest = divmod(nbytes, width)
    return rest == 0 and 1 <= words <= LL_MOST_WORDS and words & (words - 1) == 0


def _word_chunks(width: int) -> str:
    return f"{width} times a power of two, at most {width * LL_MOST_WORDS},"


def words_of(nbytes: int, width: int = LL_WORD_BYTES) -> int:
    """Words that carry so many bytes; none is carried by one."""
    return max(1, -(-nbytes // width))


def _power(number: int) -> int:
    """The least power of two of at least ``number``, which is positive."""
    return 1 << (number - 1).bit_length()


def _fewest_words(extent: Extent, max_programs: int) -> int:
    """Words of each chunk, so that there are no more programs than the context may have."""
    blocks = max(1, (max_programs - 1) // extent.programs - 1)
    return _power(-(-words_of(extent.nbytes, extent.width) // blocks))


def cut_words(facts: Facts, entry: Entry, algorithm: str, extent: Extent | None = None, usual: int = LL_BLOCK) -> Plan:
    """Blocks of words that need no signal.

    Args:
        extent: what they are cut from; None: a segment, a program for each block and rank.
        usual: words of a block.
    """
    extent = extent or Extent(facts.nbytes, programs=facts.topology.world_size)
    fewest = _fewest_words(extent, facts.max_programs) if extent.programs else 1
    words = words_of(extent.nbytes, extent.width)
    if entry.chunk is not None:
        block = _power(entry.chunk // extent.width + 1) // 2  # at most so much
    elif entry.channels is not None:
        block = min(LL_MOST_WORDS, max(LL_BLOCK, _power(-(-words // entry.channels))))
    else:
        # The interpreter takes as long for a block of few words as for one of many.
        block = LL_MOST_WORDS if facts.simulated else usual
    block = max(block, fewest)
    # Threads beyond a program's words would send them again. Those with several would wait for one after the other.
    warps = max(1, min(entry.num_warps or (8 if extent.programs else 16), most_warps(facts), block // 32))
    return Plan(algorithm, -(-words // block), extent.width * block, warps)


def _phase_words(facts: Facts, width: int, parts: int) -> int:
    return -(-words_of(facts.nbytes, width) // parts)


def reduced_words(facts: Facts, parts: int = 1, phases: int = 1) -> Extent:
    """Return what blocks of reduced words are cut from. Programs take several blocks where there are too many.

    They announce themselves where the context has room for such words, and else carry a flag.

    Args:
        parts: of a segment; a rank sends one part to another rank at a time.
        phases: how often a rank does that.
    """
    width = LAMPORT_WORD_BYTES
    if width * phases * _phase_words(facts, width, parts) > -(-facts.lamport_bytes // width) * width:
        width = LL_WORD_BYTES
    return Extent(width * _phase_words(facts, width, parts), width, programs=0)


def needs_reduced_words(facts: Facts, parts: int = 1, phases: int = 1) -> str | None:
    """Return why a reduction cannot go by words of either kind (:func:`reduced_words`), or None if it can."""
    if facts.itemsize > 4:
        return f"needs elements of at most 4 bytes; got elements of {facts.itemsize} bytes on "
    if (problem := needs_stores(facts)) is not None:
        return problem
    if facts.nbytes >= _REDUCED_BYTES:
        return f"needs less than {_REDUCED_BYTES} bytes; got {facts.nbytes} bytes on "
    announced = reduced_words(facts, parts, phases).width == LAMPORT_WORD_BYTES
    if announced or phases * _phase_words(facts, LL_WORD_BYTES, parts) <= words_of(facts.ll_bytes):
        return None
    return f"needs fewer bytes, or a context with more lamport_bytes or flagged_bytes; got {facts.nbytes} bytes on "


def epoch_of_words(facts: Facts, parts: int, phases: int) -> int:
    """Return the bytes of a segment in each epoch of a reduction by words (:func:`reduced_words`).

    A call that words of neither kind hold at once takes several epochs, by words that announce themselves. There are as
    few as possible, of equal size, a multiple of 16 bytes; the last may be shorter. Where they would be more than
    :data:`MOST_EPOCHS` the call has one, and :func:`needs_reduced_words` says why it cannot go by words.
    """
    width, nbytes = LAMPORT_WORD_BYTES, facts.nbytes
    room = min(width * parts * (-(-facts.lamport_bytes // width) // phases), _REDUCED_BYTES - width)
    if not 0 < nbytes <= MOST_EPOCHS * room or needs_reduced_words(facts, parts, phases) is None:
        return nbytes
    epochs = -(-nbytes // room)
    return -(-nbytes // (width * epochs)) * width


def cut_reduced_words(facts: Facts, entry: Entry, algorithm: str, extent: Extent) -> Plan:
    """Blocks of words that are reduced, a word for each thread: about :data:`REDUCING_PROGRAMS` of them, and then
    larger ones, of up to 16 warps."""
    words = words_of(extent.nbytes, extent.width)
    usual = max(64, min(512, _power(-(-words // REDUCING_PROGRAMS))))
    return cut_words(facts, entry, algorithm, extent, usual)


# ---------------------------------------------------------------------- choosing

_BY_THE_RULES = Entry(None, "")


class Policy:
    """The algorithms of one operation, and which of them a call takes.

    Args:
        operation: its name, which is also that of its sections in tuning tables.
        rules: its algorithms.
        seed: the name of the one to take where nothing was measured. If it does not admit the call, none does.
        hand_over: whether tables may leave a call to torch.distributed.
    """

    def __init__(
        self, operation: str, rules: Sequence[Rule], seed: Callable[[Facts], str], *, hand_over: bool = False
    ) -> None:
        self.operation, self.hand_over, self._seed = operation, hand_over, seed
        self.rules = {rule.name: rule for rule in rules}
        self.names = tuple(self.rules)
        self.algorithms = ("auto", *self.names)

    def rule(self, name: str, facts: Facts) -> Rule:
        """The rule of this name.

        Raises:
            ValueError: it does not admit the call; says why.
        """
        rule = self.rules[name]
        if (problem := rule.admit(facts)) is not None:
            raise ValueError(f"algorithm={name!r} {problem}{facts.topology.describe()}. Use algorithm='auto'.")
        return rule

    def admits(self, name: str, facts: Facts) -> bool:
        """Return whether such a call can have the algorithm."""
        return self.rules[name].admit(facts) is None

    def choose(self, facts: Facts, algorithm: str | Plan = "auto", sections: Sequence[Section] = ()) -> Plan:
        """The plan of a call; the same on all ranks of the group.

        Args:
            facts: of the call.
            algorithm: one of ``self.algorithms``; or a plan, which is checked and taken as it is. ``"auto"`` takes what
                the table says, if the call can have it, and else the seed.
            sections: of a tuning table, for these GPUs. Chunks and warps are an entry's too, if it is of the algorithm
                that is taken.

        Raises:
            ValueError: an unknown algorithm, one that such a call cannot have, a plan that cannot be launched.
        """
        if isinstance(algorithm, Plan):
            self._check_plan(facts, algorithm)
            return algorithm
        if algorithm not in self.algorithms:
            raise ValueError(f"algorithm must be one of {', '.join(self.algorithms)}; got {algorithm!r}")
        entry, asked = self._entry(facts, sections), algorithm != "auto"
        if algorithm == "auto":
            if entry is not None and entry.algorithm == HANDED_OVER:
                if facts.hand_over and facts.nbytes:
                    return Plan(HANDED_OVER, 0, 0, 0)
                entry = None
            if entry is not None and self.admits(entry.algorithm, facts):
                algorithm = entry.algorithm
            else:
                algorithm = self._seed(facts)
        if not asked and (problem := self.rules[algorithm].admit(facts)) is not None:
            raise ValueError(f"{self.operation} {problem}{facts.topology.describe()}")
        rule = self.rule(algorithm, facts)
        if entry is None or entry.algorithm != algorithm:
            entry = _BY_THE_RULES
        return rule.cut(facts, entry)

    def _entry(self, facts: Facts, sections: Sequence[Section]) -> Entry | None:
        """The first entry that holds for such a call."""
        topology = facts.topology
        kind = (self.operation, topology.ranks_per_node, topology.n_nodes, facts.in_place)
        for section in sections:
            if section.kind[1:] == kind:
                for entry in section.entries:
                    if entry.up_to is None or facts.nbytes <= entry.up_to:
                        return entry
        return None

    def _check_plan(self, facts: Facts, plan: Plan) -> None:
        """Raise unless the plan, which somebody has made by hand, can be launched."""
        if plan.algorithm not in self.names:
            raise ValueError(f"a Plan's algorithm must be one of {', '.join(self.names)}; got {plan.algorithm!r}")
        rule = self.rule(plan.algorithm, facts)
        words, extent = rule.words, rule.extent(facts)
        for name in ("channels", "chunk", "num_warps"):
            if type(value := getattr(plan, name)) is not int:
                raise TypeError(f"a Plan's {name} must be an int, got {value!r}")
        check_warps(plan, facts)
        aligned = is_word_chunk(plan.chunk, extent.width) if words else plan.chunk % 16 == 0
        if plan.chunk < 1 or not aligned or plan.channels * plan.chunk < extent.nbytes:
            expected = _word_chunks(extent.width) if words else "a multiple of 16"
            raise ValueError(
                f"a Plan's chunks must be {expected} bytes and cover all {extent.nbytes} bytes; got {plan.channels} of "
                f"{plan.chunk} bytes"
            )
        # No more blocks of words than carry something: others would wait for puts that nobody makes.
        signalled = most_channels(replace(facts, channels=facts.channels // extent.signals))
        most = max(1, -(-extent.nbytes // plan.chunk)) if words else signalled
        if not 1 <= plan.channels <= most:
            raise ValueError(f"a Plan's channels must be 1 to {most}, got {plan.channels}")
        topology = facts.topology
        if words and (plan.channels + 1) * extent.programs >= facts.max_programs:
            raise ValueError(
                f"a Plan for {plan.algorithm!r} must have chunks of more than {plan.chunk} bytes for "
                f"{topology.describe()}"
            )

    def sections(self, table: Sequence[Section], name: str) -> tuple[Section, ...]:
        """The sections of a table that are of this operation.

        Args:
            name: of the table, for messages.

        Raises:
            ValueError: an entry names an algorithm, or has chunks, that there cannot be.
        """
        mine = tuple(section for section in table if section.operation == self.operation)
        for section in mine:
            for entry in section.entries:
                if (problem := self._problem(entry)) is not None:
                    raise ValueError(f"{name}: {section.where(entry)}: {problem}")
        return mine

    def _problem(self, entry: Entry) -> str | None:
        """Return what was expected in an entry, and what is there; None if it is right."""
        names, chunk = (*self.names, *([HANDED_OVER] if self.hand_over else [])), entry.chunk
        if entry.algorithm not in names:
            return f"algorithm: expected one of {', '.join(names)}, got {entry.algorithm}"
        if chunk is None:
            return None
        if entry.algorithm == HANDED_OVER or not self.rules[entry.algorithm].words:
            fits, expected = chunk % CHUNK_ALIGNMENT == 0, f"a multiple of {CHUNK_ALIGNMENT}"
        else:
            widths, least = self.rules[entry.algorithm].words, 32 * (entry.num_warps or 1)
            fits = any(is_word_chunk(chunk, width) and chunk >= width * least for width in widths)
            expected = " or ".join(
                f"{width} times a power of two, from {width * least} (a word for each thread) to "
                f"{width * LL_MOST_WORDS}"
                for width in widths
            )
        return None if fits else f"chunk: expected {expected} bytes, got {chunk}"
