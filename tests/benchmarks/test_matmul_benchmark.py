# SPDX-License-Identifier: Apache-2.0
"""The benchmark of matmuls that communicate."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import matmul
from benchmarks.matmul import MatmulBenchmark

HEAP_BYTES = 1 << 26


def test_everything_is_checked_and_baselines_say_why_not(rows_of: Callable[..., list[Any]]) -> None:
    options = "--algorithms auto,fused,one_shot,composed --peers cublas-alone,nccl,torch-fused --shapes 36x48x32"
    rows = rows_of(MatmulBenchmark, options, 2, heap_bytes=HEAP_BYTES)
    for operation in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"):
        checks = {row.algorithm: row.check for row in rows if row.facts["operation"] == operation}
        kernel = "one_shot" if operation == "matmul_all_reduce" else "fused"
        ours = dict.fromkeys(["auto", kernel, "composed", "cublas-alone"], "ok")
        assert checks == {**ours, "nccl": "not run", "torch-fused": "not run"}
    assert rows[0].facts["took"] == "composed"


def test_copies_are_checked_from_a_tile_of_rows_on(rows_of: Callable[..., list[Any]]) -> None:
    options = (
        "--operations all_gather_matmul --algorithms copied --peers= --shapes 128x32x16,64x32x16"
    )
    rows = rows_of(MatmulBenchmark, options, 2, heap_bytes=HEAP_BYTES)
    assert [(row.facts["rows"], row.check) for row in rows] == [(128, "ok"), (64, "not run")]
    assert "needs at least 64 rows of each rank; got 32" in rows[1].note


def reasons(rows: list[Any]) -> list[str]:
    assert [row.check for row in rows] == ["not run"] * len(rows)
    return [row.note for row in rows]


def test_flashinfer_says_why_it_cannot_run(rows_of: Callable[..., list[Any]]) -> None:
    options = "--algorithms= --peers flashinfer --shapes 8x32x16"
    gather, scatter, reduce = reasons(rows_of(MatmulBenchmark, options, 2, heap_bytes=HEAP_BYTES))
    assert "flashinfer isn't installed" in gather
    assert "flashinfer has only the all-gather + matmul" in scatter
    assert "flashinfer has only the all-gather + matmul" in reduce


def test_flashinfer_gets_symmetric_rows_and_the_weight_by_depth(
    monkeypatch: pytest.MonkeyPatch, rows_of: Callable[..., list[Any]]
) -> None:
    """A module in its place, because its own needs GPUs."""
    symmetric = set()

    def empty(*shape: int, **named: Any) -> Any:
        made = matmul.torch.empty(*shape, **named)
        symmetric.add(made.data_ptr())
        return made

    def all_gather_matmul(x: Any, weight: Any, group: Any) -> Any:
        assert x.data_ptr() in symmetric
        assert weight.is_contiguous()
        assert weight.shape == (32, 16)
        return matmul.tdcoll.all_gather(x) @ weight

    modules = {
        "flashinfer.comm": SimpleNamespace(all_gather_matmul=all_gather_matmul),
        "torch.distributed._symmetric_memory": SimpleNamespace(empty=empty),
    }
    monkeypatch.setattr(matmul, "require_nccl", lambda device: None)
    monkeypatch.setattr(matmul.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(matmul.importlib, "import_module", modules.__getitem__)
    options = "--operations all_gather_matmul --algorithms= --peers flashinfer --shapes 8x32x16"
    rows = rows_of(MatmulBenchmark, options, 2, heap_bytes=HEAP_BYTES)
    assert [row.check for row in rows] == ["ok"]


@pytest.mark.parametrize("mistake", ["an element", "a rank"])
def test_a_wrong_result_is_seen(
    mistake: str, monkeypatch: pytest.MonkeyPatch, rows_of: Callable[..., list[Any]]
) -> None:
    def careless(x: Any, weight: Any, **named: Any) -> Any:
        if mistake == "a rank":
            return x @ weight.t()
        return real(x, weight, **named).index_fill_(0, matmul.torch.tensor(0), 0)

    real = matmul.fused.matmul_all_reduce
    monkeypatch.setattr(matmul.fused, "matmul_all_reduce", careless)
    options = "--operations matmul_all_reduce --shapes 8x32x16 --peers="
    rows = rows_of(MatmulBenchmark, options, 2, heap_bytes=HEAP_BYTES)
    assert [row.check for row in rows] == ["WRONG"]


def test_the_share_of_hidden_communication(
    monkeypatch: pytest.MonkeyPatch, rows_of: Callable[..., list[Any]]
) -> None:
    times = {"auto": 60.0, "cublas-alone": 50.0, "nccl-alone": 40.0}
    measure_size = matmul.Benchmark.measure_size

    def timed(self: Any, size: Any, line_up: Any) -> list[Any]:
        rows = measure_size(self, size, line_up)
        for row in rows:
            row.median_us = times[row.algorithm]
        return rows

    monkeypatch.setattr(matmul.Benchmark, "measure_size", timed)
    options = "--operations all_gather_matmul --shapes 8x32x16 --peers cublas-alone,nccl-alone"
    rows = rows_of(MatmulBenchmark, options, 1, heap_bytes=HEAP_BYTES)
    assert rows[0].facts["hidden"] == 0.75
    assert "hidden" not in rows[1].facts
