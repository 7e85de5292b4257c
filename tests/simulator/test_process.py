# SPDX-License-Identifier: Apache-2.0
"""One process per rank over shared memory: two processes, everything in one go, because imports take the time."""

from __future__ import annotations

import json
import os
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
    command = [sys.executable, str(HERE / "process_job.py")]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": environment}
    processes = [subprocess.Popen([*command, str(rank), str(tmp_path)], **options) for rank in range(2)]
    try:
        outputs = [process.communicate(timeout=90)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output
        assert output.rstrip().endswith("done")


class Control:
    """Two ranks in one process: rank 1 answers as rank 0 does, or maps what rank 0 has made."""

    def __init__(self, place=None):
        self.place, self.mapped = place, []

    def all_gather(self, ranks, tag, value, timeout_s=None):
        if tag != "create the symmetric heap":
            return [value, value]
        if self.place is not None:
            value = self.place
        else:
            self.path = os.readlink(value[0])
            self.mapped.append(process._share(1, ranks, 8192, Control(value)))
        return [json.loads(json.dumps(value)), None]


def test_ranks_map_the_same_bytes_of_a_file_that_no_folder_has():
    both = Control()
    mine, (other,) = process._share(0, range(2), 8192, both), both.mapped
    mine[5000] = 7
    assert other[5000] == 7
    assert len(mine) == len(other) == 8192
    assert both.path.startswith("/memfd:")


def test_another_file_of_the_same_name_is_not_mapped():
    """In another PID namespace, the path may lead to a file of an unrelated process."""
    with tempfile.TemporaryFile() as mine, tempfile.TemporaryFile() as other:
        mine.truncate(8192)
        found = os.fstat(other.fileno())
        place = [f"/proc/{os.getpid()}/fd/{mine.fileno()}", found.st_dev, found.st_ino]
        with pytest.raises(TdcollError, match=r"of one host, and some ranks could not map it: .*another file"):
            process._share(1, range(2), 8192, Control(place))
        mine.seek(0)
        assert not any(mine.read())


@pytest.mark.parametrize("rank", range(2))
def test_a_heap_without_room_is_the_same_error_on_all_ranks(rank):
    with pytest.raises(HeapExhaustedError, match=r"needs \d+ bytes of shared memory, and this host has \d+\. Lower"):
        process._share(rank, range(2), 1 << 60, Control())
