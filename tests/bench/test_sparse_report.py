# SPDX-License-Identifier: Apache-2.0
"""Tables and plots of sparse all-reduces and index matching, from synthetic results."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tdcoll.bench import report
from tdcoll.bench.__main__ import main
from tdcoll.bench.arithmetic import Summary
from tdcoll.bench.rows import MatchRow, SparseRow, load, save, with_ratios

PROVENANCE = {"tdcoll": "0.1.0", "commit": None, "dirty": None, "gpus": ["NVIDIA Test"] * 8, "environment": {}}


def head(benchmark: str) -> dict[str, Any]:
    command = f"bash launch.sh --nproc 8 -m tdcoll.bench {benchmark}"
    return {"benchmark": benchmark, "command": command, "started": "2031-02-03T04:05:06", "provenance": PROVENANCE}


USUAL = SparseRow(
    ranks=8,
    nodes=1,
    algorithm="",
    peer=False,
    launch="eager",
    check="ok",
    rows=0,
    dim=512,
    num_rows=5_000_000,
    dtype="float32",
    distribution="uniform",
)


def sparse(rows: int, algorithm: str, median_us: float | None, **more: Any) -> SparseRow:
    sizes = {"union_rows": 7.9 * rows, "moved_rows": 55.0 * rows, "bytes_per_rank": 14080.0 * rows}
    more.setdefault("copy", None if more.get("peer") else True)
    floor = 14080.0 * rows / 390e3
    made = dataclasses.replace(USUAL, rows=rows, algorithm=algorithm, floor_us=floor, **sizes, **more)
    return made if median_us is None else made.timed(Summary(median_us, median_us, median_us), median_us + 10)


def example() -> list[SparseRow]:
    small = [
        sparse(1000, "owner", 200.0),
        sparse(1000, "owner", 150.0, copy=False),
        sparse(1000, "auto", 180.0, note="took gather"),
        sparse(1000, "published", 900.0, peer=True),
        sparse(1000, "allgather", 160.0, peer=True),
    ]
    large = [
        sparse(50_000, "owner", 4000.0),
        sparse(50_000, "owner", 3000.0, copy=False),
        sparse(50_000, "auto", 4100.0, note="took owner"),
        sparse(50_000, "published", 9000.0, peer=True),
        sparse(50_000, "allgather", 8000.0, peer=True),
        sparse(50_000, "dense", None, peer=True, check="not run", note="too large"),
        sparse(1024, "gloo", 30000.0, peer=True, note="on CPUs, 1024 of 50000 rows per rank"),
    ]
    return with_ratios(small) + with_ratios(large)


def test_what_follows_from_a_time() -> None:
    row = example()[0]
    assert row.gbps == pytest.approx(14080 * 1000 / 200 / 1e3)
    assert row.over_floor == pytest.approx(200 / (14080 * 1000 / 390e3))
    assert row.wall_us == 210.0
    assert row.ratios == {"published": 4.5, "allgather": 0.8}
    assert "gloo" not in example()[5].ratios  # another size


def test_a_file_comes_back_as_it_was(tmp_path: Path) -> None:
    save(tmp_path / "a.json", head("sparse_all_reduce"), example())
    assert load(tmp_path / "a.json")[1] == example()
    save(tmp_path / "b.json", head("sparse_all_scatter"), example())
    with pytest.raises(ValueError, match="sparse_all_scatter"):
        load(tmp_path / "b.json")


def test_the_table_compares_results_with_memory_of_their_own_and_shows_what_loses() -> None:
    text = report.markdown(head("sparse_all_reduce"), example())
    assert "**Sparse all-reduce on 8 × NVIDIA Test on 1 node, 5,000,000 rows of float32, eager calls.**" in text
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert table == [
        "| indices | rows per rank | dim | union | floor, ms | tdcoll owner, ms | tdcoll owner, no copy, ms "
        "| tdcoll auto, ms | published, ms | allgather, ms | tdcoll's best, GB/s | tdcoll's best / floor "
        "| published / tdcoll's best | allgather / tdcoll's best | fastest peer / tdcoll's best |",
        "| ---: " * 15 + "|",
        "| uniform | 1,000 | 512 | 7,900 | 0.0361 | 0.2 | 0.15 | 0.18 | 0.9 | 0.16 "
        "| 78.2 | 4.99 | 5.00 | 0.89 | 0.89 |",
        "| uniform | 50,000 | 512 | 395,000 | 1.81 | 4 | 3 | 4.1 | 9 | 8 | 176 | 2.22 | 2.25 | 2.00 | 2.00 |",
    ]
    for note in (
        "- tdcoll auto at uniform, 1,000 × 512: took gather",
        "- dense: not run (too large)",
        "- gloo, of other sizes: uniform, 1,024 × 512: 30 ms",
    ):
        assert note in text.splitlines()
    assert "at 390 GB/s per rank" in text
    assert "ratio is below 1" in text


def test_without_copies_views_are_compared() -> None:
    rows = [row for row in example() if row.peer or row.copy is False]
    lines = report.markdown(head("sparse_all_reduce"), with_ratios(rows)).splitlines()
    heading = lines[2].split(" | ")
    assert lines[4].split(" | ")[heading.index("published / tdcoll's best")] == "6.00"  # 900 and 150 us


def test_the_padded_form_and_duplicates_and_dtypes_have_tables_and_lines_of_their_own() -> None:
    padded = [dataclasses.replace(r, form="padded", copy=None, launch="graph") for r in example() if not r.peer]
    repeated = [dataclasses.replace(r, duplicates="drawn") for r in example()]
    doubled = [dataclasses.replace(r, dtype="float64") for r in example()]
    text = report.markdown(head("sparse_all_reduce"), [*example(), *padded[:1], *repeated, *doubled])
    assert text.count("| indices |") == 3
    assert "CUDA graph replays" in text
    assert "tdcoll owner, padded, ms" in text
    assert "| uniform, repeated drawn | 1,000 |" in text
    assert "rows of float64" in text


def test_wrong_sums_are_marked_and_never_the_best() -> None:
    rows = [sparse(1000, "owner", 50.0, check="WRONG", note="rank 1: bad"), sparse(1000, "gather", 100.0)]
    text = report.markdown(head("sparse_all_reduce"), rows)
    assert "| 0.05 WRONG | 0.1 | 141 |" in text
    assert "- tdcoll owner at uniform, 1,000 × 512: WRONG (rank 1: bad)" in text


def test_counts_of_the_simulator() -> None:
    row = sparse(40, "owner", None, launch="simulator", counts={"puts": [3.0, 4.0], "put_bytes": [10.0, 20.0]})
    text = report.markdown(head("sparse_all_reduce"), [row])
    assert (
        "| uniform | 40 | 512 | 8 | 1 | 316 | 0.563 | tdcoll owner | simulator | 4 | 20 | - | - | - | - | ok |" in text
    )


def match(task: str, algorithm: str, median_us: float, peer: bool = False, launch: str = "eager") -> MatchRow:
    made = MatchRow(
        ranks=1,
        nodes=1,
        algorithm=algorithm,
        peer=peer,
        launch=launch,
        check="ok",
        task=task,
        lists=8,
        rows=10_000,
        num_rows=5_000_000,
        distribution="uniform",
        union_rows=79_000.0,
    )
    return made.timed(Summary(median_us, median_us, median_us))


def matches() -> list[MatchRow]:
    return with_ratios(
        [
            match("union", "bitmap", 20.0),
            match("match", "match_indices", 6.0),
            match("match", "match_indices", 3.0, launch="graph"),
            match("union", "unique", 300.0, peer=True),
            match("match", "searchsorted", 9.0, peer=True),
        ]
    )


def test_each_task_of_index_matching_has_a_table() -> None:
    assert [row.ratios for row in matches()] == [{"unique": 15.0}, {"searchsorted": 1.5}, {}, {}, {}]
    text = report.markdown(head("index_match"), matches())
    assert "task union, 8 lists of ids below 5,000,000, eager calls" in text
    assert "| uniform | 10,000 | 79,000 | 20 | 300 | 15.00 |" in text
    assert "| uniform | 10,000 | 79,000 | 6 | 9 | 1.50 |" in text
    assert "| uniform | 10,000 | 79,000 | 3 |" in text


def test_plots_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    save(tmp_path / "sparse.json", head("sparse_all_reduce"), example())
    save(tmp_path / "match.json", head("index_match"), matches())
    for name in ("sparse", "match"):
        assert main(["report", str(tmp_path / f"{name}.json"), "--plot", str(tmp_path / f"{name}.png")]) == 0
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    both = [str(tmp_path / "sparse.json"), str(tmp_path / "match.json")]
    assert main(["report", *both, "--plot", str(tmp_path / "both.png")]) == 1
    assert "a plot is of one benchmark; got sparse_all_reduce, index_match" in capsys.readouterr().err
    assert main(["report", *both]) == 0
    out = capsys.readouterr().out
    assert "Sparse all-reduce on" in out
    assert "Index matching on" in out
