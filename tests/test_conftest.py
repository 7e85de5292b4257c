# SPDX-License-Identifier: Apache-2.0
"""Tests that check nothing fail."""

from __future__ import annotations

import os
from pathlib import Path

from processes import python

ROOT = Path(__file__).resolve().parents[1]
TESTS = """
import pytest


@pytest.fixture
def made():
    assert True
    return 1


def test_whose_fixture_checks_something(made):
    assert made


def test_whose_fixture_alone_checks_something(made):
    made


@pytest.mark.parametrize("how", ["assertion", "error", "warning", "nothing", "skipped", "fails"])
def test_it(how):
    if how == "assertion":
        assert how
        assert how
    elif how == "error":
        with pytest.raises(ZeroDivisionError):
            1 / 0
    elif how == "warning":
        with pytest.warns(UserWarning):
            import warnings
            warnings.warn("so", UserWarning)
    elif how == "skipped":
        pytest.skip("why")
    elif how == "fails":
        raise ValueError("its own error")
"""


def test_a_parameter_set_that_checks_nothing_fails(tmp_path: Path) -> None:
    file = tmp_path / "test_it.py"
    file.write_text(TESTS)
    settings = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path), "-p", "conftest"]
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    done = python("-m", "pytest", "-q", *settings, str(file), PYTHONPATH=path)
    assert "3 failed, 4 passed, 1 skipped" in done.stdout, done.stdout + done.stderr
    assert "test_it[nothing] checks nothing" in done.stdout
    assert "test_whose_fixture_alone_checks_something checks nothing" in done.stdout
    assert "ValueError: its own error" in done.stdout
    assert "test_it[fails] checks nothing" not in done.stdout
