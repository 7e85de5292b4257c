# SPDX-License-Identifier: Apache-2.0
"""What the two tiers of tests share. The second has the marker ``slow``; see CONTRIBUTING.md."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest

__all__ = ["second", "seeds", "some"]


def second(*values: Any, id: str | None = None) -> Any:
    """A parameter set of the second tier."""
    return pytest.param(*values, marks=pytest.mark.slow, id=id)


def seeds(first: int, second_tier: int) -> pytest.MarkDecorator:
    """Parameter ``seeds``: ``first`` in the first tier; in the second ``second_tier`` more, or ``EXPLORE_SEEDS``."""
    more = int(os.environ.get("EXPLORE_SEEDS", second_tier))
    assert first > 0, "no seed for the first tier"
    assert more > 0, "no seed for the second tier"
    return pytest.mark.parametrize("seeds", [range(first), second(range(first, first + more))], ids=["first", "more"])


def some(values: Sequence[Any]) -> list[Any]:
    """Every eighth in the first tier, the others in the second."""
    return [second(value, id=str(value)) if number % 8 else value for number, value in enumerate(values)]
