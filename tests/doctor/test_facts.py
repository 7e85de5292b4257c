# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501 (a table has a case per line)
"""Children end, one that dies loses only what it hadn't yet said, and the environment is that of setenv.sh."""

from __future__ import annotations

import os
import select
from pathlib import Path

import pytest

from tdcoll.base.child import run
from tdcoll.tools.doctor import facts

ROOT = Path(__file__).resolve().parents[2]
SHELL = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}


def gone(pid: int) -> bool:
    """Whether a process ends within seconds."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    with os.fdopen(process):
        return select.select([process], [], [], 5)[0] == [process]


@pytest.mark.parametrize(
    ("command", "output", "reason"),
    [
        (["bash", "-c", "echo $X; echo b >&2"], "y\n", ""),
        (["bash", "-c", "exit 3"], "", "exit status 3"),
        (["bash", "-c", "kill -SEGV $$"], "", "signal SIGSEGV ended it"),
        (["bash", "-c", "setsid sleep 8 & echo a"], "a\n", ""),  # which holds the output
        (["no-such-program"], "", "cannot be started: [Errno 2] No such file or directory: 'no-such-program'"),
    ],
)
def test_how_commands_end(command, output, reason):
    assert run(command, 6, {**SHELL, "X": "y"}, with_stderr=False) == (output, reason)


def test_a_command_that_hangs_is_killed_with_its_children():
    ended = run(["bash", "-c", "trap '' TERM; sleep 60 & echo $! >&2; wait; sleep 60"], 0.7, SHELL)
    assert ended.reason == "it did not end within 0.7 s"
    assert gone(int(ended.output))  # its output, that on stderr as well, is not lost


TWO_GPUS = """
import types
card = types.SimpleNamespace(name="H200", major=9, minor=0)
cuda = types.SimpleNamespace(is_available=lambda: True, device_count=lambda: 2, get_device_properties=lambda i: card,
                             can_device_access_peer=lambda i, j: i < j)
"""
H200 = {"name": "H200", "capability": [9, 0]}


@pytest.mark.parametrize(
    ("step", "module", "source", "found"),
    [
        ("greenlet", "x", "", {"error": "ModuleNotFoundError: No module named 'greenlet'", "missing": True}),
        ("numpy", "numpy", "import torch", {"error": "ModuleNotFoundError: No module named 'torch'", "missing": False}),
        ("numpy", "numpy", "raise OSError('libblas.so: no such file\\nand more')", {"error": "OSError: libblas.so: no such file", "missing": False}),
        ("numpy", "numpy", "print('{noise}'); __version__ = '2.0'", {"version": "2.0"}),
        ("triton", "triton", "__version__ = '3.4'", {"version": "3.4", "error": "ModuleNotFoundError: No module named 'triton._C'; 'triton' is not a package", "missing": False}),
        ("numpy", "numpy", "import os; os.kill(os.getpid(), 11)", {"error": "signal SIGSEGV ended it"}),
        ("numpy", "numpy", "import os; os._exit(0)", {"error": "it ended without a word"}),
        ("gpus", "torch", TWO_GPUS, {"gpus": [H200, H200], "no_peer_access": [[1, 0]]}),
        ("numpy", "numpy", "import time; time.sleep(60)", {"error": "it did not end within 4 s"}),
    ],
)  # fmt: skip
def test_a_child_says_what_it_finds(monkeypatch, tmp_path, step, module, source, found):
    (tmp_path / f"{module}.py").write_text(source)

    def run_without_packages(command, *rest, **options):
        return run([command[0], "-S", *command[1:]], *rest, **options)

    monkeypatch.setattr(facts, "_TIMEOUT_S", 4 if "sleep" in source else 60)
    monkeypatch.setattr(facts, "run", run_without_packages)
    assert facts._probed(step, {**SHELL, "PYTHONPATH": f"{tmp_path}:{ROOT}"}) == found


def test_ranks_have_the_environment_of_setenv(monkeypatch):
    """And a value of the user's wins."""
    monkeypatch.setattr(facts, "_probed", lambda step, environment: {})
    found = facts.collect({**SHELL, "TRITON_INTERPRET": "0", "NVSHMEM_DISABLE_NVLS": "0"}, 2)
    assert (found.simulated, found.launched["NVSHMEM_DISABLE_NVLS"]) == (False, "0")
    assert found.launched["NVSHMEM_REMOTE_TRANSPORT"] == "none"
    assert facts.collect({**SHELL, "CUDA_VISIBLE_DEVICES": ""}, 2).simulated
