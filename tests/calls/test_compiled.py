# SPDX-License-Identifier: Apache-2.0
"""Own calls in code that torch.compile compiles: the graph breaks, one warning says so, and the
result is as eager.

One rank is enough, because Dynamo sees the host's part of a call.
``tests/workers/operators_checks.py`` has several.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton.language as tl
from ranks import on_ranks
from torch._dynamo import convert_frame
from torch._dynamo.exc import Unsupported

import tdcoll
import tdcoll.distributed
import tdcoll.fused
import tdcoll.language as tdl
from tdcoll.base import torch_internals

on_one_rank = on_ranks(1, heap_bytes=1 << 26)

IDS = torch.tensor([0, 2])
ROWS = torch.ones(2, 1)
WEIGHT = torch.full((8,), 2.0, requires_grad=True)


@tdcoll.jit
def threes(out):
    tl.store(out + tl.arange(0, 4), tl.zeros((4,), tl.float32) + 3)


def into(
    call: Callable[..., Any], *more: Any, size: int = 8, **named: Any
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that has ``call`` write into a new tensor of this size."""

    def function(x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(size)
        call(out, x * 2, *more, **named)
        return out + 1

    return function


def beside(call: Callable[[], Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that makes a call between two operations."""

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        call()
        return y + 1

    return function


def sparse(x: torch.Tensor) -> torch.Tensor:
    whole = tdcoll.sparse_all_reduce(ROWS_OF_TABLE[0])
    return whole.to_dense() + x[0]


ROWS_OF_TABLE = [torch.sparse_coo_tensor(IDS[None], ROWS, (4, 1), check_invariants=False)]


def padded(x: torch.Tensor) -> torch.Tensor:
    with tdcoll.SparseContext(max_rows_per_rank=8, max_row_bytes=16) as ctx:
        return tdcoll.sparse_all_reduce_padded(IDS, ROWS * x[0], 4, ctx=ctx).values.clone() + 1


def with_own_context(x: torch.Tensor) -> torch.Tensor:
    with tdcoll.CollectiveContext() as ctx:
        y = tdcoll.all_reduce(x * 2, ctx=ctx)
        ctx.check()
        return y + 1


def in_symmetric_memory(x: torch.Tensor) -> torch.Tensor:
    memory = tdcoll.empty(8)
    memory.copy_(x)
    y = tdcoll.all_gather_(memory) + 1
    tdcoll.copy_on_stream(tdcoll.peer_tensor(memory, 0), y)
    z = memory * 2
    tdcoll.free(memory)
    return z


def by_signal(x: torch.Tensor) -> torch.Tensor:
    flag = tdcoll.zeros(1, torch.int64)
    tdcoll.write_on_stream(flag, 1)
    tdcoll.wait_on_stream(flag, tdl.CMP_GE, 1)
    return x + 1


def asynchronous(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    work: Any = tdcoll.distributed.all_reduce(y, async_op=True)
    work.wait()
    return y + 1


def launching(x: torch.Tensor) -> torch.Tensor:
    out = x[:4] * 2
    threes[(1,)](out)
    return out + 1


def monitored(x: torch.Tensor) -> torch.Tensor:
    monitor = tdcoll.WaitMonitor(timeout_s=5)
    monitor.check()
    return x + 1


def with_gradient(x: torch.Tensor) -> torch.Tensor:
    """The backward pass begins within the compiled function, too."""
    (grad,) = torch.autograd.grad((tdcoll.all_reduce(x * WEIGHT) ** 2).sum(), WEIGHT)
    return grad + 1


def norm(x: torch.Tensor) -> torch.Tensor:
    x = x.view(1, 8)
    return tdcoll.fused.all_reduce_rms_norm(x * 2, x, torch.ones(8))[0] + 1


torchs = tdcoll.distributed

BROKEN: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], list[str]]] = {
    "all_reduce": (lambda x: tdcoll.all_reduce(x * 2) + 1, ["all_reduce"]),
    "all_reduce_": (lambda x: tdcoll.all_reduce_(x * 2) + 1, ["all_reduce_"]),
    "all_gather": (lambda x: tdcoll.all_gather(x * 2) + 1, ["all_gather"]),
    "all_gather_": (
        in_symmetric_memory,
        ["empty", "all_gather_", "peer_tensor", "copy_on_stream", "free"],
    ),
    "reduce_scatter": (lambda x: tdcoll.reduce_scatter(x * 2) + 1, ["reduce_scatter"]),
    "all_to_all": (lambda x: tdcoll.all_to_all(x * 2) + 1, ["all_to_all"]),
    "all_reduce_rms_norm": (norm, ["fused.all_reduce_rms_norm"]),
    "sparse": (sparse, ["sparse_all_reduce"]),
    "rows": (
        lambda x: tdcoll.sparse_all_reduce_rows(IDS, ROWS * x[0], 4)[1] + 1,
        ["sparse_all_reduce_rows"],
    ),
    "padded": (padded, ["SparseContext"]),
    "context": (with_own_context, ["CollectiveContext"]),
    "signal": (by_signal, ["zeros", "write_on_stream", "wait_on_stream"]),
    "check": (beside(lambda: tdcoll.check()), ["check"]),
    "barrier": (beside(lambda: tdcoll.barrier()), ["barrier"]),
    "barrier_on_stream": (beside(lambda: tdcoll.barrier_on_stream()), ["barrier_on_stream"]),
    "heap_info": (lambda x: x + tdcoll.heap_info().total, ["heap_info"]),
    "explain": (lambda x: x + len(str(tdcoll.explain("all_reduce", x))), ["explain"]),
    "monitor": (monitored, ["WaitMonitor", "WaitMonitor.check"]),
    "kernel": (launching, ["kernel threes"]),
    "gradient": (with_gradient, ["all_reduce"]),
    "torch's all_reduce": (asynchronous, ["distributed.all_reduce"]),
    "torch's all_gather": (
        into(torchs.all_gather_into_tensor),
        ["distributed.all_gather_into_tensor"],
    ),
    "torch's reduce_scatter": (
        into(torchs.reduce_scatter_tensor),
        ["distributed.reduce_scatter_tensor"],
    ),
    "torch's all_to_all": (into(torchs.all_to_all_single), ["distributed.all_to_all_single"]),
}
"""Functions with calls that Dynamo must not trace, and the names that the warnings must have."""

TRACED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rank": lambda x: x + tdcoll.rank() + tdcoll.world_size(),
    "device": lambda x: x + torch.ones(8, device=tdcoll.device()),
    "topology": lambda x: x + tdcoll.topology().n_nodes,
    "is_initialized": lambda x: x + 1 if tdcoll.is_initialized() else x,
    "match_indices": lambda x: x + tdcoll.match_indices(IDS, IDS).sum(),
}
"""Functions with calls that launch nothing and exchange nothing."""

_REASON = re.compile(r"torch\.compile: (?:tdcoll\.)?(.+?) is not traced")


@pytest.fixture
def warnings_of(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], list[str]]:
    """Let every function warn once more, and return what names the warnings have."""
    told: set[Any] = set()

    def once(reason: Any) -> str:
        if reason not in told:
            told.add(reason)
            torch_internals._log.warning("torch.compile: %s", reason._text)
        return str(reason._text)

    monkeypatch.setattr(torch_internals._BreakReason, "__str__", once)
    torch._dynamo.reset()
    return lambda: [found[1] for found in map(_REASON.search, caplog.messages) if found]


@pytest.mark.parametrize("name", BROKEN)
@on_one_rank
def test_the_graph_breaks_and_one_warning_says_so(
    pe: int, name: str, warnings_of: Callable[[], list[str]]
) -> None:
    function, told = BROKEN[name]
    x = torch.arange(8.0) + 1
    wanted = function(x)
    convert_frame.input_codes.seen.clear()
    compiled = torch.compile(function, backend="aot_eager")
    for _ in range(2):
        assert torch.equal(compiled(x), wanted)
    warned = warnings_of()
    assert warned[: len(told)] == told
    assert len(set(warned)) == len(warned)
    tried = [code().co_filename for code in convert_frame.input_codes.seen if code() is not None]
    assert __file__ in tried
    assert not [file for file in tried if "/tdcoll/" in file], tried
    assert torch.equal(function(x), wanted)  # no context was lost


@pytest.mark.parametrize("name", BROKEN)
@on_one_rank
def test_one_whole_graph_is_refused_with_the_reason(
    pe: int, name: str, warnings_of: Callable[[], list[str]]
) -> None:
    function, told = BROKEN[name]
    x = torch.arange(8.0) + 1
    wanted = function(x)
    with pytest.raises(
        Unsupported, match=re.escape(told[0]) + r" is not traced: .* operator|can be traced"
    ):
        torch.compile(function, backend="aot_eager", fullgraph=True)(x)
    assert torch.equal(function(x), wanted)


@pytest.mark.parametrize("name", TRACED)
@on_one_rank
def test_facts_are_traced(pe: int, name: str, warnings_of: Callable[[], list[str]]) -> None:
    function = TRACED[name]
    x = torch.arange(8.0)
    assert torch.equal(torch.compile(function, backend="aot_eager", fullgraph=True)(x), function(x))
    assert not warnings_of()


def test_every_warning_of_a_dense_call_names_its_operator() -> None:
    import tdcoll.ops

    named = {*tdcoll.ops.operators, "all_reduce_rms_norm"}
    functions = [
        getattr(tdcoll, name) for name in ("all_gather_", "all_reduce_", *tdcoll.ops.operators)
    ]
    functions += [
        tdcoll.fused.all_reduce_rms_norm,
        torchs.all_gather_into_tensor,
        torchs.reduce_scatter_tensor,
    ]
    functions += [torchs.all_reduce, torchs.all_to_all_single]
    found = set()
    for function in functions:
        operator = re.search(r"torch\.ops\.tdcoll\.(\w+) ", function._torchdynamo_disable_msg._text)
        assert operator is not None, function
        assert hasattr(torch.ops.tdcoll, operator[1])
        found.add(operator[1])
    assert found == named


def test_the_warning_comes_once(caplog: pytest.LogCaptureFixture) -> None:
    reason = torch_internals._BreakReason("tdcoll.none is not traced")
    assert [str(reason), f"{reason}"] == ["tdcoll.none is not traced"] * 2
    assert caplog.messages == ["torch.compile: tdcoll.none is not traced"]


def test_public_functions_are_themselves() -> None:
    """A wrapper would cost every eager call time."""
    from tdcoll.collectives.all_reduce import op

    assert tdcoll.all_reduce is op.all_reduce
    assert not hasattr(tdcoll.all_reduce, "__wrapped__")
