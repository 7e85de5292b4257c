# SPDX-License-Identifier: Apache-2.0
"""Commands end when their time is over, with everything that they started."""

from __future__ import annotations

import os
import sys
import time

import pytest

from tdcoll.doctor.child import run

# Ignores SIGTERM, like a process that waits in a library's C code, and has a child in another session.
STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(60)
"""

# Leaves at SIGTERM, and its child, in another session, is nobody's then.
FAITHLESS = STUBBORN.replace("signal.SIG_IGN", "lambda *_: os._exit(0)")


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"  # nobody may be there to reap it
    except OSError:
        return False


@pytest.mark.parametrize("source", [STUBBORN, FAITHLESS], ids=["ignores SIGTERM", "leaves its child"])
def test_one_that_hangs_is_ended_with_all_it_started(source):
    begin = time.monotonic()
    ended = run([sys.executable, "-S", "-c", source], 0.7)
    assert time.monotonic() - begin < 10
    assert ended.timed_out
    assert ended.status is None
    assert ended.reason == "it did not end within 0.7 s"
    child = int(ended.output)  # what it had printed by then is not lost
    deadline = time.monotonic() + 5
    while alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(child)


def test_how_commands_end():
    assert run(["true"], 5).reason == ""
    assert run(["false"], 5).reason == "exit status 1"
    assert run(["no-such-program-anywhere"], 5).reason == "there is no such program"
    assert run(["bash", "-c", "kill -SEGV $$"], 5).reason == "signal SIGSEGV ended it"
    assert run(["bash", "-c", "echo a; echo b >&2"], 5).output == "a\nb\n"
    assert run(["bash", "-c", "echo a; echo b >&2"], 5, with_stderr=False).output == "a\n"
    assert run(["bash", "-c", "echo $X"], 5, environment={"X": "y", "PATH": os.environ["PATH"]}).output == "y\n"


def test_somebody_else_who_holds_the_output_does_not_hold_us_up():
    begin = time.monotonic()
    assert run(["bash", "-c", "sleep 3 & echo done"], 20).output == "done\n"
    assert time.monotonic() - begin < 2.5
