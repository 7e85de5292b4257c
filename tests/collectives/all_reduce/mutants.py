# SPDX-License-Identifier: Apache-2.0
"""The all-reduce kernels with one protection switched off: what the simulator must catch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from kernel_mutants import Change

import tdcoll.collectives.all_reduce.spec  # noqa: F401, which names the kernels: before one is replaced

from ..reduce_scatter.mutants import LATER, LOAD, OF_NODE, OWN, PART, SUM, SUM_OF_NODE, missing, to

MODULES = (
    "tdcoll.collectives.all_reduce.kernels_words",
    "tdcoll.collectives.all_reduce.kernels_direct",
    "tdcoll.collectives.all_reduce.kernels_puts",
    "tdcoll.collectives.all_reduce.kernels_nodes",
)


@dataclass(frozen=True)
class Mutant:
    """One protection less.

    Attributes:
        name: what is missing.
        changes: to the kernels, or to device functions that they call.
        expect: regular expression that the failure's report must match: what goes wrong, and not just that it does.
        algorithm: whose kernel shows it; several in turn.
        ranks_per_node: as for ``World``; 4 ranks, or 3 where there are words.
        case: further arguments of ``Reductions``.
        resident, stragglers: as for ``World``.
    """

    name: str
    changes: tuple[Change, ...]
    expect: str
    algorithm: str
    ranks_per_node: int | tuple[int, ...] | None = None
    case: tuple[tuple[str, Any], ...] = (("calls", "oooo"),)
    resident: int | None = None
    stragglers: bool = False

    @property
    def job(self) -> dict[str, Any]:
        """Arguments of ``World``."""
        nodes = self.ranks_per_node
        n_pes = 3 if "shot" in self.algorithm else sum(nodes) if isinstance(nodes, tuple) else 4
        return {
            "n_pes": n_pes,
            "ranks_per_node": self.ranks_per_node,
            "resident": self.resident,
            "stragglers": self.stragglers,
        }


WRONG = r"AssertionError: rank \d+, call \d+ \([oizyY]\): \d+ wrong elements"

ANY_WRONG = WRONG.replace("[oizyY]", "[oizyYg]") + "|" + missing("signals")

ONE, TWO = "all_reduce.kernels_words.all_reduce_one_shot", "all_reduce.kernels_words.all_reduce_two_shot"
DIRECT = "all_reduce.kernels_direct.all_reduce_direct"
PUTS = "all_reduce.kernels_puts.all_reduce_puts"
RECEIVED, SUM_DIRECT = "primitives.words.receive", "all_reduce.kernels_direct._sum_chunk"
SUM_ONE, SUM_TWO = "all_reduce.kernels_words._one_shot_sum", "all_reduce.kernels_words._sum_and_hand_on"
SUM_PUTS = "all_reduce.kernels_puts._sum_chunk"
NODES, SUM_NODE, SUM_RAIL = (
    f"all_reduce.kernels_nodes.{name}" for name in ("all_reduce_nodes", "_sum_node", "_sum_rail")
)
PUT, SEND = "primitives.puts.put_staged", "all_reduce.kernels_puts._send_sum"

WAIT = "tdl.wait_signals(arrived, g.world, g.rank, tdl.CMP_GE, epoch, g.monitor, WAITED)"
WAIT_DIRECT = (
    "tdl.wait_signal(summed + peer, tdl.CMP_GE, epoch, g.monitor, peer, (channels + channel) * g.world + peer)"
)
WAIT_STRAIGHT = "tdl.wait_signals(summed, g.world, g.rank, tdl.CMP_GE, epoch, g.monitor, WAITED)"
WAIT_PUTS = "tdl.wait_signal(summed + origin, tdl.CMP_GE, epoch, g.monitor, origin, index)"
SUMMED = "row(g, epoch, channels + channel)"
PUSHED, RELEASED = "tdl.copy_block(target + delta, source, nbytes)", "release(signal, signal_delta, value)"
STORE_SUM = "tl.store(elements.pointer(landing + delta, DTYPE, ALIGNED) + index, result, mask=mask)"
TOLD, SENT = (
    "stores.release_to_all(g, summed + g.rank, epoch)",
    "_send_sum(landing, size, g, routes, summed + g.rank, epoch)",
)
SUM_IN_DIRECT, SUM_IN_PUTS = (
    f"""
if (source | out | size) % 16 == 0:
    _sum_chunk({own}, out + at, landing, {to}window, g, {more}epoch, offset, size, DTYPE, ACC, OP, True, COUNT)
else:
    _sum_chunk({own}, out + at, landing, {to}window, g, {more}epoch, offset, size, DTYPE, ACC, OP, False, COUNT)
"""
    for own, to, more in (("own", "to, ", ""), ("source + at", "", "routes, nodes, "))
)
LATER_NODE = "(node + g.rank) % nodes.n_nodes"
CAME = "tl.where(r == g.rank, mine[part], came[4 * r + part])"
CLEAR_ONE, CLEAR_TWO = (
    "lamport.clear(g, inbox, call, size, BLOCK)",
    "lamport.clear(g, inbox, call, 2 * 16 * part, BLOCK)",
)
SEND_ALL = "words.send_to_all(g, inbox, deltas, word, mine, call, mask, LAMPORT)"
ADD_ALL = "_one_shot_sum(out, inbox, g, size, word, mine, call, mask, DTYPE, ACC, OP, LAMPORT)"
SEND_BACK = "words.send_to_all(g, inbox, deltas, part + place, result, call, summed, LAMPORT)"
PROGRAM = "tl.program_id(0)"
BACKWARDS = "(tl.num_programs(0) - 1 - tl.program_id(0))"
NBI = "tdl.putmem_signal_nbi_block({0}, {1}, size, signal, epoch, tdl.SIGNAL_SET, {2})"
PUT_SOURCE, PUT_SUM = NBI.format("landing", "staged", "pe"), NBI.format("landing", "landing", "tl.load(pes + i)")
SIGNAL_FIRST = (
    "tdl.signal_block(signal, epoch, tdl.SIGNAL_SET, {2})\ntdl.fence()\ntdl.putmem_nbi_block({0}, {1}, size, {2})"
)
OVER_NODES = (2, 2)

FLAGGED = (("calls", "oooo"), ("lamport_bytes", 0))
AMONG_OTHERS = (("calls", "ogogog"),)
LOOPED = (("calls", "oooo"), ("max_programs", 8))


OWN_FIRST = to(RECEIVED, CAME, "tl.where(r == 0, mine[part], tl.where(r == g.rank, came[part], came[4 * r + part]))")
"""Parts are summed from the own one on."""

MUTANTS = [
    # ------------------------------------------------------------------ words
    # Two-shot needs its third slot as well, although it clears before it sends sums. A rank that has all sums knows
    # that the others have issued the stores that clear their memory, but nothing orders those before the sums: with two
    # slots they may land on words of the next call. With flags nothing is cleared, and calls of equal sizes could do
    # with one slot: a rank that has all sums knows that all others have read what it sent first.
    Mutant(
        "one-shot: two slots",
        to("lamport.slot", "call % 3", "call % 2"),
        f"{WRONG}|{missing('lamport')}",
        "one_shot",
        case=(("calls", "oooooo"), ("counts", (12, 60))),
        stragglers=True,
    ),
    Mutant(
        "one-shot: the memory of the next call is cleared, and not that of the last",
        to("lamport.clear", "call - 1", "call + 1"),
        f"{WRONG}|{missing('lamport')}",
        "one_shot",
        case=(("calls", "oooooo"), ("counts", (12, 60))),
        stragglers=True,
    ),
    Mutant(  # a peer that has this call's words may write where this rank's clearing has not landed yet
        "one-shot: two slots, cleared before sending",
        to("lamport.slot", "call % 3", "call % 2")
        + to(ONE, f"{SEND_ALL}\nif LAMPORT:\n    {CLEAR_ONE}", f"{CLEAR_ONE}\n{SEND_ALL}"),
        f"{WRONG}|{missing('lamport')}",
        "one_shot",
        case=(("calls", "oooooo"), ("counts", (12, 60))),
    ),
    *(
        Mutant(
            f"{name}, flags: one slot",
            to("group.slot", "epoch % 2", "epoch * 0"),
            f"{WRONG}|{missing('flagged')}",
            name,
            case=(*FLAGGED, ("counts", (12, 60))),
        )
        for name in ("one_shot", "two_shot")
    ),
    Mutant(
        "two-shot: a call of no bytes sends nothing",
        to(TWO, "tl.maximum(tl.cdiv(tl.cdiv(size, width), g.world), 1)", "tl.cdiv(tl.cdiv(size, width), g.world)"),
        f"{WRONG}|{missing('lamport')}",
        "two_shot",
        case=(("calls", "oooooo"), ("counts", (20, 0, 0))),
        stragglers=True,
    ),
    Mutant("one-shot: nothing is cleared", to(ONE, CLEAR_ONE, "pass"), WRONG, "one_shot", case=(("calls", "ooooo"),)),
    Mutant("two-shot: nothing is cleared", to(TWO, CLEAR_TWO, "pass"), WRONG, "two_shot", case=(("calls", "ooooo"),)),
    Mutant(
        "two-shot: the second half is not cleared",
        to(TWO, CLEAR_TWO, CLEAR_TWO.replace("2 * 16", "16")),
        WRONG,
        "two_shot",
        case=(("calls", "ooooo"),),
    ),
    *(
        Mutant(
            f"two-shot{', flags' if more else ''}: sums come where parts came",
            to(SUM_TWO, "part + place", "place"),
            f"{WRONG}|{missing('lamport')}|{missing('flagged')}",
            "two_shot",
            case=more or (("calls", "oooo"),),
        )
        for more in ((), FLAGGED)
    ),
    Mutant(
        "two-shot: the own words go on, and not the sum",
        to(SUM_TWO, SEND_BACK, SEND_BACK.replace("result", "mine")),
        WRONG,
        "two_shot",
    ),
    Mutant("two-shot: no sum is sent", to(SUM_TWO, SEND_BACK, "pass"), missing("lamport"), "two_shot"),
    Mutant("one-shot: parts are summed from the own one on", OWN_FIRST, WRONG, "one_shot"),
    Mutant("two-shot: the sum is another from rank to rank", OWN_FIRST, WRONG, "two_shot"),
    Mutant(
        "one-shot: words are not waited for",
        to(
            RECEIVED,
            "tdl.wait_words_of_all(landed, inbox.stride, g.world, g.rank, lamport.SENTINEL, mask, g.monitor, call)",
            "(*tdl.load_words(landed, mask), *tdl.load_words(landed + inbox.stride, mask), "
            "*tdl.load_words(landed + 2 * inbox.stride, mask), mask)",
        ),
        WRONG,
        "one_shot",
    ),
    Mutant(
        "one-shot: words are received before they are sent",
        to(ONE, SEND_ALL, "pass") + to(ONE, ADD_ALL, f"{ADD_ALL}\n{SEND_ALL}"),
        missing("lamport"),
        "one_shot",
        resident=1,
    ),
    Mutant(
        "two-shot: program i waits for the last but i",
        to(
            RECEIVED,
            "lamport.segment(g, inbox, call, 0) + 16 * tl.cast(word, tl.int64)",
            "lamport.segment(g, inbox, call, 0) "
            "+ 16 * tl.cast(tl.num_programs(0) * word.shape[0] - 1 - word, tl.int64)",
        ),
        missing("lamport"),
        "two_shot",
        resident=1,
    ),
    Mutant(
        "one-shot, in place: a program stores over what another one has yet to send",
        to(
            ONE,
            ADD_ALL,
            "other = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK + tl.arange(0, BLOCK)\n"
            "mine = words.repair(source, other, size, words.load(source, other, size, LAMPORT), LAMPORT)\n"
            + ADD_ALL.replace("word,", "other,").replace("mask,", "words.carry(other, size, LAMPORT),"),
        ),
        WRONG.replace("[oiz]", "i"),
        "one_shot",
        case=(("calls", "iiii"),),
    ),
    *(
        Mutant(
            f"{name}, looped: a program takes its first block only",
            to(where, "tl.range(tl.program_id(0) + tl.num_programs(0), blocks, tl.num_programs(0))", "tl.range(0, 0)"),
            WRONG,
            name,
            case=(*LOOPED, ("counts", (count,))),
        )
        for name, where, count in (("one_shot", ONE, 150), ("two_shot", TWO, 240))
    ),
    # ------------------------------------------------------------------ stores
    *(
        # Calls of one kind could do with one slot: a rank that has all sums knows that all others have read its parts.
        Mutant(f"{name}: one slot", to("group.slot", "epoch % 2", "epoch * 0"), ANY_WRONG, name, nodes, AMONG_OTHERS)
        for name, nodes in (("direct", None), ("1d", OVER_NODES))
    ),
    *(
        Mutant(f"{name}: the sum does not wait", to(where, WAIT, WAIT.replace("epoch", "0")), WRONG, name, nodes)
        for name, where, nodes in (("direct", DIRECT, None), ("1d", PUTS, OVER_NODES))
    ),
    *(
        Mutant(
            f"{name}: {which} are copied out before they are there",
            to(where, wait, wait.replace("epoch", "0")),
            WRONG,
            name,
            nodes,
        )
        for name, where, wait, nodes, which in (
            ("direct", DIRECT, WAIT_DIRECT, None, "sums"),
            ("1d", PUTS, WAIT_PUTS, OVER_NODES, "sums"),
        )
    ),
    *(
        Mutant(
            f"{name}: the sum has the signal of a part",
            to(where, SUMMED, "row(g, epoch, channel)"),
            f"{WRONG}|{missing('signals')}",
            name,
            nodes,
        )
        for name, where, nodes in (("direct", DIRECT, None), ("1d", PUTS, OVER_NODES))
    ),
    *(
        Mutant(f"{name}: sums come where parts came", to(where, "second", "0"), WRONG, name, nodes)
        for name, where, nodes in (("direct", DIRECT, None), ("1d", PUTS, OVER_NODES))
    ),
    Mutant(
        "direct: the signal goes before the part",
        to("stores.push", f"{PUSHED}\n{RELEASED}", f"{RELEASED}\n{PUSHED}"),
        WRONG,
        "direct",
    ),
    Mutant(
        "direct: the signal goes before the sum",
        to(DIRECT, f"{SUM_IN_DIRECT}{TOLD}", f"{TOLD}\n{SUM_IN_DIRECT}"),
        WRONG,
        "direct",
    ),
    Mutant("direct: nobody hears of the sum", to(DIRECT, TOLD, "pass"), missing("signals"), "direct"),
    Mutant("direct: the sum stays here", to(SUM_DIRECT, STORE_SUM, "pass"), WRONG, "direct"),
    Mutant("direct: the own part from the window", to(LOAD, OWN, "segment(window, g, epoch, r)"), WRONG, "direct"),
    Mutant(
        "direct: parts are summed from the own one on",
        to(SUM, PART, PART.replace("(r,", f"({LATER},")),
        WRONG,
        "direct",
    ),
    Mutant(
        "direct: programs that wait before those that send",
        to(DIRECT, PROGRAM, BACKWARDS),
        missing("signals"),
        "direct",
        resident=1,
    ),
    # ------------------------------------------------------------------ stores into symmetric results
    *(
        Mutant(f"direct, straight: {what}", change, expect, "direct", case=(("calls", calls),), resident=resident)
        for what, change, expect, calls, resident in (
            ("the sum does not wait", to(DIRECT, WAIT, WAIT.replace("epoch", "0")), WRONG, "YYYY", None),
            (
                "nobody waits for sums",
                to(DIRECT, WAIT_STRAIGHT, WAIT_STRAIGHT.replace("epoch", "0")),
                WRONG,
                "yyyy",
                None,
            ),
            (
                "the signal goes before the sum",
                to(DIRECT, f"{SUM_IN_DIRECT}{TOLD}", f"{TOLD}\n{SUM_IN_DIRECT}"),
                WRONG,
                "yyyy",
                None,
            ),
            (
                "the signal goes before the part",
                to("stores.push", f"{PUSHED}\n{RELEASED}", f"{RELEASED}\n{PUSHED}"),
                WRONG,
                "YYYY",
                None,
            ),
            ("the sum stays here", to(SUM_DIRECT, STORE_SUM, "pass"), WRONG, "yyyy", None),
            ("nobody hears of the sum", to(DIRECT, TOLD, "pass"), missing("signals"), "yyyy", None),
            (
                "all sums land in the first part",
                to(DIRECT, "out + at + offset", "out + offset"),
                ANY_WRONG,
                "yyyy",
                None,
            ),
            (
                "programs that wait before those that send",
                to(DIRECT, PROGRAM, BACKWARDS),
                missing("signals"),
                "yYyY",
                1,
            ),
        )
    ),
    # ------------------------------------------------------------------ puts
    Mutant(
        "1d: nothing in the outbox", to(PUT, "tdl.copy_block(staged, source, size)", "pass"), WRONG, "1d", OVER_NODES
    ),
    Mutant(
        "1d: put from the inbox",
        to(PUT, "segment(window, g, epoch, to) + outbox", "segment(window, g, epoch, to)"),
        WRONG,
        "1d",
        OVER_NODES,
    ),
    *(
        Mutant(
            f"1d: {what} is put with a signal that goes before it",
            to(where, put, signal_first),
            WRONG,
            "1d",
            OVER_NODES,
        )
        for what, where, put, signal_first in (
            ("a part", PUT, PUT_SOURCE, SIGNAL_FIRST.format("landing", "staged", "pe")),
            ("a sum", SEND, PUT_SUM, SIGNAL_FIRST.format("landing", "landing", "tl.load(pes + i)")),
        )
    ),
    *(
        Mutant(f"1d: {what} is put without a signal", to(where, put, quiet), missing("signals"), "1d", OVER_NODES)
        for what, where, put, quiet in (
            ("a part", PUT, PUT_SOURCE, "tdl.putmem_nbi_block(landing, staged, size, pe)"),
            ("a sum", SEND, PUT_SUM, "tdl.putmem_nbi_block(landing, landing, size, tl.load(pes + i))"),
        )
    ),
    Mutant("1d: local ranks are not sent the sum", to(SUM_PUTS, STORE_SUM, "pass"), WRONG, "1d", OVER_NODES),
    Mutant(
        "1d: remote ranks are sent what was where the sum is not",
        to(SUM_PUTS, STORE_SUM.replace("landing + delta", "landing"), "pass"),
        WRONG,
        "1d",
        OVER_NODES,
    ),
    Mutant(
        "1d: the sum is sent before it is there",
        to(PUTS, f"{SUM_IN_PUTS}{SENT}", f"{SENT}\n{SUM_IN_PUTS}"),
        WRONG,
        "1d",
        OVER_NODES,
    ),
    Mutant(
        "1d: all parts are summed in rank order, whatever their nodes",
        to(SUM, "tl.range(0, nodes.n_nodes)", "tl.range(0, 1)")
        + to(SUM_OF_NODE, "tl.load(nodes.begins + node + 1)", "g.world"),
        WRONG,
        "1d",
        OVER_NODES,
    ),
    Mutant(
        "1d: the nodes are summed from the own one on",
        to(SUM, OF_NODE, OF_NODE.replace("(node,", f"({LATER_NODE},")),
        WRONG,
        "1d",
        # Two numbers are summed alike in either order.
        (2, 1, 1),
    ),
    Mutant(
        "1d: programs that wait before those that put",
        to(PUTS, PROGRAM, BACKWARDS),
        missing("signals"),
        "1d",
        OVER_NODES,
        resident=1,
    ),
    # ------------------------------------------------------------------ rails
    *(
        Mutant(f"2d: nobody waits for {what}", to(NODES, wait, "1"), WRONG, "2d", (2, 2), (("calls", "oooo"), *more))
        for what, wait, more in (
            ("the parts of the node", "_wait_for(routes.ranks, routes.n_local, arrived, index, g, epoch)", ()),
            ("the sums of the rail", "_wait_for(rail, routes.n_remote, arrived, index, g, epoch)", ()),
            ("the results", "tdl.wait_signal(done + origin, tdl.CMP_GE, epoch, g.monitor, origin, where)", ()),
        )
    ),
    Mutant(
        "2d: sums of 16-bit numbers lie as close as the numbers",
        to(NODES, "mine + wider * offset", "mine + offset"),
        WRONG,
        "2d",
        (2, 2),
        (("calls", "oooo"), ("dtype", torch.bfloat16)),
    ),
    Mutant(
        "2d: sums travel rounded",
        to(
            SUM_NODE,
            "tl.store(elements.pointer(partial, ACC, True) + index, sum, mask=mask)",
            "tl.store(elements.pointer(partial, ACC, True) + index, sum.to(DTYPE).to(ACC), mask=mask)",
        ),
        WRONG,
        "2d",
        (2, 2),
        (("calls", "oooo"), ("dtype", torch.bfloat16)),
    ),
    Mutant(
        "2d: a node's sum is put without a signal",
        to(
            NODES,
            "tdl.putmem_signal_nbi_block(partial, partial, wider * size, signal, epoch, tdl.SIGNAL_SET, pe)",
            "tdl.putmem_nbi_block(partial, partial, wider * size, pe)",
        ),
        missing("signals"),
        "2d",
        (2, 2),
    ),
    Mutant(
        "2d: the nodes are summed from the own one on",
        to(SUM_RAIL, "tl.load(nodes.begins + node)", f"tl.load(nodes.begins + {LATER_NODE})"),
        WRONG,
        "2d",
        (2, 2, 2),
    ),
    Mutant(
        "2d: a result lands where parts do",
        to(NODES, "mine + second + offset", "mine + offset"),
        WRONG,
        "2d",
        (2, 2),
    ),
    Mutant(
        "2d: programs that wait before those that send",
        to(NODES, "tl.program_id(0) % per_chunk", "per_chunk - 1 - tl.program_id(0) % per_chunk"),
        missing("signals"),
        "2d",
        (2, 2),
        resident=1,
    ),
]
