# SPDX-License-Identifier: Apache-2.0
"""The reduce-scatter kernels with one protection switched off: what the simulator must catch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kernel_mutants import Change

MODULES = (
    "tdcoll.collectives.reduce_scatter.kernels_direct",
    "tdcoll.collectives.reduce_scatter.kernels_pull",
    "tdcoll.collectives.reduce_scatter.kernels_puts",
    "tdcoll.collectives.reduce_scatter.kernels_words",
)


@dataclass(frozen=True)
class Mutant:
    """One protection less.

    Attributes:
        name: what is missing.
        changes: to the kernels, or to device functions that they call.
        expect: regular expression that the failure's report must match: what goes wrong, and not just that it does.
        algorithm: whose kernel shows it.
        ranks_per_node: as for ``World``; 4 ranks.
        case: further arguments of ``Reductions``.
        resident: as for ``World``.
    """

    name: str
    changes: tuple[Change, ...]
    expect: str
    algorithm: str = "direct"
    ranks_per_node: int | tuple[int, ...] | None = None
    case: tuple[tuple[str, Any], ...] = (("calls", "oooo"),)
    resident: int | None = None

    @property
    def job(self) -> dict[str, Any]:
        """Arguments of ``World``."""
        return {"n_pes": 4, "ranks_per_node": self.ranks_per_node, "resident": self.resident}


WRONG = r"AssertionError: rank \d+, call \d+ \([oi]\): \d+ wrong elements"


def missing(signal: str) -> str:
    """A deadlock in which somebody waits for this array of signals."""
    return rf"[Dd]eadlock[\s\S]*waits for pe\d+\.{signal}\["


def to(where: str, old: str, new: str) -> tuple[Change, ...]:
    """One change."""
    return (Change(where, old, new),)


DIRECT = "reduce_scatter.kernels_direct.reduce_scatter_direct"
WORDS = "reduce_scatter.kernels_words.reduce_scatter_words"
PUTS = "reduce_scatter.kernels_puts.reduce_scatter_puts"
SUM, SUM_OF_NODE = "primitives.sums.sum_of_ranks", "primitives.sums.sum_of_node"
PULL = "reduce_scatter.kernels_pull.reduce_scatter_pull"
PUT = "primitives.puts.put_staged"
LOAD = "primitives.sums.load_part"

PART = "load_part(r, own, window, g, epoch, offset, index, mask, DTYPE, ACC, ALIGNED)"
OF_NODE = "sum_of_node(node, own, window, g, nodes, epoch, offset, index, mask, DTYPE, ACC, OP, ALIGNED)"
WAIT = "tdl.wait_signals(signals, g.world, g.rank, tdl.CMP_GE, epoch, g.monitor, WAITED)"
OWN = "tl.where(r == g.rank, own, segment(window, g, epoch, r))"
ROW = "row(g, epoch, channel)"
GIVEN = "tl.program_id(0) % (senders + reducers)"
STORE = "tdl.copy_block(target + delta, source, nbytes)"
RELEASE = "release(signal, signal_delta, value)"
NBI = "tdl.putmem_signal_nbi_block(landing, staged, size, signal, epoch, tdl.SIGNAL_SET, pe)"
SENT = "words.send_shares(source, source_stride, total, nbytes, word, shares, g, inbox, deltas, call, mask, LAMPORT)"
SUMMED = "_sum(out, inbox, g, nbytes, word, mine, call, mask, DTYPE, ACC, OP, LAMPORT)"
CLEARED = "lamport.clear(g, inbox, call, nbytes, BLOCK)"
RECEIVE = "ll.receive(g, inbox, r, word, call, mask)"
CAME = "tl.where(r == g.rank, mine[part], came[4 * r + part])"
LATER = "(r + g.rank) % g.world"
ENTERED = "tdl.wait_signals(g.entered, g.world, g.rank, tdl.CMP_GE, epoch, g.monitor, WAITED)"
SAID, READ = (
    f"stores.release_to_all(g, {signal} + g.rank, epoch)" for signal in ("g.entered", "row(g, epoch, channel)")
)
ALL_READ = "tdl.wait_signals(row(g, epoch, i), g.world, g.rank, tdl.CMP_GE, epoch, g.monitor, WAITED)"
PULLED = """
if (source | source_stride | out | nbytes) % 16 == 0:
    reduce_chunk(0, 1, own, out, offset, size, window, g, None, epoch, DTYPE, ACC, OP, True, COUNT)
else:
    reduce_chunk(0, 1, own, out, offset, size, window, g, None, epoch, DTYPE, ACC, OP, False, COUNT)
"""
TWO = 2
UNEVEN = (3, 1)

MUTANTS = [
    # ------------------------------------------------------------------ slots and signals
    *(
        Mutant(f"{name}: one slot", to("group.slot", "epoch % 2", "epoch * 0"), expect, name, nodes)
        for name, nodes, expect in (
            ("direct", None, WRONG),
            ("ll", None, missing("flagged")),
            ("puts", TWO, WRONG),
        )
    ),
    # By stores one row would do: a release comes after all that earlier launches have stored.
    Mutant("puts: one row of signals", to("group.row", "slot(epoch)", "0"), WRONG, "puts", TWO),
    *(
        Mutant(f"{name}: the reducer does not wait", to(where, WAIT, WAIT.replace("epoch", "0")), WRONG, name, nodes)
        for name, where, nodes in (("direct", DIRECT, None), ("puts", PUTS, TWO))
    ),
    Mutant(
        "direct: the reducer waits for the first chunk only",
        to(DIRECT, WAIT, WAIT.replace("(signals", "(row(g, epoch, 0)")),
        WRONG,
    ),
    Mutant("direct: the second chunk has the signal of the first", to(DIRECT, ROW, "row(g, epoch, 0)"), WRONG),
    Mutant(
        "direct: the signal goes before the data",
        to("stores.push", f"{STORE}\n{RELEASE}", f"{RELEASE}\n{STORE}"),
        WRONG,
    ),
    Mutant("direct: nobody is told", to("stores.push", RELEASE, "pass"), missing("signals")),
    Mutant(
        "direct: reducers before senders",
        to(DIRECT, GIVEN, f"(senders + reducers - 1) - {GIVEN}"),
        missing("signals"),
        resident=1,
    ),
    # ------------------------------------------------------------------ the order of the sum
    Mutant(
        "direct: parts are summed from the own one on",
        to(
            SUM,
            PART,
            PART.replace("(r,", f"({LATER},"),
        ),
        WRONG,
    ),
    Mutant(
        "ll: parts are summed from the own one on",
        (
            *to("words.receive", "r != g.rank", f"{LATER} != g.rank"),
            *to("words.receive", RECEIVE, RECEIVE.replace("inbox, r,", f"inbox, {LATER},")),
        ),
        WRONG,
        "ll",
    ),
    Mutant(
        "lamport: the own part is summed first",
        to(
            "words.receive", CAME, "tl.where(r == 0, mine[part], tl.where(r == g.rank, came[part], came[4 * r + part]))"
        ),
        WRONG,
        "lamport",
    ),
    Mutant(
        "puts: all parts are summed in rank order, whatever their nodes",
        to(SUM, "tl.range(0, nodes.n_nodes)", "tl.range(0, 1)")
        + to(SUM_OF_NODE, "tl.load(nodes.begins + node + 1)", "g.world"),
        WRONG,
        "puts",
        TWO,
    ),
    Mutant(
        "puts: the nodes are summed from the own one on",
        to(SUM, OF_NODE, OF_NODE.replace("(node,", "((node + g.rank) % nodes.n_nodes,")),
        WRONG,
        "puts",
        # Two numbers are summed alike in either order.
        (2, 1, 1),
    ),
    # ------------------------------------------------------------------ whose parts
    Mutant("direct: the own part from the window", to(LOAD, OWN, "segment(window, g, epoch, r)"), WRONG),
    # ------------------------------------------------------------------ LL
    Mutant("ll: a flag of the epoch before", to("ll.send", "flag(epoch)", "flag(epoch - 2)"), missing("flagged"), "ll"),
    Mutant(
        "ll: the flags are not looked at",
        to(
            "ll.receive",
            "return tdl.wait_flagged(landed, flag(epoch), mask, g.monitor, origin)",
            "part = landed.to(tl.pointer_type(tl.int32))\n"
            "return tl.load(part, mask=mask, other=0), tl.load(part + 1, mask=mask, other=0), "
            "tl.load(part + 2, mask=mask, other=0), mask",
        ),
        WRONG,
        "ll",
    ),
    Mutant(
        "ll: a call of no bytes hears from nobody",
        to("ll.carry", "tl.maximum((nbytes + 11) // 12, 1)", "(nbytes + 11) // 12"),
        missing("flagged"),
        "ll",
        case=(("calls", "ozozozo"),),
    ),
    *(
        Mutant(
            f"{name}: words are received before they are sent",
            to(WORDS, f"mine = {SENT}", "mine = shares[3]") + to(WORDS, SUMMED, f"{SUMMED}\n{SENT}"),
            missing(memory),
            name,
            resident=1,
        )
        for name, memory in (("ll", "flagged"), ("lamport", "lamport"), ("looped", "lamport"))
    ),
    # ------------------------------------------------------------------ words that announce themselves
    Mutant("lamport: nothing is cleared", to(WORDS, CLEARED, "pass"), WRONG, "lamport", case=(("calls", "ooooo"),)),
    Mutant(
        "looped: a program takes its first block only",
        to(WORDS, "tl.range(tl.program_id(0) + tl.num_programs(0), blocks, tl.num_programs(0))", "tl.range(0, 0)"),
        WRONG,
        "looped",
    ),
    Mutant(
        "looped: a program takes its blocks in another order on odd ranks",
        to(
            WORDS,
            "word = block * BLOCK + tl.arange(0, BLOCK)",
            "word = (block + g.rank % 2 * (blocks + tl.program_id(0) + tl.num_programs(0) - 1 - 2 * block)) * BLOCK "
            "+ tl.arange(0, BLOCK)",
        ),
        f"{WRONG}|{missing('lamport')}",
        "looped",
        case=(("calls", "oooo"), ("count", 64)),
        resident=1,
    ),
    # ------------------------------------------------------------------ loads from symmetric memory
    *(
        Mutant(f"pull: {what}", change, expect, "pull", resident=resident)
        for what, change, expect, resident in (
            ("nobody waits for who has not entered", to(PULL, ENTERED, ENTERED.replace("epoch", "0")), WRONG, None),
            ("nobody says that it has entered", to(PULL, SAID, "pass"), missing("ready"), None),
            ("nobody waits for those that read", to(PULL, ALL_READ, ALL_READ.replace("epoch", "0")), WRONG, None),
            (
                "only the first chunk is waited for",
                to(PULL, ALL_READ, ALL_READ.replace("epoch, i", "epoch, 0")),
                WRONG,
                None,
            ),
            ("the signal goes before the loads", to(PULL, f"{PULLED}\n{READ}", f"{READ}\n{PULLED}"), WRONG, None),
            ("nobody hears of the loads", to(PULL, READ, "pass"), missing("signals"), None),
            ("everything is read here", to(LOAD, "tl.load(window.deltas + r)", "0"), WRONG, None),
            ("parts are summed from the own one on", to(SUM, PART, PART.replace("(r,", f"({LATER},")), WRONG, None),
            (
                "who waits for all comes before those that load",
                to(PULL, "tl.program_id(0)", "tl.num_programs(0) - 1 - tl.program_id(0)"),
                missing("signals"),
                1,
            ),
        )
    ),
    # ------------------------------------------------------------------ puts
    Mutant("puts: nothing in the outbox", to(PUT, "tdl.copy_block(staged, source, size)", "pass"), WRONG, "puts", TWO),
    Mutant(
        "puts: from the inbox",
        to(PUT, "segment(window, g, epoch, to) + outbox", "segment(window, g, epoch, to)"),
        WRONG,
        "puts",
        TWO,
    ),
    Mutant(
        "puts: signal before data",
        to(
            PUT,
            NBI,
            "tdl.signal_block(signal, epoch, tdl.SIGNAL_SET, pe)\ntdl.fence()\n"
            "tdl.putmem_nbi_block(landing, staged, size, pe)",
        ),
        WRONG,
        "puts",
        TWO,
    ),
    Mutant(
        "puts: no signal",
        to(PUT, NBI, "tdl.putmem_nbi_block(landing, staged, size, pe)"),
        missing("signals"),
        "puts",
        TWO,
    ),
    Mutant(
        "puts: reducers before those that put",
        to(PUTS, "tl.program_id(0) - putters", "tl.num_programs(0) - 1 - tl.program_id(0) - putters")
        + to(PUTS, "tl.program_id(0) < putters", "tl.num_programs(0) - 1 - tl.program_id(0) < putters")
        + to(
            PUTS,
            "tl.program_id(0) // routes.n_remote",
            "(tl.num_programs(0) - 1 - tl.program_id(0)) // routes.n_remote",
        ),
        missing("signals"),
        "puts",
        TWO,
        resident=1,
    ),
]
