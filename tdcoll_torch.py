# SPDX-License-Identifier: Apache-2.0
"""Tells ``torch.distributed`` of backend ``"tdcoll"``, and imports tdcoll when a group of that
backend is made.

Where tdcoll is installed, ``import torch`` calls :func:`register`, an entry point of the group
``torch.backends``. Elsewhere ``import tdcoll`` does. It is outside of the package because a process
that only imports PyTorch is to import neither tdcoll nor Triton. For the same reason it does not
import PyTorch.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

TYPE_CHECKING = False  # importing typing would cost more than the rest
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

__all__ = ["register"]

_MODULE = "torch.distributed.distributed_c10d"


def register() -> None:
    """Register the backend: now, or as soon as ``torch.distributed`` is imported. Once, however
    often it is called."""
    module = sys.modules.get(_MODULE)
    if hasattr(module, "Backend"):
        _register(module)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _register(module: Any) -> None:
    if "tdcoll" not in module.Backend.backend_list:
        module.Backend.register_backend(
            "tdcoll", _create, extended_api=True, devices=["cpu", "cuda"]
        )
        try:  # as tdcoll.distributed.work.never_compiled does: a compiled model may make a group
            frames: Any = module.torch._C._dynamo.eval_frame
            skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
            frames.set_code_exec_strategy(_create.__code__, skip)
        except (
            AttributeError
        ):  # another PyTorch: `import torch` has to go on, and a model may not make a group
            pass


def _create(given: Any, pg_options: Any) -> Any:
    """Make a process group; ``torch.distributed`` calls this for a new one."""
    from tdcoll.distributed.backend import create

    return create(given, pg_options)


class _Finder:
    """Finds ``torch.distributed``'s module where everybody does, and registers the backend when it
    is executed."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _MODULE:
            return None
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                _register(module)

            loader.exec_module = execute_and_register
        return spec
