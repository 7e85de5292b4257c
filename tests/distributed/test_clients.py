# SPDX-License-Identifier: Apache-2.0
"""Libraries that train on backend "tdcoll", where they are installed, and programs after public
reports of bugs."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from importlib.util import find_spec

import pytest
from checks import WORKERS
from processes import python

Launch = Callable[..., "subprocess.CompletedProcess[str]"]

PACKAGES = {
    "lightning": "lightning.pytorch",
    "accelerate": "accelerate",
    "deepspeed": "deepspeed",
    "torchrec": "torchrec",
    "checkpoint": "torch.distributed.checkpoint",
}


@pytest.mark.slow
@pytest.mark.parametrize("client", PACKAGES)
def test_a_client_trains_as_one_process_would(launch: Launch, client: str) -> None:
    package = PACKAGES[client]
    if find_spec(package.partition(".")[0]) is None:
        pytest.skip(f"{package} is not installed")
    imported = python("-c", f"import {package}")
    if imported.returncode != 0:
        pytest.skip(
            f"{package} cannot be imported here: {imported.stderr.strip().splitlines()[-1]}"
        )
    done = launch(
        "--simulate", "--nproc", "2", str(WORKERS / "clients_job.py"), client, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(f"{client}: done") == 2


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["2", "4"])
def test_programs_after_public_reports(launch: Launch, ranks: str) -> None:
    done = launch("--simulate", "--nproc", ranks, str(WORKERS / "reports_job.py"), timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": done") == 19 * int(ranks)
