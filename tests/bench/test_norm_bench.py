# SPDX-License-Identifier: Apache-2.0
"""The benchmark of all-reduce + residual + RMSNorm: what it runs, what it refuses, and that it sees a wrong result."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch
from test_report import HEAD

from tdcoll.bench import all_reduce_rms_norm as bench
from tdcoll.bench import report
from tdcoll.bench.engine import Subject
from tdcoll.bench.rows import load, save
from tdcoll.collectives.all_reduce import all_reduce
from tdcoll.testing import World


def options(*arguments: str) -> argparse.Namespace:
    return bench.AllReduceNorm.parse(
        ["--algorithms", "auto,composed", "--peers", "tdcoll-torch,trtllm-one-shot", *arguments]
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_everything_is_checked_and_peers_say_why_not(dtype: str) -> None:
    found = []

    def host(pe: int) -> None:
        found.extend(bench.AllReduceNorm(options("--dtype", dtype)).measure(lambda row: None))

    World(2, heap_bytes=1 << 24).run(host)
    checks = {(row.rows, row.label): row.check for row in found}
    ours = ("tdcoll auto", "tdcoll composed", "tdcoll-torch")
    assert checks == {
        **{(rows, label): "ok" for rows in (1, 3) for label in ours},
        **{(rows, "trtllm-one-shot"): "not run" for rows in (1, 3)},
    }
    assert {row.note for row in found if row.check == "not run"} == {"needs GPUs"}


def test_a_wrong_result_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(self: bench.AllReduceNorm, algorithm: str, data: bench._Data, context: object) -> Subject:
        def call(i: int) -> tuple[torch.Tensor, torch.Tensor]:
            total = all_reduce(data.x[i], context).clone()  # type: ignore[arg-type]
            total[0, 5] += 1
            return bench._norm(total, data.residual, data.weight)

        return data.subject(call)

    monkeypatch.setattr(bench.AllReduceNorm, "_ours", lost)
    found = []
    World(2, heap_bytes=1 << 24).run(
        lambda pe: found.extend(bench.AllReduceNorm(options("--rows", "2")).measure(lambda row: None))
    )
    assert {row.check for row in found if not row.peer} == {"WRONG"}


def test_its_file_is_reported(tmp_path: Path) -> None:
    file, row = tmp_path / "norm.json", {"ranks": 2, "nodes": 1, "launch": "graph", "check": "ok", "calls": (20, 21)}
    rows = [
        bench.NormRow(**row, algorithm=name, peer=peer, rows=8, hidden=8192, dtype="bfloat16", median_us=us)
        for name, peer, us in (("auto", False, 4.5), ("nccl", True, 18.25))
    ]
    head = {
        "benchmark": "all_reduce_rms_norm",
        "command": "x",
        "started": "2026-11-23",
        "provenance": HEAD["provenance"],
    }
    save(file, head, rows)
    assert load(file)[1] == rows
    text = report.markdown(*load(file))
    assert "18.2" in text
    assert "rows of 8,192 bfloat16" in text


@pytest.mark.parametrize(
    "wrong", [("--hidden", "33000"), ("--hidden", "12"), ("--rows", "0"), ("--algorithms", "ring")]
)
def test_options_that_do_not_fit(wrong: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        options(*wrong)
    assert ended.value.code == 2
    assert wrong[0] in capsys.readouterr().err
