# SPDX-License-Identifier: Apache-2.0
"""Tables, pages and pictures from synthetic results."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from tdcoll import environment
from tdcoll.bench import layouts, plots, provenance, report
from tdcoll.bench.arithmetic import Floor, Summary
from tdcoll.bench.layouts import LAYOUTS
from tdcoll.bench.report import main
from tdcoll.bench.rows import KINDS, Row, SignalRow, load, save, with_ratios
from tdcoll.testing import World

HEAD: dict[str, Any] = {
    "benchmark": "all_gather",
    "command": "bash launch.sh --nproc 8 -m tdcoll bench all_gather -e 4K",
    "started": "2031-02-03T04:05:06+00:00",
    "provenance": {
        "tdcoll": "0.1.0",
        "commit": "0123456789abcdef0123456789abcdef01234567",
        "dirty": True,
        "torch": "9.9.0",
        "triton": "8.8.0",
        "nvshmem": "7.7.7",
        "nccl": "6.6.6",
        "cuda": "5.5",
        "driver": "444.4",
        "gpus": ["NVIDIA Test"] * 8,
        "environment": {},
    },
}


def row(size: int, algorithm: str, median_us: float | None, **more: Any) -> Row:
    fields: dict[str, Any] = {"peer": False, "launch": "graph", "check": "ok", "nodes": 1, **more}
    made = Row(bytes_per_rank=size, ranks=8, algorithm=algorithm, **fields)
    return made if median_us is None else made.timed(Summary(median_us, median_us - 1, median_us + 1))


def example() -> list[Row]:
    small = [row(1024, "auto", 4.0), row(1024, "in-place", 18.0), row(1024, "nccl", 16.0, peer=True)]
    large = [row(4096, "auto", 40.0), row(4096, "in-place", 30.0), row(4096, "nccl", 35.0, peer=True)]
    return with_ratios([*small, row(1024, "1d", 9.0)]) + with_ratios([*large, row(4096, "1d", 9.0)])


def table(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("|")]


def write(path: Path, rows: list[Row], head: dict[str, Any] = HEAD) -> Path:
    save(path, head, rows)
    return path


def test_ratios_compare_launches_of_one_kind() -> None:
    rows = with_ratios(
        [
            row(1024, "1d", 4.0),
            row(1024, "1d", 20.0, launch="eager"),
            row(1024, "nccl", 16.0, peer=True),
            row(1024, "nccl", 30.0, peer=True, launch="eager"),
            row(1024, "nccl-symmetric", None, peer=True, check="not run", note="no"),
            row(1024, "fcollect", 1.0, peer=True, check="WRONG"),
        ]
    )
    assert [r.ratios for r in rows] == [{"nccl": 4.0}, {"nccl": 1.5}, {}, {}, {}, {}]
    assert rows[0].busbw_gbps == pytest.approx(7 * 1024 / 4.0 / 1e3)


def test_a_file_comes_back_as_it_was(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", example())
    document = json.loads(path.read_text())
    assert document["schema"] == 1
    assert list(document) == ["schema", "benchmark", "command", "started", "provenance", "rows"]
    head, rows = load(path)
    assert rows == example()
    assert head["provenance"] == HEAD["provenance"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 2, "rows": []}', '{"schema": 1, "rows": [{"x": 1}]}'])
def test_other_files_are_refused(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    assert main([str(path)]) == 1
    assert "is not a result of tdcoll.bench" in capsys.readouterr().err


def test_the_table_has_a_line_for_each_size_and_marks_losing_ones() -> None:
    text = report.markdown(HEAD, example())
    assert table(text) == [
        "| bytes per rank | tdcoll | tdcoll in place | NCCL | NCCL / tdcoll | NCCL / tdcoll in place |",
        "| ---: | ---: | ---: | ---: | ---: | ---: |",
        "| 1 KB | 4.00 | 18.0 † | 16.0 | 4.00 | 0.89 |",
        "| 4 KB | 40.0 † | 30.0 | 35.0 | 0.88 | 1.17 |",
    ]
    assert "† slower than the fastest peer. The file also has `1d` (`--only`).\n\nMeasured with tdcoll 0.1.0" in text
    assert text.endswith(f"```bash\n{HEAD['command']}\n```\n")


def test_the_fastest_peer_has_a_name_also_without_a_column() -> None:
    rows = [*example(), row(1024, "fcollect", 3.0, peer=True), row(4096, "fcollect", 99.0, peer=True)]
    assert table(report.markdown(HEAD, rows)) == [
        "| bytes per rank | tdcoll | tdcoll in place | NCCL | fastest peer | fastest peer / tdcoll "
        "| fastest peer / tdcoll in place |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| 1 KB | 4.00 † | 18.0 † | 16.0 | 3.00 (fcollect) | 0.75 | 0.17 |",
        "| 4 KB | 40.0 † | 30.0 | 35.0 | 35.0 (NCCL) | 0.88 | 1.17 |",
    ]


def test_a_brief_table_has_at_most_6_lines_and_5_columns_and_marks_losing_sizes() -> None:
    sizes = [1024 << (2 * k) for k in range(9)]
    rows = [row(size, name, us) for size in sizes for name, us in (("auto", 4.0), ("in-place", 6.0), ("ll", 1.0))]
    for peer, us in (("nccl", 7.0), ("nccl-symmetric", 5.0)):
        rows += [row(size, peer, us, peer=True) for size in sizes]
    eager = [dataclasses.replace(r, launch="eager") for r in rows]
    text = report.markdown(on_h200s(), rows + eager, brief=True)
    lines = table(text)
    assert lines[0] == "| bytes per rank | tdcoll | tdcoll in place | NCCL | fastest peer |"
    assert lines[2:] == [
        f"| {size} | 4.00 | 6.00 † | 7.00 | 5.00 (NCCL symmetric) |"
        for size in ("1 KB", "16 KB", "64 KB", "1 MB", "4 MB", "64 MB")
    ]
    assert text.endswith("\n† slower than the fastest peer.\n")
    assert "eager" not in text


def test_reduce_scatters_are_shown_like_all_gathers() -> None:
    head = {**on_h200s(), "benchmark": "reduce_scatter"}
    text = report.markdown(head, example())
    assert "**Reduce-scatter, 8 × NVIDIA H200 on 1 node, CUDA graphs.**" in text
    assert table(text) == table(report.markdown(on_h200s(), example()))


def test_every_benchmark_has_a_layout() -> None:
    assert set(KINDS) - set(layouts.LAYOUTS) == set()


def test_it_says_what_was_measured_with_what() -> None:
    said = report.markdown(HEAD, example())
    for fact in (
        *("**All-gather, 8 × NVIDIA Test on 1 node, CUDA graphs.**", "at 0123456789ab with uncommitted changes"),
        *("PyTorch 9.9.0", "Triton 8.8.0", "NVSHMEM 7.7.7", "NCCL 6.6.6", "CUDA 5.5", "driver 444.4"),
        "2031-02-03",
    ):
        assert fact in said
    assert "Multicast" not in said
    facts = {**HEAD["provenance"], "commit": None, "dirty": None, "nccl": None}
    facts["environment"] = {"TDCOLL_EMULATE_NODES": "2", "NCCL_NVLS_ENABLE": "0", "NVSHMEM_DISABLE_NVLS": "0"}
    other = report.markdown({**HEAD, "provenance": facts}, [row(8, "2d", 1.0, nodes=2, straggler=True)])
    assert "on 2 nodes (emulated)" in other
    assert "random rank delayed" in other
    assert "NCCL 6" not in other
    assert "Multicast was off (`NCCL_NVLS_ENABLE=0`)." in other


def test_each_way_to_launch_has_a_table() -> None:
    rows = [*example(), *(dataclasses.replace(r, launch="eager") for r in example())]
    text = report.markdown(HEAD, rows)
    assert text.count("| bytes per rank |") == 2
    assert "eager calls" in text


def test_wrong_results_are_marked_and_never_compared() -> None:
    rows = [
        row(1024, "auto", 2.0, check="WRONG", note="rank 3: 5 wrong word(s)"),
        row(1024, "in-place", 6.0),
        row(1024, "nccl", 1.0, peer=True, check="WRONG"),
        row(1024, "fcollect", 9.0, peer=True),
        row(1024, "nccl-symmetric", None, peer=True, check="not run", note="needs GPUs"),
    ]
    text = report.markdown(HEAD, rows)
    assert "| 1 KB | 2.00 WRONG | 6.00 | 1.00 WRONG | 9.00 (fcollect) | – | 1.50 |" in text
    assert "- tdcoll at 1 KB: WRONG (rank 3: 5 wrong word(s))" in text
    assert "- NCCL at 1 KB: WRONG" in text
    assert "- NCCL symmetric: not run (needs GPUs)" in text


def test_a_note_of_many_sizes_counts_them_but_wrong_ones_are_all_named() -> None:
    """In one line, with the first of their notes."""
    sizes = [1024 * k for k in range(1, 8)]
    rows = [row(size, "auto", 1.0, note="took ll" if size > 1024 else None) for size in sizes]
    wrong = [row(size, "ll", 1.0, check="WRONG", note=f"{size} wrong word(s)") for size in sizes]
    text = report.markdown(HEAD, rows + wrong)
    assert "- tdcoll at 6 of 7 sizes: took ll" in text
    assert "- tdcoll ll at 1 KB; 2 KB; 3 KB; 4 KB; 5 KB; 6 KB; 7 KB: WRONG (1024 wrong word(s))\n" in text
    assert text.count("WRONG (") == 1


def test_where_peers_are_faster() -> None:
    rows = [*example(), row(1024, "fcollect", 3.2, peer=True), row(4096, "fcollect", 1.0, peer=True, check="WRONG")]
    alone = dataclasses.replace(rows[0], launch="eager")
    said = "All-gather, 8 × NVIDIA Test on 1 node"
    assert report.losses(HEAD, [*rows, alone]).splitlines() == [
        f"- {said}, CUDA graphs, tdcoll: 1 KB (by 25.0%, fcollect), 4 KB (by 14.3%, NCCL).",
        f"- {said}, CUDA graphs, tdcoll in place: 1 KB (by 462.5%, fcollect).",
    ]
    rows = [row(1024, "auto", 1.0), row(1024, "nccl", 1.5, peer=True)]
    assert report.losses(HEAD, rows) == f"- {said}, CUDA graphs: at no size.\n"
    rows += [dataclasses.replace(row, launch="eager") for row in rows]
    assert report.losses(HEAD, rows) == f"- {said}, CUDA graphs and eager calls: at no size.\n"


def test_one_buffer_has_tables_of_its_own() -> None:
    fields = {"operation": "all_reduce", "op": "sum", "dtype": "bfloat16"}
    rows = [row(1024, "auto", 2.0, buffers=buffers, **fields) for buffers in (None, 1, 3)]
    text = report.markdown({**HEAD, "benchmark": "all_reduce"}, rows)
    for said in ("", ", one buffer replayed", ", 3 buffers in turn"):
        assert f"1 node, sum of bfloat16{said}, CUDA graphs.**" in text


def test_counts_of_the_simulator() -> None:
    counts = {"puts": [3.0, 4.0], "put_bytes": [10.0, 20.0], "gets": [0.0, 0.0]}
    text = report.markdown(HEAD, [row(1024, "1d", None, launch="simulator", counts=counts)])
    assert table(text) == [
        "| bytes per rank | algorithm | puts | put bytes | check |",
        "| ---: | ---: | ---: | ---: | ---: |",
        "| 1 KB | tdcoll 1d | 4 | 20 | ok |",
    ]


def checkout(root: Path, page: str) -> Path:
    """A checkout with one result and a README."""
    (root / "docs/results").mkdir(parents=True)
    write(root / "docs/results/a.json", example())
    (root / "README.md").write_text(page)
    return root / "README.md"


def test_pages_get_the_tables_between_their_markers(tmp_path: Path) -> None:
    readme = checkout(tmp_path, "before\n<!-- report: a -->\nold\n<!-- /report -->\nafter\n")
    other = tmp_path / "docs/other.md"
    other.write_text("<!-- report: a brief -->\n<!-- /report -->\n<!-- report: a losses -->\n<!-- /report -->\n")
    (tmp_path / "docs/plain.md").write_text("no table\n")
    for _ in range(2):  # the second time changes nothing
        assert main(["--write", str(tmp_path)]) == 0
        text = readme.read_text()
        assert text == f"before\n<!-- report: a -->\n{report.markdown(HEAD, example())}<!-- /report -->\nafter\n"
        assert report.markdown(HEAD, example(), brief=True) in other.read_text()
        assert f"<!-- report: a losses -->\n{report.losses(HEAD, example())}<!-- /report -->" in other.read_text()
    assert (tmp_path / "docs/plain.md").read_text() == "no table\n"


def test_parts_of_a_result_are_one_table_with_all_commands(tmp_path: Path) -> None:
    readme = checkout(tmp_path, "<!-- report: b -->\n<!-- /report -->\n")
    small, large = example()[:4], example()[4:]
    write(tmp_path / "docs/results/b.1.json", small)
    write(tmp_path / "docs/results/b.2.json", large, {**HEAD, "command": "the second"})
    write(tmp_path / "docs/results/bc.1.json", [row(1 << 20, "auto", 77.0)])  # another result's
    assert main(["--write", str(tmp_path)]) == 0
    whole = report.markdown({**HEAD, "command": f"{HEAD['command']}\nthe second"}, example())
    assert readme.read_text() == f"<!-- report: b -->\n{whole}<!-- /report -->\n"


@pytest.mark.parametrize(
    ("key", "value"),
    [("benchmark", "reduce_scatter"), ("provenance", {**HEAD["provenance"], "commit": "another"})],
)
def test_parts_of_different_runs_are_an_error(
    tmp_path: Path, key: str, value: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    page = "<!-- report: b -->\n<!-- /report -->\n"
    readme = checkout(tmp_path, page)
    write(tmp_path / "docs/results/b.1.json", example())
    write(tmp_path / "docs/results/b.2.json", example(), {**HEAD, key: value})
    assert main(["--write", str(tmp_path)]) == 1
    assert f"b.2.json: expected the {key} of b.1.json, got another" in capsys.readouterr().err
    assert readme.read_text() == page


def test_pictures_of_the_pages_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    checkout(tmp_path, "![x](docs/results/a.png) ![y](docs/results/folder/b.png) [z](https://x.y/results/c.png)\n")
    assert report.pictures(tmp_path) == ["a"]
    assert main(["--write", str(tmp_path)]) == 0
    assert (tmp_path / "docs/results/a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("<!-- report: gone -->\n<!-- /report -->\n", "gone.json"),
        ("<!-- report: a -->\nold\n", "expected each <!-- report: NAME --> with a <!-- /report -->"),
        ("<!-- report: a short -->\n<!-- /report -->\n", "expected each <!-- report: NAME --> with a <!-- /report -->"),
    ],
)
def test_a_page_that_cannot_be_filled_in_is_an_error_and_stays(
    tmp_path: Path, page: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = checkout(tmp_path, page)
    assert main(["--write", str(tmp_path)]) == 1
    assert said in capsys.readouterr().err
    assert readme.read_text() == page


def test_only_a_checkout_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--write", str(tmp_path)]) == 1
    assert "expected a checkout of tdcoll, with docs/results" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["a.json", "--write"], ["a.json", "b.json", "--plot", "a.png"]])
def test_a_wrong_command_line_is_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2


def test_two_files_are_two_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = write(tmp_path / "a.json", example()), write(tmp_path / "b.json", example())
    assert main([str(first), str(second)]) == 0
    assert capsys.readouterr().out.count("| bytes per rank |") == 2


def test_some_of_the_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The fastest peer is found among all."""
    path = str(write(tmp_path / "a.json", example()))
    assert main([path, "--only", "1d"]) == 0
    assert "| bytes per rank | tdcoll 1d | NCCL / tdcoll 1d |" in capsys.readouterr().out
    assert main([path, "--only", "nothing"]) == 1
    assert "--only: expected some of auto, in-place, nccl, 1d; got nothing" in capsys.readouterr().err


def test_the_commit_that_is_told_goes_before_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TDCOLL_COMMIT", "0123")
    assert provenance._commit() == ("0123", None)
    monkeypatch.delenv("TDCOLL_COMMIT")
    assert provenance._commit()[0] != "0123"


def test_variables_that_only_the_launcher_sets_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of them are paths of this machine."""
    for name in environment.INTERNAL:
        monkeypatch.setenv(name, "/a/path")
    monkeypatch.setenv("TDCOLL_DEBUG", "0")
    (facts,) = World(1).run(lambda pe: provenance.provenance())
    found = facts["environment"]
    assert found["TDCOLL_DEBUG"] == "0"
    assert environment.INTERNAL & set(found) == set()


def test_a_picture_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    result = write(tmp_path / "a.json", example())
    assert main([str(result), "--plot", str(tmp_path / "a.png")]) == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    empty = write(tmp_path / "b.json", [row(8, "1d", None)])
    assert main([str(empty), "--plot", str(tmp_path / "b.png")]) == 1
    assert "nothing to plot" in capsys.readouterr().err


def test_a_picture_has_a_panel_for_each_launch_and_no_colour_twice() -> None:
    pytest.importorskip("matplotlib")
    rows = [
        row(size, name, us) for size in (1024, 4096) for name, us in (("auto", 4.0), ("in-place", 5.0), ("1d", 6.0))
    ]
    rows += [row(size, f"peer {k}", 7.0 + k, peer=True) for size in (1024, 4096) for k in range(5)]
    figure = plots.draw(on_h200s(), rows + [dataclasses.replace(r, launch="eager") for r in rows])
    assert [axis.get_title() for axis in figure.axes] == ["CUDA graphs", "eager calls"]
    for axis in figure.axes:
        lines = {line.get_label(): line for line in axis.get_lines()}
        assert list(lines) == ["tdcoll", "tdcoll in place", *(f"peer {k}" for k in range(5)), "floor"]
        assert len({line.get_color() for line in lines.values()}) == len(lines) == plots.CURVES
        assert list(lines["tdcoll"].get_xdata()) == [1024, 4096]
        assert list(lines["tdcoll"].get_ydata()) == [4.0, 4.0]
        assert list(lines["floor"].get_ydata()) == [1.8, 1.8]
        assert (axis.get_xscale(), axis.get_yscale(), axis.get_legend()) == ("log", "log", None)
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == list(lines)
    assert "floor" not in [line.get_label() for line in plots.draw(HEAD, example()).axes[0].get_lines()]


@pytest.mark.parametrize("launches", [["graph"], ["graph", "eager"]])
def test_the_legend_fits_on_the_picture(launches: list[str]) -> None:
    pytest.importorskip("matplotlib")
    rows = [row(size, "auto", 10.0, launch=launch) for launch in launches for size in (1024, 4096)]
    rows += [
        row(1024, name, 12.0, peer=True, launch=launch)
        for launch in launches
        for name in LAYOUTS["all_reduce"].drawn[1:]
    ]
    figure = plots.draw({**HEAD, "benchmark": "all_reduce"}, rows, floor=Floor(1.0, 1.0, 100.0))
    figure.canvas.draw()
    (legend,) = figure.legends
    assert len(legend.get_texts()) == plots.CURVES
    box, whole = legend.get_window_extent(), figure.bbox
    assert whole.x0 <= box.x0
    assert box.x1 <= whole.x1


def test_a_picture_has_at_most_8_curves() -> None:
    pytest.importorskip("matplotlib")
    rows = [row(1024, f"peer {k}", 7.0 + k, peer=True) for k in range(8)]
    some = [row(1024, name, 2.0, peer=name != "auto") for name in ("auto", "nccl", "vllm")]
    drawn = plots.draw({**HEAD, "benchmark": "all_reduce"}, [*rows, *some]).axes[0].get_lines()
    assert [line.get_label() for line in drawn] == ["tdcoll", "NCCL", "vLLM"]
    with pytest.raises(
        ValueError, match=r"expected at most 8 curves, the floor included, got tdcoll auto, peer 0, .*--only"
    ):
        plots.draw(HEAD, [row(1024, "auto", 1.0), *rows])


# ---------------------------------------------------------------------- floors


def on_h200s() -> dict[str, Any]:
    return {**HEAD, "provenance": {**HEAD["provenance"], "gpus": ["NVIDIA H200"] * 8}}


def test_a_floor_is_latency_or_bandwidth() -> None:
    floor = Floor(launch_us=0.8, crossing_us=1.2, gbps=350.0)
    assert floor.us(7 * 64, 8) == 2.0
    assert floor.us(700_000, 8) == 2.0  # exactly: 7 * 100 KB at 350 GB/s
    assert floor.us(7_000_000, 8) == pytest.approx(20.0)
    assert floor.us(0, 1) == 0.8


def test_tables_of_known_gpus_have_a_floor() -> None:
    text = report.markdown(on_h200s(), example())
    lines = [line.split(" | ") for line in table(text)]
    assert [line[lines[0].index("floor")] for line in lines] == ["floor", "---:", "1.80", "1.80"]
    assert "The floor is a launch (0.8 µs) and a crossing (1 µs), or what a rank sends at 390 GB/s" in text


def test_two_ranks_have_the_rate_of_a_pair() -> None:
    rows = [dataclasses.replace(row, ranks=2) for row in example()]
    assert "or what a rank sends at 361 GB/s" in report.markdown(on_h200s(), rows)
    own = Floor(launch_us=1, crossing_us=2, gbps=99)
    assert "or what a rank sends at 99 GB/s" in report.markdown(on_h200s(), rows, floor=own)


def test_other_tables_have_none() -> None:
    mixed = {**HEAD, "provenance": {**HEAD["provenance"], "gpus": ["NVIDIA H200", "NVIDIA H100"] * 4}}
    several = [dataclasses.replace(r, nodes=2) for r in example()]
    for head, rows in ((HEAD, example()), (mixed, example()), (on_h200s(), several)):
        assert "floor" not in report.markdown(head, rows)
    assert "floor" not in report.markdown(on_h200s(), several, floor=Floor(1, 1, 1))


def test_signals_have_a_table_and_no_picture() -> None:
    fields: dict[str, Any] = {"ranks": 8, "nodes": 1, "peer": False, "launch": "graph", "check": "ok"}
    rows = [
        SignalRow(**fields, algorithm=send, pattern=pattern, peer_rank=peer).timed(Summary(us, us, us))
        for send, pattern, peer, us in (
            *(("signal_block", "one-way", 1, 1.9), ("st_release", "one-way", 1, 1.2)),
            ("st_release", "all-to-all", None, 0.5),
        )
    ]
    head = {**on_h200s(), "benchmark": "signal"}
    assert table(report.markdown(head, rows))[2:] == ["| 0 to 1 | 1 | 1.90 | 1.20 |", "| all-to-all | 1 | – | 0.500 |"]
    with pytest.raises(ValueError, match="got signal, of which there are no pictures"):
        plots.draw(head, rows)


def test_the_floor_is_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(write(tmp_path / "unknown.json", example()))
    assert main([path, "--floor", "2,3,100"]) == 0
    assert "a launch (2 µs) and a crossing (3 µs), or what a rank sends at 100 GB/s" in capsys.readouterr().out
    for wrong in ("1,2", "1,2,0", "x"):
        with pytest.raises(SystemExit):
            main([path, "--floor", wrong])
        assert f"expected three numbers above 0, such as 0.8,1,341; got '{wrong}'" in capsys.readouterr().err
