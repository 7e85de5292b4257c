# SPDX-License-Identifier: Apache-2.0
"""Tutorials as modules: their names are no identifiers, and they import what lies beside them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

TUTORIALS = Path(__file__).resolve().parents[2] / "tutorials"
sys.path.insert(0, str(TUTORIALS))


def load(name: str) -> ModuleType:
    """The tutorial of this name, such as ``"02-all-gather"``."""
    spec = importlib.util.spec_from_file_location(name.replace("-", "_"), TUTORIALS / f"{name}.py")
    # Triton looks the module up
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def changed(folder: Path, name: str, change: str, *arguments: str) -> str:
    """Write a program that executes ``change`` on ``tutorial`` and then runs its main(); return its
    path."""
    script = folder / "changed.py"
    here = str(Path(__file__).parent)
    start = f"import sys; sys.path.insert(0, {here!r})\nfrom loading import load\ntutorial = load({name!r})\n"
    script.write_text(f"{start}{change}\ntutorial.main({list(arguments)!r})\n")
    return str(script)
