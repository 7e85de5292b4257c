# SPDX-License-Identifier: Apache-2.0
"""The checks that every rank of a job runs, with one simulated process per rank as `launch.sh`
starts them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from checks import DISTRIBUTED, WORKERS, checks_of, program_of, verdicts
from tiers import slow_tier

Launch = Callable[..., "subprocess.CompletedProcess[str]"]
NODES = ("--emulate-nodes", "2")


@pytest.mark.parametrize(
    ("names", "ranks", "nodes"),
    [
        ("copies", 2, ()),
        slow_tier(DISTRIBUTED, 2, ()),
        slow_tier(DISTRIBUTED, 3, ()),
        slow_tier("fsdp", 2, ()),
        slow_tier("drop_ins", 2, ()),
        slow_tier("dense", 4, NODES),
        slow_tier("fused", 3, NODES),
        slow_tier("operators", 3, NODES),
        slow_tier("dtensor", 2, ()),
        slow_tier("hang", 3, ()),
        slow_tier("language stores_and_waits words", 3, ()),
        slow_tier("sparse sparse_contexts", 2, ()),
        slow_tier("stall", 2, ()),
    ],
)
def test_checks(launch: Launch, names: str, ranks: int, nodes: tuple[str, ...]) -> None:
    heap = {"NVSHMEM_SYMMETRIC_SIZE": "256M"}  # for the contexts of many operators
    found = verdicts(
        launch(
            "--simulate", "--nproc", str(ranks), *nodes, *program_of(names), timeout=240, env=heap
        )
    )
    assert list(found) == checks_of(names)
    skipped = {name for name, verdict in found.items() if "skipped" in verdict}
    assert skipped == set(checks_of(names, r"\(gpu_only=True\)"))
    assert {name for name, verdict in found.items() if verdict.get("ok") is not True} == skipped


@pytest.mark.slow
@pytest.mark.parametrize(
    "names", ["dense", "drop_ins early fused operators", "sparse sparse_contexts"]
)
def test_checks_on_a_heap_without_puts(launch: Launch, names: str) -> None:
    """Every collective, on one node, where NVSHMEM's functions are refused."""
    # for the contexts of several scripts
    heap = {"TDCOLL_HEAP": "torch", "NVSHMEM_SYMMETRIC_SIZE": "256M"}
    done = launch("--simulate", "--nproc", "2", *program_of(names), env=heap)
    assert list(verdicts(done)) == checks_of(names)


def test_killed_rank_is_named(launch: Launch) -> None:
    """By torchrun, which ends the others at once."""
    done = launch("--simulate", "--nproc", "2", str(WORKERS / "killed_rank.py"), "calls", "1")
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if line.startswith("tdcoll: ")]
    assert "tdcoll: died: rank 1 (SIGKILL)" in lines
    assert not [line for line in lines if line.startswith("tdcoll: failed")]


@pytest.mark.slow
def test_killed_rank_is_named_by_the_others_and_the_job_ends(launch: Launch) -> None:
    # torchrun looks once, this long after it started the ranks: they must have started, and timed
    # out, by then.
    options = ("--nproc", "3", "--timeout", "2", "--monitor-interval", "20")
    done = launch("--simulate", *options, str(WORKERS / "killed_rank.py"), "calls", "1")
    assert done.returncode != 0
    for survivor in (0, 2):
        assert f"CollectiveTimeout: rank {survivor} waited 2 s for peer 1: signal " in done.stderr
    # Whichever of the three torchrun calls the root cause, in the end it is said who was.
    died, noticed = done.stderr.splitlines()[-2:]
    assert died == "tdcoll: died: rank 1 (SIGKILL)"
    assert noticed.startswith(
        "tdcoll: only noticed: ranks 0, 2 (CollectiveTimeout: rank 0 waited 2 s for peer 1"
    )


def test_failing_check_ends_the_job(tmp_path: Path) -> None:
    """The harness itself: a check that fails on one rank is an exit status, with its name."""
    script = tmp_path / "failing.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(WORKERS)!r})\n"
        "from harness import check, expect, run\n"
        "@check\ndef right(): pass\n"
        "@check\ndef wrong(): expect(1 == 2, 'one is not two')\n"
        "@check\ndef never_reached(): pass\n"
        "run()\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    assert [json.loads(line)["check"] for line in done.stdout.splitlines()] == ["right", "wrong"]
    assert json.loads(done.stdout.splitlines()[1])["ok"] is False
    assert "one is not two" in done.stderr
