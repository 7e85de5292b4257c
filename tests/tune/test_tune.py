# SPDX-License-Identifier: Apache-2.0
"""Tuning: what is tried, what is taken, and the table that comes out."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tdcoll.calls.tuning import Table
from tdcoll.runtime.topology import Topology
from tdcoll.testing import World
from tdcoll.tools.measure.collectives import DENSE_CALLS
from tdcoll.tools.measure.results import Row, write_whole
from tdcoll.tools.tune import tuner
from tdcoll.tools.tune.command import Tune
from tdcoll.tools.tune.tuner import Candidate, Tuner

FOUR = Topology.of(0, range(4), [0] * 4)
GATHER = Tuner(DENSE_CALLS["all_gather"], FOUR)
SCATTER = Tuner(DENSE_CALLS["reduce_scatter"], FOUR)
REDUCE = Tuner(DENSE_CALLS["all_reduce"], FOUR)
LL = Candidate("ll")
PUTS = Candidate("1d")
SMALL = Candidate("ll", chunk=1536)
WIDE = Candidate("1d", chunks=32, num_warps=8)


FEW = ("loop", "ce")
"""Algorithms that leave most of the GPU to others."""


def test_what_is_tried() -> None:
    found = dataclasses.replace(GATHER, chunks=(1, 4, 8), warps=(4, 8)).candidates(4096)
    assert [c.name for c in found] == [
        *("ll", "ll 3 KB chunks 4 warps", "ll 3 KB chunks 8 warps"),  # 1.5 KB with 4 is the rules'
        *("ll 6 KB chunks 4 warps", "ll 6 KB chunks 8 warps"),
        *(
            "direct",
            "direct 1 chunks 4 warps",
            "direct 4 chunks 4 warps",
            "direct 4 chunks 8 warps",
        ),
        *("loop", "ce"),
        *("ring", "ring 1 chunks 4 warps", "ring 4 chunks 4 warps", "ring 4 chunks 8 warps"),
        *(
            "1d",
            "1d 1 chunks 4 warps",
            "1d 4 chunks 4 warps",
            "1d 4 chunks 8 warps",
        ),  # 1 with 8 is the rules'
    ]
    plans = [GATHER.plan(c, 4096) for c in found]
    assert len(set(plans)) == len(plans)
    names = ("ring", "ll", "direct", "2d")
    found = dataclasses.replace(SCATTER, names=names, chunks=(4,), warps=(4,)).candidates(4096)
    words = [f"ll {n} KB chunks 4 warps" for n in (2, 4)]  # 128 and 256 words of 16 bytes
    assert [c.name for c in found] == ["ll", *words, "direct", "direct 4 chunks 4 warps"]


def test_what_cannot_be_had_is_not_tried() -> None:
    def algorithms(nbytes: int, *nodes: int, in_place: bool = False) -> set[str]:
        topology = Topology.of(0, range(len(nodes)), nodes)
        candidates = Tuner(DENSE_CALLS["all_gather"], topology, in_place).candidates(nbytes)
        return {candidate.algorithm for candidate in candidates if candidate.in_place == in_place}

    assert algorithms(1 << 20, 0, 0, 0, 0) == {"direct", "ring", "1d", *FEW}
    assert algorithms(64, 0, 0, 0, 0) == algorithms(64, 0, 0, 0, 0, in_place=True) == {
        *("ll", "direct", "ring", "1d"), *FEW,
    }  # fmt: skip
    assert algorithms(64, 0, 0, 0) == {"ll", "direct", "ring", "1d", *FEW}
    assert algorithms(64, 0, 0) == {"ll", "direct", "1d", *FEW}
    assert algorithms(64, 0, 0, 1, 1) == {"1d", "2d"}
    assert algorithms(1 << 20, 0, 0, 1, 1) == {"1d", "2d"}


def test_calls_of_several_epochs_are_tried_by_name() -> None:
    """Such calls take no plan."""
    named = Candidate("two_shot")
    for nbytes, several in ((16 << 20, False), ((16 << 20) + 16, True), (64 << 20, True)):
        found = REDUCE.candidates(nbytes)
        assert {c.algorithm for c in found} == {"two_shot", "direct", "1d", *FEW}
        assert ([c for c in found if c.algorithm == "two_shot"] == [named]) == several
        for c in found:
            by_name = several and c == named
            assert REDUCE.algorithm(c, nbytes) == (
                "two_shot" if by_name else REDUCE.plan(c, nbytes)
            )


def picks_of(times: dict[int, dict[Candidate, float]]) -> list[Candidate]:
    """Return the candidates that are picked. The rules take LL up to 64 KB, direct stores above."""
    picks = GATHER.picks(times)
    assert [nbytes for nbytes, _ in picks] == list(times)
    return [candidate for _, candidate in picks]


def test_the_fastest_is_taken_and_noise_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the margin the rules' own stays, and then what the size before has."""
    clear = {
        1024: {LL: 3.0, PUTS: 5.0},
        8192: {WIDE: 6.0, PUTS: 9.0},
        1 << 20: {PUTS: 5.0, WIDE: 6.0},
    }
    assert picks_of(clear) == [LL, WIDE, PUTS]
    times = {
        1024: {LL: 3.05, SMALL: 3.0},
        4096: {LL: 3.6, SMALL: 3.5, WIDE: 3.55},
        8192: {WIDE: 5.0, PUTS: 6.0},
        16384: {WIDE: 7.2, PUTS: 7.0},
        65536: {WIDE: 9.1, LL: 9.0},
        1 << 20: {WIDE: 30.0, PUTS: 29.0},
    }
    assert picks_of(times) == [LL, LL, WIDE, WIDE, WIDE, PUTS]
    # Without a margin each size has its own.
    monkeypatch.setattr(tuner, "MARGIN", 0.0)
    assert picks_of(times) == [SMALL, SMALL, WIDE, PUTS, LL, PUTS]


def row(nbytes: int, candidate: Candidate, us: float | None, check: str = "ok") -> Row:
    facts = {
        "bytes_per_rank": nbytes,
        "operation": "all_gather",
        "candidate": dataclasses.asdict(candidate),
    }
    kind: dict[str, Any] = {
        "algorithm": candidate.name,
        "peer": False,
        "launch": "graph",
        "check": check,
    }
    return Row(ranks=4, nodes=1, median_us=us, facts=facts, **kind)


def test_sections_of_a_table() -> None:
    inside = Candidate("1d", in_place=True, chunks=8, num_warps=4)
    rows = [
        *(row(65536, WIDE, 7.0), row(65536, PUTS, 9.0), row(65536, inside, 5.0)),
        *(row(1024, LL, 3.0), row(1024, PUTS, 5.0), row(4096, LL, 3.5), row(4096, PUTS, 5.0)),
        *(
            row(16384, WIDE, 2.0, check="WRONG"),
            row(16384, PUTS, 6.0),
            row(16384, LL, None, check="not run"),
        ),
    ]
    made = GATHER.sections(rows, "NVIDIA Test", "a test")
    said = {
        s.in_place: [(e.up_to, e.algorithm, e.chunks, e.chunk, e.num_warps) for e in s.entries]
        for s in made
    }
    assert said == {
        False: [
            (4096, "ll", None, None, None),
            (16384, "1d", None, None, None),
            (65536, "1d", 32, None, 8),
        ],
        True: [(65536, "1d", 8, None, 4)],
    }
    assert Table.parse(Table(tuple(made)).text()).sections == tuple(made)
    assert {(s.architecture, s.ranks_per_node, s.nodes, s.source) for s in made} == {
        ("NVIDIA Test", 4, 1, "a test")
    }


def test_nodes_of_two_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="tables are for nodes of one size; this job has 3"):
        World(3, ranks_per_node=2).run(lambda pe: Tune(Tune.parse(["-o", "t.json"])))


def test_the_simulator_checks_and_writes_nothing(
    rows_of: Callable[..., list[Any]], tmp_path: Path
) -> None:
    arguments = (
        f"-b 1K -e 1K --chunks 1,4 --warps 4 --algorithms ll,1d --in-place -o {tmp_path / 't.json'}"
    )
    rows = rows_of(Tune, f"{arguments} --operation all_gather,all_to_all", 2, heap_bytes=1 << 24)
    small = ["ll", "1d", "1d 1 chunks 4 warps"]
    assert [
        (row.facts["operation"], row.facts["bytes_per_rank"], row.algorithm) for row in rows
    ] == [
        *(("all_gather", 1024, name) for name in [*small, *(f"in-place {name}" for name in small)]),
        *(("all_to_all", 1024, name) for name in small),
    ]
    assert {row.check for row in rows} == {"ok"}
    assert list(tmp_path.iterdir()) == []


SIZES = "-b 1K -e 64K -f 4 --chunks 1,4 --warps 4 --algorithms ll,direct,1d --operation all_gather,reduce_scatter"
US = {"ll": 3.0, "direct": 5.0, "1d": 7.0}


def made_up_us(candidate: Candidate, nbytes: int) -> float:
    """Return a time: LL's is the shortest up to 4 KB, then that of direct stores; defaults are
    faster."""
    us = US[candidate.algorithm]
    if candidate.algorithm == "ll" and nbytes > 4096:
        us *= 3
    if candidate.chunks is not None or candidate.chunk is not None:
        us *= 1.5
    return us


Entries = dict[tuple[str, bool], list[tuple[int | None, str]]]
"""Sizes and algorithms of a table's entries, by operation and whether in place."""


def entries_of(file: Path) -> Entries:
    if not file.exists():
        return {}
    return {
        (section.operation, section.in_place): [(e.up_to, e.algorithm) for e in section.entries]
        for section in Table.load(file).sections
    }


@pytest.mark.parametrize("in_place", [False, True])
def test_the_table_is_written_after_every_size(
    tmp_path: Path, in_place: bool, on_gpus: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "t.json"
    written: list[Entries] = []

    def measure_size(bench: Tune, size: Any, *_: object) -> list[Row]:
        nbytes = size[-1]
        if bench.ranks.owner.rank == 0:
            written.append(entries_of(file))
        rows = []
        with bench.variants(size) as (variants, _):
            for variant in variants:
                found = bench._row(size, variant, "graph", None)
                found.median_us = made_up_us(Candidate(**variant.facts["candidate"]), nbytes)
                rows.append(found)
        return rows

    monkeypatch.setattr(Tune, "measure_size", measure_size)
    arguments = [*SIZES.split(), "-o", str(file)]
    gathers = [("all_gather", False)]
    if in_place:
        arguments.append("--in-place")
        gathers.append(("all_gather", True))
    options = Tune.parse(arguments)
    small: Entries = {kind: [(4096, "ll")] for kind in gathers}
    all_sizes: Entries = {kind: [(4096, "ll"), (65536, "direct")] for kind in gathers}
    for _ in range(2):  # the second time the sections are there already
        written.clear()
        on_gpus(lambda pe: Tune(options).measure(lambda rows: None), 2)
        others = {kind: found for kind, found in written[0].items() if kind not in gathers}
        assert written[2] == small | others
        assert written[4] == all_sizes | others
        assert written[5] == all_sizes | {("reduce_scatter", False): [(1024, "ll")]}


def test_a_file_is_written_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "t.json"
    write_whole(file, "before")
    monkeypatch.setattr(os, "replace", lambda *_: sys.exit("cut off"))
    with pytest.raises(SystemExit, match="cut off"):
        write_whole(file, "after")
    assert file.read_text() == "before"
