# SPDX-License-Identifier: Apache-2.0
"""Commands that end: with an answer, or when their time is over, together with all that they started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO

__all__ = ["Ended", "run"]

_GRACE_S = 3.0
_LONGEST_OUTPUT = 1 << 20


@dataclass(frozen=True)
class Ended:
    """How a command ended.

    Attributes:
        status: its exit status (negative: the signal that ended it); None if it could not be started, see ``reason``,
            or was ended because its time was over.
        output: what it wrote to stdout and, unless they were kept apart, stderr; of very long output the end.
        timed_out: its time was over.
        reason: why it has not ended well, in words; empty if it has.
    """

    status: int | None
    output: str
    timed_out: bool = False
    reason: str = ""


def run(
    command: Sequence[str],
    timeout_s: float,
    *,
    environment: Mapping[str, str] | None = None,
    with_stderr: bool = True,
) -> Ended:
    """Run ``command`` for at most ``timeout_s`` seconds and a few more in which it is ended. Raises nothing of its own.

    The output goes through a file: reading a pipe would wait for everybody who holds its other end.
    """
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT if with_stderr else subprocess.DEVNULL,
                env=None if environment is None else dict(environment),
                start_new_session=True,
            )
        except OSError as error:
            reason = "there is no such program" if isinstance(error, FileNotFoundError) else str(error)
            return Ended(None, "", reason=reason)
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            _end(process)
            return Ended(None, _read(output), timed_out=True, reason=f"it did not end within {timeout_s:g} s")
        except BaseException:  # the user's interrupt
            _end(process)
            raise
        status, text = process.returncode, _read(output)
    if status < 0:
        return Ended(status, text, reason=f"signal {_signal_name(-status)} ended it")
    return Ended(status, text, reason=f"exit status {status}" if status else "")


def _read(output: IO[bytes]) -> str:
    descriptor = output.fileno()
    length = os.fstat(descriptor).st_size
    return os.pread(descriptor, _LONGEST_OUTPUT, max(0, length - _LONGEST_OUTPUT)).decode(errors="replace")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask a command to end, and then end it and its descendants, who may be in sessions of their own."""
    started = _descendants(process.pid)
    with contextlib.suppress(OSError):
        os.kill(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE_S)
    if process.returncode is None:
        started |= _descendants(process.pid)
        process.kill()
    deadline = time.monotonic() + _GRACE_S
    for pid, birth in started.items():
        if _parent_and_birth(pid)[1] == birth:  # and not another process that has got its number
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):  # one that hangs in the kernel does not even die
        process.wait(max(0.1, deadline - time.monotonic()))


def _parent_and_birth(pid: int) -> tuple[int, int]:
    """A process's parent and when it began (clock ticks since boot); (0, 0) if there is none."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        return int(fields[1]), int(fields[19])
    except (OSError, IndexError, ValueError):
        return 0, 0


def _descendants(root: int) -> dict[int, int]:
    """All processes below ``root``, each with when it began."""
    everyone = {int(name): _parent_and_birth(int(name)) for name in os.listdir("/proc") if name.isdigit()}
    found: dict[int, int] = {}
    parents = {root}
    while parents:
        below = {pid: birth for pid, (parent, birth) in everyone.items() if parent in parents and pid not in found}
        found |= below
        parents = set(below)
    return found
