# SPDX-License-Identifier: Apache-2.0
"""What the tests of index matching share: lists as kernels want them, answers by plain Python, and
how to ask."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import triton.language as tl

import tdcoll
from tdcoll.collectives.index_match import kernels, op
from tdcoll.collectives.index_match.op import Directory
from tdcoll.testing import World

SIGNATURE = 0x7D00C011
METHODS = ("bitmap", "search")
FILL = -77
"""What memory holds before anything is written to it."""

GUARD = 512
"""Words before and after what a directory may write."""

HEADER = kernels.HEADER.value
Ids = Sequence[int]


@contextmanager
def small_blocks(block: int = 8, grid: int = 6) -> Iterator[None]:
    """Blocks and grids so small that few ids need several of them, and that programs take several
    blocks each."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("CLEAR_BLOCK", "_BLOCK"):
            patch.setattr(op, name, block)
        patch.setattr(op, "_TOTALS_BLOCK", 2)
        patch.setattr(op, "_MAX_BLOCKS", grid)
        yield


def in_world(run: Callable[[], Any], **options: Any) -> Any:
    """Run something as the one PE of a simulated job; its interpreter is faster, and knows every
    Triton."""
    return World(1, **options).run(lambda pe: run())[0]


# ---------------------------------------------------------------------- lists


def pack(
    lists: Sequence[Ids],
    capacity: int,
    counts: Sequence[int] | None = None,
    signatures: Sequence[int] | None = None,
    spare: int = 3,
) -> torch.Tensor:
    """int64 ``[W, HEADER + capacity + spare]``, as kernels.py describes them.

    Args:
        counts: what the headers say, if not the truth.
        signatures: what the headers say, if not SIGNATURE.
        spare: words after the capacity, which nobody may look at: they hold 0, which is an id.
    """
    packed = torch.zeros(len(lists), HEADER + capacity + spare, dtype=torch.int64)
    packed[:, HEADER : HEADER + capacity] = FILL
    for q, ids in enumerate(lists):
        there = list(ids)[:capacity]
        packed[q, 0] = 8 * (HEADER + len(there))
        packed[q, 1] = len(ids) if counts is None else counts[q]
        packed[q, 2] = SIGNATURE if signatures is None else signatures[q]
        packed[q, HEADER : HEADER + len(there)] = torch.tensor(there, dtype=torch.int64)
    return packed


# ---------------------------------------------------------------------- making and asking a directory


def directory_of(
    method: str, world: int, capacity: int, num_rows: int, max_union: int
) -> Directory:
    """A directory of one kind, whatever the policy says."""
    made = Directory(world, capacity, max_union, torch.device("cpu"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(op, "searches", lambda *_: method == "search")
        made.prepare(num_rows)
    return made


@tdcoll.jit
def clear(index, BLOCK: tl.constexpr):
    kernels.clear(tl.program_id(0), index, BLOCK)


@tdcoll.jit
def build_only(index, signature: tl.int64):
    kernels.build(tl.program_id(0), index, index.lists, 0, index.lists, signature, 0)


def cleared_and_built(directory: Directory, packed: torch.Tensor) -> None:
    """Two launches, which are parts of the caller's in real calls."""
    index = directory.index(packed).whole
    clear[(directory.clearers,)](index, op.CLEAR_BLOCK)
    build_only[(directory.builders,)](index, SIGNATURE)


@tdcoll.jit
def ask(
    ids, size, index, found, in_union, BLOCK: tl.constexpr,
):  # fmt: skip
    """``found[q, i]`` and ``in_union[i]`` for blocks of ids in program 0, and id by id in program
    1."""
    if tl.program_id(0) == 0:
        i = tl.arange(0, BLOCK)
        x = tl.load(ids + i, mask=i < size, other=-1)
        for q in tl.range(0, index.world):
            tl.store(found + q * size + i, kernels.find(x, q, index), mask=i < size)
        tl.store(in_union + i, kernels.find_in_union(x, index), mask=i < size)
    else:
        for one in tl.range(0, size, 7):
            single = tl.load(ids + one)
            for q in tl.range(0, index.world):
                tl.store(found + (index.world + q) * size + one, kernels.find(single, q, index))
            tl.store(in_union + size + one, kernels.find_in_union(single, index))


@dataclass
class Answers:
    """What a directory says.

    Attributes:
        union: its first min(U, max_union) ids.
        status: its words.
        found: place of each id asked for in each list.
        in_union: place of each id asked for in the union.
    """

    union: list[int]
    status: list[int]
    found: list[list[int]]
    in_union: list[int]

    def flags(self) -> tuple[int, int, int]:
        """BAD_RANGE, BAD_ORDER, BAD_SIGNATURE."""
        words = kernels.BAD_RANGE, kernels.BAD_ORDER, kernels.BAD_SIGNATURE
        return tuple(self.status[word.value] for word in words)  # type: ignore[return-value]


def _guard(directory: Directory) -> dict[str, torch.Tensor]:
    """Replace what a directory writes by the middle of larger tensors."""
    guarded = {}
    for name in ("union", "status", "_leaders", "_totals", "entries"):
        old = getattr(directory, name, None)
        if old is None or (name == "entries" and directory.search):
            continue
        whole = torch.full((old.numel() + 2 * GUARD,), FILL, dtype=old.dtype)
        setattr(directory, name, whole[GUARD:-GUARD].view(old.shape))
        guarded[name] = whole
    directory._key = None
    return guarded


def answers(directory: Directory, packed: torch.Tensor, asked: Ids) -> Answers:
    """Build, look at the guards, and ask for some ids, each as part of a block, and some as
    scalars."""
    guarded = _guard(directory)
    before = packed.clone()
    cleared_and_built(directory, packed)
    assert torch.equal(packed, before), "the lists were written to"
    for name, whole in guarded.items():
        outside = torch.cat((whole[:GUARD], whole[-GUARD:]))
        assert (outside == FILL).all(), f"{name} was written outside of its bounds"
    ids = torch.tensor(list(asked), dtype=torch.int64)
    world, size = directory.world, len(asked)
    found = torch.full((2, world, size), FILL, dtype=torch.int32)
    in_union = torch.full((2, size), FILL, dtype=torch.int32)
    block = 1 << max(0, size - 1).bit_length()
    ask[(2,)](ids, size, directory.index(packed).whole, found, in_union, block)
    assert torch.equal(found[1, :, ::7], found[0, :, ::7]), "scalars and blocks differ"
    assert torch.equal(in_union[1, ::7], in_union[0, ::7]), "scalars and blocks differ"
    status = directory.status.tolist()
    size = min(status[kernels.UNION.value], directory.max_union)
    return Answers(directory.union[:size].tolist(), status, found[0].tolist(), in_union[0].tolist())


def build(
    method: str,
    lists: Sequence[Ids],
    num_rows: int,
    asked: Ids = (0,),
    *,
    capacity: int | None = None,
    max_union: int | None = None,
    counts: Sequence[int] | None = None,
    signatures: Sequence[int] | None = None,
) -> Answers:
    """What a new directory of some lists says."""
    capacity = max(1, *map(len, lists)) if capacity is None else capacity
    max_union = len(lists) * capacity if max_union is None else max_union
    directory = directory_of(method, len(lists), capacity, num_rows, max_union)
    return answers(directory, pack(lists, capacity, counts, signatures), asked)


def places(ids: Ids, asked: Ids) -> list[int]:
    """Where each id that is asked for is in ``ids``; -1 where it is not."""
    there = {x: place for place, x in enumerate(ids)}
    return [there.get(x, -1) for x in asked]


def check_valid(
    method: str,
    lists: Sequence[Ids],
    num_rows: int,
    *,
    capacity: int | None = None,
    max_union: int | None = None,
) -> None:
    """A directory of valid lists answers as plain Python does, for ids that are there, beside them,
    and nowhere."""
    wanted = sorted(set().union(*lists))
    asked = sorted(
        {
            *wanted[:200],
            *(x + 1 for x in wanted[:40]),
            -1,
            -(1 << 62),
            0,
            num_rows,
            num_rows - 1,
            1 << 62,
        }
    )
    got = build(method, lists, num_rows, asked, capacity=capacity, max_union=max_union)
    known = wanted if max_union is None else wanted[:max_union]
    assert got.union == known
    status = [0] * kernels.STATUS_WORDS.value
    status[kernels.UNION.value] = len(wanted)
    status[kernels.MAX_ROWS.value] = max(map(len, lists))
    status[kernels.TOTAL.value] = sum(map(len, lists))
    assert got.status == status
    assert got.found == [places(ids, asked) for ids in lists]
    assert got.in_union == places(known, asked)
