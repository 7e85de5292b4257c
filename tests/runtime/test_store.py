# SPDX-License-Identifier: Apache-2.0
"""Questions to a store end, whatever its server does; and no value in it is run."""

from __future__ import annotations

import os
import pickle
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tdcoll
from tdcoll.base.errors import CollectiveTimeout, TdcollError
from tdcoll.runtime.control import StoreControlPlane, generation
from tdcoll.runtime.store import StoreLost, StoreSilent, ask, decode, encode

SHORT_S = 0.3
MOST_S = 3.0
"""Far more than a deadline and its slack; without a limit such a wait has no end."""


class Server:
    """A store that another process serves, which falls silent or dies on request."""

    def __init__(self) -> None:
        fork = get_context("fork")
        reader, writer = fork.Pipe(duplex=False)
        self._process = fork.Process(target=self._serve, args=(writer,))
        self._process.start()
        self.port: int = reader.recv()

    @staticmethod
    def _serve(writer: Any) -> None:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        writer.send(store.port)
        signal.pause()

    def client(self) -> Any:
        return dist.TCPStore("127.0.0.1", self.port, is_master=False, wait_for_workers=False)

    def stop(self) -> None:
        os.kill(self._process.pid or 0, signal.SIGSTOP)

    def end(self) -> None:
        self._process.kill()
        self._process.join()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.end()


def limited(action: Callable[[], Any]) -> BaseException:
    """Return what ``action`` raises, within ``MOST_S`` seconds."""
    raised: SimpleQueue[BaseException | None] = SimpleQueue()

    def body() -> None:
        try:
            raised.put(action())
        except BaseException as error:
            raised.put(error)

    threading.Thread(target=body, daemon=True).start()
    error = raised.get(timeout=MOST_S)
    assert error is not None
    return error


# ---------------------------------------------------------------------- a store that stops answering, or dies


QUESTIONS: dict[str, Callable[[Any], Any]] = {
    "exchange": lambda store: StoreControlPlane(store, 0, SHORT_S).all_gather([0], "call", None),
    "join": lambda store: generation(store, 0, [0], "call", SHORT_S),
}


FAULTS: dict[str, tuple[type[Exception], str]] = {
    "stop": (StoreSilent, "rank 0 waited 1.3 s in 'call' for the store, which does not answer"),
    "end": (
        StoreLost,
        "rank 0 in 'call': the store is gone; the process that serves it, usually rank 0's",
    ),
}


@pytest.mark.parametrize("question", QUESTIONS.values(), ids=QUESTIONS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_store_that_stops_answering_or_dies(
    server: Server, question: Callable[[Any], Any], fault: str
) -> None:
    store = server.client()
    question(store)
    getattr(server, fault)()
    error = limited(lambda: question(store))
    assert (type(error), str(error).startswith(FAULTS[fault][1])) == (FAULTS[fault][0], True)
    assert fault == "stop" or isinstance(error.__cause__, dist.DistError)


def test_the_first_of_several_questions_is_not_held_up_by_one_that_never_ends() -> None:
    held = threading.Event()
    assert isinstance(limited(lambda: ask(held.wait, 0, "held", 0.01)), CollectiveTimeout)
    assert [ask(partial(int, text), 0, "next", 1) for text in "012"] == [0, 1, 2]
    held.set()


def test_errors_of_a_question_are_its_own() -> None:
    for kind in (ValueError, TimeoutError, KeyboardInterrupt):

        def refuse(kind: type[BaseException] = kind) -> None:
            raise kind("no")

        with pytest.raises(kind, match="no"):
            ask(refuse, 0, "call", 1)


def test_a_child_that_was_forked_asks_as_well() -> None:
    assert ask(lambda: 1, 0, "parent", 1) == 1
    child = os.fork()
    if not child:
        os._exit(0 if ask(lambda: 7, 0, "child", 1) == 7 else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.fixture
def default_group(server: Server) -> Iterator[Callable[[str], None]]:
    def make(backend: str) -> None:
        of_one = {"store": server.client(), "rank": 0, "world_size": 1}
        dist.init_process_group(backend, timeout=timedelta(seconds=SHORT_S), **of_one)

    yield make
    if dist.is_initialized():
        dist.destroy_process_group()
    tdcoll.finalize()
    assert not tdcoll.is_initialized()


def assert_refused(error: BaseException, fault: str) -> None:
    assert isinstance(error, TdcollError)
    assert isinstance(error, CollectiveTimeout) == (fault == "stop")
    assert FAULTS[fault][1].partition(" the store")[2] in str(error)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_job_whose_store_fails(
    server: Server, default_group: Callable[[str], None], fault: str
) -> None:
    """The call says what happened, and leaving says nothing more."""
    default_group("gloo")
    tdcoll.initialize(heap_bytes=1 << 20, timeout_s=SHORT_S)
    tdcoll.barrier()
    getattr(server, fault)()
    assert_refused(limited(tdcoll.barrier), fault)
    with pytest.raises(TdcollError, match="nothing collective is tried any more"):
        tdcoll.barrier()
    began = time.monotonic()
    tdcoll.finalize()
    assert time.monotonic() - began < 0.5
    assert not tdcoll.is_initialized()


@pytest.mark.parametrize("fault", FAULTS)
def test_initialize_when_the_store_has_failed(
    server: Server, default_group: Callable[[str], None], fault: str
) -> None:
    default_group("gloo")
    getattr(server, fault)()
    error = limited(lambda: tdcoll.initialize(timeout_s=SHORT_S))
    assert isinstance(error, TdcollError)
    assert re.search("rank 0 .*the store", str(error))
    assert not tdcoll.is_initialized()


@pytest.mark.parametrize("served", [True, False], ids=["silent", "absent"])
def test_initialize_bounds_its_rendezvous(
    server: Server, monkeypatch: pytest.MonkeyPatch, served: bool
) -> None:
    """Nothing listens at the port, or what listens there is silent."""
    (server.stop if served else server.end)()
    for assignment in (
        "RANK=1",
        "WORLD_SIZE=2",
        "MASTER_ADDR=127.0.0.1",
        f"MASTER_PORT={server.port}",
    ):
        monkeypatch.setenv(*assignment.split("="))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    error = limited(lambda: tdcoll.initialize(timeout_s=SHORT_S))
    assert isinstance(error, CollectiveTimeout)
    assert f"in 'initialize' for the store at 127.0.0.1:{server.port}" in str(error)
    assert str(error).count("waited") == 1
    assert not dist.is_initialized()


@pytest.mark.parametrize("fault", FAULTS)
def test_new_group_is_bounded(
    server: Server, default_group: Callable[[str], None], fault: str
) -> None:
    default_group("tdcoll")
    getattr(server, fault)()
    assert_refused(limited(lambda: dist.new_group([0], timeout=timedelta(seconds=SHORT_S))), fault)
    began = time.monotonic()
    dist.destroy_process_group()
    assert time.monotonic() - began < 0.5, "leaving asked the store again"


# ---------------------------------------------------------------------- values


VALUES: list[Any] = [
    None, True, 0, -(1 << 80), 0.1, float("inf"), "", "text \udc80 é", b"", bytes(range(256)), (), [], {},
    [1, (2, [3, ()])], {"a": 1, (1, "b"): None, 2: {"tuple": [1]}}, {"tuple": [1, 2]}, {"bytes": "AAAA"}, {"dict": []},
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_values_come_back(value: Any) -> None:
    back = decode(encode("tag", value), "here")
    assert back == ("tag", value)
    assert repr(back[1]) == repr(value)


@pytest.mark.parametrize(
    "value", [object(), {1}, ValueError("x"), torch.float32, torch.zeros(1), [1, {2: object()}]]
)
def test_other_values_are_refused_by_who_sends_them(value: Any) -> None:
    with pytest.raises(TypeError, match="ranks exchange numbers"):
        encode("tag", value)


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.file),)


FOREIGN: dict[str, bytes] = {
    "nothing": b"",
    "garbage": b"\xff\x00\x01",
    "text": b"hello",
    "no pair": b'{"tuple":["call"]}',
    "a list": b'["call",1]',
    "no tag": b'{"tuple":[1,2]}',
    "a tuple of a text": b'{"tuple":"ab"}',
    "another type": b'{"tuple":["call",{"set":[1]}]}',
    "two types": b'{"tuple":["call",1],"dict":[]}',
    "no base64": b'{"tuple":["call",{"bytes":"*"}]}',
    "bytes of a number": b'{"tuple":["call",{"bytes":1}]}',
    "a key that no dict has": b'{"tuple":["call",{"dict":[[[],1]]}]}',
    "deep": b"[" * 100_000,
    "a long number": b'{"tuple":["call",' + b"1" * 10_000 + b"]}",
}


@pytest.mark.parametrize("data", FOREIGN.values(), ids=FOREIGN)
def test_what_no_rank_writes(data: bytes) -> None:
    text = r"^key 5 holds \d+ bytes that no rank of this job writes, beginning with b['\"]"
    with pytest.raises(TdcollError, match=text):
        decode(data, "key 5")


def test_a_foreign_pickle_is_not_run(tmp_path: Path) -> None:
    """Another process has written to the key of the next exchange."""
    store = dist.HashStore()
    for plane in (StoreControlPlane(store, rank, 5) for rank in (0, 1)):
        plane.all_gather([plane._rank], "alone", None)
    file = tmp_path / "run"
    payload = pickle.dumps(("call", Payload(file)))
    store.set("tdcoll/0-1/0/1", payload)
    with pytest.raises(TdcollError) as raised:
        StoreControlPlane(store, 0, 5).all_gather([0, 1], "call", None)
    assert str(raised.value).startswith(
        f"rank 0 in 'call': the store's key tdcoll/0-1/0/1 holds {len(payload)} bytes that no rank of this job writes"
    )
    assert not file.exists()
    pickle.loads(payload)
    assert file.exists(), "the payload does nothing"


def test_a_foreign_token_is_refused() -> None:
    for data in (b"\xff", b"-", b"x" * 32, b"-1e400", b"../" + b"a" * 29):
        store = dist.HashStore()
        store.set("tdcoll/join/0-1/asks/1", data)
        with pytest.raises(
            TdcollError, match=r"key tdcoll/join/0-1/asks/1 holds \d+ bytes that no rank"
        ):
            generation(store, 0, [0, 1], "join", 5)
