# SPDX-License-Identifier: Apache-2.0
"""Tuning tables: which all-gather was the fastest on which machine, in a JSON file.

A table has a section for each kind of call that was measured; what no section is for, the rules of :mod:`.policy`
decide::

    {
     "tuning": "all_gather",
     "version": 2,
     "tables": [
      {
       "architecture": "NVIDIA H200",      the GPU's name, or its compute capability, such as "sm_90"
       "ranks_per_node": 8,
       "nodes": 1,
       "launch": "graph",                  or "eager"
       "in_place": false,
       "source": "where it comes from",    optional
       "entries": [                        ascending; the first that is large enough holds
        {"up_to": "16 KB", "algorithm": "ll", "chunk": "6 KB", "num_warps": 8},
        {"up_to": "4 MB", "algorithm": "1d", "channels": 16},
        {"up_to": null, "algorithm": "nccl"}
       ]
      }
     ]
    }

``up_to`` is bytes per rank, null for all sizes. ``channels`` (chunks that a segment is cut into) or ``chunk`` (bytes of
one), and ``num_warps``, are by the rules where they are missing. ``"nccl"`` leaves the call to torch.distributed;
``"ring"`` is taken by no rule, only where an entry or the caller says so.

``python -m tdcoll.bench tune`` measures and writes one. A context takes the one it is given, else that of the file
that ``TDCOLL_TUNING`` names, else tdcoll's own, which has what was measured for ``docs/results``.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tdcoll import arguments, runtime
from tdcoll.collectives.all_gather.policy import (
    ALGORITHMS,
    CHUNK_ALIGNMENT,
    HANDED_OVER,
    LL_MOST_WORDS,
    LL_WORD_BYTES,
    Entry,
    is_ll_chunk,
)
from tdcoll.errors import RankMismatchError
from tdcoll.limits import CHANNELS

__all__ = ["SIMULATOR", "Section", "Table", "Tuning", "agree", "architectures", "shipped"]

VERSION = 2
"""1 was of LL with words of 64 bits, whose times and chunks say nothing of those of 128."""

SIMULATOR = "simulator"
"""The architecture of simulated ranks."""

_VARIABLE = "TDCOLL_TUNING"
_KIND = ("architecture", "ranks_per_node", "nodes", "launch", "in_place")


def _written(nbytes: int | None) -> str | int | None:
    """4096 -> "4 KB"; as it is if it is no whole number of KB."""
    if nbytes is None or nbytes == 0 or nbytes % 1024:
        return nbytes
    shift, unit = next((s, u) for s, u in ((30, "GB"), (20, "MB"), (10, "KB")) if nbytes % (1 << s) == 0)
    return f"{nbytes >> shift} {unit}"


@dataclass(frozen=True)
class Section:
    """The entries of one kind of call on one kind of GPU.

    Attributes:
        architecture: name or compute capability.
        ranks_per_node, nodes, launch, in_place: as in :class:`~.policy.Entry`, whose are the same.
        entries: ascending.
        source: what it was measured with.
    """

    architecture: str
    ranks_per_node: int
    nodes: int
    launch: str
    in_place: bool
    entries: tuple[Entry, ...]
    source: str = ""

    @property
    def kind(self) -> tuple[Any, ...]:
        """What no two sections of a table share."""
        return tuple(getattr(self, name) for name in _KIND)


class _Reader:
    """A value of the file, and where it is; raises what was expected there."""

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


def _read_entry(at: _Reader, kind: dict[str, Any], before: int | None, last: bool) -> Entry:
    given = at.fields(("up_to", "algorithm"), ("channels", "chunk", "num_warps"))
    up_to = None if given["up_to"].value is None else given["up_to"].nbytes()
    if up_to is None and not last:
        raise given["up_to"].fail("a number of bytes: null is for the last entry")
    if up_to is not None and before is not None and up_to <= before:
        raise given["up_to"].fail(f"more than the {before} bytes of the entry before")
    algorithm = given["algorithm"].one_of((*ALGORITHMS[1:], HANDED_OVER))
    how: dict[str, int] = {}
    if algorithm == HANDED_OVER and (extra := set(given) - {"up_to", "algorithm"}):
        raise ValueError(f"{at.where}: expected no {', '.join(sorted(extra))} with algorithm {HANDED_OVER!r}")
    if "channels" in given and "chunk" in given:
        raise ValueError(f"{at.where}: expected channels or chunk, got both")
    if "num_warps" in given:
        how["num_warps"] = given["num_warps"].one_of((1, 2, 4, 8, 16, 32))
    if "channels" in given:
        how["channels"] = given["channels"].whole(1, CHANNELS)
    if "chunk" in given:
        how["chunk"] = chunk = given["chunk"].nbytes()
        if algorithm != "ll" and chunk % CHUNK_ALIGNMENT:
            raise given["chunk"].fail(f"a multiple of {CHUNK_ALIGNMENT} bytes")
        if algorithm == "ll":
            least = 32 * LL_WORD_BYTES * how.get("num_warps", 1)
            if not is_ll_chunk(chunk) or chunk < least:
                raise given["chunk"].fail(
                    f"{LL_WORD_BYTES} times a power of two, from {least} (a word for each thread) to "
                    f"{LL_WORD_BYTES * LL_MOST_WORDS} bytes"
                )
    return Entry(
        ranks_per_node=kind["ranks_per_node"],
        nodes=kind["nodes"],
        launch=kind["launch"],
        in_place=kind["in_place"],
        up_to=up_to,
        algorithm=algorithm,
        **how,
    )


def _read_section(at: _Reader) -> Section:
    given = at.fields((*_KIND, "entries"), ("source",))
    kind = {
        "architecture": given["architecture"].text(),
        "ranks_per_node": given["ranks_per_node"].whole(1),
        "nodes": given["nodes"].whole(1),
        "launch": given["launch"].one_of(("graph", "eager")),
        "in_place": given["in_place"].one_of((False, True)),
    }
    entries: list[Entry] = []
    readers = _Reader(f"{at.where}.entries", given["entries"].value).items()
    for i, reader in enumerate(readers):
        entries.append(_read_entry(reader, kind, entries[-1].up_to if entries else None, i + 1 == len(readers)))
    return Section(**kind, entries=tuple(entries), source=given["source"].text() if "source" in given else "")


@dataclass(frozen=True)
class Table:
    """A tuning table: sections, of different kinds, and the name of its file."""

    sections: tuple[Section, ...]
    name: str = "a tuning table"

    @classmethod
    def parse(cls, text: str, name: str = "a tuning table") -> Table:
        """The table that ``text`` holds.

        Raises:
            ValueError: naming ``name``, the entry, and what was expected there.
        """
        try:
            document = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{name}: expected a tuning table in JSON: {error}") from None
        given = _Reader(name, document).fields(("tuning", "version", "tables"), ("about",))
        given["tuning"].one_of(("all_gather",))
        if type(given["version"].value) is not int or given["version"].value != VERSION:
            older = " (version 1 is of an older tdcoll: measure again, into a new file)"
            raise given["version"].fail(
                f"{VERSION}, which this tdcoll reads{older if given['version'].value == 1 else ''}"
            )
        sections: dict[tuple[Any, ...], Section] = {}
        for at in _Reader(f"{name}: tables", given["tables"].value).items():
            section = _read_section(at)
            if section.kind in sections:
                raise ValueError(f"{at.where}: expected another {', '.join(_KIND)} than an earlier table has")
            sections[section.kind] = section
        return cls(tuple(sections.values()), name)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Table:
        """The table of a file.

        Raises:
            ValueError: it cannot be read, or is no table.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{os.fspath(path)}: expected the file of a tuning table: {error}") from None
        return cls.parse(text, os.fspath(path))

    def text(self) -> str:
        """What :meth:`parse` reads; one line for each entry."""
        shown = []
        for section in self.sections:
            lines = [f"   {json.dumps(name)}: {json.dumps(getattr(section, name))}" for name in _KIND]
            if section.source:
                lines.append(f'   "source": {json.dumps(section.source, ensure_ascii=False)}')
            entries = []
            for entry in section.entries:
                how = {name: getattr(entry, name) for name in ("channels", "chunk", "num_warps")}
                how["chunk"] = _written(entry.chunk)
                known = {name: value for name, value in how.items() if value is not None}
                entries.append(
                    "    " + json.dumps({"up_to": _written(entry.up_to), "algorithm": entry.algorithm, **known})
                )
            lines.append('   "entries": [\n' + ",\n".join(entries) + "\n   ]")
            shown.append("  {\n" + ",\n".join(lines) + "\n  }")
        tables = "[\n" + ",\n".join(shown) + "\n ]" if shown else "[]"
        return f'{{\n "tuning": "all_gather",\n "version": {VERSION},\n "tables": {tables}\n}}\n'

    @property
    def digest(self) -> str:
        """Of what it says, whoever measured it: the same for tables that decide alike."""
        said = sorted(repr(dataclasses.replace(section, source="")) for section in self.sections)
        return hashlib.sha256("\n".join(said).encode()).hexdigest()[:16]

    def entries(self, names: Sequence[str]) -> tuple[Entry, ...]:
        """Entries for a GPU of these names; where two sections are of one kind of call, those of the earlier name."""
        found: dict[tuple[Any, ...], tuple[Entry, ...]] = {}
        for name in names:
            for section in self.sections:
                if section.architecture == name:
                    found.setdefault(section.kind[1:], section.entries)
        return tuple(entry for entries in found.values() for entry in entries)

    def with_sections(self, sections: Sequence[Section]) -> Table:
        """This table with ``sections`` in the place of those of the same kinds."""
        merged = {section.kind: section for section in (*self.sections, *sections)}
        return Table(tuple(merged.values()), self.name)


def shipped() -> Table:
    """tdcoll's own table."""
    return Table.load(Path(__file__).with_name("tuning.json"))


def architectures(device: torch.device) -> tuple[str, ...]:
    """What tables may call a device: its name, its compute capability."""
    if device.type != "cuda":
        return (SIMULATOR,)
    major, minor = torch.cuda.get_device_capability(device)
    return torch.cuda.get_device_name(device), f"sm_{major}{minor}"


# ---------------------------------------------------------------------- of a context


@dataclass(frozen=True)
class Tuning:
    """What a context goes by; agreed by its ranks.

    Attributes:
        entries: of the table, for these GPUs and groups of this shape; none if the GPUs differ.
        group: the process group that a call may be left to, or None.
    """

    entries: tuple[Entry, ...]
    group: Any = None


def _process_group(group: runtime.Group, everybody: bool, device: torch.device) -> Any:
    """The torch.distributed group of the same ranks that can serve the device on its stream, or None."""
    dist = torch.distributed
    if not (dist.is_available() and dist.is_initialized()):
        return None
    if not isinstance(group, dist.ProcessGroup):
        if not everybody:
            return None
        group = dist.group.WORLD
    try:
        if group.name() == "tdcoll":
            return None  # it would come back here
        backend = group._get_backend(device).name()
    except (AttributeError, RuntimeError):  # none for such devices, or a group of another kind
        return None
    return group if backend == ("nccl" if device.type == "cuda" else "gloo") else None


def _table(given: Any) -> Table:
    if isinstance(given, Table):
        return given
    name = "tuning"
    if given is None:
        name, given = _VARIABLE, os.environ.get(_VARIABLE)
        if not given:
            return shipped()
    arguments.instance(name, given, (str, os.PathLike), "a tuning table (Table), the path of its file, or None")
    try:
        return Table.load(given)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def agree(
    owner: runtime.Runtime,
    ranks: Sequence[int],
    group: runtime.Group,
    given: Table | str | os.PathLike[str] | None,
) -> Tuning:
    """The tuning of a context that is being made: compared, so that all ranks choose alike. Collective over ``ranks``.

    Args:
        given: a table, or the path of its file; None: that of ``TDCOLL_TUNING``, else tdcoll's own.

    Raises:
        TypeError: ``given`` is none of these.
        ValueError: the file is no table.
        RankMismatchError: another rank has another table, or none that can be read.
    """
    problem: TypeError | ValueError | None = None
    table: Table | None = None
    try:
        table = _table(given)
    except (TypeError, ValueError) as error:
        problem = error
    names = architectures(owner.device)
    process_group = _process_group(group, tuple(ranks) == tuple(range(owner.world_size)), owner.device)
    mine = (None if problem is None else str(problem), table and (table.digest, table.name), names, bool(process_group))
    answers = owner.exchange(ranks, "CollectiveContext: tuning table", mine)
    if problem is not None:
        raise problem
    for rank, (other, _, _, _) in enumerate(answers):
        if other is not None:
            raise RankMismatchError(f"CollectiveContext: rank {rank} cannot read its tuning table: {other}")
    assert table is not None
    if len({answer[1][0] for answer in answers}) > 1:
        listing = ", ".join(f"rank {rank}: {name} ({digest})" for rank, (_, (digest, name), _, _) in enumerate(answers))
        raise RankMismatchError(f"the tuning table must be the same on all ranks; got {listing}")
    alike = len({answer[2] for answer in answers}) == 1  # nothing was measured on GPUs of several kinds
    topology = owner.topology(ranks)
    shape = (topology.ranks_per_node, topology.n_nodes)
    entries = table.entries(names) if alike else ()
    return Tuning(
        tuple(entry for entry in entries if (entry.ranks_per_node, entry.nodes) == shape),
        process_group if all(answer[3] for answer in answers) else None,
    )
