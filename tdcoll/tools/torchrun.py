# SPDX-License-Identifier: Apache-2.0
"""``python -m tdcoll.tools.torchrun``: torchrun, which says in the end who died and who only
noticed.

When a rank dies, the others give up on it a while later, each with an error of its own. torchrun's
"Root Cause" is any of them: it looks at all at once, and does not know what an error means. This
runs torchrun with its options and its exit status. If processes of this host have failed, the last
lines on stderr say which of them ended by themselves, in place of torchrun's report, which
``TDCOLL_TRACEBACK=1`` shows as well. They follow from

- the exit status, or signal, of each process;
- which processes were still running when torchrun ended them;
- what each rank wrote down about its last error (:mod:`tdcoll.job.last_words`). An expired wait for
  another rank, and a connection that another rank has closed, are no cause.

Where several hosts meet, it says whom it waits for after :data:`ANNOUNCE_S`, and every minute from
then on; torchrun alone is silent. If they don't come in time, one line says so, and this ends.

If this process is killed before it can end its ranks, the kernel kills them. After Ctrl-C, ranks
that are still running :data:`PATIENCE_S` later are killed: torchrun alone would wait for 30 s.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

from tdcoll.base.call_log import ranks_text

PATIENCE_S = 3.0
"""Seconds that ranks have to end after Ctrl-C."""

ANNOUNCE_S = 10.0
"""Seconds after which a host says that it waits for others."""

_ANNOUNCE_AGAIN_S = 60.0

GIVE_UP = "give_up"
"""Key of ``--rdzv-conf`` for the seconds that hosts wait for each other. torchrun's own, ``timeout``,
has to be larger: what it says then is a page of C++ frames, and it tries twice."""

_LONGEST = 240
"""Characters of a sentence in the last lines."""
_LONGEST_WITH_ADVICE = 400
_MOST_WAITS = 4
"""Lines about ranks that waited."""
_PR_SET_PDEATHSIG = 1


def summary(
    exits: Mapping[int, tuple[int, int]],
    words: Mapping[int, Mapping[str, Any]],
    ended: Collection[int],
) -> list[str]:
    """Return lines that say who died, who noticed and who was ended.

    Args:
        exits: of each rank that failed, its process and exit status (negative: the signal that
            ended it).
        words: what processes wrote down about their last errors: ``error``, ``noticed``, ``time``.
        ended: processes that were running until torchrun ended them.
    """
    groups: dict[tuple[str, str], list[int]] = {}
    for rank, (pid, status) in sorted(exits.items()):
        said = words.get(pid)
        if said is not None:  # also of a rank that was still leaving when torchrun ended it
            how, why = (
                ("noticed", "") if said["noticed"] else ("failed", _with_advice(said["error"]))
            )
        elif pid in ended:  # whatever its status: a handler of the signal may exit as it likes
            how = "still running, ended by torchrun"
            why = ""
        else:
            names = {-known: known.name for known in signal.Signals}
            died = "died", names.get(status, f"signal {-status}")
            how, why = died if status < 0 else ("ended", f"exit status {status}")
        groups.setdefault((how, why), []).append(rank)

    def of_first(ranks: Sequence[int]) -> Mapping[str, Any]:
        return words.get(exits[ranks[0]][0], {})

    lines = []
    for wanted in ("died", "failed", "ended"):  # who has left no word ended at an unknown time
        found = [
            (of_first(ranks).get("time", 0.0), why, ranks)
            for (how, why), ranks in groups.items()
            if how == wanted
        ]
        lines += [f"{wanted}: {ranks_text(ranks)} ({why})" for _, why, ranks in sorted(found)]
    giving_up = "only noticed" if lines else "gave up waiting"
    if not lines:
        lines = [
            "no rank of this host died or failed by itself; if there are other hosts, see what they printed"
        ]
    waits = _waits(groups.get(("noticed", ""), []), exits, words)
    for ranks, sentence in waits[:_MOST_WAITS]:
        lines.append(f"{giving_up}: {ranks_text(ranks)} ({sentence})")
    others = sorted(rank for ranks, _ in waits[_MOST_WAITS:] for rank in ranks)
    if others:
        lines.append(f"{giving_up}, for others: {ranks_text(others)}")
    return lines + [
        f"{how}: {ranks_text(ranks)}"
        for (how, _), ranks in groups.items()
        if how.startswith("still")
    ]


def _first_sentence(error: str) -> str:
    """The first sentence of an error, on one line."""
    text = " ".join(error.split()).split(". ")[0].rstrip(".")
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _with_advice(error: str) -> str:
    """The first sentences of an error, on one line: as many as fit, since advice comes last."""
    text = _first_sentence(error)
    for sentence in " ".join(error.split()).split(". ")[1:]:
        if text.endswith("...") or len(text) + len(sentence) > _LONGEST_WITH_ADVICE:
            break
        text = f"{text}. {sentence.rstrip('.')}"
    return text


def _waits(
    noticed: Sequence[int], exits: Mapping[int, tuple[int, int]], words: Mapping[int, Any]
) -> list[tuple[list[int], str]]:
    """Return ``(ranks, what one of them said)`` of ranks that waited for the same, most ranks
    first.

    If a rank left out a call, the others wait for it in that call, and it waits for them elsewhere.
    """
    groups: dict[str, tuple[list[int], str]] = {}
    for rank in noticed:
        sentence = _first_sentence(words[exits[rank][0]]["error"])
        for_whom = re.sub(r"rank \d+ waited [\d.]+ s |: signal .*", "", sentence)
        groups.setdefault(for_whom, ([], sentence))[0].append(rank)
    return sorted(groups.values(), key=lambda group: -len(group[0]))


@dataclass(frozen=True)
class Meeting:
    """Where launchers of several hosts meet.

    Attributes:
        host, port: an address of the host with node rank 0, and a port there.
        node_rank, nnodes: which of how many hosts this is.
        timeout_s: how long to wait for the others.
    """

    host: str
    port: int
    node_rank: int
    nnodes: int
    timeout_s: float

    @classmethod
    def of(cls, words: Sequence[str]) -> Meeting | None:
        """Return what torchrun's options say, as :mod:`tdcoll.tools.launch` writes them; None if
        the job has one host, or they are others."""
        own = list(words[: words.index("--")]) if "--" in words else []
        given = dict(itertools.pairwise(own))
        timeout = re.search(rf"\b{GIVE_UP}=(\d+)", given.get("--rdzv-conf", ""))
        if timeout is None or "--master-addr" not in given:
            return None
        nnodes = int(given["--nnodes"])
        if nnodes < 2:
            return None
        host, port = given["--master-addr"], int(given["--master-port"])
        return cls(host, port, int(given["--node-rank"]), nnodes, int(timeout[1]))

    def whom(self) -> str:
        """Return whom this host waits for, in words."""
        where = f"{self.host}:{self.port}"
        if self.node_rank:
            return f"node rank 0 at {where}{self.problem()}, or for other hosts to come there"
        others = ranks_text(range(1, self.nnodes)).replace("rank", "node rank", 1)
        return f"{others} to come to {where}{self.problem()}"

    def problem(self) -> str:
        """Return what is wrong with the host's name, in words; nothing if it has an address."""
        try:
            socket.getaddrinfo(self.host, self.port)
        except OSError as error:
            return f" (no address was found for the name {self.host}: {error.strerror})"
        return ""

    def announce(self, started: threading.Event) -> None:
        """Say whom this host waits for, until its ranks are ``started``; or end this process."""
        began = time.monotonic()
        due = [ANNOUNCE_S]
        while due[-1] + _ANNOUNCE_AGAIN_S < self.timeout_s:
            due.append(due[-1] + _ANNOUNCE_AGAIN_S)
        for at in (at for at in due if at < self.timeout_s):
            if started.wait(began + at - time.monotonic()):
                return
            _say(f"waiting for {self.whom()}, since {at:g} s")
        if not started.wait(began + self.timeout_s - time.monotonic()):
            _say(f"gave up after {self.timeout_s:g} s: waited for {self.whom()}")
            os._exit(1)  # the main thread is inside of PyTorch, and no rank has been started


def _watch_ranks(started: threading.Event) -> set[int]:
    """Return the processes that torchrun will have ended. If this process dies, the kernel kills
    its ranks. ``started`` is set with the first of them."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    handlers: Any = subprocess_handler
    ended: set[int] = set()
    prctl = ctypes.CDLL(None).prctl
    launcher = os.getpid()
    close = handlers.SubprocessHandler.close

    start_process = handlers.Popen

    def start_rank(*arguments: Any, **named: Any) -> Any:
        started.set()
        return start_process(*arguments, **named, preexec_fn=in_the_rank)

    def in_the_rank() -> None:
        # Kept across execve. The kernel looks at the thread that has started the rank, which is
        # torchrun's main thread.
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:  # it has died before that call
            os.kill(os.getpid(), signal.SIGKILL)

    def kill(process: Any) -> None:
        if process.poll() is None:
            _say(
                f"process {process.pid} did not end within {PATIENCE_S:g} s of Ctrl-C, and is killed"
            )
            process.kill()

    def close_and_note(handler: Any, death_sig: Any = None) -> Any:
        with contextlib.suppress(AttributeError):
            if handler.proc.poll() is None:
                ended.add(handler.proc.pid)
                if death_sig == signal.SIGINT:
                    timer = threading.Timer(PATIENCE_S, kill, [handler.proc])
                    timer.daemon = True  # if all ranks end before, this process does, too
                    timer.start()
        return close(handler, death_sig)

    handlers.Popen = start_rank
    handlers.SubprocessHandler.close = close_and_note
    return ended


def _say(line: str) -> None:
    print(f"tdcoll: {line}", file=sys.stderr, flush=True)


def _read(file: IO[bytes]) -> dict[int, dict[str, Any]]:
    """Return the last words of each process; without those that a process was killed in the middle
    of."""
    found = {}
    for line in file.read().splitlines():
        with contextlib.suppress(KeyError, TypeError, ValueError):
            said = json.loads(line)
            found[said["pid"]] = said
    return found


def main() -> None:
    """Run torchrun with the arguments of this process. After Ctrl-C, exit with status 130."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    started = threading.Event()
    try:
        ended = _watch_ranks(started)
    except (
        AttributeError,
        ImportError,
    ):  # of a later PyTorch: running the job matters more than the report
        run.main()
        return
    meeting = Meeting.of(sys.argv[1:])
    if meeting is not None:
        threading.Thread(target=meeting.announce, args=(started,), daemon=True).start()
    # A file without a name, which goes with this process however it ends; the ranks open it by its
    # descriptor.
    with open(os.memfd_create("tdcoll-last-words"), "rb") as file:
        os.environ["TDCOLL_LAST_WORDS"] = f"/proc/{os.getpid()}/fd/{file.fileno()}"
        try:
            run.main()
        except ChildFailedError as error:
            exits = {
                rank: (failure.pid, failure.exitcode) for rank, failure in error.failures.items()
            }
            lines = summary(exits, _read(file), ended)
            named = lines[0].startswith(("died", "failed", "ended"))
            if not named or os.environ.get("TDCOLL_TRACEBACK", "0") not in ("", "0"):
                sys.excepthook(*sys.exc_info())
            else:
                _say("the job has failed; TDCOLL_TRACEBACK=1 shows torchrun's report, too")
            for line in lines:
                _say(line)
            sys.exit(1)
        except SignalException as error:
            if error.sigval != signal.SIGINT:
                raise
            _say("Ctrl-C has ended the job")
            sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main()
