# SPDX-License-Identifier: Apache-2.0
"""The sparse all-reduce's kernels with one protection or one rule less: what the simulator must catch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from kernel_mutants import Change

from ..all_gather import mutants as all_gather
from ..all_gather.mutants import at_once, to
from .cases import Reduces, some_part
from .reference import Rows

ANY = Reduces()
MEANS = Reduces(op="mean")


@dataclass(frozen=True)
class Mutant:
    """One protection less.

    Attributes:
        name: what is missing.
        changes: to the kernels, those of the exchange, or device functions that they call.
        expect: regular expression that the report of some seed must match: what goes wrong, and not just that it does.
        case: what shows it.
        world: arguments of ``World``.
        seeds: how many, from 0, at the most.
    """

    name: str
    changes: tuple[Change, ...]
    expect: str
    case: Reduces = ANY
    world: dict[str, Any] = field(default_factory=lambda: {"n_pes": 4})
    seeds: int = 20


WRONG_ROWS = r"AssertionError: rank \d+, call \d+ \([og]\): \d+ wrong rows"
WRONG_INDICES = r"AssertionError: rank \d+, call \d+ \([og]\): .* are wrong indices"
REFUSED = r"RankMismatchError: |ValueError: .* indices of rank|ContextError: .* different rows"
MISSING = r"[Dd]eadlock[\s\S]*waits for pe\d+\.signals\["


BAD_LISTS = "|".join((WRONG_ROWS, WRONG_INDICES, REFUSED))
ANYTHING = f"{BAD_LISTS}|{MISSING}"
"""Where ranks get so far ahead that signals of one epoch stand for those of another."""


# ---------------------------------------------------------------------- cases


def _negative(rank: int, call: int) -> Rows:
    made = some_part(31 * call + rank, 4, 6, (2,), torch.float32)
    return Rows(made.indices.unique(), -1 - made.values[: made.indices.unique().numel()].abs())


def _all(rank: int, call: int) -> Rows:
    return Rows(torch.arange(5), some_part(31 * call + rank, 5, 5, (2,), torch.float32).values)


def _of_any_floats(rank: int, call: int) -> Rows:
    return Rows(torch.arange(9), some_part(31 * call + rank, 9, 9, (2,), torch.float32, exact=False).values)


def _many_times(rank: int, call: int) -> Rows:
    """Rows that one program would not sum alone, side by side in the order of ids."""
    made = some_part(31 * call + rank, 300, 4, (2,), torch.float32)
    return Rows(torch.arange(300) // 150, made.values)


ALIKE = Reduces("ooo", (5,), 5, shape=(2,), data=_all)
FLOATS = Reduces("oo", (9,), 9, shape=(2,), data=_of_any_floats)
GATHERS = Reduces("gggg", (6, 0, 4, 5))
LONG_LISTS = Reduces("oo", (1, 28, 30, 0, 2, 29), 40, shape=(1,))
"""Lists of several chunks, beside ranks that have one."""

LONG_GATHERS = Reduces("gg", (1, 28, 30, 0, 2, 29), 40, shape=(1,))
REPEATED = Reduces("og", (300,), 2, shape=(2,), data=_many_times)

TWO_NODES = {"n_pes": 4, "ranks_per_node": 2}
THREE_NODES = {"n_pes": 3, "ranks_per_node": 1}

# ---------------------------------------------------------------------- changes

WAIT = "tdl.wait_signals(begun, g.world, g.rank, tdl.CMP_GE, epoch, g.monitor, WAITED)"
WAIT_NODES = WAIT.replace("g.world", "nodes.world")
SIGNAL = "stores.release(begun + g.rank, delta, epoch)"
SIGNAL_NODES = "tdl.signal_block(begun + g.rank, epoch, tdl.SIGNAL_SET, pe)"
HAVE = "have += (place(index, ids, tl.load(nodes.ranks + m)) >= 0).to(tl.int32)"
CROSSING = "tdl.putmem_nbi_block(out + offset, out + offset, row_bytes, tl.load(nodes.pes + {}))"
HAND_ON = "_hand_on(out, {}, row_bytes, memory, nodes, g)"
FORWARDED = HAND_ON.format("tl.cast(k, tl.int64) * row_bytes")

STORED = "_store_everywhere(result, at, inside, columns, memory, g, source, row_elements, ALIGNED)"
READ_BEFORE = (
    *to("kernels_reduce.reduce", f"{WAIT} != 0", "True"),
    *to("kernels_reduce.reduce", STORED, f"{STORED}\n{WAIT}"),
)
LOOKED_BEFORE = (
    *to("kernels_nodes.reduce_nodes", f"{WAIT_NODES} != 0", "True"),
    *to("kernels_nodes.reduce_nodes", "tdl.quiet()", f"tdl.quiet()\n{WAIT_NODES}"),
)
FORWARDED_BEFORE = (
    *to("kernels_nodes.forward", f"{WAIT_NODES} != 0", "True"),
    *to("kernels_nodes.forward", FORWARDED, f"{FORWARDED}\n{WAIT_NODES}"),
)
"""The wait comes after the work."""

MUTANTS = [
    # ------------------------------------------------------------------ one node
    Mutant("nobody waits in reduce", at_once("kernels_reduce.reduce", WAIT), ANYTHING),
    Mutant("reduce waits after it has read", READ_BEFORE, WRONG_ROWS),
    Mutant("meet does not wait", at_once("kernels_reduce.meet", WAIT), WRONG_ROWS),
    Mutant("nobody says that it has begun", to("kernels_reduce._announce", SIGNAL, "pass"), MISSING),
    Mutant(
        "signal of the epoch before",
        to("kernels_reduce._announce", SIGNAL, SIGNAL.replace("epoch", "epoch - 2")),
        MISSING,
    ),
    Mutant(
        "rows that others reduce are not staged",
        to("kernels_lists.plan", "inside & (owner != g.rank)", "inside & (owner != owner)"),
        WRONG_ROWS,
    ),
    Mutant(
        "repeated rows that I reduce are not combined",
        to("kernels_lists.plan", "staged = staged | (inside & (end - begin > 1))", "pass"),
        WRONG_ROWS,
    ),
    Mutant(
        "the first of repeated rows stands for all",
        to(
            "kernels_values._sum_of",
            "sum += tl.sum(tile.to(ACC), axis=0)",
            "sum += tl.sum(tl.where(parts == begin, 1, 0)[:, None] * tile.to(ACC), axis=0)",
        ),
        WRONG_ROWS,
    ),
    Mutant(
        "the owner's own row comes first",
        (
            *to("kernels_reduce.reduce", "q == g.rank", "(g.rank + q) % g.world == g.rank"),
            *to("kernels_reduce.reduce", "place(index, ids, q)", "place(index, ids, (g.rank + q) % g.world)"),
            *to(
                "kernels_reduce.reduce",
                "tl.load(memory.stages + q)",
                "tl.load(memory.stages + (g.rank + q) % g.world)",
            ),
        ),
        WRONG_ROWS,
        FLOATS,
    ),
    Mutant(
        "the first part is added to zero",
        to(
            "reduce.accumulate",
            "tl.where(first, part, tl.maximum(sum, part, propagate_nan=tl.PropagateNan.ALL))",
            "tl.maximum(sum, part)",
        ),
        WRONG_ROWS,
        Reduces("oo", (4,), 6, op="max", shape=(2,), data=_negative),
    ),
    Mutant(
        "every contributor owns the row",
        to("kernels_lists.plan", "tl.where(has & (seen == picked), mate, owner)", "tl.where(has, g.rank, owner)"),
        WRONG_ROWS,
    ),
    Mutant("the mean is the sum", to("reduce.share", "part = _divided(part, world)", "pass"), WRONG_ROWS, MEANS),
    Mutant(
        "a row that one rank has is not divided",
        to(
            "kernels_reduce.reduce",
            "alone = accumulate(tl.zeros([ROWS, WIDE], ACC), share(tile, g.world, ACC, OP), True, OP)",
            "alone = accumulate(tl.zeros([ROWS, WIDE], ACC), tile.to(ACC), True, OP)",
        ),
        WRONG_ROWS,
        MEANS,
    ),
    Mutant(
        "two rows of which many are there share a partial sum",
        to("kernels_values._slot", "2 * piece + (begin > piece * PIECE).to(tl.int64)", "2 * piece"),
        WRONG_ROWS,
        REPEATED,
        {"n_pes": 1},
    ),
    Mutant(
        "gather: the last rank comes first",
        (
            *to("kernels_merge.merge", "place(index, ids, q)", "place(index, ids, g.world - 1 - q)"),
            *to("kernels_merge.merge", "end_of_ids(index, q)", "end_of_ids(index, g.world - 1 - q)"),
        ),
        WRONG_ROWS,
        Reduces("gg", (9,), 9, shape=(2,), data=_of_any_floats),
    ),
    # ------------------------------------------------------------------ lists
    Mutant(
        "the header says the capacity",
        to("kernels_lists._write_header", "tl.store(own + 1, count)", "tl.store(own + 1, index.capacity)"),
        f"{WRONG_INDICES}|{REFUSED}",
    ),
    Mutant(
        "the header's bytes leave out the header",
        to("kernels_lists._write_header", "ids_bytes = 8 * (HEADER + kept)", "ids_bytes = 8 * kept"),
        f"{WRONG_INDICES}|{REFUSED}",
        LONG_LISTS,
    ),
    Mutant(
        "an id is written as often as it is there",
        to("kernels_lists._is_first", "inside & ((at == 0) | (here != before))", "inside"),
        f"{WRONG_INDICES}|{REFUSED}",
    ),
    # ------------------------------------------------------------------ several nodes
    Mutant("a node does not wait for the one before", LOOKED_BEFORE, WRONG_ROWS, world=TWO_NODES),
    Mutant("a node does not wait for the one before, one rank each", LOOKED_BEFORE, WRONG_ROWS, world=THREE_NODES),
    Mutant(
        "nobody waits in reduce_nodes", at_once("kernels_nodes.reduce_nodes", WAIT_NODES), ANYTHING, world=TWO_NODES
    ),
    Mutant("the forwarder waits after it has forwarded", FORWARDED_BEFORE, WRONG_ROWS, world=TWO_NODES),
    Mutant("nobody waits in forward", at_once("kernels_nodes.forward", WAIT_NODES), ANYTHING, world=TWO_NODES),
    Mutant("meet_nodes does not wait", at_once("kernels_nodes.meet_nodes", WAIT_NODES), WRONG_ROWS, world=TWO_NODES),
    Mutant(
        "nodes: nobody says that it has begun",
        to("kernels_nodes._announce", SIGNAL_NODES, "pass"),
        MISSING,
        world=TWO_NODES,
    ),
    Mutant(
        "contributors of all nodes pick the owner",
        to(
            "kernels_lists.plan",
            f"for m in tl.range(first, last):\n    {HAVE}",
            f"for m in tl.range(0, g.world):\n    {HAVE.replace('tl.load(nodes.ranks + m)', 'm')}",
        ),
        WRONG_ROWS,
        world=TWO_NODES,
    ),
    Mutant(
        "what earlier nodes have summed is left out",
        to("kernels_nodes.reduce_nodes", "earlier != 0", "earlier > 1"),
        WRONG_ROWS,
        ALIKE,
        TWO_NODES,
    ),
    Mutant(
        "a node adds to what it has not been given",
        to("kernels_nodes.reduce_nodes", "earlier != 0", "earlier >= 0"),
        WRONG_ROWS,
        world=TWO_NODES,
    ),
    Mutant(
        "a partial sum skips a node",
        to(
            "kernels_nodes._steps_of",
            "tl.minimum(following, number)",
            "tl.maximum(following % nodes.n_nodes, number)",
        ),
        WRONG_ROWS,
        ALIKE,
        THREE_NODES,
    ),
    Mutant(
        "all rows begin with the same node",
        to("kernels_lists.turn", "_choose(ids, n_nodes, 2246822519)", "(ids * 0).to(tl.int32)"),
        WRONG_ROWS,
        FLOATS,
        THREE_NODES,
    ),
    Mutant(
        "a partial sum is not sent",
        to("kernels_nodes.reduce_nodes", CROSSING.format("after"), "pass"),
        WRONG_ROWS,
        ALIKE,
        TWO_NODES,
    ),
    Mutant(
        "a final row is not sent",
        to("kernels_nodes.reduce_nodes", CROSSING.format("entrance"), "pass"),
        WRONG_ROWS,
        world=TWO_NODES,
    ),
    Mutant(
        "the last node keeps the row to its owner",
        to("kernels_nodes.reduce_nodes", HAND_ON.format("offset"), "pass"),
        WRONG_ROWS,
        world=TWO_NODES,
    ),
    Mutant("the forwarder keeps the row", to("kernels_nodes.forward", FORWARDED, "pass"), WRONG_ROWS, world=TWO_NODES),
    # ------------------------------------------------------------------ the exchange, counted
    Mutant(
        "exchange: a rank is written to before it has entered",
        at_once("stores.may_write", all_gather.MAY_WRITE),
        BAD_LISTS,
        GATHERS,
    ),
    Mutant(
        "exchange: the receiver does not wait",
        at_once(
            "exchange.kernels_direct.exchange_direct",
            "tdl.wait_signal(signals + frm, tdl.CMP_GE, epoch, g.monitor, frm, channel * g.world + frm)",
        ),
        BAD_LISTS,
        LONG_LISTS,
    ),
    Mutant(
        "exchange: the signal does not order the list",
        to("stores.push", all_gather.STORE + "\n" + all_gather.RELEASE, all_gather.RELEASE + "\n" + all_gather.STORE),
        BAD_LISTS,
        LONG_LISTS,
    ),
    Mutant(
        "exchange, nodes: the receiver waits for the first chunk only",
        to("kernels_puts._receive", "row(g, epoch, channel)", "row(g, epoch, 0)"),
        BAD_LISTS,
        LONG_LISTS,
        TWO_NODES,
    ),
    Mutant(
        "exchange: the forwarder counts its own bytes",
        to(
            "kernels_puts.all_gather_2d",
            "size = chunk_bytes(used_bytes(landed, nbytes, COUNTED), chunk, channel)",
            "pass",
        ),
        BAD_LISTS,
        LONG_GATHERS,
        TWO_NODES,
    ),
    Mutant(
        "exchange: the forwarder does not wait for the count",
        at_once("kernels_puts.all_gather_2d", "tdl.wait_signal(first, tdl.CMP_GE, epoch, g.monitor, origin, origin)"),
        BAD_LISTS,
        LONG_GATHERS,
        TWO_NODES,
    ),
    Mutant(
        "exchange: the forwarder does not wait for the chunk",
        at_once("kernels_puts.all_gather_2d", all_gather.FORWARDED),
        BAD_LISTS,
        LONG_GATHERS,
        TWO_NODES,
    ),
    Mutant(
        "exchange: a list is packed while it is still being read",
        to("puts.push_remote", "tdl.quiet()", "pass"),
        BAD_LISTS,
        GATHERS,
        TWO_NODES,
    ),
    Mutant(
        "exchange: segments are as long as this rank's",
        to(
            "exchange.kernels_direct.used_bytes",
            "tl.load(tl.cast(segment, tl.int64).to(tl.pointer_type(tl.int64)))",
            "0 * tl.load(tl.cast(segment, tl.int64).to(tl.pointer_type(tl.int64)))",
        ),
        f"{WRONG_INDICES}|{REFUSED}",
    ),
]
