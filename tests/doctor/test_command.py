# SPDX-License-Identifier: Apache-2.0
"""The command as a user runs it: on this host, where PyTorch is broken, and with a wrong command line."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from tdcoll.base.child import Ended
from tdcoll.tools.doctor import command, job
from tests.doctor.healthy import GPUS, SIMULATOR
from tests.doctor.test_facts import ROOT


def doctor(*arguments: str, path: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    shell = {name: value for name, value in os.environ.items() if not name.startswith(("NVSHMEM_", "TDCOLL_"))}
    shell |= {"PYTHONPATH": os.pathsep.join([path, str(ROOT), os.environ.get("PYTHONPATH", "")]), **variables}
    words = [sys.executable, "-m", "tdcoll", "doctor", *arguments]
    return subprocess.run(words, env=shell, capture_output=True, text=True, timeout=150)


@pytest.mark.slow
@pytest.mark.parametrize("interpret", ["1", pytest.param("", marks=pytest.mark.gpu)])
def test_on_this_host(interpret):
    """With variables that an outer job has left."""
    left = {"RANK": "3", "WORLD_SIZE": "7", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x"}
    done = doctor(TRITON_INTERPRET=interpret, **left)
    assert "\nok       small job: " in done.stdout, done.stdout
    if interpret:
        said = "2 simulated ranks, 64 MiB of symmetric heap each: all-gather by 1d and by auto is right"
        assert done.stdout.endswith(f"\nok       small job: {said}\n\nno problems, no notes\n")
    assert done.returncode == int("\nproblem " in done.stdout)


def test_where_tdcoll_cannot_be_imported(tmp_path):
    """The Triton that Python finds is not the one that pip has installed, and torch is broken."""
    for name, text in (("triton", "__version__ = '3.4.0'\n"), ("torch", "raise OSError('libcudart.so.13')\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(text)
    done = doctor(path=str(tmp_path), TRITON_INTERPRET="1", TDCOLL_TIMOUT_S="3")
    assert (done.returncode, done.stderr) == (1, "")
    assert "problem  torch: cannot be imported: OSError: libcudart.so.13\n         -> pip install" in done.stdout
    assert "problem  triton: 3.4.0 cannot be imported: ModuleNotFoundError: No module named 'triton._C'" in done.stdout
    assert "did you mean TDCOLL_TIMEOUT_S?" in done.stdout
    assert "note     small job: not run: torch, triton cannot be imported\n\n3 problems, 1 note\n" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "variables", "said"),
    [
        (["--nproc", "0"], {}, "--nproc must be at least 1, got 0"),
        (["--nproc", "x"], {}, "--nproc: invalid int value: 'x'"),
        (["--timeout", "-1"], {}, "--timeout must be greater than 0"),
        ([], {"LOCAL_RANK": "1"}, "run it without torchrun"),
    ],
)
def test_a_wrong_command_line_is_refused(arguments, variables, said, capsys):
    with pytest.raises(SystemExit) as refused:
        command.main(arguments, variables)
    assert refused.value.code == 2
    assert said in capsys.readouterr().err


FAILED = Ended("a\nValueError: x", "exit status 1")
WELL = Ended(f'{job._MARK}{{"rank": 0, "result": "right"}}')


@pytest.mark.parametrize(
    ("arguments", "facts", "ended", "status", "said"),
    [
        ([], GPUS, WELL, 0, "ok       small job: right\n\nno problems, no notes\n"),
        ([], GPUS, FAILED, 1, "first error: ValueError: x\n         -> first see"),
        ([], GPUS, FAILED, 1, "         | a\n         | ValueError: x\n\n1 problem"),
        (["--no-run"], SIMULATOR, None, 0, "small job: not run: --no-run was given\n\nno problems, 1 note\n"),
        (["--nproc", "4"], SIMULATOR, WELL, 0, "no problems, no notes"),
        (["--nproc", "4"], GPUS, WELL, 2, "--nproc must be at most the 3 visible GPUs of this host, got 4"),
    ],
)
def test_exit_status(monkeypatch, capsys, arguments, facts, ended, status, said):
    monkeypatch.setattr(command, "collect", lambda _, nproc: replace(facts, nproc=nproc or facts.nproc))
    monkeypatch.setattr(job, "start", lambda facts, timeout_s: ended)
    assert command.main(arguments, {}) == status
    assert said in "".join(capsys.readouterr())


@pytest.mark.slow
@pytest.mark.parametrize("variable", ["TDCOLL_TIMEOUT_S", "TDCOLL_BACKEND_HANDLES"])
def test_values_that_tdcoll_refuses(variable):
    """The small job reads them as a job of the user's would."""
    done = doctor("--nproc", "1", TRITON_INTERPRET="1", **{variable: "soon"})
    assert done.returncode == 1
    assert f"ValueError: {variable}" in done.stdout, done.stdout
