# SPDX-License-Identifier: Apache-2.0
"""What type checkers and editors see of the device language."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tdcoll.spec.functions import stubs

ROOT = Path(__file__).resolve().parents[2]
STUB = ROOT / "tdcoll/language/__init__.pyi"

KERNEL = """
from typing import Any

import tdcoll
import tdcoll.language as tdl
import triton.language as tl


@tdcoll.jit
def exchange(box: Any, flag: Any, nbytes: int, call: int, monitor: tdcoll.WaitMonitor, BLOCK: tl.constexpr) -> None:
    peer = (tdl.my_pe() + 1) % tdl.n_pes()
    tdl.putmem_signal_block(box, box, nbytes, flag, call, tdl.SIGNAL_SET, peer)
    if tdl.wait_signal(flag, tdl.CMP_GE, call, monitor) != 0:
        there = tdl.remote_ptr(box, peer)
        tl.store(there + tl.arange(0, BLOCK), tdl.ld_acquire(box, "sys"))
    tdl.st_release(flag, call, scope="sys")
    tdl.wait_signal(flag, compare=tdl.CMP_GE, value=call, monitor=monitor, peer=peer, index=2)
"""

WRONG = {
    "tdl.wait_signal(flag, tdl.CMP_GE, call)": 'Missing positional argument "monitor" in call to "wait_signal"',
    "tdl.putmem_signal_blok()": 'Module has no attribute "putmem_signal_blok"',
    'tdl.st_release(flag, call, scope="cta")': 'Argument "scope" to "st_release" has incompatible type',
    "tdl.wait_signal(flag, tdl.CMP_GE, call, monitor, pier=1)": 'Unexpected keyword argument "pier"',
}


def test_the_stubs_are_current() -> None:
    assert STUB.read_text(encoding="utf-8") == stubs(), f"run python -m tdcoll.language --stubs > {STUB.name}"
    done = subprocess.run(
        [sys.executable, "-m", "tdcoll.language", "--stubs"],
        capture_output=True, text=True, timeout=120, cwd=ROOT, check=True,
    )  # fmt: skip
    assert done.stdout == stubs()


def test_a_kernel_is_checked(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "kernel.py").write_text(KERNEL, encoding="utf-8")
    for place, call in enumerate(WRONG):
        (tmp_path / f"wrong_{place}.py").write_text(f"{KERNEL}    {call}\n", encoding="utf-8")
    done = subprocess.run(
        [
            sys.executable, "-m", "mypy", "--config-file=", "--follow-imports=skip", "--ignore-missing-imports",
            "--disallow-untyped-defs", "--check-untyped-defs", f"--cache-dir={tmp_path / 'cache'}", str(STUB),
            *map(str, sorted(tmp_path.glob("*.py"))),
        ],
        capture_output=True, text=True, timeout=240, cwd=ROOT, check=False,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if ": error: " in line]
    found = {Path(line.split(":")[0]).name: line for line in lines}
    assert len(lines) == len(found), done.stdout + done.stderr
    for place, text in enumerate(WRONG.values()):
        assert text in found.pop(f"wrong_{place}.py"), done.stdout
    assert found == {}, done.stdout
