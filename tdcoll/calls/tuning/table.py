# SPDX-License-Identifier: Apache-2.0
"""The tuning table, in a JSON file: a section for each kind of call that was measured, with entries by size.

``docs/benchmarks.md`` has the format, and why sections don't depend on CUDA graphs. If there is no section for a call,
the default heuristic of the collective decides.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tdcoll.base import arguments
from tdcoll.base.limits import COLLECTIVES, MAX_BLOCKS, MAX_CHUNKS

__all__ = ["SIMULATOR", "WARPS", "Entry", "Section", "Table", "shipped"]

VERSION = 5
"""Version 4 has other names of fields. Older ones distinguished eager calls from those in CUDA graphs, so ranks could
choose differently."""

WARPS = (1, 2, 4, 8, 16, 32)
"""Numbers of warps that a thread block may have."""

SIMULATOR = "simulator"
"""The architecture of simulated ranks."""

_KIND = ("architecture", "operation", "ranks_per_node", "nodes", "in_place")


def _written(nbytes: int | None) -> str | int | None:
    """4096 -> "4 KB"; unchanged if it is no whole number of KB."""
    if nbytes is None or nbytes == 0 or nbytes % 1024:
        return nbytes
    shift, unit = next((s, u) for s, u in ((30, "GB"), (20, "MB"), (10, "KB")) if nbytes % (1 << s) == 0)
    return f"{nbytes >> shift} {unit}"


@dataclass(frozen=True)
class Entry:
    """A section's plan for calls up to one size; if a field is None, the policy decides.

    Attributes:
        up_to: the most bytes of a segment that it holds for; if None, any number.
        algorithm: one of the operation's.
        chunks, chunk: number of chunks of a segment, or bytes of one; at most one of the two.
        num_warps: warps of each thread block.
        blocks: thread blocks, at most, if any number works.
    """

    up_to: int | None
    algorithm: str
    chunks: int | None = None
    chunk: int | None = None
    num_warps: int | None = None
    blocks: int | None = None


@dataclass(frozen=True)
class Section:
    """The entries of one kind of call on one kind of GPU.

    Attributes:
        architecture: name or compute capability.
        operation: such as ``"all_gather"``.
        ranks_per_node, nodes: the group that it was measured on.
        in_place: whether peers write into the caller's buffer in these calls, for example of
            :func:`tdcoll.all_gather_`.
        entries: ascending.
        source: of the measurements.
    """

    architecture: str
    operation: str
    ranks_per_node: int
    nodes: int
    in_place: bool
    entries: tuple[Entry, ...]
    source: str = ""

    @property
    def kind(self) -> tuple[Any, ...]:
        """The key of a section, unique in a table: the architecture, and then the kind of call."""
        return tuple(getattr(self, name) for name in _KIND)

    def where(self, entry: Entry) -> str:
        """Return the place of an entry, for messages."""
        said = ", ".join(f"{name} {json.dumps(getattr(self, name))}" for name in _KIND)
        return f"{said}: entry up to {json.dumps(_written(entry.up_to))}"


class _Reader:
    """A value of the file, and its place; if it is wrong, raises an error with the expected value."""

    def __init__(self, where: str, value: Any) -> None:
        self.where, self.value = where, value

    def fail(self, expected: str) -> ValueError:
        return ValueError(f"{self.where}: expected {expected}, got {json.dumps(self.value)[:200]}")

    def fields(self, needed: Sequence[str], optional: Sequence[str] = ()) -> dict[str, _Reader]:
        if not isinstance(self.value, dict):
            raise self.fail(f"an object with {', '.join(needed)}")
        if missing := [name for name in needed if name not in self.value]:
            raise self.fail(f"an object with {', '.join(missing)}")
        if unknown := [name for name in self.value if name not in (*needed, *optional)]:
            raise ValueError(f"{self.where}: expected no fields but {', '.join((*needed, *optional))}; got {unknown}")
        return {name: _Reader(f"{self.where}: {name}", value) for name, value in self.value.items()}

    def items(self) -> list[_Reader]:
        if not isinstance(self.value, list):
            raise self.fail("a list")
        return [_Reader(f"{self.where}[{i}]", value) for i, value in enumerate(self.value)]

    def one_of(self, known: Sequence[Any]) -> Any:
        if not any(self.value is value or (type(self.value) is str and self.value == value) for value in known):
            raise self.fail(f"one of {', '.join(json.dumps(value) for value in known)}")
        return self.value

    def text(self) -> str:
        if not isinstance(self.value, str):
            raise self.fail("a text")
        return self.value

    def whole(self, least: int, most: int | None = None) -> int:
        if type(self.value) is not int or self.value < least or (most is not None and self.value > most):
            raise self.fail(f"a whole number of at least {least}" if most is None else f"{least} to {most}")
        return self.value

    def nbytes(self) -> int:
        if isinstance(self.value, str):
            try:
                return arguments.parse_bytes(self.value, "")
            except ValueError:
                pass
        elif type(self.value) is int and self.value > 0:
            return self.value
        raise self.fail('a number of bytes, such as 65536 or "64 KB"')


_HOW: dict[str, Callable[[_Reader], int]] = {
    "chunks": lambda at: at.whole(1, MAX_CHUNKS),
    "chunk": _Reader.nbytes,
    "num_warps": lambda at: at.one_of(WARPS),
    "blocks": lambda at: at.whole(1, MAX_BLOCKS - 1),
}
"""The optional fields of an entry."""


def _read_entry(at: _Reader, before: int | None, last: bool) -> Entry:
    given = at.fields(("up_to", "algorithm"), tuple(_HOW))
    up_to = None if given["up_to"].value is None else given["up_to"].nbytes()
    if up_to is None and not last:
        raise given["up_to"].fail("a number of bytes: null is for the last entry")
    if up_to is not None and before is not None and up_to <= before:
        raise given["up_to"].fail(f"more than the {before} bytes of the entry before")
    if "chunks" in given and "chunk" in given:
        raise ValueError(f"{at.where}: expected chunks or chunk, got both")
    how = {name: read(given[name]) for name, read in _HOW.items() if name in given}
    return Entry(up_to, given["algorithm"].text(), **how)


def _read_section(at: _Reader) -> Section:
    given = at.fields((*_KIND, "entries"), ("source",))
    kind = {
        "architecture": given["architecture"].text(),
        "operation": given["operation"].one_of(COLLECTIVES),
        "ranks_per_node": given["ranks_per_node"].whole(1),
        "nodes": given["nodes"].whole(1),
        "in_place": given["in_place"].one_of((False, True)),
    }
    entries: list[Entry] = []
    readers = _Reader(f"{at.where}.entries", given["entries"].value).items()
    for reader in readers:
        entries.append(_read_entry(reader, entries[-1].up_to if entries else None, reader is readers[-1]))
    return Section(**kind, entries=tuple(entries), source=given["source"].text() if "source" in given else "")


@dataclass(frozen=True)
class Table:
    """A tuning table: sections, of different kinds, and the name of its file."""

    sections: tuple[Section, ...]
    name: str = "a tuning table"

    @classmethod
    def parse(cls, text: str, name: str = "a tuning table") -> Table:
        """Return the table that ``text`` holds.

        Raises:
            ValueError: naming ``name``, the entry, and the expected value.
        """
        try:
            document = json.loads(text)
        except (RecursionError, ValueError) as error:
            raise ValueError(f"{name}: expected a tuning table in JSON: {error}") from None
        given = _Reader(name, document).fields(("tuning", "version", "tables"), ("about",))
        version = given["version"]
        if type(version.value) is not int or version.value != VERSION:
            raise version.fail(
                f"{VERSION} (another version of tdcoll wrote this table: measure again, into a new file)"
            )
        given["tuning"].one_of(("tdcoll",))
        sections: dict[tuple[Any, ...], Section] = {}
        for at in _Reader(f"{name}: tables", given["tables"].value).items():
            section = _read_section(at)
            if section.kind in sections:
                raise ValueError(f"{at.where}: expected another {', '.join(_KIND)} than an earlier table has")
            sections[section.kind] = section
        return cls(tuple(sections.values()), name)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Table:
        """Return the table of a file.

        Raises:
            ValueError: it cannot be read, or is no table.
        """
        expected = f"{os.fspath(path)}: expected the file of a tuning table"
        if not os.path.isfile(path):  # opening a FIFO could wait forever
            raise ValueError(f"{expected}: there is no regular file of this name")
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{expected}: {error}") from None
        return cls.parse(text, os.fspath(path))

    def text(self) -> str:
        """Return the text for :meth:`parse`; one line for each entry."""
        shown = []
        for section in self.sections:
            lines = [f"   {json.dumps(name)}: {json.dumps(getattr(section, name))}" for name in _KIND]
            if section.source:
                lines.append(f'   "source": {json.dumps(section.source, ensure_ascii=False)}')
            entries = []
            for entry in section.entries:
                known = {name: value for name, value in vars(entry).items() if value is not None}
                known |= {name: _written(getattr(entry, name)) for name in ("up_to", "chunk") if name in known}
                entries.append(f"    {json.dumps({'up_to': None, **known})}")
            lines.append('   "entries": [\n' + ",\n".join(entries) + "\n   ]")
            shown.append("  {\n" + ",\n".join(lines) + "\n  }")
        tables = "[\n" + ",\n".join(shown) + "\n ]" if shown else "[]"
        return f'{{\n "tuning": "tdcoll",\n "version": {VERSION},\n "tables": {tables}\n}}\n'

    @property
    def digest(self) -> str:
        """Return a hash of its entries without their sources: the same if tables decide alike."""
        said = sorted(repr(dataclasses.replace(section, source="")) for section in self.sections)
        return hashlib.sha256("\n".join(said).encode()).hexdigest()[:16]

    def of(self, names: Sequence[str]) -> tuple[Section, ...]:
        """Return the sections for a GPU of these names; if two are for one kind of call, that of the earlier name."""
        found: dict[tuple[Any, ...], Section] = {}
        for name in names:
            for section in self.sections:
                if section.architecture == name:
                    found.setdefault(section.kind[1:], section)
        return tuple(found.values())

    def with_sections(self, sections: Sequence[Section]) -> Table:
        """Return this table with ``sections`` instead of those of the same kinds."""
        merged = {section.kind: section for section in (*self.sections, *sections)}
        return Table(tuple(merged.values()), self.name)


def shipped() -> Table:
    """Return tdcoll's own table."""
    return Table.load(Path(__file__).with_name("shipped.json"))
