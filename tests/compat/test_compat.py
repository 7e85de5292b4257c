# SPDX-License-Identifier: Apache-2.0
"""Programs of Triton-distributed's on tdcoll: one in its style, names that are not provided, and
the real package."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import python

import tdcoll
import tdcoll.language as tdl
from tdcoll.compat import NotProvidedError, _Finder
from tdcoll.compat import __main__ as command_line
from tdcoll.compat.triton_dist import nvshmem
from tdcoll.language.jit import jit
from tdcoll.testing import World

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PROGRAM = HERE / "in_its_style.py"


@pytest.mark.slow
def test_a_program_in_its_style(launch: Any) -> None:
    ranks = ("--nproc", "4", "--emulate-nodes", "2")
    done = launch("--simulate", *ranks, "-m", "tdcoll.compat", str(PROGRAM), timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout.splitlines()
    assert said[-1] == "all right"
    assert len([line for line in said if line.endswith(": right")]) == 14


@pytest.mark.gpu
def test_a_program_in_its_style_where_ranks_share_gpus(launch: Any) -> None:
    done = launch("--share-gpus", "--nproc", "2", "-m", "tdcoll.compat", str(PROGRAM), timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "all right"


def run(script: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """``python -m tdcoll.compat script`` with ``folder`` on the path."""
    return python("-m", "tdcoll.compat", str(script), PYTHONPATH=f"{ROOT}{os.pathsep}{folder}")


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "scripts" / "script.py"
    path.parent.mkdir()
    text = "import sys, torch, triton_dist\nprint(triton_dist.__name__, sys.argv[1:], torch.ones(2).cuda().device)\n"
    path.write_text(text)
    return path


def test_scripts_run_as_the_main_program(script: Path, tmp_path: Path) -> None:
    done = run(script, tmp_path)
    assert (done.returncode, done.stdout) == (0, "tdcoll.compat.triton_dist [] cpu\n"), done.stderr


def test_it_never_stands_in_for_a_real_one_silently(script: Path, tmp_path: Path) -> None:
    real = tmp_path / "site" / "triton_dist"
    real.mkdir(parents=True)
    (real / "__init__.py").write_text("")
    done = run(script, real.parent)
    assert done.returncode == 1
    assert (
        f"the real triton_dist is installed, at {real}/__init__.py, and is the one that is used"
        in done.stderr
    )
    late = tmp_path / "scripts" / "late.py"
    first = f"import sys; sys.path.insert(0, {str(real.parent)!r})"
    late.write_text(f"{first}\nimport triton_dist, tdcoll.compat\ntdcoll.compat.activate()\n")
    done = python(str(late), PYTHONPATH=str(ROOT))
    assert f"the real triton_dist is imported already, at {real}/__init__.py" in done.stderr


def test_nothing_is_on_the_path_by_itself() -> None:
    assert importlib.util.find_spec("triton_dist") is None
    assert not any(isinstance(finder, _Finder) for finder in sys.meta_path)


@pytest.mark.parametrize(
    "module", ["kernels.nvidia.ep_a2a", "language.extra.cuda.tma_language", "tools", "nothing"]
)
def test_modules_that_are_not_provided(module: str) -> None:
    with pytest.raises(
        NotProvidedError, match=f"does not provide the module triton_dist.{module}; docs/"
    ) as caught:
        _Finder(without_nvshmem=True).find_spec(f"triton_dist.{module}", None)
    assert caught.value.name == f"triton_dist.{module}"
    assert _Finder(without_nvshmem=True).find_spec("torch", None) is None


def test_modules_that_are_other_names_of_one(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(
        "from triton_dist.language.extra.cuda import language_extra, libnvshmem_device\n"
        "from triton_dist.language.extra.cuda.libnvshmem_device import putmem_block\n"
        "from triton_dist.language.extra import language_extra as one, libshmem_device\n"
        "from triton_dist.kernels import common_ops\n"
        "import triton_dist.kernels.common_ops as again, nvshmem.core, nvshmem.bindings.nvshmem\n"
        "assert language_extra is one and libnvshmem_device is libshmem_device and again is common_ops\n"
        "assert putmem_block is libshmem_device.putmem_block\n"
        "assert nvshmem.core.n_pes is nvshmem.bindings.nvshmem.n_pes\n"
    )
    done = run(path, tmp_path)
    assert done.returncode == 0, done.stderr


def test_help_is_no_error_and_a_missing_script_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["compat", "--help"])
    command_line.main()
    assert "python -m tdcoll.compat script.py" in capsys.readouterr().out
    for given, message in (
        (["no-such-script.py"], "expected a script, got 'no-such-script.py'"),
        ([], "usage: "),
    ):
        monkeypatch.setattr(sys, "argv", ["compat", *given])
        with pytest.raises(SystemExit, match=message):
            command_line.main()


@jit
def signals_behind(signals, at):
    tdl.signal_op(signals + at, 7, tdl.SIGNAL_SET, 1 - tdl.my_pe())
    tdl.barrier_all_block()


def test_tensors_take_whole_cells_of_the_heap() -> None:
    """NVSHMEM pads its allocations, so programs get away with signals behind the end of one."""

    def cells(pe: int) -> None:
        signals, other = nvshmem.tensor((1,), torch.int64), nvshmem.tensor((5, 3), torch.float16)
        assert (signals.shape, other.shape, other.is_contiguous()) == ((1,), (5, 3), True)
        signals_behind[(1,)](signals, 63)
        assert nvshmem.get_peer_tensor(signals, pe).shape == (1,)
        assert signals.as_strided((64,), (1,)).tolist() == [0] * 63 + [7]
        for tensor in (signals, other):
            nvshmem.free_tensor(tensor)
        assert tdcoll.heap_info().used == 0

    World(2).run(cells)
    beyond = "sig_addr must stay within one tensor; got bytes 512..520 of pe[01].tensor, which has 512 bytes"
    with pytest.raises(ValueError, match=beyond):
        World(2).run(lambda pe: signals_behind[(1,)](nvshmem.tensor((1,), torch.int64), 64))


@pytest.mark.parametrize("shape", [(-1,), "3", (2.0,)])
def test_shapes_of_tensors_are_checked(shape: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="shape must"):
        World(1).run(lambda pe: nvshmem.tensor(shape, torch.int64))
