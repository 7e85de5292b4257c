# SPDX-License-Identifier: Apache-2.0
"""Run a command that may crash or hang."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Ended(NamedTuple):
    """How a command ended.

    Attributes:
        output: what it wrote to stdout and, unless that was dropped, to stderr.
        reason: why it didn't end well, in words; empty if it did.
    """

    output: str
    reason: str = ""


def run(
    command: Sequence[str],
    timeout_s: float,
    environment: Mapping[str, str],
    *,
    with_stderr: bool = True,
) -> Ended:
    """Run ``command`` and kill its process group after ``timeout_s`` seconds. Raise no error of its
    own.

    The output goes through a file, because a pipe stays open as long as any descendant of the
    command holds it.
    """
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT if with_stderr else subprocess.DEVNULL,
                env=dict(environment),
                start_new_session=True,
            )
        except OSError as error:
            return Ended("", f"cannot be started: {error}")
        try:
            reason = _describe(process.wait(timeout_s))
        except subprocess.TimeoutExpired:
            reason = f"it did not end within {timeout_s:g} s"
        finally:
            if process.returncode is None:  # also if the user interrupts
                os.killpg(process.pid, signal.SIGKILL)
                # a process that hangs in the kernel stays
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(3)
        descriptor = output.fileno()
        return Ended(
            os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace"), reason
        )


def _describe(status: int) -> str:
    if status >= 0:
        return f"exit status {status}" if status else ""
    try:
        return f"signal {signal.Signals(-status).name} ended it"
    except ValueError:
        return f"signal {-status} ended it"
