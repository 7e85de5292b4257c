# SPDX-License-Identifier: Apache-2.0
"""Requests to ``torch.distributed``'s key-value store: each ends, and no answer is ever run as
code.

All of tdcoll's traffic with a store goes through :func:`ask`, and its values through :func:`encode`
and :func:`decode`.
"""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

import torch.distributed as dist

from tdcoll.base.errors import CollectiveTimeout, TdcollError

Answer = TypeVar("Answer")

_SLACK_S = 1.0
"""How much longer than its own deadline a question may take, because there are round trips before
and after a wait."""

_LONGEST_SHOWN = 60


class StoreLost(TdcollError):
    """The store's server has ended, or cannot be reached."""


class StoreSilent(CollectiveTimeout, StoreLost):
    """The store's server has not answered in time. The connection stays with the question, and is
    lost."""


def ask(
    question: Callable[[], Answer],
    rank: int,
    tag: str,
    timeout_s: float,
    whom: str = "the store, which does not answer: the process that serves it, usually rank 0's or torchrun's, is "
    "stopped or cannot be reached",
) -> Answer:
    """Return ``question()``, which asks a store. It may take ``timeout_s`` and a second.

    The question runs on a separate thread, which is lost if it never ends. PyTorch's client of a
    TCPStore gives up waiting for a key, but it waits without end for the server's next word, for
    example if the server is stopped.

    Args:
        question: bounds its own waits for other ranks by ``timeout_s``.
        whom: the ranks that the question waits for, in the error's words.

    Raises:
        StoreSilent: the question has not ended.
        StoreLost: the connection is closed.
        Others: as the question.
    """
    limit = min(timeout_s + _SLACK_S, threading.TIMEOUT_MAX)
    answer: Future[Answer] = Future()

    def find_out(answer: Future[Answer]) -> None:
        try:
            answer.set_result(question())
        except BaseException as error:
            answer.set_exception(error)
            del answer  # whose error knows this frame

    threading.Thread(target=find_out, args=(answer,), name="tdcoll.store", daemon=True).start()
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


def encode(tag: str, value: Any) -> bytes:
    """Return bytes for :func:`decode`: JSON, in which an object names a type that JSON does not
    have.

    Values are None, bool, int, float, str, bytes, and lists, tuples and dicts of values. The
    decoded value is equal.

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
    if isinstance(value, tuple):
        return {"tuple": [_plain(item) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[_plain(key), _plain(item)] for key, item in value.items()]}
    raise TypeError(
        f"ranks exchange numbers, texts, bytes, and lists, tuples and dicts of them; got {value!r}"
    )


def decode(data: bytes, where: str) -> tuple[str, Any]:
    """Return the tag and value of which :func:`encode` has made ``data``; ``TdcollError`` for any
    other data."""
    try:
        found = json.loads(data, object_hook=_of_type)
        if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], str)):
            raise ValueError("a rank writes a pair of a tag and a value")
    except (
        ValueError,
        TypeError,
        RecursionError,
    ) as error:  # data that is not JSON, or not UTF-8, raises ValueError
        raise TdcollError(
            f"{where} holds {len(data)} bytes that no rank of this job writes, beginning with "
            f"{bytes(data[:_LONGEST_SHOWN])!r}: another process writes to the job's store. Nothing of it was run. See "
            "docs/multi-node.md#trust"
        ) from error
    return found


def _of_type(found: dict[str, Any]) -> Any:
    ((kind, held),) = found.items()
    if kind == "bytes":
        return base64.b64decode(held, validate=True)
    if kind == "tuple" and isinstance(held, list):
        return tuple(held)
    if kind == "dict" and isinstance(held, list):
        return dict(held)
    raise ValueError(f"no value is {kind!r} of {type(held).__name__}")
