# SPDX-License-Identifier: Apache-2.0
"""One row of a result, its line on the terminal, and the file that rows are kept in. Pure."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(kw_only=True)
class Row:
    """One measurement. The attributes' names, and those of the facts, are the keys in files.

    Attributes:
        ranks, nodes: number of ranks and of nodes of the job.
        algorithm: tdcoll's algorithm, or the baseline's name.
        peer: whether it is a baseline's.
        launch: ``"graph"``, ``"eager"`` or ``"simulator"``.
        check: ``"ok"``, ``"WRONG"``, or ``"not run"``, for which ``note`` gives the reason.
        median_us, min_us, p90_us: microseconds per call of the slowest rank in each iteration; None
            if not timed.
        skew_us: median over the iterations of the time between the fastest and the slowest rank.
        note: text for the reader, for example the reason why it did not run, or an error.
        calls, iterations: numbers of calls that were timed together (alternating), and of
            iterations.
        facts: what was measured, by the names that the benchmark gives to them: its size, dtype and
            so on.
    """

    ranks: int
    nodes: int
    algorithm: str
    peer: bool
    launch: str
    check: str
    median_us: float | None = None
    min_us: float | None = None
    p90_us: float | None = None
    skew_us: float | None = None
    note: str | None = None
    calls: Sequence[int] = (1,)
    iterations: int = 0
    facts: dict[str, Any] = field(default_factory=dict)


Text = Callable[[Row], str]
"""Returns the text of a column for a row."""


def number(value: float | None, digits: int) -> str:
    """Return the value with so many digits after the point; ``-`` if there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def fact(template: str) -> Text:
    """Return the text that a template with names of facts makes: ``fact("{rows:,} rows")``."""
    return lambda row: template.format(**row.facts)


def label(row: Row) -> str:
    """Return the algorithm with its owner: ``"tdcoll 1d"``, or ``"nccl"``."""
    return row.algorithm if row.peer else f"tdcoll {row.algorithm}"


def _time(attribute: str) -> Text:
    return lambda row: number(getattr(row, attribute), 2)


def _check(row: Row) -> str:
    return row.check if row.note is None else f"{row.check}: {row.note}"


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The columns of a benchmark's rows, as headings with the text of each.

    Attributes:
        size: the columns that say which size a row is of. Rows of equal texts are compared.
        derived: further columns of the terminal, which follow from facts and times.
        label: the text that names the algorithm or the baseline.
    """

    size: Mapping[str, Text]
    derived: Mapping[str, Text] = field(default_factory=dict)
    label: Text = label

    def _algorithm(self, row: Row) -> str:
        """Return the label, and the algorithm that tdcoll chose if none was requested."""
        took = row.facts.get("took")
        return f"{self.label(row)} ({took})" if took else self.label(row)

    def terminal(self) -> dict[str, Text]:
        """Return all columns of the terminal. A heading's blanks widen its column."""
        return {
            **self.size,
            "ranks": lambda row: str(row.ranks),
            "nodes": lambda row: str(row.nodes),
            f"{'algorithm':>24}": self._algorithm,
            "launch": lambda row: row.launch,
            "µs": _time("median_us"),
            "min µs": _time("min_us"),
            "p90 µs": _time("p90_us"),
            "skew µs": _time("skew_us"),
            **self.derived,
            "check": _check,
        }

    def heading_line(self) -> str:
        """Return the line of headings."""
        return "# " + _aligned({heading: heading for heading in self.terminal()})

    def line(self, row: Row) -> str:
        """Return a row's line."""
        return "  " + _aligned({heading: text(row) for heading, text in self.terminal().items()})


def _aligned(texts: Mapping[str, str]) -> str:
    """Return a line of right-aligned texts, in columns as wide as their headings, at least 9."""
    return "  ".join(text.strip().rjust(max(len(heading), 9)) for heading, text in texts.items())


_SCHEMA = 1
_FIELDS = {field.name for field in dataclasses.fields(Row)} - {"facts"}


def save(path: Path, head: dict[str, Any], rows: Sequence[Row]) -> None:
    """Write a benchmark's rows, after ``head``: benchmark, command, started, provenance."""
    entries = []
    for row in rows:
        fields = dataclasses.asdict(row)
        facts = fields.pop("facts")
        entries.append({**facts, **fields})
    document = {"schema": _SCHEMA, **head, "rows": entries}
    write_whole(path, json.dumps(document, indent=1, ensure_ascii=False) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write a file as a whole: if the process is killed, the file is as before, or complete."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def load(path: Path) -> tuple[dict[str, Any], list[Row]]:
    """Return ``(head, rows)`` of a file that :func:`save` wrote.

    Raises:
        ValueError: it is another file.
        OSError: it can't be read.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["schema"] != _SCHEMA:
            raise ValueError(f"schema {document['schema']} (this version reads {_SCHEMA})")
        for key in ("benchmark", "command", "started", "provenance"):
            document[key]
        rows = []
        for facts in document.pop("rows"):
            fields: dict[str, Any] = {name: facts.pop(name) for name in _FIELDS & set(facts)}
            fields["calls"] = tuple(fields["calls"])
            rows.append(Row(**fields, facts=facts))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not the result of a benchmark: {error}") from error
    return document, rows
