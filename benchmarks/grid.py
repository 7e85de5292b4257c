# SPDX-License-Identifier: Apache-2.0
"""A table as a list of columns.

This module is apart from :mod:`.tables`, because scripts that time the host don't import pandas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tabulate import tabulate


@dataclass(frozen=True)
class Column:
    """A column of a table: its heading, and a text for each line.

    Attributes:
        align: "right" or "left".
    """

    heading: str
    texts: Sequence[str]
    align: str = "right"


def grid(columns: Sequence[Column]) -> str:
    """Return a Markdown table of the columns."""
    headings = [_escaped(column.heading) for column in columns]
    texts = [[_escaped(text) for text in column.texts] for column in columns]
    return tabulate(
        list(zip(*texts, strict=True)),
        headings,
        tablefmt="pipe",
        disable_numparse=True,
        colalign=[column.align for column in columns],
    )


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")
