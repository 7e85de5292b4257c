# SPDX-License-Identifier: Apache-2.0
"""The tuning table, in a JSON file: a section for each kind of call that was measured, with entries
by size.

``docs/benchmarks.md`` has the format. If there is no section for a call, the collective's default
heuristic decides.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tdcoll.base import arguments
from tdcoll.base.limits import ALGORITHMS, COLLECTIVES, MATMULS, MAX_BLOCKS, MAX_CHUNKS

VERSION = 5
"""Version 5 renamed fields. Those before 4 told eager calls from captured ones, so ranks could
choose differently."""

WARPS = (1, 2, 4, 8, 16, 32)
"""Numbers of warps that a thread block may have."""

SIMULATOR = "simulator"
"""The architecture of simulated ranks."""

_KIND = ("architecture", "operation", "ranks_per_node", "nodes", "in_place")


def _written(nbytes: int | None) -> str | None:
    return None if nbytes is None else arguments.format_bytes(nbytes)


@dataclass(frozen=True)
class Entry:
    """A section's plan for calls up to one size; if a field is None, the policy decides.

    Attributes:
        up_to: the most bytes of a segment that it holds for, or of a matmul the most rows of all
            ranks; if None, any number.
        algorithm: one of the operation's.
        chunks, chunk: number of chunks of a segment, or bytes of one; at most one of the two.
        num_warps: warps of each thread block.
        blocks: thread blocks, at most, if any number works.
        tile: of a matmul: rows and columns of a tile, and the depth of a step, for operands of two
            bytes. ``num_stages`` and ``num_warps`` are given with it.
        num_stages, pushers, lag: of a matmul, see :mod:`tdcoll.fused.matmul.policy`.
    """

    up_to: int | None
    algorithm: str
    chunks: int | None = None
    chunk: int | None = None
    num_warps: int | None = None
    blocks: int | None = None
    tile: tuple[int, int, int] | None = None
    num_stages: int | None = None
    pushers: int | None = None
    lag: int | None = None


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
        return f"{said}: entry up to {json.dumps(self.written(entry.up_to))}"

    def written(self, up_to: int | None) -> str | int | None:
        """Return the size of an entry as files have it: bytes as a text, rows as a number."""
        return up_to if self.operation in MATMULS else _written(up_to)


def _is_tile(value: Any) -> bool:
    if not isinstance(value, list) or len(value) != 3:
        return False
    return all(type(size) is int and size in _TILE_SIZES for size in value)


def _is_count(most: int | None = None) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and value > 0 and (most is None or value <= most)


_TILE_SIZES = (16, 32, 64, 128, 256)
_MOST_STAGES, _MOST_LAG = 8, 2

_DENSE = ("chunks", "chunk", "num_warps", "blocks")
_OF_MATMULS = ("tile", "num_stages", "num_warps", "pushers", "lag")
"""Optional fields of the entries of dense collectives, and of matmuls."""

_TEXT = (lambda value: isinstance(value, str)), "a text"
_COUNT = _is_count(), "a whole number of at least 1"
_LIST = (lambda value: isinstance(value, list)), "a list"
_BYTES = 'a number of bytes, such as 65536 or "64 KB"'

_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "tuning": (lambda value: value == "tdcoll", '"tdcoll"'),
    "version": (
        lambda value: value == VERSION,
        f"{VERSION} (another version of tdcoll wrote this table: measure again, into a new file)",
    ),
    "about": _TEXT,
    "tables": _LIST,
    "architecture": _TEXT,
    "operation": (
        lambda value: value in (*COLLECTIVES, *MATMULS),
        f"one of {', '.join((*COLLECTIVES, *MATMULS))}",
    ),
    "ranks_per_node": _COUNT,
    "nodes": _COUNT,
    "in_place": (lambda value: isinstance(value, bool), "true or false"),
    "source": _TEXT,
    "entries": _LIST,
    "up_to": (lambda value: value is None or _is_count()(value), f"{_BYTES}, or null"),
    "algorithm": _TEXT,
    "chunks": (_is_count(MAX_CHUNKS), f"1 to {MAX_CHUNKS}"),
    "chunk": (_is_count(), _BYTES),
    "num_warps": (
        lambda value: type(value) is int and value in WARPS,
        f"one of {', '.join(map(str, WARPS))}",
    ),
    "blocks": (_is_count(MAX_BLOCKS - 1), f"1 to {MAX_BLOCKS - 1}"),
    "tile": (_is_tile, f"3 sizes of {', '.join(map(str, _TILE_SIZES))}"),
    "num_stages": (_is_count(_MOST_STAGES), f"1 to {_MOST_STAGES}"),
    "pushers": (_is_count(MAX_BLOCKS - 1), f"1 to {MAX_BLOCKS - 1}"),
    "lag": (_is_count(_MOST_LAG), f"1 to {_MOST_LAG}"),
}
"""For each field of a file, a check, and its condition in words for messages."""


def _wrong(where: str, expected: str, value: Any) -> ValueError:
    return ValueError(f"{where}: expected {expected}, got {json.dumps(value)[:200]}")


def _fields(
    where: str, value: Any, needed: Sequence[str], optional: Sequence[str]
) -> dict[str, Any]:
    """Return the fields of an object of the file, checked, with texts such as "64 KB" as
    numbers."""
    if not isinstance(value, dict) or not {*needed} <= {*value} <= {*needed, *optional}:
        raise _wrong(
            where,
            f"an object with {', '.join(needed)} and no more but {', '.join(optional)}",
            value,
        )
    found = dict(value)
    for name, given in value.items():
        if name in ("up_to", "chunk") and isinstance(given, str):
            with contextlib.suppress(ValueError):
                found[name] = arguments.parse_bytes(given, name)
        right, expected = _FIELDS[name]
        if not right(found[name]):
            raise _wrong(f"{where}: {name}", expected, given)
    return found


def _read_section(where: str, value: Any) -> Section:
    given = _fields(where, value, (*_KIND, "entries"), ("source",))
    is_matmul = given["operation"] in MATMULS
    if is_matmul and given["in_place"]:
        raise _wrong(f"{where}: in_place", f"false for {given['operation']}", True)
    optional = _OF_MATMULS if is_matmul else _DENSE
    entries: list[Entry] = []
    for number, one in enumerate(given.pop("entries")):
        at = f"{where}.entries[{number}]"
        how = _fields(at, one, ("up_to", "algorithm"), optional)
        known = ALGORITHMS[given["operation"]]
        if how["algorithm"] not in known:
            expected = f"one of {', '.join(known)} for {given['operation']}"
            raise _wrong(f"{at}: algorithm", expected, how["algorithm"])
        if "chunks" in how and "chunk" in how:
            raise ValueError(f"{at}: expected chunks or chunk, got both")
        if is_matmul:
            if isinstance(one["up_to"], str):
                raise _wrong(f"{at}: up_to", "a number of rows, or null", one["up_to"])
            if len({"tile", "num_stages", "num_warps"} & {*how}) not in (0, 3):
                raise _wrong(at, "tile, num_stages and num_warps together, or none of them", one)
            if "tile" in how:
                how["tile"] = tuple(how["tile"])
        if entries and (
            entries[-1].up_to is None or (how["up_to"] or 1 << 63) <= entries[-1].up_to
        ):
            raise _wrong(
                f"{at}: up_to",
                "more than the entry before has, of which null is for the last",
                how["up_to"],
            )
        entries.append(Entry(**how))
    return Section(**given, entries=tuple(entries))


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
        given = _fields(name, document, ("tuning", "version", "tables"), ("about",))
        sections: dict[tuple[Any, ...], Section] = {}
        for number, value in enumerate(given["tables"]):
            section = _read_section(f"{name}: tables[{number}]", value)
            if section.kind in sections:
                raise ValueError(
                    f"{name}: tables[{number}]: expected another {', '.join(_KIND)} than an earlier table"
                )
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
            lines = [
                f"   {json.dumps(name)}: {json.dumps(getattr(section, name))}" for name in _KIND
            ]
            if section.source:
                lines.append(f'   "source": {json.dumps(section.source, ensure_ascii=False)}')
            entries = []
            for entry in section.entries:
                known = {name: value for name, value in vars(entry).items() if value is not None}
                if "up_to" in known:
                    known["up_to"] = section.written(entry.up_to)
                if "chunk" in known:
                    known["chunk"] = _written(entry.chunk)
                entries.append(f"    {json.dumps({'up_to': None, **known})}")
            lines.append('   "entries": [\n' + ",\n".join(entries) + "\n   ]")
            shown.append("  {\n" + ",\n".join(lines) + "\n  }")
        tables = "[\n" + ",\n".join(shown) + "\n ]" if shown else "[]"
        return f'{{\n "tuning": "tdcoll",\n "version": {VERSION},\n "tables": {tables}\n}}\n'

    @property
    def digest(self) -> str:
        """Return a hash of its entries without their sources, which is the same if tables decide
        alike."""
        said = sorted(repr(dataclasses.replace(section, source="")) for section in self.sections)
        return hashlib.sha256("\n".join(said).encode()).hexdigest()[:16]

    def of(self, names: Sequence[str], ranks_per_node: int | None, nodes: int) -> Table:
        """Return the part for groups of this shape on GPUs of these names; if two sections are for
        one kind of call, that of the earlier name."""
        found: dict[tuple[Any, ...], Section] = {}
        for name in names:
            for section in self.sections:
                if (section.architecture, section.ranks_per_node, section.nodes) == (
                    name,
                    ranks_per_node,
                    nodes,
                ):
                    found.setdefault(section.kind[1:], section)
        return Table(tuple(found.values()), self.name)

    def with_sections(self, sections: Sequence[Section]) -> Table:
        """Return this table with ``sections`` instead of those of the same kinds."""
        merged = {section.kind: section for section in (*self.sections, *sections)}
        return Table(tuple(merged.values()), self.name)


def shipped() -> Table:
    """Return tdcoll's own table."""
    return Table.load(Path(__file__).with_name("shipped.json"))
