# SPDX-License-Identifier: Apache-2.0
"""NVTX ranges of calls, for profilers: ``TDCOLL_NVTX=1``.

Whether there are any is decided when a call is prepared, so without the variable calls don't take
longer.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable

import torch

_log = logging.getLogger("tdcoll")


def _wanted() -> bool:
    return os.environ.get("TDCOLL_NVTX", "0") not in ("", "0") and _available()


@functools.cache
def _available() -> bool:
    """Return whether this PyTorch has NVTX; a warning says so if it doesn't."""
    try:
        torch.cuda.nvtx.range_push("tdcoll")
        torch.cuda.nvtx.range_pop()
    except RuntimeError as error:
        _log.warning("TDCOLL_NVTX has no effect: %s", error)
        return False
    return True


class _Range(contextlib.ContextDecorator):
    """A context manager that may be entered again and again."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        torch.cuda.nvtx.range_push(self._name)

    def __exit__(self, *_: object) -> None:
        torch.cuda.nvtx.range_pop()


def range_of(name: str) -> contextlib.AbstractContextManager[None]:
    """Return a context manager, for any number of uses, that is an NVTX range if ``TDCOLL_NVTX``
    asks for it."""
    return _Range(name) if _wanted() else contextlib.nullcontext()


def ranged(name: str, run: Callable[..., None]) -> Callable[..., None]:
    """Return ``run``, in an NVTX range of this name if ``TDCOLL_NVTX`` asks for it."""
    return _Range(name)(run) if _wanted() else run
