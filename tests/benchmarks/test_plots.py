# SPDX-License-Identifier: Apache-2.0
"""Pictures from synthetic results."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from results import H200, blocks_example, example, head, peer, row, row_of, sparse_example

from benchmarks import plots, tables
from benchmarks.backend_calls import beside_rows

pytest.importorskip("matplotlib")


def data_of(line: Any) -> list[list[float]]:
    """Return a curve's places and values."""
    return [list(values) for values in line.get_data()]


def test_a_picture_has_a_panel_for_each_launch_and_no_colour_twice() -> None:
    baselines = [f"peer {k}" for k in range(5)]
    rows = []
    for size in (1024, 4096):
        rows += [row(size, "auto", 4.0), row(size, "in-place", 5.0), row(size, "1d", 6.0)]
        rows += [peer(size, name, 7.0) for name in baselines]
    rows += [dataclasses.replace(row, launch="eager") for row in rows]
    figure = plots.draw(head(gpu=H200), rows)
    assert [axis.get_title() for axis in figure.axes] == ["CUDA graphs", "eager calls"]
    for axis in figure.axes:
        lines = {line.get_label(): line for line in axis.get_lines()}
        assert list(lines) == ["tdcoll", "tdcoll in place", *baselines, "floor"]
        colours = {line.get_color() for line in lines.values()}
        assert len(colours) == len(lines) == plots.MAX_CURVES
        assert data_of(lines["tdcoll"]) == [[1024, 4096], [4.0, 4.0]]
        assert data_of(lines["floor"]) == [[1024, 4096], [1.8, 1.8]]
        assert (axis.get_xscale(), axis.get_yscale(), axis.get_legend()) == ("log", "log", None)
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == list(lines)
    figure.canvas.draw()
    box = legend.get_window_extent()
    assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1, "it fits on the picture"


def test_curves_of_other_pictures() -> None:
    lines = plots.draw(head(), example()).axes[0].get_lines()
    assert [line.get_label() for line in lines] == ["tdcoll", "tdcoll in place", "NCCL"]
    axis = plots.draw(head("sparse_all_reduce"), sparse_example()).axes[0]
    assert axis.get_title() == "uniform, rows of 512, eager calls"
    labels = [line.get_label() for line in axis.get_lines()]
    assert labels == ["tdcoll", "published", "allgather", "floor"]


def test_a_picture_has_at_most_8_curves() -> None:
    names = ["nccl", "vllm", *(str(k) for k in range(8))]
    rows = [row(1024, "auto", 2.0), *(peer(1024, name, 2.0) for name in names)]
    lines = plots.draw(head("all_reduce"), rows).axes[0].get_lines()
    assert [line.get_label() for line in lines] == ["tdcoll", "NCCL", "vLLM"]
    facts = {"rows": 8, "hidden": 64, "dtype": "x"}
    norms = [dataclasses.replace(row, facts=facts) for row in rows]
    message = (
        r"expected at most 8 curves, the floor included, got tdcoll auto, nccl, vllm, 0, .*--only"
    )
    with pytest.raises(ValueError, match=message):
        plots.draw(head("all_reduce_rms_norm"), norms)


def test_results_by_thread_blocks_are_drawn_over_multiprocessors() -> None:
    first, second, *others = plots.draw(head(), blocks_example()).axes
    assert ([first.get_title(), second.get_title()], others) == (["1 KB", "4 KB"], [])
    lines = {line.get_label(): line for line in first.get_lines()}
    assert data_of(lines.pop("NCCL"))[1] == [6.0, 6.0]  # on all of the axis
    assert {name: data_of(line) for name, line in lines.items()} == {
        "tdcoll loop": [[8, 16], [10.0, 5.0]],
        "tdcoll ce": [[1], [9.0]],
        "tdcoll": [[128], [3.0]],
    }
    points = {name for name, line in lines.items() if line.get_linestyle() == "None"}
    assert points == {"tdcoll ce", "tdcoll"}
    assert first.get_ylim() == (0, 11.0)


def test_results_by_thread_blocks_over_sizes_and_in_a_table() -> None:
    (axis,) = plots.draw(head(), blocks_example(), only=["loop 8 blocks"]).axes
    assert data_of(axis.get_lines()[0]) == [[1024, 4096], [10.0, 20.0]]
    text = " ".join(tables.markdown(head(), blocks_example()).split())
    assert "| calls | 1 KB | SMs | 4 KB | SMs |" in text
    assert "| tdcoll loop 8 blocks | 10.0 | 8 | 20.0 | 8 |" in text
    assert "| NCCL | 6.00 | | – | |" in text


def test_matmuls_are_bars_relative_to_the_matmul_alone() -> None:
    def timed(algorithm: str, us: float | None, rows: int, call: str, **more: Any) -> Any:
        facts = {"operation": call, "rows": rows, "depth": 64, "columns": 32, "dtype": "bfloat16"}
        return row_of(algorithm, us, facts, **more)

    rows = [
        timed("cublas-alone", 10.0, 128, "all_gather_matmul", peer=True),
        timed("auto", 15.0, 128, "all_gather_matmul"),
        timed("fused", 11.0, 128, "all_gather_matmul"),
        timed("nccl", 30.0, 128, "all_gather_matmul", peer=True),
        timed("auto", 99.0, 128, "all_gather_matmul", launch="eager"),
        timed("cublas-alone", 20.0, 1024, "all_gather_matmul", peer=True),
        timed("auto", 25.0, 1024, "all_gather_matmul"),
        timed("nccl", None, 1024, "all_gather_matmul", peer=True, check="failed"),
        timed("cublas-alone", 7.0, 8, "matmul_all_reduce", peer=True),
        timed("auto", 21.0, 8, "matmul_all_reduce"),
        timed("auto", 21.0, 16, "matmul_all_reduce"),  # without the matmul alone
    ]
    gather, reduce = plots.draw(head("matmul", H200), rows).axes
    assert (gather.get_title(), reduce.get_title()) == ("all_gather_matmul", "matmul_all_reduce")
    heights = {bars.get_label(): [bar.get_height() for bar in bars] for bars in gather.containers}
    assert heights == {"tdcoll": [1.5, 1.25], "cuBLAS and NCCL in a row": [3.0]}
    assert [[bar.get_height() for bar in bars] for bars in reduce.containers] == [[3.0]]
    ticks = [label.get_text() for label in gather.get_xticklabels()]
    assert ticks == [
        "128 rows\n64 deep\n32 columns\n10 µs",
        "1,024 rows\n64 deep\n32 columns\n20 µs",
    ]
    with pytest.raises(ValueError, match="nothing to plot: expected rows of cublas-alone"):
        plots.draw(head("matmul", H200), rows[1:3])


def test_matmuls_beside_all_gathers_show_what_each_round_added() -> None:
    us = {
        "alone": [100.0, 300.0, 200.0],
        "nccl": [150.0, 320.0, 240.0],
        "ce in place": [90.0, 300.0, 205.0],
    }
    rows = beside_rows({"kind": "4 all-gathers", "nbytes": 1 << 24, "us": us}, 2)
    (axis,) = plots.draw(head("beside", H200), rows).axes
    labels = [label.get_text() for label in axis.get_xticklabels()]
    assert labels == ["NCCL", "tdcoll ce in place"]
    values = [list(line.get_ydata()) for line in axis.get_lines()]
    assert values[:4] == [[50, 20, 40], [40, 40], [-10, 0, 5], [0, 0]]
    assert "lower is better" in axis.get_ylabel()
