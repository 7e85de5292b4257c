# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501 (a table has a case per line)
"""The small job: its ranks, in a World, and the line about how it ended."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

import tdcoll
from tdcoll.base.child import Ended
from tdcoll.testing import World, explore, first_failure
from tdcoll.tools.doctor import job
from tests.doctor.healthy import GPUS, MISSING, SIMULATOR, found
from tests.doctor.test_facts import ROOT, SHELL, gone


def case(world: World) -> None:
    reports = []
    world.run(lambda pe: reports.append(job.run(30.0)))
    right = "1d and by auto is right" if world.memory.puts else "auto is right; PyTorch's memory has no puts to test"
    assert len(reports) == world.n_pes
    assert all(report.startswith(f"{world.n_pes} simulated ranks, ") and report.endswith(right) for report in reports)


def test_every_rank_is_content_over_seeds():
    for n_pes, seeds in ((1, 1), (2, 4), (3, 6)):
        explore(case, n_pes=n_pes, seeds=seeds)
    explore(case, n_pes=4, seeds=3, ranks_per_node=2)
    case(World(2, puts=False))


@pytest.mark.parametrize("algorithm", ["1d", "auto"])
def test_wrong_data_is_seen(monkeypatch, algorithm):
    right = tdcoll.all_gather

    def wrong(source, **options):
        got = right(source, **options)
        got[-2:] += options["algorithm"] == algorithm
        return got

    monkeypatch.setattr(tdcoll, "all_gather", wrong)
    failure = first_failure(case, n_pes=2, seeds=1)
    assert failure is not None
    assert f"all_gather by {algorithm}: 2 words from rank 1 are wrong" in str(failure.error)


def lines(*said: dict) -> str:
    return "".join(f"{job._MARK}{json.dumps(line)}\n" for line in said)


JOINING = lines({"rank": 0, "stage": "tdcoll.initialize"}, {"rank": 1, "stage": "tdcoll.initialize"})
RAISED = lines({"rank": 1, "error": "CollectiveTimeout: rank 1 waited"}, {"rank": 0, "error": "later"})
WELL = "noise" + lines({"rank": 1, "stage": "x"}, {"rank": 0, "result": "2 ranks: right"})


@pytest.mark.parametrize(
    ("ended", "status", "text", "advice"),
    [
        (Ended(WELL), "ok", "2 ranks: right", ""),
        (Ended(WELL, "exit status 1"), "problem", "exit status 1; last in x: rank 1", "docs/errors.md"),
        (Ended(""), "problem", "no rank reported a result; no rank had begun", "docs/errors.md"),
        (Ended(JOINING, "it did not end within 9 s"), "problem", "it did not end within 9 s; last in tdcoll.initialize: rank 0, 1", "NVSHMEM_DEBUG=INFO"),
        (Ended(JOINING + RAISED, "exit status 1"), "problem", "exit status 1; last in tdcoll.initialize: rank 0, 1; first error: rank 1: CollectiveTimeout: rank 1 waited", "NVSHMEM_DEBUG"),
        (Ended(JOINING + RAISED + "tdcoll: died: rank 0 (SIGKILL)\n", "exit status 1"), "problem", "rank 0, 1; died: rank 0 (SIGKILL); first error: rank 1: Coll", ""),
        (Ended("Traceback (most recent call last):\n  File error.py\nImportError: cannot\nValueError: 2\n", "exit status 1"), "problem", "no rank had begun; first error: ImportError: cannot", ""),
        (Ended(JOINING + "start\ninit.cu:41: non-zero status: 7\nmore\n", "exit status 1"), "problem", "first error: init.cu:41: non-zero status: 7", ""),
    ],
)  # fmt: skip
def test_how_a_job_ended(ended, status, text, advice):
    line = job.judge(GPUS, ended)
    assert (line.status, line.name, text in line.text, advice in line.advice) == (status, "small job", True, True), line
    assert "NVSHMEM" not in job.judge(SIMULATOR, ended).advice


def test_a_job_that_cannot_run_is_not_started():
    assert job.cannot_run(SIMULATOR) == job.cannot_run(GPUS) == ""
    broken = replace(SIMULATOR, **found(SIMULATOR, torch={"error": "x"}, greenlet=MISSING))
    assert job.cannot_run(broken) == "torch, greenlet cannot be imported"
    assert job.cannot_run(replace(GPUS, **found(GPUS, greenlet=MISSING))) == ""
    assert job.cannot_run(replace(GPUS, **found(GPUS, gpus={"error": "it hangs"}))) == "PyTorch sees no GPU"


@pytest.mark.slow
def test_a_job_that_hangs_is_killed_with_its_ranks(tmp_path):
    """Ranks that ignore SIGTERM, and are in sessions of their own."""
    (tmp_path / "hangs.py").write_text(
        "import os, signal, time\nfrom tdcoll.tools.doctor import job\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "job._say(stage=f'process {os.getpid()}')\ntime.sleep(200)\n"
    )
    shell = {**SHELL, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    ended = job.start(replace(SIMULATOR, launched=shell), 25, "hangs")
    assert job.judge(SIMULATOR, ended).text.startswith("it did not end within 25 s; last in process ")
    ranks = [int(pid) for pid in re.findall(r"process (\d+)", ended.output)]
    assert (len(ranks), all(gone(rank) for rank in ranks)) == (2, True)


def test_how_a_job_is_started(monkeypatch):
    """On a free port, since doctors may run beside each other."""
    monkeypatch.setattr(job.child, "run", lambda *arguments: arguments)
    command, timeout_s, shell = job.start(replace(SIMULATOR, launched={"X": "y"}), 9.0)
    assert "--nproc-per-node 2 --nnodes 1 --rdzv-backend c10d --rdzv-endpoint localhost:0 " in " ".join(command)
    assert (timeout_s, shell) == (9.0, {"X": "y"})
