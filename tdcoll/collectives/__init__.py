# SPDX-License-Identifier: Apache-2.0
"""One folder per collective: kernels (device), ``op`` (what users call), ``policy`` (pure choice), ``reference``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

__all__ = ["lazily"]


def lazily(package: str, **modules: Sequence[str]) -> Callable[[str], Any]:
    """Return a package's ``__getattr__`` that imports a public name when it is requested: a policy needs no Triton."""
    module_of = {name: module for module, names in modules.items() for name in names}

    def find(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f"{package}.{module_of[name]}"), name)
        setattr(sys.modules[package], name, value)  # a look-up here takes longer than all checks of a call
        return value

    return find
