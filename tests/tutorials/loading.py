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
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # Triton looks the module up
    spec.loader.exec_module(module)
    return module
