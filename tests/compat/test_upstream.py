# SPDX-License-Identifier: Apache-2.0
"""The command line of upstream.py, on a made-up copy of the repository."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import upstream

KERNELS = """
import triton
import triton.language as tl
import triton_dist
from triton_dist.language.extra.language_extra import tid
from triton_dist.language import simt_exec_region

@triton_dist.jit
def fine(out_ptr):
    if tid(0) < 4:
        tl.store(out_ptr, 1)

@triton_dist.jit
def other(out_ptr):
    tl.store(out_ptr, tid(1))

@triton_dist.jit
def refused(out_ptr):
    with simt_exec_region() as (index, size):
        tl.store(out_ptr, 1)
"""


def test_functions_resolve(tmp_path: Path) -> None:
    folder = tmp_path / "python/triton_dist/kernels/nvidia"
    folder.mkdir(parents=True)
    (folder / "kernels.py").write_text(KERNELS)
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(upstream.ROOT)}
    command = [sys.executable, upstream.__file__, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    fine, other, refused, *sums = done.stdout.splitlines()
    assert (fine, other) == ("kernels.py: fine: right", "kernels.py: other: right")
    assert refused.startswith("kernels.py: refused: simt_exec_region: ")
    assert sums[0] == "3 functions use the device libraries, 2 resolve by name"
    assert sums[1].startswith("1 name something that is not provided: ")


@pytest.mark.slow
def test_tutorials_are_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert [name for name, options, own in upstream.TUTORIALS if name.startswith("03") and not own]
    (tmp_path / "tutorials").mkdir()
    (tmp_path / "tutorials/fine.py").write_text("import sys, triton_dist\nassert sys.argv[1:] == ['-M', '4']\n")
    (tmp_path / "tutorials/wrong.py").write_text("raise SystemExit('wrong')\n")
    jobs = ("fine.py", ("--nproc", "1"), ("-M", "4")), ("wrong.py", ("--nproc", "1"), ())
    monkeypatch.setattr(upstream, "TUTORIALS", jobs)
    assert upstream.main([str(tmp_path), "--tutorials"]) == 1
    fine, wrong = capsys.readouterr().out.splitlines()
    assert fine == "fine.py: --nproc 1: right"
    assert wrong == "wrong.py: --nproc 1: tdcoll: ended: rank 0 (exit status 1)"
