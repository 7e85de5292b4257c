# SPDX-License-Identifier: Apache-2.0
"""Tuning tables: what their file says, what is wrong with one, and which of their sections apply."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import tdcoll
from tdcoll.collectives.all_gather.spec import SPEC
from tdcoll.collectives.all_reduce.spec import SPEC as ALL_REDUCE
from tdcoll.testing import World
from tdcoll.tuning import Entry, Table, shipped

from .cases import ENTRY, EXAMPLE, FIRST, changed, section, table_of

ROOT = Path(__file__).resolve().parents[3]


def test_a_table_comes_back_as_it_was() -> None:
    assert Table.parse(EXAMPLE.text()) == EXAMPLE
    assert Table.parse(Table(()).text()).sections == ()
    lines = EXAMPLE.text().splitlines()
    assert '    {"up_to": "16 KB", "algorithm": "ll", "chunk": "3 KB", "num_warps": 8},' in lines
    assert '    {"up_to": 4194305, "algorithm": "1d", "channels": 16},' in lines
    assert '    {"up_to": null, "algorithm": "direct"}' in lines


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("version",), 3, "t.json: version: expected 4 (another version of tdcoll wrote this table: measure again"),
        (("version",), True, "version: expected 4"),
        (("tuning",), "all_gather", 't.json: tuning: expected one of "tdcoll", got "all_gather"'),
        ((*FIRST, "operation"), "all_gahter", 'tables[0]: operation: expected one of "all_gather"'),
        ((*FIRST, "operation"), ..., "t.json: tables[0]: expected an object with operation, got"),
        (("tables",), {}, "t.json: tables: expected a list, got {}"),
        (("tables", 1), 3, "t.json: tables[1]: expected an object with architecture, operation"),
        ((*FIRST, "nodes"), ..., "t.json: tables[0]: expected an object with nodes, got"),
        ((*FIRST, "node"), 1, "t.json: tables[0]: expected no fields but architecture"),
        ((*FIRST, "nodes"), 0, "t.json: tables[0]: nodes: expected a whole number of at least 1, got 0"),
        ((*FIRST, "nodes"), True, "tables[0]: nodes: expected a whole number of at least 1, got true"),
        ((*FIRST, "launch"), "graph", "tables[0]: expected no fields but architecture"),
        ((*FIRST, "in_place"), 0, "tables[0]: in_place: expected one of false, true, got 0"),
        ((*FIRST, "architecture"), 90, "tables[0]: architecture: expected a text, got 90"),
        ((*FIRST, "source"), 1, "tables[0]: source: expected a text"),
        (
            ("tables", 1, "in_place"),
            False,
            "t.json: tables[1]: expected another architecture, operation, ranks_per_node, nodes",
        ),
        ((*ENTRY, "up_to"), "much", 'entries[1]: up_to: expected a number of bytes, such as 65536 or "64 KB", got "mu'),
        ((*ENTRY, "up_to"), 16384, "entries[1]: up_to: expected more than the 16384 bytes of the entry before"),
        ((*ENTRY, "up_to"), None, "entries[1]: up_to: expected a number of bytes: null is for the last entry"),
        ((*ENTRY, "channels"), 513, "entries[1]: channels: expected 1 to 512, got 513"),
        ((*ENTRY, "chunk"), "8 KB", "entries[1]: expected channels or chunk, got both"),
        ((*ENTRY, "num_warps"), 3, "entries[1]: num_warps: expected one of 1, 2, 4, 8, 16, 32, got 3"),
        ((*ENTRY, "warps"), 4, "entries[1]: expected no fields but up_to, algorithm, channels, chunk, num_warps"),
    ],
)
def test_what_is_wrong_is_named(path: tuple[Any, ...], value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Table.parse(changed(path, value), "t.json")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ((*ENTRY, "algorithm"), "3d", "algorithm: expected one of ll, direct, ring, 1d, 2d, got 3d"),
        ((*ENTRY, "algorithm"), "auto", "entry up to 4194305: algorithm: expected one of ll, direct, ring, 1d"),
        ((*FIRST, "entries", 0, "chunk"), 4096, "chunk: expected 12 times a power of two, from 3072 (a word for each"),
        ((*FIRST, "entries", 0, "chunk"), 1536, "chunk: expected 12 times a power of two, from 3072 (a word for each"),
        ((*FIRST, "entries", 0, "chunk"), 24576, "(a word for each thread) to 12288 bytes, got 24576"),
        (
            ("tables", 2, "entries", 0, "chunk"),
            130,
            "in_place true: entry up to null: chunk: expected a multi",
        ),
    ],
)
def test_the_policy_knows_what_its_entries_may_say(path: tuple[Any, ...], value: Any, message: str) -> None:
    assert SPEC.sections(EXAMPLE.sections, "t.json") == EXAMPLE.sections
    table = Table.parse(changed(path, value), "t.json")
    with pytest.raises(ValueError, match=re.escape(message)):
        SPEC.sections(table.sections, table.name)

    def host(pe: int) -> None:
        ctx = tdcoll.CollectiveContext(max_bytes_per_rank=64, tuning=table_of(Entry(64, "3d")))
        with pytest.raises(ValueError, match=r"a tuning table: .*: algorithm: expected one of ll, direct"):
            tdcoll.all_gather(torch.zeros(4), ctx)

    World(4).run(host)


def test_only_a_collective_with_calls_in_place_has_sections_for_them() -> None:
    table = Table.parse(changed(("tables", 1, "operation"), "all_reduce"), "t.json")
    with pytest.raises(ValueError, match=r"t\.json: all_reduce has no sections for calls in place"):
        ALL_REDUCE.sections(table.sections, table.name)


def test_files_that_are_no_tables(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"t\.json: expected a tuning table in JSON: "):
        Table.parse("{", "t.json")
    with pytest.raises(ValueError, match=r"none\.json: expected the file of a tuning table: .*No such file"):
        Table.load(tmp_path / "none.json")


def test_the_digest_is_of_what_it_says() -> None:
    again = Table(tuple(reversed(EXAMPLE.sections)), "another name")
    assert again.digest == EXAMPLE.digest
    other = Table((section(Entry(1 << 20, "1d", num_warps=8), source="somewhere"),))
    same = Table((section(Entry(1 << 20, "1d", num_warps=8), source="elsewhere"),))
    assert other.digest == same.digest != EXAMPLE.digest


def test_a_section_takes_the_place_of_that_of_its_kind() -> None:
    new = section(Entry(None, "1d"), in_place=True)
    merged = EXAMPLE.with_sections([new, section(Entry(None, "1d"), ranks_per_node=2)])
    assert merged.sections[:3] == (EXAMPLE.sections[0], new, EXAMPLE.sections[2])
    assert len(merged.sections) == 4


def test_a_name_goes_before_a_compute_capability() -> None:
    by_name = section(Entry(None, "ll"), architecture="NVIDIA H200")
    by_kind = section(Entry(None, "1d"), architecture="sm_90")
    inside = section(Entry(None, "1d"), in_place=True, architecture="sm_90")
    table = Table((by_kind, by_name, inside))
    assert table.of(("NVIDIA H200", "sm_90")) == (by_name, inside)
    assert table.of(("NVIDIA H100", "sm_90")) == (by_kind, inside)
    assert table.of(("NVIDIA B200", "sm_100")) == ()


def test_the_shipped_table_says_what_was_measured() -> None:
    """What `tune` wrote for docs/results, from the smallest size on: times in graphs, in files of older versions."""
    shown = json.loads((ROOT / "tdcoll/tuning/shipped.json").read_text())["tables"]
    assert len(shown) == len(shipped().sections) > 0
    for each in shown:
        entries, source = each.pop("entries"), each.pop("source")
        measured = [{"operation": "all_gather", **made} for made in json.loads((ROOT / source).read_text())["tables"]]
        (found,) = [made for made in measured if made | each == made and made["launch"] == "graph"]
        assert entries
        assert entries == found["entries"][: len(entries)]
