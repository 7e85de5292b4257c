# SPDX-License-Identifier: Apache-2.0
"""The command as a user runs it: on this host, with a job; where PyTorch is broken; with a wrong command line."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tdcoll.doctor import command, functional
from tdcoll.doctor.child import Ended, run
from tests.doctor.healthy import GPUS, SIMULATOR

ROOT = Path(__file__).resolve().parents[2]


def doctor(*arguments: str, flags: tuple[str, ...] = (), path: str = "", **variables: str) -> Ended:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("NVSHMEM_", "TDCOLL_"))}
    found = os.environ.get("PYTHONPATH", "")
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, [path, str(ROOT), found])), **variables}
    return run([sys.executable, *flags, "-m", "tdcoll", "doctor", *arguments], 150, environment=environment)


def test_on_this_host_without_gpus(tmp_path):
    file = tmp_path / "doctor.json"
    ended = doctor("--json", str(file), TRITON_INTERPRET="1")
    assert ended.status == 0, ended.output
    report = json.loads(file.read_text())
    assert [line for line in report["lines"] if line["status"] == "problem"] == []
    last = report["lines"][-1]
    assert (last["status"], last["name"]) == ("ok", "put, signal, all-gather")
    assert last["text"].startswith("2 simulated ranks: all pairs, the ring and the all-gather brought what was sent")
    assert "tdcoll-job" in report["output"]
    for line in report["lines"]:
        assert f"{line['status']:8} {line['name']}: {line['text']}\n" in ended.output
    assert "no problems" in ended.output


def test_where_tdcoll_cannot_be_imported(tmp_path):
    """The Triton that Python finds is not the one that pip has installed, and torch is broken."""
    for name, text in (("triton", "__version__ = '3.4.0'\n"), ("torch", "raise OSError('libcudart.so.13')\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(text)
    ended = doctor("--no-run", flags=("-u",), path=str(tmp_path), TRITON_INTERPRET="1", TDCOLL_TIMOUT_S="3")
    assert ended.status == 1, ended.output
    assert "problem  torch: cannot be imported: OSError: libcudart.so.13\n         -> reinstall it" in ended.output
    assert "problem  triton: 3.4.0 has no compiler" in ended.output
    assert "did you mean TDCOLL_TIMEOUT_S?" in ended.output
    assert "not run: --no-run was given" in ended.output
    assert "3 problems, 1 note" in ended.output


@pytest.mark.parametrize(
    "arguments",
    [["--nproc", "0"], ["--nnodes", "x"], ["--timeout", "-1"], ["--json", "/no/such/folder/x"], ["--what"], ["x"]],
)  # fmt: skip
def test_a_wrong_command_line_is_refused(arguments, capsys):
    with pytest.raises(SystemExit) as refused:
        command.main(arguments, {})
    assert refused.value.code == 2
    assert "python -m tdcoll doctor: error: " in capsys.readouterr().err


def test_not_under_torchrun():
    with pytest.raises(SystemExit) as refused:
        command.main([], {"LOCAL_RANK": "1"})
    assert refused.value.code == 2


@pytest.mark.parametrize(
    ("hosts", "expected"), [("2", 2), ("08", 8), ("", 1), ("0", 1), ("²", 1), ("abc", 1), ("9" * 5000, 1)]
)
def test_the_default_number_of_hosts(monkeypatch, hosts, expected):
    asked = []
    monkeypatch.setattr(command, "collect", lambda environment, nproc, nnodes: asked.append(nnodes) or SIMULATOR)
    command.main(["--no-run"], {"TDCOLL_NNODES": hosts})
    assert asked == [expected]


def run_with(monkeypatch, facts, outcome, *arguments: str) -> int:
    monkeypatch.setattr(command, "collect", lambda environment, nproc, nnodes: facts)
    monkeypatch.setattr(functional, "start", lambda facts, timeout_s: outcome)
    return command.main(arguments, {})


def test_a_job_that_fails_is_exit_status_1(monkeypatch, capsys):
    well = functional.Outcome({"world": 3, "simulated": False, "puts": True, "hop_us": 1.9, "gather_us": 9.5})
    assert run_with(monkeypatch, GPUS, well) == 0
    assert "no problems, no notes" in capsys.readouterr().out
    assert run_with(monkeypatch, GPUS, functional.Outcome(error="rank 0: TdcollError: x", reason="exit status 1")) == 1
    assert "first error: rank 0: TdcollError: x\n         -> first what the lines above say" in capsys.readouterr().out


def test_more_ranks_than_gpus_is_refused(monkeypatch, capsys):
    assert run_with(monkeypatch, replace(GPUS, nproc=4), functional.Outcome(), "--nproc", "4") == 2
    assert "at most the 3 visible GPUs of this host, got 4" in capsys.readouterr().err
    assert run_with(monkeypatch, replace(SIMULATOR, nproc=4), functional.Outcome(), "--no-run") == 0


def test_facts_of_gpus_fit_into_the_file(monkeypatch, tmp_path):
    file = tmp_path / "facts.json"
    assert run_with(monkeypatch, GPUS, functional.Outcome(), "--no-run", "--json", str(file)) == 0
    facts = json.loads(file.read_text())["facts"]
    assert facts["links"]["0-1"] == "NV18"
    assert facts["gpus"][2]["host_index"] == 2
    assert run_with(monkeypatch, GPUS, functional.Outcome(), "--no-run", "--json", str(tmp_path)) == 2


@pytest.mark.gpu
def test_on_gpus(tmp_path):
    file = tmp_path / "doctor.json"
    ended = doctor("--json", str(file), TRITON_INTERPRET="")
    report = json.loads(file.read_text())
    last = report["lines"][-1]
    assert last["status"] == "ok", ended.output
    assert "µs per hop" in last["text"]
    assert ended.status == int(any(line["status"] == "problem" for line in report["lines"]))
