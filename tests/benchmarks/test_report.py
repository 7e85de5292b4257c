# SPDX-License-Identifier: Apache-2.0
"""Files, tables and pages from synthetic results.

`tests/docs` compares the tables of real results, of older files as well, with the pages; also how
they were measured.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from results import (
    FACTS,
    H200,
    example,
    head,
    peer,
    row,
    row_of,
    sparse,
    sparse_example,
    write,
)

from benchmarks import plots, registry, tables
from benchmarks.backend_calls import beside_rows
from benchmarks.pages import pictures
from benchmarks.report import main
from tdcoll.base import environment
from tdcoll.testing import World
from tdcoll.tools.measure import provenance
from tdcoll.tools.measure.floor import Floor
from tdcoll.tools.measure.results import load


def cells(text: str) -> list[list[str]]:
    """Return the cells of all tables' lines, without the lines below the headings."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [line for line in found if not set("".join(line)) <= set(":-")]


@pytest.mark.parametrize(
    ("name", "rows"), [("all_gather", example()), ("sparse_all_reduce", sparse_example())]
)
def test_a_file_comes_back_as_it_was(name: str, rows: list[Any], tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", rows, head(name))
    document = json.loads(path.read_text())
    assert list(document) == ["schema", "benchmark", "command", "started", "provenance", "rows"]
    assert "facts" not in document["rows"][0]
    assert load(path) == ({"schema": 1, **head(name)}, rows)


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 2},
        {"benchmark": "all_scatter"},
        {"rows": [{}]},
        {"rows": [{"x": 1}]},
        {"rows": [{**dataclasses.asdict(example()[0]), "facts": {}}]},
    ],
)
def test_other_files_are_refused(change: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "other.json"
    path.write_text(json.dumps({"schema": 1, **head(), "rows": [], **change}))
    assert main([str(path)]) == 1
    assert f"{path} is not the result of a benchmark" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "[]", "{}"])
def test_files_that_are_no_results_are_refused(text: str, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    assert main([str(path)]) == 1
    assert f"{path} is not the result of a benchmark" in capsys.readouterr().err


@pytest.mark.parametrize("name", [*registry.SUBJECTS, "tune", "beside"])
def test_every_benchmark_has_a_layout(name: str) -> None:
    layout = registry.layout(name)
    assert layout.title
    assert layout.size
    if name in registry.SUBJECTS:
        assert registry.benchmark(name).name == name


def test_lines_on_the_terminal() -> None:
    layout = registry.layout("reduce_scatter")
    headings = (
        "# bytes per rank ranks nodes algorithm launch µs min µs p90 µs skew µs bus GB/s SMs check"
    )
    assert " ".join(layout.heading_line().split()) == headings
    one = dataclasses.replace(example()[0], min_us=3.5, note="x")
    line = "1 KB 8 1 tdcoll auto graph 4.00 3.50 - - 1.8 - ok: x"
    assert " ".join(layout.line(one).split()) == line
    assert len(layout.line(one)) == len(layout.heading_line())
    took = dataclasses.replace(one, facts={**one.facts, "took": "direct"})
    assert " tdcoll auto (direct) " in layout.line(took)
    layout = registry.layout("sparse_all_reduce")
    *_, last = sparse_example()
    expected = ["200.00", "-", "-", "-", "70.4", "5.54", "ok"]
    assert layout.line(sparse_example()[0]).split()[-7:] == expected
    assert layout.line(last).split()[-10:] == [*"------", "not", "run:", "too", "large"]


def test_wrong_results_are_marked_and_never_compared() -> None:
    rows = [
        row(1024, "auto", 2.0, check="WRONG", note="rank 3: 5 wrong element(s)"),
        row(1024, "in-place", 6.0),
        peer(1024, "nccl", 1.0, check="WRONG"),
        peer(1024, "fcollect", 9.0),
        peer(1024, "nccl-symmetric", None, check="not run", note="needs GPUs"),
    ]
    text = tables.markdown(head(), rows)
    assert cells(text) == [
        [
            "bytes per rank",
            "tdcoll",
            "tdcoll in place",
            "NCCL",
            "fastest baseline",
            "fastest baseline / tdcoll",
            "fastest baseline / tdcoll in place",
        ],
        ["1 KB", "2.00 WRONG", "6.00", "1.00 WRONG", "9.00 (fcollect)", "–", "1.50"],
    ]
    versions = (
        "Measured with tdcoll 0.1.0 at 012301230123 with uncommitted changes, PyTorch 9.9.0, "
    )
    assert versions in text
    assert "- tdcoll at 1 KB: WRONG (rank 3: 5 wrong element(s))\n- NCCL at 1 KB: WRONG\n" in text
    assert "- NCCL symmetric: not run (needs GPUs)\n" in text


def test_slower_times_are_marked_and_listed() -> None:
    rows = [
        row(1024, "auto", 4.0),
        row(1024, "in-place", 6.0, check="WRONG"),
        peer(1024, "fcollect", 3.2),
        row(1024, "auto", 1.0, launch="eager"),  # there is nothing to compare it with
    ]
    text = tables.markdown(head(), rows)
    assert ["1 KB", "4.00 †", "6.00 WRONG", "0.80", "–"] in cells(text)
    assert "† slower than the fastest baseline." in text
    lost = tables.losses([(head(), rows)])
    calls = "All-gather, 8 × NVIDIA Test on 1 node, CUDA graphs"
    assert cells(lost)[-1] == [f"{calls}, tdcoll", "1 KB", "25.0%", "fcollect"]
    assert cells(tables.standing([(head(), rows)]))[-1] == [
        calls,
        "1 KB to 1 KB",
        "0.80 to 0.80",
        "0 of 1",
    ]
    rows[0] = row(1024, "auto", 3.2)
    assert tables.losses([(head(), rows)]) == f"tdcoll loses at no size: {calls}.\n"
    assert cells(tables.standing([(head(), rows)]))[-1][-1] == "1 of 1"


def test_a_note_of_many_sizes_counts_them_but_wrong_ones_are_all_named() -> None:
    sizes = [1024 * k for k in range(1, 8)]
    rows = [row(size, "auto", 1.0, note="took ll" if size > 1024 else None) for size in sizes]
    rows += [row(size, "ll", 1.0, check="WRONG", note="1024 wrong element(s)") for size in sizes]
    text = tables.markdown(head(), rows)
    assert "- tdcoll at 6 of 7 sizes: took ll" in text
    places = "1 KB; 2 KB; 3 KB; 4 KB; 5 KB; 6 KB; 7 KB"
    assert f"- tdcoll ll at {places}: WRONG (1024 wrong element(s))\n" in text
    assert text.count("WRONG (") == 1


def test_tables_are_apart_by_operation_and_kinds_of_rows() -> None:
    rows = [row(1024, "auto", 2.0, op=op) for op in ("sum", "max")]
    text = tables.markdown(head("all_reduce"), [*rows, row(1024, "auto", 2.0, launch="eager")])
    for kind in ("sum of bfloat16", "max of bfloat16"):
        assert f"**All-reduce, 8 × NVIDIA Test on 1 node, {kind}, CUDA graphs.**" in text
    assert "on 1 node, eager calls.**" in text
    more = [sparse(1000, "auto", 1.0, dtype="float64")]
    text = tables.markdown(head("sparse_all_reduce"), [*sparse_example(), *more])
    assert [line[0] for line in cells(text)].count("indices") == 2
    assert "float64" in text


def test_tables_of_signals_and_of_candidates() -> None:
    signals = []
    for send, other, us in (("put", 1, 1.9), ("store", 1, 1.2), ("store", 5, 3.0)):
        facts = {"peer_rank": other, "same_node": other != 5, "rounds": 1}
        signals.append(row_of(send, us, facts))
    assert cells(tables.markdown(head("signal"), signals))[1:] == [
        ["0 to 1", "1", "1.90", "1.20"],
        ["0 to 5, other node", "1", "–", "3.00"],
    ]
    with pytest.raises(ValueError, match="got signal, which has no pictures"):
        plots.draw(head("signal"), signals)
    tuned = [row(1024, "ll", 1.0, operation=name) for name in ("all_reduce", "all_gather")]
    assert cells(tables.markdown(head("tune", H200), tuned))[1:] == [
        ["all_reduce", "1 KB", "1.00"],
        ["all_gather", "1 KB", "1.00"],
    ]


def test_simulated_jobs_have_no_tables() -> None:
    with pytest.raises(ValueError, match="expected rows with times, got those of a simulated job"):
        tables.markdown(head(), [row(1024, "1d", None, launch="simulator")])


def test_a_table_of_matmuls_beside_all_gathers_has_what_each_round_added() -> None:
    us = {
        "alone": [100.0, 300.0, 200.0],
        "nccl": [150.0, 320.0, 240.0],
        "ce in place": [90.0, 300.0, 205.0],
    }
    rows = beside_rows({"kind": "4 all-gathers", "nbytes": 1 << 24, "us": us}, 2)
    text = tables.markdown({**head("beside", H200), "started": ""}, rows)
    assert cells(text) == [
        ["calls", "4 all-gathers of 16 MB", "added"],
        ["tdcoll ce in place", "205 [90, 300]", "0 [-10, 5]"],
        ["alone", "200 [100, 300]", ""],
        ["NCCL", "240 [150, 320]", "40 [20, 50]"],
    ]
    assert "8 × NVIDIA H200 on 1 node" in text
    assert f"driver {FACTS['driver']}.\n" in text  # it has no date


def checkout(root: Path, page: str) -> Path:
    """Make a checkout with one result; return its README."""
    (root / "docs/results").mkdir(parents=True)
    write(root / "docs/results/a.json", example(), head())
    (root / "README.md").write_text(page)
    return root / "README.md"


def test_pages_get_the_tables_between_their_markers(tmp_path: Path) -> None:
    readme = checkout(tmp_path, "before\n<!-- report: a -->\nold\n<!-- /report -->\nafter\n")
    other = tmp_path / "docs/other.md"
    marker = "<!-- report: a{} -->\n{}<!-- /report -->\n"
    twice = "<!-- report: a,a{} -->\n{}<!-- /report -->\n"
    other.write_text(f"{marker.format(' brief', '')}{twice.format(' losses', '')}plain\n")
    whole = tables.markdown(head(), example())
    brief = tables.brief_markdown(head(), example())
    losses = tables.losses([(head(), example())] * 2)
    assert len({whole, brief, losses}) == 3
    for _ in range(2):  # the second time changes nothing
        assert main(["--write", str(tmp_path)]) == 0
        assert readme.read_text() == f"before\n{marker.format('', whole)}after\n"
        expected = f"{marker.format(' brief', brief)}{twice.format(' losses', losses)}plain\n"
        assert other.read_text() == expected


MARKERS = "expected each <!-- report: NAME --> with a <!-- /report -->"


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("gone -->\n<!-- /report -->\n", "gone.json"),
        ("a -->\nold\n", MARKERS),
        ("a short -->\n<!-- /report -->\n", MARKERS),
        ("a -->\n<!-- /report -->\nold\n<!-- /report -->\n", MARKERS),
    ],
)
def test_a_page_that_cannot_be_filled_in_is_an_error_and_stays(
    page: str, message: str, tmp_path: Path, capsys: Any
) -> None:
    readme = checkout(tmp_path, f"<!-- report: {page}")
    assert main(["--write", str(tmp_path)]) == 1
    assert message in capsys.readouterr().err
    assert readme.read_text() == f"<!-- report: {page}"


def test_only_pages_of_a_checkout_are_written(tmp_path: Path, capsys: Any) -> None:
    assert main(["--write", str(tmp_path)]) == 1
    assert "expected a checkout of tdcoll, with docs/results" in capsys.readouterr().err


def test_pages_of_this_folder_are_written_by_default(tmp_path: Path, monkeypatch: Any) -> None:
    readme = checkout(tmp_path, "<!-- report: a -->\n<!-- /report -->\n")
    monkeypatch.chdir(tmp_path)
    assert main(["--write"]) == 0
    assert cells(readme.read_text())[0][0] == "bytes per rank"


@pytest.mark.parametrize(
    "arguments", [[], ["a.json", "--write"], ["a.json", "b.json", "--plot", "a.png"]]
)
def test_a_wrong_command_line_is_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)


def test_some_of_the_columns_of_two_files(tmp_path: Path, capsys: Any) -> None:
    """The fastest baseline is found among all."""
    files = [str(write(tmp_path / name, example(), head())) for name in ("a.json", "b.json")]
    assert main([*files, "--only", "1d"]) == 0
    headings = [line for line in cells(capsys.readouterr().out) if line[0] == "bytes per rank"]
    assert headings == [["bytes per rank", "tdcoll 1d", "NCCL / tdcoll 1d"]] * 2
    assert main([files[0], "--only", "nothing"]) == 1
    message = "--only: expected some of auto, in-place, nccl, 1d; got nothing"
    assert message in capsys.readouterr().err


def test_the_commit_that_is_given_and_variables_of_the_launcher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some of those are paths of this machine."""
    assert len(provenance._commit()[0] or "") == 40
    for name in environment.INTERNAL:
        monkeypatch.setenv(name, "/a/path")
    monkeypatch.setenv("TDCOLL_COMMIT", "0123")
    monkeypatch.setenv("TDCOLL_DEBUG", "0")
    monkeypatch.setenv("NVSHMEM_HOME", "/home/somebody/nvshmem-3")
    (facts,) = World(1).run(lambda pe: provenance.provenance())
    assert (facts["commit"], facts["dirty"]) == ("0123", None)
    assert facts["environment"]["TDCOLL_DEBUG"] == "0"
    assert facts["environment"]["NVSHMEM_HOME"] == "nvshmem-3"
    assert environment.INTERNAL & set(facts["environment"]) == set()


def test_pictures_are_written(tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("matplotlib")
    links = [
        "![x](docs/results/a.png)",
        "![y](docs/results/folder/b.png)",
        "[z](https://x.y/results/c.png)",
    ]
    checkout(tmp_path, " ".join(links))
    (tmp_path / "docs/results/folder").mkdir()
    results = tmp_path / "docs/results"
    (results / "folder/b.json").write_bytes((results / "a.json").read_bytes())
    assert pictures(tmp_path) == ["a", "folder/b"]
    assert main(["--write", str(tmp_path)]) == 0
    assert main([str(tmp_path / "docs/results/a.json"), "--plot", str(tmp_path / "c.png")]) == 0
    for picture in ("docs/results/a.png", "docs/results/folder/b.png", "c.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")
    empty = write(tmp_path / "b.json", [row(8, "1d", None)], head())
    assert main([str(empty), "--plot", str(tmp_path / "b.png")]) == 1
    assert "nothing to plot" in capsys.readouterr().err


def test_a_floor_is_latency_or_bandwidth() -> None:
    floor = Floor(launch_us=0.8, hop_us=1.2, gbps=350.0, pair_gbps=100.0)
    sent = [(7 * 64, 8), (700_000, 8), (7_000_000, 8), (7_000_000, 2), (0, 1)]
    # 7 * 100 KB take 2 us at 350 GB/s.
    assert [floor.us(*one) for one in sent] == pytest.approx([2.0, 2.0, 20.0, 70.0, 0.8])


def test_tables_of_known_gpus_in_a_node_have_a_floor() -> None:
    pair = [dataclasses.replace(row, ranks=2) for row in example()]
    for rows, rate in ((example(), 390), (pair, 361)):
        text = tables.markdown(head(gpu=H200), rows)
        assert f"a launch (0.8 µs) and a hop (1 µs), or what a rank sends at {rate} GB/s" in text
        assert "floor" in cells(text)[0]
    several_nodes = [dataclasses.replace(row, nodes=2) for row in example()]
    mixed = head(gpus=[H200, "NVIDIA H100"] * 4)
    for of, rows in ((head(), example()), (mixed, example()), (head(gpu=H200), several_nodes)):
        assert "floor" not in tables.markdown(of, rows)
