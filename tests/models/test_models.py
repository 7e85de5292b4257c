# SPDX-License-Identifier: Apache-2.0
"""Spin finds no error in the protocols' models, and one in each of their mutants."""

from __future__ import annotations

import re

import models
import pytest
from models import MODELS, Model
from tiers import parameters

needs_spin = pytest.mark.skipif(models.missing() is not None, reason=str(models.missing()))


def _correct() -> list:
    cases = [(model, "", model.slow) for model in MODELS]
    cases += [(model, change, True) for model in MODELS for change in model.harmless]
    return [
        parameters(model, change, slow=slow, id=f"{model} {change}".strip())
        for model, change, slow in cases
    ]


def _mutants() -> list:
    first = {(model.name, model.form): model.mutants[0] for model in MODELS}
    return [
        parameters(
            model,
            mutant,
            slow=mutant in model.slow_mutants or mutant != first[model.name, model.form],
            id=f"{model} {mutant}",
        )
        for model in MODELS
        for mutant in model.mutants
    ]


@needs_spin
@pytest.mark.parametrize(("model", "change"), _correct())
def test_models_have_no_error(model: Model, change: str) -> None:
    found = models.search(model, change)
    assert found.error == "", found.report
    assert found.exhausted, found.report
    if change:
        assert found.states > 1000
    else:
        assert models.row(model, found) in models.PAGE.read_text(encoding="utf-8")


@needs_spin
@pytest.mark.parametrize(("model", "mutant"), _mutants())
def test_mutants_have_an_error(model: Model, mutant: str) -> None:
    error = models.search(model, mutant).error
    assert re.match(r"assertion violated|invalid end state", error), error


def test_each_macro_is_in_its_model() -> None:
    """A macro that a model doesn't have would be a mutant that changes nothing."""
    common = (models.FOLDER / "common.h").read_text()
    for model in MODELS:
        text = (models.FOLDER / f"{model.name}.pml").read_text() + common
        assert re.search(r"\bRANKS\b", text), model
        assert re.search(r"\bCALLS\b", text), model
        for name in " ".join((model.form, *model.mutants, *model.harmless)).split():
            assert re.search(rf"#\s*(ifdef|ifndef|if|elif).*\b{name}\b", text), (model, name)


def test_every_model_is_listed_and_short() -> None:
    files = sorted(models.FOLDER.glob("*.pml"))
    assert {file.stem for file in files} == {model.name for model in MODELS}
    for file in files:
        assert len(file.read_text().splitlines()) < 150, file


def test_the_lines_of_the_page_are_those_of_the_models() -> None:
    """Each model has a line that ``models.py`` has written, with the macros and bounds of today."""
    text = models.PAGE.read_text(encoding="utf-8")
    listed = text.split(models.BEGIN)[1].split(models.END)[0].strip().splitlines()[2:]
    expected = []
    for line, model in zip(listed, MODELS, strict=True):
        states = int(line.split("|")[4].replace(",", ""))
        expected.append(models.row(model, models.Search("", True, states, 0, "")))
    assert sorted(listed) == sorted(expected)


COMPLETE = "State-vector 96 byte, depth reached 124, errors: 0\n 9189 states, stored\n"


@pytest.mark.parametrize(
    ("report", "exhausted", "error"),
    [
        (COMPLETE, True, ""),
        (COMPLETE + "pan: reached -DMEMLIM bound\n", False, ""),
        (COMPLETE + "Warning: Search not completed\n", False, ""),
        (COMPLETE + "error: max search depth too small\n", False, ""),
        (
            "pan:1: invalid end state (at depth 3)\n" + COMPLETE.replace("errors: 0", "errors: 1"),
            True,
            "invalid end state (at depth 3)",
        ),
    ],
)
def test_searches_that_hit_a_limit_are_not_complete(
    report: str, exhausted: bool, error: str
) -> None:
    found = models.result(report, 0.0)
    assert (found.exhausted, found.error, found.states) == (exhausted, error, 9189)
