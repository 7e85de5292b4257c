# SPDX-License-Identifier: Apache-2.0
"""Tuning tables: what their file says, what is wrong with one, the plans that they make, and
contexts with one."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from landings import make_facts
from ranks import on_ranks

import tdcoll
from tdcoll import runtime
from tdcoll.calls.collective import spec_of
from tdcoll.calls.plan import Plan
from tdcoll.calls.tuning import SIMULATOR, Entry, Section, Table, shipped, source
from tdcoll.testing import World

from .algorithm_cases import Nodes, topology_of

ROOT = Path(__file__).resolve().parents[3]
GATHER = spec_of("all_gather")
REDUCE = spec_of("all_reduce")


def section(
    *entries: Entry, architecture: str = SIMULATOR, in_place: bool = False, source: str = "", ranks_per_node: int = 4,
    nodes: int = 1,
) -> Section:  # fmt: skip
    """A section of a table: for calls out of place on one node of four ranks, unless it says
    otherwise."""
    return Section(architecture, "all_gather", ranks_per_node, nodes, in_place, entries, source)


def table_of(*entries: Entry) -> Table:
    return Table((section(*entries),))


def choose(
    nbytes: int, algorithm: Any = "auto", sections: Any = (), nodes: Nodes = (4,), **facts: Any
) -> Plan:
    return replace(
        GATHER.choose(make_facts(nbytes, topology_of(nodes), **facts), algorithm, sections),
        blocks=0,
    )


FILE = (
    Entry(16 << 10, "ll", chunk=3072, num_warps=8), Entry((4 << 20) + 1, "1d", chunks=16), Entry(None, "direct")
)  # fmt: skip
EXAMPLE = Table(
    (
        section(*FILE),
        section(Entry(1 << 20, "1d", num_warps=4), in_place=True, source="somewhere"),
        section(Entry(None, "1d", chunk=1 << 20), in_place=True, architecture="sm_90"),
        section(Entry(None, "loop", num_warps=8, blocks=16), architecture="sm_90"),
    )
)


def changed(path: tuple[Any, ...], value: Any) -> str:
    """The example with one value replaced, or a field removed (``...``)."""
    document = json.loads(EXAMPLE.text())
    place = document
    for step in path[:-1]:
        place = place[step]
    if value is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return json.dumps(document)


FIRST = ("tables", 0)
ENTRY = (*FIRST, "entries", 1)


# ---------------------------------------------------------------------- files


def test_a_table_comes_back_as_it_was() -> None:
    assert Table.parse(EXAMPLE.text()) == EXAMPLE
    assert Table.parse(Table(()).text()).sections == ()
    lines = EXAMPLE.text().splitlines()
    assert '    {"up_to": "16 KB", "algorithm": "ll", "chunk": "3 KB", "num_warps": 8},' in lines
    assert '    {"up_to": "4194305 B", "algorithm": "1d", "chunks": 16},' in lines
    assert '    {"up_to": null, "algorithm": "direct"}' in lines


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (
            ("version",),
            3,
            "t.json: version: expected 5 (another version of tdcoll wrote this table: measure again",
        ),
        (("tuning",), "all_gather", 't.json: tuning: expected "tdcoll", got "all_gather"'),
        ((*FIRST, "operation"), "all_gahter", "tables[0]: operation: expected one of all_gather, "),
        (("tables",), {}, "t.json: tables: expected a list, got {}"),
        (
            (*FIRST, "nodes"),
            ...,
            "t.json: tables[0]: expected an object with architecture, operation",
        ),
        ((*FIRST, "node"), 1, "in_place, entries and no more but source, got"),
        (
            (*FIRST, "nodes"),
            0,
            "t.json: tables[0]: nodes: expected a whole number of at least 1, got 0",
        ),
        ((*FIRST, "in_place"), 0, "tables[0]: in_place: expected true or false, got 0"),
        ((*FIRST, "architecture"), 90, "tables[0]: architecture: expected a text, got 90"),
        (
            ("tables", 1, "in_place"),
            False,
            "t.json: tables[1]: expected another architecture, operation, ranks_per",
        ),
        (
            (*ENTRY, "up_to"),
            "much",
            'entries[1]: up_to: expected a number of bytes, such as 65536 or "64 KB", or null, ',
        ),
        ((*ENTRY, "up_to"), 16384, "entries[1]: up_to: expected more than the entry before has"),
        (
            (*ENTRY, "up_to"),
            None,
            "entries[2]: up_to: expected more than the entry before has, of which null",
        ),
        ((*ENTRY, "chunks"), 513, "entries[1]: chunks: expected 1 to 512, got 513"),
        ((*ENTRY, "chunk"), "8 KB", "entries[1]: expected chunks or chunk, got both"),
        (
            (*ENTRY, "num_warps"),
            3,
            "entries[1]: num_warps: expected one of 1, 2, 4, 8, 16, 32, got 3",
        ),
        (
            (*ENTRY, "warps"),
            4,
            "with up_to, algorithm and no more but chunks, chunk, num_warps, blocks, got",
        ),
    ],
)
def test_what_is_wrong_is_named(path: tuple[Any, ...], value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Table.parse(changed(path, value), "t.json")


def test_the_spec_knows_what_its_entries_may_say() -> None:
    assert GATHER.sections(EXAMPLE.sections, "t.json") == EXAMPLE.sections
    expected = "algorithm: expected one of ll, direct, loop, ce, ring, 1d, 2d"
    with pytest.raises(ValueError, match=f'{expected} for all_gather, got "3d"'):
        Table.parse(changed((*ENTRY, "algorithm"), "3d"), "t.json")
    table = table_of(Entry(64, "3d"))  # not from a file
    with pytest.raises(ValueError, match=f"{expected}, got 3d"):
        GATHER.sections(table.sections, table.name)


@on_ranks(4)
def test_a_call_says_what_is_wrong_with_the_table_of_its_context(pe: int) -> None:
    ctx = tdcoll.CollectiveContext(max_bytes_per_rank=64, tuning=table_of(Entry(64, "3d")))
    with pytest.raises(
        ValueError, match=r"a tuning table: .*: algorithm: expected one of ll, direct"
    ):
        tdcoll.all_gather(torch.zeros(4), ctx=ctx)


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
    assert len(merged.sections) == 5


def test_a_name_goes_before_a_compute_capability() -> None:
    by_name = section(Entry(None, "ll"), architecture="NVIDIA H200")
    by_kind = section(Entry(None, "1d"), architecture="sm_90")
    inside = section(Entry(None, "1d"), in_place=True, architecture="sm_90")
    table = Table((by_kind, by_name, inside))
    assert table.of(("NVIDIA H200", "sm_90"), 4, 1).sections == (by_name, inside)
    assert table.of(("NVIDIA H100", "sm_90"), 4, 1).sections == (by_kind, inside)
    assert table.of(("NVIDIA B200", "sm_100"), 4, 1).sections == ()
    assert (
        table.of(("NVIDIA H200", "sm_90"), 4, 2).sections
        == table.of(("NVIDIA H200",), 2, 1).sections
        == ()
    )


def test_the_shipped_table_says_what_was_measured() -> None:
    """What `tune` wrote for docs/results, from the smallest size on: times in graphs, in files of
    older versions."""
    shown = json.loads((ROOT / "tdcoll/calls/tuning/shipped.json").read_text())["tables"]
    assert len(shown) == len(shipped().sections) > 0
    for each in shown:
        entries = each.pop("entries")
        source = each.pop("source")
        measured = [
            {"operation": "all_gather", **made}
            for made in json.loads((ROOT / source).read_text())["tables"]
        ]
        (found,) = [
            made
            for made in measured
            if made | each == made and made.get("launch", "graph") == "graph"
        ]
        assert entries
        assert entries == found["entries"][: len(entries)]


def test_with_a_budget_only_entries_hold_that_state_their_thread_blocks() -> None:
    """The others were measured with the whole GPU."""
    stated = section(Entry(None, "loop", blocks=16))
    free = section(Entry(None, "1d", chunks=2))
    given = {"stores": True, "max_blocks": 64}
    assert choose(4 << 20, sections=[free], stores=True).algorithm == "1d"
    assert choose(4 << 20, sections=[free], **given) == choose(4 << 20, **given)
    assert (
        GATHER.choose(make_facts(4 << 20, topology_of((4,)), **given), sections=[stated]).blocks
        == 16
    )
    both = section(Entry(8 << 20, "1d", chunks=2), Entry(None, "loop", blocks=16))
    assert (
        GATHER.choose(make_facts(4 << 20, topology_of((4,)), **given), sections=[both]).blocks == 16
    )
    assert choose(4 << 20, sections=[section(Entry(None, "ce"))], **given).algorithm == "ce"


# ---------------------------------------------------------------------- plans


def of(*entries: Entry) -> dict[str, Any]:
    return {"sections": (section(*entries),)}


@pytest.mark.parametrize(
    ("nbytes", "facts", "plan"),
    [
        (64, {}, Plan("ll", 1, 3072, 8)),
        (64, of(Entry(None, "ll", num_warps=32)), Plan("ll", 1, 1536, 4)),  # as many as have words
        (
            1 << 20,
            {**of(Entry(None, "ll", chunks=1)), "ll_bytes": 1 << 20},
            Plan("ll", 86, 12288, 8),
        ),
        # a table goes first
        (64, {**of(Entry(None, "ll")), "simulated": True}, Plan("ll", 1, 12288, 8)),
        (16 << 10, {}, Plan("ll", 6, 3072, 8)),
        ((16 << 10) + 1, {}, Plan("1d", 15, 1152, 8)),
        (4 << 20, {}, Plan("1d", 16, 256 << 10, 16)),
        # by stores, which these ranks have not
        ((4 << 20) + 2, {"stores": False}, choose((4 << 20) + 2)),
        ((4 << 20) + 2, {}, Plan("direct", 65, 64640, 8)),
        (64, {"in_place": True, "ll_bytes": -1}, Plan("1d", 1, 128, 4)),
        # beyond the last
        (8 << 20, {"in_place": True, "stores": False}, choose(8 << 20, in_place=True)),
        (64, {"stores": False}, Plan("1d", 1, 128, 8)),  # ranks that cannot store to each other
        (64, {"algorithm": "1d"}, Plan("1d", 1, 128, 8)),  # what is asked for goes before the table
        (1 << 20, {"algorithm": "1d"}, Plan("1d", 16, 64 << 10, 8)),  # whose chunks it gets
    ],
)
def test_what_a_table_makes_of_a_call(nbytes: int, facts: dict[str, Any], plan: Plan) -> None:
    assert (
        choose(
            nbytes,
            **{"ll_bytes": 16 << 10, "stores": True, "sections": EXAMPLE.sections[:2], **facts},
        )
        == plan
    )


def test_a_table_of_another_shape_says_nothing() -> None:
    for nodes in ((8,), (4, 4), (4, 2), (2, 2)):
        assert choose(1 << 20, nodes=nodes, sections=EXAMPLE.sections) == choose(
            1 << 20, nodes=nodes
        )


def reduced(entry: Entry, nbytes: int = 100 << 10, **facts: Any) -> Plan:
    """The plan of an all-reduce on four ranks with room for 512 KB in words, given this entry."""
    table = Table((Section(SIMULATOR, "all_reduce", 4, 1, False, (entry,)),))
    sections = REDUCE.sections(Table.parse(table.text()).sections, "t.json")
    usual: dict[str, Any] = {
        "stores": True,
        "lamport_bytes": 512 << 10,
        "ll_bytes": 340 << 10,
        "itemsize": 4,
    }
    made = make_facts(nbytes, topology_of((4,)), **{**usual, **facts})
    return replace(REDUCE.choose(made, "auto", sections), blocks=0)


def test_entries_for_words_of_two_kinds_and_for_several_epochs() -> None:
    assert reduced(Entry(None, "two_shot", chunk=64 * 16, num_warps=2)) == Plan(
        "two_shot", 25, 64 * 16, 2
    )
    # at most
    assert reduced(Entry(None, "one_shot", chunk=256 * 12, num_warps=8)) == Plan(
        "one_shot", 50, 128 * 16, 4
    )
    assert reduced(Entry(None, "one_shot", chunk=256 * 12), lamport_bytes=0) == Plan(
        "one_shot", 34, 256 * 12, 8
    )
    assert reduced(Entry(None, "direct", chunks=5)) == Plan("direct", 5, 40 * 128, 8)
    # in two epochs
    assert reduced(Entry(None, "two_shot"), nbytes=(1 << 20) + 1).algorithm == "two_shot"
    # which cannot be had
    assert reduced(Entry(None, "two_shot"), nbytes=(1 << 30) + 1).algorithm == "direct"
    # rounded
    assert reduced(Entry(None, "one_shot", chunk=640)) == reduced(
        Entry(None, "one_shot", chunk=512)
    )
    assert reduced(Entry(None, "one_shot", chunk=1 << 20)) == reduced(
        Entry(None, "one_shot", chunk=16 << 10)
    )
    assert reduced(Entry(None, "direct", chunk=4000)) == reduced(Entry(None, "direct", chunk=4096))


# ---------------------------------------------------------------------- contexts


def gathered(table: Table | None, nbytes: int = 1024, n_pes: int = 4, **world: Any) -> list[float]:
    """Puts of each rank in one call with this table, and that the result is right."""
    simulated = World(n_pes, **world)

    def host(pe: int) -> float:
        with tdcoll.CollectiveContext(max_bytes_per_rank=nbytes, tuning=table) as ctx:
            x = torch.full((nbytes,), pe, dtype=torch.uint8)
            before = simulated.counts[pe].puts
            y = tdcoll.all_gather(x, ctx=ctx)
            ctx.check()
            assert y.view(n_pes, nbytes).eq(torch.arange(n_pes)[:, None]).all()
            return simulated.counts[pe].puts - before

    return simulated.run(host)


def test_a_context_goes_by_its_table() -> None:
    assert gathered(None) == [0] * 4  # the default: stores
    assert gathered(table_of(Entry(2048, "1d", chunks=4))) == [12] * 4
    assert gathered(table_of(Entry(2048, "1d", chunk=512))) == [6] * 4
    assert gathered(table_of(Entry(512, "1d", chunks=4))) == [0] * 4
    other = Table((section(Entry(2048, "1d"), architecture="NVIDIA H200"),))
    assert gathered(other) == [0] * 4
    nodes = Table((section(Entry(2048, "1d", chunks=2), ranks_per_node=2, nodes=2),))
    # two chunks to three ranks, where 2D is the default
    assert gathered(nodes, ranks_per_node=2) == [6] * 4


def test_all_ranks_choose_alike_whatever_each_passes_as_the_result() -> None:
    """One rank's result is its input, another's is not. Also of several epochs, in debug mode, and
    when repeated."""
    entries = Entry(64, "one_shot"), Entry(None, "direct")
    table = Table((Section(SIMULATOR, "all_reduce", 3, 1, False, entries),))

    def host(pe: int) -> None:
        with tdcoll.CollectiveContext(max_bytes_per_rank=256, tuning=table, debug=True) as ctx:
            for n in (16, 400):
                for _ in range(3):
                    x = torch.arange(n, dtype=torch.float32) + pe
                    got = (
                        tdcoll.all_reduce_(x, ctx=ctx)
                        if pe == 1
                        else tdcoll.all_reduce(x, ctx=ctx, out=x if pe else None)
                    )
                    assert got.tolist() == [3.0 * i + 3 for i in range(n)]
            ctx.check()

    World(3).run(host)


def test_the_environment_names_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mine.json"
    monkeypatch.setenv("TDCOLL_TUNING", str(file))
    file.write_text(table_of(Entry(2048, "1d", chunks=4)).text())
    assert gathered(None) == [12] * 4
    assert gathered(Table(())) == [0] * 4  # an argument goes before it
    file.write_text(changed((*ENTRY, "chunks"), 0))
    with pytest.raises(
        ValueError, match=r"mine\.json: tables\[0\]\.entries\[1\]: chunks: expected 1 to 512, got 0"
    ):
        gathered(None)
    monkeypatch.setenv("TDCOLL_TUNING", "")
    assert gathered(None) == [0] * 4


def refused(make: Any) -> list[str]:
    """What each of two ranks says when they make a context."""

    def host(pe: int) -> str:
        try:
            make(pe)
        except Exception as error:
            assert tdcoll.heap_info().used == 0
            return f"{type(error).__name__}: {error}"
        return "made it"

    return World(2).run(host)


def test_ranks_with_different_tables_find_out() -> None:
    tables = [Table((section(Entry(up_to, "1d")),), f"{up_to}.json") for up_to in (64, 128)]
    for said in refused(
        lambda pe: tdcoll.CollectiveContext(max_bytes_per_rank=8, tuning=tables[pe])
    ):
        assert said.startswith(
            "RankMismatchError: CollectiveContext arguments must be the same on all ranks; they differ in tun"
        )


def test_a_rank_whose_table_cannot_be_read_tells_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load() -> Table:
        if runtime.current().rank == 1:
            raise MemoryError("t.json: no")
        return Table(())

    monkeypatch.setattr(source, "shipped", load)
    assert refused(lambda pe: tdcoll.CollectiveContext(max_bytes_per_rank=8)) == [
        "RankMismatchError: CollectiveContext: rank 1 cannot make this call: t.json: no",
        "MemoryError: t.json: no",
    ]


@pytest.mark.parametrize("kind", ["nested", "fifo", "folder", "not there"])
def test_a_file_that_is_no_table_is_a_value_error_on_all_ranks(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "t.json"
    makers = {
        "nested": lambda: path.write_text("[" * 100_000),
        "fifo": lambda: os.mkfifo(path),
        "folder": path.mkdir,
    }
    makers.get(kind, lambda: None)()
    told, found = refused(
        lambda pe: tdcoll.CollectiveContext(max_bytes_per_rank=8, tuning=path if pe == 1 else None)
    )
    problem = f"tuning: {path}: expected "
    assert told.startswith(
        f"RankMismatchError: CollectiveContext: rank 1 cannot make this call: {problem}"
    )
    assert found.startswith(f"ValueError: {problem}")


def test_gpus_of_several_kinds_go_by_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    table = table_of(Entry(2048, "1d", chunks=4))
    names = {0: ("an old GPU", SIMULATOR)}
    monkeypatch.setattr(
        source, "architectures", lambda device: names.get(runtime.current().rank, (SIMULATOR,))
    )
    assert gathered(table) == [0] * 4
    names.clear()
    assert gathered(table) == [12] * 4
