# SPDX-License-Identifier: Apache-2.0
"""Files, tables, pages and pictures from synthetic results.

`tests/docs` compares the tables of real results, of older files as well, with the pages; also how they were measured.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tdcoll.base import environment
from tdcoll.testing import World
from tdcoll.tools.bench import plots, provenance, report
from tdcoll.tools.bench.arithmetic import Floor
from tdcoll.tools.bench.command import BENCHMARKS
from tdcoll.tools.bench.report import main
from tdcoll.tools.bench.rows import LAYOUTS, Row, line_of, load, save

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
backend_calls: Any = importlib.import_module("backend_calls")

VERSIONS = {"torch": "9.9.0", "triton": "8.8.0", "nvshmem": "7.7.7", "nccl": "6.6.6", "cuda": "5.5", "driver": "444.4"}
FACTS: dict[str, Any] = {"tdcoll": "0.1.0", "commit": 10 * "0123", "dirty": True, **VERSIONS, "environment": {}}


def head(benchmark: str = "all_gather", gpu: str = "NVIDIA Test", **facts: Any) -> dict[str, Any]:
    command = f"bash launch.sh --nproc 8 -m tdcoll bench {benchmark} -e 4K"
    said = {"benchmark": benchmark, "command": command, "started": "2031-02-03T04:05:06+00:00"}
    return {**said, "provenance": {**FACTS, "gpus": [gpu] * 8, **facts}}


H200 = "NVIDIA H200"


def row_of(algorithm: str, median_us: float | None, facts: dict[str, Any], **more: Any) -> Row:
    fields: dict[str, Any] = {"ranks": 8, "nodes": 1, "peer": False, "launch": "graph", "check": "ok", **more}
    return Row(algorithm=algorithm, median_us=median_us, facts=facts, **fields)


def row(size: int, algorithm: str, median_us: float | None, **more: Any) -> Row:
    named = {"operation": "all_gather", "dtype": "bfloat16", "op": None}
    facts = {name: more.pop(name, usual) for name, usual in named.items()}
    return row_of(algorithm, median_us, {"bytes_per_rank": size, **facts}, **more)


def example() -> list[Row]:
    small = [row(1024, "auto", 4.0), row(1024, "in-place", 18.0), row(1024, "nccl", 16.0, peer=True)]
    large = [row(4096, "auto", 40.0), row(4096, "in-place", 30.0), row(4096, "nccl", 35.0, peer=True)]
    return [*small, row(1024, "1d", 9.0), *large, row(4096, "1d", 9.0)]


def sparse(rows: int, algorithm: str, median_us: float | None, **more: Any) -> Row:
    named = {"form": "coo", "copy": None if more.get("peer") else True, "dtype": "float32"}
    kind = {name: more.pop(name, usual) for name, usual in named.items()}
    floor = {"bytes_per_rank": 14080.0 * rows, "floor_us": 14080.0 * rows / 390e3}
    facts = {"rows": rows, "dim": 512, "num_rows": 5_000_000, "distribution": "uniform", **floor, **kind}
    return row_of(algorithm, median_us, facts, **{"launch": "eager", **more})


def sparse_example() -> list[Row]:
    return [
        *(sparse(1000, "owner", 200.0), sparse(1000, "owner", 150.0, copy=False)),
        sparse(1000, "auto", 180.0, note="took gather"),
        *(sparse(1000, "published", 900.0, peer=True), sparse(1000, "allgather", 160.0, peer=True)),
        *(sparse(50_000, "owner", 4000.0), sparse(50_000, "auto", 4100.0, note="took owner")),
        *(sparse(50_000, "published", 9000.0, peer=True), sparse(50_000, "allgather", 8000.0, peer=True)),
        sparse(50_000, "dense", None, peer=True, check="not run", note="too large"),
    ]


def table(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("|")]


def write(path: Path, rows: list[Row], head: dict[str, Any]) -> Path:
    save(path, head, rows)
    return path


def test_a_file_comes_back_as_it_was(tmp_path: Path) -> None:
    for of, rows in ((head(), example()), (head("sparse_all_reduce"), sparse_example())):
        path = write(tmp_path / "a.json", rows, of)
        document = json.loads(path.read_text())
        assert list(document) == ["schema", "benchmark", "command", "started", "provenance", "rows"]
        assert "facts" not in document["rows"][0]
        assert load(path) == ({"schema": 1, **of}, rows)


@pytest.mark.parametrize(
    "change",
    [
        *({"schema": 2}, {"benchmark": "all_scatter"}, {"rows": [{}]}, {"rows": [{"x": 1}]}, "", "[]", "{}"),
        {"rows": [{**dataclasses.asdict(example()[0]), "facts": {}}]},
    ],
)
def test_other_files_are_refused(change: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = change if isinstance(change, str) else json.dumps({"schema": 1, **head(), "rows": [], **change})
    (path := tmp_path / "other.json").write_text(text)
    assert main([str(path)]) == 1
    assert "is not a result of tdcoll.tools.bench" in capsys.readouterr().err


def test_every_benchmark_has_a_layout_and_lines_on_the_terminal() -> None:
    assert set(LAYOUTS) == {*BENCHMARKS, "tune", "beside"}
    one = dataclasses.replace(example()[0], min_us=3.5, note="x")
    columns = LAYOUTS["reduce_scatter"].columns
    headings = "# bytes per rank ranks nodes algorithm launch µs min µs p90 µs skew µs bus GB/s SMs check"
    assert " ".join(line_of(columns).split()) == headings
    assert " ".join(line_of(columns, one).split()) == "1 KB 8 1 tdcoll auto graph 4.00 3.50 - - 1.8 - ok: x"
    took = dataclasses.replace(one, facts={**one.facts, "took": "direct"})
    assert " tdcoll auto (direct) graph " in " ".join(line_of(columns, took).split())
    columns = LAYOUTS["sparse_all_reduce"].columns
    assert line_of(columns, sparse_example()[0]).split()[-7:] == ["200.00", "-", "-", "-", "70.4", "5.54", "ok"]
    assert " - - - - - - not run: too large" in " ".join(line_of(columns, sparse_example()[-1]).split())


def test_wrong_results_are_marked_and_never_compared() -> None:
    """A note of many sizes counts them, but wrong ones are all named."""
    rows = [
        row(1024, "auto", 2.0, check="WRONG", note="rank 3: 5 wrong element(s)"),
        *(row(1024, "in-place", 6.0), row(1024, "nccl", 1.0, peer=True, check="WRONG")),
        row(1024, "fcollect", 9.0, peer=True),
        row(1024, "nccl-symmetric", None, peer=True, check="not run", note="needs GPUs"),
    ]
    text = report.markdown(head(), rows)
    assert "Measured with tdcoll 0.1.0 at 012301230123 with uncommitted changes, PyTorch 9.9.0, " in text
    assert "| 1 KB | 2.00 WRONG | 6.00 | 1.00 WRONG | 9.00 (fcollect) | – | 1.50 |" in text
    assert "- tdcoll at 1 KB: WRONG (rank 3: 5 wrong element(s))\n- NCCL at 1 KB: WRONG\n" in text
    assert "- NCCL symmetric: not run (needs GPUs)\n" in text
    slow = [row(1024, "auto", 4.0), *rows[2:3], row(1024, "fcollect", 3.2, peer=True)]
    slow.append(row(1024, "auto", 1.0, launch="eager"))  # there is nothing to compare it with
    slow.append(row(1024, "in-place", 99.0, check="WRONG"))
    assert report.losses(head(), slow).endswith("CUDA graphs, tdcoll: 1 KB (by 25.0%, fcollect).\n")
    sizes = [1024 * k for k in range(1, 8)]
    rows = [row(size, "auto", 1.0, note="took ll" if size > 1024 else None) for size in sizes]
    rows += [row(size, "ll", 1.0, check="WRONG", note="1024 wrong element(s)") for size in sizes]
    text = report.markdown(head(), rows)
    assert "- tdcoll at 6 of 7 sizes: took ll" in text
    assert "- tdcoll ll at 1 KB; 2 KB; 3 KB; 4 KB; 5 KB; 6 KB; 7 KB: WRONG (1024 wrong element(s))\n" in text
    assert text.count("WRONG (") == 1


def test_tables_are_apart_by_operation_and_kinds_of_rows() -> None:
    reduced = [row(1024, "auto", 2.0, op=op) for op in ("sum", "max")]
    text = report.markdown(head("all_reduce"), [*reduced, row(1024, "auto", 2.0, launch="eager")])
    for said in ("sum of bfloat16", "max of bfloat16"):
        assert f"**All-reduce, 8 × NVIDIA Test on 1 node, {said}, CUDA graphs.**" in text
    assert "on 1 node, eager calls.**" in text
    more = [sparse(1000, "auto", 1.0, dtype="float64")]
    text = report.markdown(head("sparse_all_reduce"), [*sparse_example(), *more])
    assert (text.count("| indices |"), "float64" in text) == (2, True)


def test_signals_and_candidates_have_tables_and_simulated_jobs_none() -> None:
    signals = [
        row_of(send, us, {"peer_rank": peer, "same_node": peer != 5, "rounds": 1})
        for send, peer, us in (("put", 1, 1.9), ("store", 1, 1.2), ("store", 5, 3.0))
    ]
    lines = ["| 0 to 1 | 1 | 1.90 | 1.20 |", "| 0 to 5, other node | 1 | – | 3.00 |"]
    assert table(report.markdown(head("signal"), signals))[2:] == lines
    with pytest.raises(ValueError, match="got signal, of which there are no pictures"):
        plots.draw(head("signal"), signals)
    tuned = [row(1024, "ll", 1.0, operation=name) for name in ("all_reduce", "all_gather")]
    assert [line[:22] for line in table(report.markdown(head("tune", H200), tuned))[2:]] == [
        "| all_reduce | 1 KB | ", "| all_gather | 1 KB | ",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="expected rows with times, got those of a simulated job"):
        report.markdown(head(), [row(1024, "1d", None, launch="simulator")])


def checkout(root: Path, page: str) -> Path:
    """A checkout with one result and a README."""
    (root / "docs/results").mkdir(parents=True)
    write(root / "docs/results/a.json", example(), head())
    (root / "README.md").write_text(page)
    return root / "README.md"


def test_pages_get_the_tables_between_their_markers(tmp_path: Path) -> None:
    readme = checkout(tmp_path, "before\n<!-- report: a -->\nold\n<!-- /report -->\nafter\n")
    empty, texts = "<!-- report: a{} -->\n<!-- /report -->\n", [report.markdown(head(), example(), brief=True)]
    texts.append(report.losses(head(), example()))
    (other := tmp_path / "docs/other.md").write_text(f"{empty.format(' brief')}{empty.format(' losses')}plain\n")
    for _ in range(2):  # the second time changes nothing
        assert main(["--write", str(tmp_path)]) == 0
        whole = report.markdown(head(), example())
        assert readme.read_text() == f"before\n<!-- report: a -->\n{whole}<!-- /report -->\nafter\n"
        parts = zip((" brief", " losses"), texts, strict=True)
        found = [f"<!-- report: a{how} -->\n{text}<!-- /report -->\n" for how, text in parts]
        assert other.read_text() == f"{''.join(found)}plain\n"


MARKERS = "expected each <!-- report: NAME --> with a <!-- /report -->"
WRONG = {
    "gone -->\n<!-- /report -->\n": "gone.json",
    "a -->\nold\n": MARKERS,
    "a short -->\n<!-- /report -->\n": MARKERS,
    "a -->\n<!-- /report -->\nold\n<!-- /report -->\n": MARKERS,
}


@pytest.mark.parametrize("page", WRONG)
def test_a_page_that_cannot_be_filled_in_is_an_error_and_stays(page: str, tmp_path: Path, capsys: Any) -> None:
    assert main(["--write", str(tmp_path)]) == 1
    assert "expected a checkout of tdcoll, with docs/results" in capsys.readouterr().err
    readme = checkout(tmp_path, f"<!-- report: {page}")
    assert main(["--write", str(tmp_path)]) == 1
    assert WRONG[page] in capsys.readouterr().err
    assert readme.read_text() == f"<!-- report: {page}"


def test_a_wrong_command_line_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["a.json", "--write"], ["a.json", "b.json", "--plot", "a.png"]):
        with pytest.raises(SystemExit, match="2"):
            main(arguments)


def test_some_of_the_columns_of_two_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The fastest baseline is found among all."""
    path, other = (str(write(tmp_path / name, example(), head())) for name in ("a.json", "b.json"))
    assert main([path, other, "--only", "1d"]) == 0
    assert capsys.readouterr().out.count("| bytes per rank | tdcoll 1d | NCCL / tdcoll 1d |") == 2
    assert main([path, "--only", "nothing"]) == 1
    assert "--only: expected some of auto, in-place, nccl, 1d; got nothing" in capsys.readouterr().err


def test_the_commit_that_is_told_and_variables_of_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of those are paths of this machine."""
    assert len(provenance._commit()[0] or "") == 40
    for name in environment.INTERNAL:
        monkeypatch.setenv(name, "/a/path")
    monkeypatch.setenv("TDCOLL_COMMIT", "0123")
    monkeypatch.setenv("TDCOLL_DEBUG", "0")
    monkeypatch.setenv("NVSHMEM_HOME", "/home/somebody/nvshmem-3")
    (facts,) = World(1).run(lambda pe: provenance.provenance())
    assert (facts["commit"], facts["dirty"], facts["environment"]["TDCOLL_DEBUG"]) == ("0123", None, "0")
    assert facts["environment"]["NVSHMEM_HOME"] == "nvshmem-3"
    assert environment.INTERNAL & set(facts["environment"]) == set()


def test_pictures_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    checkout(tmp_path, "![x](docs/results/a.png) ![y](docs/results/folder/b.png) [z](https://x.y/results/c.png)\n")
    assert report.pictures(tmp_path) == ["a"]
    assert main(["--write", str(tmp_path)]) == 0
    assert main([str(tmp_path / "docs/results/a.json"), "--plot", str(tmp_path / "c.png")]) == 0
    for picture in ("docs/results/a.png", "c.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")
    empty = write(tmp_path / "b.json", [row(8, "1d", None)], head())
    assert main([str(empty), "--plot", str(tmp_path / "b.png")]) == 1
    assert "nothing to plot" in capsys.readouterr().err


def test_a_picture_has_a_panel_for_each_launch_and_no_colour_twice() -> None:
    pytest.importorskip("matplotlib")
    ours, peers = (("auto", 4.0), ("in-place", 5.0), ("1d", 6.0)), [f"peer {k}" for k in range(5)]
    rows = [row(size, name, us) for size in (1024, 4096) for name, us in ours]
    rows += [row(size, name, 7.0, peer=True) for size in (1024, 4096) for name in peers]
    figure = plots.draw(head(gpu=H200), rows + [dataclasses.replace(r, launch="eager") for r in rows])
    assert [axis.get_title() for axis in figure.axes] == ["CUDA graphs", "eager calls"]
    for axis in figure.axes:
        lines = {line.get_label(): line for line in axis.get_lines()}
        assert list(lines) == ["tdcoll", "tdcoll in place", *peers, "floor"]
        assert len({line.get_color() for line in lines.values()}) == len(lines) == plots.CURVES
        data = [list(values) for name in ("tdcoll", "floor") for values in lines[name].get_data()]
        assert data == [[1024, 4096], [4.0, 4.0], [1024, 4096], [1.8, 1.8]]
        assert (axis.get_xscale(), axis.get_yscale(), axis.get_legend()) == ("log", "log", None)
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == list(lines)
    figure.canvas.draw()
    box, whole = legend.get_window_extent(), figure.bbox
    assert whole.x0 <= box.x0 < box.x1 <= whole.x1, "it fits on the picture"
    assert "floor" not in [line.get_label() for line in plots.draw(head(), example()).axes[0].get_lines()]
    (axis, *_) = plots.draw(head("sparse_all_reduce"), sparse_example()).axes
    assert axis.get_title() == "uniform, rows of 512, eager calls"
    assert [line.get_label() for line in axis.get_lines()] == ["tdcoll", "published", "allgather", "floor"]


def test_a_picture_has_at_most_8_curves() -> None:
    pytest.importorskip("matplotlib")
    rows = [row(1024, name, 2.0, peer=name != "auto") for name in ("auto", "nccl", "vllm", *map(str, range(8)))]
    drawn = plots.draw(head("all_reduce"), rows).axes[0].get_lines()
    assert [line.get_label() for line in drawn] == ["tdcoll", "NCCL", "vLLM"]
    norms = [dataclasses.replace(one, facts={"rows": 8, "hidden": 64, "dtype": "x"}) for one in rows]
    said = r"expected at most 8 curves, the floor included, got tdcoll auto, nccl, vllm, 0, .*--only"
    with pytest.raises(ValueError, match=said):
        plots.draw(head("all_reduce_rms_norm"), norms)


def blocks_example() -> list[Row]:
    def used(size: int, name: str, us: float, sms: int, **more: Any) -> Row:
        one = row(size, name, us)
        return dataclasses.replace(one, facts={**one.facts, "sms": sms, **more})

    small = [used(1024, f"loop {blocks} blocks", 80.0 / blocks, blocks) for blocks in (16, 8)]
    small += [used(1024, "loop", 7.0, 12), used(1024, "auto", 3.0, 128, took="ll"), used(1024, "ll", 3.0, 128)]
    return [*small, used(1024, "ce", 9.0, 1), row(1024, "nccl", 6.0, peer=True), used(4096, "loop 8 blocks", 20.0, 8)]


def test_results_by_thread_blocks_are_shown_over_multiprocessors() -> None:
    pytest.importorskip("matplotlib")
    first, second, *others = plots.draw(head(), blocks_example()).axes
    assert ([first.get_title(), second.get_title()], others) == (["1 KB", "4 KB"], [])
    lines = {line.get_label(): line for line in first.get_lines()}
    data = {name: [list(values) for values in line.get_data()] for name, line in lines.items()}
    assert data.pop("NCCL")[1] == [6.0, 6.0]  # on all of the axis
    assert data == {"tdcoll loop": [[8, 16], [10.0, 5.0]], "tdcoll ce": [[1], [9.0]], "tdcoll": [[128], [3.0]]}
    assert {name for name, line in lines.items() if line.get_linestyle() == "None"} == {"tdcoll ce", "tdcoll"}
    assert first.get_ylim() == (0, 11.0)
    (over_sizes,) = plots.draw(head(), blocks_example(), only=["loop 8 blocks"]).axes
    assert [list(values) for values in over_sizes.get_lines()[0].get_data()] == [[1024, 4096], [10.0, 20.0]]
    text = report.markdown(head(), blocks_example())
    assert table(text)[0] == "| calls | 1 KB | SMs | 4 KB | SMs |"
    assert "| tdcoll loop 8 blocks | 10.0 | 8 | 20.0 | 8 |" in text
    assert "| NCCL | 6.00 |  | – |  |" in text


def test_matmuls_beside_all_gathers_show_what_each_round_added() -> None:
    pytest.importorskip("matplotlib")
    us = {"alone": [100.0, 300.0, 200.0], "nccl": [150.0, 320.0, 240.0], "ce in place": [90.0, 300.0, 205.0]}
    rows = backend_calls.beside_rows({"kind": "4 all-gathers", "nbytes": 1 << 24, "us": us}, 2)
    of = {**head("beside", H200), "started": ""}
    lines = ["| alone | 200 [100, 300] |  |", "| NCCL | 240 [150, 320] | 40 [20, 50] |"]
    text = report.markdown(of, rows)
    assert table(text)[2:] == ["| tdcoll ce in place | 205 [90, 300] | 0 [-10, 5] |", *lines]
    assert "8 × NVIDIA H200 on 1 node" in text
    assert f"driver {FACTS['driver']}.\n" in text  # it has no date
    (axis,) = plots.draw(of, rows).axes
    assert [label.get_text() for label in axis.get_xticklabels()] == ["NCCL", "tdcoll ce in place"]
    assert [list(line.get_ydata()) for line in axis.get_lines()][:4] == [[50, 20, 40], [40, 40], [-10, 0, 5], [0, 0]]
    assert "lower is better" in axis.get_ylabel()


def test_a_floor_is_latency_or_bandwidth() -> None:
    floor = Floor(launch_us=0.8, hop_us=1.2, gbps=350.0, pair_gbps=100.0)
    found = [floor.us(*sent) for sent in ((7 * 64, 8), (700_000, 8), (7_000_000, 8), (7_000_000, 2), (0, 1))]
    assert found == pytest.approx([2.0, 2.0, 20.0, 70.0, 0.8])  # 7 * 100 KB take 2 us at 350 GB/s


def test_tables_of_known_gpus_in_a_node_have_a_floor() -> None:
    pair, several = ([dataclasses.replace(r, **more) for r in example()] for more in ({"ranks": 2}, {"nodes": 2}))
    for rows, rate in ((example(), 390), (pair, 361)):
        said = f"a launch (0.8 µs) and a hop (1 µs), or what a rank sends at {rate} GB/s"
        assert said in report.markdown(head(gpu=H200), rows)
    mixed = head(gpus=[H200, "NVIDIA H100"] * 4)
    for of, rows in ((head(), example()), (mixed, example()), (head(gpu=H200), several)):
        assert "floor" not in report.markdown(of, rows)
