# SPDX-License-Identifier: Apache-2.0
"""The checks that every rank of a job runs, with one simulated process per rank as `launch.sh` starts them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tiers import second

WORKERS = Path(__file__).with_name("workers")
Launch = Callable[..., "subprocess.CompletedProcess[str]"]


def checks_of(script: str, options: str = r"(?:\(.*\))?") -> list[str]:
    """Names of the checks in a worker script, in order: of all, or of those with these options."""
    text = (WORKERS / script).read_text(encoding="utf-8")
    return re.findall(rf"^@check{options}\ndef (\w+)", text, re.MULTILINE)


def verdicts(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, object]]:
    assert done.returncode == 0, done.stdout + done.stderr
    return {verdict["check"]: verdict for verdict in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize(
    ("script", "options"),
    [
        second("dense_checks.py", ("--nproc", "4", "--emulate-nodes", "2"), id="dense collectives, 2 nodes of 2"),
        second("dense_checks.py", ("--nproc", "3", "--emulate-nodes", "2"), id="dense collectives, 2 + 1"),
        pytest.param("drop_ins_checks.py", ("--nproc", "2"), id="drop-ins, 2 ranks"),
        second("early_checks.py", ("--nproc", "2"), id="early launches, 2 ranks"),
        second("fused_checks.py", ("--nproc", "3", "--emulate-nodes", "2"), id="fused, 2 + 1"),
        second("operators_checks.py", ("--nproc", "2"), id="operators, 2 ranks"),
        second("operators_checks.py", ("--nproc", "3", "--emulate-nodes", "2"), id="operators, 2 + 1"),
        second("hang_checks.py", ("--nproc", "3"), id="a late rank, 3 ranks"),
        second("language_checks.py", ("--nproc", "3"), id="language, 3 ranks"),
        second("stores_and_waits_checks.py", ("--nproc", "3"), id="stores and waits, 3 ranks"),
        second("words_checks.py", ("--nproc", "2"), id="words, 2 ranks"),
        pytest.param("copies_checks.py", ("--nproc", "2"), id="copy engines, 2 ranks"),
        second("sparse_checks.py", ("--nproc", "2"), id="sparse all-reduce, 2 ranks"),
        second("sparse_contexts_checks.py", ("--nproc", "2"), id="its contexts, 2 ranks"),
        second("stall_checks.py", ("--nproc", "2"), id="a planted stall, 2 ranks"),
    ],
)
def test_checks(launch: Launch, script: str, options: tuple[str, ...]) -> None:
    found = verdicts(launch("--simulate", *options, str(WORKERS / script)))
    assert list(found) == checks_of(script)
    skipped = {name for name, verdict in found.items() if "skipped" in verdict}
    assert skipped == set(checks_of(script, r"\(gpu_only=True\)"))
    assert {name for name, verdict in found.items() if verdict.get("ok") is not True} == skipped


@pytest.mark.parametrize(
    "script",
    [
        second("dense_checks.py"),
        second("drop_ins_checks.py"),
        second("sparse_checks.py"),
        second("sparse_contexts_checks.py"),
        second("fused_checks.py"),
        second("operators_checks.py"),
        second("early_checks.py"),
    ],
)
def test_checks_on_a_heap_without_puts(launch: Launch, script: str) -> None:
    """Every collective, on one node, where NVSHMEM's functions are refused."""
    done = launch("--simulate", "--nproc", "2", str(WORKERS / script), env={"TDCOLL_HEAP": "torch"})
    assert list(verdicts(done)) == checks_of(script)


def test_killed_rank_is_named(launch: Launch) -> None:
    """By torchrun, which ends the others at once."""
    done = launch("--simulate", "--nproc", "2", str(WORKERS / "killed_rank.py"), "calls", "1")
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if line.startswith("tdcoll: ")]
    assert "tdcoll: died: rank 1 (SIGKILL)" in lines
    assert not [line for line in lines if line.startswith("tdcoll: failed")]


@pytest.mark.slow
def test_killed_rank_is_named_by_the_others_and_the_job_ends(launch: Launch) -> None:
    # torchrun looks once, this long after it started the ranks: they must have started, and timed out, by then.
    options = ("--nproc", "3", "--timeout", "2", "--monitor-interval", "25")
    done = launch("--simulate", *options, str(WORKERS / "killed_rank.py"), "calls", "1")
    assert done.returncode != 0
    for survivor in (0, 2):
        assert f"CollectiveTimeout: rank {survivor} waited 2 s for peer 1: signal " in done.stderr
    # Whichever of the three torchrun calls the root cause, in the end it is said who was.
    died, noticed = done.stderr.splitlines()[-2:]
    assert died == "tdcoll: died: rank 1 (SIGKILL)"
    assert noticed.startswith("tdcoll: only noticed: ranks 0, 2 (CollectiveTimeout: rank 0 waited 2 s for peer 1")


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
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert [json.loads(line)["check"] for line in done.stdout.splitlines()] == ["right", "wrong"]
    assert json.loads(done.stdout.splitlines()[1])["ok"] is False
    assert "one is not two" in done.stderr
