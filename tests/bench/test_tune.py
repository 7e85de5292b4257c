# SPDX-License-Identifier: Apache-2.0
"""Tuning: what is tried, what is taken, and the table that comes out."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import tdcoll
from tdcoll.__main__ import main
from tdcoll.calls.plan import Plan
from tdcoll.calls.tuning import SIMULATOR, Table
from tdcoll.runtime.topology import Topology
from tdcoll.testing import World
from tdcoll.tools.bench import rows as files
from tdcoll.tools.bench import tune
from tdcoll.tools.bench.choosing import Candidate, Choice
from tdcoll.tools.bench.rows import Row
from tdcoll.tools.bench.specs import SPECS
from tdcoll.tools.bench.tune import Tune

FOUR = Topology.of(0, range(4), [0] * 4)
LL, PUTS = Candidate("ll"), Candidate("1d")
SMALL, WIDE = Candidate("ll", chunk=1536), Candidate("1d", chunks=32, num_warps=8)
GATHER, SCATTER, REDUCE = (Choice(SPECS[name], FOUR) for name in ("all_gather", "reduce_scatter", "all_reduce"))


FEW = "loop", "ce"
"""Algorithms that leave most of the GPU to others."""


def test_what_is_tried() -> None:
    found = GATHER.candidates(4096, chunks=(1, 4, 8), warps=(4, 8))
    assert [c.name for c in found] == [
        *("ll", "ll 3 KB chunks 4 warps", "ll 3 KB chunks 8 warps"),  # 1.5 KB with 4 is the rules'
        *("ll 6 KB chunks 4 warps", "ll 6 KB chunks 8 warps"),
        *("direct", "direct 1 chunks 4 warps", "direct 4 chunks 4 warps", "direct 4 chunks 8 warps"),
        *("loop", "ce"),
        *("ring", "ring 1 chunks 4 warps", "ring 4 chunks 4 warps", "ring 4 chunks 8 warps"),
        *("1d", "1d 1 chunks 4 warps", "1d 4 chunks 4 warps", "1d 4 chunks 8 warps"),  # 1 with 8 is the rules'
    ]
    plans = [GATHER.plan(c, 4096) for c in found]
    assert len(set(plans)) == len(plans)
    found = SCATTER.candidates(4096, names=("ring", "ll", "direct", "2d"), chunks=(4,), warps=(4,))
    words = [f"ll {n} KB chunks 4 warps" for n in (2, 4)]  # 128 and 256 words of 16 bytes
    assert [c.name for c in found] == ["ll", *words, "direct", "direct 4 chunks 4 warps"]


def test_what_cannot_be_had_is_not_tried() -> None:
    def algorithms(nbytes: int, *nodes: int, **options: Any) -> set[str]:
        choice = Choice(SPECS["all_gather"], Topology.of(0, range(len(nodes)), nodes))
        return {c.algorithm for c in choice.candidates(nbytes, **options)}

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
            assert REDUCE.requested(c, nbytes) == ("two_shot" if by_name else REDUCE.plan(c, nbytes))


def picked(times: dict[int, dict[Candidate, float]], margin: float = 0.03) -> list[Candidate]:
    """The rules take LL up to 64 KB, direct stores above."""
    picks = dataclasses.replace(GATHER, margin=margin).picked(times)
    assert [nbytes for nbytes, _ in picks] == list(times)
    return [candidate for _, candidate in picks]


def test_the_fastest_is_taken_and_noise_changes_nothing() -> None:
    """Within the margin the rules' own stays, and then what the size before has."""
    clear = {1024: {LL: 3.0, PUTS: 5.0}, 8192: {WIDE: 6.0, PUTS: 9.0}, 1 << 20: {PUTS: 5.0, WIDE: 6.0}}
    assert picked(clear) == [LL, WIDE, PUTS]
    times = {
        1024: {LL: 3.05, SMALL: 3.0},
        4096: {LL: 3.6, SMALL: 3.5, WIDE: 3.55},
        8192: {WIDE: 5.0, PUTS: 6.0},
        16384: {WIDE: 7.2, PUTS: 7.0},
        65536: {WIDE: 9.1, LL: 9.0},
        1 << 20: {WIDE: 30.0, PUTS: 29.0},
    }
    assert picked(times) == [LL, LL, WIDE, WIDE, WIDE, PUTS]
    # Without a margin each size has its own.
    assert picked(times, 0.0) == [SMALL, SMALL, WIDE, PUTS, LL, PUTS]


def row(nbytes: int, candidate: Candidate, us: float | None, check: str = "ok") -> Row:
    facts = {"bytes_per_rank": nbytes, "operation": "all_gather", "candidate": dataclasses.asdict(candidate)}
    kind: dict[str, Any] = {"algorithm": candidate.name, "peer": False, "launch": "graph", "check": check}
    return Row(ranks=4, nodes=1, median_us=us, facts=facts, **kind)


def test_sections_of_a_table() -> None:
    inside = Candidate("1d", in_place=True, chunks=8, num_warps=4)
    rows = [
        *(row(65536, WIDE, 7.0), row(65536, PUTS, 9.0), row(65536, inside, 5.0)),
        *(row(1024, LL, 3.0), row(1024, PUTS, 5.0), row(4096, LL, 3.5), row(4096, PUTS, 5.0)),
        *(row(16384, WIDE, 2.0, check="WRONG"), row(16384, PUTS, 6.0), row(16384, LL, None, check="not run")),
    ]
    made = GATHER.sections(rows, "NVIDIA Test", "a test")
    said = {s.in_place: [(e.up_to, e.algorithm, e.chunks, e.chunk, e.num_warps) for e in s.entries] for s in made}
    assert said == {
        False: [(4096, "ll", None, None, None), (16384, "1d", None, None, None), (65536, "1d", 32, None, 8)],
        True: [(65536, "1d", 8, None, 4)],
    }
    assert Table.parse(Table(tuple(made)).text()).sections == tuple(made)
    assert {(s.architecture, s.ranks_per_node, s.nodes, s.source) for s in made} == {("NVIDIA Test", 4, 1, "a test")}


def test_what_is_said_of_a_size() -> None:
    kept = Candidate("1d", chunks=4)
    rows = [row(1024, kept, 4.0), row(1024, LL, 6.0), row(4096, kept, 5.1), row(4096, LL, 5.0)]
    rows += [row(4096, Candidate("direct"), 10.2), row(4096, WIDE, 2.0, check="WRONG")]
    assert GATHER.verdict(4096, rows) == "1d 4 chunks 5.10 µs (ll -2%, direct +100%); WRONG: 1d 32 chunks 8 warps"
    assert GATHER.verdict(16384, rows) == "nothing was right"


def test_the_simulator_refuses_and_nodes_of_two_sizes_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "-o", str(tmp_path / "t.json")]) == 2
    assert "the simulator has no times" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="tables are for nodes of one size; this job has 3"):
        tune.listing(Tune.parse(["--dry-run"]), Topology.of(0, range(3), [0, 0, 1]))


def test_the_listing() -> None:
    arguments = "--dry-run -b 1K -e 512K -f 512 --chunks 1,4 --warps 4 --algorithms ll,1d --in-place"
    head, *lines = tune.listing(Tune.parse([*arguments.split(), "--operation", "all_gather"]), FOUR).splitlines()
    assert head == "tune, 4 rank(s) on 1 node(s) (4): 12 measurements of 40 iterations"
    small, large = ["ll", "1d", "1d 1 chunks 4 warps"], ["1d", "1d 1 chunks 4 warps", "1d 4 chunks 4 warps"]
    assert lines == [
        f"all_gather, {size} per rank: {', '.join([*names, *(f'in-place {name}' for name in names)])}"
        for size, names in (("1 KB", small), ("512 KB", large))
    ]


def test_sizes_and_operations_without_candidates_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--dry-run", "-b1K", "-e512K", "-f512", "--chunks", "1", "--warps", "4", "--algorithms"]
    operations = ["--operation", "all_gather,all_to_all"]
    listed = tune.listing(Tune.parse([*arguments, "ring", *operations]), FOUR).splitlines()[1:]
    assert [line.partition(" per rank")[0] for line in listed] == ["all_gather, 1 KB", "all_gather, 512 KB"]
    listed = tune.listing(Tune.parse([*arguments, "ll", "--operation", "all_gather"]), FOUR).splitlines()[1:]
    assert [line.partition(" per rank")[0] for line in listed] == ["all_gather, 1 KB"]
    with pytest.raises(SystemExit, match="2"):
        tune.listing(Tune.parse([*arguments, "2d", *operations]), FOUR)
    said = "--algorithms: expected one that all_gather or all_to_all has for these sizes on 4 rank(s) on 1 node(s) (4)"
    assert f"{said}, got 2d\n" in capsys.readouterr().err


@pytest.mark.slow
def test_measuring_writes_a_table(clock: Any, measured: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """With calls of which the test says how long they take: the fastest get into the table, and the rest stays."""
    called, took, quick = set(), {"ll": 3.0, "1d": 5.0}, Plan("1d", 4, 1024, 4)

    def timed(function: Callable[..., Any], *arguments: Any, algorithm: Plan, **named: Any) -> Any:
        plan = algorithm
        called.add(function.__name__)
        clock.passes(2.5 if replace(plan, blocks=0) == quick else took[plan.algorithm])
        return function(*arguments, algorithm=plan, **named)

    for name in ("all_gather", "all_gather_", "reduce_scatter", "all_reduce", "all_reduce_", "all_to_all"):
        monkeypatch.setattr(tdcoll, name, partial(timed, getattr(tdcoll, name)))
    file = tmp_path / "t.json"
    kept = Table.parse(
        '{"tuning": "tdcoll", "version": 5, "tables": [{"architecture": "NVIDIA Test", "operation": "all_gather", '
        '"ranks_per_node": 2, "nodes": 1, "in_place": false, "entries": [{"up_to": 64, "algorithm": "1d"}]}]}'
    )
    file.write_text(kept.text())
    arguments = "-b 1K -e 4K --chunks 4 --warps 4 --algorithms ll,1d --in-place --iterations 2 --warmup 1"
    rows = measured(Tune, f"{arguments} -o {file}")
    assert {(row.check, row.launch, row.peer) for row in rows} == {("ok", "graph", False)}
    assert called == {"all_gather", "all_gather_", "reduce_scatter", "all_reduce", "all_to_all"}
    # Of three operations and two sizes; all-reduce has no such algorithm.
    assert [row.median_us for row in rows if row.algorithm == "ll"] == [pytest.approx(3.0)] * 6
    kinds = {tuple(row.facts[name] for name in ("operation", "dtype", "op")) for row in rows}
    reductions = {(name, "bfloat16", "sum") for name in ("all_reduce", "reduce_scatter")}
    assert kinds == {("all_gather", "uint8", None), ("all_to_all", "uint8", None), *reductions}
    table = Table.load(file)
    assert table.sections[0] == kept.sections[0]
    found = [(1024, "ll", None, None), (4096, "1d", 4, 4)]
    entries = {(s.operation, s.in_place): s.entries for s in table.sections[1:]}
    assert {kind: [(e.up_to, e.algorithm, e.chunks, e.num_warps) for e in its] for kind, its in entries.items()} == {
        **dict.fromkeys([("all_gather", False), ("all_gather", True), ("reduce_scatter", False)], found),
        ("all_to_all", False): found,
        ("all_reduce", False): [(4096, "1d", None, None)],
    }
    assert {s.architecture for s in table.sections[1:]} == {SIMULATOR}
    assert table.sections[1].source.endswith(f"tune --iterations 4 --warmup 1 {arguments}")


SIZES = "-b 1K -e 64K -f 4 --chunks 1,4 --warps 4 --algorithms ll,direct,1d --operation all_gather"
TUNED = [(4096, "ll"), (65536, "direct")]


def said_of(file: Path) -> list[tuple[int | None, str]]:
    """Sizes and algorithms of the table's only section."""
    (section,) = Table.load(file).sections
    return [(entry.up_to, entry.algorithm) for entry in section.entries]


US = {"ll": 3.0, "direct": 5.0, "1d": 7.0}


@pytest.fixture
def tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[tuple[str, int]]]:
    """``tuned("options", until)``: what `tune` measures of made-up times, interrupted when it comes to ``until``.

    LL is the fastest up to 4 KB, direct stores above.
    """

    def run(options: str = SIZES, until: tuple[str, int] | None = None, name: str = "t") -> list[tuple[str, int]]:
        measured: list[tuple[str, int]] = []

        def measure_size(bench: Tune, size: Any, *_: object) -> list[Row]:
            operation, _, nbytes = size
            if bench.owner.rank == 0:
                if (operation.name, nbytes) == until:
                    raise KeyboardInterrupt
                measured.append((operation.name, nbytes))
            rows = []
            with bench.wanted(size) as (every, _):
                for one in every:
                    candidate = Candidate(**one.facts["candidate"])
                    us = US[candidate.algorithm] * (3 if candidate.algorithm == "ll" and nbytes > 4096 else 1)
                    us *= 1 if candidate.chunks is candidate.chunk is None else 1.5
                    kind: dict[str, Any] = {"algorithm": one.name, "peer": False, "launch": "graph", "check": "ok"}
                    rows.append(Row(ranks=2, nodes=1, median_us=us, facts={**bench.facts(size), **one.facts}, **kind))
            return rows

        monkeypatch.setattr(Tune, "measure_size", measure_size)
        given = Tune.parse([*options.split(), "-o", str(tmp_path / f"{name}.json")])
        with pytest.raises(KeyboardInterrupt) if until else contextlib.nullcontext():
            rows, _ = World(2).run(lambda pe: Tune(given).measure(lambda rows: None))
            assert {row.facts["bytes_per_rank"] for row in rows} == {1024, 4096, 16384, 65536}
        return measured

    return run


def of(*sizes: int, name: str = "all_gather") -> list[tuple[str, int]]:
    return [(name, size) for size in sizes]


def test_a_run_that_was_cut_off_goes_on_where_it_was(tmp_path: Path, tuned: Any, capsys: Any) -> None:
    file = tmp_path / "t.json"
    assert tuned(until=("all_gather", 16384)) == of(1024, 4096)
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("tune: all_gather, 1 KB per rank: ll 3.00 µs (direct +67%, 1d +133%) [1 of 4 sizes, 0:")
    assert re.search(r"4 KB per rank: ll 3.00 µs \(.*\[2 of 4 sizes, 0:00:0\d, about 0:00:\d\d left\]$", second)
    assert said_of(file) == [(4096, "ll")]
    part = tune.part_of(file)
    assert {row.facts["bytes_per_rank"] for row in files.load(part)[1]} == {1024, 4096}

    assert tuned() == of(16384, 65536), "what was measured is not measured again"
    said = capsys.readouterr().out
    assert f"tune: goes on after all_gather 1 KB, all_gather 4 KB per rank, which are in {part}" in said
    last = "64 KB per rank: direct 5.00 µs (1d +40%, ll +80%) [4 of 4 sizes, 0:00:00]"
    assert f"tune: all_gather, {last}" in said
    assert tuned(name="whole") == of(1024, 4096, 16384, 65536)
    assert Table.load(file).digest == Table.load(tmp_path / "whole.json").digest
    assert said_of(file) == TUNED
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.json", "whole.json"]


@pytest.mark.parametrize("changed", ["--iterations 8", "--in-place", "tdcoll"])
def test_other_circumstances_are_measured_anew(changed: str, tmp_path: Path, tuned: Any, monkeypatch: Any, capsys: Any):
    part = tune.part_of(tmp_path / "t.json")
    assert tuned(until=("all_gather", 16384)) == of(1024, 4096)
    differs = {"--iterations 8": "iterations: 40 then, 8 now", "--in-place": "in_place: False then, True now"}
    if changed == "tdcoll":
        differs[changed], options = f"tdcoll: {tdcoll.__version__} then, 9.9 now", ""
        monkeypatch.setattr(tdcoll, "__version__", "9.9")
    else:
        options = changed
    assert tuned(f"{SIZES} {options}", until=("all_gather", 4096)) == of(1024), "all are measured again"
    said = f"tune: {part} is of other circumstances ({differs[changed]}): all sizes are measured again"
    assert said in capsys.readouterr().out
    assert {row.facts["bytes_per_rank"] for row in files.load(part)[1]} == {1024}


def test_an_earlier_table_holds_for_sizes_that_are_not_measured_yet(tmp_path: Path, tuned: Callable[..., Any]) -> None:
    file = tmp_path / "t.json"
    tuned()
    (section,) = Table.load(file).sections
    first, last = (dataclasses.replace(section.entries[0], up_to=n, algorithm="1d", chunks=4) for n in (2048, 1 << 20))
    older = dataclasses.replace(section, entries=(first, *section.entries, last))
    file.write_text(Table((older,)).text())
    tuned(until=("all_gather", 4096))
    assert said_of(file) == [(1024, "ll"), (2048, "1d"), *TUNED, (1 << 20, "1d")]
    tuned()
    assert said_of(file) == TUNED


def test_a_run_of_several_operations_goes_on_in_the_one_that_was_cut_off(tmp_path: Path, tuned: Any) -> None:
    file, options = tmp_path / "t.json", f"{SIZES},reduce_scatter --in-place"
    found = tuned(options, until=("reduce_scatter", 4096))
    assert found == of(1024, 4096, 16384, 65536) + of(1024, name="reduce_scatter")
    assert tune.part_of(file).exists()
    assert tuned(options) == of(4096, 16384, 65536, name="reduce_scatter")
    said = {(s.operation, s.in_place): [(e.up_to, e.algorithm) for e in s.entries] for s in Table.load(file).sections}
    assert said == {("all_gather", False): TUNED, ("all_gather", True): TUNED, ("reduce_scatter", False): TUNED}
    assert not tune.part_of(file).exists()


def test_a_file_is_written_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files.write_whole(file := tmp_path / "t.json", "before")
    monkeypatch.setattr(os, "replace", lambda *_: sys.exit("cut off"))
    with pytest.raises(SystemExit, match="cut off"):
        files.write_whole(file, "after")
    assert file.read_text() == "before"


def test_a_file_of_rows_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t.json.part").write_text("{}")
    with pytest.raises(SystemExit, match="2"):
        Tune.parse(["-o", str(tmp_path / "t.json")])
    assert "t.json.part is not a result of tdcoll.tools.bench" in capsys.readouterr().err
