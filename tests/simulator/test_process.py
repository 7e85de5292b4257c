# SPDX-License-Identifier: Apache-2.0
"""One process per rank over shared memory: two processes, everything in one go, because imports take the time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def test_two_processes(tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent.parent), *sys.path])}
    before = {path.name for path in Path("/dev/shm").glob("tdcoll-heap-*")}
    processes = [
        subprocess.Popen(
            [sys.executable, str(HERE / "process_job.py"), str(rank), str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=90)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output
        assert output.rstrip().endswith("done")
    assert {path.name for path in Path("/dev/shm").glob("tdcoll-heap-*")} <= before, "the segment was not removed"

    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    launches = [event for event in events if event["name"] == "gather" and event["ph"] == "X"]
    assert sorted(event["pid"] for event in launches) == [0, 0, 1, 1]
    assert all(event["dur"] > 0 for event in launches)
