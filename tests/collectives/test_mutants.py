# SPDX-License-Identifier: Apache-2.0
"""Kernels with one protection switched off are caught, and for what they lack."""

from __future__ import annotations

from pathlib import Path

import pytest
from exploring import explore
from fused.matmul.mutants import MUTANTS as MATMULS
from fused.mutants import MUTANTS as FUSED
from kernel_mutants import Mutant
from tiers import every_eighth

from .sparse_all_reduce.mutants import MUTANTS as SPARSE
from .suite.algorithm_cases import all_dense

DENSE = [mutant for dense in all_dense() for mutant in dense.mutants]
ALL = [*DENSE, *FUSED, *MATMULS, *SPARSE]
PLACES = {mutant.where: mutant for mutant in ALL}


@pytest.mark.parametrize("mutant", every_eighth(ALL), ids=str)
def test_mutant_is_caught(mutant: Mutant, tmp_path: Path) -> None:
    mutant.is_caught(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", PLACES.values(), ids=str)
def test_real_kernels_pass_where_mutants_are_caught(mutant: Mutant) -> None:
    explore(mutant.case, seeds=1, **mutant.world)
