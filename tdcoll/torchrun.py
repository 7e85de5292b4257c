# SPDX-License-Identifier: Apache-2.0
"""``python -m tdcoll.torchrun``: torchrun, which says in the end who died and who only noticed.

When a rank dies, the others give up on it a while later, each with an error of its own. torchrun's "Root Cause" is any
of them: it looks at all at once, and does not know what an error means. This runs torchrun as it is: its options, its
report, its exit status, what it does on signals. If processes of this host have failed, it adds some last lines on
stderr, which say which of them ended by themselves. It goes by

- the exit status, or signal, of each process;
- which processes were still running when torchrun ended them;
- what each rank wrote down about its last error (:mod:`tdcoll.runtime.last_words`). An expired wait for another rank,
  and a connection that another rank has closed, are no cause.

If this process is killed before it can end its ranks, the kernel kills them. It leaves no files of its own either,
because the file for the last words has no name.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import signal
import sys
from collections.abc import Collection, Mapping, Sequence
from types import TracebackType
from typing import IO, Any

__all__ = ["main", "summary"]

_LONGEST = 240
_PR_SET_PDEATHSIG = 1


def summary(
    exits: Mapping[int, tuple[int, int]], words: Mapping[int, Mapping[str, Any]], ended: Collection[int]
) -> list[str]:
    """Who died, who noticed and who was ended, as lines.

    Args:
        exits: of each rank that failed, its process and exit status (negative: the signal that ended it).
        words: what processes wrote down about their last errors: ``error``, ``noticed``, ``time``.
        ended: processes that were running until torchrun ended them.
    """
    noticed, running = [], []
    causes: dict[tuple[str, str], list[int]] = {}
    began: dict[tuple[str, str], float] = {}
    for rank, (pid, status) in sorted(exits.items()):
        said = words.get(pid)
        if pid in ended and (status < 0 or said is None):  # a handler of the signal may exit as it likes
            running.append(rank)
        elif said is not None and said["noticed"]:
            noticed.append(rank)
        else:
            if said is not None:
                cause = ("failed", _shortened(said["error"]))
            else:
                cause = ("died", _signal_name(-status)) if status < 0 else ("ended", f"exit status {status}")
            causes.setdefault(cause, []).append(rank)
            began.setdefault(cause, said["time"] if said is not None else 0.0)
    order = ["died", "failed", "ended"]  # who has left no word ended at an unknown time
    first = sorted(causes, key=lambda cause: (order.index(cause[0]), began[cause]))
    lines = [f"{how}: {_ranks(causes[how, why])} ({why})" for how, why in first]
    if not causes:
        lines.append("no rank of this host died or failed by itself; if there are other hosts, see what they printed")
    if noticed:
        told = _shortened(words[exits[noticed[0]][0]]["error"])
        lines.append(f"{'only noticed' if causes else 'gave up waiting'}: {_ranks(noticed)} ({told})")
    if running:
        lines.append(f"still running, ended by torchrun: {_ranks(running)}")
    return lines


def _ranks(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0, 2``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _shortened(error: str) -> str:
    """The first sentence of an error, on one line."""
    text = " ".join(error.split()).split(". ")[0].rstrip(".")
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _note_whom_torchrun_ends() -> set[int]:
    """The processes that torchrun sends a signal, as long as this lives. ``ImportError``: it is built otherwise."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    ended: set[int] = set()
    close = SubprocessHandler.close

    def close_and_note(handler: Any, *arguments: Any, **options: Any) -> Any:
        with contextlib.suppress(AttributeError):
            if handler.proc.poll() is None:
                ended.add(handler.proc.pid)
        return close(handler, *arguments, **options)

    SubprocessHandler.close = close_and_note  # type: ignore[method-assign, assignment]
    return ended


def _end_ranks_with_this_process() -> None:
    """From now on, the kernel kills the ranks if this process dies without ending them, as by SIGKILL.

    ``ImportError`` or ``AttributeError``: PyTorch, or the system, is built otherwise.
    """
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    prctl, launcher = ctypes.CDLL(None).prctl, os.getpid()

    def in_the_rank() -> None:
        # Kept across execve. The kernel looks at the thread that has started the rank, which is torchrun's main thread.
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:  # it has died before that call
            os.kill(os.getpid(), signal.SIGKILL)

    popen = subprocess_handler.Popen
    subprocess_handler.Popen = functools.partial(popen, preexec_fn=in_the_rank)  # type: ignore[misc, assignment]


def _read(file: IO[bytes]) -> dict[int, dict[str, Any]]:
    """Return the last words of each process; without those that a process was killed in the middle of."""
    found = {}
    for line in file.read().splitlines():
        try:
            said = json.loads(line)
            found[said["pid"]] = said
        except (KeyError, TypeError, ValueError):
            continue
    return found


def main() -> Any:
    """torchrun, with the arguments of this process."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        _end_ranks_with_this_process()
        ended = _note_whom_torchrun_ends()
    except (AttributeError, ImportError):  # of a PyTorch to come: the job counts for more than what is said of it
        return run.main()
    # A file without a name, which goes with this process however it ends; the ranks open it by its descriptor.
    with open(os.memfd_create("tdcoll-last-words"), "rb") as file:
        os.environ["TDCOLL_LAST_WORDS"] = f"/proc/{os.getpid()}/fd/{file.fileno()}"

        def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            sys.__excepthook__(kind, error, trace)
            if isinstance(error, ChildFailedError):
                exits = {rank: (failure.pid, failure.exitcode) for rank, failure in error.failures.items()}
                for line in summary(exits, words, ended):
                    print(f"tdcoll: {line}", file=sys.stderr, flush=True)

        sys.excepthook = report
        words: dict[int, dict[str, Any]] = {}
        try:
            run.main()
        finally:
            words.update(_read(file))


if __name__ == "__main__":
    main()
