# SPDX-License-Identifier: Apache-2.0
"""One process per rank over shared memory: two processes, everything in one go, because imports take the time."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tdcoll.base.errors import HeapExhaustedError, TdcollError
from tdcoll.simulator import process

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
    """Both ranks answer the same, and rank 0 has made the file at ``place``."""

    def __init__(self, place=None):
        self.place = place

    def all_gather(self, ranks, tag, value, timeout_s=None):
        return [self.place if tag == "create the symmetric heap" else value] * 2


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
