# SPDX-License-Identifier: Apache-2.0
"""One process per rank over shared memory: two processes, everything in one go, because imports take the time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tdcoll.errors import HeapExhaustedError, TdcollError
from tdcoll.runtime.simulator import process

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


# ---------------------------------------------------------------------- what a death in between leaves


DIES = """
import os, signal, sys
from tdcoll.runtime.simulator import process

class Control:
    def all_gather(self, ranks, tag, value, timeout_s=None):
        if tag == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGKILL)
        return [value] * len(ranks)

process._share(0, range(2), 1 << 16, Control())
"""


@pytest.mark.parametrize(
    ("tag", "folder"), [("create the symmetric heap", "shared memory"), ("map the symmetric heap", "temporary")]
)
def test_a_rank_that_is_killed_while_the_heap_is_made_leaves_no_file(tmp_path, tag, folder):
    unless_shared = "" if folder == "shared memory" else "process._SHARED_MEMORY = '/nowhere'\n"
    script = DIES.replace("class Control", unless_shared + "class Control")
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    before = set(Path("/dev/shm").glob("tdcoll-heap-*"))
    ended = subprocess.run([sys.executable, "-c", script, tag], env=environment, timeout=60)
    assert ended.returncode == -signal.SIGKILL
    assert set(Path("/dev/shm").glob("tdcoll-heap-*")) <= before
    assert list(tmp_path.iterdir()) == []


class Control:
    """Two ranks in one process: rank 1 answers as rank 0 does, unless ``told`` replaces rank 0's answer."""

    def __init__(self, told=None):
        self.told = told

    def all_gather(self, ranks, tag, value, timeout_s=None):
        first = self.told if self.told is not None and tag == "create the symmetric heap" else value
        return [json.loads(json.dumps(first)), value]


def test_ranks_map_the_same_bytes():
    maps = []

    class Both(Control):
        def all_gather(self, ranks, tag, value, timeout_s=None):
            if tag == "create the symmetric heap" and not maps:
                maps.append(None)
                maps[0] = process._share(1, range(2), 8192, Control(value))
            return [value, value]

    mine = process._share(0, range(2), 8192, Both())
    mine[5000] = 7
    assert maps[0][5000] == 7
    assert len(mine) == len(maps[0]) == 8192


def test_another_file_of_the_same_name_is_not_mapped():
    """In another PID namespace, the path may lead to a file of an unrelated process."""
    with tempfile.TemporaryFile() as mine, tempfile.TemporaryFile() as other:
        mine.truncate(8192)
        found = os.fstat(other.fileno())
        place = [f"/proc/{os.getpid()}/fd/{mine.fileno()}", found.st_dev, found.st_ino]
        with pytest.raises(
            TdcollError, match=r"shared memory of one host, and some ranks could not map it: .*another file"
        ):
            process._share(1, range(2), 8192, Control(place))
        mine.seek(0)
        assert not any(mine.read())


def test_a_heap_without_room_is_the_same_error_on_all_ranks():
    for rank in range(2):
        with pytest.raises(
            HeapExhaustedError, match=r"needs \d+ bytes of shared memory, and this host has \d+\. Lower"
        ):
            process._share(rank, range(2), 1 << 60, Control())
