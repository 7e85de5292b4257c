# SPDX-License-Identifier: Apache-2.0
"""``python -m tdcoll hang``: ask ranks of this host what they wait for, without stopping them.

Imports nothing but the standard library. :mod:`tdcoll.runtime.watch` answers, from a thread of each
rank.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_EPILOG = """\
A report says what calls each context has made, in which one a kernel waits, for how long and for which ranks, and
where the main thread is. Ask the ranks of all hosts: the one that others wait for, and which waits for none, is the one
to look at. A process without an answer has been stopped, or one of its threads holds Python's global lock.

Exit status: 0; 1 if a process is no rank or does not answer, or there is none.

example:
  python -m tdcoll hang
  python -m tdcoll hang 4711"""

_ANSWER_S = 5.0


def address(pid: int) -> str:
    """Return the name of the socket of a process of this user: user, process, and the namespace of
    its number."""
    return f"\0tdcoll-{os.geteuid()}-{pid}-{os.stat('/proc/self/ns/pid').st_ino}"


def user_of(connection: socket.socket) -> int:
    """Return the user at the other end of a connection."""
    credentials = connection.getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
    )
    return int(struct.unpack("3i", credentials)[1])


def ranks() -> dict[int, str]:
    """Return the sockets of this user's ranks on this host, by process; root's are those of all
    users."""
    user = r"\d+" if os.geteuid() == 0 else str(os.geteuid())
    namespace = os.stat("/proc/self/ns/pid").st_ino
    names = re.findall(
        rf"@(tdcoll-{user}-(\d+)-{namespace})$", Path("/proc/net/unix").read_text(), re.MULTILINE
    )
    return {int(pid): f"\0{name}" for name, pid in sorted(names, key=lambda found: int(found[1]))}


def ask(name: str) -> dict[str, Any]:
    """Return what a rank says of itself: ``rank``, ``waits`` and ``lines``.

    Raises:
        OSError: it does not answer, or the socket is another user's.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_ANSWER_S)
        connection.connect(name)
        if os.geteuid() not in (0, user_of(connection)):
            raise PermissionError("the socket of that name is another user's")
        parts = iter(lambda: connection.recv(1 << 16), b"")
        answer: dict[str, Any] = json.loads(b"".join(parts) or b"{}")
    if not answer:
        raise PermissionError("the rank is another user's")
    return answer


def _started(pid: int) -> tuple[int, str]:
    """Return the process that started a rank, the same for all of a job, and the rank's command; 0
    if it has ended."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
        parent = re.search(r"^PPid:\s*(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except OSError:
        return 0, ""
    return int(parent[1]) if parent else 0, " ".join(command[1:]).removeprefix("-u ").strip()


def main(argv: Sequence[str]) -> int:
    """Run the command; return its exit status. Bad arguments end the process with 2."""
    parser = argparse.ArgumentParser(
        prog="python -m tdcoll hang",
        description="Say what ranks on this host wait for. Nothing is stopped.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    text = "a rank's process; without it, this user's ranks are listed"
    parser.add_argument("pids", metavar="PID", type=int, nargs="*", help=text)
    wanted = parser.parse_args(argv).pids
    known = ranks()
    if not known and not wanted:
        print(
            "no rank of this user runs on this host, or none has made a context yet",
            file=sys.stderr,
        )
        return 1
    failed = False
    job = 0
    for pid in wanted or sorted(known, key=lambda pid: (_started(pid)[0], pid)):
        try:
            if pid not in known:
                raise ProcessLookupError
            answer = ask(known[pid])
        except (ConnectionRefusedError, FileNotFoundError, ProcessLookupError):
            if wanted:
                failed = True
                text = f"process {pid} is no rank that has made a context; `python -m tdcoll hang` lists those that are"
                print(text, file=sys.stderr)
            continue
        except OSError as error:
            failed = True
            stopped = re.search(
                r"^State:\s*[Tt]", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE
            )
            why = f"the process is stopped; `kill -CONT {pid}` lets it go on" if stopped else error
            print(f"process {pid} does not answer: {why}", file=sys.stderr)
            continue
        if wanted:
            print(f"process {pid}, {answer['rank']}", *answer["lines"], sep="\n  ")
        else:
            parent, command = _started(pid)
            if parent not in (0, job):
                job = parent
                print(f"{command} (started by process {parent}):")
            frames = [line for line in answer["lines"] if line.startswith("main thread")]
            print(
                f"{pid:8}  {answer['rank']}: {'; '.join(answer['waits'] or ['no wait', *frames[:1]])}"
            )
    return int(failed)
