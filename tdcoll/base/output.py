# SPDX-License-Identifier: Apache-2.0
"""The end of commands if another program reads their output. Imports nothing but the standard library."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable

__all__ = ["READER_GONE", "unless_the_reader_goes"]

READER_GONE = 141
"""The exit status of a command when its reader has gone, as a shell reports it if SIGPIPE ends a program."""


def unless_the_reader_goes(command: Callable[[], int]) -> int:
    """Run a command that prints, and return its exit status; end it quietly if the reader goes, as ``| head`` does.

    Other broken pipes stay errors.
    """
    try:
        try:
            status = command()
        except SystemExit:  # of argparse's --help
            sys.stdout.flush()
            raise
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        if not _reader_is_gone():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more when it exits
        return READER_GONE


def _reader_is_gone() -> bool:
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))
