# SPDX-License-Identifier: Apache-2.0
"""The last lines of a job that failed: who died, and who only noticed. Jobs that end so are in
test_launch.py, tests/test_workers.py and tests/gpu."""

from __future__ import annotations

import atexit
import io
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from processes import python

from tdcoll import runtime
from tdcoll.base.errors import CollectiveTimeout, TdcollError
from tdcoll.job import last_words, lifecycle
from tdcoll.tools import torchrun
from tdcoll.tools.torchrun import GIVE_UP, Meeting, _read, summary

KILLED, SEGV, TERM = -signal.SIGKILL, -signal.SIGSEGV, -signal.SIGTERM
PEER = "CollectiveTimeout: rank 0 waited 3 s for peer 1: signal 4 had to reach 12. The peer has died, hangs, or more."
NO_RANK = (
    "no rank of this host died or failed by itself; if there are other hosts, see what they printed"
)
IN_FINALIZE = "CollectiveTimeout: rank {} waited 5 s in 'finalize' for rank(s)"
TOLD = "CollectiveTimeout: rank 0 waited 3 s for peer 1: signal 4 had to reach 12"


def timed_out(error: str = PEER) -> dict[str, Any]:
    return {"error": error, "noticed": True, "time": 20.0}


def failed(error: str, time: float = 1.0) -> dict[str, Any]:
    return {"error": error, "noticed": False, "time": time}


NOTICED = (1, timed_out())
# By rank: the exit status, what was written down, and whether the process was running until
# torchrun ended it.
CASES: dict[str, tuple[dict[int, tuple[Any, ...]], list[str]]] = {
    "killed, and the others were still running": (
        {1: (KILLED,), 0: (TERM, None, True), 2: (TERM, timed_out(), True)},
        [
            "died: rank 1 (SIGKILL)",
            f"only noticed: rank 2 ({TOLD})",
            "still running, ended by torchrun: rank 0",
        ],
    ),
    "the culprit was still leaving when torchrun ended it": (
        {0: NOTICED, 1: (TERM, failed("ValueError: x"), True)},
        ["failed: rank 1 (ValueError: x)", f"only noticed: rank 0 ({TOLD})"],
    ),
    "one that hung did not even end on SIGTERM": (
        {0: NOTICED, 1: (KILLED, None, True)},
        [
            NO_RANK,
            f"gave up waiting: rank 0 ({TOLD})",
            "still running, ended by torchrun: rank 1",
        ],
    ),
    "ended by somebody's SIGTERM": (
        {3: (TERM,), 0: (TERM, None, True)},
        ["died: rank 3 (SIGTERM)", "still running, ended by torchrun: rank 0"],
    ),
    "an exception": (
        {
            0: NOTICED,
            1: (1, timed_out("CollectiveTimeout: rank 1 waited")),
            2: (1, failed("ValueError: no such\n row")),
        },
        [
            "failed: rank 2 (ValueError: no such row)",
            f"only noticed: rank 0 ({TOLD})",
            "only noticed: rank 1 (CollectiveTimeout: rank 1 waited)",
        ],
    ),
    "a rank that left out a call waits elsewhere": (
        {
            0: NOTICED,
            1: (1, timed_out(f"{IN_FINALIZE.format(1)} [0, 2], which died")),
            2: (1, timed_out(PEER.replace("rank 0", "rank 2").replace("12", "14"))),
        },
        [
            NO_RANK,
            f"gave up waiting: ranks 0, 2 ({TOLD})",
            f"gave up waiting: rank 1 ({IN_FINALIZE.format(1)} [0, 2], which died)",
        ],
    ),
    "each waits for another": (
        {rank: (1, timed_out(f"{IN_FINALIZE.format(rank)} [{rank + 1}]")) for rank in range(7)},
        [
            NO_RANK,
            *(
                f"gave up waiting: rank {rank} ({IN_FINALIZE.format(rank)} [{rank + 1}])"
                for rank in range(4)
            ),
            "gave up waiting, for others: ranks 4-6",
        ],
    ),
    "what to do about it": (
        {0: (1, failed("HeapExhaustedError: no room. Raise NVSHMEM_SYMMETRIC_SIZE. Or this."))},
        ["failed: rank 0 (HeapExhaustedError: no room. Raise NVSHMEM_SYMMETRIC_SIZE. Or this)"],
    ),
    "aborted while it left after an error": (
        {0: (-signal.SIGABRT, timed_out()), 1: (SEGV,)},
        ["died: rank 1 (SIGSEGV)", f"only noticed: rank 0 ({TOLD})"],
    ),
    "without a word": ({4: (3,)}, ["ended: rank 4 (exit status 3)"]),
    "the same error everywhere": (
        {0: (1, failed("RankMismatchError: x", 2.0)), 1: (1, failed("RankMismatchError: x"))},
        ["failed: ranks 0, 1 (RankMismatchError: x)"],
    ),
    "in the order in which it happened": (
        {
            0: (1, failed("KeyError: late", 9.0)),
            1: (1, failed("ValueError: early", 8.0)),
            2: (KILLED,),
        },
        [
            "died: rank 2 (SIGKILL)",
            "failed: rank 1 (ValueError: early)",
            "failed: rank 0 (KeyError: late)",
        ],
    ),
    "the reason is not known of all": (
        {0: (1,), 1: (KILLED,)},
        ["died: rank 1 (SIGKILL)", "ended: rank 0 (exit status 1)"],
    ),
    "a signal without a name": ({0: (-99,)}, ["died: rank 0 (signal 99)"]),
    "a long error": ({0: (1, failed("x" * 999))}, [f"failed: rank 0 ({'x' * 240}...)"]),
}


@pytest.mark.parametrize("case", CASES)
def test_who_died_and_who_noticed(case: str) -> None:
    ranks, lines = CASES[case]
    said = {100 + rank: ended[1] for rank, ended in ranks.items() if len(ended) > 1 and ended[1]}
    running = {100 + rank for rank, ended in ranks.items() if len(ended) > 2}
    assert (
        summary({rank: (100 + rank, ended[0]) for rank, ended in ranks.items()}, said, running)
        == lines
    )


def test_settings_that_are_wrong_are_written_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason stands in the last lines, and not far above them."""
    watched: list[bool] = []
    monkeypatch.setattr(last_words, "watch", lambda: watched.append(True))
    monkeypatch.setenv("TDCOLL_TIMEOUT_S", "abc")
    with pytest.raises(ValueError, match="TDCOLL_TIMEOUT_S must be a number"):
        lifecycle.initialize()
    assert watched


def test_a_line_that_was_cut_off_is_left_out() -> None:
    """Each process writes a line break before its words, so that what was cut off spoils no other
    words."""
    lines = [
        json.dumps({"pid": 6, **timed_out("of before")}),
        '{"pid": 7, "error": "\xff',
        json.dumps({"pid": 6, **timed_out()}),
    ]
    written = b"".join(b"\n" + line.encode("latin-1") for line in lines)
    assert _read(io.BytesIO(written)) == {6: {"pid": 6, **timed_out()}}
    assert _read(io.BytesIO(b"")) == {}


# ---------------------------------------------------------------------- what a rank writes down


def timeout() -> CollectiveTimeout:
    return CollectiveTimeout(
        rank=0, peer=1, signal=4, epoch=12, expected=12, seen=10, timeout_s=3.0
    )


def caused(error: BaseException, cause: BaseException, *, named: bool = True) -> BaseException:
    """``error``, raised from ``cause`` or while it was handled."""
    try:
        try:
            raise cause
        except BaseException:
            if named:
                raise error from cause
            raise error  # noqa: B904
    except BaseException as raised:
        return raised


@pytest.mark.parametrize(
    ("error", "noticed"),
    [
        (timeout(), True),
        (
            caused(
                TdcollError("rank 0 waited 30 s in 'barrier' for rank(s) [1]"),
                dist.DistStoreError("wait"),
            ),
            True,
        ),
        (caused(KeyError("in the script's own clean-up"), timeout(), named=False), True),
        (dist.DistBackendError("NCCL error: remote process exited"), True),
        (
            RuntimeError(
                "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [::1]:5"
            ),
            True,
        ),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("Connection closed by peer, says the script"), False),
        (TdcollError("no CUDA GPU is visible"), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_only_says_that_another_rank_did_not_answer(
    error: BaseException, noticed: bool
) -> None:
    assert last_words.noticed(error) is noticed


@pytest.fixture
def watching(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[SimpleNamespace]:
    """A process that watches: what it has ``written()`` so far, and how it ``leave()``s, or fails
    by an excepthook."""
    file = tmp_path / "words"
    file.touch()
    leave: list[Callable[[], None]] = []
    monkeypatch.setenv("TDCOLL_LAST_WORDS", str(file))
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: None)
    monkeypatch.setattr(atexit, "register", leave.append)
    monkeypatch.setattr(last_words, "aborted", False)
    last_words.watch.__wrapped__()

    def written() -> tuple[str, bool] | None:
        with file.open("rb") as words:
            said = _read(words).get(os.getpid())
        return said and (said["error"], said["noticed"])

    yield SimpleNamespace(written=written, leave=leave[0])
    runtime.install(None)


def test_an_error_that_ends_a_rank_is_written_down(watching: SimpleNamespace) -> None:
    sys.excepthook(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert watching.written() is None
    sys.excepthook(ValueError, ValueError("boom"), None)
    assert watching.written() == ("ValueError: boom", False)


def test_a_timeout_is_only_noticed(watching: SimpleNamespace) -> None:
    sys.excepthook(CollectiveTimeout, timeout(), None)
    error, noticed = said = watching.written()
    assert (error.split(":")[:2], noticed) == (
        ["CollectiveTimeout", " rank 0 waited 3 s for peer 1"],
        True,
    )
    watching.leave()
    assert watching.written() == said


@pytest.mark.parametrize("left", [False, True], ids=["still in the job", "after the job was left"])
def test_a_timeout_that_was_caught_is_noticed_at_the_exit(
    watching: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, left: bool
) -> None:
    watching.leave()
    assert watching.written() is None
    runtime.install(SimpleNamespace(failed=True, heap=SimpleNamespace(abort=lambda: None)))  # type: ignore[arg-type]
    if left:
        monkeypatch.setattr(lifecycle, "_options", object())
        lifecycle.finalize()
    watching.leave()
    assert watching.written() == ("a wait for another rank had expired", True)


def test_without_the_launcher_nothing_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TDCOLL_LAST_WORDS", raising=False)
    before = sys.excepthook
    last_words.watch.__wrapped__()
    assert sys.excepthook is before


# ---------------------------------------------------------------------- hosts that meet

OPTIONS = "--nnodes 3 --node-rank {} --master-addr {} --master-port 29400 --rdzv-conf give_up={},timeout=99"


def meeting(node_rank: int, host: str = "127.0.0.1", give_up: int = 40) -> Meeting:
    found = Meeting.of(
        [*OPTIONS.format(node_rank, host, give_up).split(), "--", "x.py", "--nnodes"]
    )
    assert found == Meeting(host, 29400, node_rank, 3, give_up)
    return found


@pytest.mark.parametrize(
    "words",
    [
        f"--nnodes 1 --node-rank 0 --master-addr a --master-port 1 --rdzv-conf {GIVE_UP}=3 -- x.py",
        "--nnodes 2 --rdzv-endpoint localhost:0 -- x.py",
        "-- x.py",
        "--nnodes 1:4 x.py --node-rank x",
        "--nnodes 1:4 --rdzv-conf timeout=3 -- x.py",
    ],
)
def test_jobs_of_which_no_host_waits(words: str) -> None:
    assert Meeting.of(words.split()) is None


def test_whom_a_host_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert meeting(1).whom() == ("node rank 0 at 127.0.0.1:29400, or for other hosts to come there")
    assert meeting(0).whom() == "node ranks 1, 2 to come to 127.0.0.1:29400"

    def resolve(host: str, port: int) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert "node rank 0 at gpu-7:29400 (no address was found for the name gpu-7: Name" in (
        meeting(2, "gpu-7").whom()
    )


def test_a_host_says_whom_it_waits_for_until_its_ranks_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started = threading.Event()
    monkeypatch.setattr(torchrun, "ANNOUNCE_S", 0.05)
    monkeypatch.setattr(torchrun, "_ANNOUNCE_AGAIN_S", 0.05)
    thread = threading.Thread(target=meeting(1).announce, args=(started,))
    thread.start()
    said = ""
    while said.count("tdcoll: waiting for node rank 0 at 127.0.0.1:29400") < 2:
        said += capsys.readouterr().err
        time.sleep(0.01)
    started.set()
    thread.join()
    assert "gave up" not in said + capsys.readouterr().err


@pytest.mark.parametrize("node_rank", [0, 1])
def test_a_partner_that_never_starts(node_rank: int) -> None:
    """The launcher ends in time, and one line says who did not come."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = f"--nnodes 2 --node-rank {node_rank} --rdzv 127.0.0.1:{port} --nproc 1 --timeout 2"
    done = python("-m", "tdcoll", "run", "--simulate", *options.split(), __file__)
    whom = "node rank 1 to come to" if node_rank == 0 else "node rank 0 at"
    assert done.returncode == 1, done.stderr
    assert done.stderr.splitlines()[-1].startswith(
        f"tdcoll: gave up after 2 s: waited for {whom} 127.0.0.1:{port}"
    ), done.stderr
