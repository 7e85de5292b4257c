# SPDX-License-Identifier: Apache-2.0
"""The end of commands if another program reads their output. Imports nothing but the standard
library."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

_READER_GONE = 141  # as a shell reports it if SIGPIPE ends a program


def unless_the_reader_goes(command: Callable[[], int]) -> int:
    """Run a command that prints, and return its exit status; end it quietly if the reader goes, as
    ``| head`` does."""
    try:
        try:
            return command()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes once more when it exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _READER_GONE
