# SPDX-License-Identifier: Apache-2.0
"""Questions to ``torch.distributed``'s key-value store: each ends, and no answer is ever run as code.

All of tdcoll's traffic with a store goes through :func:`ask`, and the values in it through :func:`encode` and
:func:`decode`.
"""

from __future__ import annotations

import base64
import json
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from queue import SimpleQueue
from typing import Any, TypeVar

import torch.distributed as dist

from tdcoll.errors import CollectiveTimeout, TdcollError

__all__ = ["StoreLost", "StoreSilent", "ask", "decode", "encode", "foreign"]

Answer = TypeVar("Answer")

_SLACK_S = 1.0
"""How much longer than its own deadline a question may take: for the round trips before and after a wait."""

_LONGEST_SHOWN = 60


# ---------------------------------------------------------------------- deadlines


class StoreLost(TdcollError):
    """The store's server has ended, or cannot be reached."""


class StoreSilent(CollectiveTimeout, StoreLost):
    """The store's server has not answered in time. The connection stays with the question, and is lost."""


_idle: list[_Helper] = []
os.register_at_fork(after_in_child=_idle.clear)  # a child has none of its parent's threads


class _Helper:
    """A thread that asks one question after another. If one never ends, the thread stays with it."""

    def __init__(self) -> None:
        self._questions: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
        threading.Thread(target=self._run, name="tdcoll.store", daemon=True).start()

    @classmethod
    def ask(cls, question: Callable[[], Any]) -> Future[Any]:
        try:
            helper = _idle.pop()
        except IndexError:
            helper = cls()
        answer: Future[Any] = Future()
        helper._questions.put((question, answer))
        return answer

    def _run(self) -> None:
        while True:
            question, answer = self._questions.get()
            value: Any = None
            error: BaseException | None = None
            try:
                value = question()
            except BaseException as raised:
                error = raised
            _idle.append(self)  # before the caller goes on, so that it finds this helper for its next question
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(value)
            del question, answer, value, error


def ask(
    question: Callable[[], Answer],
    rank: int,
    tag: str,
    timeout_s: float,
    whom: str = "the store, which does not answer: the process that serves it, usually rank 0's or torchrun's, is "
    "stopped or cannot be reached",
) -> Answer:
    """Return ``question()``, which asks a store. It has ``timeout_s`` and a second.

    The question is asked on a thread of its own. PyTorch's client of a TCPStore gives up waiting for a key, but it
    waits without end for the server's next word: when the server's process is stopped, so is every client.

    Args:
        question: bounds its own waits for other ranks by ``timeout_s``.
        rank: this rank, for errors.
        tag: names the call in errors.
        timeout_s: seconds.
        whom: the question waits for, in the error's words.

    Raises:
        StoreSilent: the question has not ended.
        StoreLost: the connection is closed.
        Others: as the question.
    """
    limit = min(timeout_s + _SLACK_S, threading.TIMEOUT_MAX)
    answer = _Helper.ask(question)
    try:
        return answer.result(limit)
    except FutureTimeout:
        if answer.done():  # at the last moment, or the error is the question's own
            return answer.result()
        raise StoreSilent(f"in '{tag}' for {whom}", rank=rank, timeout_s=limit) from None
    except dist.DistNetworkError as error:
        raise StoreLost(
            f"rank {rank} in '{tag}': the store is gone; the process that serves it, usually rank 0's or torchrun's, "
            f"has ended or cannot be reached ({error})"
        ) from error


# ---------------------------------------------------------------------- values


def encode(tag: str, value: Any) -> bytes:
    """Return bytes for :func:`decode`: JSON, in which an object names a type that JSON does not have.

    Values are None, bool, int, float, str, bytes, and lists, tuples and dicts of values. What comes back is equal.

    Raises:
        TypeError: the value, or a part of it, is something else.
    """
    return json.dumps(_plain((tag, value)), separators=(",", ":")).encode()


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return {"tuple": [_plain(item) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[_plain(key), _plain(item)] for key, item in value.items()]}
    raise TypeError(f"ranks exchange numbers, texts, bytes, and lists, tuples and dicts of them; got {value!r}")


def decode(data: bytes, where: str) -> tuple[str, Any]:
    """Return the tag and the value of which :func:`encode` has made ``data``.

    Args:
        data: anything.
        where: it was found, for the error.

    Raises:
        TdcollError: ``data`` is nothing that :func:`encode` makes.
    """
    try:
        found = _value(json.loads(data))
        if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], str)):
            raise ValueError("a rank writes a pair of a tag and a value")
    except (ValueError, TypeError, RecursionError) as error:  # what is not JSON, or not UTF-8, is a ValueError
        raise foreign(where, data) from error
    return found


def foreign(where: str, data: bytes) -> TdcollError:
    """Return the error of ``data`` that no rank has written."""
    return TdcollError(
        f"{where} holds {len(data)} bytes that no rank of this job writes, beginning with "
        f"{bytes(data[:_LONGEST_SHOWN])!r}: another process writes to the job's store. Nothing of it was run. See "
        "docs/multi-node.md#trust"
    )


def _value(found: Any) -> Any:
    if isinstance(found, list):
        return [_value(item) for item in found]
    if not isinstance(found, dict):
        return found
    ((kind, held),) = found.items()
    if kind == "bytes":
        return base64.b64decode(held, validate=True)
    if kind == "tuple" and isinstance(held, list):
        return tuple(_value(item) for item in held)
    if kind == "dict" and isinstance(held, list):
        return {_value(key): _value(item) for key, item in held}
    raise ValueError(f"no value is {kind!r} of {type(held).__name__}")
