# SPDX-License-Identifier: Apache-2.0
"""Epilogues of the caller's in dense reductions: applied once to every element, by every algorithm,
before the result is rounded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from exploring import explore
from tiers import parameters, seeds

from tdcoll.primitives.reduce import ACCUMULATORS, OPERATIONS_OF

from .algorithm_cases import AlgorithmCase, Nodes, cases_of, job
from .calls import Calls
from .kinds import IN_PLACE, OTHER, OUT_OF_PLACE, kinds_of
from .parameter_sets import ALL, REDUCING, each_case

REDUCE = [dense for dense in ALL if dense.spec.reduces]
EVERYWHERE = [case for dense in REDUCE for case in cases_of(dense, every=True)]
assert len(EVERYWHERE) > len(REDUCING) > 15


@seeds(1, 8)
@each_case(EVERYWHERE, looped_later=True, dense=REDUCE)
def test_clean_over_seeds(case: AlgorithmCase, seeds: Sequence[int]) -> None:
    """Of every kind, among calls of other collectives; with 45 elements in rows of 9, with none,
    and with 15 in one row."""
    kinds = case.kinds()
    usual = case.nodes == case.dense.nodes[case.algorithm][0]
    calls = case.calls((*kinds, OTHER, kinds[0], kinds[0]), counts=(45, 0, 45, 15), columns=9)
    explore(calls, **job(case.nodes, seeds=seeds if usual else seeds[:1]))


def sets_of_dtypes() -> list[Any]:
    """Every dtype by every algorithm that has it; only some of them in the first tier."""
    found = []
    for case in REDUCING:
        for dtype in ACCUMULATORS:
            lamport = 1 << 20 if dtype.is_floating_point and dtype.itemsize <= 4 else 0
            facts = case.facts(itemsize=dtype.itemsize, lamport_bytes=lamport)
            if case.supports(facts) and not case.looped:
                usual = dtype in (torch.bfloat16, torch.int64, torch.float8_e4m3fn)
                found.append(parameters(case, dtype, slow=not usual, id=f"{case} {dtype}"))
    return found


@pytest.mark.parametrize(("case", "dtype"), sets_of_dtypes())
def test_every_dtype_and_operation(case: AlgorithmCase, dtype: torch.dtype) -> None:
    """Sums and means are finished before the epilogue gets them."""
    ops = OPERATIONS_OF[dtype]
    kinds = len(ops) * (OUT_OF_PLACE,)
    calls = case.calls(kinds, counts=(33,), columns=11, dtype=dtype, ops=ops)
    explore(calls, **job(case.nodes, seeds=1))


@pytest.mark.parametrize("nodes", [(1,), (2,), (4,), (1, 1), (2, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("dense", REDUCE, ids=str)
def test_auto_and_every_number_of_ranks(dense: Any, nodes: Nodes) -> None:
    """At odd addresses, of sizes that no word and no chunk divides."""
    kinds = (*kinds_of(dense.spec), OTHER, OUT_OF_PLACE)
    calls = Calls(
        dense.spec, ("auto",), kinds, (35, 7, 0, 1), torch.bfloat16, columns=5, offset=1, pieces=0
    )
    explore(calls, **job(nodes, seeds=1))


@each_case(REDUCING, looped_later=True, dense=REDUCE)
def test_minus_zero_is_no_result(case: AlgorithmCase) -> None:
    """Of fp32, too, where rounding changes nothing; and special numbers go through an epilogue."""
    calls = case.calls((OUT_OF_PLACE, IN_PLACE), counts=(42,), columns=7, specials=True)
    explore(calls, **job(case.nodes, seeds=1))


SEVERAL_EPOCHS = [
    case
    for case in REDUCING
    if case.algorithm not in ("one_shot", "ll") and not case.looped and not case.flagged
]


@each_case(SEVERAL_EPOCHS, dense=REDUCE)
def test_calls_of_several_epochs(case: AlgorithmCase) -> None:
    """An epilogue gets indices in the result of the call, not in those of an epoch."""
    calls = Calls(
        case.dense.spec,
        (case.algorithm,),
        (OUT_OF_PLACE, IN_PLACE),
        counts=(410,),
        dtype=torch.float16,
        columns=41,
        pieces=0,
        max_bytes_per_rank=256,
        lamport_bytes=256,
    )
    explore(calls, **job(case.nodes, seeds=1))
