# SPDX-License-Identifier: Apache-2.0
"""What a context does when something has gone wrong: on one rank, on all, or before."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import on_ranks

import tdcoll
from tdcoll import runtime
from tdcoll.base.limits import MAX_BLOCKS
from tdcoll.collectives.sparse_all_reduce import context as sparse_context
from tdcoll.spec.constants import RECORD_VALID
from tdcoll.testing import World

HEAP = 1 << 18


def data(pe: int, call: int, count: int = 16) -> torch.Tensor:
    return torch.full((count,), 1000 * call + pe, dtype=torch.int32)


@pytest.mark.parametrize("how", ["close", "with"])
@on_ranks(2, heap_bytes=HEAP, on_timeout="expire")
def test_closing_tells_what_nobody_has_asked_for(pe: int, how: str) -> None:
    ctx = tdcoll.CollectiveContext(max_bytes_per_rank=64)
    if pe == 1:
        return
    tdcoll.all_gather(data(pe, 0), ctx=ctx)
    with pytest.raises(tdcoll.CollectiveTimeout, match="peer 1"):
        ctx.close() if how == "close" else ctx.__exit__(None, None, None)
    assert ctx.closed
    ctx.close()  # told once
    with pytest.raises(tdcoll.TdcollError, match="a wait has expired"):
        tdcoll.barrier()


@on_ranks(2, heap_bytes=HEAP, on_timeout="expire")
def test_a_failed_process_closes_its_healthy_contexts_alone(pe: int) -> None:
    healthy = tdcoll.CollectiveContext(max_bytes_per_rank=64)
    broken = tdcoll.CollectiveContext(max_bytes_per_rank=64)
    if pe == 1:
        return
    tdcoll.all_gather(data(pe, 0), ctx=broken)
    with pytest.raises(tdcoll.CollectiveTimeout):
        broken.check()
    healthy.close()
    broken.close()


@pytest.mark.parametrize("fits", ["nothing", "inbox only"])
@on_ranks(2, heap_bytes=HEAP)
def test_a_context_that_does_not_fit_takes_nothing(pe: int, fits: str) -> None:
    total = tdcoll.heap_info().total
    # two slots of two ranks: exactly the whole heap
    per_rank = total if fits == "nothing" else total // 4
    with pytest.raises(tdcoll.HeapExhaustedError, match="NVSHMEM_SYMMETRIC_SIZE"):
        tdcoll.CollectiveContext(max_bytes_per_rank=per_rank)
    assert tdcoll.heap_info().used == 0
    assert not runtime.current().kept_alive
    with tdcoll.CollectiveContext(max_bytes_per_rank=64) as ctx:
        assert tdcoll.all_gather(data(pe, 1), ctx=ctx).tolist() == [1000] * 16 + [1001] * 16


def _nothing_is_taken() -> None:
    assert tdcoll.heap_info().used == 0
    assert not runtime.current().kept_alive


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("max_bytes_per_rank", (64, 65)),
        ("chunks", (8, 9)),
        ("debug", (False, True)),
        ("flagged_bytes", (64, 65)),
        ("lamport_bytes", (0, 1)),
        ("max_blocks", (132, 133)),
    ],
)
@on_ranks(2, heap_bytes=HEAP)
def test_ranks_that_disagree_on_a_context_take_nothing(
    pe: int, name: str, values: tuple[Any, Any]
) -> None:
    given = {"max_bytes_per_rank": 64, name: values[pe]}
    text = rf"differ in {name} \(rank 0: {values[0]}, rank 1: {values[1]}\)$"
    with pytest.raises(tdcoll.RankMismatchError, match=text):
        tdcoll.CollectiveContext(**given)
    _nothing_is_taken()


PARTS_OF_MAKING = [
    (tdcoll.CollectiveContext, "tdcoll.calls.context.CollectiveContext._device_group"),
    (tdcoll.CollectiveContext, "tdcoll.calls.context.barrier"),
    (tdcoll.SparseContext, "tdcoll.collectives.sparse_all_reduce.context.LaunchCache"),
    (tdcoll.SparseContext, "tdcoll.collectives.sparse_all_reduce.context.RowMemory"),
]


@pytest.mark.parametrize(
    ("kind", "part"), PARTS_OF_MAKING, ids=lambda given: str(given).rpartition(".")[2]
)
def test_a_context_that_cannot_be_made_takes_nothing(
    kind: Any, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever goes wrong, and wherever: memory of the GPU that is not there, say."""
    capacity = (
        {"max_bytes_per_rank": 64} if kind is tdcoll.CollectiveContext else {"max_rows_per_rank": 4}
    )
    more = {} if kind is tdcoll.CollectiveContext else {"max_row_bytes": 16}

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("here")

    def host(pe: int) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(part, fail)
            with pytest.raises(RuntimeError, match="here"):
                kind(**capacity, **more)
        _nothing_is_taken()
        with kind(**capacity, **more):
            assert tdcoll.heap_info().used

    World(1, heap_bytes=HEAP).run(host)


def test_a_rank_that_cannot_make_its_context_keeps_the_others_from_having_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else they would write to memory that it has given back."""
    made = sparse_context.RowMemory

    def fail_on_one(*given: Any) -> Any:
        if runtime.current().rank == 1:
            raise RuntimeError("here")
        return made(*given)

    monkeypatch.setattr(sparse_context, "RowMemory", fail_on_one)

    def host(pe: int) -> None:
        with pytest.raises(
            RuntimeError, match="here" if pe else r"waited .* in 'barrier' for rank\(s\) \[1\]"
        ):
            tdcoll.SparseContext(max_rows_per_rank=4, max_row_bytes=16)
        _nothing_is_taken()

    World(2, heap_bytes=HEAP, on_timeout="expire").run(host)


def test_a_sparse_context_needs_ranks_of_a_node_that_can_store_to_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tdcoll.simulator.memory.MemoryView.peer_base", lambda view, pe: 0)

    def host(pe: int) -> None:
        with pytest.raises(tdcoll.ContextError, match="cannot store to each other's memory"):
            tdcoll.SparseContext(max_rows_per_rank=4, max_row_bytes=16)
        _nothing_is_taken()

    World(2, heap_bytes=HEAP).run(host)


@on_ranks(2, heap_bytes=HEAP)
def test_the_exchange_of_a_sparse_context_keeps_to_the_least_budget_of_all_ranks(pe: int) -> None:
    for given, most in (([None, None], MAX_BLOCKS), ([None, 64], 64), ([7, 64], 7), ([1, 2], 6)):
        with tdcoll.SparseContext(
            max_rows_per_rank=4, max_row_bytes=16, max_blocks=given[pe]
        ) as ctx:
            assert ctx.max_blocks == most
            assert ctx.capacities.beside_others == (most < MAX_BLOCKS)


def test_a_sparse_context_that_could_not_grow_refuses_calls_and_can_be_closed() -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("here")

    def host(pe: int) -> None:
        ctx = tdcoll.SparseContext(max_rows_per_rank=1, max_row_bytes=4, grow=True)
        rows = (torch.arange(3), torch.ones(3, 1), 3)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tdcoll.collectives.sparse_all_reduce.context.RowMemory", fail)
            with pytest.raises(RuntimeError, match="here"):
                tdcoll.sparse_all_reduce_rows(*rows, ctx=ctx)
        with pytest.raises(tdcoll.ContextError, match=r"it has lost its memory .* close"):
            tdcoll.sparse_all_reduce_rows(*rows, ctx=ctx)
        ctx.close()
        _nothing_is_taken()

    World(1, heap_bytes=HEAP).run(host)


@on_ranks(2, heap_bytes=HEAP)
def test_in_place_of_no_bytes_in_debug_mode(pe: int) -> None:
    """Such a tensor has no address: each rank used to compare where its own heap begins."""
    with tdcoll.CollectiveContext(max_bytes_per_rank=64, debug=True) as ctx:
        buffer = tdcoll.empty((2, 0))
        assert tdcoll.all_gather_(buffer, ctx=ctx) is buffer
        other = [tdcoll.empty(16, torch.int32), tdcoll.empty(16, torch.int32)]
        with pytest.raises(
            tdcoll.RankMismatchError, match=r"differ in offset in the symmetric heap \(rank 0: "
        ):
            tdcoll.all_gather_(other[pe], ctx=ctx)
        gathered = tdcoll.all_gather_(other[0], ctx=ctx)
        assert gathered.data_ptr() == other[0].data_ptr()


@on_ranks(2, heap_bytes=HEAP)
def test_contexts_outlive_their_variables(pe: int) -> None:
    """A kernel or a graph may still use the memory of a context that nobody refers to."""
    ctx = tdcoll.CollectiveContext(max_bytes_per_rank=64)
    held = runtime.current().kept_alive
    assert ctx in held.values()
    assert ctx.monitor in held.values()
    ctx.close()
    assert not held


@on_ranks(2, heap_bytes=HEAP)
def test_ranks_must_free_the_same_tensor(pe: int) -> None:
    tensors = [tdcoll.empty(16), tdcoll.empty(16)]
    with pytest.raises(tdcoll.RankMismatchError, match="offset of the tensor"):
        tdcoll.free(tensors[pe])
    assert tdcoll.heap_info().allocations == 2
    for tensor in tensors:
        tdcoll.free(tensor)


@on_ranks(3, heap_bytes=HEAP)
def test_a_subgroup_frees_without_being_told_who_it_is(pe: int) -> None:
    if pe != 1:
        tdcoll.free(tdcoll.empty(16, group=[2, 0]))
        assert tdcoll.heap_info().used == 0


class Driver:
    """What a context asks CUDA, with the answers of a test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.device, self.stream, self.captures, self.asked = 1, 0, False, 0
        self.waited: list[Any] = []
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: self.device, raising=False)
        monkeypatch.setattr(
            torch._C,
            "_cuda_getCurrentRawStream",
            lambda index: self.stream + index - 1,
            raising=False,
        )
        monkeypatch.setattr(
            torch._C, "_cuda_isCurrentStreamCapturing", self.capturing, raising=False
        )
        monkeypatch.setattr(torch.cuda, "current_device", lambda: self.device)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.current())

    def current(self) -> Any:
        return SimpleNamespace(cuda_stream=self.stream, wait_stream=self.waited.append)

    def capturing(self) -> bool:
        self.asked += 1
        return self.captures


def begin(ctx: Any) -> None:
    """Do what a call does before its arguments are looked at."""
    ctx.overcome(ctx.find_obstacle("call"), "call")


@pytest.mark.parametrize("bound", [0, 640])
def test_the_fast_path_is_for_the_last_stream_outside_of_graphs(
    bound: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = Driver(monkeypatch)
    for module in ("budget", "checks"):
        monkeypatch.setattr(f"tdcoll.calls.{module}.capture_of", lambda stream: 0)

    def host(pe: int) -> None:
        ctx = tdcoll.CollectiveContext(max_bytes_per_rank=64)
        ctx._cuda, ctx._index, ctx.order.handle = True, 1, bound
        cuda.stream = bound
        assert ctx.check_fast() == bound
        assert (ctx.capturing, ctx.captured) == (False, False)
        assert cuda.asked == (bound != 0)  # CUDA's default stream cannot be captured
        cuda.device = 0
        assert ctx.check_fast() is None
        with pytest.raises(tdcoll.ContextError, match="the current device is cuda:0"):
            begin(ctx)
        cuda.device, cuda.stream = 1, 320
        last = ctx.order.stream
        assert (ctx.check_fast(), cuda.waited) == (320, [last])
        cuda.captures = True
        for cuda.stream in (320, bound) if bound else (320,):
            ctx.captured = False
            assert ctx.check_fast() is None
            begin(ctx)
            assert (ctx.capturing, ctx.captured) == (True, True)
        cuda.captures, cuda.stream = False, 320
        assert ctx.check_fast() == 320
        assert (ctx.capturing, ctx.captured) == (False, True)
        ctx.debug = True
        assert ctx.check_fast() is None
        ctx.debug, ctx._cuda = False, False
        ctx.monitor._record[RECORD_VALID.value] = 1
        assert ctx.check_fast() is None
        ctx.monitor._record[RECORD_VALID.value] = 0
        ctx.close()
        assert ctx.check_fast() is None

    World(1, heap_bytes=HEAP).run(host)


def test_contexts_of_one_lane_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Driver(monkeypatch)
    captured: set[int] = set()
    monkeypatch.setattr("tdcoll.calls.checks.capture_of", captured.__contains__)

    def host(pe: int) -> None:
        first = tdcoll.CollectiveContext(max_bytes_per_rank=64)
        second = tdcoll.CollectiveContext(max_bytes_per_rank=64, _order=first.order)
        for ctx in (first, second):
            ctx._cuda, ctx._index = True, 1
        for ctx, cuda.stream in ((first, 320), (second, 640), (first, 320)):
            assert ctx.check_fast() == first.check_fast() == second.check_fast() == cuda.stream
        assert [stream and stream.cuda_stream for stream in cuda.waited] == [None, 320, 640]
        captured.add(320)
        cuda.stream = 640
        with pytest.raises(tdcoll.ContextError, match="is being captured now"):
            begin(second)
        assert first.order.handle == 320
        for ctx in (first, second):
            ctx._cuda = False
            ctx.close()

    World(1, heap_bytes=HEAP).run(host)


@on_ranks(2, heap_bytes=HEAP)
def test_debug_sees_contexts_used_in_another_order(pe: int) -> None:
    first = tdcoll.CollectiveContext(max_bytes_per_rank=64, debug=True)
    second = tdcoll.CollectiveContext(max_bytes_per_rank=64, debug=True)
    with pytest.raises(tdcoll.RankMismatchError, match="all_gather arguments"):
        tdcoll.all_gather(data(pe, 0), ctx=first if pe == 0 else second)


@on_ranks(2, heap_bytes=HEAP)
def test_a_context_of_an_ended_job_is_refused(pe: int) -> None:
    ctx = tdcoll.CollectiveContext(max_bytes_per_rank=64)
    runtime.current().closed = True
    with pytest.raises(tdcoll.NotInitializedError, match="has ended"):
        tdcoll.all_gather(data(pe, 0), ctx=ctx)
    ctx.close()


def test_the_drop_in_context_grows_as_far_as_the_heap_has_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tdcoll.base.limits._SENT_BYTES", 1 << 10)

    def host(pe: int) -> None:
        total = tdcoll.heap_info().total
        # A context takes four times its capacity here: the last fits neither beside the one before
        # nor doubled.
        for fraction in (64, 16, 6, 5):
            count = total // fraction // 4
            mine = data(pe, fraction, count)
            out = torch.empty(2 * count, dtype=torch.int32)
            tdcoll.distributed.all_gather_into_tensor(out, mine)
            assert out.tolist() == [1000 * fraction] * count + [1000 * fraction + 1] * count
        contexts = runtime.current().contexts
        assert len(contexts) == 1, "the smaller ones are freed"

    World(2, heap_bytes=2 << 20).run(host)
