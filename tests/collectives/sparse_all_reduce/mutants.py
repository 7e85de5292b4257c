# SPDX-License-Identifier: Apache-2.0
"""The sparse all-reduce's kernels with one protection or one rule less: what the simulator must catch.

A mutant is the source of its kernels, or of those of the exchange, with one piece replaced, loaded as a module of its
own.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_mutants import Change
from kernel_mutants import installed as changed

from tdcoll.collectives.sparse_all_reduce import call as sparse_call

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
        pieces: replacements in the source; each must occur exactly once.
        expect: regular expression that the report of some seed must match: what goes wrong, and not just that it does.
        case: what shows it.
        world: arguments of ``World``.
        seeds: how many, from 0, at the most.
        changes: to device functions, or to the all-gather's kernels.
    """

    name: str
    pieces: tuple[tuple[str, str], ...]
    expect: str
    case: Reduces = ANY
    world: dict[str, Any] = field(default_factory=lambda: {"n_pes": 4})
    seeds: int = 20
    changes: tuple[Change, ...] = ()

    def source(self) -> str:
        """What the kernels become."""
        module = sparse_call.kernels
        source = Path(str(module.__file__)).read_text()
        for old, new in self.pieces:
            found = source.count(old)
            assert found == 1, f"mutant {self.name}: {module.__name__} holds {old!r} {found} times, not once"
            source = source.replace(old, new)
        return source


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

# ---------------------------------------------------------------------- pieces

WAIT = "tdl.wait_signals(begun, world, rank, tdl.CMP_GE, epoch, monitor, WAITED)"
NO_WAIT = WAIT.replace("epoch", "0")
IN_REDUCE = f"            if {WAIT} != 0:\n"
IN_MEET = f"    else:\n        {WAIT}\n"
IN_NODES = f"    elif {WAIT} != 0:\n        worker"
IN_FORWARD = f"    elif {WAIT} != 0:\n        out"
HAND_ON = "_hand_on(out, {}, row_bytes, outs, rank, node, node_begins, node_ranks)\n"
SIGNAL = "tdl.signal_block(begun + rank, epoch, tdl.SIGNAL_SET, tl.load(pes + (rank + 1 + program) % world))"
HAVE = "have += (match.find(ids, tl.load(mates + m), lists"
IN_RANK_ORDER = "for q in tl.range(0, world):\n                            if q == rank:\n"
IN_TURNED_ORDER = (
    "for i in tl.range(0, world):\n                            q = (rank + i) % world\n"
    "                            if q == rank:\n"
)
IN_MERGE = "                for q in tl.range(0, world):\n"
TURNED_MERGE = "                for i in tl.range(0, world):\n                    q = world - 1 - i\n"
CROSSING = "tdl.putmem_nbi_block(out + offset, out + offset, row_bytes, tl.load(pes + {}))"


def _unwaited(context: str) -> tuple[tuple[str, str], ...]:
    return ((context, context.replace(WAIT, NO_WAIT)),)


FORWARDED = HAND_ON.format("tl.cast(k, tl.int64) * row_bytes")
FORWARDED_BEFORE = (
    (IN_FORWARD, "    else:\n        out"),
    (FORWARDED, f"{FORWARDED}        {WAIT}\n"),
)
LOOKED_BEFORE = (
    (IN_NODES, "    else:\n        worker"),
    ("        tdl.quiet()\n", f"        tdl.quiet()\n        {WAIT}\n"),
)
READ_BEFORE = (
    (IN_REDUCE, "            if True:\n"),
    (
        "\n\n\n@jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_USERS)\ndef meet(",
        f"\n            {WAIT}\n\n\n@jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_USERS)\ndef meet(",
    ),
)
"""The wait comes after the work."""

MUTANTS = [
    # ------------------------------------------------------------------ one node
    Mutant("nobody waits in reduce", _unwaited(IN_REDUCE), ANYTHING),
    Mutant("reduce waits after it has read", READ_BEFORE, WRONG_ROWS),
    Mutant("meet does not wait", _unwaited(IN_MEET), WRONG_ROWS),
    Mutant("nobody says that it has begun", ((SIGNAL, "pass"),), MISSING),
    Mutant("signal of the epoch before", ((SIGNAL, SIGNAL.replace("epoch", "epoch - 2")),), MISSING),
    Mutant(
        "rows that others reduce are not staged",
        (("staged = inside & (owner != rank)", "staged = inside & (owner != owner)"),),
        WRONG_ROWS,
    ),
    Mutant(
        "repeated rows that I reduce are not combined",
        (("            staged = staged | (inside & (end - begin > 1))\n", ""),),
        WRONG_ROWS,
    ),
    Mutant(
        "the first of repeated rows stands for all",
        (
            (
                "sum += tl.sum(tile.to(ACC), axis=0)",
                "sum += tl.sum(tl.where(parts == begin, 1, 0)[:, None] * tile.to(ACC), axis=0)",
            ),
        ),
        WRONG_ROWS,
    ),
    Mutant("the owner's own row comes first", ((IN_RANK_ORDER, IN_TURNED_ORDER),), WRONG_ROWS, FLOATS),
    Mutant(
        "the first part is added to zero",
        (),
        WRONG_ROWS,
        Reduces("oo", (4,), 6, op="max", shape=(2,), data=_negative),
        changes=to(
            "reduce.accumulate",
            "tl.where(first, part, tl.maximum(sum, part, propagate_nan=tl.PropagateNan.ALL))",
            "tl.maximum(sum, part)",
        ),
    ),
    Mutant(
        "every contributor owns the row",
        (("owner = tl.where(has & (seen == pick), mate, owner)", "owner = tl.where(has, rank, owner)"),),
        WRONG_ROWS,
    ),
    Mutant(
        "the mean is the sum",
        (),
        WRONG_ROWS,
        MEANS,
        changes=to("reduce.share", "part = _divided(part, world)", "pass"),
    ),
    Mutant(
        "a row that one rank has is not divided",
        (
            (
                "alone = accumulate(tl.zeros([ROWS, WIDE], ACC), share(tile, world, ACC, OP), True, OP)",
                "alone = accumulate(tl.zeros([ROWS, WIDE], ACC), tile.to(ACC), True, OP)",
            ),
        ),
        WRONG_ROWS,
        MEANS,
    ),
    Mutant(
        "two rows of which many are there share a partial sum",
        (("return 2 * piece + (begin > piece * PIECE).to(tl.int64)", "return 2 * piece"),),
        WRONG_ROWS,
        REPEATED,
        {"n_pes": 1},
    ),
    Mutant(
        "gather: the last rank comes first",
        ((f"{IN_MERGE}                    position", f"{TURNED_MERGE}                    position"),),
        WRONG_ROWS,
        Reduces("gg", (9,), 9, shape=(2,), data=_of_any_floats),
    ),
    # ------------------------------------------------------------------ lists
    Mutant(
        "the header says the capacity",
        (("    tl.store(own + 1, count)\n", "    tl.store(own + 1, tl.cast(capacity, tl.int64))\n"),),
        f"{WRONG_INDICES}|{REFUSED}",
    ),
    Mutant(
        "the header's bytes leave out the header",
        (("ids_bytes = 8 * (HEADER + kept)\n", "ids_bytes = 8 * kept\n"),),
        f"{WRONG_INDICES}|{REFUSED}",
        LONG_LISTS,
    ),
    Mutant(
        "an id is written as often as it is there",
        (("return inside & ((index == 0) | (here != before)), here", "return inside, here"),),
        f"{WRONG_INDICES}|{REFUSED}",
    ),
    # ------------------------------------------------------------------ several nodes
    Mutant("a node does not wait for the one before", LOOKED_BEFORE, WRONG_ROWS, world=TWO_NODES),
    Mutant("a node does not wait for the one before, one rank each", LOOKED_BEFORE, WRONG_ROWS, world=THREE_NODES),
    Mutant("nobody waits in reduce_nodes", _unwaited(IN_NODES), ANYTHING, world=TWO_NODES),
    Mutant("the forwarder waits after it has forwarded", FORWARDED_BEFORE, WRONG_ROWS, world=TWO_NODES),
    Mutant("nobody waits in forward", _unwaited(IN_FORWARD), ANYTHING, world=TWO_NODES),
    Mutant(
        "contributors of all nodes pick the owner",
        (
            (
                f"for m in tl.range(0, n_mates):\n            {HAVE}",
                f"for m in tl.range(0, world):\n            {HAVE.replace('tl.load(mates + m)', 'm')}",
            ),
        ),
        WRONG_ROWS,
        world=TWO_NODES,
    ),
    Mutant(
        "what earlier nodes have summed is left out",
        (("if earlier != 0:", "if earlier > 1:"),),
        WRONG_ROWS,
        ALIKE,
        TWO_NODES,
    ),
    Mutant(
        "a node adds to what it has not been given",
        (("if earlier != 0:", "if earlier >= 0:"),),
        WRONG_ROWS,
        world=TWO_NODES,
    ),
    Mutant(
        "a partial sum skips a node",
        (
            (
                "tl.where(has & (number > step), tl.minimum(following, number)",
                "tl.where(has & (number > step), tl.maximum(following % n_nodes, number)",
            ),
        ),
        WRONG_ROWS,
        ALIKE,
        THREE_NODES,
    ),
    Mutant(
        "all rows begin with the same node",
        (("return _choose(ids, n_nodes, 2246822519)", "return (ids * 0).to(tl.int32)"),),
        WRONG_ROWS,
        FLOATS,
        THREE_NODES,
    ),
    Mutant("a partial sum is not sent", ((CROSSING.format("after"), "pass"),), WRONG_ROWS, ALIKE, TWO_NODES),
    Mutant("a final row is not sent", ((CROSSING.format("entrance"), "pass"),), WRONG_ROWS, world=TWO_NODES),
    Mutant(
        "the last node keeps the row to its owner",
        ((f"                    {HAND_ON.format('offset')}", ""),),
        WRONG_ROWS,
        world=TWO_NODES,
    ),
    Mutant(
        "the forwarder keeps the row",
        ((FORWARDED, "pass\n"),),
        WRONG_ROWS,
        world=TWO_NODES,
    ),
    # ------------------------------------------------------------------ the exchange, counted
    Mutant(
        "exchange: a rank is written to before it has entered",
        (),
        BAD_LISTS,
        GATHERS,
        changes=at_once("stores.may_write", all_gather.MAY_WRITE),
    ),
    Mutant(
        "exchange: the receiver waits for the first chunk only",
        (),
        BAD_LISTS,
        LONG_LISTS,
        changes=to("kernels_puts._receive", "row(g, epoch, channel)", "row(g, epoch, 0)"),
    ),
    Mutant(
        "exchange: the forwarder counts its own bytes",
        (),
        BAD_LISTS,
        LONG_GATHERS,
        TWO_NODES,
        changes=to(
            "kernels_puts.all_gather_2d",
            "size = chunk_bytes(used_bytes(landed, nbytes, COUNTED), chunk, channel)",
            "pass",
        ),
    ),
    Mutant(
        "exchange: the forwarder does not wait for the count",
        (),
        BAD_LISTS,
        LONG_GATHERS,
        TWO_NODES,
        changes=at_once(
            "kernels_puts.all_gather_2d", "tdl.wait_signal(first, tdl.CMP_GE, epoch, g.monitor, origin, origin)"
        ),
    ),
    Mutant(
        "exchange: the forwarder does not wait for the chunk",
        (),
        BAD_LISTS,
        LONG_GATHERS,
        TWO_NODES,
        changes=at_once("kernels_puts.all_gather_2d", all_gather.FORWARDED),
    ),
    Mutant(
        "exchange: a list is packed while it is still being read",
        (),
        BAD_LISTS,
        GATHERS,
        TWO_NODES,
        changes=to("puts.push_remote", "tdl.quiet()", "pass"),
    ),
    Mutant(
        "exchange: segments are as long as this rank's",
        (),
        f"{WRONG_INDICES}|{REFUSED}",
        changes=to(
            "kernels_direct.used_bytes",
            "tl.load(tl.cast(segment, tl.int64).to(tl.pointer_type(tl.int64)))",
            "0 * tl.load(tl.cast(segment, tl.int64).to(tl.pointer_type(tl.int64)))",
        ),
    ),
]


@contextmanager
def installed(mutant: Mutant, folder: Path) -> Iterator[None]:
    """Let sparse all-reduces, or their exchange, launch the mutant's kernels."""
    if mutant.changes:
        with changed(mutant.changes, folder):
            yield
        return
    name = "sparse_all_reduce_mutant_" + "".join(c if c.isalnum() else "_" for c in mutant.name)
    path = folder / f"{name}.py"
    path.write_text(mutant.source())
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sparse_call, "kernels", module)
            yield
    finally:
        del sys.modules[name]
