# SPDX-License-Identifier: Apache-2.0
"""Arguments that are wrong: each error names the argument, says what was expected, and what
came."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tdcoll
import tdcoll.distributed
from tdcoll import runtime
from tdcoll.base.limits import MAX_BLOCKS
from tdcoll.calls.tuning import shipped
from tdcoll.testing import World

INF, NAN = float("inf"), float("nan")
X = torch.zeros(4)


class Given:
    """What a case may use, on a rank of a job of one."""

    def __init__(self) -> None:
        self.ctx = tdcoll.CollectiveContext(max_bytes_per_rank=64)
        self.sparse = tdcoll.SparseContext(max_rows_per_rank=4, max_row_bytes=16)


def deadline(timeout_s: Any) -> list[Callable[[Given], Any]]:
    """Everything that takes one."""
    return [
        lambda given: tdcoll.WaitMonitor(timeout_s=timeout_s),
        lambda given: tdcoll.CollectiveContext(max_bytes_per_rank=1, timeout_s=timeout_s),
        lambda given: tdcoll.SparseContext(
            max_rows_per_rank=1, max_row_bytes=1, timeout_s=timeout_s
        ),
    ]


SECONDS = "timeout_s must be greater than 0 and at most 1000000000 seconds, got "
SHAPE = "shape must be an int or a sequence of ints, got "
CTX = "ctx must be a tdcoll.CollectiveContext, got "
GROUP = (
    "group must be a ProcessGroup that this rank belongs to, a DeviceMesh, a sequence of global "
    "ranks, or None; got "
)

CASES: list[tuple[Callable[[Given], Any], type[Exception], str]] = [
    # deadlines
    *((call, ValueError, f"{SECONDS}{t}") for t in (0, -1, INF, NAN, 1e12) for call in deadline(t)),
    *(
        (call, TypeError, f"timeout_s must be a number of seconds, got {t!r}")
        for t in ("5", True)
        for call in deadline(t)
    ),
    (lambda given: tdcoll.WaitMonitor(rank="one"), TypeError, "rank must be an int, got 'one'"),
    # contexts
    (
        lambda given: make(tuning=5),
        TypeError,
        "tuning must be a tuning table (Table), the path of its file, or None, got 5",
    ),
    (
        lambda given: make(tuning="no.json"),
        ValueError,
        "tuning: no.json: expected the file of a tuning table: ",
    ),
    *(
        (lambda given, n=n: make(chunks=n), ValueError, f"chunks must be 2 to 4096, got {n}")
        for n in (0, 4097)
    ),
    *(
        (
            lambda given, name=name: make(**{name: -1}),
            ValueError,
            f"{name} must be at least 0, got -1",
        )
        for name in ("max_bytes_per_rank", "flagged_bytes", "lamport_bytes")
    ),
    *(
        (
            lambda given, name=name, n=n: make(**{name: n}),
            TypeError,
            f"{name} must be an int, got {n!r}",
        )
        for name in ("max_bytes_per_rank", "chunks", "max_blocks")
        for n in (1.5, "1M", True)
    ),
    (
        lambda given: make(max_blocks=MAX_BLOCKS + 1),
        ValueError,
        f"max_blocks must be 1 to {MAX_BLOCKS}, got",
    ),
    (lambda given: make(group=3), TypeError, f"{GROUP}3"),
    (lambda given: make(group=["a"]), TypeError, f"{GROUP}['a']"),
    (lambda given: make(group="0"), TypeError, f"{GROUP}'0'"),
    # all-gathers
    (lambda given: tdcoll.all_gather(X, ctx=given.sparse), TypeError, f"{CTX}SparseContext"),
    (
        lambda given: tdcoll.all_gather(None),
        TypeError,
        "tensor must be a torch.Tensor, got NoneType",
    ),
    *(
        (
            lambda given, call=call: call(None, ctx=given.ctx),
            TypeError,
            "tensor must be a torch.Tensor, got NoneType",
        )
        for call in (tdcoll.all_gather, tdcoll.all_gather_)
    ),
    # sparse all-reduces
    (
        lambda given: tdcoll.sparse_all_reduce(X.to_sparse(), ctx=given.ctx),
        TypeError,
        "ctx must be a tdcoll.SparseContext or None, got CollectiveContext",
    ),
    (
        lambda given: tdcoll.distributed.SparseGradientReducer(
            torch.nn.Embedding(4, 4, sparse=True), rows_per_rank=-1
        ),
        ValueError,
        "rows_per_rank must be at least 1, got -1",
    ),
    # memory
    (
        lambda given: tdcoll.empty(3, 4),
        TypeError,
        "dtype must be a torch.dtype (sizes go together: empty((3, 4))), got 4",
    ),
    (lambda given: tdcoll.zeros(3, "float"), TypeError, "dtype must be a torch.dtype, got 'float'"),
    *(
        (lambda given, s=s: tdcoll.empty(s), TypeError, f"{SHAPE}{s!r}")
        for s in ("ab", None, 3.5, (3.5,), True)
    ),
    (
        lambda given: tdcoll.empty((2, -1)),
        ValueError,
        "shape must have sizes of at least 0, got [2, -1]",
    ),
    (lambda given: tdcoll.empty(3, name=3), TypeError, "name must be a str, got 3"),
    (lambda given: tdcoll.free(None), TypeError, "tensor must be a torch.Tensor, got NoneType"),
    (
        lambda given: tdcoll.free(X.to_sparse()),
        ValueError,
        "tensor must be one that tdcoll.empty() returned, got one of layout",
    ),
    # the backend
    (
        lambda given: tdcoll.distributed.explain("x"),
        TypeError,
        "group must be a process group, a DeviceMesh or None, got 'x'",
    ),
    (
        lambda given: tdcoll.distributed.Options(heap_bytes=1.5),
        TypeError,
        "heap_bytes must be an int, or a text such as '64M' or '2G'; got 1.5",
    ),
    (
        lambda given: tdcoll.distributed.Options(max_bytes_per_rank="1G"),
        TypeError,
        "max_bytes_per_rank must be an int, got '1G'",
    ),
]


def make(**options: Any) -> tdcoll.CollectiveContext:
    return tdcoll.CollectiveContext(**({"max_bytes_per_rank": 64} | options))


def test_every_case_is_refused_and_takes_nothing() -> None:
    """One job for all of them: what a refused call leaves behind would show in the next."""

    def host(pe: int) -> None:
        given = Given()
        taken, held = tdcoll.heap_info(), list(runtime.current().kept_alive)
        for call, error, text in CASES:
            with pytest.raises(error) as raised:
                call(given)
            assert str(raised.value).startswith(text), f"{raised.value} should be {text}"
            assert (tdcoll.heap_info(), list(runtime.current().kept_alive)) == (taken, held), text

    World(1).run(host)
    assert len(CASES) > 50


def test_what_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "f.json"
    file.write_text(shipped().text())
    assert tdcoll.distributed.Options(heap_bytes="1.5G").heap_bytes == 3 << 29

    def host(pe: int) -> None:
        for tuning in (None, shipped(), file, str(file)):
            make(tuning=tuning).close()
        for shape in (3, (3,), [3], torch.Size([3]), (torch.tensor(3),)):
            assert tdcoll.empty(shape, torch.int8).shape == (3,)
        make(group=[torch.tensor(0)], timeout_s=1e9).close()

    World(1).run(host)
