# SPDX-License-Identifier: Apache-2.0
"""The benchmark of all-reduce + residual + RMSNorm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import all_reduce_rms_norm as norms
from benchmarks.all_reduce_rms_norm import NormBenchmark

HEAP_BYTES = 1 << 24


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_everything_is_checked_and_baselines_say_why_not(
    dtype: str, rows_of: Callable[..., list[Any]]
) -> None:
    options = f"--algorithms auto,composed --peers tdcoll-torch,nccl --dtype {dtype}"
    rows = rows_of(NormBenchmark, options, 2, heap_bytes=HEAP_BYTES)
    checks = {
        "auto": "ok",
        "composed": "ok",
        "tdcoll-torch": "ok",
        "nccl": "not run",
    }
    for count in (1, 3):
        of_size = [row for row in rows if row.facts["rows"] == count]
        assert {row.algorithm: row.check for row in of_size} == checks
    assert {row.note for row in rows if row.check == "not run"} == {"needs GPUs"}
    assert rows[0].facts == {"rows": 1, "hidden": 64, "dtype": dtype, "took": "one_shot"}
    assert "took" not in rows[1].facts


@pytest.mark.parametrize("mistake", ["the residual", "a rank", "the weight"])
def test_a_wrong_result_is_seen(
    mistake: str, monkeypatch: pytest.MonkeyPatch, rows_of: Callable[..., list[Any]]
) -> None:
    real = norms.all_reduce_rms_norm

    def careless(x: Any, residual: Any, weight: Any, **named: Any) -> Any:
        out, new = real(x, residual, weight, **named)
        if mistake == "the residual":
            new[-1, 5] += 1
        if mistake == "the weight":
            out[-1, 5] *= 1.1
        if mistake == "a rank":
            return norms._norm(x, residual, weight)
        return out, new

    monkeypatch.setattr(norms, "all_reduce_rms_norm", careless)
    options = "--rows 2 --algorithms auto"
    rows = rows_of(NormBenchmark, options, 2, heap_bytes=HEAP_BYTES)
    assert [row.check for row in rows] == ["WRONG"]
