# SPDX-License-Identifier: Apache-2.0
"""Fused kernels with one protection switched off are caught."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from kernel_mutants import installed

from tdcoll.testing import explore, first_failure

from .cases import Norms
from .mutants import MODULES, MUTANTS, Mutant

HEAP = 1 << 20


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_caught(mutant: Mutant, tmp_path: Path) -> None:
    case = Norms(mutant.algorithm, **mutant.arguments)
    with installed(mutant.changes, tmp_path, MODULES):
        failure = first_failure(case, seeds=60, heap_bytes=HEAP, **mutant.job)
    assert failure is not None, f"nothing noticed: {mutant.name}"
    assert re.search(mutant.expect, failure.report), f"{mutant.name} fails, but not as it should: {failure.report}"


SAME_AS_MUTANTS = {f"{m.algorithm} {m.arguments} {m.job}": m for m in MUTANTS}


@pytest.mark.parametrize("mutant", SAME_AS_MUTANTS.values(), ids=SAME_AS_MUTANTS)
def test_real_kernels_pass_where_mutants_are_caught(mutant: Mutant) -> None:
    explore(Norms(mutant.algorithm, **mutant.arguments), seeds=1, heap_bytes=HEAP, **mutant.job)
