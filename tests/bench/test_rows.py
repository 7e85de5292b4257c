# SPDX-License-Identifier: Apache-2.0
"""Files of results: those that were written before rows had a skew and an operation are still read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tdcoll.bench.arithmetic import summarize
from tdcoll.bench.rows import KINDS, Row, load, save

HEAD = {"benchmark": "all_gather", "command": "x", "started": "2031-02-03", "provenance": {}}


def test_older_files_are_read(tmp_path: Path) -> None:
    row = Row(
        ranks=2, nodes=1, algorithm="ll", peer=False, launch="graph", check="ok", bytes_per_rank=1024, dtype="uint8"
    ).timed(summarize([[3.0, 4.0], [5.0, 4.0]]))
    assert (row.median_us, row.skew_us) == (4.5, 1.0)
    save(tmp_path / "new.json", HEAD, [row])
    assert load(tmp_path / "new.json") == ({"schema": 1, **HEAD}, [row])
    document = json.loads((tmp_path / "new.json").read_text())
    for name in ("skew_us", "operation", "dtype", "op"):
        del document["rows"][0][name]
    (tmp_path / "old.json").write_text(json.dumps(document))
    (older,) = load(tmp_path / "old.json")[1]
    assert (older.median_us, older.skew_us, older.operation, older.dtype) == (4.5, None, "all_gather", None)


def test_other_files_are_refused(tmp_path: Path) -> None:
    for change in ({"schema": 2}, {"benchmark": "all_scatter"}, {"rows": [{}]}):
        (tmp_path / "r.json").write_text(json.dumps({"schema": 1, **HEAD, "rows": [], **change}))
        with pytest.raises(ValueError, match=r"r\.json is not a result of tdcoll\.bench"):
            load(tmp_path / "r.json")
    dense = {"all_gather", "all_reduce", "all_reduce_rms_norm", "reduce_scatter"}
    assert set(KINDS) == dense | {"tune", "sparse_all_reduce", "signal"}
