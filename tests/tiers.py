# SPDX-License-Identifier: Apache-2.0
"""What the two tiers of tests share. The second has the marker ``slow``; see CONTRIBUTING.md."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest

__all__ = ["every_eighth", "parameters", "seeds", "slow_tier"]


def parameters(*values: Any, slow: bool = False, id: str | None = None) -> Any:
    """A parameter set; of the second tier if it is ``slow``."""
    marks = [pytest.mark.slow] if slow else []
    return pytest.param(*values, marks=marks, id=id)


def slow_tier(*values: Any, id: str | None = None) -> Any:
    """A parameter set of the second tier."""
    return parameters(*values, slow=True, id=id)


def seeds(first: int, second_tier: int) -> pytest.MarkDecorator:
    """Parameter ``seeds``: ``first`` in the first tier, and in the second tier ``second_tier``
    more, or ``EXPLORE_SEEDS``."""
    more = int(os.environ.get("EXPLORE_SEEDS", second_tier))
    assert first > 0, "no seed for the first tier"
    assert more > 0, "no seed for the second tier"
    sets = [
        parameters(range(first), id="first"),
        slow_tier(range(first, first + more), id="more"),
    ]
    return pytest.mark.parametrize("seeds", sets)


def every_eighth(values: Sequence[Any]) -> list[Any]:
    """Parameter sets: every eighth value in the first tier, the others in the second."""
    return [
        parameters(value, slow=place % 8 != 0, id=str(value)) for place, value in enumerate(values)
    ]
