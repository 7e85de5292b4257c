# SPDX-License-Identifier: Apache-2.0
"""How the tables of a sparse all-reduce lie behind each other: :class:`TableLayout`. Host
arithmetic only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch


class SameWidth(NamedTuple):
    """Tables that follow each other and have one shape of rows.

    Attributes:
        first, last: The first of the tables, and the one behind the last.
        elements: Of a row.
        shape: Of a row.
    """

    first: int
    last: int
    elements: int
    shape: torch.Size


@dataclass(frozen=True)
class TableLayout:
    """Tables that follow each other in one space of ids, and whose rows are reduced at one
    distance.

    Attributes:
        shapes: Of a row of each table.
        firsts: Id of the first row of each table.
        num_rows: Of all tables.
        elements, row_bytes: Of the widest row: the distance from one row to the next where they are
            reduced.
        rows_in_16_bytes: Whether the rows of every table are multiples of 16 bytes.
        widths: The tables by their shapes of rows.
        ids_type: Of the ids that are sorted. For several tables int32 if all ids fit, which takes
            half as long.
    """

    shapes: tuple[torch.Size, ...]
    firsts: tuple[int, ...]
    num_rows: int
    elements: int
    row_bytes: int
    rows_in_16_bytes: bool
    widths: tuple[SameWidth, ...]
    ids_type: torch.dtype

    @staticmethod
    def of(tables: Sequence[tuple[int, torch.Size]], dtype: torch.dtype) -> TableLayout:
        """Return the layout of tables with these numbers of rows and shapes of a row."""
        shapes = tuple(shape for _, shape in tables)
        ends = list(accumulate(num_rows for num_rows, _ in tables))
        num_rows = ends[-1]
        elements = max(shape.numel() for shape in shapes)
        ids_fit = num_rows <= 1 << 31
        return TableLayout(
            shapes=shapes,
            firsts=(0, *ends[:-1]),
            num_rows=num_rows,
            elements=elements,
            row_bytes=elements * dtype.itemsize,
            rows_in_16_bytes=all(shape.numel() * dtype.itemsize % 16 == 0 for shape in shapes),
            widths=_widths(shapes),
            ids_type=torch.int32 if len(shapes) > 1 and ids_fit else torch.int64,
        )


def _widths(shapes: Sequence[torch.Size]) -> tuple[SameWidth, ...]:
    """Return runs of tables with one shape of rows."""
    widths: list[SameWidth] = []
    for place, shape in enumerate(shapes):
        if widths and widths[-1].shape == shape:
            widths[-1] = widths[-1]._replace(last=place + 1)
        else:
            widths.append(SameWidth(place, place + 1, shape.numel(), shape))
    return tuple(widths)
