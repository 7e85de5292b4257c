# SPDX-License-Identifier: Apache-2.0
"""The error that ended this rank, for :mod:`tdcoll.tools.torchrun`, which tells who died and who
only noticed."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import re
import sys
import time
from types import TracebackType

import torch.distributed as dist

from tdcoll import runtime
from tdcoll.base.errors import CollectiveTimeout

aborted = False
"""Whether a wait had expired in the job that this process has left last."""

_LOST_CONNECTION = re.compile(r"Connection (closed|reset) by peer|gloo/transport/", re.IGNORECASE)
"""What gloo says of a peer that is gone, in a plain RuntimeError."""


@functools.cache
def watch() -> None:
    """From now on, write down an error that ends this process. Nothing where no launcher reads
    it."""
    file = os.environ.get("TDCOLL_LAST_WORDS")
    if not file:
        return
    before = sys.excepthook
    said: set[int] = set()  # by process: a child that was forked says its own

    def say(error: str, noticed: bool) -> None:
        said.add(os.getpid())
        _write(file, error, noticed)

    def on_error(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            say(f"{kind.__name__}: {error}", noticed(error) or _has_given_up())
        before(kind, error, trace)

    def at_exit() -> None:
        # it has caught the error, and called sys.exit
        if _has_given_up() and os.getpid() not in said:
            say("a wait for another rank had expired", True)

    sys.excepthook = on_error
    atexit.register(at_exit)


@functools.cache
def report_at_exit() -> None:
    """From now on, print a timeout that has not been raised when this process ends: its results are
    undefined."""
    atexit.register(_report)


def _report() -> None:
    job = runtime.current_or_none()
    for monitor in [] if job is None else job.living_monitors():
        if monitor.expired and not monitor.reported:
            try:
                monitor.raise_if_expired()
            except CollectiveTimeout as error:
                print(
                    f"tdcoll: nothing has raised this error: CollectiveTimeout: {error}",
                    file=sys.stderr,
                    flush=True,
                )


def noticed(error: BaseException) -> bool:
    """Return whether an error, or what led to it, only says that another rank did not answer."""
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in seen:
        if isinstance(cause, (CollectiveTimeout, dist.DistError)):
            return True
        if isinstance(cause, RuntimeError) and _LOST_CONNECTION.search(str(cause)):
            return True
        seen.append(cause)
        cause = cause.__cause__ or cause.__context__
    return False


def _has_given_up() -> bool:
    job = runtime.current_or_none()
    return aborted if job is None else job.failed


def _write(file: str, error: str, noticed: bool) -> None:
    """Append a line, in one write: all ranks of the host share the file. It exists; only the
    launcher makes it."""
    line = json.dumps({"pid": os.getpid(), "error": error, "noticed": noticed, "time": time.time()})
    with contextlib.suppress(OSError):
        descriptor = os.open(file, os.O_WRONLY | os.O_APPEND)
        try:
            os.write(descriptor, f"\n{line}".encode())
        finally:
            os.close(descriptor)
