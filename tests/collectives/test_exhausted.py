# SPDX-License-Identifier: Apache-2.0
"""All schedules of small calls of the dense kernels are run, with the detector of races; and the
page says so."""

from __future__ import annotations

from pathlib import Path

import pytest
from kernel_mutants import Mutant, installed
from tiers import every_eighth

from . import exhausted, mutant_layers
from .exhausted import CASES, THREE_CALLS, AlgorithmCase, Result, name_of, searched

RESULTS = {(each.case, each.bounds): each for each in exhausted.read()}


@pytest.mark.parametrize("case", every_eighth(CASES))
def test_three_calls_are_exhausted(case: AlgorithmCase) -> None:
    written: Result = RESULTS[name_of(case), THREE_CALLS]
    if not written.exhausted:
        pytest.skip("the page says that these have too many schedules")
    found = searched(case, THREE_CALLS)
    assert found.exhausted, found
    assert found.executions == written.executions


def test_the_page_has_what_the_commands_have_written() -> None:
    page = exhausted.PAGE.read_text(encoding="utf-8")
    assert exhausted.table(list(RESULTS.values())) in page
    assert mutant_layers.tables(mutant_layers.read()) in page


def test_each_result_is_of_a_case() -> None:
    names = {name_of(case) for case in CASES}
    assert {case for case, _ in RESULTS} == names
    assert len(CASES) == len(names)
    assert not [each for each in RESULTS.values() if each.failure]
    mutants = {str(mutant) for mutant in mutant_layers.ALL}
    assert {each.mutant for each in mutant_layers.read()} <= mutants


def mutant(name: str) -> Mutant:
    return next(each for each in mutant_layers.ALL if str(each) == name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "all_gather direct 4: one slot",
        "all_gather direct 4: in place: a rank is written to before it has entered",
    ],
)
def test_mutants_that_the_fair_schedule_hides_are_found(name: str, tmp_path: Path) -> None:
    wrong = mutant(name)
    with installed(wrong.changes, tmp_path):
        assert mutant_layers.in_the_fair_schedule(wrong, races=False) == mutant_layers.MISSED
        assert mutant_layers.in_the_fair_schedule(wrong, races=True) == mutant_layers.RACE
        found, bounds = mutant_layers.in_all_schedules(wrong)
    assert found == mutant_layers.EXPECTED
    assert bounds.startswith("2 ranks, ")
