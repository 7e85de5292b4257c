# SPDX-License-Identifier: Apache-2.0
"""Parameter sets that tests of all dense collectives share.

Sets are built from what a collective or an algorithm supports, so that each checks something. The
code that builds them asserts how many there must be, so that none is lost by mistake.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from tiers import parameters

from .algorithm_cases import AlgorithmCase, Dense, all_dense, cases_of

ALL = all_dense()
USUAL = [case for dense in ALL for case in cases_of(dense)]
"""Each algorithm on its first nodes."""

EVERYWHERE = [case for dense in ALL for case in cases_of(dense, every=True)]
"""Each algorithm on all of its nodes."""

REDUCING = [case for case in USUAL if case.dense.spec.reduces]
"""Of collectives that reduce."""

each_dense = pytest.mark.parametrize("dense", ALL, ids=str)


def each_case(
    cases: Iterable[AlgorithmCase],
    *,
    looped_later: bool = False,
    dense: Iterable[Dense] = tuple(ALL),
) -> pytest.MarkDecorator:
    """Parametrize ``case``.

    Args:
        cases: among them at least one of each of ``dense``.
        looped_later: cases with few thread blocks are in the second tier.
    """
    cases = list(cases)
    assert {str(case.dense) for case in cases} == set(map(str, dense))
    sets = [parameters(case, slow=looped_later and case.looped, id=str(case)) for case in cases]
    return pytest.mark.parametrize("case", sets)
