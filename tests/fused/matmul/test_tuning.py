# SPDX-License-Identifier: Apache-2.0
"""Matmuls that communicate by tuning tables: what a table may say, and the plans that follow."""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tdcoll
from tdcoll import runtime
from tdcoll.base import limits
from tdcoll.calls.collective import spec_of
from tdcoll.calls.operation import Request
from tdcoll.calls.plan import Facts
from tdcoll.calls.tuning import SIMULATOR, Entry, Section, Table
from tdcoll.fused.matmul.explanation import explain_matmul
from tdcoll.fused.matmul.op import OPERATIONS
from tdcoll.fused.matmul.operation import MatmulOptions
from tdcoll.fused.matmul.policy import (
    ALGORITHMS,
    COMPOSED,
    FUSED,
    GATHER,
    NAMES,
    ONE_SHOT,
    REDUCE,
    SCATTER,
    TWO_SHOT,
    Cut,
    MatmulShape,
    choose,
    measured_entry,
    plan_of,
)
from tdcoll.fused.matmul.prepared import PreparedMatmul
from tdcoll.runtime.topology import Topology
from tdcoll.testing import World

SMALL = {"tile": (16, 32, 64), "num_stages": 2, "num_warps": 2}


def section(name: str, *entries: Entry, world: int = 2, **more: Any) -> Section:
    where: dict[str, Any] = {"architecture": SIMULATOR, "nodes": 1, "in_place": False, **more}
    return Section(operation=name, ranks_per_node=world, entries=entries, **where)


def facts(world: int = 2, **more: Any) -> Facts:
    topology = Topology.of(0, range(world), [0] * world)
    usual = {"stores": True, "lamport_bytes": 1 << 23, "capacity": 1 << 28, "chunks": 4096}
    return Facts(0, topology, **{**usual, **more})


def shape(name: str, rows: int, entry: Entry | None = None, **more: Any) -> MatmulShape:
    return MatmulShape(name, rows, 512, 1024, 2, 2, measured=entry, **more)


# ---------------------------------------------------------------------- tables


def text_of(**changes: Any) -> str:
    """Return a table's text; entries are dictionaries."""
    one = {"architecture": SIMULATOR, "operation": GATHER, "ranks_per_node": 2, "nodes": 1}
    one |= {"in_place": False, "entries": [], **changes}
    return json.dumps({"tuning": "tdcoll", "version": 5, "tables": [one]})


def test_tables_are_read_as_they_are_written() -> None:
    entries = (
        Entry(256, COMPOSED),
        Entry(1024, FUSED, tile=(128, 256, 64), num_stages=3, num_warps=8, pushers=16),
        Entry(None, FUSED, lag=2),
    )
    table = Table((section(GATHER, *entries),))
    text = table.text()
    assert Table.parse(text).sections == table.sections
    assert '{"up_to": 256, "algorithm": "composed"}' in text, "rows are no bytes"
    assert Table.parse(text).digest == table.digest
    other = replace(entries[1], tile=(128, 128, 64))
    assert Table((section(GATHER, entries[0], other, entries[2]),)).digest != table.digest


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"in_place": True}, "in_place: expected false for all_gather_matmul, got true"),
    ({"operation": "matmul"}, "operation: expected one of all_gather, .*, matmul_all_reduce, got"),
    ({"up_to": "1 KB"}, "up_to: expected a number of rows, or null, got"),
    ({"up_to": 0}, "up_to: expected a number of bytes"),
    ({"chunks": 4}, "expected an object with up_to, algorithm and no more but tile, num_stages"),
    ({"tile": [128, 128]}, "tile: expected 3 sizes of 16, 32, 64, 128, 256, got"),
    ({"tile": [128, 100, 64]}, "tile: expected 3 sizes"),
    ({"tile": [128, 128, True]}, "tile: expected 3 sizes"),
    ({"tile": [64, 64, 64]}, "expected tile, num_stages and num_warps together, or none of them"),
    ({"num_warps": 4}, "expected tile, num_stages and num_warps together, or none of them"),
    ({"num_stages": 9}, "num_stages: expected 1 to 8, got 9"),
    ({"num_warps": 3}, "num_warps: expected one of 1, 2, 4, 8, 16, 32, got 3"),
    ({"pushers": 0}, "pushers: expected 1 to "),
    ({"lag": 3}, "lag: expected 1 to 2, got 3"),
]


@pytest.mark.parametrize(("change", "message"), WRONG, ids=str)
def test_wrong_tables(change: dict[str, Any], message: str) -> None:
    own = {key: value for key, value in change.items() if key in ("in_place", "operation")}
    entry = {"up_to": 256, "algorithm": FUSED, **{k: v for k, v in change.items() if k not in own}}
    with pytest.raises(ValueError, match=f"^a tuning table: tables.*{message}"):
        Table.parse(text_of(entries=[entry], **own))


def test_dense_collectives_have_no_tiles() -> None:
    entry = {"up_to": 256, "algorithm": "ll", "tile": [64, 64, 64]}
    with pytest.raises(ValueError, match="no more but chunks, chunk, num_warps, blocks"):
        Table.parse(text_of(operation="all_gather", entries=[entry]))


def test_the_entry_that_holds() -> None:
    few, many = Entry(256, COMPOSED), Entry(2048, FUSED)
    table = (section(GATHER, few, many), section(SCATTER, Entry(None, COMPOSED)))
    for rows, entry in ((1, few), (256, few), (257, many), (2048, many), (2049, None)):
        assert measured_entry(GATHER, rows, 2, table) is entry
    assert measured_entry(REDUCE, 1, 2, table) is None
    assert measured_entry(GATHER, 1, 3, table) is None, "other ranks"
    assert measured_entry(GATHER, 1, 2, (section(GATHER, few, nodes=2),)) is None
    with pytest.raises(
        ValueError, match=r"mine: .*expected one of fused, copied, composed, got one_shot"
    ):
        measured_entry(GATHER, 1, 2, (section(GATHER, Entry(None, ONE_SHOT)),), "mine")


# ---------------------------------------------------------------------- plans


def test_auto_is_what_the_table_says() -> None:
    own = Entry(None, FUSED, pushers=3, **SMALL)
    for rows in (64, 4096):  # of which the default takes cuBLAS, and other tiles
        plan, why = choose(shape(GATHER, rows, own), facts(), "auto", False, False)
        assert (plan.algorithm, plan.cut, plan.pushers) == (FUSED, Cut(16, 32, 64, 2, 2), 3)
        assert why == "the tuning table's entry for any number of rows"
    plan, why = choose(shape(GATHER, 4096, Entry(5000, COMPOSED)), facts(), "auto", False, False)
    assert (plan.algorithm, why) == (COMPOSED, "the tuning table's entry for up to 5000 rows")
    lagging, _ = choose(
        shape(SCATTER, 4096, Entry(None, FUSED, lag=1)), facts(), "auto", False, False
    )
    default, _ = choose(shape(SCATTER, 4096), facts(), "auto", False, False)
    assert (lagging, default.lag) == (replace(default, lag=1), 2), "the rest is the default's"


def test_a_table_that_does_not_hold_changes_nothing() -> None:
    """Its algorithm isn't supported, excluded by the call, or another one is asked for."""
    cublas = shape(GATHER, 4096, Entry(None, COMPOSED))
    two_shot = Entry(None, TWO_SHOT, **SMALL)
    small = Entry(None, FUSED, **SMALL)
    for wanted, tuned, where, asked in (
        (shape(GATHER, 4096), cublas, facts(), ("auto", True)),
        (shape(REDUCE, 1), shape(REDUCE, 1, two_shot), facts(1), ("auto", True)),
        (shape(GATHER, 4096), shape(GATHER, 4096, small), facts(max_blocks=40), ("auto", False)),
        (shape(GATHER, 4096), shape(GATHER, 4096, small), facts(capacity=64), ("auto", False)),
        (shape(REDUCE, 64), shape(REDUCE, 64, two_shot), facts(), (ONE_SHOT, False)),
        (shape(GATHER, 64), shape(GATHER, 64, small), facts(), (COMPOSED, False)),
    ):
        plan, why = choose(tuned, where, *asked, False)
        default, of_default = choose(wanted, where, *asked, False)
        assert plan == default
        if asked[0] == "auto":
            assert why.startswith("the tuning table's entry for any number of rows, ")
            assert why.endswith(of_default)


@pytest.mark.parametrize(
    ("tuned", "where", "invariant", "said"),
    [
        (
            shape(
                SCATTER, 4096, Entry(None, FUSED, tile=(256, 256, 64), num_stages=2, num_warps=8)
            ),
            facts(capacity=1 << 20),
            False,
            r"fused, needs max_bytes_per_rank=\d+ or more in the context; got 1048576 on 2 rank",
        ),
        (
            shape(GATHER, 4096, Entry(None, COMPOSED)),
            facts(),
            True,
            "composed, is excluded by batch",
        ),
    ],
    ids=["too small", "batch_invariant"],
)
def test_explanations_say_why_a_table_does_not_hold(
    tuned: MatmulShape, where: Facts, invariant: bool, said: str
) -> None:
    found = explain_matmul(tuned, where, "auto", invariant, False)
    assert found.reason == "default"
    assert re.match(f"the tuning table's entry for any number of rows, {said}", found.why)


def test_a_named_algorithm_has_the_cut_of_its_entry() -> None:
    tuned = shape(GATHER, 64, Entry(None, FUSED, **SMALL))
    plan, why = choose(tuned, facts(), FUSED, False, False)
    assert (plan.cut, why) == (Cut(16, 32, 64, 2, 2), "")
    fp8 = replace(tuned, itemsize=1)
    assert plan_of(fp8, 2, FUSED, False).cut.depth == 128, "the bits of fp8 depend on the step"


# ---------------------------------------------------------------------- calls


@pytest.mark.parametrize("name", NAMES)
def test_calls_and_explanations_follow_the_table(name: str) -> None:
    first = ALGORITHMS[name][0]
    entries = (Entry(8, first, **SMALL), Entry(16, COMPOSED), Entry(40, first))
    table = Table((section(name, *entries, world=2),), "mine")

    def host(pe: int) -> None:
        with tdcoll.CollectiveContext(
            max_bytes_per_rank=1 << 18, lamport_bytes=1 << 18, tuning=table
        ) as ctx:
            weight = torch.ones(32, 64, dtype=torch.bfloat16)
            for tall, entry in ((8, entries[0]), (16, entries[1]), (40, entries[2]), (48, None)):
                x = weight.new_ones(tall // 2 if name == GATHER else tall, 64)
                said = tdcoll.explain(name, x, weight=weight, ctx=ctx)
                before = set(ctx.cache)
                made = getattr(tdcoll.fused, name)(x, weight, ctx=ctx)
                assert (made == 64 * (1 if name == GATHER else 2)).all()
                (prepared,) = [
                    ctx.cache[key]
                    for key in set(ctx.cache) - before
                    if isinstance(ctx.cache[key], PreparedMatmul)
                ]
                if entry is None:
                    assert said.reason == "default"
                    continue
                assert (said.algorithm, said.reason) == (entry.algorithm, "table")
                assert prepared._plan.algorithm == entry.algorithm
                if entry.tile is not None:
                    assert prepared._plan.cut == Cut(16, 32, 64, 2, 2)
                    assert said.warps == 2
            ctx.check()

    World(2, heap_bytes=1 << 24).run(host)


WIDE = {"tile": (256, 256, 64), "num_stages": 2, "num_warps": 2}


def test_own_contexts_are_large_enough_for_tuned_tiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever GPU the table's section is for: ranks may have several kinds."""
    others = section(SCATTER, Entry(None, FUSED, **SMALL), architecture="NVIDIA Other")
    table = Table((others, section(SCATTER, Entry(None, FUSED, **WIDE))))
    file = tmp_path / "t.json"
    file.write_text(table.text())
    monkeypatch.setenv("TDCOLL_TUNING", str(file))
    # Its tiles need more than the 1 MiB that contexts have at least, and those of the default less.
    weight = torch.ones(9 * 256, 16, dtype=torch.bfloat16)

    def host(pe: int) -> None:
        x = weight.new_ones(8, 16)
        made = tdcoll.fused.matmul_reduce_scatter(x, weight)
        assert (made == 32).all()
        said = tdcoll.explain(SCATTER, x, weight=weight)
        assert (said.algorithm, said.reason, said.warps) == (FUSED, "table", 2)
        tdcoll.check()

    World(2, heap_bytes=1 << 24).run(host)


def test_files_with_a_wrong_algorithm_are_refused_when_they_are_read(tmp_path: Path) -> None:
    """Also in sections for other GPUs; the error has the file, the section and the entry."""
    file = tmp_path / "t.json"
    known = {**ALGORITHMS, "broadcast": ("ll", "direct", "loop", "1d")}
    for name, algorithms in known.items():
        sections = (
            section(REDUCE if name == GATHER else GATHER, Entry(None, COMPOSED)),
            section(name, Entry(8, algorithms[0]), Entry(None, "star"), architecture="Other"),
        )
        file.write_text(Table(sections).text())
        wanted = re.escape(
            f"{file}: tables[1].entries[1]: algorithm: expected one of {', '.join(algorithms)} for "
            f'{name}, got "star"'
        )
        with pytest.raises(ValueError, match=f"^{wanted}$"):
            Table.load(file)

    def host(pe: int) -> None:
        with pytest.raises(ValueError, match=wanted):
            tdcoll.CollectiveContext(tuning=str(file))

    World(2, heap_bytes=1 << 20).run(host)


def test_names_of_algorithms_are_those_of_specs_and_policies() -> None:
    found = {name: spec_of(name).names for name in limits.COLLECTIVES} | ALGORITHMS
    assert found == limits.ALGORITHMS


def test_a_table_of_a_wrong_algorithm_is_an_error_that_names_it() -> None:
    table = Table((section(GATHER, Entry(None, "ring")),), "mine")

    def host(pe: int) -> None:
        with tdcoll.CollectiveContext(max_bytes_per_rank=1 << 14, tuning=table) as ctx:
            for call in (tdcoll.fused.all_gather_matmul, tdcoll.explain):
                given = (torch.ones(2, 32),)
                more: dict[str, Any] = {"weight": torch.ones(8, 32)}
                if call is tdcoll.explain:
                    given = (GATHER, *given)  # type: ignore[assignment]
                with pytest.raises(
                    ValueError, match=r"mine: .*expected one of fused, copied, composed"
                ):
                    call(*given, **more, ctx=ctx)

    World(2, heap_bytes=1 << 22).run(host)


def test_fields_of_entries_are_those_of_files() -> None:
    """A new field of an entry has to be read and written."""
    known = {field.name for field in dataclasses.fields(Entry)} - {"up_to", "algorithm"}
    dense = {"chunks", "chunk", "num_warps", "blocks"}
    assert known == dense | {"tile", "num_stages", "num_warps", "pushers", "lag"}


@pytest.mark.parametrize("name", [GATHER, SCATTER])
def test_contexts_have_room_for_two_parts_where_one_kernel_has_none(name: str) -> None:
    """Without an entry of a table, and if the inbox of one kernel doesn't fit into the heap."""

    def host(pe: int) -> None:
        x = torch.zeros(1024, 4096 if name == GATHER else 64, dtype=torch.float16)
        weight = torch.zeros(64 if name == GATHER else 4096, x.shape[1], dtype=torch.float16)
        request = Request((x, weight), MatmulOptions())
        size = OPERATIONS[name]._size(request, runtime.current(), (0, 1))
        assert size.inbox_bytes > 1 << 16

    World(2, heap_bytes=4 << 20).run(host)
