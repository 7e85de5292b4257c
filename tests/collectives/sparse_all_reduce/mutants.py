# SPDX-License-Identifier: Apache-2.0
"""The sparse all-reduce's kernels with one protection or one rule less: what the simulator must
catch."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from kernel_mutants import (
    AnyChange,
    Argument,
    Call,
    Change,
    Inserted,
    Mutant,
    dropped,
    missing,
    no_wait,
)

from ..suite.all_gather import RELEASED_FIRST
from .cases import GATHER, HEAP, OWNER, Reduces

WRONG_ROWS = r"AssertionError: rank \d+, call \d+ \(\w+\): \d+ wrong rows"
WRONG_INDICES = r"AssertionError: rank \d+, call \d+ \(\w+\): .* are wrong indices"
REFUSED = r"RankMismatchError: |ValueError: .* indices of rank|ContextError: .* different rows"
UNSIGNALLED = missing("signals")
STUCK_IN_PACK = r"[Dd]eadlock[\s\S]*pack\(\S+ spins on address"
BAD_INDICES = f"{WRONG_INDICES}|{REFUSED}"
BAD_LISTS = f"{WRONG_ROWS}|{BAD_INDICES}"
ANYTHING = f"{BAD_LISTS}|{UNSIGNALLED}"
"""Where ranks get so far ahead that signals of one epoch stand for those of another."""


GATHERS = Reduces(4 * (GATHER,), (6, 0, 4, 5))
LONG_LISTS = Reduces(2 * (OWNER,), (1, 28, 30, 0, 2, 29), 40, shape=(1,))
"""Lists of several chunks, beside ranks that have one."""

LONG_GATHERS = Reduces(2 * (GATHER,), (1, 28, 30, 0, 2, 29), 40, shape=(1,))

ANY = Reduces()
IN_ORDER = Reduces(2 * (OWNER,), (8,), 3, exact=False)
FLOAT_LISTS = Reduces(
    2 * (OWNER,), (20,), tables=((9, (2,)), (9, (4,))), dtype=torch.float16, exact=False
)


def _mutant(
    name: str, changes: AnyChange | tuple[AnyChange, ...], expect: str = WRONG_ROWS, case: Reduces = ANY, *,
    nodes: tuple[int, ...] = (4,),
) -> Mutant:  # fmt: skip
    changes = changes if isinstance(changes, tuple) else (changes,)
    world: dict[str, Any] = {"n_pes": sum(nodes), "ranks_per_node": nodes, "heap_bytes": HEAP}
    # Some seed fails as it should; how others fail depends on who gets ahead of whom.
    return Mutant(f"sparse: {name}", changes, expect, case, world, seeds=20, any_seed=True)


ONE = _mutant
TWO = partial(_mutant, nodes=(2, 2))
THREE = partial(_mutant, nodes=(1, 1, 1))

# ---------------------------------------------------------------------- changes

REDUCE = "kernels_reduce.reduce"
MEET = "kernels_reduce._meet"
REDUCE_NODES = "sparse_all_reduce.kernels_nodes.reduce_nodes"
FORWARD = "sparse_all_reduce.kernels_nodes.forward"
MEET_NODES = "sparse_all_reduce.kernels_nodes.meet_nodes"
EXCHANGE = "exchange.kernels_direct.exchange_direct"
RAILS = "all_gather.kernels_puts.all_gather_2d"
BUILT = "match.wait_until_built"


def _late(where: str, call: str, of: str = "", ranks: str = "nodes") -> tuple[AnyChange, ...]:
    """The wait comes after a call, and not before all of it."""
    wait = (
        f"tdl.wait_signals(begun, {ranks}.world, g.rank, tdl.CMP_GE, epoch, g.monitor, WORLD_POW2)"
    )
    return Call(where, "tdl.wait_signals", "1"), Inserted(where, call, wait, behind=True, of=of)


LOOKED_BEFORE = _late(REDUCE_NODES, "tdl.quiet")

PACK = "kernels_values.pack"
PLACE = "kernels_lists.place_ids"
FIRST_ONLY = "(at < n) & (block == 0)"
LAST_FIRST = Change(PLACE, "others[None, :] < at[:, None]", "others[None, :] > at[:, None]")

MUTANTS = (
    # ------------------------------------------------------------------ one node
    ONE("a list is written before its ids are sorted", dropped(PACK, "wait_until_done", "before"), BAD_LISTS),
    ONE("ids beyond the first program's are not sorted", Change(PLACE, "at < n", FIRST_ONLY), BAD_LISTS),
    ONE("rows go behind a list that is not written", dropped(PACK, "wait_until_done", "blocks"), BAD_LISTS, GATHERS),
    ONE("counters are left too early", Argument(PACK, "_leave", "blocks + values", "blocks"), STUCK_IN_PACK, GATHERS),
    ONE("the order of a rank's equal ids is not kept", LAST_FIRST, case=IN_ORDER),
    ONE("nobody waits in reduce", no_wait(REDUCE, "tdl.wait_signals"), ANYTHING),
    ONE("reduce waits after it has read", _late(REDUCE, "_store_everywhere", "result", "g")),
    ONE("the meeting does not wait for peers", no_wait(MEET, "tdl.wait_signals")),
    ONE("the meeting does not wait for all programs", Change(MEET, "tl.num_programs(0) - 1", "0")),
    ONE("the meeting does not order what others have stored", Change(MEET, "'acq_rel'", "'relaxed'")),
    ONE("plan does not wait for the directory", dropped("kernels_values.prepare", BUILT), ANYTHING),
    ONE("merge does not wait for the directory", dropped("kernels_merge.merge", BUILT), ANYTHING, GATHERS),
    # ------------------------------------------------------------------ several nodes
    TWO("a node does not wait for the one before", LOOKED_BEFORE),
    THREE("a node does not wait for the one before, one rank each", LOOKED_BEFORE),
    THREE(
        "tables: the order of nodes is that of ids of all tables",
        Change("kernels_tables.local", "ids = ids - tl.load(tables.firsts + _table_of(ids, tables))", "pass"),
        case=FLOAT_LISTS,
    ),
    TWO("nobody waits in reduce_nodes", no_wait(REDUCE_NODES, "tdl.wait_signals"), ANYTHING),
    TWO("the forwarder waits after it has forwarded", _late(FORWARD, "_hand_on")),
    TWO("nobody waits in forward", no_wait(FORWARD, "tdl.wait_signals"), ANYTHING),
    TWO("meet_nodes does not wait", no_wait(MEET_NODES, "tdl.wait_signals")),
    # ------------------------------------------------------------------ the exchange, counted
    ONE("exchange: a rank is written to before it has entered", no_wait("stores.may_write"), BAD_LISTS, GATHERS),
    ONE("exchange: the receiver does not wait", no_wait(EXCHANGE), BAD_LISTS, LONG_LISTS),
    ONE("exchange: the signal does not order the list", RELEASED_FIRST, BAD_LISTS, LONG_LISTS),
    TWO(
        "exchange, nodes: the receiver waits for the first chunk only",
        Argument("all_gather.kernels_puts._receive", "row", "chunk_index", "0"), BAD_LISTS, LONG_LISTS,
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
)  # fmt: skip
