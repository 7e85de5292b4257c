# SPDX-License-Identifier: Apache-2.0
"""Tuning: what is tried, what is taken, and the table that comes out."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import killed_tune
import pytest

import tdcoll
from tdcoll.__main__ import main
from tdcoll.bench import all_gather, all_reduce, reduce_scatter, tune
from tdcoll.bench import rows as files
from tdcoll.bench.arithmetic import Summary
from tdcoll.bench.case import Case
from tdcoll.bench.choosing import Candidate, Choice, pick
from tdcoll.bench.rows import Row
from tdcoll.bench.table import duration
from tdcoll.bench.tune import Tune
from tdcoll.collectives._host.plan import Plan
from tdcoll.collectives.all_gather.policy import POLICY
from tdcoll.collectives.all_reduce.policy import POLICY as ALL_REDUCE
from tdcoll.collectives.reduce_scatter.policy import POLICY as REDUCE
from tdcoll.runtime.topology import Topology
from tdcoll.tuning import SIMULATOR, Table

FOUR = Topology.of(0, range(4), [0] * 4)
TWO_BY_TWO = Topology.of(0, range(4), [0, 0, 1, 1])

LL, PUTS, NCCL = Candidate("ll"), Candidate("1d"), Candidate("nccl")
WIDE = Candidate("1d", channels=32, num_warps=8)
OF_FOUR = Choice(POLICY, FOUR)


# ---------------------------------------------------------------------- what is tried


def test_what_is_tried() -> None:
    found = OF_FOUR.candidates(4096, ll_bytes=4096, channels=(1, 4, 8), warps=(4, 8))
    assert [c.name for c in found] == [
        *("ll", "ll 3 KB chunks 4 warps", "ll 3 KB chunks 8 warps"),  # 1.5 KB with 4 is the rules'
        *("ll 6 KB chunks 4 warps", "ll 6 KB chunks 8 warps"),
        *("direct", "direct 1 chunks 4 warps", "direct 4 chunks 4 warps", "direct 4 chunks 8 warps"),
        *("ring", "ring 1 chunks 4 warps", "ring 4 chunks 4 warps", "ring 4 chunks 8 warps"),
        *("1d", "1d 1 chunks 4 warps", "1d 4 chunks 4 warps", "1d 4 chunks 8 warps"),  # 1 with 8 is the rules'
    ]
    plans = [OF_FOUR.plan(c, 4096, 4096) for c in found]
    assert len(set(plans)) == len(plans)
    assert [Candidate.named(c.name) for c in found] == found
    more = (NCCL, WIDE, Candidate("ll", True, chunk=1536, num_warps=4), Candidate("2d", True, channels=4))
    assert all(Candidate.named(c.name) == c for c in more)


def test_what_cannot_be_had_is_not_tried() -> None:
    def algorithms(nbytes: int, topology: Topology, **options: Any) -> set[str]:
        return {c.algorithm for c in Choice(POLICY, topology).candidates(nbytes, **options)}

    assert algorithms(1 << 20, FOUR, ll_bytes=16 << 10) == {"direct", "ring", "1d"}
    assert algorithms(64, FOUR, ll_bytes=64) == {"ll", "direct", "ring", "1d"}
    assert algorithms(64, FOUR, ll_bytes=64, in_place=True) == {"ll", "direct", "ring", "1d"}
    assert algorithms(64, Topology.of(0, range(3), [0] * 3), ll_bytes=64) == {"ll", "direct", "ring", "1d"}
    assert algorithms(64, Topology.of(0, range(2), [0] * 2), ll_bytes=64) == {"ll", "direct", "1d"}
    assert algorithms(64, FOUR, ll_bytes=-1) == {"1d"}
    assert algorithms(64, TWO_BY_TWO, ll_bytes=-1) == {"1d", "2d"}
    assert algorithms(64, Topology.of(0, range(3), [0, 0, 1]), ll_bytes=-1) == {"1d"}


def test_what_is_tried_is_the_operations_own() -> None:
    choice = Choice(REDUCE, FOUR, itemsize=2, hand_over=False)
    found = choice.candidates(4096, ll_bytes=4096, algorithms=("ring", "ll", "direct", "2d"), channels=(4,), warps=(4,))
    assert [c.name for c in found] == [
        "ll",
        *(f"ll {n} KB chunks 4 warps" for n in (2, 4, 6)),  # 128, 256 and 512 words with flags, by words of 16 or 12
        "direct",
        "direct 4 chunks 4 warps",
    ]
    wide = dataclasses.replace(choice, itemsize=8)
    assert {c.algorithm for c in wide.candidates(4096, ll_bytes=4096)} == {"direct", "1d"}  # no words of 8 bytes


def test_calls_of_several_epochs_are_tried_by_name() -> None:
    """Such calls take no plan."""
    choice, named, room = Choice(ALL_REDUCE, FOUR, itemsize=2, hand_over=False), Candidate("two_shot"), 8 << 20
    for nbytes, several in ((16 << 20, False), ((16 << 20) + 16, True), (64 << 20, True)):
        found = choice.candidates(nbytes, 16 << 10, lamport_bytes=room)
        assert {c.algorithm for c in found} == {"two_shot", "direct", "1d"}
        assert ([c for c in found if c.algorithm == "two_shot"] == [named]) == several
        for c in found:
            wish = choice.wish(c, nbytes, 16 << 10, room)
            assert wish == ("two_shot" if several and c == named else choice.plan(c, nbytes, 16 << 10, room))


def test_nccl_is_taken_only_where_calls_can_be_left_to_it() -> None:
    times = {1024: {PUTS: 5.0, NCCL: 3.0}, 4096: {PUTS: 5.0, NCCL: 3.0}}
    assert OF_FOUR.picked(times, False) == [(1024, NCCL), (4096, NCCL)]
    choice = Choice(REDUCE, FOUR, itemsize=2, hand_over=False)
    assert choice.picked(times, False) == [(1024, PUTS), (4096, PUTS)]
    rows = [row(n, c, us) for n, found in times.items() for c, us in found.items()]
    (section,) = choice.sections(rows, "NVIDIA Test", "a test")
    assert (section.operation, [(e.up_to, e.algorithm) for e in section.entries]) == ("reduce_scatter", [(4096, "1d")])
    assert choice.verdict(4096, rows) == "1d 5.00 µs (nccl -40%)"


# ---------------------------------------------------------------------- what is taken


def usual(nbytes: int) -> str:
    return "ll" if nbytes <= 4096 else "1d"


def test_the_fastest_is_taken_where_it_is_clear() -> None:
    times = [
        (1024, {LL: 3.0, PUTS: 5.0, NCCL: 9.0}),
        (8192, {WIDE: 6.0, PUTS: 9.0, NCCL: 9.0}),
        (1 << 20, {NCCL: 5.0, WIDE: 6.0}),
    ]
    assert pick(times, usual, 0.03) == [(1024, LL), (8192, WIDE), (1 << 20, NCCL)]


def test_noise_changes_nothing() -> None:
    """Within the margin the rules' own stays, and then what the size before has."""
    times = [
        (1024, {LL: 3.05, Candidate("ll", chunk=1536): 3.0}),
        (4096, {LL: 3.6, Candidate("ll", chunk=1536): 3.5, WIDE: 3.55}),
        (8192, {WIDE: 5.0, PUTS: 6.0}),
        (16384, {WIDE: 7.2, PUTS: 7.0}),
        (65536, {WIDE: 9.1, NCCL: 9.0}),
        (1 << 20, {WIDE: 30.0, NCCL: 29.0}),
    ]
    assert [c for _, c in pick(times, usual, 0.03)] == [LL, LL, WIDE, WIDE, WIDE, NCCL]
    # Without a margin each size has its own.
    assert [c for _, c in pick(times, usual, 0.0)] == [*[Candidate("ll", chunk=1536)] * 2, WIDE, PUTS, NCCL, NCCL]


def test_nccl_must_be_faster_by_more_than_the_margin_to_get_a_size_and_keeps_it_likewise() -> None:
    times = [(n, {WIDE: us, NCCL: 10.0}) for n, us in ((1, 10.2), (2, 10.4), (3, 9.9), (4, 9.6))]
    assert [c for _, c in pick(times, lambda nbytes: "2d", 0.03)] == [WIDE, NCCL, NCCL, WIDE]


def row(nbytes: int, candidate: Candidate, us: float | None, check: str = "ok") -> Row:
    kind: dict[str, Any] = {"algorithm": candidate.name, "peer": candidate == NCCL, "launch": "graph", "check": check}
    made = Row(ranks=4, nodes=1, bytes_per_rank=nbytes, **kind)
    return made if us is None else made.timed(Summary(us, us, us))


def test_sections_of_a_table() -> None:
    inside = Candidate("1d", in_place=True, channels=8, num_warps=4)
    rows = [
        *(row(1024, LL, 3.0), row(1024, PUTS, 5.0), row(1024, NCCL, 9.0)),
        *(row(4096, LL, 3.5), row(4096, PUTS, 5.0), row(4096, NCCL, 9.0)),
        *(row(16384, WIDE, 2.0, check="WRONG"), row(16384, PUTS, 6.0), row(16384, NCCL, None, check="not run")),
        *(row(65536, WIDE, 7.0), row(65536, PUTS, 9.0), row(65536, NCCL, 6.0)),
        row(65536, inside, 5.0),
    ]
    made = OF_FOUR.sections(rows, "NVIDIA Test", "a test")
    said = {s.in_place: [(e.up_to, e.algorithm, e.channels, e.chunk, e.num_warps) for e in s.entries] for s in made}
    assert said == {
        False: [
            (4096, "ll", None, None, None),
            (16384, "1d", None, None, None),
            (None, "nccl", None, None, None),
        ],
        True: [(65536, "1d", 8, None, 4)],
    }
    assert Table.parse(Table(tuple(made)).text()).sections == tuple(made)
    assert {(s.architecture, s.ranks_per_node, s.nodes, s.source) for s in made} == {("NVIDIA Test", 4, 1, "a test")}


# ---------------------------------------------------------------------- the command


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "-o FILE is needed"),
        ("-o no/such/folder/t.json", "there is no directory no/such/folder"),
        ("-o pyproject.toml", "expected a tuning table in JSON"),
        ("--dry-run --channels 4,513", "--channels: expected at most 512, got 513"),
        ("--dry-run --warps 3", "--warps: expected some of 1, 2, 4, 8, 16, 32; got 3"),
        ("--dry-run --algorithms auto", "expected some of ll, direct, ring, 1d, 2d"),
        ("--dry-run --operation broadcast", "expected some of all_gather, all_reduce, reduce_scatter; got broadcast"),
        ("--dry-run --margin -1", "expected a number of percent"),
        ("--dry-run -b 2K -e 1K", "-b must be at most -e"),
    ],
)
def test_a_wrong_command_line_ends_with_status_2(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).resolve().parents[2])
    with pytest.raises(SystemExit) as ended:
        Tune.parse(arguments.split())
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_the_simulator_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "-o", str(tmp_path / "t.json")]) == 2
    assert "the simulator has no times" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_shared_gpus_have_no_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tdcoll.runtime.lifecycle.INTERPRETED", False)
    monkeypatch.setattr("tdcoll.bench.tune.INTERPRETED", False)
    monkeypatch.setenv("TDCOLL_SHARE_GPUS", "1")
    for name in ("all_gather", "reduce_scatter", "sparse_all_reduce", "signal", "tune"):
        with pytest.raises(SystemExit) as ended:
            main(["tune", "-o", str(tmp_path / "t.json")] if name == "tune" else ["bench", name])
        assert ended.value.code == 2
        assert f"{name}: error: TDCOLL_SHARE_GPUS (launch.sh --share-gpus) or initialize" in capsys.readouterr().err


def test_the_listing() -> None:
    arguments = "--dry-run -b 1K -e 512K -f 512 --channels 1,4 --warps 4 --algorithms ll,1d --in-place"
    arguments += " --operation all_gather"
    assert tune.listing(Tune.parse(arguments.split()), FOUR, True).splitlines() == [
        "tune, 4 rank(s) on 1 node(s) (4): 14 measurements of 40 iterations",
        "all_gather, 1 KB per rank: ll, 1d, 1d 1 chunks 4 warps, in-place ll, in-place 1d, in-place 1d 1 chunks 4 "
        "warps, nccl",
        "all_gather, 512 KB per rank: 1d, 1d 1 chunks 4 warps, 1d 4 chunks 4 warps, in-place 1d, in-place 1d 1 chunks "
        "4 warps, in-place 1d 4 chunks 4 warps, nccl",
    ]


def test_measuring_writes_a_table(
    clock: Any, on_gpus: Callable[..., list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With calls of which the test says how long they take: the fastest get into the table, and the rest stays."""
    took, quick = {"ll": 3.0, "1d": 5.0}, Plan("1d", 4, 1024, 4)

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            (plan,) = (given for given in (*arguments, *named.values()) if isinstance(given, Plan))
            clock.passes(2.5 if plan == quick else took[plan.algorithm])
            return function(*arguments, **named)

        return call

    calls = [(all_gather, "all_gather"), (all_gather, "all_gather_in_place"), (reduce_scatter, "reduce_scatter")]
    for module, name in (*calls, (all_reduce, "all_reduce"), (all_reduce, "all_reduce_")):
        monkeypatch.setattr(module, name, timed(getattr(module, name)))
    file = tmp_path / "t.json"
    kept = Table.parse(
        '{"tuning": "tdcoll", "version": 4, "tables": [{"architecture": "NVIDIA Test", "operation": "all_gather", '
        '"ranks_per_node": 2, "nodes": 1, "in_place": false, "entries": [{"up_to": 64, "algorithm": "1d"}]}]}'
    )
    file.write_text(kept.text())
    arguments = "-b 1K -e 4K --channels 4 --warps 4 --algorithms ll,1d --in-place --iterations 2 --warmup 1"
    arguments += f" -o {file}"
    options = Tune.parse(arguments.split())
    shown: list[Row] = []

    def host(pe: int) -> list[Row]:
        return Tune(options).measure(shown.append if pe == 0 else lambda row: None)

    rows = on_gpus(host, 2)[0]
    assert shown == rows
    assert {row.check for row in rows if not row.peer} == {"ok"}
    assert {row.note for row in rows if row.peer} == {"needs GPUs"}
    # Of two operations and sizes; all-reduce has no such algorithm.
    assert [row.median_us for row in rows if row.algorithm == "ll"] == [pytest.approx(3.0)] * 4
    kinds = {(row.operation, row.dtype, row.op) for row in rows}
    reductions = {(name, "bfloat16", "sum") for name in ("all_reduce", "reduce_scatter")}
    assert kinds == {("all_gather", "uint8", None), *reductions}
    table = Table.load(file)
    assert table.sections[0] == kept.sections[0]
    said = {
        (s.operation, s.in_place): [(e.up_to, e.algorithm, e.channels, e.num_warps) for e in s.entries]
        for s in table.sections[1:]
    }
    found = [(1024, "ll", None, None), (4096, "1d", 4, 4)]
    assert said == {
        ("all_gather", False): found,
        ("all_gather", True): found,
        ("all_reduce", False): [(4096, "1d", None, None)],
        ("reduce_scatter", False): found,
    }
    assert {s.architecture for s in table.sections[1:]} == {SIMULATOR}
    assert "tune -b 1K -e 4K" in table.sections[1].source
    assert str(tmp_path) not in table.sections[1].source


# ---------------------------------------------------------------------- cut off, and on again

SIZES = "-b 1K -e 64K -f 4 --channels 1,4 --warps 4 --algorithms ll,direct,1d --operation all_gather"
TUNED = [(4096, "ll"), (65536, "direct")]


def said_of(file: Path) -> list[tuple[int | None, str]]:
    """Sizes and algorithms of the table's only section."""
    (section,) = Table.load(file).sections
    return [(entry.up_to, entry.algorithm) for entry in section.entries]


class Times:
    """Lets `tune` measure made-up times; notes of which operations and sizes, and may end it at one size."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, until: int | None = None) -> None:
        self.sizes: list[int] = []
        self.operations: list[str] = []
        self.until = until
        monkeypatch.setattr(Case, "measure_size", killed_tune.made_up(self.note))

    def note(self, operation: str, nbytes: int) -> None:
        if nbytes == self.until:
            raise KeyboardInterrupt
        self.sizes.append(nbytes)
        self.operations.append(operation)


def test_a_killed_run_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, whole = tmp_path / "t.json", tmp_path / "whole.json"
    script = str(Path(__file__).with_name("killed_tune.py"))
    killed = subprocess.run(
        [sys.executable, script, "16384", *SIZES.split(), "-o", str(file)], capture_output=True, text=True, timeout=120
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    first, second = [line for line in killed.stdout.splitlines() if " per rank: " in line]
    assert first.startswith(
        "tune: all_gather, 1 KB per rank: ll 3.00 µs (direct +67%, 1d +133%, nccl +200%) [1 of 4 sizes, "
    )
    assert second.startswith("tune: all_gather, 4 KB per rank: ll 3.00 µs (")
    assert re.search(r"\[2 of 4 sizes, 0 s, about \d+ s left\]$", second)
    assert said_of(file) == [(4096, "ll")]
    part = tune.part_of(file)
    assert {row.bytes_per_rank for row in files.load(part)[1]} == {1024, 4096}

    times = Times(monkeypatch)
    rows = killed_tune.run([*SIZES.split(), "-o", str(file)])
    assert times.sizes == [16384, 65536], "what was measured is not measured again"
    assert {row.bytes_per_rank for row in rows} == {1024, 4096, 16384, 65536}
    said = capsys.readouterr().out
    assert f"tune: goes on after all_gather 1 KB, all_gather 4 KB per rank, which are in {part}" in said
    last = "64 KB per rank: direct 5.00 µs (1d +40%, ll +80%, nccl +80%) [4 of 4 sizes, 0 s]"
    assert f"tune: all_gather, {last}" in said
    killed_tune.run([*SIZES.split(), "-o", str(whole)])
    assert Table.load(file).digest == Table.load(whole).digest
    assert said_of(file) == TUNED
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.json", "whole.json"]


@pytest.mark.parametrize(
    ("options", "version", "differs"),
    [
        ("--iterations 8", None, "iterations: 40 then, 8 now"),
        ("--in-place", None, "in_place: False then, True now"),
        ("", "9.9", f"tdcoll: {tdcoll.__version__} then, 9.9 now"),
    ],
)
def test_other_circumstances_are_measured_anew(
    options: str,
    version: str | None,
    differs: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "t.json"
    times = Times(monkeypatch, until=16384)
    with pytest.raises(KeyboardInterrupt):
        killed_tune.run([*SIZES.split(), "-o", str(file)])
    assert times.sizes == [1024, 4096]
    if version is not None:
        monkeypatch.setattr(tdcoll, "__version__", version)
    times = Times(monkeypatch, until=4096)
    with pytest.raises(KeyboardInterrupt):
        killed_tune.run([*SIZES.split(), *options.split(), "-o", str(file)])
    assert times.sizes == [1024], "all are measured again"
    said = capsys.readouterr().out
    assert f"tune: {tune.part_of(file)} is of other circumstances ({differs}): all sizes are measured again" in said
    assert {row.bytes_per_rank for row in files.load(tune.part_of(file))[1]} == {1024}


def test_an_earlier_table_holds_for_sizes_that_are_not_measured_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "t.json"
    arguments = [*SIZES.split(), "-o", str(file)]
    Times(monkeypatch)
    killed_tune.run(arguments)
    (section,) = Table.load(file).sections
    older = (dataclasses.replace(section.entries[0], up_to=2048, algorithm="1d", channels=4), *section.entries)
    file.write_text(Table((dataclasses.replace(section, entries=older),)).text())
    Times(monkeypatch, until=4096)
    with pytest.raises(KeyboardInterrupt):
        killed_tune.run(arguments)
    assert said_of(file) == [(1024, "ll"), (2048, "1d"), *TUNED]
    Times(monkeypatch)
    killed_tune.run(arguments)
    assert said_of(file) == TUNED


def test_a_run_of_several_operations_goes_on_in_the_one_that_was_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "t.json"
    arguments = [*SIZES.replace("all_gather", "all_gather,reduce_scatter").split(), "--in-place", "-o", str(file)]
    times = Times(monkeypatch)
    killed = killed_tune.made_up(times.note)

    def until(bench: Any, nbytes: int, *rest: Any, **named: Any) -> list[Row]:
        if (bench.benchmark, nbytes) == ("reduce_scatter", 4096):
            raise KeyboardInterrupt
        return killed(bench, nbytes, *rest, **named)

    monkeypatch.setattr(Case, "measure_size", until)
    with pytest.raises(KeyboardInterrupt):
        killed_tune.run(arguments)
    assert times.operations == ["all_gather"] * 4 + ["reduce_scatter"]
    assert tune.part_of(file).exists()
    times = Times(monkeypatch)
    killed_tune.run(arguments)
    assert times.operations == ["reduce_scatter"] * 3
    said = {(s.operation, s.in_place): [(e.up_to, e.algorithm) for e in s.entries] for s in Table.load(file).sections}
    assert said == {("all_gather", False): TUNED, ("all_gather", True): TUNED, ("reduce_scatter", False): TUNED}
    assert not tune.part_of(file).exists()


def test_a_file_is_written_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "t.json"
    files.write_whole(file, "before")

    def cut_off(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", cut_off)
    with pytest.raises(KeyboardInterrupt):
        files.write_whole(file, "after")
    assert file.read_text() == "before"


def test_a_file_of_rows_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t.json.part").write_text("{}")
    with pytest.raises(SystemExit) as ended:
        Tune.parse(["-o", str(tmp_path / "t.json")])
    assert ended.value.code == 2
    assert "t.json.part is not a result of tdcoll.bench" in capsys.readouterr().err


def test_what_is_said_of_a_size() -> None:
    kept = Candidate("1d", channels=4)
    rows = [
        *(row(1024, kept, 4.0), row(1024, LL, 6.0)),
        *(row(4096, kept, 5.1), row(4096, LL, 5.0), row(4096, NCCL, 10.2)),
        row(4096, WIDE, 2.0, check="WRONG"),
    ]
    assert OF_FOUR.verdict(4096, rows) == ("1d 4 chunks 5.10 µs (ll -2%, nccl +100%); WRONG: 1d 32 chunks 8 warps")
    assert OF_FOUR.verdict(16384, rows) == "nothing was right"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.4, "59 s"), (59.6, "1 min 0 s"), (200, "3 min 20 s"), (3900, "1 h 5 min")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
