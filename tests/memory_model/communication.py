# SPDX-License-Identifier: Apache-2.0
"""The litmus test of each way in which tdcoll's kernels communicate, for patterns of emitted PTX.

A pattern is ``(origin, barriers..., goal)`` (:mod:`ptx_patterns`). Its origin and its goal are in
different threads of a block, the worst case: for example, any thread may have made a store, and
thread 0 signals. Blocks are on different GPUs, except blocks that meet by an access of GPU scope.

What is assumed of other parts, and isn't PTX of tdcoll's: a put reads its source in the thread that
calls it; a copy engine's copies on one stream are made in order, also as seen by the peer; words
of 128 bits are accessed as a whole; and the end of a launch synchronizes with the next launch's
``griddepcontrol.wait``, as it does with the start of a launch without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from memory_model.axioms import Execution, Thread
from memory_model.programs import program

Pattern = tuple[str, ...]
Lines = dict[Thread, list[str]]


def _pair(block: str, gpu: str) -> tuple[Thread, Thread]:
    """Return two threads of a block."""
    return Thread(f"{block} thread 7", block, gpu), Thread(f"{block} thread 0", block, gpu)


def _line(mnemonic: str, cell: str, register: str = "", value: int = 1) -> str:
    """Return an access of a cell; what it reads is called ``register``."""
    name = f"{register} = " if register else ""
    operand = "" if mnemonic.startswith("ld") else f", {value}"
    return f"{name}{mnemonic} [{cell}]{operand}"


def _sender(pattern: Pattern, block: str, gpu: str, data: str, signal: str) -> Lines:
    """Store data in one thread, and signal in another."""
    first, last = _pair(block, gpu)
    register = "r9" if pattern[-1].startswith("atom") else ""
    return {
        first: [_line(pattern[0], data), *pattern[1:-1]],
        last: [*pattern[1:-1], _line(pattern[-1], signal, register)],
    }


def _receiver(pattern: Pattern, block: str, gpu: str, signal: str, data: str) -> Lines:
    """Wait for a signal in one thread (``r0``), and load data in another (``r1``)."""
    first, last = _pair(block, gpu)
    return {
        first: [_line(pattern[0], signal, "r0"), *pattern[1:-1]],
        last: [*pattern[1:-1], _line(pattern[-1], data, "r1")],
    }


STALE = {"r0": 1, "r1": 0}


def signal_after_data(sent: Pattern, received: Pattern, one_gpu: bool = False) -> Execution | None:
    """Data and a signal by stores: the signal is seen, and the data isn't."""
    lines = _sender(sent, "sender", "GPU 0", "data", "signal")
    gpu = "GPU 0" if one_gpu else "GPU 1"
    lines |= _receiver(received, "receiver", gpu, "signal", "data")
    return program(lines).shows(STALE)


def two_shot(sent: Pattern, handed_on: Pattern, received: Pattern) -> Execution | None:
    """A second rank waits for data's signal and signals a third, which loads the data of the
    first."""
    lines = _sender(sent, "sender", "GPU 0", "data", "signal")
    first, last = _pair("middle", "GPU 1")
    barriers = handed_on[1:-1]
    lines[first] = [_line(handed_on[0], "signal", "r2"), *barriers]
    lines[last] = [*barriers, _line(handed_on[-1], "next")]
    lines |= _receiver(received, "receiver", "GPU 2", "next", "data")
    return program(lines).shows({"r2": 1, **STALE})


def reused_slot(read: Pattern, written: Pattern) -> Execution | None:
    """A reader acknowledges, and the writer then stores the next data to the same place: the
    reader has got that."""
    first, last = _pair("reader", "GPU 0")
    lines = {
        first: [_line(read[0], "data", "r1"), *read[1:-1]],
        last: [*read[1:-1], _line(read[-1], "signal")],
    }
    first, last = _pair("writer", "GPU 1")
    lines[first] = [_line(written[0], "signal", "r0"), *written[1:-1]]
    lines[last] = [*written[1:-1], _line(written[-1], "data")]
    return program(lines).shows({"r0": 1, "r1": 1})


def put_after_stores(pattern: Pattern) -> Execution | None:
    """A put of what other threads have stored: it sends what was there before."""
    first, last = _pair("sender", "GPU 0")
    barriers = pattern[1:-1]
    lines = {
        first: [_line(pattern[0], "source"), *barriers],
        last: [*barriers, _line("ld.global", "source", "r1")],
    }
    return program(lines).shows({"r1": 0})


def flagged_word(store: str, load: str, whole_words: bool) -> Execution | None:
    """An LL word, whose second half has the flag: the flag is seen, and the first half isn't."""
    sender, _ = _pair("sender", "GPU 0")
    receiver, _ = _pair("receiver", "GPU 1")
    lines = {sender: [_line(store, "word")], receiver: [_line(load, "word", "r0")]}
    return program(lines, whole_words=whole_words).shows({"r0.1": 1, "r0.0": 0})


def lamport_word(store: str, load: str, cleared_before: bool = True) -> list[Execution | None]:
    """A Lamport word, which holds old data (0), is cleared by its owner in an earlier launch (7),
    and gets new data (1). For each part: it is seen as the old one.

    Args:
        cleared_before: the launch that clears ends before the one that polls.
    """
    clearing = Thread("earlier launch", "receiver", "GPU 1")
    sender, _ = _pair("sender", "GPU 0")
    receiver, _ = _pair("polling launch", "GPU 1")
    lines = {
        clearing: [_line(store, "word", value=7), "launch ends"],
        sender: [_line(store, "word")],
        receiver: ["launch begins", _line(load, "word", "r0")],
    }
    order = [("launch ends", "launch begins")] if cleared_before else []
    made = program(lines, synchronizes=order)
    return [made.shows({f"r0.{part}": 0}) for part in range(len(made.reads["r0"]))]


def one_part_polled(store: str, load: str) -> Execution | None:
    """The fault that Lamport words must not have: the first part is there, and the last isn't."""
    sender, _ = _pair("sender", "GPU 0")
    receiver, _ = _pair("receiver", "GPU 1")
    lines = {sender: [_line(store, "word")], receiver: [_line(load, "word", "r0")]}
    return program(lines).shows({"r0.0": 1, "r0.3": 0})


def copy_with_stamp(received: Pattern, in_order: bool = True) -> Execution | None:
    """A copy engine's stamp behind its data: the stamp is seen, and the data isn't.

    Args:
        in_order: a copy ends before the next one of the stream begins, for the peer as well.
    """
    engine = Thread("copy engine", "copies", "GPU 0")
    between = ["fence.acq_rel.sys"] if in_order else []
    lines = {engine: [_line("st.global", "data"), *between]}
    lines[engine].append(_line("st.relaxed.sys.global.b64", "signal"))
    lines |= _receiver(received, "receiver", "GPU 1", "signal", "data")
    return program(lines).shows(STALE)


def early_launch(waits_first: bool = True) -> Execution | None:
    """A launch that begins early loads what the launch before it stores: it sees what was there
    before."""
    earlier, _ = _pair("earlier launch", "GPU 0")
    later, _ = _pair("launch", "GPU 0")
    accesses = ["griddepcontrol.wait", "r1 = ld.global [data]"]
    if not waits_first:
        accesses.reverse()
    lines = {earlier: ["st.global [data], 1", "launch ends"], later: accesses}
    order = [("launch ends", "griddepcontrol.wait")]
    return program(lines, synchronizes=order).shows({"r1": 0})


# ---------------------------------------------------------------------- patterns, and their mutants


def weakest(patterns: Iterable[Sequence[str]]) -> list[Pattern]:
    """Return the different patterns, without those that have the barriers of another one and
    more."""
    different = {tuple(pattern) for pattern in patterns}

    def is_stronger(one: Pattern, other: Pattern) -> bool:
        same_ends = (one[0], one[-1]) == (other[0], other[-1])
        return same_ends and set(one[1:-1]) > set(other[1:-1])

    return sorted(
        one for one in different if not any(is_stronger(one, other) for other in different)
    )


def relaxed(pattern: Pattern) -> Pattern:
    """Return a pattern whose accesses release and acquire nothing."""
    changed = []
    for mnemonic in pattern:
        words = mnemonic.split(".")
        changed.append(
            ".".join(
                "relaxed" if word in ("release", "acquire", "acq_rel") else word for word in words
            )
        )
    return tuple(changed)


def narrowed(pattern: Pattern) -> Pattern:
    """Return a pattern with GPU scope in place of system scope, or block scope in place of GPU
    scope."""
    narrower = {"sys": "gpu", "gpu": "cta"}
    return tuple(
        ".".join(narrower.get(word, word) for word in mnemonic.split(".")) for mnemonic in pattern
    )


def without_barriers(pattern: Pattern) -> Pattern:
    """Return a pattern without its barriers."""
    return pattern[0], pattern[-1]


MUTANTS = {"relaxed": relaxed, "narrower scope": narrowed, "no barrier": without_barriers}
"""The faults that a pattern can have."""


def is_for_one_gpu(pattern: Pattern) -> bool:
    """Return whether a pattern's signal has GPU scope, for programs of the same GPU."""
    return any("gpu" in mnemonic.split(".") for mnemonic in pattern)
