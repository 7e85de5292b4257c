# SPDX-License-Identifier: Apache-2.0
"""Where packages of the extra ``bench`` are needed, and that the package doesn't depend on the
benchmarks."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXTRA = ("click", "matplotlib", "pandas", "tabulate")

WITHOUT = """
import importlib, sys
*missing, module = sys.argv[1:]
for name in missing:
    sys.modules[name] = None  # its import fails
importlib.import_module(module)
"""


def import_without(missing: tuple[str, ...], module: str) -> subprocess.CompletedProcess[str]:
    """Import a module in a Python that has none of the ``missing`` packages."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", WITHOUT, *missing, module]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=environment, cwd=ROOT
    )


@pytest.mark.parametrize(
    ("missing", "module"),
    [
        (EXTRA, "tdcoll.tools.tune.command"),
        # More objects in a process make Python's collector slower, and with it the host that is
        # timed.
        (("matplotlib", "pandas"), "benchmarks.dense"),
        (("matplotlib", "pandas"), "benchmarks.backend_calls"),
    ],
)
def test_what_measures_needs_no_packages_for_tables(missing: tuple[str, ...], module: str) -> None:
    done = import_without(missing, module)
    assert done.returncode == 0, done.stderr


def test_an_import_without_a_package_fails() -> None:
    assert "import of pandas halted" in import_without(("pandas",), "benchmarks.tables").stderr


def test_the_package_does_not_import_the_benchmarks() -> None:
    """A wheel doesn't contain them; only ``__main__`` names them."""
    importers = []
    for path in sorted((ROOT / "tdcoll").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                modules = [str(node.module)]
            if any(module.partition(".")[0] == "benchmarks" for module in modules):
                importers.append(path)
    assert importers == []
