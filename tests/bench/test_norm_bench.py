# SPDX-License-Identifier: Apache-2.0
"""The benchmark of all-reduce + residual + RMSNorm: what it runs, and that it sees a wrong result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tdcoll.tools.bench import all_reduce_rms_norm as bench

COMMON = "--algorithms auto,composed --peers tdcoll-torch,nccl"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_everything_is_checked_and_peers_say_why_not(dtype: str, rows_of: Callable[..., list[Any]]) -> None:
    rows = rows_of(bench.AllReduceNorm, f"{COMMON} --dtype {dtype}", 2, heap_bytes=1 << 24)
    ours = ("tdcoll auto", "tdcoll composed", "tdcoll-torch")
    assert {(row.facts["rows"], row.label): row.check for row in rows} == {
        **{(rows, label): "ok" for rows in (1, 3) for label in ours},
        **{(rows, "nccl"): "not run" for rows in (1, 3)},
    }
    assert {row.note for row in rows if row.check == "not run"} == {"needs GPUs"}
    assert rows[0].facts == {"rows": 1, "hidden": 64, "dtype": dtype, "took": "one_shot"}
    assert "took" not in rows[1].facts


@pytest.mark.parametrize("mistake", ["the residual", "a rank", "the weight"])
def test_a_wrong_result_is_seen(mistake: str, monkeypatch: Any, rows_of: Any) -> None:
    real = bench.all_reduce_rms_norm

    def careless(x: Any, residual: Any, weight: Any, **named: Any) -> Any:
        out, new = real(x, residual, weight, **named)
        new[-1, 5] += mistake == "the residual"
        out[-1, 5] *= 1.1 if mistake == "the weight" else 1
        return bench._norm(x, residual, weight) if mistake == "a rank" else (out, new)

    monkeypatch.setattr(bench, "all_reduce_rms_norm", careless)
    rows = rows_of(bench.AllReduceNorm, "--rows 2 --algorithms auto", 2, heap_bytes=1 << 24)
    assert [row.check for row in rows] == ["WRONG"]
