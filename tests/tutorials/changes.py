# SPDX-License-Identifier: Apache-2.0
"""Tutorials as modules, as they are or with changes to their text."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType


def changed_text(path: Path, *changes: tuple[str, str]) -> str:
    """The text of a tutorial with changes, each of which must apply."""
    text = path.read_text(encoding="utf-8")
    for old, new in changes:
        assert old in text, f"{path.name} does not contain {old!r} any more"
        text = text.replace(old, new)
    return text


def load(path: Path) -> ModuleType:
    """The file as a module; its name need not be an identifier."""
    spec = importlib.util.spec_from_file_location(path.stem.replace("-", "_"), path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_changed(path: Path, folder: Path, *changes: tuple[str, str]) -> ModuleType:
    """A copy of the tutorial in ``folder``, with changes, as a module."""
    copy = folder / f"changed_{path.stem.replace('-', '_')}.py"
    copy.write_text(changed_text(path, *changes), encoding="utf-8")
    return load(copy)
