# SPDX-License-Identifier: Apache-2.0
"""The sparse all-reduce's kernels with one protection or one rule less: what the simulator must catch."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from kernel_mutants import AnyChange, Argument, Call, Change, Inserted, Mutant, dropped, missing, no_wait

from ..suite.all_gather import RELEASED_FIRST
from .cases import HEAP, TABLES, Reduces, some_part
from .reference import Rows

WRONG_ROWS = r"AssertionError: rank \d+, call \d+ \([og]\): \d+ wrong rows"
WRONG_INDICES = r"AssertionError: rank \d+, call \d+ \([og]\): .* are wrong indices"
REFUSED = r"RankMismatchError: |ValueError: .* indices of rank|ContextError: .* different rows"
UNSIGNALLED = missing("signals")
NO_TENSOR = r"ValueError: pe\d+ .* would load from (address \w+, where no tensor lives|a null pointer)"
BAD_INDICES = f"{WRONG_INDICES}|{REFUSED}"
BAD_LISTS = f"{WRONG_ROWS}|{BAD_INDICES}"
ANYTHING = f"{BAD_LISTS}|{UNSIGNALLED}"
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

ANY, MEANS = Reduces(), Reduces(op="mean")
LISTS = Reduces("oog", tables=TABLES)
FLOAT_LISTS = Reduces("oo", (20,), tables=((9, (2,)), (9, (4,))), dtype=torch.float16, exact=False)


def _mutant(
    name: str, changes: AnyChange | tuple[AnyChange, ...], expect: str = WRONG_ROWS, case: Reduces = ANY, *,
    nodes: tuple[int, ...] = (4,),
) -> Mutant:  # fmt: skip
    changes = changes if isinstance(changes, tuple) else (changes,)
    world: dict[str, Any] = {"n_pes": sum(nodes), "ranks_per_node": nodes, "heap_bytes": HEAP}
    # Some seed fails as it should; how others fail depends on who gets ahead of whom.
    return Mutant(f"sparse: {name}", changes, expect, case, world, seeds=20, any_seed=True)


ONE = _mutant
TWO, THREE = partial(_mutant, nodes=(2, 2)), partial(_mutant, nodes=(1, 1, 1))

# ---------------------------------------------------------------------- changes

REDUCE, MEET, REDUCE_NODES, FORWARD, MEET_NODES, PLAN, MERGE, GATHER, RAILS = (
    *("kernels_reduce.reduce", "kernels_reduce.meet", "kernels_nodes.reduce_nodes", "kernels_nodes.forward"),
    *("kernels_nodes.meet_nodes", "kernels_lists.plan", "kernels_merge.merge", "kernels_direct.exchange_direct"),
    "all_gather.kernels_puts.all_gather_2d",
)
REDUCE_NODES, FORWARD, MEET_NODES = (f"sparse_all_reduce.{name}" for name in (REDUCE_NODES, FORWARD, MEET_NODES))
GATHER = f"exchange.{GATHER}"


def _late(where: str, call: str, of: str = "", ranks: str = "nodes") -> tuple[AnyChange, ...]:
    """The wait comes after a call, and not before all of it."""
    wait = f"tdl.wait_signals(begun, {ranks}.world, g.rank, tdl.CMP_GE, epoch, g.monitor, WAITED)"
    return Call(where, "tdl.wait_signals", "1"), Inserted(where, call, wait, behind=True, of=of)


LOOKED_BEFORE = _late(REDUCE_NODES, "tdl.quiet")

MUTANTS = (
    # ------------------------------------------------------------------ one node
    ONE("nobody waits in reduce", no_wait(REDUCE, "tdl.wait_signals"), ANYTHING),
    ONE("reduce waits after it has read", _late(REDUCE, "_store_everywhere", "result", "g")),
    ONE("meet does not wait", no_wait(MEET, "tdl.wait_signals")),
    ONE("nobody says that it has begun", dropped("kernels_reduce._announce", "stores.release"), UNSIGNALLED),
    ONE(
        "signal of the epoch before",
        Argument("kernels_reduce._announce", "stores.release", "epoch", "epoch - 2"), UNSIGNALLED,
    ),
    ONE(
        "rows that others reduce are not staged",
        Change(PLAN, "inside & (owner != g.rank)", "inside & (owner != owner)"),
    ),
    ONE(
        "repeated rows that I reduce are not combined",
        Change(PLAN, "staged = staged | (inside & (end - begin > 1))", "pass"),
    ),
    ONE(
        "the first of repeated rows stands for all",
        Change(
            "kernels_values._sum_of", "part.to(ACC)", "(tl.where(i + j == begin, 1, 0) * part.to(ACC))"
        ),
    ),
    ONE(
        "the owner's own row comes first",
        (
            Change(REDUCE, "q == g.rank", "(g.rank + q) % g.world == g.rank"),
            Argument(REDUCE, "find", "q", "(g.rank + q) % g.world"),
            Change(REDUCE, "g.deltas + q", "g.deltas + (g.rank + q) % g.world"),
        ),
        case=FLOATS,
    ),
    ONE(
        "the first part is added to zero",
        Call(
            "reduce.accumulate", "tl.where", "tl.maximum(sum, part)",
            of="tl.maximum(sum, part, propagate_nan=tl.PropagateNan.ALL)",
        ),
        case=Reduces("oo", (4,), 6, op="max", shape=(2,), data=_negative),
    ),
    ONE("every contributor owns the row", Change(PLAN, "inside & (owner == g.rank)", "inside")),
    ONE("the mean is the sum", Change("reduce.share", "part = _divided(part, world)", "pass"), case=MEANS),
    ONE(
        "a row that one rank has is not divided",
        (
            Inserted(
                REDUCE, "rounded", "alone = accumulate(tl.zeros([ROWS, WIDE], ACC), tile.to(ACC), True, OP)",
                of="alone",
            ),
        ),
        case=MEANS,
    ),
    ONE(
        "two rows of which many are there share a partial sum",
        Change(
            "kernels_values._slot", "2 * (begin // PIECE + piece) + (piece > 0).to(tl.int64)", "begin // PIECE + piece"
        ),
        case=REPEATED, nodes=(1,),
    ),
    ONE(
        "gather: the last rank comes first",
        (
            Argument(MERGE, "find", "q", "g.world - 1 - q"),
            Argument(MERGE, "end_of_ids", "q", "g.world - 1 - q"),
        ),
        case=Reduces("gg", (9,), 9, shape=(2,), data=_of_any_floats),
    ),
    # ------------------------------------------------------------------ several tables
    ONE(
        "tables: ids are those of the table alone",
        Change("kernels_tables.join", "begins_at + row", "row"), f"{BAD_INDICES}|{NO_TENSOR}", LISTS,
    ),
    ONE(
        "tables: values are found as if the table were the only one",
        Change("kernels_tables.join", "values - begin * width * ITEM", "values"),
        f"{WRONG_ROWS}|{NO_TENSOR}", LISTS,
    ),
    ONE(
        "tables: rows are as wide as the widest",
        Change(
            "kernels_tables.source_of",
            "tl.multiple_of(tl.load(tables.widths + table, mask=there, other=0), tables.aligned)",
            "row_elements + 0 * table",
        ),
        f"{WRONG_ROWS}|{NO_TENSOR}", LISTS,
    ),
    ONE(
        "tables: a table begins in the union where the one before it has its last row",
        Change("index_match.kernels.below", "((found < ids) & (place < size))", "(found < found)"),
        f"{BAD_LISTS}|RuntimeError: split_with_sizes", LISTS,
    ),
    THREE(
        "tables: the order of nodes is that of ids of all tables",
        Change("kernels_tables.local", "ids = ids - tl.load(tables.firsts + _table_of(ids, tables))", "pass"),
        case=FLOAT_LISTS,
    ),
    # ------------------------------------------------------------------ lists
    ONE(
        "the header says the capacity",
        Argument("kernels_lists._write_header", "tl.store", "count", "index.capacity", of="own + 1"), BAD_INDICES,
    ),
    ONE(
        "the header's bytes leave out the header",
        Change("kernels_lists._write_header", "ids_bytes = 8 * (HEADER + kept)", "ids_bytes = 8 * kept"),
        BAD_INDICES, LONG_LISTS,
    ),
    ONE(
        "an id is written as often as it is there",
        Change("kernels_lists._is_first", "inside & ((at == 0) | (here != before))", "inside"), BAD_INDICES,
    ),
    # ------------------------------------------------------------------ several nodes
    TWO("a node does not wait for the one before", LOOKED_BEFORE),
    THREE("a node does not wait for the one before, one rank each", LOOKED_BEFORE),
    TWO("nobody waits in reduce_nodes", no_wait(REDUCE_NODES, "tdl.wait_signals"), ANYTHING),
    TWO("the forwarder waits after it has forwarded", _late(FORWARD, "_hand_on")),
    TWO("nobody waits in forward", no_wait(FORWARD, "tdl.wait_signals"), ANYTHING),
    TWO("meet_nodes does not wait", no_wait(MEET_NODES, "tdl.wait_signals")),
    TWO(
        "nodes: nobody says that it has begun",
        dropped("sparse_all_reduce.kernels_nodes._announce", "tdl.signal_block"), UNSIGNALLED,
    ),
    TWO("another node's contributors own the row", Argument(PLAN, "owner_in", "nodes.node", "0")),
    TWO("what earlier nodes have summed is left out", Change(REDUCE_NODES, "earlier != 0", "earlier > 1"), case=ALIKE),
    TWO("a node adds to what it has not been given", Change(REDUCE_NODES, "earlier != 0", "earlier >= 0")),
    THREE(
        "a partial sum skips a node",
        Change(
            "sparse_all_reduce.kernels_nodes._steps_of",
            "tl.minimum(following, number)", "tl.maximum(following % nodes.n_nodes, number)",
        ),
        case=ALIKE,
    ),
    THREE(
        "all rows begin with the same node",
        Call("kernels_lists.turn", "_choose", "({0} * 0).to(tl.int32)"), case=FLOATS,
    ),
    TWO(
        "a partial sum is not sent",
        dropped(REDUCE_NODES, "tdl.putmem_nbi_block", "tl.load(nodes.pes + after)"), case=ALIKE,
    ),
    TWO("a final row is not sent", dropped(REDUCE_NODES, "tdl.putmem_nbi_block", "tl.load(nodes.pes + entrance)")),
    TWO("the last node keeps the row to its owner", dropped(REDUCE_NODES, "_hand_on")),
    TWO("the forwarder keeps the row", dropped(FORWARD, "_hand_on")),
    # ------------------------------------------------------------------ the exchange, counted
    ONE("exchange: a rank is written to before it has entered", no_wait("stores.may_write"), BAD_LISTS, GATHERS),
    ONE("exchange: the receiver does not wait", no_wait(GATHER), BAD_LISTS, LONG_LISTS),
    ONE("exchange: the signal does not order the list", RELEASED_FIRST, BAD_LISTS, LONG_LISTS),
    TWO(
        "exchange, nodes: the receiver waits for the first chunk only",
        Argument("all_gather.kernels_puts._receive", "row", "chunk_index", "0"), BAD_LISTS, LONG_LISTS,
    ),
    TWO(
        "exchange: the forwarder counts its own bytes",
        Change(RAILS, "size = chunk_bytes(used_bytes(landed, nbytes, COUNTED), chunk, chunk_index)", "pass"),
        BAD_LISTS, LONG_GATHERS,
    ),
    TWO("exchange: the forwarder does not wait for the count", no_wait(RAILS, of="first"), BAD_LISTS, LONG_GATHERS),
    TWO(
        "exchange: the forwarder does not wait for the chunk",
        no_wait(RAILS, of="signals + origin"), BAD_LISTS, LONG_GATHERS,
    ),
    TWO(
        "exchange: a list is packed while it is still being read", dropped("puts.push_remote", "tdl.quiet"),
        BAD_LISTS, GATHERS,
    ),
    ONE(
        "exchange: segments are as long as this rank's",
        Call("exchange.kernels_direct.used_bytes", "tl.load", "0 * tl.load({0})"), BAD_INDICES,
    ),
)  # fmt: skip
