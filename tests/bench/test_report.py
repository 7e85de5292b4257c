# SPDX-License-Identifier: Apache-2.0
"""Tables, README and plots from synthetic results."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from tdcoll import environment
from tdcoll.bench import provenance, report
from tdcoll.bench.__main__ import main
from tdcoll.bench.arithmetic import Floor, Summary
from tdcoll.bench.rows import Row, SignalRow, load, save, with_ratios
from tdcoll.testing import World

HEAD: dict[str, Any] = {
    "benchmark": "all_gather",
    "command": "bash launch.sh --nproc 8 -m tdcoll.bench all_gather -e 4K",
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
    small = [row(1024, "1d", 4.0), row(1024, "in-place", 6.0), row(1024, "nccl", 16.0, peer=True)]
    large = [row(4096, "1d", 40.0), row(4096, "in-place", 30.0), row(4096, "nccl", 15.0, peer=True)]
    return with_ratios(small) + with_ratios(large)


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
        ]
    )
    assert [r.ratios for r in rows] == [{"nccl": 4.0}, {"nccl": 1.5}, {}, {}, {}]
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
    assert main(["report", str(path)]) == 1
    assert "is not a result of tdcoll.bench" in capsys.readouterr().err


def test_the_table_has_a_line_for_each_size_losing_ones_too() -> None:
    lines = report.markdown(HEAD, example()).splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert table == [
        "| bytes per rank | tdcoll 1d, µs | tdcoll in-place, µs | nccl, µs | tdcoll's best, bus GB/s "
        "| nccl / tdcoll's best |",
        "| ---: | ---: | ---: | ---: | ---: | ---: |",
        "| 1 KB | 4 | 6 | 16 | 1.79 | 4.00 |",
        "| 4 KB | 40 | 30 | 15 | 0.956 | 0.50 |",
    ]
    assert HEAD["command"] in lines


def test_the_caption_says_what_it_was_measured_with() -> None:
    said = report.caption(HEAD, example()[0])
    for fact in (
        *("8 × NVIDIA Test on 1 node", "CUDA graph replays", "at 0123456789ab with uncommitted changes"),
        *("PyTorch 9.9.0", "Triton 8.8.0", "NVSHMEM 7.7.7", "NCCL 6.6.6", "CUDA 5.5", "driver 444.4"),
        "2031-02-03",
    ):
        assert fact in said
    facts = {**HEAD["provenance"], "commit": None, "dirty": None, "nccl": None}
    facts["environment"] = {"TDCOLL_EMULATE_NODES": "2"}
    other = report.caption({**HEAD, "provenance": facts}, row(8, "2d", 1.0, nodes=2, straggler=True))
    assert "on 2 nodes (emulated)" in other
    assert "random rank delayed" in other
    assert "NCCL" not in other


def test_each_way_to_launch_has_a_table() -> None:
    rows = [*example(), *(dataclasses.replace(r, launch="eager") for r in example())]
    text = report.markdown(HEAD, rows)
    assert text.count("| bytes per rank |") == 2
    assert "eager calls" in text


def test_wrong_results_are_marked_and_never_the_best() -> None:
    rows = [
        row(1024, "1d", 2.0, check="WRONG", note="rank 3: 5 wrong word(s)"),
        row(1024, "in-place", 6.0),
        row(1024, "nccl", None, peer=True, check="not run", note="needs GPUs"),
    ]
    text = report.markdown(HEAD, rows)
    assert "| 1 KB | 2 WRONG | 6 | 1.19 |" in text
    assert "- tdcoll 1d at 1 KB per rank: WRONG (rank 3: 5 wrong word(s))" in text
    assert "- nccl: not run (needs GPUs)" in text


def test_counts_of_the_simulator() -> None:
    counts = {"puts": [3.0, 4.0], "put_bytes": [10.0, 20.0]}
    text = report.markdown(HEAD, [row(1024, "1d", None, launch="simulator", counts=counts)])
    assert "| 1 KB | 8 | 1 | tdcoll 1d | simulator | 4 | 20 | - | - | - | - | ok |" in text


def test_readme_gets_the_tables_between_its_markers(tmp_path: Path) -> None:
    result = write(tmp_path / "a.json", example())
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- benchmark:all_gather -->\nold\n<!-- /benchmark:all_gather -->\nafter\n")
    for _ in range(2):  # the second time changes nothing
        assert main(["report", str(result), "--readme", str(readme)]) == 0
        text = readme.read_text()
        assert text.startswith("before\n<!-- benchmark:all_gather -->\n**All-gather on 8 × NVIDIA Test")
        assert text.endswith("```\n<!-- /benchmark:all_gather -->\nafter\n")
        assert "old" not in text
        assert text.count("| 1 KB |") == 1


@pytest.mark.parametrize(
    "text",
    [
        "nothing",
        "<!-- benchmark:all_gather -->",
        "<!-- /benchmark:all_gather --> <!-- benchmark:all_gather -->",
        "<!-- benchmark:all_gather --> <!-- benchmark:all_gather --> <!-- /benchmark:all_gather -->",
    ],
)
def test_a_readme_without_markers_is_an_error_and_stays(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    result = write(tmp_path / "a.json", example())
    readme = tmp_path / "README.md"
    readme.write_text(text)
    assert main(["report", str(result), "--readme", str(readme)]) == 1
    assert "expected <!-- benchmark:all_gather -->" in capsys.readouterr().err
    assert readme.read_text() == text


def test_two_files_are_two_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = write(tmp_path / "a.json", example()), write(tmp_path / "b.json", example())
    assert main(["report", str(first), str(second)]) == 0
    assert capsys.readouterr().out.count("| bytes per rank |") == 2


def test_some_of_the_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(write(tmp_path / "a.json", example()))
    names = list(dict.fromkeys(row.algorithm for row in example()))
    assert main(["report", path, "--only", names[0]]) == 0
    shown = capsys.readouterr().out.splitlines()[2]
    assert names[0] in shown
    assert not any(name in shown for name in names[1:])
    assert main(["report", path, "--only", "nothing"]) == 1
    assert f"--only: expected some of {', '.join(names)}" in capsys.readouterr().err


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


def test_a_plot_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    result = write(tmp_path / "a.json", example())
    assert main(["report", str(result), "--plot", str(tmp_path / "a.png")]) == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    empty = write(tmp_path / "b.json", [row(8, "1d", None)])
    assert main(["report", str(empty), "--plot", str(tmp_path / "b.png")]) == 1
    assert "nothing to plot" in capsys.readouterr().err


# ---------------------------------------------------------------------- floors


def on_h200s() -> dict[str, Any]:
    return {**HEAD, "provenance": {**HEAD["provenance"], "gpus": ["NVIDIA H200"] * 8}}


def test_a_floor_is_latency_or_bandwidth() -> None:
    floor = Floor(launch_us=0.8, crossing_us=1.2, gbps=350.0)
    assert floor.us(64, 8) == 2.0
    assert floor.us(100_000, 8) == 2.0  # exactly: 7 * 100 KB at 350 GB/s
    assert floor.us(1_000_000, 8) == pytest.approx(20.0)
    assert floor.us(1_000_000, 1) == 0.8


def test_tables_of_known_gpus_have_a_floor() -> None:
    lines = report.markdown(on_h200s(), example()).splitlines()
    assert [line for line in lines if line.startswith("|")] == [
        "| bytes per rank | tdcoll 1d, µs | tdcoll in-place, µs | nccl, µs | floor, µs | tdcoll's best / floor "
        "| tdcoll's best, bus GB/s | nccl / tdcoll's best |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| 1 KB | 4 | 6 | 16 | 1.8 | 2.22 | 1.79 | 4.00 |",
        "| 4 KB | 40 | 30 | 15 | 1.8 | 16.67 | 0.956 | 0.50 |",
    ]
    assert "The floor is a launch (0.8 µs) and one crossing (1 µs), or what a rank sends at 341 GB/s" in "\n".join(
        lines
    )


def test_two_ranks_have_the_rate_of_a_pair() -> None:
    rows = [dataclasses.replace(row, ranks=2) for row in example()]
    assert "or what a rank sends at 361 GB/s" in report.markdown(on_h200s(), rows)
    own = Floor(launch_us=1, crossing_us=2, gbps=99)
    assert "or what a rank sends at 99 GB/s" in report.markdown(on_h200s(), rows, own)


def test_other_tables_have_none() -> None:
    mixed = {**HEAD, "provenance": {**HEAD["provenance"], "gpus": ["NVIDIA H200", "NVIDIA H100"] * 4}}
    several = [dataclasses.replace(r, nodes=2) for r in example()]
    for head, rows in ((HEAD, example()), (mixed, example()), (on_h200s(), several)):
        assert "floor" not in report.markdown(head, rows)
    assert "floor" not in report.markdown(on_h200s(), several, Floor(1, 1, 1))


def signal_file(path: Path, **more: Any) -> Path:
    fields: dict[str, Any] = {"ranks": 8, "nodes": 1, "peer": False, "launch": "graph", "check": "ok", **more}
    rows = [
        SignalRow(**fields, algorithm=send, pattern=pattern, peer_rank=peer).timed(Summary(us, us, us))
        for send, pattern, peer, us in (
            *(
                ("signal_block", "one-way", 1, 1.9),
                ("st_release", "one-way", 1, 1.2),
                ("st_release", "one-way", 2, 1.1),
            ),
            ("st_release", "all-to-all", None, 0.5),
        )
    ]
    save(path, {**HEAD, "benchmark": "signal"}, rows)
    return path


def test_the_floor_is_given_or_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known = str(write(tmp_path / "known.json", example(), on_h200s()))
    unknown = str(write(tmp_path / "unknown.json", example()))
    signals = str(signal_file(tmp_path / "signals.json"))

    def said(*arguments: str) -> str:
        assert main(["report", *arguments]) == 0
        return capsys.readouterr().out

    # Options go before what signals say, and that before what is known of the GPUs.
    assert "a launch (0.8 µs) and one crossing (2.5 µs)" in said(known, "--floor-crossing-us", "2.5")
    assert "floor" not in said(unknown, signals)
    given = ["--floor-launch-us", "2", "--floor-GBps", "100"]
    assert "a launch (2 µs) and one crossing (1.1 µs), or what a rank sends at 100 GB/s" in said(
        unknown, signals, *given
    )
    assert "one crossing (3 µs)" in said(unknown, signals, *given, "--floor-crossing-us", "3")
    assert main(["report", unknown, *given]) == 1
    assert "of these GPUs the floor is not known" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["report", known, "--floor-GBps", "0"])
    assert "expected a number above 0" in capsys.readouterr().err


def test_the_floor_is_a_line_of_both_plots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    drawn: list[Any] = []
    real = Figure.savefig

    def savefig(self: Any, *arguments: Any, **named: Any) -> None:
        drawn.append(self)
        real(self, *arguments, **named)

    monkeypatch.setattr(Figure, "savefig", savefig)
    for head in (on_h200s(), HEAD):
        report.plot([(head, example())], tmp_path / "a.png")
    known, unknown = drawn
    for axis, expected in zip(known.axes, ([1.8, 1.8], [7 * 1.024 / 1.8, 7 * 4.096 / 1.8]), strict=True):
        (line,) = [line for line in axis.get_lines() if line.get_label() == "floor"]
        assert list(line.get_ydata()) == pytest.approx(expected)
        assert (axis.get_xscale(), axis.get_yscale()) == ("log", "log")
    labels = [line.get_label() for line in known.axes[0].get_lines()]
    assert labels == ["tdcoll 1d", "tdcoll in-place", "nccl", "floor"]
    assert [axis.get_ylabel() for axis in known.axes] == ["latency, µs", "bus bandwidth, GB/s"]
    assert not [line for axis in unknown.axes for line in axis.get_lines() if line.get_label() == "floor"]
