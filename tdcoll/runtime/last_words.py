# SPDX-License-Identifier: Apache-2.0
"""What ended this rank, written down for :mod:`tdcoll.torchrun`, which tells who died and who only noticed."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import torch.distributed as dist

from tdcoll import runtime
from tdcoll.errors import CollectiveTimeout

__all__ = ["noticed", "watch"]

gave_up = False
"""Whether this process has left a job in which a wait had expired, and has joined none since."""

_LOST_CONNECTION = re.compile(r"Connection (closed|reset) by peer|gloo/transport/", re.IGNORECASE)
"""What gloo says of a peer that is gone, in a plain RuntimeError."""


@functools.cache
def watch() -> None:
    """From now on, write down an error that ends this process. Nothing where no launcher reads it."""
    folder = os.environ.get("TDCOLL_LAST_WORDS")
    if not folder:
        return
    before = sys.excepthook

    def own_file() -> Path:
        return Path(folder, f"{os.getpid()}.json")  # a child that was forked has its own

    def on_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, Exception):
            _write(own_file(), f"{kind.__name__}: {error}", noticed(error) or _has_given_up())
        before(kind, error, trace)

    def at_exit() -> None:
        if _has_given_up() and not own_file().exists():  # it has caught the error, and called sys.exit
            _write(own_file(), "a wait for another rank had expired", True)

    sys.excepthook = on_error
    atexit.register(at_exit)


def noticed(error: BaseException) -> bool:
    """Return whether an error, or what led to it, only says that another rank did not answer."""
    return any(
        isinstance(cause, (CollectiveTimeout, dist.DistError))
        or (isinstance(cause, RuntimeError) and _LOST_CONNECTION.search(str(cause)) is not None)
        for cause in _causes(error)
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _has_given_up() -> bool:
    job = runtime.current_or_none()
    return gave_up if job is None else job.failed


def _write(file: Path, error: str, noticed: bool) -> None:
    with contextlib.suppress(OSError):
        file.write_text(json.dumps({"error": error, "noticed": noticed, "time": time.time()}), encoding="utf-8")
