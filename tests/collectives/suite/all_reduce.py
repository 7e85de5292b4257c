# SPDX-License-Identifier: Apache-2.0
"""What the suite has to know of all-reduce: where it runs, further grids, its mutants."""

from __future__ import annotations

from functools import partial

import torch
from kernel_mutants import Argument, Call, Change, Inserted, Moved, dropped, missing, no_wait

from tdcoll.collectives.all_reduce.spec import SPEC

from .all_gather import ONE_SLOT, RELEASED_FIRST, SIGNAL_FIRST, UNSIGNALLED, WAITS_FIRST
from .calls import Calls
from .reduce_scatter import BACKWARDS, PUT_LATE
from .ways import FLAGS, WRONG, Dense, job, mutant, mutants_of_copies, mutants_of_loops

M = partial(mutant, SPEC)
ONE, TWO = (partial(M, algorithm=name, nodes=(3,)) for name in ("one_shot", "two_shot"))
DIRECT = partial(M, algorithm="direct")
PUTS, RAILS = (partial(M, algorithm=name, nodes=(2, 2)) for name in ("1d", "2d"))
SIZES = {"calls": "oooooo", "counts": (12, 60)}
LATE = {"world": {"stragglers": True}}
AMONG_OTHERS = {"calls": "oxoxox", "others": ("all_gather",)}

BY_ONE, BY_TWO, STORES, SENDS, SEND_SUM, NODES = (
    f"all_reduce.kernels_{name}"
    for name in (
        *("words.all_reduce_one_shot", "words.all_reduce_two_shot", "direct.all_reduce_direct"),
        *("puts.all_reduce_puts", "puts._send_sum"),
        "nodes.all_reduce_nodes",
    )
)
ADD_NODE = "all_reduce.kernels_nodes._sum_node"
UNHEARD, UNFLAGGED = missing("lamport"), missing("flagged")
LOST, ANY = f"{WRONG}|{UNHEARD}", f"{WRONG}|{UNSIGNALLED}"
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
OTHERS_BLOCK = """
other = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK + tl.arange(0, BLOCK)
mine = words.repair(source, other, size, words.load(source, other, size, LAMPORT), LAMPORT)
"""

MUTANTS = (
    # ------------------------------------------------------------------ words
    # Two-shot needs its third slot as well, although it clears before it sends sums. A rank that has all sums knows
    # that the others have issued the stores that clear their memory, but nothing orders those before the sums: with two
    # slots they may land on words of the next call. With flags nothing is cleared, and calls of equal sizes could do
    # with one slot: a rank that has all sums knows that all others have read what it sent first.
    ONE("two slots", TWO_SLOTS, LOST, **SIZES, **LATE),
    ONE(
        "the memory of the next call is cleared", Change("lamport.clear", "call - 1", "call + 1"), LOST, **SIZES,
        **LATE,
    ),
    # A peer that has this call's words may write where this rank's clearing has not landed yet.
    ONE(
        "two slots, cleared before sending", (TWO_SLOTS, Moved(BY_ONE, "words.send_to_all", "lamport.clear")), LOST,
        **SIZES,
    ),
    *(each("flags: one slot", ONE_SLOT, f"{WRONG}|{UNFLAGGED}", counts=(12, 60), **FLAGS) for each in (ONE, TWO)),
    ONE(
        "the slot counts epochs", Change("lamport.start", "lamport.control", "g.control"), LOST, calls="oooxoox",
        others=("all_gather",),
    ),
    ONE(
        "as much is cleared as this call writes",
        Change(
            "lamport.clear", "tl.load(lamport.written + slot(call - 1))",
            "tl.maximum((tl.cast(nbytes, tl.int64) + 15) // 16, 1)",
        ),
        calls="oooooooo", counts=(9, 30, 1, 0, 30, 2, 2, 30),
    ),
    ONE(
        "a program clears what the grid of this call would have written",
        Change("lamport.clear", "begin += tl.cast(programs, tl.int64) * BLOCK", "begin = left"),
        calls="oooooooo", counts=(9, 30, 1, 0, 30, 2, 2, 30),
    ),
    ONE("no word is cleared", Change("lamport.clear", "begin < left", "begin < 0"), calls="ooooo"),
    ONE(
        "what is sent may be the sentinel",
        Change("lamport._present", "tl.where(part == SENTINEL, 0, part)", "part"), UNHEARD, specials=True,
    ),
    ONE(
        "a call of no bytes sends nothing",
        Change("lamport.carry", "tl.maximum((nbytes + 15) // 16, 1)", "(nbytes + 15) // 16"), LOST,
        calls="ooooooo", counts=(9, 0, 0, 0, 9, 9, 9),
    ),
    ONE(
        "a word is there when its first part is",  # of one rank after the other, as in groups that one wait can't take
        (
            Change("words.receive", "g.world <= RANKS_OF_ONE_WAIT", "False"),
            Call("lamport.receive", "tdl.wait_words", FIRST_PART),
        ),
    ),
    TWO(
        "a call of no bytes sends nothing",
        Change(
            BY_TWO, "tl.maximum(tl.cdiv(tl.cdiv(size, width), g.world), 1)", "tl.cdiv(tl.cdiv(size, width), g.world)",
        ),
        LOST, calls="oooooo", counts=(20, 0, 0), **LATE,
    ),
    ONE("nothing is cleared", dropped(BY_ONE, "lamport.clear"), calls="ooooo"),
    TWO("nothing is cleared", dropped(BY_TWO, "lamport.clear"), calls="ooooo"),
    ONE(
        "words are not waited for",
        Call(
            "words.receive", "tdl.wait_words_of_all",
            "(*tdl.load_words({0}, {5}), *tdl.load_words({0} + {1}, {5}), *tdl.load_words({0} + 2 * {1}, {5}), {5})",
        ),
    ),
    ONE(
        "words are received before they are sent", Moved(BY_ONE, "words.send_to_all", "_one_shot_sum"), UNHEARD,
        **WAITS_FIRST,
    ),
    TWO(
        "program i waits for the last but i",
        Change(
            "words.receive", "16 * tl.cast(word, tl.int64)",
            "16 * tl.cast(tl.num_programs(0) * word.shape[0] - 1 - word, tl.int64)",
        ),
        UNHEARD, **WAITS_FIRST,
    ),
    ONE(
        "in place: a program stores over what another one has yet to send",
        (
            Inserted(BY_ONE, "_one_shot_sum", OTHERS_BLOCK),
            Argument(BY_ONE, "_one_shot_sum", "word", "other"),
            Argument(BY_ONE, "_one_shot_sum", "mask", "words.carry(other, size, LAMPORT)"),
        ),
        calls="iiii",
    ),
    # ------------------------------------------------------------------ stores
    # Calls of one kind could do with one slot: a rank that has all sums knows that all others have read its parts.
    *(each("one slot", ONE_SLOT, ANY, **AMONG_OTHERS) for each in (DIRECT, PUTS)),
    *(
        each(what, change)
        for each, where in ((DIRECT, STORES), (PUTS, SENDS))
        for what, change in (
            ("the sum does not wait", no_wait(where, "tdl.wait_signals", "arrived")),
            ("sums are copied out before they are there", no_wait(where)),
        )
    ),
    DIRECT(
        "programs that wait before those that send", Change(STORES, "tl.program_id(0)", BACKWARDS), UNSIGNALLED,
        **WAITS_FIRST,
    ),
    # ------------------------------------------------------------------ stores into symmetric results, too
    *(
        DIRECT(f"{what}{' into results' * (calls != 'oooo')}", change, calls=calls)
        for what, change, kinds in (
            ("the signal goes before the part", RELEASED_FIRST, ("oooo", "tttt")),
            ("the signal goes before the sum", Moved(STORES, "sum_chunk", "stores.release_to_all"), ("oooo", "ssss")),
            ("the sum does not wait", no_wait(STORES, "tdl.wait_signals", "arrived"), ("tttt",)),
            ("nobody waits for sums", no_wait(STORES, "tdl.wait_signals", "summed"), ("ssss",)),
        )
        for calls in kinds
    ),
    # ------------------------------------------------------------------ puts
    PUTS("a part is put with a signal that goes before it", PUT_LATE),
    PUTS(
        "a sum is put with a signal that goes before it",
        Call(SEND_SUM, "tdl.putmem_signal_nbi_block", SIGNAL_FIRST + "tdl.putmem_nbi_block({0}, {1}, {2}, {6})"),
    ),
    PUTS("the sum is sent before it is there", Moved(SENDS, "sum_chunk", behind="_send_sum")),
    PUTS(
        "programs that wait before those that put", Change("puts.task", "tl.program_id(0)", BACKWARDS), UNSIGNALLED,
        **WAITS_FIRST,
    ),
    # ------------------------------------------------------------------ rails
    RAILS("nobody waits for the parts of the node", Call(NODES, "_wait_for", "1", of="routes.ranks")),
    RAILS("nobody waits for the sums of the rail", Call(NODES, "_wait_for", "1", of="rail")),
    RAILS("sums travel rounded", Argument(ADD_NODE, "tl.store", "sum", "sum.to(DTYPE).to(ACC)"), dtype=torch.bfloat16),
    RAILS("nobody waits for the results", Call(NODES, "tdl.wait_signal", "1")),
    RAILS(
        "programs that wait before those that send",
        Change(NODES, "tl.program_id(0) % per_chunk", "per_chunk - 1 - tl.program_id(0) % per_chunk"),
        UNSIGNALLED, **WAITS_FIRST,
    ),
)  # fmt: skip

IN_TURN = (40, 1, 23, 8, 40, 3)
"""Sizes in an order in which each pair of neighbours, larger and smaller, is of either algorithm."""

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
        (Calls(SPEC, "one_shot two_shot direct 1d", "oxioxooioxoi", (46, 46, 0)), job((3,), seeds=2)),
        (Calls(SPEC, "direct one_shot direct two_shot 1d", "sxotxstsxo", (46, 0, 46)), job((3,), seeds=2)),
        (Calls(SPEC, "2d 1d", "oxixooi", (46, 46, 0)), job((3, 3), seeds=1)),
        (Calls(SPEC, "2d", "oio", (37, 5)), job((2, 2, 2), seeds=1)),
        (Calls(SPEC, "direct", "ttssts", (46, 3), torch.bfloat16), job((2,), seeds=3)),
        # Words are cleared whatever came before.
        *(
            (Calls(SPEC, turns, "ooxooioxooxoo", IN_TURN, torch.bfloat16), job((3,), seeds=1))
            for turns in ("one_shot two_shot", "two_shot one_shot two_shot", "two_shot direct one_shot")
        ),
        # By turns three ranks of four have no part, all have one, and nobody has one in two calls one after the other.
        *(
            (Calls(SPEC, "two_shot", "o" * 8, (1, 17, 0, 60, 0, 0, 5), **words), job((4,), seeds=2, stragglers=0))
            for words in ({}, FLAGS)
        ),
        # Chunks of several tiles.
        (Calls(SPEC, "direct 1d", "oi", (3300,), pieces=1), job((3,), seeds=1, heap_bytes=1 << 20)),
        (Calls(SPEC, "1d", "o", (3300,), pieces=1), job((2, 1), seeds=1, heap_bytes=1 << 20)),
    ),
    mutants=(*MUTANTS, *mutants_of_loops(SPEC), *mutants_of_copies(SPEC)),
)
