# SPDX-License-Identifier: Apache-2.0
"""PyTorch's internals: this PyTorch has them, nothing else uses them, and a PyTorch without them is
warned of."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d

from tdcoll.base import torch_internals
from tdcoll.distributed.work import CompletedWork, FallbackWork

ROOT = Path(__file__).resolve().parents[2]


def test_this_pytorch_has_them() -> None:
    assert torch_internals._batches() != torch_internals.batches_subclasses()
    count: Any = type(c10d._world).group_count
    assert count.fset is not None
    assert isinstance(c10d._world.group_count, int)
    tell: Any = nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    code: Any = nn.parallel.DistributedDataParallel.__init__.__code__
    told = {*code.co_names, *filter(lambda constant: isinstance(constant, str), code.co_consts)}
    assert len(inspect.signature(tell).parameters) == 2
    assert "parameters_to_ignore" in told
    frames: Any = torch._C._dynamo.eval_frame
    assert frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP) is not None
    assert callable(frames.set_code_exec_strategy)
    assert torch_internals.counts_references()


def test_nothing_else_replaces_or_resets_what_is_pytorchs() -> None:
    """Nor looks for objects among all that there are, but for the simulator's reports."""
    found = re.compile(
        r"__code__ =|group_count|get_objects|set_code_exec_strategy|_ddp_params_and_buffers_to_ignore"
    )
    sources = [path for path in (ROOT / "tdcoll").rglob("*.py") if "simulator" not in path.parts]
    users = {path.name for path in sources if found.search(path.read_text(encoding="utf-8"))}
    assert users == {"torch_internals.py"}


def test_a_pytorch_with_other_batches_is_left_as_it_is(monkeypatch, caplog) -> None:
    def other(ops: Any, more: Any = None) -> list[Any]:
        return []

    monkeypatch.setattr(c10d, "batch_isend_irecv", other)
    code = other.__code__
    torch_internals.batch_messages_of.__wrapped__(SimpleNamespace)
    assert other.__code__ is code
    assert [record.getMessage().split(": ")[0].split(" has ")[1] for record in caplog.records] == [
        "changed batch_isend_irecv"
    ]


def test_functions_are_not_compiled_where_dynamo_has_changed(monkeypatch) -> None:
    disabled: list[Any] = []
    monkeypatch.setattr(torch.compiler, "disable", lambda code: disabled.append(code) or code)
    monkeypatch.delattr(torch._C._dynamo.eval_frame, "_FrameExecStrategy")

    class Methods:
        def one(self) -> None:
            pass

    for code in (Methods, Methods.one):
        assert torch_internals.never_compiled(code) is code
    assert disabled == [Methods.one, Methods.one]


def test_a_pytorch_that_counts_references_in_another_way_is_said(monkeypatch, caplog) -> None:
    monkeypatch.setattr(torch_internals, "references", lambda work: 1)
    assert not torch_internals.counts_references.__wrapped__()
    assert ["counts references in another way" in line for line in caplog.messages] == [True]


def test_references_of_a_work() -> None:
    work = CompletedWork()
    assert torch_internals.references(work) == 1
    held = work.boxed()
    assert torch_internals.references(work) == 2
    del held
    assert torch_internals.references(work) == 1


@pytest.mark.parametrize("batches", [True, False])
def test_messages_are_one_batch_where_the_backend_has_batches(batches: bool, monkeypatch) -> None:
    """PyTorch before 2.14 looks at a group's very type. In checks of groups in tests/workers
    messages arrive."""
    asked: list[str] = []

    class Group(dist.ProcessGroup):
        def _get_backend(self, device: torch.device) -> Any:
            return SimpleNamespace(supports_coalescing=batches)

    def noting(name: str) -> Any:
        return lambda self, *given: asked.append(name) or f"work of {name}"

    for name in ("_start_coalescing", "_end_coalescing", "send", "recv"):
        setattr(Group, name, noting(name))
    function: Any = inspect.unwrap(dist.batch_isend_irecv)
    before = function.__code__, function.__globals__.get("_tdcoll_batch")
    make: Any = Group
    group = make(0, 8)
    monkeypatch.setitem(c10d._world.pg_group_ranks, group, {rank: rank for rank in range(8)})
    messages = [
        dist.P2POp(call, torch.ones(1), group=group, group_peer=3)
        for call in (dist.isend, dist.irecv)
    ]
    try:
        for _ in range(2):  # also where it has been done before
            torch_internals.batch_messages_of.__wrapped__(Group)
        works = dist.batch_isend_irecv(messages)
    finally:
        function.__code__, function.__globals__["_tdcoll_batch"] = before
    if batches:
        assert (asked, works) == (
            ["_start_coalescing", "send", "recv", "_end_coalescing"],
            ["work of _end_coalescing"],
        )
    else:
        assert (asked, works) == (["send", "recv"], ["work of send", "work of recv"])


def test_wrappers_are_found_without_a_walk(monkeypatch) -> None:
    """Those that were made since the watch began, those in the module, and none whose making has
    failed."""

    class Wrapper(nn.Module):
        def __init__(self, name: str, module: nn.Module, fails: bool = False) -> None:
            super().__init__()
            self.name = name
            self.module = module
            if not fails:
                self.reducer = "made"

    def living(module: nn.Module) -> set[str]:
        """Names, because pytest's assertions keep the values that they compare."""
        return {wrapper.name for wrapper in torch_internals.living_ddp(module)}  # type: ignore[attr-defined]

    monkeypatch.setattr(torch_internals, "DDP", Wrapper)
    model = nn.Linear(1, 1)
    early = Wrapper("early", nn.Linear(1, 1))
    torch_internals._ddp.discard(early)
    torch_internals.watch_ddp()
    # in a list, because assertions also keep the values of local variables
    wrappers = [Wrapper("late", model)]
    failed = Wrapper("failed", model, fails=True)
    assert living(model) == {"late"}
    assert living(nn.Sequential(early)) == {"early", "late"}
    wrappers.clear()
    assert living(model) == set()
    assert failed in torch_internals._ddp


class OldWork:
    """A work of the fallback backend as NCCL and PyTorch 2.11 have it: its error can't be asked for, and only
    ``synchronize`` orders the current stream behind it when its future is complete."""

    def __init__(self, error: Exception | None, complete: bool = True) -> None:
        self.error = error
        self.complete = complete
        self.ordered = 0

    def is_completed(self) -> bool:
        return self.complete

    def is_success(self) -> bool:
        raise NotImplementedError("WorkNCCL::isSuccess() is deprecated")

    def exception(self) -> None:
        raise TypeError("Unregistered type : std::__exception_ptr::exception_ptr")

    def synchronize(self) -> None:
        self.ordered += 1

    def wait(self) -> None:
        if self.error is not None:
            raise self.error

    def get_future(self) -> Any:
        future: Any = torch.futures.Future()
        if self.error is None:
            future.set_result([])
        else:
            future.set_exception(self.error)
        return future


def fallback_work(*works: OldWork, finish: Any = None, result: Any = ()) -> FallbackWork:
    return FallbackWork(works, finish, list(result), None)


def test_works_of_the_fallback_backend_have_their_errors_in_every_pytorch() -> None:
    wrong = RuntimeError("connection closed by peer")
    assert fallback_work(OldWork(None), OldWork(None)).exception() is None
    assert fallback_work(OldWork(None), OldWork(wrong)).exception() is wrong
    assert fallback_work(OldWork(wrong, complete=False)).exception() is None
    assert fallback_work(OldWork(None)).is_success()
    assert not fallback_work(OldWork(wrong)).is_success()


def test_futures_of_the_fallback_backend_are_complete_behind_copies_to_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A future of gloo's is complete before its copies to the GPU are."""
    gpu = torch.device("cuda", 3)
    works = OldWork(None), OldWork(None)
    done: list[Any] = []
    stream = SimpleNamespace(synchronize=lambda: done.append("stream"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: done.append(device) or stream)

    def finish() -> None:
        done.append([each.ordered for each in works])

    tensor = torch.ones(1)
    work = FallbackWork(works, finish, [tensor], gpu)
    assert work.get_future().wait() == [tensor]
    assert done == [[1, 1], gpu, "stream"]
    assert work.wait()
    assert done == [[1, 1], gpu, "stream"], "results are written once"


def test_futures_of_the_fallback_backend_raise_what_went_wrong() -> None:
    """As an error that C++ sees, which waits for the futures of hooks of DDP."""
    wrong = RuntimeError("connection closed by peer")
    future = fallback_work(OldWork(wrong)).get_future()
    with pytest.raises(RuntimeError, match="closed by peer"):
        future.wait()
    with pytest.raises(RuntimeError, match="closed by peer"):
        torch.futures.collect_all([future]).wait()[0].value()
