# SPDX-License-Identifier: Apache-2.0
"""All dense collectives with every dtype, operation and size: every algorithm gives the bits of the
reference."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from exploring import explore
from tiers import parameters

from tdcoll.primitives.reduce import OPERATIONS_OF

from .algorithm_cases import AlgorithmCase, Dense, job
from .calls import Calls
from .kinds import (
    CALLER_BUFFER,
    IN_PLACE,
    OTHER,
    OUT_OF_PLACE,
    Kinds,
    in_turn,
    kinds_of,
    supported,
)
from .parameter_sets import ALL, REDUCING, USUAL, each_case

DTYPES = list(OPERATIONS_OF)
FLOATS = [dtype for dtype in DTYPES if dtype.is_floating_point]
BYTES = torch.uint8


def reduces_words(case: AlgorithmCase) -> bool:
    """Whether the elements that are reduced travel in words, which carry at most 4 bytes of one."""
    return case.dense.spec.reduces and bool(case.dense.spec.algorithm(case.algorithm).words)


def takes(case: AlgorithmCase, dtype: torch.dtype) -> bool:
    """Whether the algorithm supports elements of this dtype."""
    return case.supports(case.facts(13, itemsize=dtype.itemsize))


# ---------------------------------------------------------------------- dtypes and operations


def sets_of_dtypes(refused: bool = False) -> list[Any]:
    """Cases with each dtype that the algorithm takes, or that it refuses. In the first tier a case
    has every third dtype."""
    sets = []
    for i, case in enumerate(USUAL):
        for j, dtype in enumerate(DTYPES):
            slow = case.looped or (i + j) % 3 != 0
            has_flags_anyway = not dtype.is_floating_point and dtype.itemsize <= 4
            if case.flagged and has_flags_anyway:
                continue  # the case that isn't flagged shows the same
            if (case.dense.spec.reduces and not takes(case, dtype)) == refused:
                sets.append(parameters(case, dtype, slow=slow, id=f"{case} {dtype}"))
    return sets


TAKEN = sets_of_dtypes()
REFUSED = sets_of_dtypes(refused=True)
BY_WORDS = [case for case in USUAL if reduces_words(case)]
FLAGGED = [case for case in USUAL if case.flagged]
assert len(REFUSED) == 2 * len(BY_WORDS)  # fp64 and int64
assert len(TAKEN) + len(REFUSED) == len(USUAL) * len(DTYPES) - 3 * len(FLAGGED)  # int32 and 8 bits


def calls_of(case: AlgorithmCase, dtype: torch.dtype) -> Calls:
    """Two calls with each operation, with tensors that are not aligned to 16 bytes."""
    ops = OPERATIONS_OF[dtype] if case.dense.spec.reduces else ("",)
    kinds = in_turn(case.kinds(), 2)
    return case.calls(
        len(ops) * kinds,
        counts=(13,),
        dtype=dtype,
        offset=1,
        ops=[op for op in ops for _ in kinds],
    )


@pytest.mark.parametrize(("case", "dtype"), TAKEN)
def test_every_dtype_and_operation(case: AlgorithmCase, dtype: torch.dtype) -> None:
    explore(calls_of(case, dtype), **job(case.nodes, seeds=1))


@pytest.mark.parametrize(("case", "dtype"), REFUSED)
def test_elements_of_8_bytes_are_refused_by_words(case: AlgorithmCase, dtype: torch.dtype) -> None:
    message = f"algorithm='{case.algorithm}' needs elements of at most 4 bytes"
    with pytest.raises(AssertionError, match=message):
        explore(calls_of(case, dtype), **job(case.nodes, seeds=1))


MOVED = (
    torch.bool,
    torch.int16,
    torch.int64,
    torch.bfloat16,
    torch.complex64,
    torch.float8_e4m3fn,
)


@pytest.mark.parametrize("dtype", MOVED, ids=str)
@pytest.mark.parametrize("dense", [dense for dense in ALL if not dense.spec.reduces], ids=str)
def test_bytes_are_moved_whatever_their_dtype(dense: Dense, dtype: torch.dtype) -> None:
    calls = Calls(dense.spec, ("auto",), kinds_of(dense.spec), (7,), dtype, offset=1)
    explore(calls, **job((3,), seeds=1))


def sets_of_special_numbers() -> list[Any]:
    """On two ranks where the algorithm supports them. In the first tier a case has every third
    dtype."""
    sets = []
    for i, case in enumerate(REDUCING):
        on_two = case.on((2,))
        for j, dtype in enumerate(FLOATS):
            if takes(case, dtype):
                there = on_two[0] if on_two else case
                slow = case.looped or (i + j) % 3 != 0
                sets.append(parameters(there, dtype, slow=slow, id=f"{case} {dtype}"))
    assert len(sets) == len(REDUCING) * len(FLOATS) - len(BY_WORDS)  # these don't take fp64
    return sets


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")
@pytest.mark.parametrize(("case", "dtype"), sets_of_special_numbers())
def test_special_numbers(case: AlgorithmCase, dtype: torch.dtype) -> None:
    """No result is -0.0, and a NaN is never lost."""
    ops = OPERATIONS_OF[dtype]
    kinds = len(ops) * (OUT_OF_PLACE,)
    calls = case.calls(kinds, counts=(200,), dtype=dtype, ops=ops, specials=True)
    explore(calls, **job(case.nodes, seeds=1))


# ---------------------------------------------------------------------- sizes


class Sizes(NamedTuple):
    """Calls of some sizes.

    Attributes:
        offset: elements from an aligned address.
        counts: elements of a segment, in turn.
        kinds: of the calls in turn, as far as the algorithm supports them.
    """

    dtype: torch.dtype
    offset: int
    counts: tuple[int, ...]
    kinds: Kinds
    n_calls: int


OF_BYTES = (
    Sizes(BYTES, 1, (0, 1, 3, 16, 127, 128, 129), (OUT_OF_PLACE, CALLER_BUFFER), n_calls=9),
    Sizes(BYTES, 0, (129, 0), (OUT_OF_PLACE, CALLER_BUFFER), n_calls=2),
)
OF_NUMBERS = (
    Sizes(torch.float32, 1, (0, 7, 33), (OUT_OF_PLACE, IN_PLACE), n_calls=3),
    Sizes(torch.bfloat16, 0, (0, 1, 3, 7, 8, 33, 64), (IN_PLACE, OUT_OF_PLACE), n_calls=7),
    Sizes(torch.bfloat16, 3, (33,), (OUT_OF_PLACE,), n_calls=1),
    Sizes(torch.float8_e5m2, 0, (33,), (OUT_OF_PLACE,), n_calls=1),
    Sizes(torch.float8_e4m3fn, 7, (1, 3, 33, 64), (OUT_OF_PLACE, IN_PLACE), n_calls=4),
    Sizes(torch.int8, 1, (33,), (OUT_OF_PLACE,), n_calls=1),
)


@each_case(USUAL, looped_later=True)
def test_every_size(case: AlgorithmCase) -> None:
    """Of 4 bytes, of 2 and of 1; aligned and not. Of 5 words, or pieces of 16 bytes, one of three
    ranks has none."""
    for sizes in OF_NUMBERS if case.dense.spec.reduces else OF_BYTES:
        calls = case.calls(
            in_turn(supported(sizes.kinds, case.kinds()), sizes.n_calls),
            dtype=sizes.dtype,
            offset=sizes.offset,
            counts=sizes.counts,
            ops=OPERATIONS_OF[sizes.dtype][:1],
        )
        explore(calls, **job(case.nodes, seeds=1))


# ---------------------------------------------------------------------- several epochs

SMALL = 80
"""Bytes of a segment that a small context takes at a time."""


def calls_on_a_small_context(case: AlgorithmCase, dtype: torch.dtype | None) -> Calls:
    """Calls of 96 bytes at most, or of as many for each rank, with room for two Lamport words."""
    spec = case.dense.spec
    if not spec.reduces:
        unit = 4
    elif spec.scatters:
        unit = 1
    else:
        unit = 3
    if spec.reduces and dtype is torch.bfloat16:
        unit *= 2
    return case.calls(
        (*case.kinds(), OTHER, OUT_OF_PLACE),
        counts=(24 * unit, 21 * unit, 6 * unit),
        dtype=dtype,
        offset=1 if dtype is torch.bfloat16 else 0,
        max_bytes_per_rank=SMALL,
        pieces=0,
        lamport_bytes=32 if spec.reduces and not case.flagged else 0,
    )


def takes_several_epochs(case: AlgorithmCase, dtype: torch.dtype | None = None) -> bool:
    """Whether the first of these calls is several epochs."""
    calls = calls_on_a_small_context(case, dtype)
    element = calls.tensor_dtype
    itemsize = element.itemsize if case.dense.spec.reduces else 1
    by_lamport = element.is_floating_point and itemsize <= 4
    facts = case.facts(
        calls.counts[0] * itemsize,
        capacity=SMALL,
        ll_bytes=SMALL,
        lamport_bytes=calls.lamport_bytes if by_lamport else 0,
        itemsize=itemsize,
    )
    if not case.supports(facts):
        return False
    return case.dense.spec.algorithm(case.algorithm).epoch(facts) < facts.nbytes


def sets_of_epochs() -> list[Any]:
    """Cases with dtypes, and with few resident blocks or stragglers."""
    cases = [case for case in USUAL if takes_several_epochs(case)]
    assert {str(case.dense) for case in cases} == set(map(str, ALL))
    sets = []
    for case in cases:
        sets.append(parameters(case, None, {}, id=str(case)))
        for world in ({"resident": 1}, {"stragglers": True}):
            name = f"{case} {' '.join(world)}"
            sets.append(parameters(case, None, world, slow=True, id=name))
        for dtype in (torch.int64, torch.bfloat16):
            if takes_several_epochs(case, dtype):
                sets.append(parameters(case, dtype, {}, slow=True, id=f"{case} {dtype}"))
    # Only Lamport words make several epochs, not those of integers.
    assert len(sets) == 5 * len(cases) - sum(map(reduces_words, cases))
    return sets


@pytest.mark.parametrize(("case", "dtype", "world"), sets_of_epochs())
def test_larger_calls_are_several_epochs(
    case: AlgorithmCase,
    dtype: torch.dtype | None,
    world: dict[str, Any],
) -> None:
    explore(calls_on_a_small_context(case, dtype), **job(case.nodes, seeds=1, **world))
