# SPDX-License-Identifier: Apache-2.0
"""Tables and plots of sparse all-reduces and index matching, from synthetic results."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tdcoll.bench import plots, report
from tdcoll.bench.arithmetic import Summary
from tdcoll.bench.report import main
from tdcoll.bench.rows import SparseRow, load, save, with_ratios

PROVENANCE = {"tdcoll": "0.1.0", "commit": None, "dirty": None, "gpus": ["NVIDIA Test"] * 8, "environment": {}}


def head(benchmark: str) -> dict[str, Any]:
    command = f"bash launch.sh --nproc 8 -m tdcoll bench {benchmark}"
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


def table(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("|")]


def test_the_table_shows_what_loses_and_what_auto_took() -> None:
    text = report.markdown(head("sparse_all_reduce"), example())
    assert (
        "**Sparse all-reduce, 8 × NVIDIA Test on 1 node, 5,000,000 rows of float32, eager calls.** Times in ms." in text
    )
    assert table(text) == [
        "| indices | rows per rank | tdcoll | fastest peer | floor | fastest peer / tdcoll |",
        "| ---: | ---: | ---: | ---: | ---: | ---: |",
        "| uniform | 1,000 × 512 | 0.180 † | 0.160 (allgather) | 0.0361 | 0.89 |",
        "| uniform | 50,000 × 512 | 4.10 | 8.00 (allgather) | 1.81 | 1.95 |",
    ]
    for note in (
        "- tdcoll at uniform, 1,000 × 512: took gather",
        "- dense: not run (too large)",
        "- gloo, of other sizes: uniform, 1,024 × 512: 30.0 ms",
    ):
        assert note in text.splitlines()
    assert "at 390 GB/s per rank" in text
    assert "The file also has `owner`, `published`, `allgather`, `dense`, `gloo` (`--only`)." in text


def test_without_auto_all_of_tdcolls_have_columns() -> None:
    rows = [row for row in example() if row.algorithm != "auto"]
    heading = table(report.markdown(head("sparse_all_reduce"), rows))[0]
    assert "| tdcoll owner | tdcoll owner, no copy | fastest peer |" in heading


def test_the_padded_form_and_duplicates_and_dtypes_have_tables_and_lines_of_their_own() -> None:
    padded = [dataclasses.replace(r, form="padded", copy=None, launch="graph") for r in example() if not r.peer]
    repeated = [dataclasses.replace(r, duplicates="drawn") for r in example()]
    doubled = [dataclasses.replace(r, dtype="float64") for r in example()]
    text = report.markdown(head("sparse_all_reduce"), [*example(), *padded[:1], *repeated, *doubled])
    assert text.count("| indices |") == 3
    assert "CUDA graphs" in text
    assert "tdcoll owner, padded" in text
    assert "| uniform, repeated drawn | 1,000 × 512 |" in text
    assert "rows of float64" in text


def test_counts_of_the_simulator() -> None:
    row = sparse(40, "owner", None, launch="simulator", counts={"puts": [3.0, 4.0], "put_bytes": [10.0, 20.0]})
    text = report.markdown(head("sparse_all_reduce"), [row])
    assert table(text)[0] == "| indices | rows per rank | algorithm | puts | put bytes | check |"
    assert table(text)[2] == "| uniform | 40 × 512 | tdcoll owner | 4 | 20 | ok |"


def test_pictures_have_a_panel_for_each_kind_of_row() -> None:
    pytest.importorskip("matplotlib")
    made = plots.draw(head("sparse_all_reduce"), example())
    assert made.axes[0].get_title() == "uniform, rows of 512, eager calls"
    labels = [line.get_label() for line in plots.draw(head("sparse_all_reduce"), example()).axes[0].get_lines()]
    assert labels == ["tdcoll", "published", "allgather", "gloo", "floor"]


def test_two_files_are_two_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "sparse.json", head("sparse_all_reduce"), example())
    assert main(2 * [str(tmp_path / "sparse.json")]) == 0
    assert capsys.readouterr().out.count("**Sparse all-reduce, ") == 2
