# SPDX-License-Identifier: Apache-2.0
"""What the suite has to know of all-reduce: where it runs, further grids, its mutants."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from kernel_mutants import Argument, Call, Change, Inserted, Moved, dropped, missing, no_wait

from tdcoll.collectives.all_reduce.spec import SPEC

from .algorithm_cases import (
    FLAGGED,
    WRONG,
    Dense,
    Grid,
    job,
    mutant,
    mutants_of_copies,
    mutants_of_epilogues,
    mutants_of_loops,
)
from .all_gather import ONE_SLOT, RELEASED_FIRST, SIGNAL_FIRST, UNSIGNALLED, WAITS_FIRST
from .calls import Calls
from .kinds import IN_PLACE, OTHER, OUT_OF_PLACE, SYMMETRIC, SYMMETRIC_IN_PLACE
from .reduce_scatter import BACKWARDS, PUT_LATE

ONE = partial(mutant, SPEC, algorithm="one_shot", nodes=(3,))
TWO = partial(mutant, SPEC, algorithm="two_shot", nodes=(3,))
DIRECT = partial(mutant, SPEC, algorithm="direct")
PUTS = partial(mutant, SPEC, algorithm="1d", nodes=(2, 2))
RAILS = partial(mutant, SPEC, algorithm="2d", nodes=(2, 2))

SIZES: dict[str, Any] = {"kinds": 6 * (OUT_OF_PLACE,), "counts": (12, 60)}
UNEQUAL_SIZES: dict[str, Any] = {
    "kinds": 8 * (OUT_OF_PLACE,),
    "counts": (9, 30, 1, 0, 30, 2, 2, 30),
}
FIVE_CALLS: dict[str, Any] = {"kinds": 5 * (OUT_OF_PLACE,)}
IN_ROWS: dict[str, Any] = {"counts": (45,), "columns": 9}
LATE: dict[str, Any] = {"world": {"stragglers": True}}
AMONG_GATHERS: dict[str, Any] = {"kinds": 3 * (OUT_OF_PLACE, OTHER), "others": ("all_gather",)}

BY_ONE = "all_reduce.kernels_words.all_reduce_one_shot"
BY_TWO = "all_reduce.kernels_words.all_reduce_two_shot"
STORES = "all_reduce.kernels_direct.all_reduce_direct"
SENDS = "all_reduce.kernels_puts.all_reduce_puts"
SEND_SUM = "all_reduce.kernels_puts._send_sum"
NODES = "all_reduce.kernels_nodes.all_reduce_nodes"
ADD_NODE = "all_reduce.kernels_nodes._sum_node"

UNHEARD = missing("lamport")
UNFLAGGED = missing("flagged")
LOST = f"{WRONG}|{UNHEARD}"
ANY = f"{WRONG}|{UNSIGNALLED}"
TWO_SLOTS = Change("lamport.slot", "call % 3", "call % 2")
FIRST_PART = """
part = {0}.to(tl.pointer_type(tl.int32))
while tl.max(((tl.load(part, mask={2}, other=0, volatile=True) == {1}) & {2}).to(tl.int32)) != 0:
    pass
first = tl.load(part, mask={2}, other=0)
second = tl.load(part + 1, mask={2}, other=0)
third = tl.load(part + 2, mask={2}, other=0)
fourth = tl.load(part + 3, mask={2}, other=0)
return first, second, third, fourth, tl.full(word.shape, 1, tl.int32)
"""
WORDS_OF_THREE = [
    "*tdl.load_words({0}, {5})",
    "*tdl.load_words({0} + {1}, {5})",
    "*tdl.load_words({0} + 2 * {1}, {5})",
]
"""Of three ranks, as they are in memory."""

OTHERS_BLOCK = """
other = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK + tl.arange(0, BLOCK)
mine = words.repair(source, other, size, words.load(source, other, size, LAMPORT), LAMPORT)
"""

MUTANTS = (
    # ------------------------------------------------------------------ words
    # Two-shot needs its third slot as well, although it clears before it sends sums. A rank that
    # has all sums knows that the others have issued the stores that clear their memory, but nothing
    # orders those before the sums: with two slots they may land on words of the next call. With
    # flags nothing is cleared, and calls of equal sizes could do with one slot: a rank that has all
    # sums knows that all others have read what it sent first.
    ONE("two slots", TWO_SLOTS, LOST, **SIZES, **LATE),
    ONE(
        "the memory of the next call is cleared",
        Change("lamport.clear", "call - 1", "call + 1"),
        LOST,
        **SIZES,
        **LATE,
    ),
    # A peer that has this call's words may write where this rank's clearing has not landed yet.
    ONE(
        "two slots, cleared before sending",
        (TWO_SLOTS, Moved(BY_ONE, "words.send_to_all", "lamport.clear")),
        LOST,
        **SIZES,
    ),
    *(
        algorithm("flags: one slot", ONE_SLOT, f"{WRONG}|{UNFLAGGED}", counts=(12, 60), **FLAGGED)
        for algorithm in (ONE, TWO)
    ),
    ONE(
        "the slot counts epochs",
        Change("lamport.start", "lamport.control", "g.control"),
        LOST,
        kinds=(
            OUT_OF_PLACE,
            OUT_OF_PLACE,
            OUT_OF_PLACE,
            OTHER,
            OUT_OF_PLACE,
            OUT_OF_PLACE,
            OTHER,
        ),
        others=("all_gather",),
    ),
    ONE(
        "as much is cleared as this call writes",
        Change(
            "lamport.clear",
            "tl.load(lamport.written + slot(call - 1))",
            "tl.maximum((tl.cast(nbytes, tl.int64) + 15) // 16, 1)",
        ),
        **UNEQUAL_SIZES,
    ),
    ONE(
        "a program clears what the grid of this call would have written",
        Change("lamport.clear", "begin += tl.cast(programs, tl.int64) * BLOCK", "begin = left"),
        **UNEQUAL_SIZES,
    ),
    ONE("no word is cleared", Change("lamport.clear", "begin < left", "begin < 0"), **FIVE_CALLS),
    ONE(
        "what is sent may be the sentinel",
        Change("lamport._present", "tl.where(part == SENTINEL, 0, part)", "part"),
        UNHEARD,
        specials=True,
    ),
    ONE(
        "a call of no bytes sends nothing",
        Change("lamport.carry", "tl.maximum((nbytes + 15) // 16, 1)", "(nbytes + 15) // 16"),
        LOST,
        kinds=7 * (OUT_OF_PLACE,),
        counts=(9, 0, 0, 0, 9, 9, 9),
    ),
    ONE(
        "a word is there when its first part is",
        (
            # Of one rank after the other, as in groups that one wait can't take.
            Change("words.receive", "g.world <= RANKS_OF_ONE_WAIT", "False"),
            Call("lamport.receive", "tdl.wait_words", FIRST_PART),
        ),
    ),
    TWO(
        "a call of no bytes sends nothing",
        Change(
            BY_TWO,
            "tl.maximum(tl.cdiv(tl.cdiv(size, width), g.world), 1)",
            "tl.cdiv(tl.cdiv(size, width), g.world)",
        ),
        LOST,
        kinds=6 * (OUT_OF_PLACE,),
        counts=(20, 0, 0),
        **LATE,
    ),
    ONE("nothing is cleared", dropped(BY_ONE, "lamport.clear"), **FIVE_CALLS),
    TWO("nothing is cleared", dropped(BY_TWO, "lamport.clear"), **FIVE_CALLS),
    ONE(
        "words are not waited for",
        Call(
            "words.receive",
            "tdl.wait_words_of_all",
            f"({', '.join([*WORDS_OF_THREE, '{5}'])})",
        ),
    ),
    ONE(
        "words are received before they are sent",
        Moved(BY_ONE, "words.send_to_all", "_one_shot_sum"),
        UNHEARD,
        **WAITS_FIRST,
    ),
    TWO(
        "program i waits for the last but i",
        Change(
            "words.receive",
            "16 * tl.cast(word, tl.int64)",
            "16 * tl.cast(tl.num_programs(0) * word.shape[0] - 1 - word, tl.int64)",
        ),
        UNHEARD,
        **WAITS_FIRST,
    ),
    ONE(
        "in place: a program stores over what another one has yet to send",
        (
            Inserted(BY_ONE, "_one_shot_sum", OTHERS_BLOCK),
            Argument(BY_ONE, "_one_shot_sum", "word", "other"),
            Argument(BY_ONE, "_one_shot_sum", "mask", "words.carry(other, size, LAMPORT)"),
        ),
        kinds=4 * (IN_PLACE,),
    ),
    # ------------------------------------------------------------------ stores
    # Calls of one kind could do with one slot: a rank that has all sums knows that all others have
    # read its parts.
    DIRECT("one slot", ONE_SLOT, ANY, **AMONG_GATHERS),
    PUTS("one slot", ONE_SLOT, ANY, **AMONG_GATHERS),
    DIRECT("the sum does not wait", no_wait(STORES, "tdl.wait_signals", "arrived")),
    DIRECT("sums are copied out before they are there", no_wait(STORES)),
    PUTS("the sum does not wait", no_wait(SENDS, "tdl.wait_signals", "arrived")),
    PUTS("sums are copied out before they are there", no_wait(SENDS)),
    DIRECT(
        "programs that wait before those that send",
        Change(STORES, "tl.program_id(0)", BACKWARDS),
        UNSIGNALLED,
        **WAITS_FIRST,
    ),
    # ------------------------------------------------------------------ also into symmetric results
    DIRECT("the signal goes before the part", RELEASED_FIRST),
    DIRECT(
        "the signal goes before the part into results",
        RELEASED_FIRST,
        kinds=4 * (SYMMETRIC_IN_PLACE,),
    ),
    DIRECT(
        "the signal goes before the sum",
        Moved(STORES, "sum_chunk", "stores.release_to_all"),
    ),
    DIRECT(
        "the signal goes before the sum into results",
        Moved(STORES, "sum_chunk", "stores.release_to_all"),
        kinds=4 * (SYMMETRIC,),
    ),
    DIRECT(
        "the sum does not wait into results",
        no_wait(STORES, "tdl.wait_signals", "arrived"),
        kinds=4 * (SYMMETRIC_IN_PLACE,),
    ),
    DIRECT(
        "nobody waits for sums into results",
        no_wait(STORES, "tdl.wait_signals", "summed"),
        kinds=4 * (SYMMETRIC,),
    ),
    # ------------------------------------------------------------------ puts
    PUTS("a part is put with a signal that goes before it", PUT_LATE),
    PUTS(
        "a sum is put with a signal that goes before it",
        Call(
            SEND_SUM,
            "tdl.putmem_signal_nbi_block",
            SIGNAL_FIRST + "tdl.putmem_nbi_block({0}, {1}, {2}, {6})",
        ),
    ),
    PUTS("the sum is sent before it is there", Moved(SENDS, "sum_chunk", behind="_send_sum")),
    PUTS(
        "programs that wait before those that put",
        Change("puts.task", "tl.program_id(0)", BACKWARDS),
        UNSIGNALLED,
        **WAITS_FIRST,
    ),
    # ------------------------------------------------------------------ epilogues
    TWO(
        "the owner of a part takes it for the first",
        Change(
            "all_reduce.kernels_words._sum_and_hand_on",
            "own = (out, g.rank * part + place, size, summed)",
            "own = (out, place, size, summed)",
        ),
        **IN_ROWS,
    ),
    TWO(
        "the owner of a part applies an epilogue, and sends the sum without it",
        Argument(
            "all_reduce.kernels_words._sum_and_hand_on",
            "words.send_to_all",
            "result",
            "words.reduce(parts, g.world, own, (None, None, None), DTYPE, ACC, OP, LAMPORT)",
        ),
        **IN_ROWS,
    ),
    TWO(
        "the owner of a part sends its result, and stores the sum without an epilogue",
        Argument(
            "all_reduce.kernels_words._sum_and_hand_on",
            "words.store",
            "result",
            "words.reduce(parts, g.world, own, (None, None, None), DTYPE, ACC, OP, LAMPORT)",
        ),
        **IN_ROWS,
    ),
    RAILS(
        "all chunks of a rail's sum have the place of the first",
        Argument("all_reduce.kernels_nodes._sum_rail", "result_of", "out + offset", "out"),
        **IN_ROWS,
    ),
    # ------------------------------------------------------------------ rails
    RAILS("nobody waits for the parts of the node", Call(NODES, "_wait_for", "1", "routes.ranks")),
    RAILS("nobody waits for the sums of the rail", Call(NODES, "_wait_for", "1", "rail")),
    RAILS(
        "sums travel rounded",
        Argument(ADD_NODE, "tl.store", "sum", "sum.to(DTYPE).to(ACC)"),
        dtype=torch.bfloat16,
    ),
    RAILS("nobody waits for the results", Call(NODES, "tdl.wait_signal", "1")),
    RAILS(
        "programs that wait before those that send",
        Change(
            NODES,
            "tl.program_id(0) % per_chunk",
            "per_chunk - 1 - tl.program_id(0) % per_chunk",
        ),
        UNSIGNALLED,
        **WAITS_FIRST,
    ),
)

# ---------------------------------------------------------------------- further grids

AMONG_OTHERS = Calls(
    SPEC,
    ("one_shot", "two_shot", "direct", "1d"),
    (
        OUT_OF_PLACE, OTHER, IN_PLACE, OUT_OF_PLACE, OTHER, OUT_OF_PLACE, OUT_OF_PLACE, IN_PLACE,
        OUT_OF_PLACE, OTHER, OUT_OF_PLACE, IN_PLACE,
    ),
    counts=(46, 46, 0),
)  # fmt: skip
INTO_SYMMETRIC_RESULTS = Calls(
    SPEC,
    ("direct", "one_shot", "direct", "two_shot", "1d"),
    (
        SYMMETRIC, OTHER, OUT_OF_PLACE, SYMMETRIC_IN_PLACE, OTHER, SYMMETRIC, SYMMETRIC_IN_PLACE,
        SYMMETRIC, OTHER, OUT_OF_PLACE,
    ),
    counts=(46, 0, 46),
)  # fmt: skip
RAILS_AND_PUTS = Calls(
    SPEC,
    ("2d", "1d"),
    (OUT_OF_PLACE, OTHER, IN_PLACE, OTHER, OUT_OF_PLACE, OUT_OF_PLACE, IN_PLACE),
    counts=(46, 46, 0),
)
THREE_NODES = Calls(SPEC, ("2d",), (OUT_OF_PLACE, IN_PLACE, OUT_OF_PLACE), counts=(37, 5))
SYMMETRIC_RESULTS_ALONE = Calls(
    SPEC,
    ("direct",),
    (
        SYMMETRIC_IN_PLACE, SYMMETRIC_IN_PLACE, SYMMETRIC, SYMMETRIC, SYMMETRIC_IN_PLACE, SYMMETRIC,
    ),
    counts=(46, 3),
    dtype=torch.bfloat16,
)  # fmt: skip


def in_turn_with_words(*algorithms: str) -> Calls:
    """Words are cleared whatever came before: each pair of neighbours, the larger and the smaller,
    is of either algorithm."""
    return Calls(
        SPEC,
        algorithms,
        (
            OUT_OF_PLACE, OUT_OF_PLACE, OTHER, OUT_OF_PLACE, OUT_OF_PLACE, IN_PLACE, OUT_OF_PLACE,
            OTHER, OUT_OF_PLACE, OUT_OF_PLACE, OTHER, OUT_OF_PLACE, OUT_OF_PLACE,
        ),
        counts=(40, 1, 23, 8, 40, 3),
        dtype=torch.bfloat16,
    )  # fmt: skip


# By turns three ranks of four have no part, all have one, and nobody has one in two calls one after
# the other.
FEW_PARTS = Calls(SPEC, ("two_shot",), 8 * (OUT_OF_PLACE,), counts=(1, 17, 0, 60, 0, 0, 5))
FEW_PARTS_WITH_FLAGS = replace(FEW_PARTS, **FLAGGED)
SEVERAL_TILES = Calls(SPEC, ("direct", "1d"), (OUT_OF_PLACE, IN_PLACE), counts=(3300,), pieces=1)
SEVERAL_TILES_BY_PUTS = Calls(SPEC, ("1d",), (OUT_OF_PLACE,), counts=(3300,), pieces=1)

DENSE = Dense(
    SPEC,
    nodes={
        "one_shot": ((3,), (4,)),
        "two_shot": ((3,), (4,)),
        "direct": ((3,), (4,)),
        "loop": ((3,), (2,)),
        "ce": ((3,), (4,)),
        "1d": ((2, 1), (2, 2), (1, 2, 1), (4,)),
        "2d": ((2, 2), (3, 3)),
    },
    counts=46,
    relays={"2d": 2},
    grids=(
        Grid(AMONG_OTHERS, job((3,), seeds=2)),
        Grid(INTO_SYMMETRIC_RESULTS, job((3,), seeds=2)),
        Grid(RAILS_AND_PUTS, job((3, 3), seeds=1)),
        Grid(THREE_NODES, job((2, 2, 2), seeds=1)),
        Grid(SYMMETRIC_RESULTS_ALONE, job((2,), seeds=3)),
        Grid(in_turn_with_words("one_shot", "two_shot"), job((3,), seeds=1)),
        Grid(in_turn_with_words("two_shot", "one_shot", "two_shot"), job((3,), seeds=1)),
        Grid(in_turn_with_words("two_shot", "direct", "one_shot"), job((3,), seeds=1)),
        Grid(FEW_PARTS, job((4,), seeds=2, stragglers=0)),
        Grid(FEW_PARTS_WITH_FLAGS, job((4,), seeds=2, stragglers=0)),
        Grid(SEVERAL_TILES, job((3,), seeds=1, heap_bytes=1 << 20)),
        Grid(SEVERAL_TILES_BY_PUTS, job((2, 1), seeds=1, heap_bytes=1 << 20)),
    ),
    mutants=(
        *MUTANTS,
        *mutants_of_loops(SPEC),
        *mutants_of_copies(SPEC),
        *mutants_of_epilogues(SPEC),
    ),
)
