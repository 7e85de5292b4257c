# SPDX-License-Identifier: Apache-2.0
"""The command line of upstream.py, on a made-up copy of the repository."""

from __future__ import annotations

from pathlib import Path

import pytest
import upstream


@pytest.mark.slow
def test_tutorials_are_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert [name for name, options, own in upstream.TUTORIALS if name.startswith("03") and not own]
    (tmp_path / "tutorials").mkdir()
    (tmp_path / "tutorials/fine.py").write_text("import sys, triton_dist\nassert sys.argv[1:] == ['-M', '4']\n")
    (tmp_path / "tutorials/wrong.py").write_text("raise SystemExit('wrong')\n")
    jobs = ("fine.py", ("--nproc", "1"), ("-M", "4")), ("wrong.py", ("--nproc", "1"), ())
    monkeypatch.setattr(upstream, "TUTORIALS", jobs)
    assert upstream.main([str(tmp_path)]) == 1
    fine, wrong = capsys.readouterr().out.splitlines()
    assert fine == "fine.py: --nproc 1: right"
    assert wrong == "wrong.py: --nproc 1: tdcoll: ended: rank 0 (exit status 1)"
